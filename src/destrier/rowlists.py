"""Row lists that are made, filtered, cut and repeated: what views are views of.

A list in table order is kept as a range, as a bitmap of 1.1 bits for each row of the table, or,
where it is sparse, as offsets; which of them follows from the rows alone, so that equal lists have
equal digests. Repeats are layers, each of them in table order: neighbours stay neighbours, and so
are read in one piece, and the copies of a row lie far apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from destrier.errors import EmptyError
from destrier.keyed import Ints
from destrier.lists import digest_of
from destrier.selection import (
    SPARSE,
    BitmapRows,
    OffsetRows,
    RangeRows,
    RowList,
    select_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from destrier.table import Table

__all__ = [
    "CHUNK",
    "Compactor",
    "StackedRows",
    "chunks",
    "compact",
    "contains",
    "intersect",
    "layers",
    "locality",
    "sliced",
    "stack",
    "streamed_rows",
]

CHUNK = 1 << 18  # positions worked on at once
_LEAST_RUN = 1 << 12  # a list of shorter ascending runs, in the mean, is kept as it is
_FEW_RUNS = 64


class StackedRows:
    """Row lists one after another, each so many times.

    Args:
        parts: The lists, none of them empty, and how many times each comes.
    """

    def __init__(self, parts: Iterable[tuple[RowList, int]]) -> None:
        self.parts = list(parts)
        sizes = [len(rows) * times for rows, times in self.parts]
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look the positions up in the lists that they fall in."""
        out = np.empty(len(positions), np.int64)
        part = np.searchsorted(self.starts, positions, side="right") - 1
        grouped = np.argsort(part, kind="stable")
        touched, first = np.unique(part[grouped], return_index=True)
        for i, mine in zip(touched.tolist(), np.split(grouped, first[1:]), strict=True):
            rows = self.parts[i][0]
            out[mine] = rows.offsets((positions[mine] - self.starts[i]) % len(rows))
        return out

    @property
    def digest(self) -> str:
        """Of the lists and how often they come."""
        return digest_of(["stacked", *(f"{times}|{rows.digest}" for rows, times in self.parts)])


def stack(parts: Iterable[tuple[RowList, int]]) -> RowList:
    """Return lists one after another, each so many times, as one list."""
    flat: list[tuple[RowList, int]] = []
    for rows, times in parts:
        inner = rows.parts if isinstance(rows, StackedRows) and times == 1 else [(rows, times)]
        for each, often in inner:
            if not len(each) or not often:
                continue
            if flat and len(flat[-1][0]) == len(each) and flat[-1][0].digest == each.digest:
                flat[-1] = (each, flat[-1][1] + often)
            else:
                flat.append((each, often))
    if not flat:
        return OffsetRows(np.empty(0, np.int64))
    return flat[0][0] if len(flat) == 1 and flat[0][1] == 1 else StackedRows(flat)


def chunks(rows: RowList) -> Iterator[Ints]:
    """Yield the offsets of a list in its order, many at a time."""
    count = len(rows)
    for start in range(0, count, CHUNK):
        yield rows.offsets(np.arange(start, min(start + CHUNK, count)))


class _Run:
    """Ascending offsets: kept as they are until a bitmap is smaller."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0
        self.first = self.last = -1
        self._pieces: list[Ints] = []
        self._words: NDArray[np.uint64] | None = None

    def add(self, offsets: Ints) -> None:
        """Add offsets that come after all others."""
        self.first = self.first if self.count else int(offsets[0])
        self.last = int(offsets[-1])
        self.count += len(offsets)
        if self._words is not None:
            _set_bits(self._words, offsets)
            return
        self._pieces.append(offsets)
        if self.count >= self.total * SPARSE:
            self._words = np.zeros(-(-self.total // 64), np.uint64)
            for piece in self._pieces:
                _set_bits(self._words, piece)
            self._pieces = []

    def rows(self) -> RowList:
        """The list that costs least."""
        if self.last - self.first + 1 == self.count:
            return RangeRows(self.count, self.first)
        if self._words is not None:
            return BitmapRows(self._words)
        return OffsetRows(np.concatenate(self._pieces))


def _set_bits(words: NDArray[np.uint64], offsets: Ints) -> None:
    place = offsets >> 6
    first = np.flatnonzero(np.concatenate([[True], place[1:] != place[:-1]]))
    bits = np.uint64(1) << (offsets & 63).astype(np.uint64)
    words[place[first]] |= np.bitwise_or.reduceat(bits, first)


class Compactor:
    """Makes a list of offsets that come piece by piece, in the order of the list.

    Args:
        total: Rows of the table.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._count = 0
        self._runs: list[_Run] = []
        self._plain: list[Ints] | None = None

    def add(self, piece: Ints) -> None:
        """Add offsets; repeats are allowed."""
        if not len(piece):
            return
        self._count += len(piece)
        if self._plain is not None:
            self._plain.append(piece)
            return
        falls = np.flatnonzero(piece[1:] <= piece[:-1]) + 1
        if len(self._runs) + len(falls) > max(_FEW_RUNS, self._count // _LEAST_RUN):
            self._plain = [*self._so_far(), piece]
            return
        for part in np.split(piece, falls):
            if not self._runs or part[0] <= self._runs[-1].last:
                self._runs.append(_Run(self._total))
            self._runs[-1].add(part)

    def rows(self) -> RowList:
        """The list."""
        plain = self._plain
        if plain is None and len(self._runs) > 1 and self._count < _LEAST_RUN * len(self._runs):
            plain = self._so_far()
        if plain is not None:
            return OffsetRows(np.concatenate(plain))
        return stack((run.rows(), 1) for run in self._runs)

    def _so_far(self) -> list[Ints]:
        return [piece for run in self._runs for piece in chunks(run.rows())]


def compact(pieces: Iterable[Ints], total: int) -> RowList:
    """Make a list of offsets that come piece by piece.

    Args:
        pieces: Offsets in the order of the list; repeats are allowed.
        total: Rows of the table.
    """
    made = Compactor(total)
    for piece in pieces:
        made.add(piece)
    return made.rows()


def contains(rows: RowList, offsets: Ints) -> NDArray[np.bool_]:
    """Whether each of the offsets is listed."""
    if isinstance(rows, RangeRows):
        inside: NDArray[np.bool_] = (offsets >= rows.start) & (offsets < rows.start + len(rows))
        return inside
    if isinstance(rows, BitmapRows):
        shift = (offsets & 63).astype(np.uint64)
        return np.asarray((rows.words[offsets >> 6] >> shift) & np.uint64(1), np.bool_)
    if isinstance(rows, StackedRows):
        found = np.zeros(len(offsets), np.bool_)
        for part, _ in rows.parts:
            found |= contains(part, offsets)
        return found
    if isinstance(rows, OffsetRows) and rows.ascending:
        if not len(rows):
            return np.zeros(len(offsets), np.bool_)
        place = np.minimum(np.searchsorted(rows.values, offsets), len(rows) - 1)
        return np.asarray(rows.values[place] == offsets, np.bool_)
    found = np.zeros(len(offsets), np.bool_)
    for piece in chunks(rows):
        found |= np.isin(offsets, piece)
    return found


def intersect(rows: RowList, kept: RowList, total: int) -> RowList:
    """The rows of a list that another one has too, in their order and as often as they come."""
    if isinstance(rows, StackedRows):
        return stack((intersect(part, kept, total), times) for part, times in rows.parts)
    ordered = isinstance(rows, RangeRows | BitmapRows)
    if ordered and isinstance(kept, OffsetRows) and kept.ascending:
        return compact([kept.values[contains(rows, kept.values)]], total)
    return compact((piece[contains(kept, piece)] for piece in chunks(rows)), total)


def sliced(rows: RowList, places: range, total: int) -> RowList:
    """The rows at successive places of a list, or at every so many."""
    if isinstance(rows, RangeRows) and places.step == 1:
        return RangeRows(len(places), rows.start + places.start) if places else stack([])
    positions = (
        np.arange(places.start + i * places.step, _end(places, i), places.step)
        for i in range(0, len(places), CHUNK)
    )
    return compact((rows.offsets(some) for some in positions), total)


def _end(places: range, begun: int) -> int:
    return places.start + min(begun + CHUNK, len(places)) * places.step


def layers(rows: RowList, positions: Ints, counts: Ints, total: int) -> RowList:
    """The rows at ascending positions of a list, each as often as its count says.

    The first layer has each row once, the next one those that come twice or more, and so on.
    """
    parts: list[tuple[RowList, int]] = []
    before = 0
    for level in np.unique(counts).tolist():
        keep = counts >= level
        positions, counts = positions[keep], counts[keep]
        pieces = (rows.offsets(positions[i : i + CHUNK]) for i in range(0, len(positions), CHUNK))
        parts.append((compact(pieces, total), level - before))
        before = level
    return stack(parts)


def locality(rows: RowList, total: int) -> float | None:
    """The part of the table's rows, among neighbours, that are neighbours in the list.

    Returns:
        1 for a range, the density of a list in table order, the mean of layers; None where
        nothing is known of where neighbours lie.
    """
    if isinstance(rows, RangeRows):
        return 1.0
    if isinstance(rows, StackedRows):
        sizes = np.diff(rows.starts)
        found = [locality(part, total) for part, _ in rows.parts]
        known = [density for density in found if density is not None]
        return float(np.dot(sizes, known) / len(rows)) if len(known) == len(found) else None
    if isinstance(rows, BitmapRows) or (isinstance(rows, OffsetRows) and rows.ascending):
        return len(rows) / total
    return None


def streamed_rows(table: Table, rows: RowList, filter: str | None) -> RowList:
    """The rows of a view that a stream delivers.

    Args:
        table: The view's table.
        rows: The view's rows.
        filter: An SQL expression that chooses among them; a row that comes twice is kept twice.

    Raises:
        EmptyError: If there are none.
        FilterError: If Lance cannot run the filter.
    """
    if not len(rows):
        raise EmptyError(f"the view of {table.name} has no rows")
    if filter is None:
        return rows
    kept = intersect(rows, select_rows(table, filter), table.num_rows)
    if not len(kept):
        raise EmptyError(f"the filter {filter!r} keeps none of the {len(rows)} rows of the view")
    return kept
