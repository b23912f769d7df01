"""Arrow columns as numpy columns, without per-row Python for fixed widths.

A column is *dense* if its type has a fixed width: numbers, booleans, times, and fixed-size lists
and tensors of them. Every other column is an array of Python objects: str, bytes, lists, one
numpy array for each ragged list of numbers, None for null.

Nulls of a dense column: NaN where the type is floating, else the row is marked as not valid.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.keyed import Ints
from destrier.memory import gather
from destrier.wide import is_wide

__all__ = [
    "Column",
    "Columns",
    "dense_bytes",
    "dense_type",
    "empty_array",
    "from_arrow",
    "memory_bytes",
    "take",
]

_TIMES = (
    pa.types.is_timestamp,
    pa.types.is_duration,
    pa.types.is_time,
    pa.types.is_date,
)


@dataclass(frozen=True)
class Column:
    """Values of some rows, and which of them are not null in a type that has no NaN.

    Attributes:
        values: First dimension rows; dtype object if the column is not dense.
        valid: One boolean a row, or None if all are valid.
    """

    values: NDArray[Any]
    valid: NDArray[np.bool_] | None = None

    @property
    def dense(self) -> bool:
        """Whether the values are numbers of a fixed shape."""
        return self.values.dtype.kind != "O"


Columns: TypeAlias = "dict[str, Column]"


def dense_type(kind: pa.DataType) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return dtype and shape of one value of a fixed-width type, None for any other type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = dense_type(kind.value_type)
        # `from_numpy_ndarray` gives one that changes nothing.
        permuted = list(kind.permutation or ()) != sorted(kind.permutation or ())
        return None if inner is None or permuted else (inner[0], tuple(kind.shape))
    if isinstance(kind, pa.BaseExtensionType):
        return None
    if pa.types.is_fixed_size_list(kind):
        inner = dense_type(kind.value_type)
        return None if inner is None else (inner[0], (kind.list_size, *inner[1]))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype()), ()
    if any(test(kind) for test in _TIMES):
        return np.dtype(f"i{kind.bit_width // 8}"), ()
    return None


def empty_array(kind: pa.DataType) -> pa.Array:
    """Return an array of no values of any type."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(empty_array(kind.storage_type))
    return pa.nulls(0, kind)


def dense_bytes(kind: pa.DataType) -> int:
    """Return the bytes of one value of a fixed-width type in memory, 0 for any other type."""
    dense = dense_type(kind)
    return 0 if dense is None else dense[0].itemsize * math.prod(dense[1])


def from_arrow(array: pa.Array, *, views: bool = False) -> Column:
    """Convert one column; dense values without nulls are views of Arrow's memory.

    Args:
        array: The column.
        views: Whether large values of bytes may be views, too: `pyarrow.Buffer` instead of `bytes`.
    """
    kind = array.type
    if views and is_wide([array]):
        return _views(array)
    if isinstance(kind, pa.BaseExtensionType):
        if not isinstance(kind, pa.FixedShapeTensorType) or dense_type(kind) is None:
            return _objects(array.storage)
        dtype_shape = dense_type(kind)
        assert dtype_shape is not None
        column = from_arrow(array.storage)
        return Column(column.values.reshape(len(array), *dtype_shape[1]), column.valid)
    if dense_type(kind) is None:
        return _objects(array)
    if pa.types.is_fixed_size_list(kind):
        return _fixed_lists(array)
    return _numbers(array)


def _numbers(array: pa.Array) -> Column:
    kind = array.type
    if any(test(kind) for test in _TIMES):
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if not array.null_count:
        return Column(array.to_numpy(zero_copy_only=False))
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        values = array.fill_null(pa.scalar(float("nan"), kind)).to_numpy(zero_copy_only=False)
        return Column(values)
    zero = pa.scalar(False) if pa.types.is_boolean(kind) else pa.scalar(0, array.type)
    return Column(array.fill_null(zero).to_numpy(zero_copy_only=False), valid)


def _fixed_lists(array: pa.Array) -> Column:
    size = array.type.list_size
    inner = from_arrow(array.values.slice(array.offset * size, len(array) * size))
    values = inner.values.reshape(len(array), size, *inner.values.shape[1:])
    valid: NDArray[np.bool_] | None
    valid = None if inner.valid is None else np.all(inner.valid.reshape(len(array), size), axis=1)
    if array.null_count:
        present = array.is_valid().to_numpy(zero_copy_only=False)
        if np.issubdtype(values.dtype, np.floating):
            values = values.copy()
            values[~present] = np.nan
            valid = None if valid is None else np.logical_or(valid, ~present)
        else:
            valid = present if valid is None else np.logical_and(valid, present)
    return Column(values, valid)


def _objects(array: pa.Array) -> Column:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _objects(array.storage)
    if pa.types.is_dictionary(kind):
        return _python(array.dictionary_decode())
    if _is_text(kind):
        return Column(array.to_numpy(zero_copy_only=False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = dense_type(kind.value_type)
        if item is not None:
            return _ragged(array)
    return Column(np.fromiter(array.to_pylist(), np.object_, len(array)))


def _views(array: pa.Array) -> Column:
    """Bytes where Arrow has them; they keep its memory alive.

    Unlike `memoryview`, a buffer is nothing that Python's collector looks at: with tens of
    thousands of views that are held, it would stop all threads for a tenth of a second at a time.
    """
    _, offsets, data = array.buffers()
    width = np.int32 if pa.types.is_binary(array.type) else np.int64
    bounds = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1].tolist()
    slices = (data.slice(start, stop - start) for start, stop in pairwise(bounds))
    values = np.fromiter(slices, np.object_, len(array))
    if array.null_count:
        values[~array.is_valid().to_numpy(zero_copy_only=False)] = None
    return Column(values)


def _python(array: pa.Array) -> Column:
    """Convert a column to Python objects, whatever its type."""
    if dense_type(array.type) is None:
        return _objects(array)
    return Column(np.fromiter(array.to_pylist(), np.object_, len(array)))


def _is_text(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    )
    return any(test(kind) for test in tests)


def _ragged(array: pa.Array) -> Column:
    """One numpy array for each list; a null inside a list of integers makes its row not valid."""
    offsets = array.offsets.to_numpy()
    first = int(offsets[0]) if len(offsets) else 0
    inner = from_arrow(array.values.slice(first, int(offsets[-1]) - first if len(offsets) else 0))
    offsets = offsets - first
    bounds = offsets.tolist()
    lists = (inner.values[bounds[i] : bounds[i + 1]] for i in range(len(array)))
    values = np.fromiter(lists, np.object_, len(array))
    if array.null_count:
        values[~array.is_valid().to_numpy(zero_copy_only=False)] = None
    valid = None
    if inner.valid is not None:
        missing = np.concatenate([np.zeros(1, np.int64), np.cumsum(~inner.valid)])
        valid = missing[offsets[1:]] == missing[offsets[:-1]]
    return Column(values, valid)


def take(column: Column, index: Ints) -> Column:
    """The rows at ``index``, copied."""
    valid = None if column.valid is None else column.valid[index]
    return Column(gather(column.values, index), valid)


def memory_bytes(column: Column) -> int:
    """Return the bytes that a column takes in memory, with its Python objects."""
    size = int(column.values.nbytes)
    if column.dense:
        return size
    seen: set[int] = set()
    left = list(column.values)
    while left:
        value = left.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        size += sys.getsizeof(value)
        if isinstance(value, np.ndarray):
            size += 0 if value.base is None else int(value.nbytes)
        elif isinstance(value, list | tuple):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
    return size
