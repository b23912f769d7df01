"""Who reads what of a mixture: steps and cycles whose samples are known by table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from destrier.arrays import stable_order
from destrier.errors import ArgumentError
from destrier.keyed import Ints
from destrier.plan import Cycles, Routes, Steps

__all__ = ["MixtureCycles", "MixtureSteps", "RoutedShares", "Router"]


class Router(Protocol):
    """Knows where samples come from, and how many an epoch has."""

    def routes(self, epoch: int, g: Ints) -> Routes:
        """Where samples of an epoch come from."""
        ...

    def samples(self, epoch: int) -> int:
        """Samples of an epoch."""
        ...


@dataclass(frozen=True)
class MixtureSteps(Steps):
    """The steps of an epoch of a mixture.

    The canonical order of a step is (lane, table, g): what one table's split serves lies together,
    in the order in which it is served, so that few ranks read it. Where slots have several samples,
    whole slots come one after another.

    Args:
        router: Where samples come from.
        unit: Samples of a slot.
    """

    router: Router | None = None
    unit: int = 1

    @property
    def routed_each(self) -> int:
        """Samples whose origin is found for a share: those of all ranks."""
        return self.global_batch

    def at(self, epoch: int, start: int) -> MixtureSteps:
        """The steps of an epoch from a counter on."""
        assert self.router is not None
        return replace(self, epoch=epoch, start=start, n=self.router.samples(epoch))

    def check(self, *, uneven: bool) -> None:
        """Raise if a whole epoch has no step, or a step cannot be shared in whole slots."""
        super().check(uneven=uneven)
        size, slots = self.topology.size, self.global_batch // self.unit
        if self.unit > 1 and self.unit != self.global_batch and slots % size:
            raise ArgumentError(
                f"a step of {self.global_batch} samples has {slots} units of {self.unit}, which "
                f"world_size {size} cannot share equally; units are of one source each"
            )

    def samples(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The sample indices of this worker's shares ``[first, last)`` and where each begins."""
        return self.routed(first, last)[:2]

    def share(self, step: int) -> Ints:
        """This rank's samples of one step, in canonical order."""
        return self._routed([step])[0]

    def routed(self, first: int, last: int) -> tuple[Ints, Ints, Routes]:
        """The sample indices of shares, where each begins, and where the samples come from."""
        return self._routed([self.step(index) for index in range(first, last)])

    def _routed(self, steps: list[int]) -> tuple[Ints, Ints, Routes]:
        assert self.router is not None
        none = np.empty(0, np.int64)
        if not steps:
            return none, np.zeros(1, np.int64), Routes(none, none, none)
        begin = self.start + np.array(steps) * self.global_batch
        size = self._step_size(steps[-1])  # only the last one can be short
        if size < self.global_batch and len(steps) > 1:
            whole, last = self._routed(steps[:-1]), self._routed(steps[-1:])
            columns = zip(whole[2], last[2], strict=True)
            return (
                np.concatenate([whole[0], last[0]]),
                np.concatenate([whole[1], whole[1][-1] + last[1][1:]]),
                Routes(*(np.concatenate(pair) for pair in columns)),
            )
        g = (begin[:, None] + np.arange(size)).ravel()
        routes = self.router.routes(self.epoch, g % self.n)
        chosen = self._canonical(routes, len(steps), size)
        lo, hi = self._bounds(size)
        chosen += (np.arange(len(steps)) * size)[:, None]
        mine = chosen[:, lo:hi].ravel()
        return g[mine], np.arange(len(steps) + 1) * (hi - lo), routes.at(mine)

    def _bounds(self, size: int) -> tuple[int, int]:
        """Which places of a step are this rank's: whole slots, where a step has several."""
        slots = 1 if self.unit == self.global_batch else self.unit
        lo, hi = super()._bounds(size // slots)
        return lo * slots, hi * slots

    def _canonical(self, routes: Routes, steps: int, size: int) -> Ints:
        """For each step the places of its samples, in canonical order."""
        tables = int(routes.leaf.max(initial=0)) + 1
        key = routes.lane * tables + routes.leaf
        if self.unit > 1:
            units = np.tile(np.arange(size) // self.unit, steps)
            key += units * (int(key.max(initial=0)) + 1)
        return stable_order(key.reshape(steps, size))


@dataclass(frozen=True)
class MixtureCycles(Cycles):
    """Row mode of a mixture: sample g is of lane ``g mod S``.

    Args:
        router: Where samples come from.
    """

    router: Router | None = None

    @property
    def routed_each(self) -> int:
        """Samples whose origin is found for a share: its own."""
        return self.largest

    def at(self, epoch: int, start: int, rows: int) -> MixtureCycles:
        """The cycles of an epoch from a counter on."""
        assert self.router is not None
        n = self.router.samples(epoch)
        return replace(self, epoch=epoch, start=start, rows=rows, n=n)

    def routed(self, first: int, last: int) -> tuple[Ints, Ints, Routes]:
        """The sample indices of shares, where each begins, and where the samples come from."""
        assert self.router is not None
        samples, bounds = self.samples(first, last)
        return samples, bounds, self.router.routes(self.epoch, samples)


RoutedShares: TypeAlias = "MixtureSteps | MixtureCycles"
