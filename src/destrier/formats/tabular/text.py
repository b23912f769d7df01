"""What CSV and JSON lines have in common: units of whole lines, and errors that name the row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError, SchemaError, SourceError
from destrier.files import File
from destrier.formats.batches import checked, gathered, split
from destrier.formats.tabular.discover import Found, format_of
from destrier.formats.tabular.kinds import check_names, kept_field
from destrier.formats.tabular.lines import (
    RANGE_BYTES,
    LongLineError,
    open_file,
    open_text,
    range_blocks,
)
from destrier.writing.source import FileSource, Unit

__all__ = ["RowFault", "TextSource", "check_utf8"]

_SAMPLE_BYTES = 16 << 20  # of the beginning of the source, which shows the types of columns
_EXPANSION = 4  # about how much longer text is than its compressed file
_COLUMNS_SHOWN = 20


class RowFault(Exception):  # noqa: N818 - it is where an error is, not the error
    """A row of a block that cannot be kept.

    Attributes:
        row: In the block.
        reason: What is wrong with it.
        column: The column at fault, or None.
        schema: Whether its type is what is wrong.
    """

    def __init__(
        self, row: int, reason: str, *, column: str | None = None, schema: bool = False
    ) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason
        self.column = column
        self.schema = schema


@dataclass(frozen=True)
class Range:
    """The place of a unit: the lines that begin in a range of bytes of a file."""

    path: str
    size: int
    stamp: int
    start: int = 0
    end: int | None = None


class TextSource(FileSource):
    """Text files of one row a line.

    A subclass gives `infer`, which makes the schema, and `parse`.
    """

    format: ClassVar[str]
    blank: ClassVar[bytes] = b""  # what says nothing at the beginning of a line

    def __init__(
        self, found: Found, *, columns: Sequence[str] | None, declared: pa.Schema | None
    ) -> None:
        self.store = found.store
        self.files = found.files
        self.columns = None if columns is None else list(columns)
        self.declared = declared if declared is not None else pa.schema([])
        check_names(self.declared.names, "schema=")
        self._counted = "", 0, 0  # a file, a byte in it, and the rows that begin before it
        self.whole = False  # whether each file is one unit
        self._all = self.infer()
        names = self._all.names if self.columns is None else self.columns
        there = set(self._all.names)
        for name in names:
            if name not in there:
                known = ", ".join(self._all.names[:_COLUMNS_SHOWN])
                raise ColumnError(f"{self.shown} has no column {name!r}; there are: {known}")
        check_names(names, self.shown)
        for name in names:
            kept = kept_field(self._all.field(name), self.shown).type
            if not kept.equals(self._all.field(name).type):
                raise ArgumentError(
                    f"schema= declares {name!r} as {self._all.field(name).type}, which a table "
                    f"does not keep; declare {kept}"
                )
        self._schema = pa.schema([self._all.field(name) for name in names])

    @property
    def schema(self) -> pa.Schema:
        """Of the declared columns, and those that the beginning of the text shows."""
        return self._schema

    @property
    def shown(self) -> str:
        """The address without credentials."""
        return self.store.shown

    def units(self) -> list[Unit]:
        """Ranges of lines, or whole files where they are compressed."""
        units = []
        for file in self.files:
            shown = self.store.show(file.path)
            place = Range(file.path, file.size, file.stamp)
            compression = self.compression(file)
            if self.whole or compression or file.size <= RANGE_BYTES:
                size = file.size * (_EXPANSION if compression else 1)
                units.append(Unit(shown, None, size, place, file=shown))
                continue
            for start in range(0, file.size, RANGE_BYTES):
                end = min(start + RANGE_BYTES, file.size)
                part = Range(file.path, file.size, file.stamp, start, end)
                name = f"{shown} from byte {start}"
                row = None if start else 0  # others are counted where they are asked for
                units.append(Unit(name, None, end - start, part, file=shown, first_row=row))
        return units

    def identity(self) -> Iterable[Any]:
        """The files and all that says how they are read."""
        schema = [(f.name, str(f.type)) for f in self._schema]
        return [[asdict(file) for file in self.files], schema, self.options()]

    def options(self) -> list[Any]:
        """What else says how the text is read."""
        return []

    def compression(self, file: File) -> str | None:
        """How a file is compressed, by its name."""
        return format_of(file.path or self.store.uri)[1]

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Read the lines of a unit."""
        place: Range = unit.place
        shown = self.store.show(place.path)
        rows = 0

        def parsed() -> Iterator[pa.RecordBatch]:
            nonlocal rows
            for batch in self.batches(place):
                if batch.num_rows:
                    yield self._finish(batch)
                rows += batch.num_rows

        try:
            for batch in gathered(parsed()):
                yield from split(batch)
        except RowFault as fault:
            raise self.error(place.path, rows + self._rows_before(place), fault) from None
        except (pa.ArrowException, OSError) as error:
            row = rows + self._rows_before(place)
            raise SourceError(f"{shown}, after row {row}: {error}", file=shown, row=row) from None

    def error(self, path: str, first: int, fault: RowFault) -> SourceError:
        """The error for a row of a file, counted from a first one."""
        shown = self.store.show(path)
        row = first + fault.row
        where = f", column {fault.column!r}" if fault.column is not None else ""
        kind = SchemaError if fault.schema else SourceError
        return kind(
            f"{shown}, row {row}{where}: {fault.reason}", file=shown, row=row, column=fault.column
        )

    def _finish(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        batch = batch.select(self._schema.names)
        for field, column in zip(self._schema, batch.columns, strict=True):
            if not field.nullable and column.null_count:
                row = column.is_null().index(pa.scalar(value=True)).as_py()
                raise RowFault(
                    row, "no value, but it is declared to have no nulls", column=field.name
                )
        return checked(pa.record_batch(batch.columns, schema=self._schema), self.shown, None)

    def origins(self, unit: Unit, start: int, count: int) -> tuple[pa.Array, pa.Array]:
        """See `Source.origins`; the rows before a range of a file are counted in its text."""
        if unit.first_row is None:
            unit = replace(unit, first_row=self._rows_before(unit.place))
        return super().origins(unit, start, count)

    def _rows_before(self, place: Range) -> int:
        """Rows of the file before a range, counted on from the range that was asked for last."""
        path, start, rows = self._counted
        if path != place.path or start > place.start:
            start = rows = 0
        if start < place.start:
            with open_file(self.store, place.path) as file:
                file.seek(max(start - 1, 0))
                for block in range_blocks(file.read, start, place.start, self.blank):
                    rows += self.count(place.path, block, first=start == 0)
                    start = place.start
        self._counted = place.path, place.start, rows
        return rows

    def blocks(self, place: Range) -> Iterator[bytes]:
        """The lines of a range, in blocks of whole lines."""
        compression = format_of(place.path or self.store.uri)[1]
        shown = self.store.show(place.path)
        try:
            with open_text(self.store, place.path, compression) as file:
                if place.start:
                    file.seek(place.start - 1)
                yield from range_blocks(file.read, place.start, place.end, self.blank)
        except LongLineError as error:
            raise RowFault(0, str(error)) from None
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{shown} cannot be read: {error}", file=shown) from None

    def sample(self) -> Iterator[tuple[str, bytes]]:
        """Blocks of the beginning of the source, with the path of their file."""
        left = _SAMPLE_BYTES
        for file in self.files:
            rows = 0
            place = Range(file.path, file.size, file.stamp)
            try:
                for number, block in enumerate(self.blocks(place)):
                    if len(block) > left:
                        cut = block.rfind(b"\n", 0, left) + 1
                        if cut:
                            yield file.path, block[:cut]
                        elif left == _SAMPLE_BYTES:
                            yield file.path, block
                        return
                    yield file.path, block
                    rows += self.count(file.path, block, first=number == 0)
                    left -= len(block)
            except RowFault as fault:
                raise self.error(file.path, rows, fault) from None

    @abstractmethod
    def infer(self) -> pa.Schema:
        """The schema of all columns, from the declared ones and the sample."""

    @abstractmethod
    def count(self, path: str, block: bytes, *, first: bool) -> int:
        """Number of rows in a block of whole lines of a file; ``first`` if it begins the file."""

    @abstractmethod
    def batches(self, place: Range) -> Iterator[pa.RecordBatch]:
        """The rows of a range, with all the columns of the schema at least.

        Raises:
            RowFault: With the row counted from the last batch's end.
        """


def check_utf8(block: bytes, count: Callable[[bytes], int]) -> None:
    """Raise unless a block is text.

    Args:
        block: Whole lines.
        count: Counts the rows of such a block.

    Raises:
        RowFault: Naming the row.
    """
    try:
        block.decode()
    except UnicodeDecodeError as error:
        line = block.rfind(b"\n", 0, error.start) + 1
        reason = f"byte 0x{block[error.start]:02x} at {error.start - line} in its line is not UTF-8"
        raise RowFault(count(block[:line]) if line else 0, reason) from None
