"""Concatenate and cut: all documents are one line of tokens, and blocks are cut from it.

T tokens in all, blocks of B of which the last ``overlap`` are the first of the next block: block b
is tokens ``[o + b·(B - overlap), + B)`` of the line, and there are
``(T - overlap) // (B - overlap)``. Without overlap the line is a circle and o is drawn for each
epoch, so that cuts move and the tail that no block reaches is another each time.
"""

from __future__ import annotations

import itertools

import numpy as np

from destrier.errors import EmptyError
from destrier.keyed import PACKING_KEY, Ints, epoch_key, subkey
from destrier.packing.lengthfile import GROUP
from destrier.packing.lengths import Lengths
from destrier.packing.pieces import BlockRows, Pieces, no_pieces

__all__ = ["Concatenated"]


class Concatenated:
    """The blocks of one line of tokens.

    Args:
        lengths: Of the documents.
        block_size: Tokens of a block, B.
        overlap: Tokens that a block shares with the next, below B.

    Raises:
        EmptyError: If there are fewer tokens than one block takes.
    """

    def __init__(self, lengths: Lengths, block_size: int, overlap: int = 0) -> None:
        if lengths.tokens < block_size:
            raise EmptyError(
                f"block_size is {block_size}, but all documents together have {lengths.tokens} "
                "tokens, which fill no block"
            )
        self.lengths = lengths
        self.block_size = block_size
        self.overlap = overlap
        self.stride = block_size - overlap
        self.count = (lengths.tokens - overlap) // self.stride
        self.moves = overlap == 0

    @property
    def digest(self) -> str:
        """Of the lengths and the cut."""
        return f"concatenate|{self.block_size}|{self.overlap}|{self.lengths.digest}"

    @property
    def tokens(self) -> int:
        """All blocks are full."""
        return self.count * self.block_size

    @property
    def unreached(self) -> int:
        """The tail, which is shorter than a stride."""
        return self.lengths.tokens - (self.count * self.stride + self.overlap)

    def rows(self, seed: int, epoch: int, *, shuffle: bool) -> BlockRows:
        """From position to the first token of a block.

        Args:
            seed: Of the order.
            epoch: Its epoch.
            shuffle: Whether the cut moves from epoch to epoch, where it can.
        """
        circle, first = self.lengths.tokens, 0
        if shuffle and self.moves:
            first = (subkey(epoch_key(seed, epoch), PACKING_KEY) * circle) >> 64
        return BlockRows(self.count, self.digest, stride=self.stride, first=first, circle=circle)

    def pieces(self, addresses: Ints, ahead: int = 0) -> Pieces:
        """What is in the blocks that begin at some tokens.

        Args:
            addresses: The first token of each block.
            ahead: How many tokens after each block are wanted too, if there are as many.
        """
        if not len(addresses):
            return no_pieces()
        before = self.lengths.before
        block, start, stop, shift = self._segments(addresses, self.block_size + ahead)
        low = np.searchsorted(before, start, side="right") - 1
        high = np.searchsorted(before, stop - 1, side="right") - 1
        # Segments whose groups of documents touch are looked up together.
        reach = np.maximum.accumulate(high)
        cuts = np.flatnonzero(low[1:] > reach[:-1] + 1) + 1
        edges = [0, *cuts.tolist(), len(block)]
        found = []
        for i, j in itertools.pairwise(edges):
            first, last = int(low[i]), int(reach[j - 1]) + 1
            part = self._in_groups(first, last, start[i:j], stop[i:j])
            segment, document, begin, length, at = part
            segment = segment + i
            found.append((block[segment], document, begin, length, at + shift[segment]))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.lexsort((columns[4], columns[0]))
        return Pieces(*(column[order] for column in columns))

    def _segments(self, addresses: Ints, width: int) -> tuple[Ints, Ints, Ints, Ints]:
        """The runs of the line that blocks consist of: block, start, stop, and place in it."""
        total = self.lengths.tokens
        block = np.arange(len(addresses))
        stop = addresses + width
        over = np.flatnonzero(stop > total) if self.moves else np.empty(0, np.int64)
        shift = np.zeros(len(addresses), np.int64)
        start = addresses
        if len(over):
            block = np.concatenate([block, over])
            start = np.concatenate([start, np.zeros_like(over)])
            shift = np.concatenate([shift, total - addresses[over]])
            stop = np.concatenate([stop, stop[over] - total])
        stop = np.minimum(stop, total)
        order = np.argsort(start, kind="stable")
        return block[order], start[order], stop[order], shift[order]

    def _in_groups(
        self, first: int, last: int, start: Ints, stop: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The pieces of runs that lie in some groups: run, document, begin, length, at."""
        ends = self.lengths.before[first] + np.cumsum(self.lengths.groups(first, last))
        starts = np.concatenate([self.lengths.before[first : first + 1], ends[:-1]])
        one = np.searchsorted(ends, start, side="right")
        other = np.searchsorted(ends, stop - 1, side="right")
        counts = other - one + 1
        run = np.repeat(np.arange(len(start)), counts)
        document = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts - one, counts)
        begin = np.maximum(starts[document], start[run])
        length = np.minimum(ends[document], stop[run]) - begin
        some = length > 0
        run, document, begin, length = (a[some] for a in (run, document, begin, length))
        at = begin - start[run]
        return run, document + first * GROUP, begin - starts[document], length, at
