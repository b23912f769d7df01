"""Who reads what, where steps stay within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from destrier.bucketing.budget import BudgetOrder
from destrier.errors import EmptyError
from destrier.keyed import Ints
from destrier.plan import Remainder, check_batch, share_bounds
from destrier.topology import Topology, Worker

__all__ = ["BudgetEpochs", "BudgetSteps"]


class BudgetSteps:
    """The steps of an epoch from a counter on; they are counted as far as somebody asks.

    Where a step begins follows from the lengths of its window alone. Its samples are in canonical
    order, and this rank takes a contiguous slice of them, as of steps of equal size.

    Args:
        order: The order of the epoch.
        start: Counter at which stepping begins.
        topology: This rank and how many share a step.
        remainder: What happens to the samples that fill no multiple.
        worker: This worker and how many take turns at the steps.

    Raises:
        StateError: If no step begins at the counter, naming the nearest ones.
    """

    def __init__(
        self,
        order: BudgetOrder,
        start: int,
        topology: Topology,
        remainder: Remainder,
        worker: Worker,
    ) -> None:
        self._order = order
        self._start = start
        self._topology = topology
        self._remainder: Remainder = remainder
        self._worker = worker
        self._window, self._skipped = order.find(start)
        # Steps up to the end of each window from the first one on, those before the start too.
        self._ends: Ints = np.empty(0, np.int64)

    # ---- how many -------------------------------------------------------------------------------

    def _counted(self, steps: int | None = None) -> int:
        """How many steps there are, or so many, if there are more."""
        windows, at_once = self._order.windows, self._order.at_once
        while steps is None or self._in_windows < steps:
            first = self._window + len(self._ends)
            if first >= windows:
                rest = self._start <= self._order.whole < self._order.n
                found = self._in_windows + (rest and self._remainder != "drop")
                return found if steps is None else min(found, steps)
            counts = self._order.counts(first, windows if steps is None else first + at_once)
            before = self._ends[-1] if len(self._ends) else 0
            self._ends = np.concatenate([self._ends, before + np.cumsum(counts)])
        return steps

    @property
    def _in_windows(self) -> int:
        """Steps that are known to be left, without the last one of all."""
        return int(self._ends[-1]) - self._skipped if len(self._ends) else 0

    def __len__(self) -> int:
        return len(range(self._worker.id, self._counted(), self._worker.count))

    def at_most(self, n: int) -> int:
        """How many shares there are, or n if there are more: those beyond are not counted."""
        id, count = self._worker.id, self._worker.count
        return len(range(id, self._counted(id + (n - 1) * count + 1), count))

    @property
    def largest(self) -> int:
        """The samples of a usual share."""
        return -(-self._order.buckets.usual // self._topology.size)

    @property
    def rows_left(self) -> int:
        """The number of samples in all shares, about."""
        rest = self._order.n - self._start
        return -(-rest // (self._topology.size * self._worker.count))

    @property
    def pad_from(self) -> int | None:
        """Samples from here on are repeats; None where there are none."""
        return self._order.n if self._remainder == "pad" else None

    # ---- which ----------------------------------------------------------------------------------

    def _step(self, number: int) -> tuple[int, int]:
        """Where a step that there is begins and ends."""
        self._counted(number + 1)
        order = self._order
        if number >= self._in_windows:
            multiple = order.buckets.multiple
            return order.whole, order.whole + multiple if self._remainder == "pad" else order.n
        number += self._skipped
        window = int(np.searchsorted(self._ends, number, side="right"))
        place = number - (int(self._ends[window - 1]) if window else 0)
        borders = order.borders(self._window + window)
        return int(borders[place]), int(borders[place + 1])

    def _bounds(self, index: int) -> tuple[int, int]:
        begin, end = self._step(self._worker.id + index * self._worker.count)
        lo, hi = share_bounds(end - begin, self._topology.rank, self._topology.size)
        return begin + lo, begin + hi

    def counter(self, index: int) -> int:
        """The counter after ``index`` shares; workers count whole rounds of all of them."""
        number = index * self._worker.count
        if not number:
            return self._start
        number = self._counted(number)
        return min(self._order.n, self._step(number - 1)[1]) if number else self._start

    def size(self, index: int) -> int:
        """The number of samples in a share."""
        lo, hi = self._bounds(index)
        return hi - lo

    def share(self, index: int) -> Ints:
        """The sample indices of a share."""
        return np.arange(*self._bounds(index))

    def samples(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The sample indices of this worker's shares ``[first, last)`` and where each begins.

        With ``remainder="pad"`` an index from N on stands for sample ``index mod N``.
        """
        parts = [self.share(index) for index in range(first, last)]
        bounds = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=bounds[1:])
        return (np.concatenate(parts) if parts else np.empty(0, np.int64)), bounds


class BudgetEpochs:
    """The steps of any epoch.

    Args:
        order: From an epoch to its order.
        topology: This rank and how many share a step.
        remainder: What happens to the samples that fill no multiple.
        worker: This worker and how many take turns at the steps.
    """

    def __init__(
        self,
        order: Callable[[int], BudgetOrder],
        topology: Topology,
        remainder: Remainder,
        worker: Worker,
    ) -> None:
        self._order = order
        self._topology = topology
        self._remainder: Remainder = remainder
        self._worker = worker

    def at(self, epoch: int, start: int) -> BudgetSteps:
        """The steps of an epoch from a counter on.

        Raises:
            StateError: If no step begins at the counter, naming the nearest ones.
        """
        return BudgetSteps(self._order(epoch), start, self._topology, self._remainder, self._worker)

    def check(self, *, uneven: bool) -> None:
        """Raise if a step cannot be shared, or a whole epoch has none.

        Args:
            uneven: Whether shares may differ by one.

        Raises:
            ArgumentError: If a step cannot be shared, naming the world sizes that work.
            EmptyError: If a whole epoch has no step, naming the rows and the multiple.
        """
        order = self._order(0)
        multiple = order.buckets.multiple
        check_batch(multiple, self._topology.size, uneven=uneven, name="batch_multiple")
        if self._remainder == "drop" and not order.whole:
            raise EmptyError(
                f"{order.n} rows are fewer than batch_multiple {multiple}, so an epoch would have "
                "no steps; lower it or pass remainder='keep' or 'pad'"
            )
