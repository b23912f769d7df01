"""The `ndarray` encodings: arrays of one shape and dtype, of any shape, of any dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.formats.gather import (
    MOST_OFFSETS,
    Ints,
    bounds_of,
    even,
    joined,
    list_offsets,
    uneven,
)
from destrier.formats.mds.cells import Cells
from destrier.formats.mds.encodings import DTYPES, Encoding, Fail
from destrier.formats.ragged import SHAPE, ragged_type

__all__ = ["Ragged", "Tensor", "array_encoding", "refuse_nulls"]

_NAMES = {code: dtype for dtype, code in DTYPES.items()}
_DIMENSIONS = 63


def array_encoding(name: str) -> Tensor | Ragged:
    """Read the name of an encoding that begins with ``ndarray``.

    Raises:
        ValueError: If there is no such encoding.
    """
    parts = name.split(":")
    dtype = parts[1] if len(parts) > 1 else None
    if parts[0] != "ndarray" or len(parts) > 3 or (dtype is not None and dtype not in DTYPES):
        raise ValueError(name)
    if len(parts) < 3:
        return Ragged(name, dtype)
    assert dtype is not None
    dimensions = parts[2].split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < len(part) < 11 for part in dimensions):
        raise ValueError(name)
    shape = tuple(int(part) for part in dimensions)
    if not 0 < math.prod(shape) <= MOST_OFFSETS:
        raise ValueError(name)
    return Tensor(name, dtype, shape)


def _arrow(dtype: str) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(dtype))


@dataclass(frozen=True)
class Tensor(Encoding):
    """Arrays of one dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:  # type: ignore[override]
        """Of an array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def type(self) -> pa.DataType:
        """A tensor of that shape."""
        return pa.fixed_shape_tensor(_arrow(self.dtype), self.shape)

    def decode(self, cells: Cells) -> pa.Array:
        """Gather."""
        data = cells.fixed(f"V{self.width}").view(np.uint8)
        size = math.prod(self.shape)
        values = _values(_arrow(self.dtype), pa.py_buffer(data), len(cells) * size)
        storage = pa.FixedSizeListArray.from_arrays(values, size)
        return pa.ExtensionArray.from_storage(self.type, storage)

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        """The values side by side."""
        values = array.storage.flatten()
        refuse_nulls(values, fail, np.arange(len(array) + 1) * math.prod(self.shape))
        return even(_data(values, self.dtype), len(array), self.width)


@dataclass(frozen=True)
class Ragged(Encoding):
    """Arrays whose shape, and perhaps dtype, stand in each value.

    Attributes:
        name: ``ndarray`` or ``ndarray:dtype``.
        dtype: Of the values, if it is known.
        form: ``list`` for arrays of one dimension, ``struct`` with shapes, or ``raw`` with dtypes
            and the values as bytes; None until the first row is seen.
    """

    name: str
    dtype: str | None = None
    form: str | None = None

    @property
    def tagged(self) -> bool:
        """Whether each value says its dtype."""
        return self.name == "ndarray"

    @property
    def type(self) -> pa.DataType:
        """As the form says."""
        if self.form == "raw":
            return pa.struct(
                [("dtype", pa.string()), ("shape", SHAPE), ("values", pa.large_binary())]
            )
        assert self.dtype is not None
        items = _arrow(self.dtype)
        return pa.list_(items) if self.form == "list" else ragged_type(items)

    def resolved(self, first: Cells | None, form: str | None) -> Ragged:
        """What the first row makes of it.

        Args:
            first: A single value, or None if there are no rows.
            form: ``"struct"`` or ``"raw"`` if that is chosen, None for what the first row shows.
        """
        if form == "raw" or (first is None and self.dtype is None):
            return replace(self, form="raw")
        if first is None:
            return replace(self, form="struct")
        codes, heads = self._heads(first)
        dtype = self.dtype or _NAMES[int(codes[0])]
        flat = form is None and int(heads[0]) >> 2 == 1
        return replace(self, dtype=dtype, form="list" if flat else "struct")

    @classmethod
    def fitting(cls, name: str, kind: pa.DataType) -> Ragged | None:
        """The encoding of that name whose values have a type of Arrow, if there is one."""
        dtype = None if name == "ndarray" else name.split(":")[1]
        for form in ("list", "struct", "raw"):
            for candidate in [dtype] if dtype else DTYPES:
                made = cls(name, candidate, form)
                if made.type == kind:
                    return made
        return None

    def _heads(self, cells: Cells) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The dtype and the dimensions byte of each value."""
        tag = int(self.tagged)
        cells.at_least(1 + tag, "the head of an array")
        heads = cells.fixed(np.uint8, tag)
        codes = cells.fixed(np.uint8) if tag else np.zeros(len(cells), np.uint8)
        if tag:
            known = np.isin(codes, list(_NAMES))
            if not known.all():
                index = int(np.argmin(known))
                raise cells.fail(index, f"has an array of dtype number {codes[index]}, unknown")
        return codes, heads

    def decode(self, cells: Cells) -> pa.Array:
        """Gather shapes and values."""
        codes, heads = self._heads(cells)
        itemsizes = self._itemsizes(cells, codes)
        dimensions = (heads >> 2).astype(np.int64)
        if self.form == "list" and (dimensions != 1).any():
            index = int(np.argmax(dimensions != 1))
            raise cells.differ(
                index,
                f"has {dimensions[index]} dimensions, but the first row has one",
                f"ragged=[{cells.column!r}] keeps shapes beside the values",
            )
        begin = np.int64(1 + self.tagged)
        head_bytes = begin + dimensions * (1 << (heads & 3).astype(np.int64))
        cells.at_least(head_bytes, "the shape of an array")
        shapes, counts = _shapes(cells, heads, int(begin))
        sizes = cells.lengths - head_bytes
        wrong = counts * itemsizes != sizes
        if wrong.any():
            index = int(np.argmax(wrong))
            raise cells.fail(
                index,
                f"has {sizes[index]:,} bytes of values, but its shape takes "
                f"{counts[index] * itemsizes[index]:,.0f}",
            )
        values = cells.within(cells.starts + head_bytes, sizes)
        if self.form == "raw":
            dtypes = pa.array(list(_NAMES.values())).take(
                pa.array(np.searchsorted(list(_NAMES), self._codes(codes)))
            )
            made = [dtypes, shapes, values.bytes()]
            return pa.StructArray.from_arrays(made, fields=list(self.type))
        amounts = sizes // itemsizes
        cells.fits(amounts, "values")
        bounds = list_offsets(amounts)
        assert self.dtype is not None
        kind = _arrow(self.dtype)
        flat = _values(kind, values.bytes().buffers()[2], int(bounds[-1]))
        lists = pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), flat)
        if self.form == "list":
            return lists
        return pa.StructArray.from_arrays([shapes, lists], fields=list(self.type))

    def _codes(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.tagged:
            return codes
        assert self.dtype is not None
        return np.full(len(codes), DTYPES[self.dtype], np.uint8)

    def _itemsizes(self, cells: Cells, codes: NDArray[np.uint8]) -> Ints:
        sizes = np.zeros(256, np.int64)
        for code, dtype in _NAMES.items():
            sizes[code] = np.dtype(dtype).itemsize
        if self.tagged and self.form != "raw":
            assert self.dtype is not None
            other = codes != DTYPES[self.dtype]
            if other.any():
                index = int(np.argmax(other))
                raise cells.differ(
                    index,
                    f"is an array of {_NAMES[int(codes[index])]}, but the first row's is of "
                    f"{self.dtype}",
                    f"raw_arrays=[{cells.column!r}] keeps dtype, shape and bytes of each",
                )
        return sizes[self._codes(codes)]

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        """Head, shape and values."""
        if self.form == "raw":
            return self._encode_raw(array, fail)
        lists = array if self.form == "list" else array.field("values")
        lengths, flat = _flat(lists, fail)
        if self.form == "list":
            dimensions, sides = np.ones(len(array), np.int64), lengths
        else:
            dimensions, shape = _flat(array.field("shape"), fail)
            sides = _data(shape, "int32").astype(np.int64)
        head = _encode_shapes(dimensions, sides, lengths, fail)
        assert self.dtype is not None
        size = np.dtype(self.dtype).itemsize
        parts = [head, uneven(_data(flat, self.dtype), list_offsets(lengths * size))]
        if self.tagged:
            code = np.full(len(array), DTYPES[self.dtype], np.uint8)
            parts.insert(0, even(code, len(array), 1))
        return joined(*parts)

    def _encode_raw(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        names = array.field("dtype").to_pylist()
        for index, name in enumerate(names):
            if name not in DTYPES or (not self.tagged and name != self.dtype):
                raise fail(index, f"is an array of dtype {name!r}, which {self.name} cannot hold")
        values = array.field("values")
        lengths = np.diff(bounds_of(values))
        itemsizes = np.array([np.dtype(name).itemsize for name in names], np.int64)
        dimensions, shape = _flat(array.field("shape"), fail)
        sides = _data(shape, "int32").astype(np.int64)
        if (lengths % itemsizes).any():
            index = int(np.argmax(lengths % itemsizes != 0))
            raise fail(index, f"has {lengths[index]:,} bytes of {names[index]} values")
        parts = [_encode_shapes(dimensions, sides, lengths // itemsizes, fail), values]
        if self.tagged:
            codes = np.array([DTYPES[name] for name in names], np.uint8)
            parts.insert(0, even(codes, len(array), 1))
        return joined(*parts)


def _values(kind: pa.DataType, buffer: pa.Buffer | None, count: int) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, buffer or pa.py_buffer(b"")], null_count=0)


def _shapes(cells: Cells, heads: NDArray[np.uint8], begin: int) -> tuple[pa.Array, NDArray[Any]]:
    """The shapes as lists, and their products as floats, which do not overflow."""
    dimensions = (heads >> 2).astype(np.int64)
    bounds = list_offsets(dimensions)
    flat = np.zeros(int(bounds[-1]), np.int32)
    counts = np.ones(len(cells), np.float64)
    for head in np.unique(heads).tolist():  # values with one head have sides of one width
        rank, width = head >> 2, 1 << (head & 3)
        if not rank:
            continue
        chosen = np.flatnonzero(heads == head)
        part = Cells(
            cells.buffer,
            cells.starts[chosen],
            cells.lengths[chosen],
            cells.rows[chosen],
            cells.file,
            cells.column,
        )
        sides = part.fixed(f"V{rank * width}", begin).view(f"<u{width}").reshape(-1, rank)
        large = (sides > MOST_OFFSETS).any(axis=1)
        if large.any():
            index = int(np.argmax(large))
            raise part.fail(index, f"has an array of shape {sides[index].tolist()}, too large")
        flat[bounds[chosen][:, None] + np.arange(rank)] = sides
        counts[chosen] = sides.astype(np.float64).prod(axis=1)
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(flat)), counts


def _encode_shapes(dimensions: Ints, sides: Ints, counts: Ints, fail: Fail) -> pa.LargeBinaryArray:
    """Head byte and sides, in the narrowest width that holds the largest side."""
    count = len(dimensions)
    bounds = list_offsets(dimensions)
    heads: list[bytes] = []
    for index in range(count):
        shape = sides[bounds[index] : bounds[index + 1]].tolist()
        if not 1 <= len(shape) <= _DIMENSIONS or min(shape) < 1:
            raise fail(
                index, f"is an array of shape {shape}; MDS has no empty arrays and no scalars in it"
            )
        if math.prod(shape) != counts[index]:
            raise fail(index, f"has {counts[index]:,} values, but the shape {shape}")
        power = 0 if max(shape) < 1 << 8 else 1 if max(shape) < 1 << 16 else 2
        packed = np.array(shape, f"<u{1 << power}").tobytes()
        heads.append(bytes([len(shape) << 2 | power]) + packed)
    return pa.array(heads, pa.large_binary())


def _flat(lists: pa.ListArray, fail: Fail) -> tuple[Ints, pa.Array]:
    """The lengths of lists and their values, none of which is null."""
    bounds = bounds_of(lists)
    values = lists.flatten()
    refuse_nulls(values, fail, bounds - bounds[0])
    return np.diff(bounds), values


def refuse_nulls(values: pa.Array, fail: Fail, bounds: Any) -> None:
    """Raise if one of the values of lists is null.

    Args:
        values: Of all lists, one list after the other.
        fail: Makes the error for a list.
        bounds: Where each list begins in the values.
    """
    if values.null_count:
        place = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        index = int(np.searchsorted(bounds, place, "right")) - 1
        raise fail(index, "has a null among its values; MDS has none")


def _data(values: pa.Array, dtype: str) -> NDArray[Any]:
    made: NDArray[Any] = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    assert made.dtype == np.dtype(dtype)
    return made
