"""Writes tables as MDS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from destrier.errors import ColumnError, SourceError
from destrier.files import Store
from destrier.formats.gather import bounds_of, even, joined, list_offsets
from destrier.formats.mds.arrays import Ragged, Tensor
from destrier.formats.mds.columns import PREFIX, by_name
from destrier.formats.mds.encodings import DTYPES, Binary, Encoding, Scalar, Text
from destrier.formats.mds.images import Pil
from destrier.formats.mds.index import INDEX
from destrier.formats.mds.numbers import Number
from destrier.formats.mds.stored import LIMIT
from destrier.formats.media import CONTENT_TYPE_KEY
from destrier.sink import Back, Sink
from destrier.writing.source import ENCODING_KEY

__all__ = ["MdsSink", "exported", "open_sink"]

_SHARD_BYTES = 1 << 28  # held in memory, since the offsets stand before the rows
_CONTENT_TYPE_IN_MAIL = b"content-type"  # the spelling that tables made by hand often have
_IMAGES = {b"image/jpeg": "jpeg", b"image/png": "png"}


def exported(field: pa.Field) -> Encoding | None:
    """The encoding that a column is written in: the one it came from, else by its type.

    Example:
        >>> exported(pa.field("label", pa.int32())).name
        'int32'
    """
    metadata = field.metadata or {}
    key = metadata.get(ENCODING_KEY, b"")
    if key.startswith(PREFIX):
        original = _original(key.removeprefix(PREFIX).decode(), field.type)
        if original is not None:
            return original
    content_type = metadata.get(CONTENT_TYPE_KEY) or metadata.get(_CONTENT_TYPE_IN_MAIL, b"")
    return _natural(field.type, content_type)


def _original(name: str, kind: pa.DataType) -> Encoding | None:
    """The encoding of a name, if it holds the type."""
    found = by_name(name)
    if isinstance(found, Ragged):
        return Ragged.fitting(name, kind)
    if isinstance(found, Number) and (
        pa.types.is_string(kind)
        or (name == "str_int" and (pa.types.is_int64(kind) or _is_whole(kind)))
        or (name == "str_float" and pa.types.is_float64(kind))
        or (name == "str_decimal" and (pa.types.is_decimal(kind) or pa.types.is_int64(kind)))
    ):
        return Number(name, kind)
    return found if found is not None and found.type == kind else None


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind) and kind.scale == 0)


def _natural(kind: pa.DataType, content_type: bytes) -> Encoding | None:
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return _nested(kind, content_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return Text("json" if content_type == b"application/json" else "str")
    if _is_binary(kind):
        return Binary(_IMAGES.get(content_type, "bytes"))
    if pa.types.is_decimal(kind):
        return Number("str_decimal", kind)
    dtype = _dtype(kind)
    return None if dtype is None else Scalar(dtype, dtype)


def _nested(kind: pa.DataType, content_type: bytes) -> Encoding | None:
    if isinstance(kind, pa.FixedShapeTensorType):
        permuted = kind.permutation not in (None, list(range(len(kind.shape))))
        return None if permuted else _tensor(kind.value_type, tuple(kind.shape))
    if pa.types.is_fixed_size_list(kind):
        return _tensor(kind.value_type, (kind.list_size,))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list(kind.value_type, content_type)
    return _struct(kind) if pa.types.is_struct(kind) else None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _dtype(kind: pa.DataType) -> str | None:
    """The name of a number's type in numpy, if MDS has it."""
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    name = str(np.dtype(kind.to_pandas_dtype()))
    return name if name in DTYPES else None


def _tensor(kind: pa.DataType, shape: tuple[int, ...]) -> Encoding | None:
    dtype = _dtype(kind)
    if dtype is None or not shape or min(shape) < 1:
        return None
    return Tensor(f"ndarray:{dtype}:{','.join(map(str, shape))}", dtype, shape)


def _list(kind: pa.DataType, content_type: bytes) -> Encoding | None:
    if kind == Pil().type:
        return by_name("list[pil]")
    if _is_binary(kind) and content_type in _IMAGES:
        return by_name(f"list[{_IMAGES[content_type]}]")
    dtype = _dtype(kind)
    return None if dtype is None else Ragged(f"ndarray:{dtype}", dtype, "list")


def _struct(kind: pa.StructType) -> Encoding | None:
    if kind == Pil().type:
        return Pil()
    for dtype in DTYPES:
        if found := Ragged.fitting(f"ndarray:{dtype}", kind):
            if found.form == "raw":  # any dtype
                return Ragged("ndarray", form="raw")
            return found
    return None


def _as_stored(array: pa.Array, encoding: Encoding) -> pa.Array:
    """The same values in the type that the encoding writes."""
    if array.type == encoding.type:
        return array
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        storage = pa.FixedSizeListArray.from_arrays(array.flatten(), size)
        return pa.ExtensionArray.from_storage(encoding.type, storage)
    return array.cast(encoding.type)


@dataclass
class _Rows:
    """The rows of the next shard."""

    parts: list[pa.LargeBinaryArray]
    rows: int = 0
    nbytes: int = 0  # with their offsets


class MdsSink(Sink):
    """Writes MDS shards, and `index.json` after them.

    Columns that came from MDS are written in the encoding that they had, others by their type.

    Example:
        >>> MdsSink().check(pa.schema([("ready", pa.bool_())]))
        Traceback (most recent call last):
        ...
        destrier.errors.ColumnError: MDS cannot hold the column 'ready' (bool): leave it out with...
    """

    format: ClassVar[str] = "mds"

    def check(self, schema: pa.Schema) -> None:
        """Raise unless MDS can hold every column.

        Raises:
            ColumnError: Naming each column that it cannot hold.
        """
        refused = [field for field in schema if exported(field) is None]
        if refused:
            shown = ", ".join(f"{field.name!r} ({field.type})" for field in refused)
            word = "columns" if len(refused) > 1 else "column"
            raise ColumnError(
                f"MDS cannot hold the {word} {shown}: leave it out with columns=, or add a column "
                "of numbers, text, bytes, or arrays of numbers instead"
            )
        if not schema.names:
            raise ColumnError("MDS cannot hold rows without columns")

    def back(self, schema: pa.Schema) -> Back:
        """How an export of these columns is read again."""
        encodings = _encodings(schema)
        forms = {n: e.form for n, e in encodings.items() if isinstance(e, Ragged)}
        decimals = {n: e.type for n, e in encodings.items() if isinstance(e, Number)}
        options = {
            "ragged": [name for name, form in forms.items() if form == "struct"],
            "raw_arrays": [name for name, form in forms.items() if form == "raw"],
            "decimals": {name: _decimals(kind) for name, kind in decimals.items()},
        }
        return Back({name: name for name in encodings}, options)

    def write(
        self, store: Store, number: int, batches: Iterator[pa.RecordBatch]
    ) -> list[dict[str, Any]]:
        """Write a range of rows as one shard, or more if it is large.

        Returns:
            Their records in the index.

        Raises:
            SourceError: If a value is null, or cannot be held; naming row and column.
        """
        records: list[dict[str, Any]] = []
        held = _Rows([])
        written = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            encodings = _encodings(batch.schema)
            rows = _encode(batch, encodings, written)
            sizes = np.diff(bounds_of(rows)) + 4
            room = _room(encodings)
            ends = list_offsets(sizes)
            first = 0
            while first < len(rows):
                last = int(np.searchsorted(ends, ends[first] + _SHARD_BYTES - held.nbytes, "right"))
                last = max(last - 1, first)
                if last == first and not held.rows:
                    if sizes[first] >= room:
                        raise SourceError(
                            f"it takes {sizes[first]:,} bytes; a shard of MDS holds {room:,}",
                            row=written + first,
                        )
                    last = first + 1
                held.parts.append(rows[first:last])
                held.rows += last - first
                held.nbytes += int(ends[last] - ends[first])
                if last < len(rows):
                    records.append(_flush(store, number, len(records), encodings, held))
                    held = _Rows([])
                first = last
            written += batch.num_rows
        if held.rows:
            records.append(_flush(store, number, len(records), encodings, held))
        return records

    def finish(self, store: Store, infos: list[Any]) -> None:
        """Write the index."""
        records = [record for info in infos for record in info]
        text = json.dumps({"version": 2, "shards": records}, sort_keys=True)
        with store.create(INDEX) as file:
            file.write(text.encode())


def open_sink() -> MdsSink:
    """Make what writes an MDS export; it has no options."""
    return MdsSink()


def _decimals(kind: pa.DataType) -> str:
    """As ``decimals=`` names a type."""
    if pa.types.is_decimal(kind) and 0 <= kind.scale <= kind.precision:
        return f"decimal({kind.precision}, {kind.scale})"
    return "int64" if pa.types.is_int64(kind) else "text"


def _encodings(schema: pa.Schema) -> dict[str, Encoding]:
    """By name, in the order of the bytes."""
    found: dict[str, Encoding] = {}
    for name in sorted(schema.names):
        encoding = exported(schema.field(name))
        if encoding is None:
            raise ColumnError(f"MDS cannot hold the column {name!r} ({schema.field(name).type})")
        found[name] = encoding
    return found


def _encode(
    batch: pa.RecordBatch, encodings: dict[str, Encoding], first: int
) -> pa.LargeBinaryArray:
    """The bytes of each row."""
    parts: list[pa.LargeBinaryArray] = []
    lengths: list[Any] = []
    for name, encoding in encodings.items():

        def fail(index: int, problem: str, name: str = name) -> SourceError:
            row = first + index
            return SourceError(f"column {name!r} {problem}", row=row, column=name)

        array = batch.column(name)
        if array.null_count:
            index = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            raise fail(index, f'is null, and MDS has no nulls: filter="{name} IS NOT NULL"')
        encoded = encoding.encode(_as_stored(array, encoding), fail)
        if encoding.width is None:
            sizes = np.diff(bounds_of(encoded))
            if (sizes >= LIMIT).any():
                index = int(np.argmax(sizes))
                raise fail(index, f"has {sizes[index]:,} bytes, more than MDS holds")
            lengths.append(sizes.astype("<u4"))
        parts.append(encoded)
    if lengths:
        head = np.stack(lengths, axis=1)
        parts.insert(0, even(head, batch.num_rows, 4 * len(lengths)))
    return joined(*parts)


def _config(encodings: dict[str, Encoding]) -> dict[str, Any]:
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": None,
        "column_names": list(encodings),
        "column_encodings": [encoding.name for encoding in encodings.values()],
        "column_sizes": [encoding.width for encoding in encodings.values()],
    }


def _text(encodings: dict[str, Encoding]) -> bytes:
    return json.dumps(_config(encodings), sort_keys=True).encode()


def _room(encodings: dict[str, Encoding]) -> int:
    return LIMIT - 8 - len(_text(encodings))


def _flush(
    store: Store, number: int, part: int, encodings: dict[str, Encoding], held: _Rows
) -> dict[str, Any]:
    """Write a shard and return its record."""
    config = _text(encodings)
    sizes = np.concatenate([np.diff(bounds_of(rows)) for rows in held.parts])
    offsets = list_offsets(sizes) + 8 + 4 * held.rows + len(config)
    name = f"shard.{number:05}.mds" if not part else f"shard.{number:05}-{part}.mds"
    with store.create(name) as file:
        file.write(np.uint32(held.rows).astype("<u4").tobytes())
        file.write(offsets.astype("<u4").tobytes())
        file.write(config)
        for rows in held.parts:
            bounds = bounds_of(rows)
            file.write(rows.buffers()[2].slice(bounds[0], bounds[-1] - bounds[0]))
    data = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
    return {**_config(encodings), "samples": held.rows, "raw_data": data, "zip_data": None}
