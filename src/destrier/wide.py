"""Gathers large values of several Arrow arrays with one copy of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from destrier.keyed import Ints

__all__ = ["gather_wide", "is_wide"]

_WIDE_BYTES = 2048  # in the mean: below, a step of Python costs more than the copies it saves
_REACH = np.iinfo(np.int32).max  # of a view into a buffer, and its length
_INLINE = 12  # bytes: values of so many at most lie in the view itself
_VIEW = np.dtype([("size", np.int32), ("prefix", "V4"), ("buffer", np.int32), ("at", np.int32)])


def is_wide(arrays: Sequence[pa.Array]) -> bool:
    """Whether arrays of one type hold bytes so large that each is better copied on its own."""
    kind = arrays[0].type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return False
    if any(_data(array).size > _REACH for array in arrays):
        return False
    rows = sum(len(array) for array in arrays)
    return bool(sum(array.nbytes for array in arrays) >= _WIDE_BYTES * max(rows, 1))


def gather_wide(arrays: Sequence[pa.Array], sources: Ints, rows: Ints) -> pa.Array:
    """Values of several arrays in one, in any order.

    Arrow would copy them once to take them from each array, once to join these, and once to bring
    them into order. Views of them are cast instead, which is one copy, made while other threads
    may use the interpreter.

    Args:
        arrays: Of one binary type, each of less than 2 GiB.
        sources: For each value, in which array it is.
        rows: And in which row of it.
    """
    kind = arrays[0].type
    width = np.int32 if pa.types.is_binary(kind) else np.int64
    starts = np.empty(len(rows), np.int64)
    sizes = np.empty(len(rows), np.int64)
    valid = np.ones(len(rows), np.bool_)
    by_source = np.argsort(sources, kind="stable")
    cuts = np.searchsorted(sources[by_source], np.arange(len(arrays) + 1)).tolist()
    for array, first, last in zip(arrays, cuts[:-1], cuts[1:], strict=True):
        mine = by_source[first:last]
        wanted = rows[mine] + array.offset
        bounds = np.frombuffer(array.buffers()[1], width)
        starts[mine] = bounds[wanted]
        sizes[mine] = bounds[wanted + 1]
        if array.null_count:
            valid[mine] = array.is_valid().to_numpy(zero_copy_only=False)[rows[mine]]
    sizes -= starts
    sizes[~valid] = 0
    total = int(sizes.sum())
    if total > np.iinfo(width).max:
        raise pa.ArrowInvalid(f"{total} bytes are too many for one array of {kind}")
    views = np.zeros(len(rows), _VIEW)  # the cast does not look at prefixes
    views["size"], views["buffer"], views["at"] = sizes, sources, starts
    data = [_data(array) for array in arrays]
    for i in np.flatnonzero(sizes <= _INLINE).tolist():
        start, size = int(starts[i]), int(sizes[i])
        value = data[sources[i]].slice(start, size).to_pybytes()
        views[i : i + 1].view(np.uint8)[4:] = np.frombuffer(value.ljust(_INLINE, b"\0"), np.uint8)
    nulls = int(len(valid) - valid.sum())
    bits = pa.py_buffer(np.packbits(valid, bitorder="little").tobytes()) if nulls else None
    seen = pa.Array.from_buffers(
        pa.binary_view(), len(rows), [bits, pa.py_buffer(views), *data], null_count=nulls
    )
    return seen.cast(kind)


def _data(array: pa.Array) -> pa.Buffer:
    data = array.buffers()[2]
    return pa.py_buffer(b"") if data is None else data
