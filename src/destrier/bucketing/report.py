"""What batches of rows of like length are, for people and scripts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from destrier.bucketing.bucketing import Bucketing
from destrier.bucketing.buckets import BudgetBuckets
from destrier.bucketing.budget import BudgetOrder
from destrier.bucketing.order import WindowedOrder
from destrier.keyed import Ints

__all__ = ["BucketReport", "report_buckets"]

_LOOKED_AT = 1 << 20  # samples


@dataclass(frozen=True)
class BucketReport:
    """Batches of rows of like length.

    Attributes:
        by: The column of lists.
        window: Batches whose rows are sorted together, about.
        tokens: The most that a batch has over all ranks with pads; None where its size is fixed.
        multiple: With a budget, what the number of rows is a multiple of.
        rows_a_step: On average, over all ranks.
        waste: The share of pads, if each batch is padded to its longest row; in the first million
            rows of the epoch.
    """

    by: str
    window: int
    tokens: int | None
    multiple: int | None
    rows_a_step: float
    waste: float


def report_buckets(
    bucketing: Bucketing, order: WindowedOrder, *, rows_a_step: float
) -> BucketReport:
    """Describe the batches of an epoch.

    Args:
        bucketing: How they are formed.
        order: The order of the epoch.
        rows_a_step: On average, over all ranks.
    """
    buckets = bucketing.buckets
    budget = buckets if isinstance(buckets, BudgetBuckets) else None
    borders = _borders(order, rows_a_step)
    lengths = bucketing.lengths.at(order.rows(np.arange(borders[-1])))
    longest = np.maximum.reduceat(lengths, borders[:-1])
    padded = int((longest * np.diff(borders)).sum())
    return BucketReport(
        by=buckets.by,
        window=buckets.window,
        tokens=None if budget is None else budget.tokens,
        multiple=None if budget is None else budget.multiple,
        rows_a_step=rows_a_step,
        waste=1 - int(lengths.sum()) / max(1, padded),
    )


def _borders(order: WindowedOrder, rows_a_step: float) -> Ints:
    """Where the first batches of an epoch begin, and where the last one of them ends."""
    if not isinstance(order, BudgetOrder):
        step = int(rows_a_step)
        return np.arange(0, max(step, min(order.n // step * step, _LOOKED_AT)) + 1, step)
    found = [np.zeros(1, np.int64)]
    for window in range(order.windows):
        found.append(order.borders(window)[1:])
        if found[-1][-1] >= _LOOKED_AT:
            break
    return np.concatenate(found)
