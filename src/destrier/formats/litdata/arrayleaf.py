"""Leaves that are arrays, with or without a header of dtype and shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from destrier.formats.gather import binary, packed
from destrier.formats.litdata.arrays import (
    NUMPY_TYPES,
    TORCH_TYPES,
    ArrayCells,
    Shapes,
    decode_arrays,
    other_dtype,
)
from destrier.formats.litdata.cells import Cells, Codec
from destrier.formats.litdata.places import Place

__all__ = ["ArrayCodec"]

_MOST_DIMS = 64


class ArrayCodec(Codec):
    """Arrays, with or without a header of dtype and shape."""

    def __init__(self, encoding: str, ragged: bool) -> None:
        super().__init__(encoding)
        name, _, number = encoding.partition(":")
        self._types = NUMPY_TYPES if name.endswith("numpy") else TORCH_TYPES
        self._order = "<" if name == "numpy" else ">"
        self._headed = name in ("numpy", "tensor")
        self._number = number
        self._shapes = Shapes(ragged)

    @property
    def type(self) -> pa.DataType | None:
        """A tensor if all arrays of the first chunk are of one shape, else lists."""
        if self._shapes.dtype is None:
            return None
        if self._headed and self._shapes.dtype.kind == "c":
            # from the Arrow type alone it could be an array of pairs
            self.encoding = f"{self.encoding.split(':')[0]}:{self._shapes.dtype}"
        return self._shapes.type

    def observe(self, cells: Cells) -> None:
        """Take note of dtype and shapes."""
        if len(cells.starts):
            self._shapes.observe(self._cells(cells), cells.place)

    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:
        """Make a column."""
        return decode_arrays(self._cells(cells), kind, cells.place)

    def _cells(self, cells: Cells) -> ArrayCells:
        found = self._with_header(cells) if self._headed else self._without_header(cells)
        found.check(cells.place)
        return found

    def _without_header(self, cells: Cells) -> ArrayCells:
        number = int(self._number) if self._number.isdecimal() else -1
        dtype = self._dtype(number, cells.place, None)
        counts, rest = np.divmod(cells.sizes, dtype.itemsize)
        if (odd := np.flatnonzero(rest)).size:
            row = int(odd[0])
            raise cells.place.damaged(f"{cells.sizes[row]:,} bytes are no array of {dtype}", row)
        ones = np.ones(len(counts), np.int64)
        return ArrayCells(dtype, cells.data, cells.starts, cells.sizes, ones, counts)

    def _with_header(self, cells: Cells) -> ArrayCells:
        numbers = f"{self._order}u4"
        head = cells.header(8, "an array's dtype and shape").view(numbers).reshape(-1, 2)
        ndims = head[:, 1].astype(np.int64)
        heads = 8 + 4 * ndims
        if (long := np.flatnonzero((ndims > _MOST_DIMS) | (heads > cells.sizes))).size:
            row = int(long[0])
            raise cells.place.damaged(f"claims an array of {ndims[row]:,} dimensions", row)
        dtype = self._dtype(int(head[0, 0]), cells.place, 0)
        same = np.array([name == str(dtype) for name in self._types])
        ids = head[:, 0].astype(np.int64)
        unknown = ids >= len(same)
        if (odd := np.flatnonzero(unknown | ~same[np.where(unknown, 0, ids)])).size:
            row = int(odd[0])
            found = self._dtype(int(ids[row]), cells.place, row)
            raise cells.place.other_type(other_dtype(found, dtype), row)
        dims = packed(binary(cells.data, cells.starts + 8, 4 * ndims)).view(numbers)
        return ArrayCells(
            dtype,
            cells.data,
            cells.starts + heads,
            cells.sizes - heads,
            ndims,
            dims.astype(np.int64),
        )

    def _dtype(self, number: int, place: Place, row: int | None) -> np.dtype[Any]:
        if not 0 <= number < len(self._types):
            raise place.damaged(f"is an array of the unknown dtype {number}", row)
        if self._types[number] == "bfloat16":
            raise place.damaged(
                "is an array of bfloat16, which Arrow does not have: leave the column out with "
                "columns=, or write the dataset as float32",
                row,
            )
        return np.dtype(self._types[number])
