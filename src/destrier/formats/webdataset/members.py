"""What members become by their extension: columns of numbers, text, arrays or bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.formats.gather import MOST_OFFSETS, Ints, list_offsets, text
from destrier.formats.media import CONTENT_TYPE_KEY, content_type
from destrier.formats.ragged import ragged_type
from destrier.formats.webdataset.npy import Header, array_of, header_of, value_type
from destrier.writing.source import ENCODING_KEY, LINK

__all__ = ["KINDS", "Arrays", "Cells", "decode", "default_kind", "is_array", "make_field"]

KINDS = ("int", "string", "json", "tensor", "ragged", "bytes")
"""What a member can be read as; see `decode`."""

_DEFAULTS = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript"), "string"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "tensor",
}
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")

Fault = Callable[[int, str], NoReturn]
"""Raises the error for a cell of a batch, by its position among the cells."""


@dataclass
class Cells:
    """The members of one extension in a batch.

    Attributes:
        rows: In the batch, ascending.
        positions: In the tar.
        sizes: In bytes.
        payloads: What they hold, where that was asked for.
    """

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)

    def valid(self, count: int) -> NDArray[np.bool_] | None:
        """Which of a batch's rows have one; None if all do."""
        if len(self.rows) == count:
            return None
        valid = np.zeros(count, bool)
        valid[self.rows] = True
        return valid


@dataclass
class Arrays:
    """What the arrays of an extension have in common, as far as they were seen.

    Attributes:
        first: The header of the first one.
        other: Of the first one that has another type or shape.
        dimensions: All numbers of dimensions.
        dtypes: All types.
    """

    first: Header | None = None
    other: Header | None = None
    dimensions: set[int] = field(default_factory=set)
    dtypes: set[np.dtype[np.generic]] = field(default_factory=set)

    def add(self, header: Header) -> None:
        """Take in one more array."""
        if self.first is None:
            self.first = header
        elif _shaped(header) != _shaped(self.first) and self.other is None:
            self.other = header
        self.dimensions.add(len(header.shape))
        self.dtypes.add(header.dtype.newbyteorder("="))


def _shaped(header: Header) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    return header.dtype.newbyteorder("="), header.shape


def default_kind(extension: str) -> str:
    """What members of an extension are read as, as webdataset decodes them."""
    return _DEFAULTS.get(extension.rpartition(".")[2], "bytes")


def is_array(kind: str) -> bool:
    """Whether the type of a column of this kind is known only from the members."""
    return kind in ("tensor", "ragged")


def make_field(name: str, extension: str, kind: str, arrays: Arrays, *, link: bool) -> pa.Field:
    """The column of an extension.

    Raises:
        ValueError: If the arrays have no type in common.
    """
    metadata = {ENCODING_KEY: f"webdataset:{extension}".encode()}
    if kind == "json":
        metadata[CONTENT_TYPE_KEY] = b"application/json"
    if kind == "bytes" and (known := content_type(extension.rpartition(".")[2])):
        metadata[CONTENT_TYPE_KEY] = known.encode()
    return pa.field(name, _type(kind, arrays, link=link), metadata=metadata)


def _type(kind: str, arrays: Arrays, *, link: bool) -> pa.DataType:
    if kind == "int":
        return pa.int64()
    if kind in ("string", "json"):
        return pa.string()
    if kind == "bytes":
        return LINK if link else pa.large_binary()
    if arrays.first is None:
        raise ValueError("no member shows the type of its arrays")
    if len(arrays.dtypes) > 1:
        raise ValueError(f"its arrays are of different types: {sorted(map(str, arrays.dtypes))}")
    items = value_type(arrays.first.dtype)
    if kind == "tensor":
        if arrays.other is not None:
            raise ValueError(
                f"its arrays have different shapes, {arrays.first.shape} and {arrays.other.shape}"
            )
        if 0 in arrays.first.shape:
            raise ValueError(f"its arrays are empty: shape {arrays.first.shape}")
        shape = list(arrays.first.shape)
        return pa.fixed_shape_tensor(items, shape) if shape else items
    if arrays.dimensions == {1}:
        return pa.list_(items)
    return ragged_type(items)


def decode(cells: Cells, kind: str, wanted: pa.DataType, count: int, fault: Fault) -> pa.Array:
    """Bring the members of one extension into a column of a batch.

    Args:
        cells: The members, with what they hold.
        kind: One of `KINDS`.
        wanted: The column's type.
        count: Rows of the batch; those without a member are null.
        fault: Called for a member that is not of the type.
    """
    valid = cells.valid(count)
    if kind == "bytes":
        return _bytes(cells, valid, count)
    if kind in ("string", "json"):
        return _strings(cells, valid, count, fault)
    if kind == "int":
        values = np.zeros(count, np.int64)
        values[cells.rows] = [_integer(p, i, fault) for i, p in enumerate(cells.payloads)]
        return pa.array(values, mask=None if valid is None else ~valid)
    headers = [_header(p, i, fault) for i, p in enumerate(cells.payloads)]
    if kind == "tensor":
        return _tensors(cells, headers, wanted, valid, count, fault)
    return _ragged(cells, headers, wanted, valid, count, fault)


def _bytes(cells: Cells, valid: NDArray[np.bool_] | None, count: int) -> pa.Array:
    offsets = _offsets(cells.sizes, cells.rows, count)
    buffers = [_bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(cells.payloads))]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def _strings(cells: Cells, valid: NDArray[np.bool_] | None, count: int, fault: Fault) -> pa.Array:
    if sum(cells.sizes) > MOST_OFFSETS:
        fault(0, "it is longer than 2 GiB, which text cannot be")

    def fail(row: int, problem: str) -> NoReturn:
        fault(cells.rows.index(row), f"it {problem}")

    return text(_bytes(cells, valid, count), fail)


def _integer(payload: memoryview, i: int, fault: Fault) -> int:
    digits = bytes(payload[:64]).strip()
    plain = _INTEGER.fullmatch(digits) is not None and len(payload) <= 64
    if not plain or not -(2**63) <= int(digits) < 2**63:
        fault(i, f"it is {bytes(payload[:40])!r}, not an integer as it is usually written")
    return int(digits)


def _header(payload: memoryview, i: int, fault: Fault) -> Header:
    try:
        return header_of(payload)
    except ValueError as error:
        fault(i, str(error))


def _tensors(
    cells: Cells,
    headers: Sequence[Header],
    wanted: pa.DataType,
    valid: NDArray[np.bool_] | None,
    count: int,
    fault: Fault,
) -> pa.Array:
    tensor = isinstance(wanted, pa.FixedShapeTensorType)
    shape = tuple(wanted.shape) if tensor else ()
    dtype = np.dtype((wanted.value_type if tensor else wanted).to_pandas_dtype())
    values = np.zeros((count, int(np.prod(shape, dtype=np.int64))), dtype)
    for i, (row, header) in enumerate(zip(cells.rows, headers, strict=True)):
        if _shaped(header) != (dtype, shape):
            fault(
                i,
                f"it is an array of {header.dtype.newbyteorder('=')} and shape {header.shape}, "
                f"but its column has {dtype} and {shape}",
            )
        values[row] = array_of(cells.payloads[i], header)
    mask = None if valid is None else pa.array(~valid)
    if not tensor:
        return pa.array(values[:, 0], mask=None if valid is None else ~valid)
    flat = pa.array(values.reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(flat, type=wanted.storage_type, mask=mask)
    return pa.ExtensionArray.from_storage(wanted, storage)


def _ragged(
    cells: Cells,
    headers: Sequence[Header],
    wanted: pa.DataType,
    valid: NDArray[np.bool_] | None,
    count: int,
    fault: Fault,
) -> pa.Array:
    nested = pa.types.is_struct(wanted)
    lists = wanted.field("values").type if nested else wanted
    dtype = np.dtype(lists.value_type.to_pandas_dtype())
    arrays = []
    for i, header in enumerate(headers):
        if header.dtype.newbyteorder("=") != dtype or (not nested and len(header.shape) != 1):
            fault(
                i,
                f"it is an array of {header.dtype.newbyteorder('=')} with {len(header.shape)} "
                f"dimensions, but its column has {dtype}{'' if nested else ' and one dimension'}",
            )
        arrays.append(array_of(cells.payloads[i], header))
    lengths = [len(array) for array in arrays]
    if sum(lengths) > MOST_OFFSETS:
        fault(0, f"it has {max(lengths):,} items, more than a list can hold")
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    values = _lists(lists, lengths, cells.rows, flat, None if nested else valid, count)
    if not nested:
        return values
    shapes = np.array([length for header in headers for length in header.shape], np.int32)
    dimensions = [len(header.shape) for header in headers]
    shape = _lists(wanted.field("shape").type, dimensions, cells.rows, shapes, None, count)
    mask = None if valid is None else pa.array(~valid)
    return pa.StructArray.from_arrays([shape, values], fields=list(wanted), mask=mask)


def _lists(
    kind: pa.DataType,
    lengths: list[int],
    rows: list[int],
    flat: NDArray[np.generic],
    valid: NDArray[np.bool_] | None,
    count: int,
) -> pa.Array:
    offsets = _offsets(lengths, rows, count).astype(np.int32)
    children = [pa.array(flat)]
    buffers = [_bitmap(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, count, buffers, children=children)


def _offsets(sizes: list[int], rows: list[int], count: int) -> Ints:
    spread = np.zeros(count, np.int64)
    spread[rows] = sizes
    return list_offsets(spread)


def _bitmap(valid: NDArray[np.bool_] | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
