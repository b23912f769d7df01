"""The epochs of a table, one after another, as one order without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from destrier.arrays import divided
from destrier.block import Line
from destrier.keyed import Ints
from destrier.order import Order

__all__ = ["Passes"]

_KEPT = 8  # orders
_EPOCHS = 1 << 32  # a source of few rows may come so often: its first epoch then follows again


class Passes:
    """Sample x is sample ``x mod n`` of epoch ``x // n``.

    Windows of different epochs are different ones: their bounds are shifted by ``n`` an epoch.

    Args:
        order: From an epoch to its order, all of one size.
    """

    def __init__(self, order: Callable[[int], Line]) -> None:
        self._make = order
        self._orders: dict[int, Line] = {}
        any_order = self._first = self._order(0)
        self.n = any_order.n
        self.num_splits = any_order.num_splits
        self.windowed = any_order.windowed
        self.window_rows = any_order.window_rows
        self._cycles = -(-self.n // self.num_splits)

    def _order(self, epoch: int) -> Line:
        found = self._orders.get(epoch)
        if found is None:
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            found = self._orders[epoch] = self._make(epoch % _EPOCHS)
        return found

    def _each(self, x: Ints) -> Iterator[tuple[Line, int, Any]]:
        """The epochs of some samples: order, first sample, and which samples are of it."""
        epochs = x // self.n
        first, last = (int(epochs.min()), int(epochs.max())) if len(x) else (0, -1)
        if first == last:
            yield self._order(first), first * self.n, slice(None)
            return
        by_epoch = np.argsort(epochs, kind="stable")
        cuts = np.flatnonzero(np.diff(epochs[by_epoch])) + 1
        for mine in np.split(by_epoch, cuts) if len(x) else ():
            epoch = int(epochs[mine[0]])
            yield self._order(epoch), epoch * self.n, mine

    def rows(self, g: Ints) -> Ints:
        """The position of each sample in the row list."""
        if not self.windowed and isinstance(self._first, Order):
            epochs, sample = divided(g, self.n)
            return self._first.rows_of(epochs % _EPOCHS, sample)  # many epochs, if n is small
        out = np.empty(len(g), np.int64)
        for order, first, mine in self._each(g):
            out[mine] = order.rows(g[mine] - first)
        return out

    def locate(self, g: Ints) -> tuple[Ints, Ints, Ints]:
        """The window that each sample is in, and its place there."""
        lo, hi, place = (np.empty(len(g), np.int64) for _ in range(3))
        for order, first, mine in self._each(g):
            if isinstance(mine, slice):
                lo, hi, place = order.locate(g - first)
                lo += first
                hi += first
                break
            low, high, place[mine] = order.locate(g[mine] - first)
            lo[mine], hi[mine] = low + first, high + first
        return lo, hi, place

    def window_reads(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
        """What whole windows consist of."""
        parts = []
        for order, first, mine in self._each(lo):
            positions, window, place = order.window_reads(lo[mine] - first, hi[mine] - first)
            numbers = np.arange(len(lo))[mine]
            parts.append((positions, numbers[window], place))
        if len(parts) == 1:
            return parts[0]
        first_of, second_of, third_of = zip(*parts, strict=True)
        return np.concatenate(first_of), np.concatenate(second_of), np.concatenate(third_of)

    def cycles(self, g: Ints) -> Ints:
        """How often each sample's split was served before it, over all epochs."""
        epoch, sample = divided(g, self.n)
        cycles: Ints = epoch * self._cycles + sample // self.num_splits
        return cycles
