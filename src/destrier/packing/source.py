"""The documents of some blocks, as they are read: checked, and ready to be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.errors import ReadError, RowError
from destrier.keyed import Ints
from destrier.packing.lengths import Lengths
from destrier.packing.packing import Packing
from destrier.read import Reader
from destrier.selection import RowList
from destrier.writing.layout import count_name

__all__ = ["Documents", "empty_between", "read_documents"]

_FEW = 16  # documents without tokens in a row


@dataclass(frozen=True)
class Documents:
    """Some documents.

    Attributes:
        values: The tokens (and parallel values) of these and other documents, by column.
        starts: Where each document begins there, by column.
        sizes: Tokens of each document, without what is added.
        errors: What is wrong with a document, by its number here.
    """

    values: dict[str, NDArray[Any]]
    starts: dict[str, Ints]
    sizes: Ints
    errors: dict[int, RowError]


def read_documents(
    reader: Reader, packing: Packing, lengths: Lengths, places: Ints, offsets: Ints
) -> Documents:
    """Read documents, each once, and check them.

    Args:
        reader: Reads rows of the table.
        packing: What is wanted of them.
        lengths: What is known of all documents.
        places: Their places in the selection, ascending.
        offsets: Their row offsets.

    Raises:
        ReadError: If a row cannot be read, or holds what is no token, and the reader is not
            tolerant.
    """
    read = _Reading(reader, packing, lengths, places, offsets)
    if read.errors and not reader.tolerant:
        raise read.errors[min(read.errors)]
    return Documents(read.values, read.starts, read.sizes, read.errors)


def empty_between(places: Ints, lengths: Lengths, rows: RowList) -> Ints:
    """Documents without tokens between others that are read, in neighbouring rows of the table.

    To read them costs next to nothing, and shows whether they have tokens though their count is 0.

    Args:
        places: What is read, ascending.
        lengths: What is known of all documents.
        rows: The documents: rows of the table.
    """
    gap = np.diff(places)
    near = np.flatnonzero((gap > 1) & (gap <= _FEW + 1))
    before, gap = places[near], gap[near]
    close = rows.offsets(before + gap) - rows.offsets(before) == gap
    before, count = before[close], gap[close] - 1
    first = np.cumsum(count) - count
    between: Ints = np.repeat(before + 1 - first, count) + np.arange(count.sum())
    if not len(between):
        return between
    empty = np.add.reduceat(lengths.values[between].astype(np.int64), first) == 0
    chosen: Ints = between[np.repeat(empty, count)]
    return chosen


class _Reading:
    """Documents as they are read, and what is wrong with them."""

    def __init__(
        self, reader: Reader, packing: Packing, lengths: Lengths, places: Ints, offsets: Ints
    ) -> None:
        self._table = reader.table.name
        self._packing = packing
        self._offsets = offsets
        rows = reader.read(offsets)
        self._rows = np.arange(len(offsets)) if rows.index is None else rows.index
        self.errors: dict[int, RowError] = dict(rows.errors)
        self.sizes = lengths.values[places].astype(np.int64)
        self.values: dict[str, NDArray[Any]] = {}
        self.starts: dict[str, Ints] = {}
        for name in rows.batch.schema.names:
            self._take(name, rows.batch.column(name))
        if packing.column in self.values:
            self._check_tokens()

    def _take(self, name: str, array: pa.Array) -> None:
        """Take one column, and find the documents whose lists cannot be used."""
        starts, sizes, inner = _flat(array)
        present = self._rows >= 0
        row = np.where(present, self._rows, 0)
        if array.null_count:
            missing = array.is_null().to_numpy(zero_copy_only=False)[row] & present
            for i in np.flatnonzero(missing).tolist():
                self._fail(i, name, "is null, so it is no list of tokens")
        if len(array):
            self.starts[name] = starts[row]
            sizes = sizes[row]
        else:
            self.starts[name] = sizes = np.zeros(len(row), np.int64)
        for i in np.flatnonzero(present & (sizes != self.sizes)).tolist():
            self._fail(i, name, self._disagreement(name, int(sizes[i]), int(self.sizes[i])))
        if inner.null_count:
            bad = np.flatnonzero(inner.is_null().to_numpy(zero_copy_only=False))
            for i, place in self._owners(name, bad):
                self._fail(i, name, f"has a null at place {place}")
            inner = inner.fill_null(False if pa.types.is_boolean(inner.type) else 0)
        self.values[name] = inner.to_numpy(zero_copy_only=False)

    def _disagreement(self, name: str, found: int, known: int) -> str:
        column = self._packing.column
        if name != column:
            return f"has {found} values, but {column!r} has {known} tokens; they are cut alike"
        return (
            f"has {found} tokens, but {count_name(column)!r}, or the lengths found before, say "
            f"{known}; write the counts anew, or remove the *.lengths files from the cache folder"
        )

    def _check_tokens(self) -> None:
        """Find the documents with tokens that are none."""
        packing, name = self._packing, self._packing.column
        values = self.values[name]
        if not len(values):
            return
        most = int(np.iinfo(packing.dtype).max)
        if int(values.min()) < 0:
            self._refuse(values < 0, "which is negative")
        if int(values.max()) > most:
            self._refuse(values > most, f"which is beyond dtype={packing.dtype!r} ({most})")
        if packing.pad_id is not None:
            pads = values == packing.pad_id
            if pads.any():
                self._refuse(pads, "which is pad_id; choose a pad_id that no document has")

    def _refuse(self, bad: NDArray[np.bool_], why: str) -> None:
        name = self._packing.column
        values = self.values[name]
        for i, place in self._owners(name, np.flatnonzero(bad)):
            token = int(values[self.starts[name][i] + place])
            self._fail(i, name, f"has the token {token} at place {place}, {why}")

    def _owners(self, name: str, bad: Ints) -> list[tuple[int, int]]:
        """The documents that hold some values, each once, and where the first of them is."""
        starts = self.starts[name]
        order = np.argsort(starts, kind="stable")
        found = []
        for i in order.tolist():
            if self._rows[i] < 0:
                continue
            lo, hi = np.searchsorted(bad, [starts[i], starts[i] + self.sizes[i]])
            if hi > lo:
                found.append((i, int(bad[lo] - starts[i])))
        return found

    def _fail(self, document: int, column: str, why: str) -> None:
        offset = int(self._offsets[document])
        self.errors.setdefault(
            document,
            ReadError(
                f"column {column!r} of row {offset} of {self._table} {why}",
                offset=offset,
                column=column,
            ),
        )


def _flat(array: pa.Array) -> tuple[Ints, Ints, pa.Array]:
    """Where each list begins, its length, and the values of all lists."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        inner = array.values.slice(array.offset * size, len(array) * size)
        return np.arange(len(array)) * size, np.full(len(array), size), inner
    offsets = array.offsets.to_numpy().astype(np.int64)
    if not len(offsets):
        return np.empty(0, np.int64), np.empty(0, np.int64), array.values
    inner = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    offsets -= offsets[0]
    return offsets[:-1], np.diff(offsets), inner
