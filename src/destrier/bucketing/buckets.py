"""What a step is: so many samples, or as many as a budget of tokens allows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from destrier.errors import ArgumentError, StateError

__all__ = [
    "DEFAULT_WINDOW",
    "AnyBuckets",
    "Batch",
    "Buckets",
    "BudgetBuckets",
    "TokenBudget",
    "check_batch_of",
    "parse_buckets",
    "samples_of",
]

DEFAULT_WINDOW = 64  # batches


@dataclass(frozen=True)
class TokenBudget:
    """A step of as many samples as a budget of tokens allows, as it was asked for.

    Attributes:
        tokens: The most that a step has over all ranks, padded to its longest sample.
        multiple: What its number of samples is a multiple of; None is ``ranks``.
        ranks: World size of this run.
    """

    tokens: int
    multiple: int | None
    ranks: int

    @property
    def unit(self) -> int:
        """What the number of samples is a multiple of, where no state says it."""
        return self.multiple or self.ranks


Batch: TypeAlias = int | TokenBudget
"""What a step is: so many samples over all ranks, or a budget."""


@dataclass(frozen=True)
class Buckets:
    """How batches of like length, each of as many samples, are formed.

    Attributes:
        by: The column of lists.
        window: Batches whose samples are sorted together.
        batch: Samples of a batch, over all ranks.
    """

    by: str
    window: int
    batch: int

    @property
    def text(self) -> str:
        """As it stands in states."""
        return json.dumps([self.by, self.window, self.batch], separators=(",", ":"))


@dataclass(frozen=True)
class BudgetBuckets:
    """How batches of like length within a budget of tokens are formed.

    Attributes:
        by: The column of lists.
        window: Batches whose samples are sorted together, about.
        tokens: The most that a batch has over all ranks, padded to its longest sample.
        multiple: What its number of samples is a multiple of.
        samples: That are sorted together.
    """

    by: str
    window: int
    tokens: int
    multiple: int
    samples: int

    @property
    def text(self) -> str:
        """As it stands in states."""
        parts = [self.by, self.window, self.tokens, self.multiple, self.samples]
        return json.dumps(parts, separators=(",", ":"))

    @property
    def usual(self) -> int:
        """Samples of a batch, about."""
        return max(self.multiple, self.samples // self.window)


AnyBuckets: TypeAlias = Buckets | BudgetBuckets


def parse_buckets(text: object) -> AnyBuckets:
    """Return what stands in a state.

    Raises:
        StateError: If it is none.
    """
    try:
        by, *numbers = json.loads(str(text))
        if isinstance(by, str) and all(type(n) is int and n >= 1 for n in numbers):
            if len(numbers) == 2:
                return Buckets(by, *numbers)
            found = BudgetBuckets(by, *numbers)
            if found.samples % found.multiple == 0:
                return found
    except (TypeError, ValueError):
        pass
    raise StateError(f"buckets of the state are damaged: {text!r}")


def samples_of(batch: Batch | None) -> int | None:
    """The samples of a step of several sources, where it is known.

    Raises:
        ArgumentError: If it has a budget.
    """
    if isinstance(batch, TokenBudget):
        raise ArgumentError(
            f"global_batch_tokens={batch.tokens} cannot be given for a mixture or zip, whose "
            "batches are of several sources: pass batch_size or global_batch_size"
        )
    return batch


def check_batch_of(buckets: AnyBuckets | None, batch: Batch | None) -> None:
    """Raise unless a stream with these buckets can have steps like that.

    Raises:
        ArgumentError: If there are no buckets for a budget.
        StateError: If the buckets are those of a state with another budget, or none.
    """
    if batch is None or (isinstance(batch, int) and not isinstance(buckets, BudgetBuckets)):
        return
    if buckets is None:
        assert isinstance(batch, TokenBudget)
        raise ArgumentError(
            f"global_batch_tokens={batch.tokens} needs bucket_by, the column whose lengths count"
        )
    given = f"batches of {batch} samples"
    if isinstance(batch, TokenBudget):
        given = f"global_batch_tokens={batch.tokens}"
    if isinstance(buckets, Buckets):
        stored = f"batches of {buckets.batch} samples"
    else:
        stored = f"global_batch_tokens={buckets.tokens}"
    if given == stored and isinstance(batch, TokenBudget) and isinstance(buckets, BudgetBuckets):
        if batch.multiple in (None, buckets.multiple):
            return
        given = f"batch_multiple={batch.multiple}"
        stored = f"batch_multiple={buckets.multiple}"
    raise StateError(
        f"batches mismatch: the state has {stored}, this stream was made with {given}; make it as "
        "it was, or start the next epoch instead of loading"
    )
