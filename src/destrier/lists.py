"""Lists of rows that are not held: the order of a list, and a list in a Lance table."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.errors import (
    ArgumentError,
)
from destrier.lancecalls import lance_call
from destrier.order import ORDER_VERSION, Order
from destrier.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from destrier.selection import RowList

__all__ = ["OrderedRows", "SavedRows", "digest_of", "scan"]

_CACHED_ROWS = 1 << 20  # saved lists up to here are kept in memory
_SCANNED_ROWS = 1 << 12  # neighbouring rows from here on are scanned, not taken
_SCAN_BATCH = 1 << 16


def scan(
    table: Table, columns: list[str] | dict[str, str], filter: str | None, what: str
) -> Iterator[pa.RecordBatch]:
    """Yield columns of the table in its order; a failure is a `ReadError` that begins with what."""

    def start() -> Iterator[pa.RecordBatch]:
        scanner = table.dataset.scanner(
            columns=columns, filter=filter, scan_in_order=True, batch_size=_SCAN_BATCH
        )
        return iter(scanner.to_batches())

    batches = lance_call(what, start)
    while (batch := lance_call(what, lambda: next(batches, None))) is not None:
        yield batch


class OrderedRows:
    """The rows of a list in the order of an epoch."""

    def __init__(self, rows: RowList, order: Order) -> None:
        if order.n != len(rows):
            raise ArgumentError(f"the order is one of {order.n} rows, the list has {len(rows)}")
        self.base = rows
        self.order = order

    def __len__(self) -> int:
        return self.order.n

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ask the order for positions in the list, and the list for offsets."""
        return self.base.offsets(self.order.rows(positions))

    @property
    def digest(self) -> str:
        """Of what defines the list; its rows are not computed for it."""
        o = self.order
        shuffled = (o.seed, o.epoch, o.clump_size, o.window if o.windowed else 1)
        what = (ORDER_VERSION, o.num_splits, *(shuffled if o.shuffle else ()), self.base.digest)
        return digest_of(["order", *map(str, what)])


class SavedRows:
    """A range of rows of a column of a Lance table, read where they lie.

    A short list is read whole at its first use and kept. It pickles to its address.
    """

    def __init__(
        self, table: Table, start: int, count: int, digest: str, *, column: str = "row_offset"
    ) -> None:
        self.table = table
        self.start = start
        self.count = count
        self.digest = digest
        self.column = column
        self._values: NDArray[np.int64] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None}

    def __len__(self) -> int:
        return self.count

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the positions, each once and in the order in which they lie."""
        if self.count <= _CACHED_ROWS:
            if self._values is None:
                self._values = self._scan(0, self.count)
            return self._values[positions]
        wanted, inverse = np.unique(np.asarray(positions, np.int64), return_inverse=True)
        if not len(wanted):
            return np.empty(0, np.int64)
        first, n = int(wanted[0]), len(wanted)
        together = int(wanted[-1]) - first + 1 == n
        values = self._scan(first, n) if together and n >= _SCANNED_ROWS else self._take(wanted)
        return values[inverse]

    def _scan(self, first: int, count: int) -> NDArray[np.int64]:
        return self._read(
            lambda: self.table.dataset.to_table(
                columns=[self.column], offset=self.start + first, limit=count
            )
        )

    def _take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        indices = pa.array(positions + self.start)
        return self._read(lambda: self.table.dataset.take(indices, columns=[self.column]))

    def _read(self, function: Callable[[], pa.Table]) -> NDArray[np.int64]:
        found = lance_call(f"cannot read the permutation {self.table.name}", function)
        return np.asarray(found.column(0).to_numpy(), np.int64)


def digest_of(words: Sequence[str]) -> str:
    """Return the digest of what defines a list."""
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).hexdigest()
