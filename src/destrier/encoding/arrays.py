"""NumPy arrays of a column as Arrow: tensors of one shape, or ragged lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.encoding.exact import cast_exactly
from destrier.encoding.misfit import Misfit, shown
from destrier.encoding.scalars import items_to_arrow

__all__ = ["RAGGED_FIELDS", "arrays_to_arrow", "list_array", "mask_of"]

RAGGED_FIELDS = ("shape", "values")
"""The fields of a struct that holds an array of any shape."""

_MOST_ITEMS = 2**31 - 1


def arrays_to_arrow(
    values: Sequence[NDArray[Any] | None], want: pa.DataType | None, *, declared: bool
) -> pa.Array:
    """Make an Arrow array of arrays of one dtype, None for null.

    Arrays of one shape become fixed-shape tensors; those of one dimension and several lengths
    become lists; others become structs of shape and values.

    Args:
        values: Contiguous arrays of at least one dimension.
        want: The column's type, or None to find it.
        declared: Whether items may be cast exactly to the column's.

    Raises:
        Misfit: If an array is of another type or shape than the column's.
    """
    shapes = {value.shape for value in values if value is not None}
    if want is None:
        shape = next(iter(shapes)) if len(shapes) == 1 else ()
        if math.prod(shape) and shape:
            return _tensors(values, shape, None, None, declared=declared)
        if all(len(shape) == 1 for shape in shapes):
            return _lists(values, None, None, declared=declared)
        return _ragged(values, None, declared=declared)
    if isinstance(want, pa.FixedShapeTensorType):
        shape = tuple(want.shape)
        for i, value in enumerate(values):
            if value is not None and value.shape != shape:
                raise Misfit(
                    i,
                    f"got shape {value.shape}, but the column holds arrays of shape {shape}; for "
                    "arrays of several shapes declare schema= with a list, or a struct of shape "
                    "and values",
                )
        if want.permutation:
            raise Misfit(0, "arrays cannot be put into tensors of permuted dimensions")
        return _tensors(values, shape, want, want.value_type, declared=declared)
    if pa.types.is_list(want) or pa.types.is_large_list(want) or pa.types.is_fixed_size_list(want):
        return _lists(values, want, want.value_type, declared=declared)
    if pa.types.is_struct(want) and tuple(field.name for field in want) == RAGGED_FIELDS:
        return _ragged(values, want, declared=declared)
    at = next(i for i, value in enumerate(values) if value is not None)
    raise Misfit(at, f"got {shown(values[at])}, but the column is {want}")


def _flat(
    values: Sequence[NDArray[Any] | None],
    want: pa.DataType | None,
    filler: NDArray[Any] | None,
    *,
    declared: bool,
) -> pa.Array:
    """The items of all arrays in one."""
    parts = [filler if value is None else value.reshape(-1) for value in values]
    items = np.concatenate([part for part in parts if part is not None])
    try:
        array = items_to_arrow(items)
        if want is None or array.type == want:
            return array
        if len(items):
            return cast_exactly(array, want, items, declared=declared)
    except Misfit as misfit:
        ends = np.cumsum([0 if part is None else len(part) for part in parts])
        row = int(np.searchsorted(ends, misfit.index, "right"))
        inside = misfit.index - int(ends[row - 1] if row else 0)
        raise misfit.at(row, f"[{inside}]") from None
    if declared:
        return pa.nulls(0, want)
    at = next(i for i, value in enumerate(values) if value is not None)
    raise Misfit(at, f"got an array of {array.type}, but the column's items are {want}")


def mask_of(values: Sequence[Any]) -> pa.Array | None:
    """Which values are null, or None if none is."""
    mask = [value is None for value in values]
    return pa.array(mask) if True in mask else None


def _tensors(
    values: Sequence[NDArray[Any] | None],
    shape: tuple[int, ...],
    want: pa.DataType | None,
    item: pa.DataType | None,
    *,
    declared: bool,
) -> pa.Array:
    size = math.prod(shape)
    one = next(value for value in values if value is not None)
    flat = _flat(values, item, np.zeros(size, one.dtype), declared=declared)
    kind = pa.fixed_shape_tensor(flat.type, shape) if want is None else want
    storage = pa.FixedSizeListArray.from_arrays(flat, size, mask=mask_of(values))
    return pa.ExtensionArray.from_storage(kind, storage.cast(kind.storage_type))


def _lists(
    values: Sequence[NDArray[Any] | None],
    want: pa.DataType | None,
    item: pa.DataType | None,
    *,
    declared: bool,
) -> pa.Array:
    for i, value in enumerate(values):
        if value is not None and value.ndim != 1:
            raise Misfit(i, f"got shape {value.shape}, but the column is {want}")
    flat = _flat(values, item, None, declared=declared)
    return list_array(values, flat, pa.list_(flat.type) if want is None else want)


def list_array(values: Sequence[Any], child: pa.Array, kind: pa.DataType) -> pa.Array:
    """Make an array of lists.

    Args:
        values: Whose lengths are those of the lists; None for null.
        child: Their items.
        kind: Of lists, large lists or lists of a fixed size.

    Raises:
        Misfit: If a length is not that of the type, or they are too many for it.
    """
    lengths = np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    mask = mask_of(values)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(offsets, child, type=kind, mask=mask)
    if offsets[-1] > _MOST_ITEMS:
        raise Misfit(int(np.argmax(lengths)), f"{offsets[-1]} items: declare a large_list")
    array = pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        child,
        type=kind if pa.types.is_list(kind) else pa.list_(kind.value_field),
        mask=mask,
    )
    if pa.types.is_list(kind):
        return array
    for i, value in enumerate(values):
        if value is not None and len(value) != kind.list_size:
            raise Misfit(i, f"{len(value)} items, but the column is {kind}")
    return array.cast(kind)


def _ragged(
    values: Sequence[NDArray[Any] | None], want: pa.DataType | None, *, declared: bool
) -> pa.Array:
    shapes = [None if value is None else np.array(value.shape, np.int32) for value in values]
    flats = [None if value is None else value.reshape(-1) for value in values]
    kinds = [None, None] if want is None else [field.type for field in want]
    arrays = [_lists(shapes, kinds[0], kinds[0] and kinds[0].value_type, declared=declared)]
    try:
        arrays.append(_lists(flats, kinds[1], kinds[1] and kinds[1].value_type, declared=declared))
    except Misfit as misfit:
        raise misfit.at(misfit.index, ".values") from None
    fields = (
        [pa.field(n, a.type) for n, a in zip(RAGGED_FIELDS, arrays, strict=True)]
        if want is None
        else list(want)
    )
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask_of(values))
