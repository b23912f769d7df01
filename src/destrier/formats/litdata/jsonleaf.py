"""JSON leaves as a column: of Arrow types where the index declares one, else of text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from destrier.errors import SourceError
from destrier.formats.gather import (
    MOST_OFFSETS,
    Ints,
    binary,
    fixed,
    list_offsets,
    packed,
    primitive,
)
from destrier.formats.litdata.cells import Cells, Codec, text_array
from destrier.formats.litdata.nested import (
    BOOL_LIST,
    FLOAT_LIST,
    INT_LIST,
    TEXT_LIST,
    decode_nested,
    json_text,
    matches,
)

__all__ = ["JsonCodec"]

_HEAD = 5
_MOST_STEPS = 4096  # of lists of text that are read side by side


class JsonCodec(Codec):
    """A list or dict in each row.

    Args:
        encoding: The serializer's name.
        natural: The type that the index declares, or None for JSON text.
    """

    def __init__(self, encoding: str, natural: pa.DataType | None) -> None:
        super().__init__(encoding)
        self._type = pa.string() if natural is None else natural
        self.content_type = "application/json" if natural is None else None

    @property
    def type(self) -> pa.DataType:
        """As the index declares it, or text."""
        return self._type

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:
        """Make a column."""
        lists = _lists(cells, kind)
        if lists is not None:
            return lists
        values = []
        for row, item in enumerate(cells.whole().to_pylist()):
            try:
                value = decode_nested(item)
            except ValueError as error:
                raise cells.place.damaged(str(error), row) from None
            if pa.types.is_string(kind):
                values.append(json_text(value))
                continue
            if not matches(value, kind):
                raise cells.place.other_type(
                    f"is {json_text(value)[:80]}, the index declares {kind}; pass json='text' "
                    "for a column of JSON text",
                    row,
                )
            values.append(value)
        return pa.array(values, kind)


def _lists(cells: Cells, kind: pa.DataType) -> pa.Array | None:
    """Lists of one scalar type at once, or None if they are to be read one by one."""
    known = _KINDS.get(kind)
    if known is None or not len(cells.sizes) or cells.sizes.min() < _HEAD:
        return None
    tag, read = known
    head = fixed(cells.data, cells.starts, _HEAD).reshape(-1, _HEAD)
    counts = np.ascontiguousarray(head[:, 1:]).view("<u4").reshape(-1).astype(np.int64)
    empty = (head[:, 0] == TEXT_LIST) & (counts == 0) & (cells.sizes == _HEAD)
    if not ((head[:, 0] == tag) | empty).all() or int(counts.sum()) > MOST_OFFSETS:
        return None
    values = read(cells, counts)
    if values is None:
        return None
    offsets = pa.py_buffer(list_offsets(counts).astype(np.int32))
    return pa.Array.from_buffers(kind, len(counts), [None, offsets], children=[values])


def _numbers(dtype: str, kind: pa.DataType) -> Callable[[Cells, Ints], pa.Array | None]:
    width = np.dtype(dtype).itemsize

    def read(cells: Cells, counts: Ints) -> pa.Array | None:
        if (cells.sizes != _HEAD + width * counts).any():
            return None
        data = packed(binary(cells.data, cells.starts + _HEAD, width * counts))
        return primitive(data.view(dtype), kind)

    return read


def _texts(cells: Cells, counts: Ints) -> pa.Array | None:
    """The first texts of all lists, then the second ones, and so on."""
    steps = int(counts.max())
    if steps > _MOST_STEPS or (4 * counts > cells.sizes).any():
        return None
    begins = list_offsets(counts)
    starts = np.empty(begins[-1], np.int64)
    sizes = np.empty(begins[-1], np.int64)
    at, ends = cells.starts + _HEAD, cells.starts + cells.sizes
    for step in range(steps):
        rows = np.flatnonzero(counts > step)
        if (at[rows] + 4 > ends[rows]).any():
            return None
        size = fixed(cells.data, at[rows], 4).view("<u4").astype(np.int64)
        starts[begins[rows] + step] = at[rows] + 4
        sizes[begins[rows] + step] = size
        at[rows] += 4 + size
    if (at != ends).any():
        return None
    texts = Cells(cells.data, starts, sizes, cells.place)
    try:
        return text_array(texts)
    except SourceError:
        return None  # reading them one by one finds the row


_KINDS: dict[pa.DataType, tuple[int, Callable[[Cells, Ints], pa.Array | None]]] = {
    pa.list_(pa.int64()): (INT_LIST, _numbers("<i8", pa.int64())),
    pa.list_(pa.float64()): (FLOAT_LIST, _numbers("<f8", pa.float64())),
    pa.list_(pa.bool_()): (BOOL_LIST, _numbers("u1", pa.bool_())),
    pa.list_(pa.string()): (TEXT_LIST, _texts),
}
