"""From columns of arrays to the bytes of leaves, for exports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.formats.gather import Ints, as_bytes, even, joined, list_offsets, uneven
from destrier.formats.litdata.arrays import NUMPY_TYPES, TORCH_TYPES
from destrier.formats.ragged import is_ragged

__all__ = [
    "LeafError",
    "Written",
    "array_written",
    "check_whole",
    "numbers_of",
]

_INNER_NULL = "has a null in its list, which LitData's arrays cannot hold"


class LeafError(Exception):
    """A value that a leaf cannot hold.

    Attributes:
        row: Its row among those at hand.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True)
class Written:
    """How a column is written.

    Attributes:
        encoding: As the index names it.
        encode: From a column to the bytes of each row.
    """

    encoding: str
    encode: Callable[[pa.Array], pa.LargeBinaryArray]


@dataclass(frozen=True)
class _Numbers:
    """The arrays of a column.

    Attributes:
        values: Of all rows, one after another.
        offsets: Of the rows among them.
        shape: Of each row, if it is the same.
        shapes: Of each row, as a column of lists, if it is not.
    """

    values: Any
    offsets: Ints
    shape: tuple[int, ...] | None
    shapes: pa.Array | None


def numbers_of(array: pa.Array) -> _Numbers:
    """Take a column of tensors or lists apart.

    Raises:
        LeafError: If there is a null in it.
    """
    kind, count = array.type, len(array)
    if isinstance(kind, pa.FixedShapeTensorType):
        values, shape = array.storage.flatten(), tuple(kind.shape)
    elif pa.types.is_struct(kind):
        shapes, lists = array.flatten()
        check_whole(shapes, lists)
        inner = numbers_of(lists)
        return _Numbers(inner.values, inner.offsets, None, shapes)
    elif pa.types.is_fixed_size_list(kind):
        values, shape = array, ()
        while pa.types.is_fixed_size_list(values.type):
            if values.null_count:  # which would be left out of what is flattened
                row = values.is_null().index(True).as_py() // math.prod(shape)
                raise LeafError(_INNER_NULL, row)
            shape = (*shape, values.type.list_size)
            values = values.flatten()
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return _Numbers(
            _dense(array.flatten(), offsets - offsets[0]), offsets - offsets[0], None, None
        )
    else:
        offsets = np.arange(count + 1, dtype=np.int64)
        return _Numbers(_dense(array, offsets), offsets, (), None)
    size = int(np.prod(shape, dtype=np.int64))
    offsets = np.arange(count + 1, dtype=np.int64) * size
    return _Numbers(_dense(values, offsets), offsets, shape, None)


def check_whole(*parts: pa.Array) -> None:
    """Raise if a part of a value is null."""
    for part in parts:
        if part.null_count:
            raise LeafError("has a part that is null", part.is_null().index(True).as_py())


def _dense(values: pa.Array, offsets: Ints) -> Any:
    if values.null_count:
        place = values.is_null().index(True).as_py()
        row = int(np.searchsorted(offsets, place, "right") - 1)
        raise LeafError(_INNER_NULL, row)
    return values.to_numpy(zero_copy_only=False)


def _value_name(kind: pa.DataType) -> str | None:
    """The numpy name of the values of a column of arrays."""
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind)
    if lists or isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.value_type
    else:
        while types.is_fixed_size_list(kind):
            kind = kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    return str(np.dtype(kind.to_pandas_dtype()))


def array_written(name: str, rest: str, kind: pa.DataType) -> Written | None:
    """An array leaf for a type, or None if the type holds no arrays.

    Args:
        name: The serializer: of numpy or torch, with or without a header.
        rest: What follows its name: the number of the dtype, or the dtype if it is complex.
        kind: The column's type.

    Raises:
        ValueError: If it is an array that LitData does not have.
    """
    shaped = is_ragged(kind)
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    fixed = isinstance(kind, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(kind)
    number_alone = name == "tensor" and pa.types.is_primitive(kind)  # without a dimension
    if not (shaped or lists or fixed or number_alone):
        return None
    order = kind.permutation if isinstance(kind, pa.FixedShapeTensorType) else None
    if order is not None and list(order) != sorted(order):
        raise ValueError("LitData has no tensors with a permutation of their dimensions")
    dtype = _value_name(kind.field(1).type if shaped else kind)
    family = name.removeprefix("no_header_")
    names = NUMPY_TYPES if family == "numpy" else TORCH_TYPES
    is_complex = _is_complex(name, rest, names, dtype)
    if is_complex:
        dtype = {"float32": "complex64", "float64": "complex128"}[str(dtype)]
    if dtype is None or dtype not in names:
        if family == "tensor" and dtype is not None:
            return array_written("numpy", "", kind)
        return None
    number = len(names) - 1 - names[::-1].index(dtype)
    rank = None if shaped else 1 if lists else _rank(kind)
    if rank is not None and is_complex:
        rank -= 1
    writer = _ArrayWriter(family, number, is_complex)
    if rank == 1:
        return Written(f"no_header_{family}:{number}", writer.plain)
    if name.startswith("no_header") and rank is None:  # of complex numbers, which are pairs
        return Written(f"no_header_{family}:{number}", writer.plain)
    return Written(family, writer.headed)


def _is_complex(name: str, rest: str, names: tuple[str, ...], dtype: str | None) -> bool:
    """Whether the column's floats are the parts of what were complex numbers."""
    was = rest
    if name.startswith("no_header") and rest.isdecimal() and int(rest) < len(names):
        was = names[int(rest)]
    return (was, dtype) in (("complex64", "float32"), ("complex128", "float64"))


def _rank(kind: pa.DataType) -> int:
    if isinstance(kind, pa.FixedShapeTensorType):
        return len(kind.shape)
    rank = 0
    while pa.types.is_fixed_size_list(kind):
        rank, kind = rank + 1, kind.value_type
    return rank


@dataclass(frozen=True)
class _ArrayWriter:
    family: str
    number: int
    is_complex: bool

    def plain(self, array: pa.Array) -> pa.LargeBinaryArray:
        """The values alone."""
        numbers = numbers_of(array)
        return self._values(numbers)

    def headed(self, array: pa.Array) -> pa.LargeBinaryArray:
        """Dtype and shape before the values."""
        numbers = numbers_of(array)
        return joined(self._header(numbers, len(array)), self._values(numbers))

    def _values(self, numbers: _Numbers) -> pa.LargeBinaryArray:
        values = np.ascontiguousarray(numbers.values)
        return uneven(as_bytes(values), numbers.offsets * values.itemsize)

    def _header(self, numbers: _Numbers, count: int) -> pa.LargeBinaryArray:
        order = "<u4" if self.family == "numpy" else ">u4"
        if numbers.shape is not None:
            shape = numbers.shape[:-1] if self.is_complex else numbers.shape
            one = np.array([self.number, len(shape), *shape], order)
            return even(np.tile(one, count), count, one.nbytes)
        assert numbers.shapes is not None
        offsets = numbers.shapes.offsets.to_numpy().astype(np.int64)
        dims = _dense(numbers.shapes.flatten(), offsets - offsets[0]).astype(np.int64)
        offsets = offsets - offsets[0]
        ranks = np.diff(offsets)
        self._check_shapes(numbers, dims, offsets)
        if self.is_complex:
            dims = np.delete(dims, offsets[1:] - 1)
            ranks = ranks - 1
            offsets = list_offsets(ranks)
        heads = np.column_stack([np.full(count, self.number), ranks]).astype(order)
        return joined(even(heads, count, 8), uneven(dims.astype(order), offsets * 4))

    def _check_shapes(self, numbers: _Numbers, dims: Ints, offsets: Ints) -> None:
        sizes = np.diff(numbers.offsets)
        for row in range(len(sizes)):
            shape = dims[offsets[row] : offsets[row + 1]]
            pairs = not self.is_complex or (len(shape) and shape[-1] == 2)
            if not pairs or (shape < 0).any() or float(np.prod(shape, dtype=float)) != sizes[row]:
                raise LeafError(f"has {sizes[row]} values, but the shape {shape.tolist()}", row)
