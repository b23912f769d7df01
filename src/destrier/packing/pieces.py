"""What both ways of packing share: pieces of documents in blocks, and block rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from destrier.keyed import Ints
from destrier.packing.lengths import Lengths

__all__ = ["BlockRows", "Blocks", "Pieces", "no_pieces"]


@dataclass(frozen=True)
class Pieces:
    """Runs of tokens of one document in one block, by block and place.

    Attributes:
        block: Which of the blocks that were asked for.
        document: Its place in the selection.
        begin: Its first token in the document.
        length: Tokens, at least 1.
        at: Its first token in the block.
    """

    block: Ints
    document: Ints
    begin: Ints
    length: Ints
    at: Ints

    def __len__(self) -> int:
        return len(self.block)


def no_pieces() -> Pieces:
    """No pieces at all."""
    return Pieces(*(np.empty(0, np.int64) for _ in range(5)))


class Blocks(Protocol):
    """The blocks of some documents.

    A block has an address, which says what is in it: its first token where blocks are cut from
    one line of tokens, else its number.
    """

    lengths: Lengths
    count: int
    moves: bool
    """Whether each epoch cuts other blocks."""

    @property
    def digest(self) -> str:
        """Of all that decides what is in the blocks."""
        ...

    @property
    def tokens(self) -> int:
        """How many tokens of documents an epoch delivers; one that comes twice counts twice."""
        ...

    @property
    def unreached(self) -> int:
        """How many tokens an epoch leaves out."""
        ...

    def rows(self, seed: int, epoch: int, *, shuffle: bool) -> BlockRows:
        """From position to address in an epoch."""
        ...

    def pieces(self, addresses: Ints, ahead: int = 0) -> Pieces:
        """What is in some blocks, and ``ahead`` tokens after each where there is one line."""
        ...


class BlockRows:
    """The addresses of all blocks: every ``stride`` tokens or numbers, on a circle.

    Args:
        count: Blocks.
        digest: Of what is in them.
        stride: From one address to the next.
        first: The address of block 0.
        circle: How many addresses there are.
    """

    def __init__(
        self, count: int, digest: str, *, stride: int = 1, first: int = 0, circle: int | None = None
    ) -> None:
        self.count = count
        self.stride = stride
        self.first = first
        self.circle = count * stride if circle is None else circle
        self._digest = digest

    def __len__(self) -> int:
        return self.count

    def offsets(self, positions: Ints) -> Ints:
        """The addresses of the blocks at some positions."""
        return (self.first + positions * self.stride) % self.circle

    @property
    def digest(self) -> str:
        """Of what is in the blocks, and where they begin."""
        text = f"blocks|{self.count}|{self.stride}|{self.first}|{self._digest}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
