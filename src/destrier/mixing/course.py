"""The course of a mixture: from a sample of an epoch to a source and a sample of it.

A course is made of segments with fixed weights, one after another: `Course.reweighted` begins a
new one. All of it is a pure function of sizes, weights, seed and epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from destrier.arrays import divided
from destrier.errors import ArgumentError, EmptyError
from destrier.keyed import MIXTURE_KEY, Ints, epoch_key, subkey
from destrier.mixing.quotas import Quotas, by_source

__all__ = ["ENDLESS", "Course", "Segment", "Stop", "begun_endless"]

Stop: TypeAlias = Literal["every_row_once", "first_exhausted", "all_exhausted", "length", "never"]

ENDLESS = 1 << 62
"""Samples in an epoch that does not end."""

_ENDLESS_PASSES = 16  # of an epoch without end, 2**16 of a source's come before those of the next


def begun_endless(epoch: int, size: int) -> int:
    """Epochs of a source that were begun before an epoch without end.

    Args:
        epoch: Its number. It is left before the next one begins.
        size: Samples in an epoch of the source; one without end is never through.
    """
    return epoch if size >= ENDLESS else epoch << _ENDLESS_PASSES


@dataclass(frozen=True)
class Segment:
    """Weights, and the slot from which on they hold."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Course:
    """Which source each sample is of.

    Args:
        names: Of the sources.
        sizes: Samples in an epoch of each.
        segments: Of epoch ``epoch``, from the first slot on that anybody may still ask for, which
            is 0 unless ``before`` says more. Epochs after it have the last weights.
        window: Slots of a window, Q.
        unit: Samples of a slot: so many successive ones are of one source.
        stop: When an epoch is over.
        seed: Of the order inside windows.
        length: Samples in an epoch, where ``stop`` is "length".
        epoch: The one that the segments are of. Where epochs go on in each other's place
            (``stop`` is "length") it is 0, and slots are counted from epoch 0 on.
        spent: Epochs of each source that were begun before.
        made: The weights of the beginning.
        before: Slots of each source before the first segment: what is left of those that passed.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    segments: tuple[Segment, ...]
    window: int
    unit: int
    stop: Stop
    seed: int
    length: int | None = None
    epoch: int = 0
    spent: tuple[int, ...] = field(default=())
    made: tuple[float, ...] = field(default=())
    before: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.made:
            object.__setattr__(self, "made", self.segments[0].weights)
        if not self.spent:
            object.__setattr__(self, "spent", (0,) * len(self.names))
        if not self.before:
            object.__setattr__(self, "before", (0,) * len(self.names))
        _ = self._quotas(0, self.segments[-1].weights)  # refuses what no window can hold
        if self.stop == "all_exhausted":
            for name, size, weight in zip(
                self.names, self.sizes, self.segments[-1].weights, strict=True
            ):
                if weight and size >= ENDLESS:
                    raise ArgumentError(
                        f"source {name!r} has no end, so stop='all_exhausted' never comes; take "
                        "another stop=, or length="
                    )
        if self.length is not None and self.length % self.unit:
            raise ArgumentError(
                f"length={self.length} is no multiple of the {self.unit} samples that are of one "
                "source, so that the next epoch would begin inside them; take a multiple"
            )

    @property
    def goes_on(self) -> bool:
        """Whether an epoch goes on where the one before it stopped."""
        return self.stop == "length"

    def _quotas(self, epoch: int, weights: tuple[float, ...]) -> Quotas:
        key = subkey(epoch_key(self.seed, 0 if self.goes_on else epoch), MIXTURE_KEY)
        end = sum(self.sizes) if self.stop == "every_row_once" else None
        return Quotas(self.names, weights, self.window, key, end)

    def _segments(self, epoch: int) -> tuple[Segment, ...]:
        if self.goes_on or epoch == self.epoch:
            return self.segments
        if epoch < self.epoch:
            raise ArgumentError(
                f"the mixture was reweighted in epoch {self.epoch}: the weights of epoch {epoch} "
                "before it are not kept; make a mixture with them to repeat it"
            )
        return (Segment(0, self.segments[-1].weights),)

    def _bases(self, epoch: int) -> list[list[int]]:
        """Slots of each source before each segment."""
        own = self._segments(epoch) is self.segments
        return self._own_bases if own else [[0] * len(self.names)]

    @cached_property
    def _own_bases(self) -> list[list[int]]:
        bases = [list(self.before)]
        for before, after in pairwise(self.segments):
            quotas = self._quotas(self.epoch, before.weights)
            counts = quotas.counts_before(after.start - before.start)
            bases.append([a + b for a, b in zip(bases[-1], counts, strict=True)])
        return bases

    # ---- sizes ----------------------------------------------------------------------------------

    def samples(self, epoch: int) -> int:
        """Samples of an epoch.

        Raises:
            EmptyError: If there are none.
        """
        if self.stop == "never":
            return ENDLESS
        if self.stop == "length":
            assert self.length is not None
            return self.length
        if self.stop == "every_row_once":
            return sum(self.sizes)
        slots = self._first_length if epoch <= self.epoch else self._later_length
        return min(slots * self.unit, ENDLESS)

    @cached_property
    def _first_length(self) -> int:
        return self._slots(self.epoch)

    @cached_property
    def _later_length(self) -> int:
        return self._slots(self.epoch + 1)

    def _slots(self, epoch: int) -> int:
        segments = self._segments(epoch)
        last, base = segments[-1], self._bases(epoch)[-1]
        quotas = self._quotas(epoch, last.weights)
        whole = [size // self.unit for size in self.sizes]
        left = [max(0, size - used) for size, used in zip(whole, base, strict=True)]
        if self.stop == "first_exhausted":
            windows = quotas.windows_within(left) or 0
        else:
            covering = [-(-size // self.unit) for size in self.sizes]
            wanted = [max(0, size - used) for size, used in zip(covering, base, strict=True)]
            windows = quotas.windows_covering(wanted)
        slots = last.start + windows * self.window
        if not slots:
            raise EmptyError(
                f"an epoch of the mixture would have no sample: a window of {self.window} slots "
                f"of {self.unit} needs more rows than a source has ("
                + ", ".join(f"{n} {s}" for n, s in zip(self.names, self.sizes, strict=True))
                + "); take a smaller window=, or stop='all_exhausted' or length="
            )
        return slots

    def counts(self, epoch: int, samples: int | None = None) -> list[int]:
        """Samples of each source among the first ones of an epoch, in whole slots.

        Args:
            epoch: Its number.
            samples: How many; None is all of them.
        """
        slot = (self.samples(epoch) if samples is None else samples) // self.unit
        first = self._offset(epoch) // self.unit
        after = self._slot_counts(epoch, first + slot)
        if not first:
            return [count * self.unit for count in after]
        before = self._slot_counts(epoch, first)
        return [(b - a) * self.unit for a, b in zip(before, after, strict=True)]

    def _slot_counts(self, epoch: int, slot: int) -> list[int]:
        segments = self._segments(epoch)
        bases = self._bases(epoch)
        for segment, base in zip(reversed(segments), reversed(bases), strict=True):
            if segment.start <= slot:
                quotas = self._quotas(epoch, segment.weights)
                counts = quotas.counts_before(slot - segment.start)
                return [a + b for a, b in zip(base, counts, strict=True)]
        raise self._forgotten(epoch)

    def _forgotten(self, epoch: int) -> ArgumentError:
        """What is raised where somebody asks for samples of segments that passed."""
        first = self.segments[0].start * self.unit - self._offset(epoch)
        return ArgumentError(
            f"the mixture was reweighted since: the weights before sample {first} of epoch {epoch} "
            "are not kept; load a state from before it"
        )

    def _offset(self, epoch: int) -> int:
        """The sample, counted from epoch 0 on, at which an epoch begins that goes on."""
        return epoch * self.length if self.stop == "length" and self.length else 0

    # ---- samples --------------------------------------------------------------------------------

    def by_source(self, epoch: int, g: Ints) -> Iterator[tuple[int, Ints, Ints | int, Ints]]:
        """Where samples of an epoch come from, source by source.

        Yields the number of a source, the places in ``g`` of the samples that are of it, which of
        its epochs they are of (one number, where that is the same for all), and the samples there.
        """
        x = g + self._offset(epoch)
        slot = x // self.unit if self.unit > 1 else x
        segments = self._segments(epoch)
        if len(segments) == 1 and not segments[0].start and self.unit == 1:
            found = self._quotas(epoch, segments[0].weights).by_source(slot)
        else:
            if len(slot) and slot.min() < segments[0].start:
                raise self._forgotten(epoch)
            found = self._routed(epoch, x, slot)
        begun = self._begun(epoch)
        for number, mine, index in found:
            size = self.sizes[number]
            first, last = int(index.min()) // size, int(index.max()) // size
            if first == last:
                yield number, mine, begun[number] + first, index - first * size
            else:
                passes, own = divided(index, size)
                yield number, mine, begun[number] + passes, own

    def _routed(self, epoch: int, x: Ints, slot: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """The places of each source's samples, and which of it they are."""
        source, index = self._route_segments(epoch, slot)
        if self.unit > 1:
            index = index * self.unit + x % self.unit
        return by_source(source, index, len(self.sizes))

    def _route_segments(self, epoch: int, slot: Ints) -> tuple[Ints, Ints]:
        segments = self._segments(epoch)
        bases = self._bases(epoch)
        starts = [segment.start for segment in segments]
        of_segment = np.searchsorted(starts, slot, side="right") - 1
        source, index = np.empty(len(slot), np.int64), np.empty(len(slot), np.int64)
        for number in np.unique(of_segment).tolist():
            segment, base = segments[number], np.array(bases[number])
            mine = of_segment == number
            quotas = self._quotas(epoch, segment.weights)
            found, place = quotas.slots(slot[mine] - segment.start)
            source[mine], index[mine] = found, place + base[found]
        return source, index

    def _begun(self, epoch: int) -> list[int]:
        """Epochs of each source that were begun before an epoch."""
        if self.goes_on:
            return [0] * len(self.names)
        if self.stop == "never":  # an epoch that was left begins another one of each source
            return [begun_endless(epoch, size) for size in self.sizes]
        if epoch <= self.epoch:
            return list(self.spent)
        first, later = self._passes
        return [
            spent + one + (epoch - self.epoch - 1) * each
            for spent, one, each in zip(self.spent, first, later, strict=True)
        ]

    @cached_property
    def _passes(self) -> tuple[list[int], list[int]]:
        """Epochs of each source in the first epoch of the course, and in each one after it."""
        return self._passes_of(self.epoch), self._passes_of(self.epoch + 1)

    def _passes_of(self, epoch: int) -> list[int]:
        counts = self.counts(epoch)
        return [-(-count // size) for count, size in zip(counts, self.sizes, strict=True)]

    def reweighted(
        self, epoch: int, at: int, weights: tuple[float, ...], *, passed: int = 0
    ) -> Course:
        """The course with other weights from a sample of an epoch on.

        Weights of earlier epochs are not kept, and in an epoch without end none that held before
        ``passed`` only: so a course that goes on is no longer for having been changed often.
        Other epochs keep theirs until they are over, because their last step may be filled up
        with their first samples.

        Args:
            epoch: The epoch.
            at: Its first sample that the weights hold for.
            weights: One a source.
            passed: Samples of the epoch that nobody will ask for again.

        Raises:
            ArgumentError: If there is no such sample, or it is inside a unit.
            EmptyError: If the epochs after this one would have no sample.
        """
        if self.stop == "every_row_once":
            raise ArgumentError(
                "a mixture without weights reads every row once, so it cannot be reweighted; give "
                "weights= when it is made"
            )
        x = at + self._offset(epoch)
        before = self._segments(epoch)
        if at < 0 or at > self.samples(epoch) or x % self.unit:
            raise ArgumentError(
                f"a mixture is reweighted at a sample of its epoch, from 0 to "
                f"{self.samples(epoch)} and a multiple of {self.unit}, got {at}"
            )
        slot = x // self.unit
        if slot < before[-1].start:
            raise ArgumentError(
                f"the mixture was reweighted at sample {before[-1].start * self.unit} already; "
                f"got the earlier one {x}"
            )
        kept = [segment for segment in before if segment.start < slot]
        needed = (self._offset(epoch) + (passed if self.stop == "never" else 0)) // self.unit
        gone = max(0, sum(segment.start <= needed for segment in kept) - 1)
        bases = self._bases(epoch)
        changed = replace(
            self,
            segments=(*kept[gone:], Segment(slot, weights)),
            before=tuple(bases[gone]),
            epoch=0 if self.goes_on else epoch,
            spent=tuple(self._begun(epoch)),
        )
        _ = changed.samples(changed.epoch + 1)  # refuses what later epochs cannot be
        return changed
