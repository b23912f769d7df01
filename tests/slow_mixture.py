"""The course of a mixture in Python lists and fractions, slot by slot, from its definition alone.

Nothing here knows of windows that are worked on together, of bisections or of random access: every
sample of an epoch is written down, one after another, and lengths are found by walking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from slow import slow_mix, slow_permute, slow_sub

MIXTURE_KEY = 6  # of an epoch's keys
Sample = tuple[int, int, int]  # the source, the source's epoch, the sample in it


def slow_shares(weights: Sequence[float]) -> list[Fraction]:
    """The shares of weights, which are the exact numbers that floats are."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def slow_counts(shares: Sequence[Fraction], slot: int) -> list[int]:
    """How many of the first slots are of each source, where a window begins or all end."""
    floors = [
        math.floor(slot * bound) for bound in itertools.accumulate(shares, initial=Fraction())
    ]
    return [after - before for before, after in itertools.pairwise(floors)]


def slow_window(
    shares: Sequence[Fraction], window: int, v: int, key: int, end: int | None = None
) -> list[tuple[int, int]]:
    """The source of each slot of a window, and which of that source's slots it is."""
    first = v * window
    last = first + window if end is None else min(first + window, end)
    before, after = slow_counts(shares, first), slow_counts(shares, last)
    dealt = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) for _ in range(b - a)]
    own = slow_sub(key, v)
    seen = list(before)
    out = []
    for u in range(last - first):
        source = dealt[slow_permute(u, last - first, own)]
        out.append((source, seen[source]))
        seen[source] += 1
    assert seen == after
    return out


@dataclass
class SlowCourse:
    """What `Course` is, written down sample by sample.

    Attributes:
        changes: The epoch, the slot and the weights of every reweighting, in turn. Where epochs go
            on in each other's place the epoch is 0, and slots are counted from epoch 0 on.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    window: int
    stop: str
    seed: int = 0
    unit: int = 1
    length: int | None = None
    changes: list[tuple[int, int, Sequence[float]]] = field(default_factory=list)
    _known: dict[int, list[Sample]] = field(default_factory=dict)
    _counts: dict[int, int | None] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        return self.stop == "length"

    def reweight(self, epoch: int, at: int, weights: Sequence[float]) -> None:
        """Change the weights from a sample of an epoch on."""
        if self.goes_on:
            epoch, at = 0, at + epoch * (self.length or 0)
        assert at % self.unit == 0
        self.changes.append((epoch, at // self.unit, weights))
        self._known.clear()
        self._counts.clear()

    def _segments(self, epoch: int) -> list[tuple[int, Sequence[float]]]:
        weights, segments = self.weights, []
        for of, slot, changed in self.changes:
            if of < epoch:
                weights = changed
            elif of == epoch:
                segments = [(s, w) for s, w in segments if s < slot] + [(slot, changed)]
        return segments if segments and segments[0][0] == 0 else [(0, weights), *segments]

    def _walk(self, epoch: int) -> Iterator[tuple[int, int]]:
        """The source and the slot of that source, of every slot of an epoch, without end."""
        key = slow_sub(slow_mix(self.seed * 2**32 + epoch), MIXTURE_KEY)
        segments = self._segments(epoch)
        end = sum(self.sizes) if self.stop == "every_row_once" else None
        base = [0] * len(self.sizes)
        for number, (start, weights) in enumerate(segments):
            slots = math.inf if number + 1 == len(segments) else segments[number + 1][0] - start
            shares, used, done = slow_shares(weights), list(base), 0
            for v in itertools.count():
                for source, index in slow_window(shares, self.window, v, key, end):
                    if done == slots:
                        break
                    yield source, base[source] + index
                    used[source] += 1
                    done += 1
                if done == slots:
                    break
            base = used

    def samples(self, epoch: int) -> int | None:
        """Samples of an epoch; None where it has no end."""
        if epoch not in self._counts:
            self._counts[epoch] = self._samples(epoch)
        return self._counts[epoch]

    def _samples(self, epoch: int) -> int | None:
        if self.stop == "never":
            return None
        if self.stop == "length":
            return self.length
        if self.stop == "every_row_once":
            return sum(self.sizes)
        start, weights = self._segments(epoch)[-1]
        base = [0] * len(self.sizes)
        for source, _ in itertools.islice(self._walk(epoch), start):
            base[source] += 1
        shares = slow_shares(weights)
        drawn = [i for i, share in enumerate(shares) if share]

        def slots(v: int) -> list[int]:
            counts = slow_counts(shares, v * self.window)
            return [a + b for a, b in zip(base, counts, strict=True)]

        v = 0
        if self.stop == "first_exhausted":
            while all(slots(v + 1)[i] * self.unit <= self.sizes[i] for i in drawn):
                v += 1
        else:
            while any(slots(v)[i] * self.unit < self.sizes[i] for i in drawn):
                v += 1
        return (start + v * self.window) * self.unit

    def epoch(self, epoch: int, most: int | None = None) -> list[Sample]:
        """Every sample of an epoch, or so many of an epoch without end."""
        if most is None and epoch in self._known:
            return self._known[epoch]
        count = self.samples(epoch) if most is None else most
        assert count is not None
        skipped = epoch * (self.length or 0) if self.goes_on else 0
        endless = self.stop == "never"
        begun = [epoch * 2**16 if endless else 0] * len(self.sizes)
        one_by_one = 0 if self.goes_on or endless else epoch
        if one_by_one > 1000 and not self.changes:  # all of them draw the same
            drawn = [source for source, *_ in self.epoch(0)]
            pairs = enumerate(self.sizes)
            begun, one_by_one = [epoch * math.ceil(drawn.count(i) / n) for i, n in pairs], 0
        for before in range(one_by_one):
            drawn = [source for source, *_ in self.epoch(before)]
            for i, size in enumerate(self.sizes):
                begun[i] += math.ceil(drawn.count(i) / size)
        walk = self._walk(0 if self.goes_on else epoch)
        each = ((source, slot * self.unit + k) for source, slot in walk for k in range(self.unit))
        out = []
        for source, j in itertools.islice(each, skipped, skipped + count):
            passes, index = divmod(j, self.sizes[source])
            out.append((source, begun[source] + passes, index))
        if most is None:
            self._known[epoch] = out
        return out


def route(course: Any, epoch: int, g: Any) -> tuple[Any, Any, Any]:
    """For each sample of an epoch of a course its source, that one's epoch, and the sample."""
    g = np.asarray(g, np.int64)
    source, passes, index = (np.full(len(g), -1) for _ in range(3))
    for number, mine, epochs, samples in course.by_source(epoch, g):
        assert (source[mine] == -1).all()
        source[mine], passes[mine], index[mine] = number, epochs, samples
    assert (source >= 0).all()
    return source, passes, index
