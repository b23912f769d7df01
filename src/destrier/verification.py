"""Proves that a table and a dataset hold the same rows, value by value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.agreement import agreed, brought, wide
from destrier.compare import differing
from destrier.errors import ArgumentError, ColumnError, SourceError
from destrier.exporting import exported_columns, exported_schema
from destrier.files import Store
from destrier.formats import EXPORTS, detect, open_sink, open_source
from destrier.keyed import Ints
from destrier.links.columns import companion, companions
from destrier.links.crcs import CRC, crcs_of
from destrier.read import Reader
from destrier.selection import RangeRows, RowList, select_rows
from destrier.sink import Back
from destrier.table import Table, open_table
from destrier.writing.crew import Crew, Note
from destrier.writing.filtering import RowFilter
from destrier.writing.layout import COUNT_KEY, is_blob
from destrier.writing.progress import progress
from destrier.writing.source import Measure, Shard, Source

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = ["Difference", "Verified", "verify"]

_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Difference:
    """A value, a type or a number of rows that differs.

    Attributes:
        row: Row of the table, or None if it is the whole.
        column: The column, or None if it is all of them.
        source: What the dataset has there, shortened.
        table: What the table has there, shortened.
    """

    row: int | None
    column: str | None
    source: str
    table: str

    def __str__(self) -> str:
        where = "rows" if self.column is None else f"column {self.column!r}"
        if self.row is not None:
            where = f"row {self.row}, {where}"
        return f"{where}: {self.source} in the dataset, {self.table} in the table"


@dataclass(frozen=True)
class Verified:
    """What a comparison found.

    Attributes:
        rows: Number of rows compared.
        equal: Whether all is equal.
        differing: Number of values that differ.
        differences: The first of them, in the order of the table.
    """

    rows: int
    equal: bool
    differing: int
    differences: tuple[Difference, ...]


def verify(
    src: TableLike,
    dst: TableLike,
    *,
    format: str = "auto",
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    num_workers: int | None = None,
    limit: int = 10,
    storage_options: Mapping[str, str] | None = None,
    source_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Verified:
    """Compare what was made with what it was made of: the number of rows, then every value.

    It proves a conversion, a link (whose files are read through the table) and an export alike.
    The types of a conversion have to be the same, too. An export may have those that its format
    needs, such as 64 bits for all integers, as long as each value is that of the table.

    Args:
        src: The dataset, as for `convert`; or the table that was exported.
        dst: The table. Columns that only it has are compared to nothing if the writer made them
            (counts, links, provenance), else they are a difference. Or the export of a table.
        format: Of the dataset or export, as for `convert`.
        columns: The columns of ``src`` that ``dst`` should have; None is all of them.
        filter: The rows of ``src`` that ``dst`` should have, in Lance's SQL.
        num_workers: Processes; None is one a processor, 0 works in this process.
        limit: Number of differences to describe.
        storage_options: Of the table.
        source_options: Of the dataset's store.
        options: Those of the format, as they were given to `convert` or `export`.

    Raises:
        SourceError: If the dataset is damaged.

    Example:
        >>> import destrier
        >>> destrier.verify("data/chunks", "data/digits.lance").equal  # doctest: +SKIP
        True
    """
    if not _is_table(dst, storage_options) and _is_table(src, storage_options):
        table = open_table(src, storage_options=storage_options)
        rows = select_rows(table, filter)
        filter = None
        names = exported_columns(table) if columns is None else list(columns)
        table.check_columns(names)
        exported = exported_schema(table, names)
        source, back = _open_export(Store(_path(dst), source_options), format, exported, options)
        pair = partial(_exported, table=exported, back=back)
    else:
        source = open_source(
            Store(_path(src), source_options),
            format,
            columns=None if filter is not None else columns,
            options=options,
        )
        table = open_table(dst, storage_options=storage_options)
        rows = RangeRows(table.num_rows)
        pair = partial(_copied, table=table.schema, names=columns)
    rest = source.rest(Measure(1, 1, 1.0))
    shards = [source.first(), *(shard for shard in rest if shard is not None)]
    reading = _Reading(source, _schema(source, shards), filter)
    num_workers = Crew.size_for(num_workers, len(shards))
    with progress("verifying", source.total_rows) as note:
        counts = _counts(reading, shards, num_workers)
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        if starts[-1] != len(rows):
            different = Difference(None, None, f"{starts[-1]} rows", f"{len(rows)} rows")
            return Verified(0, False, 1, (different,))
        pairs = list(pair(reading.schema))
        kinds = [each for each in pairs if isinstance(each, Difference)]
        compared = [each for each in pairs if isinstance(each, _Column)]
        job = _Compare(reading, table, rows, compared, limit)
        found: dict[int, tuple[int, list[Difference]]] = {}
        tasks = list(zip(shards, starts[:-1], strict=True))
        with Crew(job, num_workers, on_note=note) as crew:
            found.update(crew.run(tasks))
    count = len(kinds) + sum(differing for differing, _ in found.values())
    listed = [*kinds, *(each for number in sorted(found) for each in found[number][1])]
    return Verified(starts[-1], not count, count, tuple(listed[:limit]))


def _is_table(place: TableLike, options: Mapping[str, str] | None) -> bool:
    if not isinstance(place, str | os.PathLike):
        return True
    try:
        return Store(place, options).is_folder("_versions")
    except (ArgumentError, SourceError):
        return False  # opening it says what is wrong


def _path(place: TableLike) -> str | os.PathLike[str]:
    if not isinstance(place, str | os.PathLike):
        raise ArgumentError("two tables were given to compare, and no dataset: pass its path")
    return place


def _open_export(
    store: Store, format: str, schema: pa.Schema, options: Mapping[str, Any]
) -> tuple[Source, Back]:
    if format == "auto":
        format = detect(store)
    if format not in EXPORTS:
        raise ArgumentError(
            f"the first of the two is a table, and no export is of the format {format!r}, as "
            f"{store.shown} is; a table that was made of a dataset comes second: "
            "verify(dataset, table)"
        )
    back = open_sink(format, options).back(schema)
    try:
        return open_source(store, format, options=back.options), back
    except (ArgumentError, ColumnError):  # it lacks a column, or has another kind of values
        return open_source(store, format), back


def _schema(source: Source, shards: list[Shard]) -> pa.Schema:
    """That of all batches; of the first rows if it is not declared."""
    if source.schema is not None:
        return source.schema
    for shard in shards:
        for unit in shard.units:
            for batch in source.read(unit, None):
                return batch.schema
    raise SourceError(f"{source.shown} has no rows to compare")


@dataclass(frozen=True)
class _Column:
    """A column to compare: what it is called on both sides, and the type to compare it in."""

    source: str
    table: str
    kind: pa.DataType


def _copied(
    schema: pa.Schema, *, table: pa.Schema, names: Sequence[str] | None
) -> Iterator[_Column | Difference]:
    """The columns of a copy, and those that one side lacks, or has of another type."""
    names = schema.names if names is None else names
    for name in names:
        if name not in schema.names:
            raise ColumnError(
                f"no column {name!r} in the source; its columns are: {', '.join(schema.names)}"
            )
        kind = schema.field(name).type
        if name not in table.names:
            yield Difference(None, name, str(kind), "no such column")
            continue
        stored = pa.large_binary() if is_blob(table.field(name)) else table.field(name).type
        if wide(kind) == wide(stored):
            yield _Column(name, name, kind if kind == stored else wide(kind))
        else:
            yield Difference(None, name, str(kind), str(stored))
    beside = companions(table)
    for field in table:
        metadata = field.metadata or {}
        made = COUNT_KEY in metadata or b"destrier:origin" in metadata
        if field.name not in names and not made and field.name not in beside:
            yield Difference(None, field.name, "no such column", str(field.type))


def _exported(schema: pa.Schema, *, table: pa.Schema, back: Back) -> Iterator[_Column | Difference]:
    """The columns of an export, and those that one side lacks, or has of another type."""
    for field in table:
        name = back.names.get(field.name)
        if name is None or name not in schema.names:
            yield Difference(None, field.name, "no such column", str(field.type))
            continue
        kind = agreed(schema.field(name), field)
        if kind is None:
            yield Difference(None, field.name, str(schema.field(name).type), str(field.type))
        else:
            yield _Column(name, field.name, kind)
    for field in schema:
        if field.name not in back.names.values():
            yield Difference(None, field.name, str(field.type), "no such column")


def _counts(reading: _Reading, shards: list[Shard], num_workers: int | None) -> list[int]:
    """The number of rows that each shard gives; read if it is not declared."""
    if reading.filter is None:
        declared = [[unit.rows for unit in shard.units] for shard in shards]
        if all(None not in rows for rows in declared):
            return [sum(row for row in rows if row is not None) for rows in declared]
    counts: dict[int, int] = {}
    with Crew(_Count(reading), num_workers) as crew:
        counts.update(crew.run(shards))
    return [counts[number] for number in range(len(shards))]


@dataclass(frozen=True)
class _Reading:
    """How shards are read."""

    source: Source
    schema: pa.Schema
    filter: str | None

    def batches(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        keep = None if self.filter is None else RowFilter(self.filter)
        for unit in shard.units:
            for batch in self.source.read(unit, self.schema):
                yield batch if keep is None else batch.take(pa.array(keep.rows(batch)))


@dataclass(frozen=True)
class _Count:
    reading: _Reading

    def __call__(self, shard: Shard, note: Note) -> int:  # noqa: ARG002 - rows are noted later
        return sum(batch.num_rows for batch in self.reading.batches(shard))


@dataclass(frozen=True)
class _Compare:
    reading: _Reading
    table: Table
    rows: RowList
    columns: list[_Column]
    limit: int

    def __call__(self, task: tuple[Shard, int], note: Note) -> tuple[int, list[Difference]]:
        """Compare a shard with the rows of the table from the one of a number on."""
        shard, row = task
        count = 0
        shown: list[Difference] = []
        reader = Reader(self.table, [column.table for column in self.columns])
        crcs = {name: Reader(self.table, [beside]) for name, beside in self._with_crcs()}
        for batch in self.reading.batches(shard):
            for start, part in _pieces(batch) if self.columns else ():
                offsets = self.rows.offsets(np.arange(row + start, row + start + part.num_rows))
                rows = reader.read(offsets).batch
                for column in self.columns:
                    one, other = part.column(column.source), rows.column(column.table)
                    one, other = brought(one, column.kind), brought(other, column.kind)
                    places = np.flatnonzero(differing(one, other))
                    count += len(places)
                    shown.extend(
                        Difference(
                            int(offsets[place]),
                            column.table,
                            _show(one[place]),
                            _show(other[place]),
                        )
                        for place in places[: self.limit].tolist()
                    )
                for name, beside in crcs.items():
                    count += self._crcs(name, rows, beside.read(offsets).batch, offsets, shown)
                del shown[self.limit :]
            row += batch.num_rows
            note(batch.num_rows)
        return count, shown

    def _with_crcs(self) -> Iterator[tuple[str, str]]:
        """The linked columns that were made with CRCs, and where these are."""
        schema = self.table.schema
        for name in (column.table for column in self.columns):
            beside = companion(schema, name)
            if beside is not None and schema.field(beside).type.get_field_index(CRC.name) >= 0:
                yield name, beside

    def _crcs(
        self,
        name: str,
        rows: pa.RecordBatch,
        recorded: pa.RecordBatch,
        offsets: Ints,
        shown: list[Difference],
    ) -> int:
        """Compare with what was read when it was linked: the source may have changed since."""
        stored = recorded.column(0).field(CRC.name)
        found = crcs_of(rows.column(name))
        places = np.flatnonzero(differing(found, stored))
        shown.extend(
            Difference(
                int(offsets[place]),
                name,
                f"CRC {found[place]} now",
                f"CRC {stored[place]} when linked",
            )
            for place in places[: self.limit].tolist()
        )
        return len(places)


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Runs of rows of about 8 MiB, since the table's side is read into memory."""
    rows = max(1, int((8 << 20) * batch.num_rows / max(batch.nbytes, 1)))
    for start in range(0, batch.num_rows, rows):
        yield start, batch.slice(start, rows)


def _show(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
