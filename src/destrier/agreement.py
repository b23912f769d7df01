"""Types in which the values of a table and those of its export can be compared.

A format that is exported to has fewer types than a table. It keeps an integer in 64 bits, an array
of fixed size as any array, a struct as JSON. Both sides are brought into a type that holds the
values of either, so that they are equal there if, and only if, they were equal before.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.formats.gather import bounds_of
from destrier.formats.media import CONTENT_TYPE_KEY
from destrier.formats.ragged import is_ragged, ragged_type

__all__ = ["agreed", "brought", "wide"]

_JSON = pa.json_(pa.large_string())
_INTEGERS = pa.decimal128(20, 0)  # from int64's least to uint64's greatest


def wide(kind: pa.DataType) -> pa.DataType:
    """Text and bytes with 64-bit offsets: other formats do not tell them from those with 32."""
    return {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}.get(kind, kind)


def agreed(export: pa.Field, table: pa.Field) -> pa.DataType | None:
    """The type in which a column of an export and that of its table can be compared.

    Returns:
        The type, or None if the values of one side are never those of the other.

    Example:
        >>> agreed(pa.field("x", pa.int64()), pa.field("x", pa.int16()))
        DataType(int64)
        >>> agreed(pa.field("x", pa.int64()), pa.field("x", pa.float32())) is None
        True
    """
    declared = (export.metadata or {}).get(CONTENT_TYPE_KEY)
    if declared == b"application/json" and _is_text(export.type) and _has_json(table.type):
        return _JSON
    one, other = export.type, table.type
    if _shape(one) is not None and _shape(one) == _shape(other):
        one, other = _flat_type(one), _flat_type(other)
    return _agreed(one, other)


def brought(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bring a column of either side into the type that was agreed on."""
    if array.type == kind:
        return array
    if kind == _JSON:
        return pa.ExtensionArray.from_storage(_JSON, _json_texts(array))
    if is_ragged(kind) and not pa.types.is_struct(array.type):
        array = _with_shapes(array)
    return _flat(array).cast(kind)


def _agreed(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if one == other:
        return one
    types = pa.types
    if types.is_integer(one) and types.is_integer(other):
        return _INTEGERS if pa.uint64() in (one, other) else pa.int64()
    for belongs, widest in _WIDEST:
        if belongs(one) and belongs(other):
            return widest
    if types.is_struct(one) and types.is_struct(other):
        return _agreed_struct(one, other)
    return _agreed_lists(one, other)


def _agreed_lists(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    shaped = is_ragged(one) or is_ragged(other)
    one, other = (each.field(1).type if is_ragged(each) else each for each in (one, other))
    if not (_is_list(one) and _is_list(other)):
        return None
    inner = _agreed(one.value_type, other.value_type)
    if inner is None:
        return None
    return ragged_type(inner) if shaped else pa.large_list(inner)


def _agreed_struct(one: pa.StructType, other: pa.StructType) -> pa.DataType | None:
    names = {field.name for field in one}
    if len(names) < one.num_fields or names != {field.name for field in other}:
        return None
    fields = [(each.name, _agreed(each.type, other.field(each.name).type)) for each in one]
    if any(kind is None for _, kind in fields):
        return None
    return pa.struct(fields)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


_WIDEST = (
    (pa.types.is_floating, pa.float64()),
    (_is_text, pa.large_string()),
    (_is_bytes, pa.large_binary()),
)


def _has_json(kind: pa.DataType) -> bool:
    """Whether JSON has the values, and they are not a text, which might be JSON itself."""
    return not _is_text(kind) and _is_json(kind)


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if _is_list(kind):
        return _is_json(kind.value_type)
    types = pa.types
    plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(plain or types.is_null(kind) or _is_text(kind))


def _json_texts(array: pa.Array) -> pa.Array:
    """The JSON of each value, written in one way."""
    write = _rewritten if _is_text(array.type) else _written
    return pa.array([write(value) for value in array.to_pylist()], pa.large_string())


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _rewritten(text: str | None) -> str:
    try:
        return _written(None if text is None else json.loads(text))
    except ValueError:
        return text or ""  # which is equal to no JSON


def _shape(kind: pa.DataType) -> tuple[int, ...] | None:
    """Of arrays of one shape."""
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation
        return tuple(kind.shape) if order is None or list(order) == sorted(order) else None
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    return shape or None


def _flat_type(kind: pa.DataType) -> pa.DataType:
    size = math.prod(_shape(kind) or ())
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.storage_type
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return pa.list_(kind, size)


def _flat(array: pa.Array) -> pa.Array:
    """Arrays of one shape as lists of numbers."""
    if isinstance(array, pa.ExtensionArray):
        return array.storage
    kind = array.type
    if not pa.types.is_fixed_size_list(kind) or not pa.types.is_fixed_size_list(kind.value_type):
        return array
    values = array
    size = 1
    while pa.types.is_fixed_size_list(values.type):
        size *= values.type.list_size
        step = values.type.list_size
        values = values.values.slice(values.offset * step, len(values) * step)
    mask = array.is_null() if array.null_count else None
    return pa.FixedSizeListArray.from_arrays(values, size, mask=mask)


def _with_shapes(array: pa.Array) -> pa.Array:
    """Lists as structs of shape and values: each is an array of one dimension."""
    values = _flat(array)
    wide_lists = values.cast(pa.large_list(values.type.value_type))
    lengths = np.diff(bounds_of(wide_lists)).astype(np.int32)
    offsets = pa.array(np.arange(len(lengths) + 1, dtype=np.int32))
    shapes = pa.ListArray.from_arrays(offsets, pa.array(lengths))
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays([shapes, wide_lists], ["shape", "values"], mask=mask)
