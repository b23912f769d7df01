"""Best fit: whole documents in blocks, window by window, in a number of blocks known beforehand.

A window is some consecutive selected documents with T tokens; they are packed into exactly ⌈T/B⌉
blocks of B tokens, so that the number of any block follows from sums of lengths, without packing
anything:

1. Of each document, as many whole blocks as it fills are cut from its front.
2. What is left of the documents is taken from long to short, of equals the earlier document first.
   Each goes to the block with the least space that suffices, of equals the lowest number.
3. What fits nowhere is taken in the same order: as long as it fits no space, it fills the largest
   one, of equals the lowest number; then it goes where it fits best.
4. In a block, pieces lie in the order of their documents; blocks are numbered by their first piece.

Best fit of decreasing sizes is by Johnson (Near-optimal bin packing algorithms, MIT 1973).
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from destrier.keyed import Ints
from destrier.packing.lengths import Lengths
from destrier.packing.pieces import BlockRows, Pieces, no_pieces

__all__ = ["BestFit", "Window", "pack_window"]

_KEPT_BYTES = 48 << 20
_BITS = 32  # of a place, below a value in one integer


@dataclass(frozen=True)
class Window:
    """The blocks of a window.

    Attributes:
        bounds: Where each block begins in the others; one more than there are blocks.
        document: Of each piece, its document in the window.
        begin: Its first token there.
        length: Its tokens.
        at: Its first token in the block.
    """

    bounds: NDArray[Any]
    document: NDArray[Any]
    begin: NDArray[Any]
    length: NDArray[Any]
    at: NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.bounds, self.document, self.begin, self.length, self.at)
        return sum(part.nbytes for part in parts)


def pack_window(lengths: Ints, block_size: int) -> Window:
    """Pack documents into the fewest blocks that hold their tokens.

    Args:
        lengths: Tokens of each document, any number of them 0.
        block_size: Tokens of a block, B.

    Example:
        >>> window = pack_window(np.array([3, 6, 2, 4]), 5)
        >>> window.bounds.tolist(), window.document.tolist(), window.length.tolist()
        ([0, 2, 3, 5], [0, 2, 1, 1, 3], [3, 2, 5, 1, 4])
    """
    whole, rest = np.divmod(lengths, block_size)
    full = np.repeat(np.arange(len(lengths)), whole)
    nth = np.arange(len(full)) - np.repeat(np.cumsum(whole) - whole, whole)
    by_length = _stable_order(block_size - rest)[: np.count_nonzero(rest)]
    rest = rest[by_length]
    count = -(-int(lengths.sum()) // block_size)
    # No two pieces over half a block share one: while there are empty ones, each takes the next.
    over = min(int(np.searchsorted(-rest, -(block_size // 2))), count - len(full))
    bits = count.bit_length()
    spaces = np.arange(len(full), count) + (block_size << bits)
    spaces[:over] -= rest[:over] << bits
    spaces = np.sort(spaces[spaces >> bits > 0])
    number, piece, begin, size = _fit(over, rest, spaces, bits)
    document = by_length[piece]
    taken = np.arange(len(full) + over)
    return _numbered(
        np.concatenate([taken, number]),
        np.concatenate([full, by_length[:over], document]),
        np.concatenate([nth, whole[by_length[:over]], whole[document]]) * block_size
        + np.concatenate([np.zeros(len(taken), np.int64), begin]),
        np.concatenate([np.full(len(full), block_size), rest[:over], size]),
        count,
    )


def _fit(placed: int, lengths: Ints, empty: Ints, bits: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Place pieces, the longest first.

    Args:
        placed: How many of them are placed already.
        lengths: Of all pieces, descending.
        empty: Spaces with the numbers of their blocks, ascending.
        bits: Of a block's number, below its space in one integer: small ones are fast.

    Returns:
        For each piece, or part of one, that was placed: the number of its block, which piece it
        is of, its first token there, and its tokens.
    """
    least, mask = 1 << bits, (1 << bits) - 1
    needs = (lengths[placed:] << bits).tolist()
    # Needs fall. Spaces that suffice, descending, so that the last one fits best; and a heap of the
    # others, negated, of which the largest suffice next and are less than all that did before.
    spaces: list[int] = []
    waiting = (-empty[::-1]).tolist()
    chosen: list[int] = []  # spaces, each for the next piece that fits one
    left: list[int] = []
    for i, need in enumerate(needs, placed):
        while waiting and waiting[0] <= -need:
            spaces.append(-heappop(waiting))
        if not spaces:
            left.append(i)
            continue
        space = spaces.pop()
        chosen.append(space)
        space -= need
        if space >= need:
            spaces.append(space)
        elif space >= least:
            heappush(waiting, -space)
    piece = np.delete(np.arange(placed, len(lengths)), np.array(left, np.int64) - placed)
    number = np.array(chosen, np.int64) & mask
    begin, size = np.zeros(len(piece), np.int64), lengths[piece]
    if not left:
        return number, piece, begin, size
    rest = sorted([*spaces, *(-space for space in waiting)])
    more = _cut(left, lengths[left].tolist(), rest, bits)
    number, piece, begin, size = (
        np.concatenate(pair) for pair in zip((number, piece, begin, size), more, strict=True)
    )
    return number, piece, begin, size


def _cut(pieces: list[int], lengths: list[int], spaces: list[int], bits: int) -> Ints:
    """Place pieces that fit nowhere, as `_fit` returns them: in parts, the largest spaces first."""
    parts: list[tuple[int, int, int, int]] = []
    for piece, length in zip(pieces, lengths, strict=True):
        done = 0
        while done < length:
            at = bisect_left(spaces, (length - done) << bits)
            if at == len(spaces):
                at = bisect_left(spaces, spaces[-1] >> bits << bits)
            space = spaces.pop(at)
            taken = min(space >> bits, length - done)
            parts.append((space & ((1 << bits) - 1), piece, done, taken))
            done += taken
            space -= taken << bits
            if space >> bits:
                insort(spaces, space)
    placed: Ints = np.array(parts, np.int64).T
    return placed


def _stable_order(values: Ints) -> Ints:
    """The places of values below 2**31 in ascending order, of equals the first one first.

    Sorting words that carry their places is many times faster than sorting places.
    """
    order: Ints = np.sort((values << _BITS) | np.arange(len(values))) & ((1 << _BITS) - 1)
    return order


def _numbered(number: Ints, document: Ints, begin: Ints, size: Ints, count: int) -> Window:
    """Order pieces by document, and number blocks by their first piece."""
    order = _stable_order(document)  # the pieces of one come from its front to its end
    number = number[order]
    first = np.full(count, len(order))
    first[number[::-1]] = np.arange(len(order))[::-1]
    assert first.max(initial=-1) < len(order), "a block of no tokens"
    renumbered = np.empty(count, np.int64)
    renumbered[_stable_order(first)] = np.arange(count)
    block = renumbered[number]
    order = order[_stable_order(block)]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(block, minlength=count))])
    length = size[order]
    at = np.cumsum(length) - length
    at -= np.repeat(at[bounds[:-1]], np.diff(bounds))
    kind = np.int32 if int(begin.max(initial=0)) < 1 << 31 else np.int64
    parts = (bounds, document[order], begin[order], length, at)
    return Window(*(part.astype(kind) for part in parts))


class BestFit:
    """The blocks of documents that are packed window by window.

    Args:
        lengths: Of the documents.
        block_size: Tokens of a block, B.
        window: Documents of a window.
    """

    moves = False

    def __init__(self, lengths: Lengths, block_size: int, window: int) -> None:
        self.lengths = lengths
        self.block_size = block_size
        self.window = window
        self._tokens = lengths.window_tokens(window)
        blocks = -(-self._tokens // block_size)
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks)])
        self.count = int(self._before[-1])
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def digest(self) -> str:
        """Of the lengths and the sizes."""
        return f"best_fit|{self.block_size}|{self.window}|{self.lengths.digest}"

    @property
    def tokens(self) -> int:
        """Every token is in one block."""
        return self.lengths.tokens

    @property
    def unreached(self) -> int:
        """None."""
        return 0

    def rows(self, seed: int, epoch: int, *, shuffle: bool) -> BlockRows:  # noqa: ARG002
        """Blocks are numbered, in every epoch alike."""
        return BlockRows(self.count, self.digest)

    def pieces(self, addresses: Ints, ahead: int = 0) -> Pieces:  # noqa: ARG002
        """What is in the blocks of some numbers; nothing follows a block."""
        if not len(addresses):
            return no_pieces()
        window = np.searchsorted(self._before, addresses, side="right") - 1
        found = []
        for number in np.unique(window).tolist():
            packed = self._packed(number)
            block = np.flatnonzero(window == number)
            local = addresses[block] - self._before[number]
            counts = (packed.bounds[local + 1] - packed.bounds[local]).astype(np.int64)
            places = np.arange(int(counts.sum()))
            places += np.repeat(packed.bounds[local] - (np.cumsum(counts) - counts), counts)
            found.append(
                (
                    np.repeat(block, counts),
                    packed.document[places].astype(np.int64) + number * self.window,
                    packed.begin[places].astype(np.int64),
                    packed.length[places].astype(np.int64),
                    packed.at[places].astype(np.int64),
                )
            )
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return Pieces(*(column[order] for column in columns))

    def _packed(self, number: int) -> Window:
        """The blocks of a window; the last ones that were asked for are kept."""
        with self._lock:
            found = self._kept.get(number)
            if found is not None:
                self._kept.move_to_end(number)
                return found
        first = number * self.window
        lengths = self.lengths.part(first, first + self.window)
        if lengths.sum() != self._tokens[number]:
            raise self.lengths.damaged(first, first + self.window)
        packed = pack_window(lengths, self.block_size)
        with self._lock:
            if number not in self._kept:
                self._kept[number] = packed
                self._kept_bytes += packed.nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return packed
