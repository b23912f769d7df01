"""Memory for batches, from Arrow's pool.

The pool keeps its pages. What `numpy` allocates is given back to the system with each batch and
comes back page by page, which takes longer than to fill it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from destrier.keyed import Ints

__all__ = ["fresh", "gather"]

_LARGE = 1 << 16  # bytes: smaller arrays are kept by the allocator, too


def fresh(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of any content, that may be written to."""
    kind = np.dtype(dtype)
    buffer = pa.allocate_buffer(math.prod(shape) * kind.itemsize, resizable=False)
    return np.frombuffer(buffer, kind).reshape(shape)


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
