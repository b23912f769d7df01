"""Proves that a table and a dataset hold the same rows, value by value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.compare import differing
from destrier.errors import ColumnError, SourceError
from destrier.files import Store
from destrier.formats import open_source
from destrier.links.columns import companion, companions
from destrier.links.crcs import CRC, crcs_of
from destrier.read import Reader
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
        source: What the source has there, shortened.
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
        return f"{where}: {self.source} in the source, {self.table} in the table"


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
    src: str | os.PathLike[str],
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
    """Compare a dataset with a table: the number of rows, then every row and value.

    It proves a conversion, a link (whose files are read through the table) and an export alike.

    Args:
        src: The dataset, as for `convert`.
        dst: The table. Columns that only it has are compared to nothing if the writer made them
            (counts, links, provenance), else they are a difference.
        format: As for `convert`.
        columns: The columns of the dataset that the table should have; None is all of them.
        filter: The rows of the dataset that the table should have, in Lance's SQL.
        num_workers: Processes; None is one a processor, 0 works in this process.
        limit: Number of differences to describe.
        storage_options: Of the table.
        source_options: Of the dataset's store.
        options: Those of the format, as they were given to `convert`.

    Raises:
        SourceError: If the dataset is damaged.

    Example:
        >>> import destrier
        >>> destrier.verify("data/chunks", "data/digits.lance").equal  # doctest: +SKIP
        True
    """
    source = open_source(
        Store(src, source_options),
        format,
        columns=None if filter is not None else columns,
        options=options,
    )
    table = open_table(dst, storage_options=storage_options)
    rest = source.rest(Measure(1, 1, 1.0))
    shards = [source.first(), *(shard for shard in rest if shard is not None)]
    schema = _schema(source, shards)
    num_workers = Crew.size_for(num_workers, len(shards))
    with progress("verifying", source.total_rows) as note:
        counts = _counts(_Reading(source, schema, filter), shards, num_workers)
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        if starts[-1] != table.num_rows:
            different = Difference(None, None, f"{starts[-1]} rows", f"{table.num_rows} rows")
            return Verified(0, False, 1, (different,))
        names = list(schema.names) if columns is None else list(columns)
        kinds = list(_kinds(schema, names, table.schema))
        wrong = {difference.column for difference in kinds}
        job = _Compare(
            _Reading(source, schema, filter), table, [n for n in names if n not in wrong], limit
        )
        found: dict[int, tuple[int, list[Difference]]] = {}
        tasks = list(zip(shards, starts[:-1], strict=True))
        with Crew(job, num_workers, on_note=note) as crew:
            found.update(crew.run(tasks))
    count = len(kinds) + sum(differing for differing, _ in found.values())
    listed = [*kinds, *(each for number in sorted(found) for each in found[number][1])]
    return Verified(starts[-1], not count, count, tuple(listed[:limit]))


def _schema(source: Source, shards: list[Shard]) -> pa.Schema:
    """That of all batches; of the first rows if it is not declared."""
    if source.schema is not None:
        return source.schema
    for shard in shards:
        for unit in shard.units:
            for batch in source.read(unit, None):
                return batch.schema
    raise SourceError(f"{source.shown} has no rows to compare")


def _kinds(schema: pa.Schema, names: list[str], table: pa.Schema) -> Iterator[Difference]:
    """Columns that one side lacks, or has of another type."""
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
        if _wide(kind) != _wide(stored):
            yield Difference(None, name, str(kind), str(stored))
    beside = companions(table)
    for field in table:
        metadata = field.metadata or {}
        made = COUNT_KEY in metadata or b"destrier:origin" in metadata
        if field.name not in names and not made and field.name not in beside:
            yield Difference(None, field.name, "no such column", str(field.type))


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
    columns: list[str]
    limit: int

    def __call__(self, task: tuple[Shard, int], note: Note) -> tuple[int, list[Difference]]:
        """Compare a shard with the rows of the table from a row on."""
        shard, row = task
        count = 0
        shown: list[Difference] = []
        reader = Reader(self.table, self.columns)
        crcs = {name: Reader(self.table, [beside]) for name, beside in self._with_crcs()}
        for batch in self.reading.batches(shard):
            for start, part in _pieces(batch) if self.columns else ():
                offsets = np.arange(row + start, row + start + part.num_rows)
                rows = reader.read(offsets).batch
                for name in self.columns:
                    count += self._values(name, part, rows, row + start, shown)
                for name, beside in crcs.items():
                    count += self._crcs(name, rows, beside.read(offsets).batch, row + start, shown)
                del shown[self.limit :]
            row += batch.num_rows
            note(batch.num_rows)
        return count, shown

    def _values(
        self,
        name: str,
        source: pa.RecordBatch,
        table: pa.RecordBatch,
        first: int,
        shown: list[Difference],
    ) -> int:
        one, other = source.column(name), table.column(name)
        if one.type != other.type:
            one, other = one.cast(_wide(one.type)), other.cast(_wide(other.type))
        places = np.flatnonzero(differing(one, other))
        shown.extend(
            Difference(first + place, name, _show(one[place]), _show(other[place]))
            for place in places[: self.limit].tolist()
        )
        return len(places)

    def _with_crcs(self) -> Iterator[tuple[str, str]]:
        """The linked columns that were made with CRCs, and where these are."""
        schema = self.table.schema
        for name in self.columns:
            beside = companion(schema, name)
            if beside is not None and schema.field(beside).type.get_field_index(CRC.name) >= 0:
                yield name, beside

    def _crcs(
        self,
        name: str,
        rows: pa.RecordBatch,
        recorded: pa.RecordBatch,
        first: int,
        shown: list[Difference],
    ) -> int:
        """Compare with what was read when it was linked: the source may have changed since."""
        stored = recorded.column(0).field(CRC.name)
        found = crcs_of(rows.column(name))
        places = np.flatnonzero(differing(found, stored))
        shown.extend(
            Difference(
                first + place, name, f"CRC {found[place]} now", f"CRC {stored[place]} when linked"
            )
            for place in places[: self.limit].tolist()
        )
        return len(places)


def _wide(kind: pa.DataType) -> pa.DataType:
    """Text and bytes with 64-bit offsets: other formats do not tell them from those with 32."""
    return {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}.get(kind, kind)


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Runs of rows of about 8 MiB, since the table's side is read into memory."""
    rows = max(1, int((8 << 20) * batch.num_rows / max(batch.nbytes, 1)))
    for start in range(0, batch.num_rows, rows):
        yield start, batch.slice(start, rows)


def _show(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
