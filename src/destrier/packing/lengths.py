"""Lengths of documents: a mapped file of four bytes a document, and sums of every 1,024.

They are found once on a machine for each table, column and selection: from the count column that
the writer writes, else by one scan of the lists.

A wrong count is noticed when its document is read. One of 0 would hide the document, which then is
in no block: so the lists of some documents that have no token are looked at when lengths are found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from destrier.errors import ColumnError, EmptyError, ReadError
from destrier.keyed import Ints
from destrier.lancecalls import lance_call
from destrier.packing.lengthfile import GROUP, MISSING, Sums, stored_lengths
from destrier.read import Reader
from destrier.selection import BitmapRows, RangeRows, RowList
from destrier.table import Table
from destrier.writing.layout import count_name

__all__ = ["Lengths", "counted_by", "find_lengths", "list_kind"]

_PIECE = 1 << 18  # documents worked on at once
_SCAN_ROWS = 1 << 16
_SCAN_AHEAD = 4  # batches; Lance would read gigabytes ahead
_SCAN_BYTES = 8 << 20
_LIST_BYTES = 8 << 20  # of a batch of lists, about
_CHECKED = 256  # documents without tokens


class Lengths:
    """The lengths of documents, in tokens, by their place in the selection.

    Args:
        values: As they are stored: without what is added to each document.
        sums: Of every 1,024 documents.
        digest: Of the values.
        extra: Tokens that are added to each document that has any.
    """

    def __init__(self, values: NDArray[np.uint32], sums: Sums, digest: str, extra: int = 0) -> None:
        self.values = values
        self.digest = f"{digest}+{extra}"
        self.extra = extra
        self.count = len(values)
        self.documents = int(sums.some[-1])
        self.before: Ints = sums.tokens + extra * sums.some  # tokens before each group
        self.tokens = int(self.before[-1])

    def part(self, first: int, last: int) -> Ints:
        """The lengths of documents ``[first, last)``."""
        values = self.values[first:last].astype(np.int64)
        return values + self.extra * (values > 0)

    def at(self, documents: Ints) -> Ints:
        """The lengths of some documents."""
        values = self.values[documents].astype(np.int64)
        return values + self.extra * (values > 0)

    def groups(self, first: int, last: int) -> Ints:
        """The lengths of the documents of groups ``[first, last)``, checked by their sums.

        Raises:
            ReadError: If the file of lengths was damaged since it was opened.
        """
        lengths = self.part(first * GROUP, last * GROUP)
        if lengths.sum() != self.before[last] - self.before[first]:
            raise self.damaged(first * GROUP, last * GROUP)
        return lengths

    def damaged(self, first: int, last: int) -> ReadError:
        """What is raised where lengths are not those that were summed."""
        return ReadError(
            f"the stored lengths of documents {first} to {min(last, self.count) - 1} are damaged; "
            "remove the *.lengths files from the cache folder, so that they are found anew"
        )

    def window_tokens(self, window: int) -> Ints:
        """The tokens of each window of so many documents."""
        if window % GROUP == 0:
            step = window // GROUP
            before = self.before[::step]
            if (len(self.before) - 1) % step:
                before = np.append(before, self.before[-1])
            return np.diff(before)
        sums = np.zeros(-(-self.count // window), np.int64)
        piece = max(1, _PIECE // window) * window
        for first in range(0, self.count, piece):
            lengths = self.part(first, first + piece)
            found = np.add.reduceat(lengths, np.arange(0, len(lengths), window))
            sums[first // window : first // window + len(found)] = found
        if sums.sum() != self.tokens:
            raise self.damaged(0, self.count)
        return sums


def find_lengths(table: Table, rows: RowList, column: str, *, extra: int = 0) -> Lengths:
    """Return the lengths of some rows.

    Args:
        table: The pinned table.
        rows: The documents: rows of the table.
        column: A column of lists, or of integers that are the lengths.
        extra: Tokens that are added to each document that has any.

    Raises:
        ColumnError: If the column holds neither.
        ReadError: If a list is missing, or is of no possible length, or a document has tokens
            though its count is 0, as far as that is looked at; names the row.
        EmptyError: If no document has a token.
    """
    table.check_columns([column])
    kind = table.schema.field(column).type
    if not _is_list(kind) and not pa.types.is_integer(kind):
        raise ColumnError(
            f"column {column!r} of {table.name} is of type {kind}, which has no lengths: it must "
            "hold lists, or integers that are lengths"
        )
    if pa.types.is_fixed_size_list(kind):
        lengths = _equal(len(rows), kind.list_size, extra)
    else:
        key = f"{table.identity}|{table.version}|{column}"
        chosen = stored_lengths(key, lambda: _scanned(table, column))
        if not isinstance(rows, RangeRows) or len(rows) != table.num_rows:
            whole, key = chosen.values, f"{key}|{rows.digest}"
            chosen = stored_lengths(key, lambda: _selected(whole, rows))
        numbers = counted_by(table, column)
        if numbers is not None:
            # By itself: the lengths of all rows are found for a selection as well.
            of = (table, column, numbers, rows)
            stored_lengths(f"{key}|empty", lambda: _empty(chosen.values, *of))
        if chosen.missing is not None:
            offset, name = int(rows.offsets(np.array([chosen.missing]))[0]), _counted(table, column)
            raise ReadError(
                f"column {name!r} of row {offset} of {table.name} is null, so it has no "
                f"length; leave such rows out: filter='{name} IS NOT NULL'",
                offset=offset,
                column=name,
            )
        lengths = Lengths(chosen.values, chosen.sums, chosen.digest, extra)
    if not lengths.tokens:
        raise EmptyError(
            f"column {column!r} has no tokens in any of the {len(rows)} chosen rows of {table.name}"
        )
    return lengths


def list_kind(table: Table, column: str) -> pa.DataType:
    """Return the type of a column of lists of integers.

    Raises:
        ColumnError: If it is none.
    """
    table.check_columns([column])
    kind = table.schema.field(column).type
    if not _is_list(kind) or not pa.types.is_integer(kind.value_type):
        raise ColumnError(
            f"column {column!r} of {table.name} is of type {kind}; tokens are lists of integers"
        )
    return kind


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in lists)


def _equal(count: int, length: int, extra: int) -> Lengths:
    """The lengths of lists of one size: they take no memory."""
    values = np.broadcast_to(np.uint32(length), count)
    before = np.minimum(np.arange(-(-count // GROUP) + 1, dtype=np.int64) * GROUP, count)
    sums = Sums(before * length, before * (length > 0))
    digest = hashlib.blake2b(f"equal|{count}|{length}".encode(), digest_size=16).hexdigest()
    return Lengths(values, sums, digest, extra)


def counted_by(table: Table, column: str) -> str | None:
    """Return the column beside one of lists that their lengths are read from, if there is one."""
    kind, name = table.schema.field(column).type, count_name(column)
    if pa.types.is_integer(kind) or pa.types.is_fixed_size_list(kind):
        return None  # has them by itself
    if name in table.schema.names and pa.types.is_integer(table.schema.field(name).type):
        return name
    return None


def _counted(table: Table, column: str) -> str:
    """The column that lengths are read from."""
    return counted_by(table, column) or column


def _scanned(table: Table, column: str) -> Iterator[NDArray[np.uint32]]:
    """The lengths in all rows of the table."""
    name, rows = _counted(table, column), _SCAN_ROWS
    numbers = pa.types.is_integer(table.schema.field(name).type)
    if not numbers:
        rows = max(1, min(rows, int(_LIST_BYTES / table.row_bytes)))

    def start() -> Iterator[pa.RecordBatch]:
        scanner = table.dataset.scanner(
            columns=[name],
            batch_size=rows,
            batch_readahead=_SCAN_AHEAD,
            fragment_readahead=1,
            io_buffer_size=_SCAN_BYTES,
            scan_in_order=True,
        )
        return iter(scanner.to_batches())

    def call(function: Callable[[], Any]) -> Any:
        return lance_call(f"finding the lengths of {column!r}", function, table.secrets)

    batches = call(start)
    first = 0
    while (batch := call(lambda: next(batches, None))) is not None:
        array = batch.column(0)
        if not numbers:
            array = pc.list_value_length(array)
        yield _checked(array, table, name, first)
        first += batch.num_rows
    if first != table.num_rows:
        raise ReadError(f"a scan of {table.name} gave {first} rows of {table.num_rows}")


def _checked(numbers: pa.Array, table: Table, name: str, first: int) -> NDArray[np.uint32]:
    counts = numbers.cast(pa.int64(), safe=False)  # one beyond them is negative then
    values = counts.fill_null(MISSING).to_numpy()
    known = values if not counts.null_count else counts.drop_null().to_numpy()
    if len(known) and (known.min() < 0 or known.max() >= MISSING):
        valid = counts.is_valid().to_numpy(zero_copy_only=False)
        place = int(np.flatnonzero(valid & ((values < 0) | (values >= MISSING)))[0])
        raise ReadError(
            f"column {name!r} of row {first + place} of {table.name} is {numbers[place]}, "
            f"which is no length: it must be from 0 to {MISSING - 1}",
            offset=first + place,
            column=name,
        )
    stored: NDArray[np.uint32] = values.astype(np.uint32)
    return stored


def _empty(
    values: NDArray[np.uint32], table: Table, column: str, name: str, rows: RowList
) -> Iterator[NDArray[np.uint32]]:
    """The lengths of some documents whose count is 0, which are read.

    Raises:
        ReadError: If one has tokens.
    """
    pieces = (
        first + _some(np.flatnonzero(values[first : first + _PIECE] == 0))
        for first in range(0, len(values), _PIECE)
    )
    places = _some(np.concatenate([np.empty(0, np.int64), *pieces]))
    if not len(places):
        return
    offsets = np.unique(rows.offsets(places))
    found = Reader(table, [column]).read(offsets).batch.column(0)
    sizes = pc.fill_null(pc.list_value_length(found), 0).to_numpy(zero_copy_only=False)
    for i in np.flatnonzero(sizes)[:1].tolist():
        raise ReadError(
            f"column {column!r} of row {offsets[i]} of {table.name} has {sizes[i]} tokens, but "
            f"{name!r} says 0; write the counts anew, or leave such rows out: filter='{name} > 0'",
            offset=int(offsets[i]),
            column=column,
        )
    yield sizes.astype(np.uint32)


def _some(places: Ints) -> Ints:
    """As many of them as are looked at, evenly spaced."""
    if len(places) <= _CHECKED:
        return places
    return places[np.linspace(0, len(places) - 1, _CHECKED).astype(np.int64)]


def _selected(whole: NDArray[np.uint32], rows: RowList) -> Iterator[NDArray[np.uint32]]:
    """The lengths of the selected rows."""
    for offsets in _offsets(rows):
        yield whole[offsets]


def _offsets(rows: RowList) -> Iterable[Ints]:
    if isinstance(rows, BitmapRows):  # many times faster than to look each up
        for first in range(0, len(rows.words), _PIECE // 64):
            words = np.ascontiguousarray(rows.words[first : first + _PIECE // 64])
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            yield np.flatnonzero(bits) + first * 64
        return
    for first in range(0, len(rows), _PIECE):
        yield rows.offsets(np.arange(first, min(first + _PIECE, len(rows))))
