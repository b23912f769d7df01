"""Linked columns: which they are, and what lies outside the table.

The values of a linked column are ranges of files that stay where they are. A column beside it, its
*companion*, holds size and time of the whole file of each value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import ColumnError, ReadError
from destrier.lancecalls import lance_call
from destrier.table import Table
from destrier.writing.layout import LINK_KEY, is_blob

__all__ = [
    "companion",
    "companions",
    "delivered_columns",
    "linked_columns",
    "outside_row_bytes",
]

_INLINE = 0  # the kind of a blob, in Lance's descriptors, that lies in the data file
_SAMPLED_RUNS, _SAMPLED_ROWS = 8, 32
_RECORDED = (("file_size", pa.uint64()), ("file_stamp", pa.int64()))


def companion(schema: pa.Schema, name: str) -> str | None:
    """Return the name of the column with size and time of a linked column's files.

    Returns:
        None if the column is not linked.

    Raises:
        ColumnError: If that column is not there, or of another type.
    """
    field = schema.field(name)
    named: bytes | None = (field.metadata or {}).get(LINK_KEY)
    if named is None or not is_blob(field):
        return None
    beside = named.decode(errors="replace")
    kind = schema.field(beside).type if beside in schema.names else None
    if kind is None or not pa.types.is_struct(kind):
        kind = pa.struct([])
    if any(kind.get_field_index(n) < 0 or kind.field(n).type != t for n, t in _RECORDED):
        raise ColumnError(
            f"column {name!r} is linked, but {beside!r}, which holds sizes and times of its files, "
            "is not in the table as it was written; link the source again"
        )
    return beside


def linked_columns(schema: pa.Schema) -> dict[str, str]:
    """Return the companion of each linked column."""
    found = {name: companion(schema, name) for name in schema.names}
    return {name: beside for name, beside in found.items() if beside is not None}


def companions(schema: pa.Schema) -> set[str]:
    """Return the names that linked columns give for their companions."""
    metadata = (field.metadata or {} for field in schema if is_blob(field))
    return {each[LINK_KEY].decode(errors="replace") for each in metadata if LINK_KEY in each}


def delivered_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that a stream delivers where none are named: all but companions."""
    hidden = companions(schema)
    return [name for name in schema.names if name not in hidden]


def outside_row_bytes(table: Table, columns: Sequence[str]) -> float:
    """Bytes of a row that lie outside the table's data files, in the mean, from a few rows.

    Args:
        table: The table.
        columns: Names of columns; those that are no blobs have nothing outside.
    """
    names = [n for n in columns if n in table.schema.names and _has_descriptors(table, n)]
    rows = table.num_rows
    if not names or not rows:
        return 0.0
    starts = np.arange(_SAMPLED_RUNS) * rows // _SAMPLED_RUNS
    places = np.unique(starts[:, None] + np.arange(_SAMPLED_ROWS))
    places = places[places < rows]

    def look() -> int:
        taken = table.dataset.take(pa.array(places), columns=names)
        return sum(_outside(taken.column(name)) for name in names)

    try:
        total: int = lance_call(f"reading {table.name}", look, table.secrets)
    except ReadError:
        return 0.0  # it is an error where its batch comes
    return total / len(places)


def _has_descriptors(table: Table, name: str) -> bool:
    field = table.schema.field(name)
    return is_blob(field) and not pa.types.is_large_binary(field.type)


def _outside(described: pa.ChunkedArray) -> int:
    kinds, sizes = pc.struct_field(described, "kind"), pc.struct_field(described, "size")
    total: int | None = pc.sum(pc.if_else(pc.not_equal(kinds, _INLINE), sizes, 0)).as_py()
    return total or 0
