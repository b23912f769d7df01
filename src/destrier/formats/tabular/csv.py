"""CSV and TSV: text that becomes numbers only where the numbers give the same text back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from destrier.errors import ArgumentError, SchemaError, SourceError
from destrier.formats.tabular.dialect import BOM, Dialect, short
from destrier.formats.tabular.discover import Found, format_of
from destrier.formats.tabular.forms import TEXT, Form, declared, first_bad, forms, narrowed
from destrier.formats.tabular.lines import open_text
from destrier.formats.tabular.text import Range, RowFault, TextSource

__all__ = ["CsvSource"]


class CsvSource(TextSource):
    """Rows of CSV files that have one header.

    Args:
        found: The files.
        columns: Those to read; None is all.
        schema: Types of some or all columns; the types of others are found.
        delimiter: Between values; None is a tab in ``.tsv`` files and a comma in others.
        null_values: Unquoted texts that stand for a null.
        quote_char: Around values that hold the delimiter; None if quotes are text.
        newlines_in_values: Whether quoted values may hold line ends; each file is one unit then.
        header: Whether the first row of each file has the names.
        column_names: The names, instead of those in the header.
        missing: ``"null"``: a column that a later file lacks is null there.
    """

    format: ClassVar[str] = "csv"

    def __init__(
        self,
        found: Found,
        *,
        columns: Sequence[str] | None = None,
        schema: pa.Schema | None = None,
        delimiter: str | None = None,
        null_values: Sequence[str] = ("",),
        quote_char: str | None = '"',
        newlines_in_values: bool = False,
        header: bool = True,
        column_names: Sequence[str] | None = None,
        missing: str = "error",
    ) -> None:
        if isinstance(null_values, str):
            raise ArgumentError(f"null_values is a list of texts, not the text {null_values!r}")
        if not header and column_names is None:
            raise ArgumentError("header=False needs column_names=[...]")
        if delimiter is None:
            name = (found.files[0].path or found.store.uri).rpartition("/")[2].lower()
            delimiter = "\t" if ".tsv" in name else ","
        self.dialect = Dialect(delimiter, quote_char, tuple(null_values), newlines_in_values)
        self.header = header
        self.column_names = None if column_names is None else list(column_names)
        self.missing = missing
        self._forms: dict[str, Form] = {}
        super().__init__(found, columns=columns, declared=schema)
        self.whole = newlines_in_values

    def options(self) -> list[Any]:
        """What says how the text is read."""
        dialect = self.dialect
        styles = {name: form.name for name, form in self._forms.items()}
        return [
            [dialect.delimiter, dialect.quote_char, list(dialect.null_values)],
            [dialect.newlines_in_values, self.header, self.column_names, self.missing],
            styles,
        ]

    def infer(self) -> pa.Schema:
        """The types in which all of the sample's text is written; text where there is none."""
        shown = self.store.show(self.files[0].path)
        names = self._names(self.files[0].path)[1]
        for name in self.declared.names:
            if name not in names:
                raise SchemaError(
                    f"schema= declares {name!r}, but the columns of {shown} are: "
                    f"{', '.join(names)}",
                    file=shown,
                    column=name,
                )
        unknown = [name for name in names if name not in self.declared.names]
        candidates = {name: forms() for name in unknown}
        seen = set()
        for batch in self._sample() if unknown else ():
            for name in set(unknown) & set(batch.schema.names):
                text = batch[name]
                if text.null_count < len(text):
                    seen.add(name)
                    candidates[name] = list(narrowed(candidates[name], text))
        for name in names:
            if name in unknown:
                self._forms[name] = candidates[name][0] if name in seen else TEXT
            else:
                self._forms[name] = self._declared(self.declared.field(name))
        fields = [
            pa.field(name, form.kind) if name in unknown else self.declared.field(name)
            for name, form in self._forms.items()
        ]
        return pa.schema(fields)

    @staticmethod
    def _declared(field: pa.Field) -> Form:
        try:
            return declared(field.type)
        except pa.ArrowException as error:
            raise ArgumentError(
                f"schema= declares {field.name!r} as {field.type}: {error}"
            ) from None

    def _sample(self) -> Iterator[pa.RecordBatch]:
        """The text of the sample's rows."""
        path = self.files[0].path
        rows = 0
        try:
            if self.dialect.newlines_in_values:
                for batch in self._stream(path):
                    yield batch
                    return
            else:
                last = None
                for path, block in self.sample():
                    first, last = path != last, path
                    rows = 0 if first else rows
                    batch = self._block(block, self._names(path)[1], first=first)
                    yield batch
                    rows += batch.num_rows
        except RowFault as fault:
            raise self.error(path, rows, fault) from None

    def count(self, path: str, block: bytes, *, first: bool) -> int:
        """Lines that are rows, without the header."""
        names = self._names(path)[1]
        if first and self.header:
            block = self.dialect.behind_header(block)
        return self.dialect.count(block, len(names))

    def batches(self, place: Range) -> Iterator[pa.RecordBatch]:
        """The rows of a range of lines."""
        names = self._names(place.path)[1]
        self._check_names(names, place.path)
        if self.dialect.newlines_in_values:
            for batch in self._stream(place.path):
                yield self._values(batch)
            return
        first = place.start == 0
        for block in self.blocks(place):
            yield self._values(self._block(block, names, first=first))
            first = False

    def _block(self, block: bytes, names: list[str], *, first: bool) -> pa.RecordBatch:
        if first and self.header:
            block = self.dialect.behind_header(block)
            first = False
        if not first and block.startswith(BOM):
            block = BOM + block  # a character here, but pyarrow would drop it
        return self.dialect.parse(block, names)

    def _stream(self, path: str) -> Iterator[pa.RecordBatch]:
        header, names = self._names(path)
        with open_text(self.store, path, self._compression(path)) as file:
            yield from self.dialect.stream(file.read, header, names)

    def _compression(self, path: str) -> str | None:
        return format_of(path or self.store.uri)[1]

    def _names(self, path: str) -> tuple[list[str] | None, list[str]]:
        """A file's header, and the names of its columns."""
        shown = self.store.show(path)
        header = None
        if self.header:
            try:
                with open_text(self.store, path, self._compression(path)) as file:
                    header = self.dialect.header(file.read, shown)
            except (pa.ArrowException, OSError) as error:
                raise SourceError(f"{shown}: {error}", file=shown) from None
        names = self.column_names if self.column_names is not None else (header or [])
        if header is not None and len(names) != len(header):
            raise ArgumentError(
                f"column_names has {len(names)} names, but {shown} has {len(header)} columns"
            )
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise SchemaError(
                f"{shown} has two columns named {twice!r}; give other names with "
                "column_names=[...]",
                file=shown,
                column=twice,
            )
        return header, names

    def _check_names(self, names: Sequence[str], path: str) -> None:
        shown, first = self.store.show(path), self.store.show(self.files[0].path)
        lost = [name for name in self.schema.names if name not in names]
        if lost and self.missing != "null":
            raise SchemaError(
                f"{shown} lacks the column {lost[0]!r}, which {first} has; with missing='null' it "
                "is null there",
                file=shown,
                column=lost[0],
            )
        more = [name for name in names if name not in self._forms]
        if more and self.columns is None:
            raise SchemaError(
                f"{shown} has the column {more[0]!r}, which {first} lacks; say which to read with "
                "columns=[...]",
                file=shown,
                column=more[0],
            )

    def _values(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Text as values."""
        columns: dict[str, pa.Array] = {}
        for name in self.schema.names:
            form = self._forms[name]
            if name not in batch.schema.names:
                columns[name] = pa.nulls(batch.num_rows, form.kind)
                continue
            found = form.values(batch[name])
            if found is None:
                row, value = first_bad(form, batch[name])
                way = (
                    ""
                    if name in self.declared.names
                    else ", as all at the beginning are; to keep them as text pass "
                    f"schema=pa.schema([({name!r}, pa.string())])"
                )
                reason = f"{short(value)} is not {form.name}{way}"
                raise RowFault(row, reason, column=name, schema=True)
            columns[name] = found
        return pa.record_batch(columns)
