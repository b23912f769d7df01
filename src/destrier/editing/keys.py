"""Columns by which rows are told apart."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import ArgumentError, ColumnError
from destrier.table import Table
from destrier.writing.layout import is_blob

__all__ = ["check_key", "check_keys"]


def check_key(table: Table, column: str) -> pa.Field:
    """The field of a key column.

    Raises:
        ColumnError: If it is not there, or not of a type whose values can be told apart exactly.
    """
    table.check_columns([column])
    field = table.schema.field(column)
    tests = (
        pa.types.is_integer,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    if is_blob(field) or not any(test(field.type) for test in tests):
        raise ColumnError(
            f"column {column!r} of {table.name} is {'a blob' if is_blob(field) else field.type}; "
            "a key column holds integers, text or bytes"
        )
    return field


def check_keys(keys: pa.Array, column: str) -> None:
    """Raise unless each row of data has a key of its own.

    Raises:
        ArgumentError: Naming the rows.
    """
    if keys.null_count:
        row = keys.is_null().index(True).as_py()
        raise ArgumentError(f"row {row} of the data has no key: column {column!r} is null")
    counts = pc.value_counts(keys)
    often = pc.greater(counts.field("counts"), 1).index(True).as_py()
    if often >= 0:
        key = counts.field("values")[often]
        first = pc.index(keys, key).as_py()
        second = pc.index(keys.slice(first + 1), key).as_py() + first + 1
        raise ArgumentError(
            f"key {key.as_py()!r} is in the data twice, in rows {first} and {second} (column "
            f"{column!r}): which of them is to stay?"
        )
