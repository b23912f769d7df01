"""From a stream's order to that with its buckets; those of successive epochs are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from destrier.bucketing.buckets import (
    DEFAULT_WINDOW,
    AnyBuckets,
    Batch,
    Buckets,
    BudgetBuckets,
    TokenBudget,
)
from destrier.bucketing.budget import BudgetOrder
from destrier.bucketing.order import BucketedOrder, WindowedOrder, keep
from destrier.errors import ArgumentError
from destrier.order import Order
from destrier.packing.lengths import Lengths
from destrier.selection import RowList

__all__ = ["Bucketing", "choose_buckets"]

_KEPT = 3  # epochs: of the consumer, of the one that reads ahead, of who asks for a length


class Bucketing:
    """How batches of like length are formed, and of which lengths.

    Args:
        buckets: How.
        lengths: Of the rows, by position.
    """

    def __init__(self, buckets: AnyBuckets, lengths: Lengths) -> None:
        self.buckets = buckets
        self.lengths = lengths
        self._kept: OrderedDict[int, WindowedOrder] = OrderedDict()
        self._lock = threading.Lock()

    def order(self, order: Order) -> WindowedOrder:
        """The order of an epoch with its batches: the same object while it is in use."""
        number = order.epoch if order.shuffle else 0
        with self._lock:
            found = self._kept.get(number)
            if found is None:
                if isinstance(self.buckets, BudgetBuckets):
                    found = BudgetOrder(order, self.lengths, self.buckets)
                else:
                    found = BucketedOrder(order, self.lengths, self.buckets)
            keep(self._kept, number, found, _KEPT)
        return found

    def budget_order(self, order: Order) -> BudgetOrder:
        """The order of an epoch with batches within a budget."""
        found = self.order(order)
        assert isinstance(found, BudgetOrder)
        return found


def choose_buckets(
    by: str, window: int | None, batch: Batch, rows: RowList, lengths: Lengths
) -> AnyBuckets:
    """Choose what was left open.

    Args:
        by: The column of lists.
        window: Batches that are sorted together; None is 64.
        batch: Samples of a batch, or its budget.
        rows: The rows.
        lengths: Of them.

    Raises:
        ArgumentError: If a row is too long for the budget; names its length.
    """
    window = window or DEFAULT_WINDOW
    if not isinstance(batch, TokenBudget):
        return Buckets(by, window, batch)
    unit = batch.unit
    longest = int(np.argmax(lengths.values))
    tokens = int(lengths.at(np.array([longest]))[0])
    if tokens * unit > batch.tokens:
        row = int(rows.offsets(np.array([longest]))[0])
        raise ArgumentError(
            f"row {row} has {tokens} in {by!r}, and a step of {unit} (batch_multiple) such rows "
            f"has {tokens * unit} tokens, more than global_batch_tokens={batch.tokens}; raise it, "
            "lower batch_multiple, or leave such rows out by a filter"
        )
    wanted = window * batch.tokens * lengths.count // lengths.tokens
    samples = max(1, wanted // unit) * unit
    return BudgetBuckets(by, window, batch.tokens, unit, samples)
