"""Columns as ranges of bytes, from memory or from files, and rows of them put together.

Values of a fixed width, and byte strings, texts and lists of numbers, lie in one buffer each, so
that a run of rows is a range of bytes. Of any other type, and of lists with nulls inside, a block
is read as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.keyed import Ints
from destrier.memory import fresh

__all__ = ["NARROW_BYTES", "ArrayValues", "Layout", "Values", "assembled", "layout_of"]

_NEAR_BYTES = 32 << 10  # runs that lie so close are read as one
_SCRATCH_BYTES = 512 << 10  # into which short runs are read: it stays in the processor's cache
NARROW_BYTES = 2048  # in the mean: below, a step of Python for each run costs more than a copy


@dataclass(frozen=True)
class Layout:
    """Where the values of an array are.

    Attributes:
        data: The buffer that holds them.
        width: Bytes of each, or None if they differ.
        bounds: If they differ, where each begins in the buffer, and where the last ends.
        valid: Which are not null; None if all are.
    """

    data: NDArray[np.uint8]
    width: int | None
    bounds: Ints | None
    valid: NDArray[np.bool_] | None


def layout_of(array: pa.Array) -> Layout | None:
    """Find the values of an array; None if they are not in one buffer."""
    kind = array.type
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    width = _width(kind)
    if width is not None:
        data = _fixed(array)
        return None if data is None else Layout(data, width, None, valid)
    texts = pa.types.is_string(kind) or pa.types.is_binary(kind)
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if texts or large:
        return Layout(_bytes(array.buffers()[2]), None, _bounds(array, large), valid)
    large = pa.types.is_large_list(kind)
    if large or pa.types.is_list(kind):
        item, child = _width(kind.value_type), array.values
        data = None if item is None or child.null_count else _fixed(child)
        if data is None or item is None:
            return None
        return Layout(data, None, _bounds(array, large) * item, valid)
    return None


def _width(kind: pa.DataType) -> int | None:
    """Bytes of a value of a fixed width that is whole bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return None
    if pa.types.is_fixed_size_list(kind):
        inner = _width(kind.value_type)
        return None if inner is None else inner * kind.list_size
    if pa.types.is_fixed_size_binary(kind) or (
        pa.types.is_primitive(kind) and not pa.types.is_boolean(kind)
    ):
        return int(kind.bit_width // 8) or None
    return None


def _fixed(array: pa.Array) -> NDArray[np.uint8] | None:
    """The values of an array of fixed width; None if there are nulls inside of lists."""
    width = _width(array.type) or 0
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        inner = array.values.slice(array.offset * size, len(array) * size)
        return None if inner.null_count else _fixed(inner)
    return _bytes(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width]


def _bytes(buffer: pa.Buffer | None) -> NDArray[np.uint8]:
    return np.empty(0, np.uint8) if not buffer else np.frombuffer(buffer, np.uint8)


def _bounds(array: pa.Array, large: bool) -> Ints:
    if not len(array):
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)
    bounds: Ints = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return bounds


class Values(Protocol):
    """The values of some successive rows of a column."""

    width: int | None
    bounds: Ints | None
    valid: NDArray[np.bool_] | None

    @property
    def ranged(self) -> bool:
        """Whether a run of rows is a range of bytes."""
        ...

    def data(
        self, start: int, stop: int, scratch: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """A range of bytes of the values, which may lie in the memory that is given."""
        ...

    def array(self) -> pa.Array:
        """All of them."""
        ...


class ArrayValues:
    """Values in memory."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array
        layout = layout_of(array)
        self.ranged = layout is not None
        self._data = np.empty(0, np.uint8) if layout is None else layout.data
        self.width = None if layout is None else layout.width
        self.bounds = None if layout is None else layout.bounds
        self.valid = None if layout is None else layout.valid

    def data(
        self,
        start: int,
        stop: int,
        scratch: NDArray[np.uint8] | None = None,  # noqa: ARG002
    ) -> NDArray[np.uint8]:
        """A range of bytes of the values."""
        return self._data[start:stop]

    def array(self) -> pa.Array:
        """All of them."""
        return self._array


@dataclass(frozen=True)
class _Piece:
    """Rows of some values, ascending, and where they go."""

    values: Values
    rows: Ints
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


def assembled(sources: Sequence[tuple[Values, Ints]], kind: pa.DataType) -> pa.Array:
    """Put rows of several values together in one array.

    Args:
        sources: Values, and which of their rows are wanted, ascending.
        kind: The type of the array; not an extension type.
    """
    pieces, total = [], 0
    for values, rows in sources:
        pieces.append(_Piece(values, rows, total))
        total += len(rows)
    width = _width(kind)
    if all(piece.values.ranged for piece in pieces):
        if width is not None:
            data = fresh((total * width,), np.uint8)
            scratch = fresh((_SCRATCH_BYTES,), np.uint8)
            for piece in pieces:
                _fill_fixed(piece, width, data, scratch)
            return _of_fixed(kind, total, data, _validity(pieces, total))
        if _wide(pieces, total):
            return _assembled_wide(pieces, total, kind)
    arrays = [_taken(piece, kind) for piece in pieces]
    return pa.concat_arrays(arrays) if len(arrays) > 1 else arrays[0]


# ---- of fixed width -------------------------------------------------------------------------


def _fill_fixed(
    piece: _Piece, width: int, into: NDArray[np.uint8], scratch: NDArray[np.uint8]
) -> None:
    out = _as_items(into[piece.start * width : piece.stop * width], width)
    for first, last in _spans(piece.rows, _NEAR_BYTES // width):
        rows = piece.rows[first:last]
        low, high = int(rows[0]), int(rows[-1]) + 1
        items = _as_items(piece.values.data(low * width, high * width, scratch), width)
        if high - low == len(rows):
            out[first:last] = items
        else:  # the rows are known to be there; checking them would cost a copy
            np.take(items, rows - low, axis=0, out=out[first:last], mode="clip")


def _as_items(data: NDArray[np.uint8], width: int) -> NDArray[Any]:
    aligned = data.ctypes.data % width == 0 if width in (2, 4, 8) else False
    return data.view(f"u{width}") if aligned else data.reshape(-1, width)


def _of_fixed(kind: pa.DataType, rows: int, data: NDArray[np.uint8], bits: Any) -> pa.Array:
    nulls = -1 if bits is not None else 0
    if pa.types.is_fixed_size_list(kind):
        child = _of_fixed(kind.value_type, rows * kind.list_size, data, None)
        return pa.Array.from_buffers(kind, rows, [bits], nulls, children=[child])
    return pa.Array.from_buffers(kind, rows, [bits, pa.py_buffer(data)], nulls)


def _validity(pieces: Sequence[_Piece], total: int) -> pa.Buffer | None:
    if all(piece.values.valid is None for piece in pieces):
        return None
    valid = np.ones(total, np.bool_)
    for piece in pieces:
        if piece.values.valid is not None:
            valid[piece.start : piece.stop] = piece.values.valid[piece.rows]
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


# ---- of differing widths --------------------------------------------------------------------


def _wide(pieces: Sequence[_Piece], total: int) -> bool:
    wanted = 0
    for piece in pieces:
        assert piece.values.bounds is not None
        wanted += int((piece.values.bounds[piece.rows + 1] - piece.values.bounds[piece.rows]).sum())
    return wanted >= total * NARROW_BYTES


def _assembled_wide(pieces: Sequence[_Piece], total: int, kind: pa.DataType) -> pa.Array:
    """Copy runs of rows, each once."""
    ends = np.zeros(total + 1, np.int64)
    for piece in pieces:
        bounds = piece.values.bounds
        assert bounds is not None
        ends[piece.start + 1 : piece.stop + 1] = bounds[piece.rows + 1] - bounds[piece.rows]
    np.cumsum(ends, out=ends)
    data = fresh((int(ends[-1]),), np.uint8)
    scratch = fresh((_SCRATCH_BYTES,), np.uint8)
    for piece in pieces:
        bounds = piece.values.bounds
        assert bounds is not None
        mean = max(1, int(bounds[-1] - bounds[0]) // max(1, len(bounds) - 1))
        lows, highs = bounds[piece.rows].tolist(), bounds[piece.rows + 1].tolist()
        places = ends[piece.start : piece.stop].tolist()
        for first, last in _spans(piece.rows, _NEAR_BYTES // mean):
            origin = lows[first]
            read = piece.values.data(origin, highs[last - 1], scratch)
            # Most are of one row, where rows are shuffled one by one.
            runs = _spans(piece.rows[first:last], 0) if last - first > 1 else ((0, 1),)
            for begin, end in runs:
                low, high, place = (
                    lows[first + begin],
                    highs[first + end - 1],
                    places[first + begin],
                )
                data[place : place + high - low] = read[low - origin : high - origin]
    return _of_bounds(kind, ends, data, _validity(pieces, total))


def _of_bounds(kind: pa.DataType, bounds: Ints, data: NDArray[np.uint8], bits: Any) -> pa.Array:
    rows, nulls = len(bounds) - 1, -1 if bits is not None else 0
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    large = pa.types.is_large_list(kind) or kind in (pa.large_binary(), pa.large_string())
    item = (_width(kind.value_type) or 1) if listed else 1
    places = bounds // item
    if not large and places[-1] > np.iinfo(np.int32).max:
        raise pa.ArrowInvalid(f"{int(bounds[-1])} bytes are too many for one array of {kind}")
    offsets = pa.py_buffer(places.astype(np.int64 if large else np.int32))
    if listed:
        child = _of_fixed(kind.value_type, int(places[-1]), data, None)
        return pa.Array.from_buffers(kind, rows, [bits, offsets], nulls, children=[child])
    return pa.Array.from_buffers(kind, rows, [bits, offsets, pa.py_buffer(data)], nulls)


def _taken(piece: _Piece, kind: pa.DataType) -> pa.Array:
    """The rows of a piece by Arrow's own means."""
    rows = piece.rows
    if not len(rows):
        return pa.array([], kind)
    bounds = piece.values.bounds
    if bounds is None:
        array, low = piece.values.array(), 0
    else:
        low, high = int(rows[0]), int(rows[-1]) + 1
        data = piece.values.data(int(bounds[low]), int(bounds[high]))
        bits = None
        if piece.values.valid is not None:
            packed = np.packbits(piece.values.valid[low:high], bitorder="little")
            bits = pa.py_buffer(packed)
        array = _of_bounds(kind, bounds[low : high + 1] - bounds[low], data, bits)
    if len(rows) == len(array):
        return array
    if int(rows[-1] - rows[0]) + 1 == len(rows):
        return array.slice(int(rows[0]) - low, len(rows))
    return array.take(pa.array(rows - low))


def _spans(rows: Ints, gap: int) -> Iterator[tuple[int, int]]:
    """Runs of ascending rows with at most so many others between neighbours, by place."""
    if not len(rows):
        return iter(())
    cuts = np.flatnonzero(np.diff(rows) > gap + 1) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    return itertools.pairwise(bounds)
