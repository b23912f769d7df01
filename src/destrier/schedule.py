"""When: which rows are read for the next shares, and where in memory each sample then lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from destrier.block import BLOCK_ROWS, Block, Line
from destrier.holding import Held, Holding, holding
from destrier.plan import Shares
from destrier.selection import RowList

__all__ = ["BLOCK_BYTES", "DIRECT_SHARES", "Schedule", "block_rows", "shares_of", "span_rows"]

BLOCK_BYTES = 8 << 20
"""Bytes that are read together, about."""

DIRECT_SHARES = 4
_SPAN_ROWS = 1 << 16  # that are planned together, if these are not more than so many blocks:
_SPAN_BLOCKS = 16


class Schedule:
    """The blocks of one epoch, in order.

    Args:
        order: The epoch's order of positions.
        rows: From position to row offset.
        shares: Which samples are delivered, in shares.
        row_bytes: Bytes of a row in memory, about.
        held: What stays in memory.
        loaded: Whether all rows are there already, where all are held.
        block_bytes: Bytes that are read together, about, unless one share is more.
        direct_shares: How many shares at the start are read by themselves, at least 1: they need
            not wait for all that is held, but cost more requests.
        runs: In how many runs of rows a block is read where all rows are held: an object store
            sends several at once, each at the speed of a connection.
    """

    def __init__(
        self,
        order: Line,
        rows: RowList,
        shares: Shares,
        *,
        row_bytes: float,
        held: Held,
        loaded: bool = False,
        block_bytes: int = BLOCK_BYTES,
        direct_shares: int = DIRECT_SHARES,
        runs: int = 1,
    ) -> None:
        self.order = order
        self.rows = rows
        self.shares = shares
        self.held: Held = "shares" if held == "windows" and not order.windowed else held
        self._loaded = loaded and held == "all"
        self._direct_shares = direct_shares
        self._runs = runs
        self._most_rows = block_rows(row_bytes, block_bytes)
        read = BLOCK_ROWS if held == "all" else self._most_rows
        self.shares_per_block = shares_of(read, shares.largest)
        self._span = shares_of(span_rows(read), shares.largest)

    @property
    def complete(self) -> Sequence[bool]:
        """Whether all rows are in memory after the last block."""
        start = self._start
        more = self.shares.at_most(start + 1) > start
        return (self._loaded or (self.held == "all" and more),)

    @property
    def _start(self) -> int:
        """How many shares are read by themselves: they need not wait for all that is held."""
        if self._loaded or self.held == "shares":
            return 0
        return self.shares.at_most(self._direct_shares)

    def __iter__(self) -> Iterator[Block]:
        first = self._start
        if first:
            alone = holding("shares", self.order, self.rows, most_rows=self._most_rows)
            yield from self._blocks(alone, 0, first)
        reading = holding(
            self.held,
            self.order,
            self.rows,
            most_rows=self._most_rows,
            loaded=self._loaded,
            runs=self._runs,
        )
        some = min(DIRECT_SHARES, self._span)
        while True:
            # Few at first: the consumer waits for them.
            last = self.shares.at_most(first + some)
            if last == first:
                return
            yield from self._blocks(reading, first, last)
            first = last
            some = min(4 * some, self._span)

    def _blocks(self, reading: Holding, first: int, last: int) -> Iterator[Block]:
        samples, bounds = self.shares.samples(first, last)
        g, each = samples % self.order.n, self.shares_per_block
        for blocks in reading.blocks(first, samples, g, bounds, each=each):
            yield from blocks


def shares_of(rows: int, largest: int) -> int:
    """Shares of so many rows together, one at least."""
    return max(1, rows // max(1, largest))


def span_rows(read: int) -> int:
    """Rows that are planned together, where so many are read together."""
    return max(read, min(_SPAN_ROWS, _SPAN_BLOCKS * read))


def block_rows(row_bytes: float, block_bytes: int = BLOCK_BYTES) -> int:
    """Rows that are read together, about."""
    return max(1, min(BLOCK_ROWS, int(block_bytes / row_bytes)))
