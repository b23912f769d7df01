"""Many values out of one buffer at once, and back into one, without a Python object a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = [
    "MOST_OFFSETS",
    "Bytes",
    "Ints",
    "as_bytes",
    "binary",
    "bounds_of",
    "even",
    "fixed",
    "joined",
    "list_offsets",
    "packed",
    "primitive",
    "text",
    "uneven",
]

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


def binary(data: Any, starts: Ints, sizes: Ints) -> pa.LargeBinaryArray:
    """Copy values of any sizes, which lie in the buffer in order and do not overlap."""
    count = len(starts)
    if count == 0:
        return pa.array([], pa.large_binary())
    bounds = np.empty(2 * count, np.int64)
    bounds[0::2] = starts
    bounds[1::2] = starts + sizes
    # the gaps between the values are values of this array, too, so that it needs no copy
    whole = pa.Array.from_buffers(
        pa.large_binary(),
        2 * count - 1,
        [None, pa.py_buffer(bounds), pa.py_buffer(data)],
        null_count=0,
    )
    return whole.take(pa.array(np.arange(0, 2 * count - 1, 2)))


def text(values: pa.Array, fail: Callable[[int, str], Exception]) -> pa.StringArray:
    """Bytes as text.

    Args:
        values: Of a type of bytes; no more than `MOST_OFFSETS` in all, nulls among them or not.
        fail: Makes the error for a value: its place among the values, and what is wrong.

    Raises:
        Exception: What ``fail`` made, if a value is not UTF-8.
    """
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        for index, value in enumerate(values):
            try:
                (value.as_py() or b"").decode()
            except UnicodeDecodeError as error:
                raise fail(index, f"is not UTF-8: {error}") from None
        raise


def packed(values: pa.LargeBinaryArray) -> Bytes:
    """The bytes of all values of a gathered array, one after another."""
    buffer = values.buffers()[2]
    if buffer is None or not len(values):
        return np.empty(0, np.uint8)
    bounds = bounds_of(values)
    return as_bytes(buffer)[bounds[0] : bounds[-1]]


def bounds_of(array: pa.Array) -> Ints:
    """Where the values of an array of bytes, text or lists begin, and where the last one ends."""
    kind = array.type
    large = (
        pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_list(kind)
    )
    bounds = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)
    return bounds[array.offset : array.offset + len(array) + 1].astype(np.int64)


def list_offsets(counts: Ints) -> Ints:
    """Where values of these lengths begin if they lie side by side, and where the last ends."""
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


def even(data: Any, count: int, size: int) -> pa.LargeBinaryArray:
    """Values of one size, which lie side by side, as bytes."""
    return uneven(data, np.arange(count + 1, dtype=np.int64) * size)


def uneven(data: Any, offsets: Ints) -> pa.LargeBinaryArray:
    """Values between offsets as bytes.

    Args:
        data: A buffer, or an array in C order.
        offsets: Where they begin in it, and where the last one ends.
    """
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(np.ascontiguousarray(data))
    bounds = pa.py_buffer(np.ascontiguousarray(offsets))
    return pa.Array.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, bounds, buffer], null_count=0
    )


def joined(*parts: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Put the parts of each value together: the first of all parts, then the second of all."""
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
