"""How large batches are, as it was given: to a dataset or to a loader."""

from __future__ import annotations

from dataclasses import dataclass

from destrier.bucketing.buckets import Batch, TokenBudget
from destrier.check import MOST_SIZE, integer
from destrier.errors import ArgumentError
from destrier.plan import REMAINDERS, Remainder

__all__ = ["BatchSizes", "check_sizes"]


@dataclass(frozen=True)
class BatchSizes:
    """How large batches are; at most one of the first three is given.

    Attributes:
        batch_size: Samples of a batch of one rank.
        global_batch_size: Samples of a step over all ranks.
        global_batch_tokens: Tokens of a step over all ranks at most, padded to its longest sample.
        batch_multiple: With such a budget, what the number of samples is a multiple of.
    """

    batch_size: int | None = None
    global_batch_size: int | None = None
    global_batch_tokens: int | None = None
    batch_multiple: int | None = None

    @property
    def given(self) -> bool:
        """Whether batches are made."""
        sizes = (self.batch_size, self.global_batch_size, self.global_batch_tokens)
        return any(size is not None for size in sizes)

    def step(self, ranks: int) -> Batch | None:
        """What a step is, for so many ranks; None where no batches are made."""
        if self.global_batch_tokens is not None:
            return TokenBudget(self.global_batch_tokens, self.batch_multiple, ranks)
        if self.batch_size is not None:
            return self.batch_size * ranks
        return self.global_batch_size


def check_sizes(
    batch_size: int | None,
    global_batch_size: int | None,
    global_batch_tokens: int | None,
    batch_multiple: int | None,
    remainder: Remainder,
) -> BatchSizes:
    """Return the sizes as Python's integers, if at most one is given and all can be used.

    Raises:
        ArgumentError: If two are given, one is no size, or the remainder is unknown.
    """
    given = {
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "global_batch_tokens": global_batch_tokens,
        "batch_multiple": batch_multiple,
    }
    sizes = {
        name: integer(name, value, 1, MOST_SIZE)
        for name, value in given.items()
        if value is not None
    }
    meanings = {
        "batch_size": "of one rank",
        "global_batch_size": "of all",
        "global_batch_tokens": "a budget of all",
    }
    both = [f"{name}={sizes[name]} ({what})" for name, what in meanings.items() if name in sizes]
    if len(both) > 1:
        raise ArgumentError(f"{' and '.join(both)} are both given; pass one of them")
    if "batch_multiple" in sizes and "global_batch_tokens" not in sizes:
        raise ArgumentError(
            f"batch_multiple={sizes['batch_multiple']} has no meaning without "
            "global_batch_tokens: other batches have a fixed number of samples"
        )
    if remainder not in REMAINDERS:
        raise ArgumentError(f"remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}")
    return BatchSizes(**sizes)
