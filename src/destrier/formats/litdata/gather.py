"""Many values out of one buffer at once."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["Bytes", "Ints", "as_bytes", "binary", "fixed", "list_offsets", "packed", "primitive"]

Bytes: TypeAlias = NDArray[np.uint8]
Ints: TypeAlias = NDArray[np.int64]

MOST_OFFSETS = (1 << 31) - 1
"""What the offsets of Arrow's plain lists and strings can count."""


def as_bytes(buffer: Any) -> Bytes:
    """A buffer as an array of bytes, without a copy."""
    return np.frombuffer(buffer, np.uint8)


def fixed(data: Bytes, starts: Ints, width: int) -> Bytes:
    """Copy values of one width.

    Args:
        data: The buffer.
        starts: Where each value begins; each lies within the buffer as a whole.
        width: Number of bytes of each value.

    Returns:
        The values one after another, as one array of ``len(starts) * width`` bytes.
    """
    if width == 0 or len(starts) == 0:
        return np.empty(0, np.uint8)
    kind = np.dtype((np.void, width))
    # a view in which a value begins at every byte: taking from it copies whole values
    view = np.ndarray((len(data) - width + 1,), kind, data, strides=(1,))
    values: Bytes = view[starts].view(np.uint8)
    return values


def binary(data: Bytes, starts: Ints, sizes: Ints) -> pa.LargeBinaryArray:
    """Copy values of any sizes, which lie in the buffer in order and do not overlap."""
    count = len(starts)
    if count == 0:
        return pa.array([], pa.large_binary())
    bounds = np.empty(2 * count, np.int64)
    bounds[0::2] = starts
    bounds[1::2] = starts + sizes
    # the gaps between the values are values of this array, too, so that it needs no copy
    whole = pa.Array.from_buffers(
        pa.large_binary(), 2 * count - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    return whole.take(pa.array(np.arange(0, 2 * count - 1, 2)))


def packed(values: pa.LargeBinaryArray) -> Bytes:
    """The bytes of all values of a gathered array, one after another."""
    buffer = values.buffers()[2]
    if buffer is None or not len(values):
        return np.empty(0, np.uint8)
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    return as_bytes(buffer)[offsets[0] : offsets[-1]]


def list_offsets(counts: Ints) -> Ints:
    """The offsets of lists of these lengths."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def primitive(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """An array of numbers over the memory of a numpy array."""
    if pa.types.is_boolean(kind):
        bits = np.packbits(values.astype(bool, copy=False), bitorder="little")
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(bits)])
    contiguous = np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(contiguous)])
