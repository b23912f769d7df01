"""Splitting a table or view into parts: by row, by group, by a hash of a key."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from destrier.errors import ArgumentError
from destrier.expressions import Classes, classes
from destrier.keyed import (
    GROUP_KEY,
    HASH_KEY,
    Ints,
    epoch_key,
    hash_words,
    mix,
    subkey,
)
from destrier.membership import MAX_PARTS, RandomMembership, hash_rows
from destrier.rowlists import CHUNK, Compactor, StackedRows, chunks
from destrier.selection import OffsetRows
from destrier.view import View, as_view, view_of

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = ["split"]

_TOLERANCE = Fraction(1, 10**9)
_NO_PART = -1


@overload
def split(
    source: TableLike | View,
    shares: Sequence[float],
    *,
    group: str | None = None,
    hash: str | None = None,
    seed: int = 0,
    names: None = None,
) -> list[View]: ...


@overload
def split(
    source: TableLike | View,
    shares: Sequence[float],
    *,
    group: str | None = None,
    hash: str | None = None,
    seed: int = 0,
    names: Sequence[str],
) -> dict[str, View]: ...


def split(
    source: TableLike | View,
    shares: Sequence[float],
    *,
    group: str | None = None,
    hash: str | None = None,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> list[View] | dict[str, View]:
    """Split the rows into random parts that have no row in common. Rows keep their order.

    - By row: sizes are exact, by largest remainder. A keyed permutation puts the rows in a line,
      which is cut; the part of a row depends on its place, on their number and on the seed.
    - By group: rows that agree in ``group`` are in one part. Sizes are as near as the groups
      allow. Groups are dealt from the largest size to the smallest, those of a size in an order
      by hash, to the parts in which one has room, in proportion to what each still lacks; a group
      that has room in none goes to the part that lacks most.
    - By hash: the part of a row depends on its value in ``hash`` and on the seed alone, so it
      stays when rows are added, removed or moved. Sizes are therefore only about right.

    Args:
        source: A table or a view.
        shares: Fractions, which sum to 1 (each is the decimal number that it prints as); or,
            without ``hash``, integers: rows of each part, and rows beyond their sum are in none.
        group: A column or SQL expression: a patient, a document, an author.
        hash: A column or SQL expression: a key.
        seed: From 0 to 2**32 - 1.
        names: Names of the parts.

    Returns:
        One view for each share; with names, a dict of them.

    Raises:
        ArgumentError: If the shares do not sum, a group is larger than every part, a key is null,
            or a row would come twice, so that its copies could be in two parts.
        ColumnError: If there is no such column.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/visits.lance"
        >>> visits = pa.table({"patient": [i % 30 for i in range(100)]})
        >>> _ = lance.write_dataset(visits, uri)
        >>> [len(part) for part in split(uri, [0.8, 0.1, 0.1])]
        [80, 10, 10]
        >>> parts = split(uri, [0.8, 0.2], group="patient", names=["train", "val"])
        >>> patients = [{row["patient"] for row in part} for part in parts.values()]
        >>> patients[0] & patients[1]
        set()
    """
    view = as_view(source)
    wanted = _shares(shares)
    called = _names(names, len(wanted))
    key = epoch_key(seed, 0)
    if group is not None and hash is not None:
        raise ArgumentError(
            f"group={group!r} and hash={hash!r} are both given; the one has sizes that are as near "
            "as groups allow, the other parts that stay when rows are added: choose one"
        )
    if hash is not None:
        codes: Iterator[Ints] = _by_hash(view, wanted, hash, subkey(key, HASH_KEY))
    else:
        sizes = _sizes(wanted, len(view))
        if group is not None:
            codes = _by_group(view, sizes, group, subkey(key, GROUP_KEY), called)
        else:
            _check_repeats(view)
            codes = _by_row(view, sizes, seed)
    parts = _parts(view, codes, len(wanted))
    return parts if names is None else dict(zip(called, parts, strict=True))


# ---- arguments ------------------------------------------------------------------------------


def _shares(shares: Any) -> list[Fraction] | list[int]:
    """Fractions that sum to 1 exactly, or counts."""
    if isinstance(shares, str) or not hasattr(shares, "__len__") or not len(shares):
        raise ArgumentError(f"shares must be a list of fractions or of counts, got {shares!r}")
    if len(shares) > MAX_PARTS:
        raise ArgumentError(f"there can be {MAX_PARTS} parts at most, got {len(shares)}")
    counts = [_count(share) for share in shares]
    if all(count is not None for count in counts):
        for count in counts:
            if count is not None and count < 0:
                raise ArgumentError(f"a part has at least 0 rows, got {count}")
        return [count for count in counts if count is not None]
    if any(count is not None for count in counts):
        raise ArgumentError(f"shares must be all fractions or all counts, got {list(shares)}")
    try:
        fractions = [s if isinstance(s, Fraction) else Fraction(str(float(s))) for s in shares]
    except (TypeError, ValueError):
        raise ArgumentError(f"a share must be a finite number, got {list(shares)}") from None
    if min(fractions) < 0:
        raise ArgumentError(f"a share must not be negative, got {list(shares)}")
    total = sum(fractions, Fraction(0))
    if abs(total - 1) > _TOLERANCE:
        raise ArgumentError(
            f"the fractions {', '.join(f'{float(f):.10g}' for f in fractions)} sum to "
            f"{float(total):.10g}, not to 1; give the rest as a share too, or counts of rows"
        )
    return [fraction / total for fraction in fractions]


def _count(share: Any) -> int | None:
    if isinstance(share, bool | np.bool_):
        raise ArgumentError(f"a share must be a fraction or a count, got {share!r}")
    try:
        return operator.index(share)
    except TypeError:
        return None


def _names(names: Sequence[str] | None, parts: int) -> list[str]:
    if names is None:
        return [f"number {i}" for i in range(parts)]
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"names must be a list of texts, got {names!r}")
    if len(names) != parts or len(set(names)) != parts:
        raise ArgumentError(
            f"there are {parts} shares, which need as many different names: {', '.join(names)}"
        )
    return list(names)


def _sizes(shares: list[Fraction] | list[int], count: int) -> list[int]:
    """Rows of each part: counts as they are, fractions by largest remainder."""
    if all(isinstance(share, int) for share in shares):
        sizes = [int(share) for share in shares]
        if sum(sizes) > count:
            raise ArgumentError(
                f"the counts {', '.join(map(str, sizes))} sum to {sum(sizes)}, but there are only "
                f"{count} rows"
            )
        return sizes
    exact = [share * count for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: count - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _check_repeats(view: View) -> None:
    if not isinstance(view.rows, StackedRows | OffsetRows):
        return
    count = len(view)
    if isinstance(view.rows, OffsetRows):
        distinct = count if view.rows.ascending else len(np.unique(view.rows.values))
    else:
        seen = np.zeros(view.table.num_rows, np.bool_)
        for rows, _ in view.rows.parts:
            for piece in chunks(rows):
                seen[piece] = True
        distinct = int(seen.sum())
    if distinct < count:
        raise ArgumentError(
            f"the view has {count} rows, of which only {distinct} are different ones, so copies "
            "of a row could be in two parts: split first and repeat rows after it, or split by "
            "group or hash, which keep copies together"
        )


# ---- which part -----------------------------------------------------------------------------


def _by_row(view: View, sizes: list[int], seed: int) -> Iterator[Ints]:
    bounds = np.cumsum([0, *sizes])
    line = RandomMembership(len(view), bounds.tolist(), seed=seed).line
    first = 0
    for piece in chunks(view.rows):
        part = np.searchsorted(bounds[1:], line(np.arange(first, first + len(piece))), "right")
        yield np.where(part == len(sizes), _NO_PART, part)
        first += len(piece)


def _by_hash(
    view: View, shares: list[Fraction] | list[int], column: str, key: int
) -> Iterator[Ints]:
    if all(isinstance(share, int) for share in shares):
        raise ArgumentError(
            f"shares by hash must be fractions, got the counts {', '.join(map(str, shares))}: "
            "how many rows have a hash in a range is as it comes"
        )
    reached, edges = Fraction(0), []
    for share in shares:
        reached += share
        edges.append(int(reached * (1 << 32)))
    found = classes(view, column, "hash")
    slots = _hashed(found, key) >> np.uint64(32)
    part = np.searchsorted(np.array(edges, np.int64), slots.astype(np.int64), side="right")
    return _coded(found, part)


def _hashed(found: Classes, key: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    if not len(found.values):
        return np.empty(0, np.uint64)
    return hash_words(hash_rows([found.values]) ^ np.uint64(mix(key)))


def _by_group(
    view: View, sizes: list[int], column: str, key: int, called: list[str]
) -> Iterator[Ints]:
    found = classes(view, column, "group")
    counts = found.counts()
    if len(counts):
        largest, most = int(counts.argmax()), max(*sizes, len(view) - sum(sizes))
        if counts[largest] > most:
            raise ArgumentError(
                f"the group {column}={found.values[largest].as_py()!r} has {counts[largest]} rows, "
                f"but the largest part is to have {most}: give a part a share of at least "
                f"{counts[largest] / len(view):.3g}, or split by a finer column"
            )
    # Rows that are in no part are dealt groups too, as a last part.
    part = _dealt(counts, _hashed(found, key), [*sizes, len(view) - sum(sizes)])
    got = np.bincount(part[found.codes], minlength=len(sizes) + 1)
    for i, size in enumerate(sizes):
        if size and not got[i]:
            raise ArgumentError(
                f"part {called[i]} is to have {size} rows, but gets none of the "
                f"{np.count_nonzero(counts)} groups of {column}, of which the smallest has "
                f"{counts[counts > 0].min()} rows: give it a larger share"
            )
    return _coded(found, np.where(part == len(sizes), _NO_PART, part))


def _coded(found: Classes, part: Ints) -> Iterator[Ints]:
    """The part of each row, from that of each value."""
    for i in range(0, len(found.codes), CHUNK):
        yield part[found.codes[i : i + CHUNK]]


def _dealt(counts: Ints, hashes: Any, sizes: list[int]) -> Ints:
    """The part of each group."""
    lacks = np.array(sizes, np.int64)
    part = np.zeros(len(counts), np.int64)
    order = np.lexsort((hashes, -counts))
    order = order[counts[order] > 0]
    bounds = np.flatnonzero(np.diff(counts[order], prepend=-1))
    for groups in np.split(order, bounds[1:]) if len(order) else ():
        size = int(counts[groups[0]])
        dealt = _shares_of(len(groups), lacks, size, int(hashes[groups[0]]))
        lacks -= dealt * size
        part[groups] = np.repeat(np.arange(len(sizes)), dealt)
    return part


def _shares_of(groups: int, lacks: Ints, size: int, word: int) -> Ints:
    """How many of some groups of one size each part gets.

    In proportion to what the parts with room lack, rounded by one draw for all of them, so that
    each part gets its share in the mean, and no part more than has room. What is left goes, one
    by one, to the part that lacks most.
    """
    room = np.maximum(lacks, 0) // size
    weight = np.where(room > 0, lacks, 0)
    dealt = np.zeros(len(lacks), np.int64)
    if weight.any():
        ends = (np.cumsum(weight).astype(object) * groups << 32) // int(weight.sum())
        drawn = np.array([(int(end) + (mix(word) >> 32)) >> 32 for end in ends], np.int64)
        dealt = np.minimum(np.diff(drawn, prepend=0), room)
    spare = room - dealt
    for i in np.argsort(-spare, kind="stable").tolist():
        more = min(int(spare[i]), groups - int(dealt.sum()))
        dealt[i] += max(more, 0)
    while dealt.sum() < groups:
        dealt[int(np.argmax(lacks - dealt * size))] += 1
    return dealt


def _parts(view: View, codes: Iterator[Ints], parts: int) -> list[View]:
    """Views of the rows with each code, which come in the chunks of the rows."""
    made = [Compactor(view.table.num_rows) for _ in range(parts)]
    for piece, code in zip(chunks(view.rows), codes, strict=True):
        own = code.astype(np.uint16)  # of which numpy sorts the digits; no part is the largest
        grouped = np.argsort(own, kind="stable")
        touched, begins = np.unique(own[grouped], return_index=True)
        for part, mine in zip(touched.tolist(), np.split(grouped, begins[1:]), strict=True):
            if part < parts:
                made[part].add(piece[mine])
    return [view_of(view, each.rows()) for each in made]
