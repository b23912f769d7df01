"""What a cache would keep of a stream, for `destrier plan`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from destrier.caching.blocks import Density, block_rows, least_density
from destrier.errors import ReadError, StorageError
from destrier.read import Reader
from destrier.selection import RowList
from destrier.table import Table

__all__ = ["CachedColumn", "report_cache"]


@dataclass(frozen=True)
class CachedColumn:
    """What a cache would keep of a column.

    Attributes:
        block_rows: Rows of a block.
        least_density: The part of a block's rows that the selection must have, else its rows are
            read from the table alone.
        kept_blocks: How many blocks have it, of those that the selection has rows in.
        blocks: Blocks that the selection has rows in.
    """

    name: str
    block_rows: int
    least_density: float
    kept_blocks: int
    blocks: int


def report_cache(table: Table, rows: RowList, columns: list[str]) -> list[CachedColumn]:
    """Decide for each column.

    Rows are read where the type does not say how wide values are; a column is left out if that
    fails.
    """
    density = Density(rows, table.num_rows)
    found = []
    for name in columns:
        reader = Reader(table, [name])
        try:
            size = block_rows(
                reader.schema.field(name).type,
                table.num_rows,
                lambda places, reader=reader: reader.read(places).batch.column(0),  # type: ignore[misc]
            )
        except (ReadError, StorageError):
            continue
        wanted = density.of(size, np.arange(-(-table.num_rows // size)))
        least = least_density(size)
        kept = int((wanted >= least).sum())
        found.append(CachedColumn(name, size, least, kept, int((wanted > 0).sum())))
    return found
