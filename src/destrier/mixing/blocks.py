"""What is planned and read together for samples of several tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from destrier.block import BLOCK_ROWS, Block, runs_of
from destrier.feed import TableFeed
from destrier.keyed import Ints
from destrier.mixing.passes import Passes
from destrier.plan import Routes, Shares
from destrier.schedule import DIRECT_SHARES, block_rows, shares_of, span_rows

__all__ = ["MixtureBlock", "Reading", "Spans", "common_block_bytes"]

_LEAST_ROWS = 1 << 13  # that are planned together


def common_block_bytes(feeds: Sequence[TableFeed]) -> int:
    """Bytes that are read together, about, of all tables.

    A block is a read of each table: with twice as much in it, those are not too small.
    """
    return min(len(feeds), 2) * max(feed.block_bytes for feed in feeds)


@dataclass
class MixtureBlock:
    """Some shares that are planned and read together.

    Attributes:
        first: Index of the first share.
        samples: The sample indices of all shares, one after another.
        bounds: Where each share begins in them; one more than there are shares.
        leaf: The table of each sample.
        parts: For each table its number, which samples are of it, and what is read of it.
        complete: Whether all rows of all tables are in memory with it.
        places: Where each sample lies in the pool, once the block is loaded.
    """

    first: int
    samples: Ints
    bounds: Ints
    leaf: Ints
    parts: list[tuple[int, Ints, Block]]
    complete: bool = False
    places: Ints = field(default_factory=lambda: np.empty(0, np.int64))


class Reading:
    """How some tables are read for successive shares, and what of them stays.

    Args:
        feeds: How each table is read.
        passes: The epochs of each table.
        loaded: For each table of the stream, whether all its rows are in memory; kept up to date.
        first: The number there of the first of these tables.
        alone: Whether shares are read by themselves, and nothing stays.
    """

    def __init__(
        self,
        feeds: Sequence[TableFeed],
        passes: Sequence[Passes],
        loaded: list[bool],
        first: int = 0,
        *,
        alone: bool,
    ) -> None:
        self._loaded = loaded
        self._first = first
        own_loaded = loaded[first : first + len(feeds)]
        self._holdings = [
            feed.holding(own, held="shares", loaded=False)
            if alone
            else feed.holding(own, held=feed.held, loaded=there and feed.held == "all")
            for feed, own, there in zip(feeds, passes, own_loaded, strict=True)
        ]

    def blocks(
        self, first: int, samples: Ints, bounds: Ints, routes: Routes, *, each: int
    ) -> Iterator[Iterator[MixtureBlock]]:
        """For every so many of some shares their block, after blocks that only load rows.

        The blocks of some shares are taken before those of the next ones.

        Args:
            first: The index of the first share.
            samples: The sample indices of the shares, one after another.
            bounds: Where each share begins in them.
            routes: Where the samples come from.
            each: How many shares are in a block.
        """
        parts = []
        for number in np.flatnonzero(np.bincount(routes.leaf)).tolist():
            mine = np.flatnonzero(routes.leaf == number)
            own, inner = routes.sample[mine], np.searchsorted(mine, bounds)
            blocks = self._holdings[number].blocks(first, samples[mine], own, inner, each=each)
            parts.append(_Part(number, mine, inner, blocks))
        for index, among, inner in runs_of(bounds, each):
            whole = MixtureBlock(first + index, samples[among], inner, routes.leaf[among], [])
            yield self._run(parts, index, among.start, whole)

    def _run(
        self, parts: list[_Part], index: int, start: int, whole: MixtureBlock
    ) -> Iterator[MixtureBlock]:
        """The block of a run of shares, after those that only load rows."""
        none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
        last = index + len(whole.bounds) - 1
        for part in parts:
            for block in next(part.blocks):
                self._loaded[self._first + part.number] |= block.complete
                if len(block.bounds) == 1:
                    yield MixtureBlock(whole.first, none, zero, none, [(part.number, none, block)])
                else:
                    mine = part.mine[part.bounds[index] : part.bounds[last]] - start
                    whole.parts.append((part.number, mine, block))
        whole.complete = all(self._loaded[self._first : self._first + len(self._holdings)])
        yield whole


@dataclass
class _Part:
    """The samples of one table among some shares.

    Attributes:
        number: Of the table.
        mine: Which of the samples are its own.
        bounds: Where those of each share begin.
        blocks: What is read of it, for every run of shares.
    """

    number: int
    mine: Ints
    bounds: Ints
    blocks: Iterator[Iterator[Block]]


class Spans:
    """Which shares of an epoch are planned together.

    Args:
        feeds: How each table is read.
        shares: Which samples are delivered.
        row_bytes: Bytes of a sample in memory, about.
        block_bytes: Bytes that are read together, about.
        complete: For each table, whether all its rows are in memory already; empty at first.
        most_shares: How many may be planned together; None is no bound.

    Attributes:
        loaded: For each table, whether all its rows are in memory.
        each: How many shares are read together.
    """

    def __init__(
        self,
        feeds: Sequence[TableFeed],
        shares: Shares,
        *,
        row_bytes: float,
        block_bytes: int,
        complete: Sequence[bool],
        most_shares: int | None = None,
    ) -> None:
        self._feeds = feeds
        self._total = len(shares)
        self.loaded = list(complete) or [False] * len(feeds)
        held = all(feed.held == "all" for feed in feeds)
        # Small tables come again and again: each time is an order of its own, which takes time.
        most = max(_LEAST_ROWS, sum(len(feed.rows) for feed in feeds))
        # Each table is planned by itself: with twice as many rows, in calls that are not too small.
        planned = min(len(feeds), 2) * BLOCK_ROWS
        rows = min(planned, most) if held else block_rows(row_bytes, block_bytes)
        self.each = shares_of(rows, shares.largest)
        together = shares_of(span_rows(rows), shares.largest)
        self._together = max(1, together if most_shares is None else min(together, most_shares))

    @property
    def _start(self) -> int:
        """How many shares are read by themselves: they need not wait for what is held."""
        if all(self.loaded) or all(feed.held == "shares" for feed in self._feeds):
            return 0
        direct = 1 if any(feed.remote for feed in self._feeds) else DIRECT_SHARES
        return min(direct, self._total)

    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        """First and last share, and whether they are read by themselves."""
        first, start = 0, self._start
        while first < self._total:
            alone = first < start
            # As many as before them: the first ones come soon, whatever it takes to plan them.
            some = min(max(first, DIRECT_SHARES), self._together)
            last = min(first + some, start if alone else self._total)
            yield first, last, alone
            first = last
