"""Windows of a shuffle that stay in memory while they are open.

A shuffle in windows draws a share from many windows at once and comes back to each of them for a
long time. So a window is read as a whole, when it is first needed, into a slot of a pool, and
stays until the order has passed it. A window lies in its slot in the order of its places, so that
the place of a sample in the pool is a product and a sum.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Protocol

import numpy as np

from destrier.arrays import distinct, stable_order
from destrier.block import BLOCK_ROWS, Block, Line, runs_of
from destrier.keyed import Ints

__all__ = ["Offsets", "Windows", "open_rows", "slot_rows"]


class Offsets(Protocol):
    """From positions to row offsets."""

    def offsets(self, positions: Ints) -> Ints:
        """The row offset of each position."""
        ...


class Windows:
    """Which windows are open, and in which slot of the pool each lies."""

    def __init__(self, order: Line, rows: Offsets, most_rows: int) -> None:
        self.order = order
        self.rows = rows
        self._piece = max(1, most_rows // slot_rows(order))
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
        size = slot_rows(self.order)
        freed = self._close_passed(span.least_cycle(own))
        span.prepare(number, self._slots)
        used = span.windows(own)
        new = [i for i in used.tolist() if int(span.lo[i]) not in self._slots]
        for start, last in zip(span.lo[new].tolist(), span.last_cycles(own, new), strict=True):
            self._slots[start] = self._free.pop() if self._free else len(self._slots)
            self._last_cycles[start] = last
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
        return offsets, slots[window] * slot_rows(self.order) + place

    def _close_passed(self, cycle: int) -> list[tuple[int, int]]:
        """Free the windows that the order has passed; one that comes again is read again."""
        size = slot_rows(self.order)
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

    def __init__(self, order: Line, rows: Offsets, g: Ints, bounds: Ints, each: int) -> None:
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

    def last_cycles(self, own: slice, windows: list[int]) -> list[int]:
        """For some of the windows of some samples the cycle that ends each.

        A split comes back to the window that it began with, which then ends a second time.
        """
        last = np.empty(len(self.lo), np.int64)  # of each window's samples
        last[self.window[own]] = np.arange(own.start, own.stop)
        last = last[windows]
        ends = self._cycles[last] + (self._hi - 1 - self.lo)[windows] - self.place[last]
        found: list[int] = ends.tolist()
        return found

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


def open_rows(order: Line, splits: int) -> int:
    """Rows that the windows of so many splits hold at once."""
    return splits * slot_rows(order) if order.windowed else 0


def slot_rows(order: Line) -> int:
    """Rows of the largest window: a split may be shorter than the order's windows are."""
    return min(order.window_rows, -(-order.n // order.num_splits))
