"""The syntax of CSV: lines to columns of text, with an error for what cannot be told apart."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from destrier.errors import ArgumentError, SourceError
from destrier.formats.tabular.text import RowFault, check_utf8

__all__ = ["BOM", "Dialect", "short"]

BOM = b"\xef\xbb\xbf"
_STREAM_BLOCK = 16 << 20
_HEADER_BLOCK = 1 << 16
_ROW = re.compile(r"Row #(\d+)")
_SHOWN = 60


def short(text: str) -> str:
    """A text as a message shows it."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


@dataclass(frozen=True)
class Dialect:
    """How values are separated and quoted.

    Attributes:
        delimiter: Between values.
        quote_char: Around values that hold the delimiter; None if quotes are text.
        null_values: Unquoted texts that stand for a null.
        newlines_in_values: Whether quoted values may hold line ends.
    """

    delimiter: str
    quote_char: str | None
    null_values: tuple[str, ...]
    newlines_in_values: bool

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote_char"):
            value = getattr(self, name)
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
                raise ArgumentError(f"{name} is one character of ASCII, not {value!r}")

    def header(self, read: Callable[[int], bytes], shown: str) -> list[str]:
        """The values of the first row of a file.

        Raises:
            SourceError: If there is none.
        """
        data = read(_HEADER_BLOCK)
        while b"\n" not in data and len(data) < _STREAM_BLOCK and (more := read(_HEADER_BLOCK)):
            data += more
        first = data[: data.find(b"\n")] if b"\n" in data else data
        if b"\r" in first.rstrip(b"\r") and not self.newlines_in_values:
            raise SourceError(
                f"{shown}: lines end in carriage returns alone, or the header holds one; pass "
                "newlines_in_values=True",
                file=shown,
            )
        text = data.removeprefix(BOM).decode(errors="surrogateescape")
        lines = io.StringIO(text, newline="")
        if self.quote_char is None:
            rows = csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)
        else:
            rows = csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote_char)
        try:
            names = next((row for row in rows if row), None)
        except csv.Error as error:
            raise SourceError(f"{shown}: the header cannot be read: {error}", file=shown) from None
        if names is None:
            raise SourceError(f"{shown} is empty: there is no header", file=shown)
        for name in names:
            if not name.isprintable() and any(0xDC80 <= ord(c) <= 0xDCFF for c in name):
                raise SourceError(f"{shown}: the header is not UTF-8: {name!a}", file=shown)
            if "\n" in name and not self.newlines_in_values:
                raise SourceError(
                    f"{shown}: the header holds a line end ({short(name)}), or a quote that is not "
                    "closed; for the first pass newlines_in_values=True",
                    file=shown,
                )
        return names

    def behind_header(self, block: bytes) -> bytes:
        """A file's first lines without the header."""
        position = len(BOM) if block.startswith(BOM) else 0
        while position < len(block):
            end = block.find(b"\n", position) + 1 or len(block)
            line = block[position:end]
            position = end
            if line.strip(b"\r\n"):
                break
        return block[position:]

    def count(self, block: bytes, width: int) -> int:
        """Number of rows of so many values in a block of whole lines."""
        return int(np.count_nonzero(_lines(block, width)[2])) if block else 0

    def parse(self, block: bytes, names: Sequence[str]) -> pa.RecordBatch:
        """A block of whole lines as columns of text.

        Raises:
            RowFault: Naming the row: not UTF-8, another number of values, quotes that are not
                closed in their line.
        """
        if not block:
            return pa.record_batch([pa.array([], pa.string()) for _ in names], names=list(names))
        if not block.endswith(b"\n"):
            block += b"\n"  # or pyarrow reads an empty last value behind a quoted one as quoted
        check_utf8(block, lambda part: self.count(part, len(names)))
        data, ends, there = _lines(block, len(names))
        if self.quote_char is not None and self.quote_char.encode() in block:
            self._check_quotes(block, data, ends, there)
        if not there.any():
            return pa.record_batch([pa.array([], pa.string()) for _ in names], names=list(names))
        bad: list[Any] = []
        try:
            table = pa_csv.read_csv(
                pa.BufferReader(block),
                read_options=pa_csv.ReadOptions(
                    use_threads=False, block_size=len(block) + 1, column_names=list(names)
                ),
                **self._options(names, bad),
            )
        except pa.ArrowException as error:
            raise self._fault(bad, str(error), 0) from None
        rows = int(there.sum())
        if table.num_rows != rows:
            raise RowFault(
                0,
                f"the {rows} lines from here hold {table.num_rows} rows: a value has a line end in "
                "it (newlines_in_values=True), or a quote is text (quote_char=None)",
            )
        return pa.record_batch([_one(column) for column in table.columns], names=list(names))

    def stream(
        self, read: Callable[[int], bytes], header: Sequence[str] | None, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a whole file, in which quoted values may hold line ends.

        Args:
            read: Reads so many bytes of the file.
            header: What the file's first row is, None if that is a row of data.
            names: Of the columns.

        Raises:
            RowFault: With the row counted from the last batch's end.
        """
        source = _Counted(read, (self.quote_char or "\0").encode())
        bad: list[Any] = []
        rows = 0
        last = 0
        options = pa_csv.ReadOptions(
            use_threads=False,
            block_size=_STREAM_BLOCK,
            column_names=None if header is not None else list(names),
        )
        file_names = names if header is None else header
        try:
            reader = pa_csv.open_csv(
                pa.PythonFile(source, "r"), options, **self._options(file_names, bad)
            )
            if reader.schema.names != list(file_names):
                raise RowFault(0, f"the header is read as {reader.schema.names} and {file_names}")
            for batch in reader:
                yield pa.record_batch(batch.columns, names=list(names))
                rows += batch.num_rows
                last = batch.num_rows
        except pa.ArrowException as error:
            first = rows + (header is not None)
            raise self._fault(bad, str(error), first) from None
        if self.quote_char is not None and source.quotes % 2:
            raise RowFault(-min(last, 1), "the file ends within quotes")

    def _options(self, names: Sequence[str], bad: list[Any]) -> Mapping[str, Any]:
        def keep(row: Any) -> str:
            bad.append(row)
            return "error"

        return {
            "parse_options": pa_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote_char if self.quote_char is not None else False,
                newlines_in_values=self.newlines_in_values,
                ignore_empty_lines=len(names) > 1,
                invalid_row_handler=keep,
            ),
            "convert_options": pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=list(self.null_values),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        }

    @staticmethod
    def _fault(bad: Sequence[Any], reason: str, first: int) -> RowFault:
        """The error for a row of the parser's; ``first`` rows of its input came before."""
        if not bad:
            found = _ROW.search(reason)
            number = max(int(found[1]) - 1 - first, 0) if found else 0
            return RowFault(number, reason if found else f"in the lines from here: {reason}")
        row = bad[-1]
        number = max((row.number or 1) - 1 - first, 0)
        counts = f"{row.actual_columns} values in a row of {row.expected_columns} columns"
        return RowFault(number, f"{counts}: {short(row.text)}")

    def _check_quotes(self, block: bytes, data: Any, ends: Any, there: Any) -> None:
        """A line end between quotes would be taken for the end of a row."""
        quotes = np.flatnonzero(data == ord(self.quote_char or "\0"))
        odd = np.flatnonzero(np.searchsorted(quotes, ends) & 1)
        if len(odd):
            line = int(odd[0])
            start = int(ends[line - 1]) + 1 if line else 0
            text = block[start : int(ends[line])].decode()
            raise RowFault(
                int(there[:line].sum()),
                f"a quote is not closed in its line: {short(text)}; for values with line ends pass "
                "newlines_in_values=True, for quotes that are text quote_char=None",
            )


def _lines(block: bytes, width: int) -> tuple[Any, Any, Any]:
    """A block as bytes, where its lines end, and which of them are rows of so many values."""
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(data))
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts
    # an empty line is no row, but where a row has one value: there it is a null
    empty = (lengths == 0) | ((lengths == 1) & (data[starts] == ord("\r")))
    return data, ends, ~empty if width > 1 else np.ones(len(ends), np.bool_)


class _Counted:
    """A file as pyarrow reads it, with its quotes counted and its last line ended."""

    closed = False

    def __init__(self, read: Callable[[int], bytes], quote: bytes) -> None:
        self._read = read
        self._quote = quote
        self.quotes = 0
        self._last = b"\n"

    def read(self, size: int) -> bytes:
        data = self._read(size)
        if not data and self._last not in b"\r\n":
            data = b"\n"  # as in `Dialect.parse`
        self.quotes += data.count(self._quote)
        self._last = data[-1:] or self._last
        return data


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
