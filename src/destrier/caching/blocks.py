"""Which rows of a column make a block, and which blocks are worth keeping.

Blocks are fixed ranges of row offsets. Their size follows from the bytes of the column's rows
alone, so that order, filter and clump have no part in what a block is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.columns import dense_bytes, dense_type
from destrier.keyed import Ints
from destrier.lancecalls import lance_call
from destrier.lists import OrderedRows
from destrier.rowlists import StackedRows
from destrier.selection import BitmapRows, OffsetRows, RangeRows, RowList
from destrier.table import Table

__all__ = ["BLOCK_BYTES", "Density", "block_row_bytes", "block_rows", "column_key", "least_density"]

BLOCK_BYTES = 2 << 20
_MOST_ROWS = 1 << 20
_SAMPLED_RUNS, _SAMPLED_ROWS = 4, 16
_FORMAT = "destrier-cache-1"
# A request fetches this much at least from an object store, so that of narrow columns rows that
# nobody wants come anyway; of wide ones they must be few.
_REQUEST_BYTES = 64 << 10
_LEAST_DENSITY = 1 / 64
_LEAST_DENSITY_WIDE = 1 / 8
_DIRECTORY_ROWS = 512  # between two ranks of a bitmap


def column_key(table: Table, names: Sequence[str], kind: pa.DataType) -> str:
    """What decides the values of a column: rows, deletions, and the files that hold its fields.

    Versions with the same key have the same values in it: copies of a table, and versions to which
    other columns were added.

    Args:
        table: The pinned table.
        names: The column, and others that its values depend on.
        kind: Its type as it is read.
    """

    def look() -> str:
        fields = {field.name(): field for field in table.dataset.lance_schema.fields()}
        ids = [_ids(fields[name]) for name in names]
        wanted = {number for each in ids for number in each}
        digest = hashlib.blake2b(f"{_FORMAT}|{ids}|{kind}\n".encode(), digest_size=16)
        for fragment in table.dataset.get_fragments():
            m = fragment.metadata
            deleted = m.deletion_file
            gone = deleted and (deleted.read_version, deleted.id, deleted.num_deleted_rows)
            files = [file.path for file in m.files if wanted & set(file.fields)]
            digest.update(f"{m.id}|{m.physical_rows}|{gone}|{files}\n".encode())
        return digest.hexdigest()

    key: str = lance_call(f"describing {table.name}", look)
    return key


def _ids(field: object) -> list[int]:
    """The numbers by which Lance knows a field and those inside it, whatever they are called."""
    inner = [number for child in field.children() for number in _ids(child)]  # type: ignore[attr-defined]
    return [field.id(), *inner]  # type: ignore[attr-defined]


def block_rows(kind: pa.DataType, rows: int, sample: Callable[[Ints], pa.Array]) -> int:
    """Rows of a block: a power of two that takes `BLOCK_BYTES` at most, if it is not one row.

    Args:
        kind: The type of the column as it is read.
        rows: Of the table.
        sample: Reads rows by offset, or others like them; asked where the type does not say how
            wide values are.
    """
    if dense_type(kind) is not None:
        row_bytes = dense_bytes(kind)
    else:
        runs = min(_SAMPLED_RUNS, rows)
        starts = np.arange(runs) * rows // runs
        places = np.unique(starts[:, None] + np.arange(_SAMPLED_ROWS))
        places = places[places < rows]
        found = sample(places)
        row_bytes = found.nbytes / len(found)
    fit = int(min(_MOST_ROWS, max(1, BLOCK_BYTES / max(row_bytes, 1))))
    return 1 << fit.bit_length() - 1


def block_row_bytes(block_rows: int) -> float:
    """Bytes of a row, about, by the size of blocks."""
    return BLOCK_BYTES / block_rows


def least_density(block_rows: int) -> float:
    """The part of a block's rows that must be selected, else it is not worth keeping."""
    by_width = block_row_bytes(block_rows) / _REQUEST_BYTES
    return min(_LEAST_DENSITY_WIDE, max(_LEAST_DENSITY, by_width))


class Density:
    """How much of each block a selection wants.

    Args:
        rows: The selection; None is all rows.
        table_rows: Rows of the table.
    """

    def __init__(self, rows: RowList | None, table_rows: int) -> None:
        while isinstance(rows, OrderedRows):
            rows = rows.base
        self._rows = rows
        self._table_rows = table_rows
        self._counts: dict[int, NDArray[np.int64]] = {}
        self._parts: list[Density] | None = None

    def of(self, block_rows: int, blocks: Ints) -> NDArray[np.float64]:
        """The part of each block's rows that the selection has."""
        rows = self._rows
        if rows is None:
            return np.ones(len(blocks))
        if isinstance(rows, RangeRows):
            first = blocks * block_rows
            last = np.minimum(first + block_rows, self._table_rows)
            held = np.minimum(last, rows.start + len(rows)) - np.maximum(first, rows.start)
            return np.asarray(np.maximum(held, 0) / (last - first), np.float64)
        if isinstance(rows, StackedRows):
            if self._parts is None:
                self._parts = [Density(part, self._table_rows) for part, _ in rows.parts]
            found = [part.of(block_rows, blocks) for part in self._parts]
            return np.asarray(np.minimum(1.0, np.sum(found, axis=0)), np.float64)
        if isinstance(rows, BitmapRows | OffsetRows):
            # Smaller blocks share what is known of the rows around them.
            size = max(block_rows, _DIRECTORY_ROWS)
            if size not in self._counts:
                self._counts[size] = self._count(rows, size)
            groups = blocks * block_rows // size
            held = np.minimum((groups + 1) * size, self._table_rows) - groups * size
            part: NDArray[np.float64] = np.minimum(1.0, self._counts[size][groups] / held)
            return part
        return np.full(len(blocks), min(1.0, len(rows) / self._table_rows))

    def _count(self, rows: BitmapRows | OffsetRows, size: int) -> NDArray[np.int64]:
        groups = -(-self._table_rows // size)
        if isinstance(rows, OffsetRows):
            return np.bincount(rows.values // size, minlength=groups)
        ends = np.arange(groups + 1) * (size // _DIRECTORY_ROWS)
        return np.diff(rows.ranks[np.minimum(ends, len(rows.ranks) - 1)])
