"""The codecs of leaves: from the bytes of many rows to a column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.errors import SchemaError, SourceError
from destrier.formats.advice import with_way_out
from destrier.formats.gather import binary, fixed, list_offsets, packed, primitive
from destrier.formats.litdata.arrayleaf import ArrayCodec
from destrier.formats.litdata.cells import Cells, Codec, text_array
from destrier.formats.litdata.jsonleaf import JsonCodec
from destrier.formats.litdata.nested import natural_type
from destrier.formats.media import content_type
from destrier.formats.pixels import wrong_pixels

__all__ = ["PIL_TYPE", "PREFIX", "Options", "leaf_codec"]

PREFIX = "litdata:"
"""Before the serializer's name in a field's metadata."""

_EXTENSIONS = {"tifffile": "tiff"}
_MEDIA = (
    *("bytes", "file", "jpeg", "image", "tiff", "tifffile", "video", "audio", "nifti", "mesh"),
    *("pdf", "graph"),
)

PIL_TYPE = pa.struct(
    [
        ("width", pa.uint32()),
        ("height", pa.uint32()),
        ("mode", pa.string()),
        ("data", pa.large_binary()),
    ]
)


@dataclass(frozen=True)
class Options:
    """What the user decides about columns.

    Attributes:
        ragged: The columns whose arrays are lists whatever their shapes; True for all.
        json_text: Whether JSON leaves are text even where their type is known.
        allow_pickle: Whether leaves may be unpickled.
    """

    ragged: bool | tuple[str, ...] = False
    json_text: bool = False
    allow_pickle: bool = False

    def is_ragged(self, column: str) -> bool:
        """Whether the arrays of a top-level column are to be lists."""
        return self.ragged if isinstance(self.ragged, bool) else column in self.ragged


class _Number(Codec):
    def __init__(self, encoding: str, kind: pa.DataType, dtype: str) -> None:
        super().__init__(encoding)
        self._type, self._dtype = kind, np.dtype(dtype)

    @property
    def type(self) -> pa.DataType:
        return self._type

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:
        size = self._dtype.itemsize
        cells.width(size, f"a value of {self.encoding}")
        values = fixed(cells.data, cells.starts, size).view(self._dtype)
        if pa.types.is_boolean(self._type) and (odd := np.flatnonzero(values > 1)).size:
            row = int(odd[0])
            raise cells.place.damaged(f"is the byte {values[row]}, which is no bool: 0 or 1", row)
        return primitive(values, kind)


class _Text(Codec):
    type = pa.string()

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:  # noqa: ARG002
        return text_array(cells)


class _Media(Codec):
    type = pa.large_binary()
    linkable = True

    def __init__(self, encoding: str) -> None:
        super().__init__(encoding)
        extension = encoding.rsplit(":", maxsplit=1)[-1].lower()
        self.content_type = content_type(_EXTENSIONS.get(extension, extension))

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:  # noqa: ARG002
        return cells.whole()


class _Pil(Codec):
    type = PIL_TYPE

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:  # noqa: ARG002
        head = cells.header(12, "an image's size and mode").view("<u4").reshape(-1, 3)
        modes = head[:, 2].astype(np.int64)
        starts = cells.starts + 12
        if (long := np.flatnonzero(modes + 12 > cells.sizes)).size:
            row = int(long[0])
            raise cells.place.damaged(f"claims a mode of {modes[row]:,} letters", row)
        mode = text_array(Cells(cells.data, starts, modes, cells.place))
        sizes = cells.sizes - 12 - modes
        wrong = wrong_pixels(head[:, 0], head[:, 1], mode, sizes)
        if wrong is not None:
            raise cells.place.damaged(wrong[1], wrong[0])
        data = binary(cells.data, starts + modes, sizes)
        size = [primitive(head[:, number], pa.uint32()) for number in (0, 1)]
        return pa.StructArray.from_arrays([*size, mode, data], fields=list(PIL_TYPE))


class _JpegArray(Codec):
    type = pa.list_(pa.large_binary())
    content_type = "image/jpeg"

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:
        counts = cells.header(4, "a number of images").view("<u4").astype(np.int64)
        heads = 4 + 4 * counts
        if (long := np.flatnonzero(heads > cells.sizes)).size:
            row = int(long[0])
            raise cells.place.damaged(f"claims {counts[row]:,} images", row)
        sizes = packed(binary(cells.data, cells.starts + 4, 4 * counts)).view("<u4")
        sizes = sizes.astype(np.int64)
        offsets = list_offsets(counts)
        ends = list_offsets(sizes)
        totals = ends[offsets[1:]] - ends[offsets[:-1]]
        if (odd := np.flatnonzero(heads + totals != cells.sizes)).size:
            row = int(odd[0])
            raise cells.place.damaged(
                f"has {cells.sizes[row]:,} bytes, its images have {totals[row]:,}", row
            )
        # within a row the images follow one another
        begins = np.repeat(cells.starts + heads - ends[offsets[:-1]], counts) + ends[:-1]
        images = binary(cells.data, begins, sizes)
        return pa.Array.from_buffers(
            kind, len(counts), [None, pa.py_buffer(offsets.astype(np.int32))], children=[images]
        )


class _Pickle(Codec):
    """Unpickled only where the user allowed it, and then encoded like a row of their own."""

    def __init__(self, encoding: str) -> None:
        super().__init__(encoding)
        self._type: pa.DataType | None = None

    @property
    def type(self) -> pa.DataType | None:
        return self._type

    def observe(self, cells: Cells) -> None:
        self._type = self._encode(cells, None if self._type is None else self._type).type

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:
        return self._encode(cells, kind)

    def _encode(self, cells: Cells, kind: pa.DataType | None) -> pa.Array:
        from destrier.encoding.encoder import RowEncoder

        name = cells.place.column or "value"
        schema = None if kind is None else pa.schema([pa.field(name, kind)])
        rows = ({name: value} for value in self._values(cells))
        try:
            batches = list(RowEncoder(schema).batches(rows))
        except SourceError as error:
            wrong = SchemaError if isinstance(error, SchemaError) else SourceError
            row = None if error.row is None else error.row + cells.place.first
            text = with_way_out(str(error), "or leave the column out with columns=")
            raise wrong(
                f"{cells.place.file}: {text}", file=cells.place.file, row=row, column=name
            ) from None
        table = pa.Table.from_batches(batches, batches[0].schema if batches else schema)
        return table.column(0).combine_chunks()

    def _values(self, cells: Cells) -> Iterator[Any]:
        import pickle

        for row, item in enumerate(cells.whole().to_pylist()):
            try:
                yield pickle.loads(item)  # noqa: S301 - the user allowed it
            except Exception as error:
                raise cells.place.damaged(f"cannot be unpickled: {error!r}", row) from None


def leaf_codec(  # noqa: PLR0911 - a table of serializers
    encoding: str, column: str, types: Any, options: Options, file: str
) -> Codec:
    """The codec of a leaf.

    Args:
        encoding: Its name in the index's ``data_format``.
        column: The column it belongs to, with dots before nested fields.
        types: The type that LitData fused for it, or None.
        options: The user's.
        file: The index, for messages.

    Raises:
        SourceError: If the serializer is not known, or needs a permission.
    """
    name = encoding.split(":", maxsplit=1)[0]
    if name in ("str", "text"):
        return _Text(encoding)
    if name in ("int", "float", "bool"):
        kinds = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
        return _Number(encoding, kinds[name], {"int": "<i8", "float": "<f8", "bool": "u1"}[name])
    if name in ("numpy", "tensor", "no_header_numpy", "no_header_tensor"):
        return ArrayCodec(encoding, options.is_ragged(column.split(".", maxsplit=1)[0]))
    if name == "json":
        return JsonCodec(encoding, None if options.json_text else natural_type(types))
    if name == "pil":
        return _Pil(encoding)
    if name == "jpeg_array":
        return _JpegArray(encoding)
    if name == "pickle" or encoding == "graph:pickle":
        if not options.allow_pickle:
            raise SourceError(
                f"{file}: column {column!r} is pickled; unpickling runs code that the file brings: "
                "pass allow_pickle=True if you trust it, or leave the column out with columns=",
                file=file,
                column=column,
            )
        return _Pickle(encoding) if name == "pickle" else _Media(encoding)
    if name in _MEDIA:
        return _Media(encoding)
    raise SourceError(
        f"{file}: column {column!r} is written by the serializer {encoding!r}, which is not one "
        "of LitData's: leave it out with columns=",
        file=file,
        column=column,
    )
