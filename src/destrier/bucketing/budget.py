"""An order whose batches stay within a budget of tokens and so have a varying number of samples.

A window has a fixed number of samples, which is a multiple of some unit. From the longest one on,
its samples are taken in batches of as many units as fit the budget if all are padded to the first.
No cut of the sorted samples has fewer batches, since each part of one that fits would fit as well.
The samples of the order that fill no unit, fewer than one, are left for a last batch of their own.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from destrier.bucketing.buckets import BudgetBuckets
from destrier.bucketing.order import WindowedOrder, keep
from destrier.errors import StateError
from destrier.keyed import Ints
from destrier.order import Order
from destrier.packing.lengths import Lengths

__all__ = ["BudgetOrder"]

_KEPT_BORDERS = 1024  # windows: a consumer is that far behind the reading at most, or looks anew
_AT_ONCE = 1 << 17  # samples whose steps are counted together


class BudgetOrder(WindowedOrder):
    """The order of one epoch with batches within a budget of tokens.

    Args:
        order: The order.
        lengths: Of the rows, by position; none times the multiple is beyond the budget.
        buckets: The budget, and how many samples are sorted together.

    Attributes:
        whole: Samples in whole units: the others, up to n, are the last batch.
        windows: How many windows they are in.
        buckets: The budget.
    """

    def __init__(self, order: Order, lengths: Lengths, buckets: BudgetBuckets) -> None:
        super().__init__(order, lengths, buckets.samples)
        self.buckets = buckets
        self.whole = self.n - self.n % buckets.multiple
        self.windows = -(-self.whole // buckets.samples)
        self._counts = np.full(self.windows, -1, np.int32)
        self._borders: OrderedDict[int, Ints] = OrderedDict()

    def samples(self, g: Ints) -> Ints:
        """The sample of the order that comes at each place."""
        g = np.asarray(g, np.int64)
        last = g >= self.whole
        if not last.any():
            return super().samples(g)
        out = np.empty(len(g), np.int64)
        out[~last] = super().samples(g[~last])
        rest = np.arange(self.whole, self.n)
        out[last] = rest[np.argsort(rest % self.num_splits, kind="stable")][g[last] - self.whole]
        return out

    # ---- where batches begin --------------------------------------------------------------------

    def borders(self, window: int) -> Ints:
        """Where the batches of a window begin, and where the last one ends."""
        with self._lock:
            found = self._borders.get(window)
        if found is None:
            with self._lock:
                self._kept.pop(window, None)  # it is kept without them, if they were forgotten
            self._window(window)
            with self._lock:
                found = self._borders[window]
        return found

    def find(self, counter: int) -> tuple[int, int]:
        """The window and the number in it of the batch that begins at a counter.

        Raises:
            StateError: If none does, naming the nearest counters where one does.
        """
        if counter in (self.whole, self.n):
            return self.windows, 0
        window = min(counter // self.buckets.samples, self.windows)
        if counter == window * self.buckets.samples and window < self.windows:
            return window, 0  # nothing needs to be looked at
        borders = np.array([self.whole, self.n])
        if counter < self.whole:
            borders = self.borders(window)
        place = int(np.searchsorted(borders, counter))
        if borders[place] != counter:
            raise StateError(
                f"counter {counter} is inside of a batch of {self.buckets.tokens} tokens: batches "
                f"begin at {borders[place - 1]} and {borders[place]}; load a state that was saved "
                "with this budget, or start the next epoch instead of loading"
            )
        return window, place

    def counts(self, first: int, last: int) -> Ints:
        """How many batches each of the windows ``[first, last)`` has."""
        last = min(last, self.windows)
        for start in range(first, last, self.at_once):
            stop = min(start + self.at_once, last)
            if (self._counts[start:stop] < 0).any():
                self._counts[start:stop] = self._counted(start, stop)
        return self._counts[first:last].astype(np.int64)

    @property
    def at_once(self) -> int:
        """Windows whose batches are counted together."""
        return max(1, _AT_ONCE // self.buckets.samples)

    def _counted(self, first: int, last: int) -> Ints:
        """Count the batches of some windows, side by side."""
        size, unit = self.buckets.samples, self.buckets.multiple
        end = min(last * size, self.whole)
        lengths = self._lengths.at(self.base.rows(np.arange(first * size, end)))
        if last - first == 1:
            size = len(lengths)
        short = ((last - first) * size - len(lengths)) // unit  # units: of the last window of all
        lengths = np.append(lengths, np.zeros(short * unit, np.int64)).reshape(last - first, size)
        # The longest of each unit, from long to short: those that are not there are the last.
        longest = np.sort(lengths, axis=1)[:, ::-1][:, ::unit]
        fit = self._fit(longest)
        units = np.full(last - first, size // unit)
        units[-1] -= short
        counts = np.zeros(last - first, np.int64)
        at = np.zeros(last - first, np.int64)
        alive = np.flatnonzero(at < units)
        while len(alive):
            begin = at[alive]
            end_at = np.minimum(begin + fit[alive, begin], units[alive])
            counts[alive] += 1
            at[alive] = end_at
            alive = alive[end_at < units[alive]]
        return counts

    def _fit(self, longest: Ints) -> Ints:
        """How many units fit the budget, if padded to so many tokens; a row without takes one.

        One fits always, but in a file of lengths that was damaged since they were looked at.
        """
        fit: Ints = self.buckets.tokens // (np.maximum(longest, 1) * self.buckets.multiple)
        fit[fit < 1] = 1
        return fit

    def _sorted(self, number: int) -> Ints:
        first, unit = number * self._size, self.buckets.multiple
        g = np.arange(first, min(first + self._size, self.whole))
        lengths = self._lengths.at(self.base.rows(g))
        by_length = np.argsort(-lengths, kind="stable")
        fit = self._fit(lengths[by_length[::unit]]).tolist()
        starts, at = [], 0
        while at < len(fit):
            starts.append(at * unit)
            at += fit[at]
        turn = self._turn(first, len(starts))
        sizes = np.diff([*starts, len(g)])
        rank = np.empty(len(turn), np.int64)
        rank[turn] = np.arange(len(turn))
        g = g[by_length]
        # In a step, what one lane of the order serves lies together: few ranks read it.
        found = g[np.lexsort((g, g % self.num_splits, np.repeat(rank, sizes)))]
        borders = first + np.concatenate([[0], np.cumsum(sizes[turn])])
        with self._lock:
            keep(self._borders, number, borders, _KEPT_BORDERS)
        return found
