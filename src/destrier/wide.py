"""Gathers large values of several Arrow arrays with one copy of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.keyed import Ints

__all__ = ["gather_wide", "is_wide"]

_WIDE_BYTES = 2048  # in the mean: below, a step of Python costs more than the copies it saves


def is_wide(arrays: Sequence[pa.Array]) -> bool:
    """Whether arrays of one type hold bytes so large that each is better copied on its own."""
    kind = arrays[0].type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return False
    rows = sum(len(array) for array in arrays)
    return bool(sum(array.nbytes for array in arrays) >= _WIDE_BYTES * max(rows, 1))


def gather_wide(arrays: Sequence[pa.Array], sources: Ints, rows: Ints) -> pa.Array:
    """Values of several arrays in one, in any order.

    Arrow would copy them once to take them from each array, once to join these, and once to bring
    them into order.

    Args:
        arrays: Of one binary type.
        sources: For each value, in which array it is.
        rows: And in which row of it.
    """
    kind = arrays[0].type
    width = np.int32 if pa.types.is_binary(kind) else np.int64
    starts = np.empty(len(rows), np.int64)
    sizes = np.empty(len(rows), np.int64)
    valid = np.ones(len(rows), np.bool_)
    memory: list[memoryview] = []
    for number, array in enumerate(arrays):
        mine = sources == number
        bounds = _bounds(array, width)
        starts[mine] = bounds[rows[mine]]
        sizes[mine] = bounds[rows[mine] + 1] - starts[mine]
        if array.null_count:
            valid[mine] = array.is_valid().to_numpy(zero_copy_only=False)[rows[mine]]
        data = array.buffers()[2]
        memory.append(memoryview(data if data is not None and data.size else b"").cast("B"))
    sizes[~valid] = 0
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    if total > np.iinfo(width).max:
        raise pa.ArrowInvalid(f"{total} bytes are too many for one array of {kind}")
    values = pa.allocate_buffer(max(total, 1), resizable=False)  # of a pool that keeps its pages
    into = memoryview(values).cast("B")
    places = (numbers.tolist() for numbers in (sources, starts, sizes, ends))
    for source, start, size, end in zip(*places, strict=True):
        into[end - size : end] = memory[source][start : start + size]
    offsets = np.zeros(len(rows) + 1, width)
    offsets[1:] = ends
    nulls = int(len(valid) - valid.sum())
    bits = pa.py_buffer(np.packbits(valid, bitorder="little").tobytes()) if nulls else None
    return pa.Array.from_buffers(
        kind, len(rows), [bits, pa.py_buffer(offsets), values], null_count=nulls
    )


def _bounds(array: pa.Array, width: type[np.signedinteger]) -> NDArray[np.int64]:
    offsets = np.frombuffer(array.buffers()[1], width)
    bounds: NDArray[np.int64] = offsets[array.offset : array.offset + len(array) + 1].astype(
        np.int64
    )
    return bounds
