"""How many samples of each source there are before any window, and which slots they take.

A mixture is cut into windows of Q slots. Before window v there are exactly::

    C_i(v) = ⌊v·Q·P_i⌋ − ⌊v·Q·P_{i−1}⌋

samples of source i, P_i the cumulative shares as exact fractions: never off by one sample from
v·Q·p_i, for ever. Inside a window the slots are permuted by a key. ``docs/order.md`` has the
definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from destrier.arrays import divided
from destrier.errors import ArgumentError
from destrier.keyed import Ints, hash_words, permute_windows

__all__ = ["LARGEST_WINDOW", "Quotas", "by_source", "default_window", "exact_shares"]

LARGEST_WINDOW = 1 << 22
"""Slots of a window at most: random access costs one window."""

_WINDOW = 1024  # slots
_WINDOWS = 64  # before a source is exhausted, where it has rows enough
_BLOCK = 1 << 18  # slots that are worked on at once


def exact_shares(weights: Sequence[float]) -> list[Fraction]:
    """Return the share of each source; weights are taken as the exact numbers that they are."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def default_window(shares: Sequence[Fraction], slots: Sequence[int]) -> int:
    """Return the number of slots: a power of two, in which each source has one at least.

    Small sources have smaller windows: epochs are whole windows, and what is left of a source that
    fills no window would be much of it.

    Args:
        shares: Of the sources.
        slots: How many each source fills.
    """
    some = [(share, count) for share, count in zip(shares, slots, strict=True) if share]
    least = min(share for share, _ in some)
    exhausted = min(count / share for share, count in some)
    window = _WINDOW
    while window > 1 and window * _WINDOWS > exhausted and window * least >= 2:
        window //= 2
    while window * least < 1 and window <= LARGEST_WINDOW:  # no more are allowed
        window *= 2
    return window


@dataclass(frozen=True)
class Quotas:
    """The slots of a mixture with fixed weights.

    Args:
        names: Of the sources, for errors.
        weights: One a source, not negative, not all 0.
        window: Slots of a window, Q.
        key: Of the order inside windows.
        end: The slot at which the last window is cut; None where there is no end.

    Raises:
        ArgumentError: If a source has less than one slot in a window, or a window is too large.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    window: int
    key: int
    end: int | None = None

    def __post_init__(self) -> None:
        if self.window > LARGEST_WINDOW:
            raise ArgumentError(
                f"a window of {self.window} slots is too large, at most {LARGEST_WINDOW} are "
                "allowed: the smallest weight is too small against the others"
            )
        for name, share in zip(self.names, self.shares, strict=True):
            if share and share * self.window < 1:
                raise ArgumentError(
                    f"source {name!r} has {float(share):.3g} of the samples, less than one in a "
                    f"window of {self.window}; take a window of at least "
                    f"{math.ceil(1 / share)}, which is the global batch with "
                    "batching='stratified', or a larger weight"
                )

    @cached_property
    def shares(self) -> list[Fraction]:
        """The share of each source."""
        return exact_shares(self.weights)

    @cached_property
    def _bounds(self) -> tuple[list[int], int]:
        """Cumulative shares over one denominator."""
        denominator = math.lcm(*(share.denominator for share in self.shares))
        cumulative = [0]
        for share in self.shares:
            cumulative.append(cumulative[-1] + share.numerator * (denominator // share.denominator))
        return cumulative, denominator

    def counts(self, slot: int) -> list[int]:
        """Slots of each source before one that begins a window, or is the end."""
        cumulative, denominator = self._bounds
        floors = [slot * bound // denominator for bound in cumulative]
        return [after - before for before, after in pairwise(floors)]

    def _counts_at(self, slots: Sequence[int]) -> Ints:
        """What `counts` returns of each of some slots, a row a slot."""
        cumulative, denominator = self._bounds
        if max(*slots, 1) * denominator < 1 << 63:
            floors = np.multiply.outer(np.array(slots, np.int64), cumulative) // denominator
            counts: Ints = np.diff(floors, axis=1)
            return counts
        return np.array([self.counts(slot) for slot in slots], np.int64)

    def counts_before(self, slot: int) -> list[int]:
        """Slots of each source before any slot."""
        window, within = divmod(slot, self.window)
        counts = self.counts(window * self.window)
        if within:
            sources, _ = self.slots(np.arange(window * self.window, slot))
            inside = np.bincount(sources, minlength=len(counts)).tolist()
            counts = [a + b for a, b in zip(counts, inside, strict=True)]
        return counts

    def windows_within(self, limits: Sequence[int | None]) -> int | None:
        """The most windows that need no more of any source than there is; None is without end."""
        most: int | None = None
        for i, limit in enumerate(limits):
            if limit is None or not self.weights[i]:
                continue
            low, high = 0, self._enough(i, limit)
            while low < high:  # the last v with C_i(v) <= limit
                middle = (low + high + 1) // 2
                if self.counts(middle * self.window)[i] <= limit:
                    low = middle
                else:
                    high = middle - 1
            most = low if most is None else min(most, low)
        return most

    def windows_covering(self, wanted: Sequence[int]) -> int:
        """The fewest windows that have as many slots of each source as are wanted."""
        least = 0
        for i, want in enumerate(wanted):
            if not self.weights[i]:
                continue
            low, high = 0, self._enough(i, want)
            while low < high:  # the first v with C_i(v) >= want
                middle = (low + high) // 2
                if self.counts(middle * self.window)[i] >= want:
                    high = middle
                else:
                    low = middle + 1
            least = max(least, low)
        return least

    def _enough(self, source: int, slots: int) -> int:
        """A number of windows with more slots of a source than so many."""
        return int((slots + 2) / (self.shares[source] * self.window)) + 1

    def slots(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return for each slot its source, and which slot of that source it is.

        Args:
            slots: From 0 on, one dimension, any order.
        """
        source = np.empty(len(slots), np.int64)
        index = np.empty(len(slots), np.int64)
        if not len(slots):
            return source, index
        window, within = divided(slots, self.window)
        first, last = int(window.min()), int(window.max())
        if last - first < 2 + 2 * len(slots) // self.window:
            windows, inverse = np.arange(first, last + 1), window - first
        else:
            windows, inverse = np.unique(window, return_inverse=True)
        step = max(1, _BLOCK // self.window)
        by_window = np.argsort(inverse, kind="stable") if len(windows) > step else None
        for first in range(0, len(windows), step):
            part = windows[first : first + step]
            sources, indices = self._windows(part.tolist())
            if by_window is None:
                own: Any = slice(None)
            else:
                low, high = np.searchsorted(
                    inverse, [first, first + step], sorter=by_window
                ).tolist()
                own = by_window[low:high]
            place = (inverse[own] - first, within[own])
            source[own], index[own] = sources[place], indices[place]
        return source, index

    def by_source(self, slots: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """What `slots` returns, source by source, of those that have any of the slots.

        Yields the number of a source, the places of its slots, and which slots of it they are.
        """
        if not len(slots) or (np.diff(slots) != 1).any():
            yield from by_source(*self.slots(slots), len(self.weights))
            return
        source, before = self._successive(int(slots[0]), int(slots[-1]) + 1)
        for number, first in enumerate(before):
            mine = np.flatnonzero(source == number)
            if len(mine):
                yield number, mine, first + np.arange(len(mine))

    def _successive(self, start: int, stop: int) -> tuple[NDArray[Any], list[int]]:
        """The source of each of successive slots, and how many of each source are before them."""
        source = np.empty(stop - start, self._kind)
        step = max(1, _BLOCK // self.window)
        begun, end = start // self.window, -(-stop // self.window)
        before = self.counts(begun * self.window)
        for first in range(begun, end, step):
            begin = first * self.window
            sources = self._sources(list(range(first, min(first + step, end))))[0].ravel()
            if begin < start:
                passed = np.bincount(sources[: start - begin], minlength=len(before)).tolist()
                before = [a + b for a, b in zip(before, passed, strict=True)]
            own = sources[max(start - begin, 0) : stop - begin]
            source[max(begin - start, 0) :][: len(own)] = own
        return source, before

    @property
    def _kind(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if len(self.weights) <= 256 else np.uint16

    def _windows(self, windows: list[int]) -> tuple[NDArray[Any], Ints]:
        """Source and index of every slot of some windows, one row a window."""
        sources, start = self._sources(windows)
        # Slots of one source, in their order: the k-th of them is its k-th sample of the window.
        order = np.argsort(sources, axis=1, kind="stable")
        rank = np.empty(sources.shape, np.int64)
        np.put_along_axis(rank, order, np.arange(sources.shape[1])[None, :], axis=1)
        return sources, rank - np.take_along_axis(start, sources.astype(np.int64), axis=1)

    def _sources(self, windows: list[int]) -> tuple[NDArray[Any], Ints]:
        """The source of every slot of some windows, and what to take from a slot's rank in it.

        The rank counts the slots of a window source by source. Where the last window is cut short,
        what it has not is of no meaning.
        """
        size = self.window
        if self.end is not None and windows and (windows[-1] + 1) * size > self.end:
            if len(windows) > 1:
                parts = self._sources(windows[:-1]), self._sources(windows[-1:])
                (whole, starts), (last, start) = parts
                # What is not there comes last, so that it has no rank before what is.
                missing = ((0, 0), (0, size - last.shape[1]))
                padded = np.pad(last, missing, constant_values=len(self.weights) - 1)
                return np.concatenate([whole, padded]), np.concatenate([starts, start])
            size = self.end - windows[0] * size
        before = self._counts_at([v * self.window for v in windows])
        after = self._counts_at([v * self.window + size for v in windows])
        bounds = np.cumsum(after - before, axis=1)
        keys = hash_words(np.uint64(self.key) ^ hash_words(np.array(windows, np.uint64)))
        permuted = permute_windows(size, keys)
        sources = np.zeros(permuted.shape, self._kind)
        for i in range(len(self.weights) - 1):
            sources += (permuted >= bounds[:, i : i + 1]).astype(self._kind)
        return sources, bounds - (after - before) - before


def by_source(source: Ints, index: Ints, sources: int) -> Iterator[tuple[int, Ints, Ints]]:
    """The number of each source that is there, its places, and what stands there in the index."""
    for number in range(sources):
        mine = np.flatnonzero(source == number)
        if len(mine):
            yield number, mine, index[mine]
