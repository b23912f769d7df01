"""How the rows of successive shares are read, and what of them stays in memory.

Where all rows of the selection fit, they are read once, in table order, which is many times
cheaper than in any other, and stay: the place of a sample is then its position.

Without windows, or where their rows do not fit the memory, the rows of the next shares are read
and dropped after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, Protocol, TypeAlias

import numpy as np

from destrier.arrays import grown
from destrier.block import BLOCK_ROWS, Block, Line, runs_of
from destrier.keyed import Ints
from destrier.selection import RowList
from destrier.windows import Windows

__all__ = ["Held", "Holding", "choose_held", "holding"]

Held: TypeAlias = Literal["all", "windows", "shares"]
"""What stays in memory: all rows, those of open windows, or just those of the next shares."""

_OFFSET_BYTES = 8  # beside each row that is held
_LEAST_OWN = 1 / 4  # of an epoch: a process that delivers less need not read all of it


class Holding(Protocol):
    """How the rows of successive shares are read, and what of them stays."""

    def blocks(
        self, first: int, samples: Ints, g: Ints, bounds: Ints, *, each: int
    ) -> Iterator[Iterator[Block]]:
        """For every so many of some shares their block, after blocks that only load rows.

        Shares are planned in larger numbers than they are read in: that takes fewer calls. The
        blocks of some shares are taken before those of the next ones.

        Args:
            first: The index of the first share.
            samples: The sample indices of the shares, one after another.
            g: What they are in the order that is read.
            bounds: Where each share begins in them.
            each: How many shares are in a block.
        """
        ...


def holding(  # noqa: D417 - the others are those of Schedule
    held: Held,
    order: Line,
    rows: RowList,
    *,
    most_rows: int,
    loaded: bool = False,
    runs: int = 1,
) -> Holding:
    """Return how rows are read for what is held.

    Args:
        most_rows: Rows that are read together, about.
    """
    if held == "all":
        return _All(order, rows, most_rows, loaded=loaded, runs=runs)
    if held == "windows" and order.windowed:
        return Windows(order, rows, most_rows)
    return _Shares(order, rows)


class _Shares:
    """Nothing stays: the rows of some shares are read, and dropped after them."""

    def __init__(self, order: Line, rows: RowList) -> None:
        self._order = order
        self._rows = rows

    def blocks(
        self, first: int, samples: Ints, g: Ints, bounds: Ints, *, each: int
    ) -> Iterator[Iterator[Block]]:
        """One block for every so many shares."""
        offsets = self._rows.offsets(self._order.rows(g))
        for index, own, inner in runs_of(bounds, each):
            places = np.arange(inner[-1])
            block = Block(offsets[own], None, [], 0, first + index, samples[own], inner, places)
            yield iter((block,))


class _All:
    """All rows are read at first, in table order, and stay."""

    def __init__(
        self, order: Line, rows: RowList, most_rows: int, *, loaded: bool, runs: int
    ) -> None:
        self._order = order
        self._rows = rows
        self._most_rows = most_rows
        self._loaded = loaded
        self._runs = runs
        windows = Windows(order, _Positions(), BLOCK_ROWS) if order.windowed else None
        self._windows = windows
        self._index = np.empty(0, np.int64)  # from the place in a window's slot to the position

    def blocks(
        self, first: int, samples: Ints, g: Ints, bounds: Ints, *, each: int
    ) -> Iterator[Iterator[Block]]:
        """The first time, blocks that load all rows; then those that find theirs among them."""
        places = self._order.rows(g) if self._windows is None else self._found(samples, g, bounds)
        none, n = np.empty(0, np.int64), len(self._rows)
        for index, own, inner in runs_of(bounds, each):
            block = Block(
                none, none, [], n, first + index, samples[own], inner, places[own], complete=True
            )
            yield itertools.chain(self._loading(first + index), (block,))

    def _loading(self, first: int) -> Iterator[Block]:
        none, n = np.empty(0, np.int64), len(self._rows)
        if self._loaded:
            return
        self._loaded = True
        for positions in _in_runs(n, self._most_rows, self._runs):
            offsets = self._rows.offsets(positions)
            yield Block(offsets, positions, [], n, first, none, np.zeros(1, np.int64), none)

    def _found(self, samples: Ints, g: Ints, bounds: Ints) -> Ints:
        """The positions of samples, with the windows as an index that is kept like their rows."""
        places = np.empty(0, np.int64)
        assert self._windows is not None
        for blocks in self._windows.blocks(0, samples, g, bounds, each=len(bounds)):
            for block in blocks:
                if len(self._index) < block.capacity:
                    self._index = grown(self._index, block.capacity)
                self._index[block.targets] = block.offsets
                places = self._index[block.places]
        return places


def _in_runs(n: int, most: int, runs: int) -> Iterator[Ints]:
    """All positions, so many at most at a time: runs of successive ones, equally far apart."""
    length = max(1, most // runs)
    parts = -(-n // runs)
    for first in range(0, parts, length):
        within = np.arange(first, min(first + length, parts))
        positions = (np.arange(0, n, parts)[:, None] + within).ravel()
        yield positions[positions < n]


class _Positions:
    """Positions as they are."""

    def offsets(self, positions: Ints) -> Ints:
        """The same."""
        return positions


def choose_held(
    rows: int, open_rows: int, own_rows: int, *, row_bytes: float, memory: int
) -> tuple[Held, int]:
    """Choose what stays in memory; the order does not depend on it.

    Args:
        rows: In the selection.
        open_rows: In the open windows of this process.
        own_rows: That this process delivers in an epoch.
        row_bytes: Bytes of a row in memory, about.
        memory: Bytes that may be taken, of which a part is for reading ahead.

    Returns:
        What is held, and its bytes.
    """
    everything = int(rows * (row_bytes + _OFFSET_BYTES))
    if everything <= memory / 2 and own_rows >= rows * _LEAST_OWN:
        return "all", everything
    windows = int(open_rows * row_bytes)
    return ("windows", windows) if windows <= memory * 3 / 4 else ("shares", 0)
