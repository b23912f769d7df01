"""Who reads what: the samples of each step, and this rank's share of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from destrier.errors import ArgumentError, EmptyError
from destrier.keyed import Ints
from destrier.topology import ALONE, ONLY_WORKER, Topology, Worker

__all__ = [
    "REMAINDERS",
    "Cycles",
    "Epochs",
    "Remainder",
    "Routes",
    "Shares",
    "Steps",
    "check_batch",
    "share_bounds",
]

Remainder: TypeAlias = Literal["drop", "keep", "pad"]
REMAINDERS = ("drop", "keep", "pad")


class Routes(NamedTuple):
    """Where samples come from.

    Attributes:
        leaf: The number of each one's table.
        sample: Its sample there, counted over the epochs of that table.
        lane: The split of the table's order that serves it.
    """

    leaf: Ints
    sample: Ints
    lane: Ints

    def at(self, places: Ints) -> Routes:
        """Some of them."""
        return Routes(self.leaf[places], self.sample[places], self.lane[places])


class Shares(Protocol):
    """A sequence of shares: the samples that this process delivers, one share after another."""

    def __len__(self) -> int:
        """How many shares there are."""
        ...

    def samples(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The sample indices of shares ``[first, last)``, and where each share begins."""
        ...

    def counter(self, index: int) -> int:
        """The epoch's counter once ``index`` shares are delivered."""
        ...

    def size(self, index: int) -> int:
        """The number of samples in a share."""
        ...

    def at_most(self, n: int) -> int:
        """How many shares there are, or n if there are more: those beyond need not be counted."""
        ...

    @property
    def largest(self) -> int:
        """The number of samples in the largest share; about, where they differ."""
        ...

    @property
    def rows_left(self) -> int:
        """The number of samples in all shares, about."""
        ...

    @property
    def pad_from(self) -> int | None:
        """Samples from here on are repeats; None where there are none."""
        ...


class Epochs(Protocol):
    """The steps of any epoch."""

    def at(self, epoch: int, start: int) -> Shares:
        """The steps of an epoch from a counter on."""
        ...

    def check(self, *, uneven: bool) -> None:
        """Raise if a step cannot be shared, or a whole epoch has none.

        Args:
            uneven: Whether shares may differ by one.

        Raises:
            ArgumentError: If a step cannot be shared, naming the world sizes that work.
            EmptyError: If a whole epoch has no step.
        """
        ...


def share_bounds(n: int, rank: int, size: int) -> tuple[int, int]:
    """Cut n positions into contiguous shares that differ by at most one; return this rank's."""
    return rank * n // size, (rank + 1) * n // size


def check_batch(
    global_batch: int, size: int, *, uneven: bool, name: str = "global_batch_size"
) -> None:
    """Raise unless a step can be shared among ``size`` ranks.

    Args:
        global_batch: Samples in a step, or what their number is a multiple of.
        size: How many ranks there are.
        uneven: Whether shares may differ by one.
        name: What the number of samples is called.

    Raises:
        ArgumentError: Naming the world sizes that work.
    """
    if global_batch < 1:
        raise ArgumentError(f"the batch size must be at least 1, got {global_batch}")
    if global_batch % size and not uneven:
        low = [d for d in range(1, math.isqrt(global_batch) + 1) if global_batch % d == 0]
        works = [str(d) for d in sorted({*low, *(global_batch // d for d in low)})]
        shown = ", ".join(works if len(works) <= 24 else [*works[:23], "..."])
        raise ArgumentError(
            f"{name} {global_batch} cannot be shared equally by world_size {size}; "
            f"world sizes that work: {shown}; or pass uneven=True for shares that differ by one"
        )


@dataclass(frozen=True)
class Steps:
    """The steps of an epoch from a counter on.

    Step j is samples [start + j·G, start + (j + 1)·G), in the canonical order (g mod S, g), of
    which this rank takes a contiguous slice. Nothing else enters: not the world size, which only
    says where the slices lie, nor workers, prefetch or machine.

    Args:
        n: Samples in the epoch, N.
        start: Counter at which stepping begins.
        global_batch: Samples in a step over all ranks, G.
        num_splits: Lanes of the order, S.
        topology: This rank and how many share a step.
        remainder: What happens to the last, short step.
        worker: This worker and how many take turns at the steps.
        epoch: Its number.
    """

    n: int
    start: int
    global_batch: int
    num_splits: int
    topology: Topology = ALONE
    remainder: Remainder = "drop"
    worker: Worker = ONLY_WORKER
    epoch: int = 0

    @cached_property
    def total(self) -> int:
        """Steps left in the epoch, over all workers."""
        rest = max(0, self.n - self.start)
        if self.remainder == "drop":
            return rest // self.global_batch
        return -(-rest // self.global_batch)

    def __len__(self) -> int:
        return len(range(self.worker.id, self.total, self.worker.count))

    def at_most(self, n: int) -> int:
        """How many shares there are, or n if there are more."""
        return min(n, len(self))

    @property
    def largest(self) -> int:
        """The most samples of a share; a short step can give one rank more than a whole one."""
        return -(-self.global_batch // self.topology.size)

    @property
    def rows_left(self) -> int:
        """The number of samples in all shares; the last may have fewer."""
        return len(self) * self.largest

    @property
    def pad_from(self) -> int | None:
        """Samples from here on are repeats; None where there are none."""
        return self.n if self.remainder == "pad" else None

    def step(self, index: int) -> int:
        """The step of this worker's index-th share."""
        return self.worker.id + index * self.worker.count

    def counter(self, index: int) -> int:
        """The counter after ``index`` shares; workers count whole rounds of all of them."""
        return min(self.n, self.start + index * self.worker.count * self.global_batch)

    def samples(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The sample indices of this worker's shares ``[first, last)`` and where each begins.

        With ``remainder="pad"`` an index from N on stands for sample ``index mod N``.
        """
        parts = [self.share(self.step(index)) for index in range(first, last)]
        bounds = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=bounds[1:])
        return (np.concatenate(parts) if parts else np.empty(0, np.int64)), bounds

    def size(self, index: int) -> int:
        """The number of samples in a share."""
        lo, hi = self._bounds(self._step_size(self.step(index)))
        return hi - lo

    def share(self, step: int) -> Ints:
        """This rank's samples of one step, in canonical order."""
        begin = self.start + step * self.global_batch
        return begin + self._pattern(begin % self.num_splits, self._step_size(step))

    def _step_size(self, step: int) -> int:
        if self.remainder == "keep":
            return min(self.global_batch, self.n - self.start - step * self.global_batch)
        return self.global_batch

    def _bounds(self, size: int) -> tuple[int, int]:
        """Which places of a step of so many samples are this rank's."""
        return share_bounds(size, self.topology.rank, self.topology.size)

    def _pattern(self, phase: int, size: int) -> Ints:
        found = self._patterns.get((phase, size))
        if found is None:
            relative = np.arange(size)
            lanes = (relative + phase) % self.num_splits
            lo, hi = self._bounds(size)
            found = np.argsort(lanes, kind="stable")[lo:hi]
            if len(self._patterns) >= 64:
                self._patterns.clear()
            self._patterns[phase, size] = found
        return found

    @cached_property
    def _patterns(self) -> dict[tuple[int, int], Ints]:
        return {}

    def at(self, epoch: int, start: int) -> Steps:
        """The steps of an epoch from a counter on."""
        return replace(self, epoch=epoch, start=start)

    def check(self, *, uneven: bool) -> None:
        """Raise if a step cannot be shared, or a whole epoch has none.

        Args:
            uneven: Whether shares may differ by one.

        Raises:
            ArgumentError: If a step cannot be shared, naming the world sizes that work.
            EmptyError: If a whole epoch has no step, naming the rows and the batch.
        """
        check_batch(self.global_batch, self.topology.size, uneven=uneven)
        if self.remainder == "drop" and self.n < self.global_batch:
            raise EmptyError(
                f"{self.n} rows are fewer than one step of {self.global_batch} takes, so an epoch "
                "would have no steps; lower the batch size or pass remainder='keep' or 'pad'"
            )


@dataclass(frozen=True)
class Cycles:
    """Row mode: whole cycles over the splits of one rank or worker.

    A cycle takes one sample of every split. Each rank owns a contiguous block of splits, each
    worker a contiguous part of it. Rows beyond the last whole cycle are left out.

    Args:
        n: Samples in the epoch, N.
        start: Counter at which reading begins; a part of a cycle is read again.
        num_splits: Splits, S: a multiple of ranks times workers.
        topology: This rank and how many there are.
        worker: This worker and how many the rank has.
        rows: About how many rows a share should have.
        epoch: Its number.
    """

    n: int
    start: int
    num_splits: int
    topology: Topology = ALONE
    worker: Worker = ONLY_WORKER
    rows: int = 64
    epoch: int = 0

    def __post_init__(self) -> None:
        shares = self.topology.size * self.worker.count
        if self.num_splits % shares:
            what = f"world_size ({self.topology.size})"
            if self.worker.count > 1:
                what += f" times num_workers ({self.worker.count})"
            works = -(-self.num_splits // shares) * shares
            raise ArgumentError(
                f"num_splits ({self.num_splits}) must be divisible by {what}; pass for example "
                f"num_splits={works}"
            )
        if self.num_splits > self.n:
            raise EmptyError(
                f"{self.n} rows are too few for num_splits {self.num_splits}: there must be at "
                "least 1 row per split; pass a smaller num_splits"
            )

    def at(self, epoch: int, start: int, rows: int) -> Cycles:
        """The cycles of an epoch from a counter on, in shares of about so many rows."""
        return replace(self, epoch=epoch, start=start, rows=rows)

    @property
    def owned(self) -> int:
        """Splits of this worker: the rows of one cycle."""
        return self.num_splits // (self.topology.size * self.worker.count)

    @property
    def _first_cycle(self) -> int:
        return self.start // self.num_splits

    @property
    def cycles(self) -> int:
        """Cycles left in the epoch."""
        return max(0, self.n // self.num_splits - self._first_cycle)

    @property
    def rows_left(self) -> int:
        """The number of rows in all shares."""
        return self.cycles * self.owned

    @property
    def pad_from(self) -> None:
        """None: nothing is repeated."""
        return

    @property
    def _per_share(self) -> int:
        return max(1, self.rows // self.owned)

    def at_most(self, n: int) -> int:
        """How many shares there are, or n if there are more."""
        return min(n, len(self))

    @property
    def largest(self) -> int:
        """The number of rows in the largest share."""
        return self._per_share * self.owned

    def __len__(self) -> int:
        return (self.cycles + self._per_share - 1) // self._per_share

    def counter(self, index: int) -> int:
        """The counter after ``index`` shares."""
        done = min(index * self._per_share, self.cycles)
        return (self._first_cycle + done) * self.num_splits

    def size(self, index: int) -> int:
        """The number of samples in a share."""
        done = index * self._per_share
        return (min(done + self._per_share, self.cycles) - done) * self.owned

    def samples(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The sample indices of shares ``[first, last)``, cycle by cycle, and where each begins."""
        first_split = (self.topology.rank * self.worker.count + self.worker.id) * self.owned
        a = min(first * self._per_share, self.cycles)
        b = min(last * self._per_share, self.cycles)
        cycles = self._first_cycle + np.arange(a, b)
        lanes = first_split + np.arange(self.owned)
        bounds = np.arange(first, last + 1) * self._per_share
        bounds = (np.minimum(bounds, self.cycles) - a) * self.owned
        return (cycles[:, None] * self.num_splits + lanes).ravel(), bounds
