"""Slow plans of token blocks, written from their definition in Python lists alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Token = tuple[int, int]  # a document and a place in it
IGNORED = -100


@dataclass(frozen=True)
class Block:
    """A block as it should be.

    Attributes:
        pieces: Runs of places of one document each: document, first place, length.
        after: The token that follows in the line, if there is a line that goes on.
    """

    pieces: list[tuple[int, int, int]]
    after: Token | None = None


def best_fit(lengths: list[int], size: int) -> list[list[tuple[int, int, int]]]:
    """Return the blocks of a window: for each its pieces."""
    count = -(-sum(lengths) // size)
    blocks: list[list[tuple[int, int, int]]] = []
    rests = []
    for document, length in enumerate(lengths):
        blocks += [[(document, i * size, size)] for i in range(length // size)]
        rests += [(document, length // size * size, length % size)] if length % size else []
    blocks += [[] for _ in range(count - len(blocks))]

    def space(block: list[tuple[int, int, int]]) -> int:
        return size - sum(piece[2] for piece in block)

    def best(length: int) -> list[tuple[int, int, int]] | None:
        fits = [block for block in blocks if space(block) >= length]
        return min(fits, key=space, default=None)  # the first of equals

    late = []
    for piece in sorted(rests, key=lambda piece: -piece[2]):
        block = best(piece[2])
        (late if block is None else block).append(piece)
    for document, begin, length in late:
        end = begin + length
        while begin < end:
            block = best(end - begin) or max(blocks, key=space)
            taken = min(end - begin, space(block))
            block.append((document, begin, taken))
            begin += taken  # noqa: PLW2901 - what is left of it
    return sorted(sorted(block) for block in blocks)


def windows(lengths: list[int], size: int, window: int) -> list[Block]:
    """Return the blocks of all windows."""
    out = []
    for first in range(0, len(lengths), window):
        found = best_fit(lengths[first : first + window], size)
        out += [Block([(d + first, begin, n) for d, begin, n in pieces]) for pieces in found]
    return out


def line(lengths: list[int], size: int, *, overlap: int = 0, first: int = 0) -> list[Block]:
    """Return the blocks that are cut from one line, which is a circle if none overlap."""
    tokens = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    stride = size - overlap
    count = (len(tokens) - overlap) // stride
    return cut(tokens, [first + b * stride for b in range(count)], size, circle=overlap == 0)


def cut(tokens: list[Token], starts: list[int], size: int, *, circle: bool) -> list[Block]:
    """Return the blocks that begin at some places of a line."""
    total, out = len(tokens), []
    for start in starts:
        places = [start + i for i in range(size + 1)]
        *chosen, after = (tokens[p % total] if circle or p < total else None for p in places)
        pieces: list[tuple[int, int, int]] = []
        for document, i in chosen:
            if pieces and pieces[-1][0] == document and i == pieces[-1][1] + pieces[-1][2]:
                pieces[-1] = (document, pieces[-1][1], pieces[-1][2] + 1)
            else:
                pieces.append((document, i, 1))
        out.append(Block(pieces, after))
    return out


def columns(
    block: Block,
    documents: list[list[int]],
    size: int,
    *,
    eos: int | None = None,
    pad: int = 0,
    masked: bool = False,
) -> dict[str, Any]:
    """Return what a sample should have in its columns."""
    content = [[*d, *([] if eos is None or not d else [eos])] for d in documents]
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    numbers: list[int] = []
    bounds = [0]
    last = max(d for d, tokens in enumerate(content) if tokens)
    for n, (document, begin, length) in enumerate(block.pieces):
        ids += content[document][begin : begin + length]
        labels += content[document][begin + 1 : begin + length + 1]
        if begin + length == len(content[document]):
            if n + 1 < len(block.pieces):
                follower: Any = block.pieces[n + 1][:2]
            else:
                follower = block.after
            none = masked or follower is None or document == last
            labels.append(IGNORED if none else content[follower[0]][follower[1]])
        positions += range(length)
        numbers += [n] * length
        bounds.append(bounds[-1] + length)
    pads = size - len(ids)
    if pads:
        labels[-1] = labels[-1] if _goes_on(block, content) else IGNORED
    return {
        "input_ids": ids + [pad] * pads,
        "labels": labels + [IGNORED] * pads,
        "position_ids": positions + list(range(pads)),
        "document_ids": numbers + [-1] * pads,
        "cu_seqlens": bounds,
    }


def _goes_on(block: Block, content: list[list[int]]) -> bool:
    document, begin, length = block.pieces[-1]
    return begin + length < len(content[document])
