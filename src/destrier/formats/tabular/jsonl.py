"""JSON lines: one object a line, its values kept as they are or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from destrier.errors import ArgumentError, SourceError
from destrier.formats.tabular.discover import Found
from destrier.formats.tabular.shapes import (
    Shape,
    check_value,
    parse_line,
    parsed_kind,
    settled,
)
from destrier.formats.tabular.text import Range, RowFault, TextSource, check_utf8

__all__ = ["JsonSource"]

_BOM = b"\xef\xbb\xbf"
# A string, a number with a fraction or an exponent, or (the group) a whole number
_TOKEN = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"'
    rb"|-?[0-9]+(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)"
    rb"|(-?[0-9]+)",
    re.DOTALL,
)


class JsonSource(TextSource):
    """Rows of JSON lines.

    pyarrow's parser reads them at speed. It would take strings for times, whole numbers for floats
    and objects of several lines, so what it gave is counted and compared with the text.

    Args:
        found: The files.
        columns: Those to read; None is all.
        schema: Types of some or all columns; the types of others are found.
    """

    format: ClassVar[str] = "jsonl"
    blank: ClassVar[bytes] = b" \t\r"

    def __init__(
        self,
        found: Found,
        *,
        columns: Sequence[str] | None = None,
        schema: pa.Schema | None = None,
    ) -> None:
        super().__init__(found, columns=columns, declared=schema)

    def infer(self) -> pa.Schema:
        """The types of the sample's values; that of a key that is always null is null."""
        shapes: dict[str, Shape] = {}
        declared = set(self.declared.names)
        path = None
        rows = 0
        for place, block in self.sample():
            first = place != path
            if first:
                path, rows = place, 0
            try:
                block = _unmarked(block, first=first)  # noqa: PLW2901
                check_utf8(block, _count_lines)
                for row, line in enumerate(_lines(block)):
                    for name, value in parse_line(line, row).items():
                        if name not in shapes:
                            shapes[name] = Shape()
                        if name not in declared:
                            shapes[name].see(value, name, row)
                rows += _count_lines(block)
            except RowFault as fault:
                raise self.error(place, rows, fault) from None
        if not shapes and not self.declared.names:
            raise SourceError(f"{self.shown}: there are no rows, or none with a key")
        fields = []
        for name, shape in shapes.items():
            known = name in declared
            fields.append(self.declared.field(name) if known else pa.field(name, shape.arrow()))
        fields += [field for field in self.declared if field.name not in shapes]
        self._check_parsed()
        return pa.schema(fields)

    def _check_parsed(self) -> None:
        for field in self.declared:
            try:
                self._parse(b"{}\n", pa.schema([pa.field(field.name, field.type)]))
            except pa.ArrowException as error:
                raise ArgumentError(
                    f"schema= declares {field.name!r} as {field.type}: {error}"
                ) from None

    def count(self, path: str, block: bytes, *, first: bool) -> int:  # noqa: ARG002
        """Lines that are not blank."""
        return _count_lines(block.removeprefix(_BOM) if first else block)

    def batches(self, place: Range) -> Iterator[pa.RecordBatch]:
        """The rows of a range of lines."""
        for number, read in enumerate(self.blocks(place)):
            block = _unmarked(read, first=number == 0 and place.start == 0)
            check_utf8(block, _count_lines)
            lines = _count_lines(block)
            if not lines:
                continue
            try:
                batch = self._parse(block, self._all)
                reason = "" if batch.num_rows == lines else f"they hold {batch.num_rows} objects"
            except pa.ArrowException as error:
                reason = str(error)
            if reason:
                self._walk(block)
                raise RowFault(0, f"in the {lines} lines from here: {reason}")
            if self._is_mixed(block, batch):
                self._walk(block)
            yield batch

    def _parse(self, block: bytes, schema: pa.Schema) -> pa.RecordBatch:
        parsed = pa.schema([pa.field(f.name, parsed_kind(f.type)) for f in schema])
        table = pa_json.read_json(
            pa.BufferReader(block),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pa_json.ParseOptions(
                explicit_schema=parsed, unexpected_field_behavior="error"
            ),
        )
        parts = [pa.concat_arrays(table[field.name].chunks) for field in schema]
        columns = [settled(part, f.type) for part, f in zip(parts, schema, strict=True)]
        return pa.record_batch(columns, names=schema.names)

    def _is_mixed(self, block: bytes, batch: pa.RecordBatch) -> bool:
        """Whether a whole number may have become a float."""
        if not any(_has_float(field.type) for field in self._all):
            return False
        integers = sum(_numbers(column, pa.types.is_integer) for column in batch.columns)
        floats = sum(_numbers(column, pa.types.is_floating) for column in batch.columns)
        # no integer has a point, so if there are as many as floats, every float has one
        if _count_points(block) == floats:
            return False
        return sum(map(bool, _TOKEN.findall(block))) != integers

    def _walk(self, block: bytes) -> None:
        """Look at each value; raises for the first that is not exactly of its column's type."""
        names = set(self.declared.names)
        for row, line in enumerate(_lines(block)):
            for name, value in parse_line(line, row).items():
                index = self._all.get_field_index(name)
                if index < 0:
                    raise RowFault(
                        row,
                        f"the key {name!r}, which no row at the beginning has; declare its type "
                        f"with schema=pa.schema([({name!r}, ...)])",
                        column=name,
                        schema=True,
                    )
                declared = name in names
                check_value(value, self._all.field(index), name, row, declared=declared)


def _unmarked(block: bytes, *, first: bool) -> bytes:
    """A block without the byte order mark that a file may begin with.

    pyarrow's parser drops one at the beginning of whatever it is given.

    Raises:
        RowFault: If another row begins with one.
    """
    if first:
        block = block.removeprefix(_BOM)
    if block.startswith(_BOM):
        raise RowFault(0, "U+FEFF before the object: only a file may begin with it")
    return block


def _has_float(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_float(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _numbers(column: pa.Array, wanted: Callable[[pa.DataType], bool]) -> int:
    """How many values of the wanted types there are in a column."""
    kind = column.type
    if pa.types.is_struct(kind):
        return sum(_numbers(column.field(i), wanted) for i in range(kind.num_fields))
    if pa.types.is_nested(kind):
        return _numbers(column.flatten(), wanted)
    return len(column) - column.null_count if wanted(kind) else 0


def _count_points(block: bytes) -> int:
    """How many points there are outside of strings."""
    if b"\\" in block:
        block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    data = np.frombuffer(block, np.uint8)
    points, quotes = np.flatnonzero(data == ord(".")), np.flatnonzero(data == ord('"'))
    return int(np.count_nonzero(np.searchsorted(quotes, points) % 2 == 0))


def _count_lines(block: bytes) -> int:
    """How many lines are not blank."""
    if not block.strip(JsonSource.blank + b"\n"):
        return 0
    data = np.frombuffer(block, np.uint8)
    starts = np.append(0, np.flatnonzero(data[:-1] == ord("\n")) + 1)
    blank = int(np.count_nonzero(data[starts] == ord("\n")))
    odd = starts[(data[starts] != ord("{")) & (data[starts] != ord("\n"))]
    for start in odd.tolist():
        end = block.find(b"\n", start)
        blank += not block[start : end if end >= 0 else None].strip(JsonSource.blank)
    return len(starts) - blank


def _lines(block: bytes) -> Iterator[str]:
    """The lines that are not blank; a row is one of these."""
    text = block.decode()
    blank = JsonSource.blank.decode()
    return (line for line in text.split("\n") if line.strip(blank))
