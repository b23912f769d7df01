"""Memory for batches, which is used again when nobody looks at it any more.

What `numpy` allocates is given back to the system with each batch and comes back page by page,
which takes longer than to fill it. Arrow's pool keeps its pages, but large ones for a moment only:
some milliseconds later it gives them back as well. Large ones therefore stay here, up to a limit.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from destrier.keyed import Ints

__all__ = ["fresh", "gather"]

_LARGE = 1 << 16  # bytes: smaller arrays are kept by the allocator, too
_KEPT = 1 << 20  # bytes: smaller ones are left to Arrow's pool
_SPARE_BYTES = 128 << 20
_WASTE = 4  # one part in so many of a spare one may stay unused


class _Spares:
    """Buffers that nobody uses, the one that was used last at the end."""

    def __init__(self) -> None:
        # One that may be taken again: the collector may drop an array while it is held.
        self._lock = threading.RLock()
        self._buffers: list[pa.Buffer] = []

    def take(self, size: int) -> pa.Buffer | None:
        """One that has the size and little more."""
        with self._lock:
            # Of a copy: the collector may give one in the midst of it.
            for buffer in reversed(tuple(self._buffers)):
                if size <= buffer.size <= size + size // _WASTE:
                    for i, each in enumerate(self._buffers):
                        if each is buffer:
                            return self._buffers.pop(i)
        return None

    def give(self, buffer: pa.Buffer) -> None:
        """Keep one, in place of those that were not used for longest."""
        if buffer.size > _SPARE_BYTES:
            return
        with self._lock:
            self._buffers.append(buffer)
            while sum(each.size for each in self._buffers) > _SPARE_BYTES:
                del self._buffers[0]

    def forked(self) -> None:
        """In a process that was forked while another thread may have held the lock."""
        self._lock = threading.RLock()


_spares = _Spares()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spares.forked)


class _Block:
    """What arrays in a buffer have as their base: it ends with the last of them."""

    def __init__(self, buffer: pa.Buffer) -> None:
        self._buffer = buffer
        self._give = _spares.give  # the module may be taken apart before the array is
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (buffer.size,),
            "data": (buffer.address, False),
        }

    def __del__(self) -> None:
        self._give(self._buffer)


def fresh(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of any content, that may be written to."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < _KEPT:
        return np.frombuffer(pa.allocate_buffer(size, resizable=False), kind).reshape(shape)
    buffer = _spares.take(size) or pa.allocate_buffer(size, resizable=False)
    return np.asarray(_Block(buffer))[:size].view(kind).reshape(shape)


def gather(values: NDArray[Any], index: Ints) -> NDArray[Any]:
    """Copy some rows.

    Args:
        values: An array of rows.
        index: Places of rows, each from 0 to ``len(values) - 1``. That is not checked, since it
            would take up to half as long as to copy: in place of a row that is not there comes the
            first or last one, or an error where the result is small.
    """
    shape = (len(index), *values.shape[1:])
    if values.dtype == np.object_ or math.prod(shape) * values.itemsize < _LARGE:
        return np.take(values, index, axis=0)
    # With the mode "raise" numpy would fill a copy first.
    return np.take(values, index, axis=0, out=fresh(shape, values.dtype), mode="clip")
