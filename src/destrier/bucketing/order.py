"""Orders whose samples change places inside windows, so that batches have samples of like length.

A window is as many successive samples of the order as some batches take. They are sorted by
length and cut into batches, which then come in a keyed order. So every batch has samples of like
length and every epoch other ones (the same, where nothing is shuffled): a pure function of the
order and the lengths, computed a window at a time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import numpy as np

from destrier.arrays import divided
from destrier.bucketing.buckets import Buckets
from destrier.keyed import BUCKET_KEY, Ints, epoch_key, hash_words, subkey
from destrier.order import Order
from destrier.packing.lengths import Lengths

__all__ = ["BucketedOrder", "WindowedOrder", "keep"]

_KEPT = 4  # windows: a block of shares lies in few


def keep(kept: OrderedDict[int, Any], number: int, value: Any, most: int) -> None:
    """Put something into a dict, or its end, which forgets what was put there first."""
    kept[number] = value
    kept.move_to_end(number)
    while len(kept) > most:
        kept.popitem(last=False)


class WindowedOrder(ABC):
    """The order of one epoch, with the samples of each window in other places.

    Args:
        order: The order.
        lengths: Of the rows, by position.
        size: Samples of a window.

    Attributes:
        base: The order.
    """

    def __init__(self, order: Order, lengths: Lengths, size: int) -> None:
        self.base = order
        self._lengths = lengths
        self._size = min(size, max(1, order.n))
        epoch = order.epoch if order.shuffle else 0
        self._key = subkey(epoch_key(order.seed, epoch), BUCKET_KEY)
        self._kept: OrderedDict[int, Ints] = OrderedDict()
        self._lock = threading.Lock()
        self.n = order.n
        self.num_splits = order.num_splits
        self.windowed = order.windowed
        self.window_rows = order.window_rows
        self.window_reads = order.window_reads

    def samples(self, g: Ints) -> Ints:
        """The sample of the order that comes at each place."""
        window, place = divided(np.asarray(g, np.int64), self._size)
        out = np.empty(len(window), np.int64)
        for number in np.unique(window).tolist():
            mine = window == number
            out[mine] = self._window(number)[place[mine]]
        return out

    def rows(self, g: Ints) -> Ints:
        """The position of each sample."""
        return self.base.rows(self.samples(g))

    def locate(self, g: Ints) -> tuple[Ints, Ints, Ints]:
        """The window of the order that each sample is in, and its place there."""
        return self.base.locate(self.samples(g))

    def cycles(self, g: Ints) -> Ints:
        """How often each sample's lane was served before it in the order."""
        return self.base.cycles(self.samples(g))

    def _window(self, number: int) -> Ints:
        """The samples of a window in their new places."""
        with self._lock:
            found = self._kept.get(number)
        if found is None:
            found = self._sorted(number)
            with self._lock:
                keep(self._kept, number, found, _KEPT)
        return found

    @abstractmethod
    def _sorted(self, number: int) -> Ints:
        """Put the samples of a window in their new places."""

    def _turn(self, first: int, batches: int) -> Ints:
        """In which order the batches of a window come, whose first sample is given."""
        names = np.arange(first, first + batches)
        return np.argsort(hash_words(names.view(np.uint64) ^ np.uint64(self._key)))


class BucketedOrder(WindowedOrder):
    """The order of one epoch with batches of like length, each of as many samples.

    An epoch has the same samples and steps as without.

    Args:
        order: The order.
        lengths: Of the rows, by position.
        buckets: How many samples a batch has, and how many batches are sorted together.
    """

    def __init__(self, order: Order, lengths: Lengths, buckets: Buckets) -> None:
        super().__init__(order, lengths, buckets.batch * buckets.window)
        self._unit = buckets.batch

    def _sorted(self, number: int) -> Ints:
        first = number * self._size
        g = np.arange(first, min(first + self._size, self.n))
        lengths = self._lengths.at(self.base.rows(g))
        by_length = g[np.argsort(lengths, kind="stable")]
        batches = -(-len(g) // self._unit)
        short = batches * self._unit - len(g)
        turn = self._turn(first, batches)
        # A short batch is the last one; it may be of any length.
        sizes = np.full(batches, self._unit)
        sizes[turn[-1]] -= short
        starts = np.cumsum(sizes) - sizes
        out = np.empty(len(g), np.int64)
        for i, batch in enumerate(turn.tolist()):
            content = by_length[starts[batch] : starts[batch] + sizes[batch]]
            place = i * self._unit + np.arange(len(content))
            # In a step, what one lane of the order serves lies together: few ranks read it.
            out[self._by_lane(place + first) - first] = self._by_lane(content)
        return out

    def _by_lane(self, g: Ints) -> Ints:
        return g[np.lexsort((g, g % self.num_splits))]
