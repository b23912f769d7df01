"""When: which rows are read for the next shares, and where in memory each sample then lies.

A shuffle in windows draws a share from many windows at once and comes back to each of them for a
long time. So a window is read as a whole, when it is first needed, into a slot of a pool, and
stays until the order has passed it. A window lies in its slot in the order of its places, so that
the place of a sample in the pool is a product and a sum.

Where all rows of the selection fit, they are read once, in table order, which is many times
cheaper than in any other, and stay: the place of a sample is then its position.

Without windows, or where their rows do not fit the memory, the rows of the next shares are read
and dropped after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from destrier.arrays import distinct, grown, stable_order
from destrier.keyed import Ints
from destrier.plan import Shares
from destrier.selection import RowList

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_ROWS",
    "DIRECT_SHARES",
    "Block",
    "Held",
    "Holding",
    "Line",
    "Schedule",
    "block_rows",
    "choose_held",
    "holding",
    "open_rows",
    "runs_of",
    "shares_of",
    "span_rows",
]

Held: TypeAlias = Literal["all", "windows", "shares"]
"""What stays in memory: all rows, those of open windows, or just those of the next shares."""

BLOCK_ROWS = 1 << 18
"""Rows that are planned together at most."""

BLOCK_BYTES = 8 << 20
"""Bytes that are read together, about."""

DIRECT_SHARES = 4
_SPAN_ROWS = 1 << 16  # that are planned together, if these are not more than so many blocks:
_SPAN_BLOCKS = 16
_OFFSET_BYTES = 8  # beside each row that is held
_LEAST_OWN = 1 / 4  # of an epoch: a process that delivers less need not read all of it


@dataclass
class Block:
    """Some shares that are planned and read together.

    Attributes:
        offsets: Row offsets to read.
        targets: Where in the pool each goes, or None: the block is held by itself.
        freed: Pool rows ``[start, stop)`` that no later sample needs.
        capacity: Pool rows there must be.
        first: Index of the first share.
        samples: The sample indices of all shares, one after another.
        bounds: Where each share begins in ``samples``; one more than there are shares.
        places: For each sample where it lies: in the pool, or in ``offsets``.
        complete: Whether all rows are in the pool with it.
    """

    offsets: Ints
    targets: Ints | None
    freed: list[tuple[int, int]]
    capacity: int
    first: int
    samples: Ints
    bounds: Ints
    places: Ints
    complete: bool = False


class Line(Protocol):
    """What reading needs to know of an order of positions."""

    @property
    def n(self) -> int:
        """How many positions there are."""
        ...

    @property
    def num_splits(self) -> int:
        """Lanes, S."""
        ...

    @property
    def windowed(self) -> bool:
        """Whether positions are permuted inside windows of clumps."""
        ...

    @property
    def window_rows(self) -> int:
        """Positions in a whole window."""
        ...

    def rows(self, g: Ints) -> Ints:
        """The position of each sample."""
        ...

    def locate(self, g: Ints) -> tuple[Ints, Ints, Ints]:
        """The window that each sample is in, and its place there."""
        ...

    def window_reads(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
        """What whole windows consist of."""
        ...

    def cycles(self, g: Ints) -> Ints:
        """How often each sample's lane was served before it."""
        ...


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
        return _Windows(order, rows, most_rows)
    return _Shares(order, rows)


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
            yield from self._blocks(_Shares(self.order, self.rows), 0, first)
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


def runs_of(bounds: Ints, each: int) -> Iterator[tuple[int, slice, Ints]]:
    """Every so many shares: the first, which samples theirs are, and where each begins in those."""
    for first in range(0, len(bounds) - 1, each):
        own = bounds[first : first + each + 1]
        yield first, slice(int(own[0]), int(own[-1])), own - own[0]


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
        windows = _Windows(order, _Positions(), BLOCK_ROWS) if order.windowed else None
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


class _Offsets(Protocol):
    def offsets(self, positions: Ints) -> Ints:
        """From positions to row offsets."""
        ...


class _Positions:
    """Positions as they are."""

    def offsets(self, positions: Ints) -> Ints:
        """The same."""
        return positions


class _Windows:
    """Which windows are open, and in which slot of the pool each lies."""

    def __init__(self, order: Line, rows: _Offsets, most_rows: int) -> None:
        self.order = order
        self.rows = rows
        self._piece = max(1, most_rows // _slot_rows(order))
        self._slots: dict[int, int] = {}
        self._last_cycles: dict[int, int] = {}
        self._free: list[int] = []

    def blocks(
        self, first: int, samples: Ints, g: Ints, bounds: Ints, *, each: int
    ) -> Iterator[Iterator[Block]]:
        """For every so many shares their block, after blocks that only load what is too much."""
        span = _Span(self.order, self.rows, g, bounds, each)
        for number, (index, own, inner) in enumerate(runs_of(bounds, each)):
            yield self._blocks(span, number, first + index, samples[own], own, inner)

    def _blocks(
        self, span: _Span, number: int, first: int, samples: Ints, own: slice, inner: Ints
    ) -> Iterator[Block]:
        size = _slot_rows(self.order)
        freed = self._close_passed(span.least_cycle(own))
        span.prepare(number, self._slots)
        used = span.windows(own)
        new = [i for i in used.tolist() if int(span.lo[i]) not in self._slots]
        last_cycles = span.last_cycles(own)
        for i in new:
            start = int(span.lo[i])
            self._slots[start] = self._free.pop() if self._free else len(self._slots)
            self._last_cycles[start] = int(last_cycles[i])
        slots = np.zeros(len(span.lo), np.int64)
        slots[used] = [self._slots[start] for start in span.lo[used].tolist()]
        capacity = (len(self._slots) + len(self._free)) * size
        none = np.empty(0, np.int64)
        while len(new) > self._piece:
            part, new = new[: self._piece], new[self._piece :]
            offsets, targets = self._content(span, number, part, slots)
            zero = np.zeros(1, np.int64)
            yield Block(offsets, targets, freed, capacity, first, none, zero, none)
            freed = []
        offsets, targets = self._content(span, number, new, slots) if new else (none, none)
        places = slots[span.window[own]] * size + span.place[own]
        yield Block(offsets, targets, freed, capacity, first, samples, inner, places)

    def _content(self, span: _Span, number: int, new: list[int], slots: Ints) -> tuple[Ints, Ints]:
        offsets, window, place = span.content(number, np.array(new, np.int64))
        return offsets, slots[window] * _slot_rows(self.order) + place

    def _close_passed(self, cycle: int) -> list[tuple[int, int]]:
        """Free the windows that the order has passed; one that comes again is read again."""
        size = _slot_rows(self.order)
        passed = [start for start, last in self._last_cycles.items() if last < cycle]
        slots = [self._slots.pop(start) for start in passed]
        for start in passed:
            del self._last_cycles[start]
        self._free.extend(slots)
        return [(slot * size, (slot + 1) * size) for slot in slots]


class _Span:
    """The windows of the samples of some shares, which are planned together.

    Args:
        order: The order.
        rows: From position to row offset.
        g: The samples.
        bounds: Where each share begins in them.
        each: How many shares are read together, as a run.
    """

    def __init__(self, order: Line, rows: _Offsets, g: Ints, bounds: Ints, each: int) -> None:
        self._order = order
        self._rows = rows
        lo, hi, self.place = order.locate(g)
        first, self.window = distinct(lo)
        self.lo, self._hi = lo[first], hi[first]
        self._cycles = order.cycles(g)
        self._run = np.searchsorted(bounds[:-1:each], first, side="right") - 1  # ascending
        self._ready: dict[int, tuple[Ints, Ints, Ints, Ints]] = {}

    def least_cycle(self, own: slice) -> int:
        """The least cycle of some samples; 0 where there are none."""
        cycles = self._cycles[own]
        return int(cycles.min()) if len(cycles) else 0

    def last_cycles(self, own: slice) -> Ints:
        """For each window of some samples the cycle that ends it; for others anything.

        A split comes back to the window that it began with, which then ends a second time.
        """
        window = self.window[own]
        ends = np.empty(len(self.lo), np.int64)
        ends[window] = self._cycles[own] + (self._hi - 1 - self.lo)[window] - self.place[own]
        return ends

    def windows(self, own: slice) -> Ints:
        """The numbers of the windows of some samples."""
        return np.flatnonzero(np.bincount(self.window[own], minlength=len(self.lo)))

    def prepare(self, run: int, held: Container[int]) -> None:
        """Find what is read for a run, and for those after it, at once."""
        if run in self._ready:
            return
        self._ready = {run: (np.empty(0, np.int64),) * 4}
        rest = range(int(np.searchsorted(self._run, run)), len(self.lo))
        starts = self.lo.tolist()
        wanted = np.array([i for i in rest if starts[i] not in held], np.int64)
        ends = np.cumsum(self._hi[wanted] - self.lo[wanted])
        runs: Ints = self._run[wanted]
        stop = int(np.searchsorted(ends, BLOCK_ROWS, side="right"))
        if stop < len(wanted):  # the windows of a run all or none
            stop = int(np.searchsorted(runs, runs[stop]))
        if not stop:
            return
        wanted, last = wanted[:stop], int(runs[stop - 1])
        offsets, window, place = self._read(wanted)
        following = np.arange(run + 1, last + 1)
        windows = np.split(wanted, np.searchsorted(runs[:stop], following))
        of_row = self._run[window] - run
        by_run = stable_order(of_row)
        rows = np.split(by_run, np.searchsorted(of_row[by_run], following - run))
        for i, (own, mine) in enumerate(zip(windows, rows, strict=True)):
            self._ready[run + i] = own, offsets[mine], window[mine], place[mine]

    def content(self, run: int, windows: Ints) -> tuple[Ints, Ints, Ints]:
        """What windows of a run consist of: row offsets, and the window and place of each."""
        own, offsets, window, place = self._ready[run]
        if len(own) == len(windows) and (own == windows).all():
            return offsets, window, place
        return self._read(windows)  # a part of them, or one that was closed and comes again

    def _read(self, windows: Ints) -> tuple[Ints, Ints, Ints]:
        positions, window, place = self._order.window_reads(self.lo[windows], self._hi[windows])
        return self._rows.offsets(positions), windows[window], place


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


def open_rows(order: Line, splits: int) -> int:
    """Rows that the windows of so many splits hold at once."""
    return splits * _slot_rows(order) if order.windowed else 0


def _slot_rows(order: Line) -> int:
    """Rows of the largest window: a split may be shorter than the order's windows are."""
    return min(order.window_rows, -(-order.n // order.num_splits))
