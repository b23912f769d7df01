"""Rows that are read together, and what reading needs to know of an order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from destrier.keyed import Ints

__all__ = ["BLOCK_ROWS", "Block", "Line", "runs_of"]

BLOCK_ROWS = 1 << 18
"""Rows that are planned together at most."""


@dataclass
class Block:
    """Some shares that are planned and read together.

    Attributes:
        offsets: Row offsets to read.
        targets: Where in the pool each goes, or None: the block is held by itself.
        freed: Pool rows ``[start, stop)`` that no later sample needs.
        capacity: Pool rows there must be.
        first: Index of the first share.
        samples: The sample indices of all shares, one after another.
        bounds: Where each share begins in ``samples``; one more than there are shares.
        places: For each sample where it lies: in the pool, or in ``offsets``.
        complete: Whether all rows are in the pool with it.
    """

    offsets: Ints
    targets: Ints | None
    freed: list[tuple[int, int]]
    capacity: int
    first: int
    samples: Ints
    bounds: Ints
    places: Ints
    complete: bool = False


class Line(Protocol):
    """What reading needs to know of an order of positions."""

    @property
    def n(self) -> int:
        """How many positions there are."""
        ...

    @property
    def num_splits(self) -> int:
        """Lanes, S."""
        ...

    @property
    def windowed(self) -> bool:
        """Whether positions are permuted inside windows of clumps."""
        ...

    @property
    def window_rows(self) -> int:
        """Positions in a whole window."""
        ...

    def rows(self, g: Ints) -> Ints:
        """The position of each sample."""
        ...

    def locate(self, g: Ints) -> tuple[Ints, Ints, Ints]:
        """The window that each sample is in, and its place there."""
        ...

    def window_reads(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
        """What whole windows consist of."""
        ...

    def cycles(self, g: Ints) -> Ints:
        """How often each sample's lane was served before it."""
        ...


def runs_of(bounds: Ints, each: int) -> Iterator[tuple[int, slice, Ints]]:
    """Every so many shares: the first, which samples theirs are, and where each begins in those."""
    for first in range(0, len(bounds) - 1, each):
        own = bounds[first : first + each + 1]
        yield first, slice(int(own[0]), int(own[-1])), own - own[0]
