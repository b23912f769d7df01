"""The order ``destrier-1``: which position of the selection is sample ``g`` of an epoch.

A pure function of (number of rows, seed, epoch, num_splits, clump_size, window, shuffle) with
random access in both directions. It needs no state, no I/O, and memory for one window at most.
``docs/order.md`` defines it in formulas with test vectors; the names here are those of that page:
N rows, S splits, c rows a clump, w clumps a window, W = w·c.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from destrier.arrays import divided
from destrier.errors import ArgumentError, EmptyError
from destrier.keyed import (
    MASK,
    Ints,
    Words,
    cut,
    epoch_key,
    hash_words,
    mix,
    permute,
    permute_each,
    subkey,
    unpermute,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ORDER_VERSION", "Order"]

ORDER_VERSION = "destrier-1"

_STRATA_GUARD = 64  # clumps a stratum must have before strata are used
_WINDOW_BLOCK = 1 << 16
_MOST_KEPT_SPLITS = 1 << 16  # of which bounds are kept, to be looked up
_LARGEST_WINDOW = 1 << 31  # rows; above it the stagger would not fit 64 bits


@dataclass(frozen=True)
class Order:
    """The order of one epoch.

    Args:
        n: Number of rows in the selection, at least 1.
        seed: From 0 to 2**32 - 1.
        epoch: From 0 to 2**32 - 1.
        num_splits: Number of lanes that the order is dealt into, from 1 to n.
        clump_size: Rows that are permuted as one and read as one.
        window: Clumps inside which rows are permuted. Without meaning if clump_size is 1.
        shuffle: False gives table order, as contiguous ranges if num_splits is over 1.

    Example:
        >>> order = Order(1003, seed=7, epoch=3, num_splits=8, clump_size=3, window=4)
        >>> order.rows(np.arange(5)).tolist()
        [665, 138, 650, 3, 520]
        >>> order.samples(np.array([665, 138])).tolist()
        [0, 1]
    """

    n: int
    seed: int = 0
    epoch: int = 0
    num_splits: int = 1
    clump_size: int = 1
    window: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("n", "seed", "epoch", "num_splits", "clump_size", "window"):
            # numpy's integers would overflow where Python's do not
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.n < 1:
            raise EmptyError("an order needs at least one row")
        for name in ("num_splits", "clump_size", "window"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_splits > self.n:
            raise ArgumentError(
                f"num_splits is {self.num_splits}, but there are only {self.n} rows: "
                "every split needs at least 1 row per split"
            )
        if self.window_rows >= _LARGEST_WINDOW:
            raise ArgumentError(
                f"clump_size {self.clump_size} times window {self.window} is too large: a window "
                f"has fewer than {_LARGEST_WINDOW} rows"
            )
        _ = self._key

    def __getstate__(self) -> dict[str, Any]:
        # Without what is kept to be looked up.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _key(self) -> int:
        return epoch_key(self.seed, self.epoch)

    @cached_property
    def _keys(self) -> tuple[int, int, int, int]:
        key = self._key
        return subkey(key, 0), subkey(key, 1), subkey(key, 2), subkey(key, 3)

    @property
    def windowed(self) -> bool:
        """Whether rows are permuted inside windows of clumps (else each for itself)."""
        return self.shuffle and self.clump_size > 1

    @property
    def window_rows(self) -> int:
        """Rows in a whole window, W."""
        return self.window * self.clump_size

    @cached_property
    def _full_clumps(self) -> int:
        return self.n // self.clump_size

    @cached_property
    def _strata(self) -> int:
        enough = self._full_clumps >= _STRATA_GUARD * self.window
        return self.window if self.windowed and enough else 1

    @cached_property
    def _rotation(self) -> tuple[int, int]:
        """Where the circle of rows starts this epoch, and which clump is first in table order."""
        o = (self._keys[3] * self.n) >> 64
        return o, min(self._full_clumps, -(-(self.n - o) // self.clump_size))

    # ---- sample → row -----------------------------------------------------------------------

    def rows(self, g: NDArray[Any]) -> Ints:
        """Return the position in the selection of each sample index in ``g``.

        Args:
            g: Sample indices of this epoch, int, in [0, n), one dimension.

        Returns:
            Positions in [0, n), int64, of the same length.
        """
        g = np.asarray(g, np.int64)
        if not self.windowed:
            return self._line_rows(self._line(g))
        lo, hi, place = self.locate(g)
        out = np.empty(len(g), np.int64)
        for chosen, own, starts, ends in self._by_window(lo, hi):
            out[chosen] = self._hash_at(starts, ends, own, place[chosen])
        return self._line_rows(out)

    def rows_of(self, epochs: Ints, g: Ints) -> Ints:
        """Return what `rows` gives, where each sample is of an epoch of its own.

        Raises:
            ArgumentError: If rows are permuted in windows, each of one epoch.
        """
        if self.windowed:
            raise ArgumentError("samples of several epochs have no windows in common")
        if not self.shuffle:
            return self._line(g)
        keys = hash_words(np.uint64(self.seed << 32) + epochs.astype(np.uint64))
        for _ in range(2):  # the key of clumps, and of the only stratum
            keys = hash_words(keys ^ np.uint64(mix(0)))
        # With clumps of one row the rotation of the circle cancels out.
        return permute(self._line(g), self.n, keys)

    def _line(self, g: Ints) -> Ints:
        """The position on the line of each sample, where there are no windows."""
        t, split = divided(g, self.num_splits)
        return self._split_bounds(split)[0] + t

    def locate(self, g: NDArray[Any]) -> tuple[Ints, Ints, Ints]:
        """For each sample: the window ``[lo, hi)`` of line positions it is in, and its place there.

        Successive samples of one split have successive places, so that a window which is held in
        the order of its places is consumed from some place on, without gaps.
        """
        t, split = divided(np.asarray(g, np.int64), self.num_splits)
        if self.num_splits <= _MOST_KEPT_SPLITS:
            start, size, stagger = (values[split] for values in self._splits)
        else:
            start, size = self._split_bounds(split)
            stagger = self._stagger(split, start, size)
        x = t + stagger
        np.subtract(x, size, out=x, where=x >= size)
        x += start
        lo, hi = self._window_bounds(x, start, size)
        return lo, hi, x - lo

    def cycles(self, g: Ints) -> Ints:
        """How often each sample's split was served before it: once in each round over all."""
        return g // self.num_splits

    def window_reads(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
        """Return what whole windows consist of, as it is read: in table order.

        Args:
            lo: First line position of each window, as `locate` gives it; each window once.
            hi: One past its last.

        Returns:
            Positions in the selection, ascending, in runs of whole clumps; for each the number of
            its window (an index of ``lo``); and its place there.
        """
        sizes = hi - lo
        first = np.cumsum(sizes) - sizes
        place = np.empty(int(sizes.sum()), np.int64)
        step = max(1, _WINDOW_BLOCK // int(sizes.max(initial=1)))
        for i in range(0, len(lo), step):
            part = slice(i, i + step)
            begin = np.repeat(first[part], sizes[part])
            y = self._by_hash(lo[part], hi[part])
            y += begin - np.repeat(lo[part], sizes[part])
            begin -= first[i]
            place[y] = np.arange(len(y)) - begin
        start, length, window, inner = self._runs(lo, hi)
        by_row = np.argsort(start)
        start, length, window, inner = (a[by_row] for a in (start, length, window, inner))
        run = np.cumsum(length) - length
        count = np.arange(len(place))
        rows = count + np.repeat(start - run, length)
        line = count + np.repeat(first[window] + inner - run, length)
        return rows, np.repeat(window, length), place[line]

    def _runs(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """The runs of rows in windows: first row, length, window, and where in its line."""
        c, n = self.clump_size, self.n
        counts = (hi - 1) // c - lo // c + 1
        window = np.repeat(np.arange(len(lo)), counts)
        slot = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts - lo // c, counts)
        begin = np.maximum(lo[window], slot * c)
        length = np.minimum(hi[window], (slot + 1) * c) - begin
        start = (self._slot_starts(slot) + begin - slot * c) % n
        inner = begin - lo[window]
        over = start + length - n  # one clump of an epoch may wrap round the circle of rows
        wraps = np.flatnonzero(over > 0)
        if wraps.size:
            beyond = over[wraps]
            length[wraps] -= beyond
            inner = np.concatenate([inner, inner[wraps] + length[wraps]])
            start = np.concatenate([start, np.zeros_like(beyond)])
            length = np.concatenate([length, beyond])
            window = np.concatenate([window, window[wraps]])
        return start, length, window, inner

    def _by_window(self, lo: Ints, hi: Ints) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """Group values by their windows, a bounded number of windows at a time.

        Yields the indices of the values, the number of each one's window in the group, and the
        bounds of the windows.
        """
        starts, first, inverse = np.unique(lo, return_index=True, return_inverse=True)
        ends = hi[first]
        order = np.argsort(inverse, kind="stable")
        step = max(1, _WINDOW_BLOCK // self.window_rows)
        edges = np.searchsorted(inverse[order], np.arange(0, len(starts) + step, step))
        for i in range(len(edges) - 1):
            chosen = order[edges[i] : edges[i + 1]]
            group = slice(i * step, (i + 1) * step)
            yield chosen, inverse[chosen] - i * step, starts[group], ends[group]

    @cached_property
    def _splits(self) -> tuple[Ints, Ints, Ints]:
        """Of each split where its piece of the line starts, its size, and its stagger."""
        split = np.arange(self.num_splits)
        start, size = self._split_bounds(split)
        return start, size, self._stagger(split, start, size)

    def _split_bounds(self, split: Ints) -> tuple[Ints, Ints]:
        q, r = divmod(self.n, self.num_splits)
        return split * q + np.minimum(split, r), q + (split < r).astype(np.int64)

    def _stagger(self, split: Ints, start: Ints, size: Ints) -> Ints:
        """Where in its piece a split starts: at different places of their windows."""
        f = ((split * 0x9E3779B9 & 0xFFFFFFFF) * self.window_rows) >> 32
        return ((f - start) % self.window_rows) % size

    def _window_bounds(self, x: Ints, start: Ints, size: Ints) -> tuple[Ints, Ints]:
        edge = x // self.window_rows * self.window_rows
        return np.maximum(start, edge), np.minimum(start + size, edge + self.window_rows)

    def _hashes(self, y: Ints) -> Words:
        return hash_words(y.view(np.uint64) ^ np.uint64(self._keys[2]))

    def _by_hash(self, lo: Ints, hi: Ints) -> Ints:
        """The integers of each range in ascending hash, ranges one after another."""
        places = np.arange(int((hi - lo).max()))
        h = self._hashes(lo[:, None] + places)
        inside = places < (hi - lo)[:, None]
        h[~inside] = MASK
        # Sorting words that carry their place in the low bits is faster than sorting places by
        # words. Where the high bits of two agree, the whole hash must decide.
        bits = len(places).bit_length()
        low = np.uint64((1 << bits) - 1)
        keys = np.sort((h & ~low) | places.view(np.uint64), axis=1)
        order = (keys & low).view(np.int64)
        keys >>= np.uint64(bits)
        unclear = np.flatnonzero(((keys[:, 1:] == keys[:, :-1]) & inside[:, 1:]).any(axis=1))
        if unclear.size:
            # stable, so that a true hash of all ones stays before the filling behind it
            order[unclear] = np.argsort(h[unclear], axis=1, kind="stable")
        y: Ints = (lo[:, None] + order)[inside]
        return y

    def _hash_at(self, lo: Ints, hi: Ints, own: Ints, place: Ints) -> Ints:
        """The integers at some places of ranges in ascending hash; ``own`` numbers their ranges.

        Hashes are uniform, so those at a place are sought among the ones near the expected value:
        one pass over a range instead of a sort.
        """
        y: Ints
        sizes = hi - lo
        least, most = sizes.copy(), np.zeros_like(sizes)
        np.minimum.at(least, own, place)
        np.maximum.at(most, own, place)
        margin = 8 * np.sqrt(sizes) + 8
        bottom = (np.maximum(least - margin, 0) * (2.0**64 / sizes)).astype(np.uint64)
        top = np.minimum((most + margin) * (2.0**64 / sizes), 2.0**64 - 4096).astype(np.uint64)
        top[most + margin >= sizes] = MASK
        places = np.arange(int(sizes.max()))
        h = self._hashes(lo[:, None] + places)
        inside = places < sizes[:, None]
        below = ((h < bottom[:, None]) & inside).sum(axis=1)
        near = (h >= bottom[:, None]) & (h <= top[:, None]) & inside
        counts = near.sum(axis=1)
        rank = place - below[own]
        if ((rank < 0) | (rank >= counts[own])).any():  # farther off than eight deviations
            y = self._by_hash(lo, hi)[(np.cumsum(sizes) - sizes)[own] + place]
            return y
        window, column = np.nonzero(near)
        ranked = column[np.lexsort((h[window, column], window))]
        y = lo[own] + ranked[(np.cumsum(counts) - counts)[own] + rank]
        return y

    def _line_rows(self, y: Ints) -> Ints:
        if not self.shuffle:
            return y
        if self.clump_size == 1:
            return self._slot_starts(y) % self.n
        slot, inverse = np.unique(y // self.clump_size, return_inverse=True)
        start = self._slot_starts(slot) - slot * self.clump_size
        return (start[inverse] + y) % self.n

    def _slot_starts(self, slot: Ints) -> Ints:
        """The row at which each slot of the line starts, on the circle of rows."""
        c, full = self.clump_size, self._full_clumps
        o, first = self._rotation
        start = np.full(len(slot), full * c)  # the tail, a short clump at the end of the line
        whole = slot < full
        if whole.all():
            start = (self._clumps(slot) + first) % full * c
        elif full:
            start[whole] = (self._clumps(slot[whole]) + first) % full * c
        return start + o

    def _stratum_rows(self, m: Ints) -> Ints:
        """For each row of slots, its strata in the order in which the slots take them."""
        strata = self._strata
        j = np.arange(strata)
        h = hash_words((m[:, None] * strata + j).view(np.uint64) ^ np.uint64(self._keys[1]))
        last, present = divmod(self._full_clumps, strata)
        h[m == last, present:] = MASK
        return np.argsort(h, axis=1, kind="stable")

    def _stratum_keys(self, j: Ints) -> Words:
        inner = hash_words(j.astype(np.uint64))
        return hash_words(inner ^ np.uint64(self._keys[0]))

    def _clumps(self, slot: Ints) -> Ints:
        """Slots of the line → clumps in table order."""
        full, strata = self._full_clumps, self._strata
        if strata == 1:
            return permute(slot, full, subkey(self._keys[0], 0))
        m, i = divided(slot, strata)
        rows, inverse = np.unique(m, return_inverse=True)
        j = self._stratum_rows(rows)[inverse, i]
        q, r = divmod(full, strata)
        inner = permute_each(m, q + (j < r).astype(np.int64), self._stratum_keys(j), backward=False)
        return j * q + np.minimum(j, r) + inner

    # ---- row → sample -----------------------------------------------------------------------

    def samples(self, rows: NDArray[Any]) -> Ints:
        """Return the sample index at which each position of the selection comes: `rows` inverted.

        Args:
            rows: Positions in the selection, int, in [0, n), one dimension.

        Returns:
            Sample indices in [0, n), int64, of the same length.
        """
        y = self._row_lines(np.asarray(rows, np.int64))
        split, start, size = cut(self.n, self.num_splits, y)
        if not self.windowed:
            return (y - start) * self.num_splits + split
        lo, hi = self._window_bounds(y, start, size)
        x = lo + self._ranks(lo, hi, y)
        t = (x - start - self._stagger(split, start, size)) % size
        return t * self.num_splits + split

    def _row_lines(self, rows: Ints) -> Ints:
        if not self.shuffle:
            return rows
        c, full = self.clump_size, self._full_clumps
        o, first = self._rotation
        z = (rows - o) % self.n
        out: Ints = z.copy()
        whole = z < full * c
        k, inner = divided(z[whole], c)
        if len(k):
            out[whole] = self._slots((k - first) % full) * c + inner
        return out

    def _slots(self, clump: Ints) -> Ints:
        full, strata = self._full_clumps, self._strata
        if strata == 1:
            return unpermute(clump, full, subkey(self._keys[0], 0))
        j, start, size = cut(full, strata, clump)
        m = permute_each(clump - start, size, self._stratum_keys(j), backward=True)
        rows, inverse = np.unique(m, return_inverse=True)
        i = np.argsort(self._stratum_rows(rows), axis=1, kind="stable")[inverse, j]
        return m * strata + i

    def _ranks(self, lo: Ints, hi: Ints, y: Ints) -> Ints:
        """The place of each y in its window."""
        out = np.empty(len(y), np.int64)
        for chosen, own, a, b in self._by_window(lo, hi):
            content = self._by_hash(a, b)
            sizes = b - a
            first = np.cumsum(sizes) - sizes
            place = np.empty(len(content), np.int64)
            base = np.repeat(first, sizes)
            place[base + content - np.repeat(a, sizes)] = np.arange(len(content)) - base
            out[chosen] = place[first[own] + y[chosen] - a[own]]
        return out
