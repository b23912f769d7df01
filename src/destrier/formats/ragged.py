"""Arrays of any shape as a column: structs of shape and values."""

from __future__ import annotations

import pyarrow as pa

from destrier.encoding.arrays import RAGGED_FIELDS

__all__ = ["SHAPE", "is_ragged", "ragged_type"]

SHAPE = pa.list_(pa.int32())
"""The type of the shapes."""


def ragged_type(items: pa.DataType) -> pa.StructType:
    """The struct of arrays of these items.

    Example:
        >>> ragged_type(pa.int8()).names
        ['shape', 'values']
    """
    return pa.struct(list(zip(RAGGED_FIELDS, (SHAPE, pa.list_(items)), strict=True)))


def is_ragged(kind: pa.DataType) -> bool:
    """Whether it is such a struct."""
    return bool(
        pa.types.is_struct(kind)
        and tuple(field.name for field in kind) == RAGGED_FIELDS
        and kind.field(0).type == SHAPE
        and pa.types.is_list(kind.field(1).type)
    )
