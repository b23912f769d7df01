"""Arrays of many rows: of one shape a tensor column, otherwise lists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.formats.gather import (
    MOST_OFFSETS,
    Bytes,
    Ints,
    binary,
    fixed,
    list_offsets,
    packed,
    primitive,
)
from destrier.formats.litdata.places import Place
from destrier.formats.ragged import ragged_type

__all__ = ["NUMPY_TYPES", "TORCH_TYPES", "ArrayCells", "Shapes", "decode_arrays", "value_type"]

NUMPY_TYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)
"""The numbers that LitData gives to numpy's types."""

TORCH_TYPES = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128"),
    *("complex128", "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16"),
    *("int32", "int32", "int64", "int64", "bool", "uint16"),
)
"""The numbers that LitData gives to torch's types; of two of one type it writes the latter."""


def value_type(dtype: np.dtype[Any]) -> pa.DataType:
    """The Arrow type of the values; that of one part for complex numbers."""
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
    return pa.from_numpy_dtype(dtype)


@dataclass(frozen=True)
class ArrayCells:
    """An array in each row, of one dtype.

    Attributes:
        dtype: Of the values; little-endian.
        data: The buffer that holds them.
        starts: Where each row's values begin.
        sizes: Their bytes.
        ndims: Number of dimensions of each row.
        dims: The dimensions of all rows, one after another.
    """

    dtype: np.dtype[Any]
    data: Bytes
    starts: Ints
    sizes: Ints
    ndims: Ints
    dims: Ints

    @cached_property
    def rank(self) -> int | None:
        """The number of dimensions if it is the same in all rows."""
        if not len(self.ndims):
            return None
        first = int(self.ndims[0])
        return first if bool((self.ndims == first).all()) else None

    def odd_one(self, shape: tuple[int, ...]) -> int | None:
        """The first row whose array is of another shape, or None."""
        if (other := np.flatnonzero(self.ndims != len(shape))).size:
            sure = int(other[0])
        else:
            sure = len(self.ndims)
        if sure and shape:
            dims = self.dims[: sure * len(shape)].reshape(sure, len(shape))
            if (different := np.flatnonzero((dims != np.array(shape)).any(axis=1))).size:
                return int(different[0])
        return sure if sure < len(self.ndims) else None

    def shape(self, row: int) -> tuple[int, ...]:
        """The shape of a row."""
        before = int(self.ndims[:row].sum())
        return tuple(self.dims[before : before + int(self.ndims[row])].tolist())

    def check(self, place: Place) -> None:
        """Raise unless the values of each row are as many as its shape says."""
        if not len(self.ndims):
            return
        counts = np.empty(len(self.ndims))
        offsets = list_offsets(self.ndims)
        ranks = [self.rank] if self.rank is not None else np.unique(self.ndims).tolist()
        for rank in ranks:
            rows = slice(None) if len(ranks) == 1 else np.flatnonzero(self.ndims == rank)
            dims = self.dims[offsets[:-1][rows][:, None] + np.arange(rank)]
            counts[rows] = dims.astype(np.float64).prod(axis=1)  # which cannot overflow
        if (bad := np.flatnonzero(counts * self.dtype.itemsize != self.sizes)).size:
            row = int(bad[0])
            raise place.damaged(
                f"{int(self.sizes[row]):,} bytes are not an array of {self.dtype} of shape "
                f"{self.shape(row)}",
                row,
            )
        if (large := np.flatnonzero(self.dims > MOST_OFFSETS)).size:
            row = int(np.searchsorted(offsets, large[0], "right") - 1)
            raise place.damaged(f"its shape {self.shape(row)} is beyond what a list holds", row)


@dataclass
class Shapes:
    """What has been seen of a column's arrays, and the type that follows from it.

    Attributes:
        ragged: Whether they are to be lists even if all are of one shape.
        dtype: Of all of them.
        shape: Of all of them, or None.
        rank: The number of dimensions of all of them, or None.
    """

    ragged: bool = False
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    rank: int | None = None

    def observe(self, cells: ArrayCells, place: Place) -> None:
        """Take note of some rows."""
        if not len(cells.ndims):
            return
        if self.dtype is None:
            self.dtype, self.shape, self.rank = cells.dtype, cells.shape(0), cells.rank
        elif cells.dtype != self.dtype:
            raise place.other_type(other_dtype(cells.dtype, self.dtype), 0)
        if self.shape is not None and cells.odd_one(self.shape) is not None:
            self.shape = None
        if cells.rank != self.rank:
            self.rank = None

    @property
    def type(self) -> pa.DataType:
        """The column's type."""
        assert self.dtype is not None
        kind = value_type(self.dtype)
        extra = (2,) if self.dtype.kind == "c" else ()
        shape = None if self.shape is None or self.ragged else (*self.shape, *extra)
        if shape is not None and 0 not in shape and math.prod(shape) <= MOST_OFFSETS:
            return pa.fixed_shape_tensor(kind, shape) if shape else kind
        rank = None if self.rank is None else self.rank + len(extra)
        if rank == 1:
            return pa.list_(kind)
        return ragged_type(kind)


def other_dtype(found: Any, wanted: Any) -> str:
    """What is wrong with an array of another dtype."""
    return (
        f"is an array of {found}, the column's are of {wanted}; nothing is cast: leave the column "
        "out with columns=, or write the dataset with one dtype"
    )


def decode_arrays(cells: ArrayCells, kind: pa.DataType, place: Place) -> pa.Array:
    """Make a column of arrays.

    Args:
        cells: The arrays, checked.
        kind: The column's type, as `Shapes` makes it.
        place: Of the rows.

    Raises:
        SchemaError: If a row has another shape or dtype than the column.
    """
    complex_ = cells.dtype.kind == "c"
    wanted = _values_of(kind)
    if wanted != value_type(cells.dtype) or (complex_ and not _nested(kind)):
        raise place.other_type(other_dtype(cells.dtype, wanted), 0)
    if isinstance(kind, pa.FixedShapeTensorType) or not _nested(kind):
        return _tensors(cells, kind, place)
    counts = cells.sizes // _parts(cells.dtype).itemsize
    if int(counts.sum()) > MOST_OFFSETS:
        raise place.damaged("has more values than a list holds", 0)
    numbers = packed(binary(cells.data, cells.starts, cells.sizes)).view(_parts(cells.dtype))
    values = primitive(numbers, wanted)
    lists = _lists(counts, values)
    if pa.types.is_list(kind):
        if (odd := np.flatnonzero(cells.ndims != 1)).size:
            row = int(odd[0])
            raise place.other_type(
                f"is an array of shape {cells.shape(row)}, the column's have one dimension: "
                "nothing is reshaped; leave the column out with columns=",
                row,
            )
        return lists
    dims, ndims = cells.dims, cells.ndims
    if complex_:  # real and imaginary part are one dimension more
        dims = np.insert(dims, np.cumsum(ndims), 2)
        ndims = ndims + 1
    shapes = _lists(ndims, primitive(dims.astype(np.int32), pa.int32()))
    return pa.StructArray.from_arrays([shapes, lists], fields=list(kind))


def _tensors(cells: ArrayCells, kind: pa.DataType, place: Place) -> pa.Array:
    shape = tuple(kind.shape) if isinstance(kind, pa.FixedShapeTensorType) else ()
    plain = shape[:-1] if cells.dtype.kind == "c" else shape
    if (row := cells.odd_one(plain)) is not None:
        name = (place.column or "").split(".")[0]
        raise place.other_type(
            f"is an array of shape {cells.shape(row)}, those before it are of shape {plain}: pass "
            f"ragged=[{name!r}] (or ragged=True) for a column of arrays of any shape",
            row,
        )
    width = int(np.prod(plain, dtype=np.int64)) * cells.dtype.itemsize
    numbers = fixed(cells.data, cells.starts, width).view(_parts(cells.dtype))
    values = primitive(numbers, _values_of(kind))
    if not isinstance(kind, pa.FixedShapeTensorType):
        return values
    storage = pa.FixedSizeListArray.from_arrays(values, type=kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)


def _parts(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def _nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or isinstance(kind, pa.FixedShapeTensorType))


def _values_of(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.value_type
    if pa.types.is_struct(kind):
        return kind.field("values").type.value_type
    return kind.value_type if pa.types.is_list(kind) else kind


def _lists(counts: Ints, values: pa.Array) -> pa.ListArray:
    offsets = list_offsets(counts).astype(np.int32)
    return pa.Array.from_buffers(
        pa.list_(values.type), len(counts), [None, pa.py_buffer(offsets)], children=[values]
    )
