"""Tables as datasets of other formats."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, DestrierError, EmptyError, SourceError, WriteError
from destrier.files import Store
from destrier.formats import open_sink
from destrier.read import Reader
from destrier.selection import RowList, select_rows
from destrier.sink import Sink
from destrier.table import Table, open_table
from destrier.writing.crew import Crew, Note
from destrier.writing.journal import Journal
from destrier.writing.layout import COUNT_KEY, LINK_KEY
from destrier.writing.progress import progress
from destrier.writing.source import BATCH_BYTES

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = ["Exported", "export", "exported_columns", "exported_schema"]

_RANGE_BYTES = 64 << 20
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        uri: Where it lies.
        rows: Number of rows.
        files: Number of files.
    """

    uri: str
    rows: int
    files: int


def export(
    table: TableLike,
    dst: str | os.PathLike[str],
    *,
    format: str,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    permutation: Any = None,
    num_workers: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    destination_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Exported:
    """Write a table as a dataset of another format, which that format's own library reads.

    Columns that came from the same format go back as they were; others by their type. What the
    format cannot hold is refused by name.

    Args:
        table: The table.
        dst: A new or empty folder, or its URI.
        format: ``"litdata"``, ``"mds"``, ``"parquet"`` or ``"webdataset"``.
        columns: The columns to export; None is all but those that the writer made (counts, links).
        filter: The rows to export, in Lance's SQL.
        permutation: A list of rows in their order, as streams take it; not with a filter.
        num_workers: Processes; None is one a processor, 0 works in this process.
        storage_options: Of the table.
        destination_options: Of the store that is written to.
        options: Those of the format, which its page in the documentation names.

    Raises:
        ColumnError: If the format cannot hold a column.
        SourceError: If it cannot hold a value; the message names the row.
        WriteError: If something is there already, or it cannot be written there.

    Example:
        >>> import destrier
        >>> destrier.export("data/digits.lance", "data/mds", format="mds")  # doctest: +SKIP
    """
    sink = open_sink(format, options)
    opened = open_table(table, storage_options=storage_options)
    rows, opened = _rows(opened, filter, permutation)
    names = exported_columns(opened) if columns is None else list(columns)
    opened.check_columns(names)
    sink.check(exported_schema(opened, names))
    target = Store(dst, destination_options)
    size = max(1, min(len(rows), int(_RANGE_BYTES // max(opened.row_bytes, 1.0))))
    starts = range(0, len(rows), size)
    with Journal(target.uri, destination_options, kind="exporting").held() as journal:
        _check_empty(target)
        journal.start({"export": format}, keep=False)
        # in a bucket nothing can be renamed: files are written in place, and the index at the end
        draft = journal.store.at("files") if target.local else target
        try:
            job = _Export(opened, names, rows, size, sink, draft)
            infos: dict[int, Any] = {}
            with (
                progress("exporting", len(rows)) as note,
                Crew(job, Crew.size_for(num_workers, len(starts)), on_note=note) as crew,
            ):
                infos.update(crew.run(range(len(starts))))
            sink.finish(draft, [infos[number] for number in range(len(starts))])
            if target.local:
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(target.uri)
                os.rename(draft.uri, target.uri)
        except BaseException as error:
            with contextlib.suppress(SourceError):
                draft.remove()
            if isinstance(error, OSError) and not isinstance(error, DestrierError):
                raise WriteError(error.errno, f"cannot write {target.shown}: {error}") from error
            raise
        finally:
            journal.clear()
    return Exported(target.uri, len(rows), len(target.files()))


def _check_empty(target: Store) -> None:
    if target.holds_anything():
        raise WriteError(f"there is something at {target.shown} already: choose an empty place")


def _rows(table: Table, filter: str | None, permutation: Any) -> tuple[RowList, Table]:
    if permutation is None:
        rows = select_rows(table, filter)
    else:
        if filter is not None:
            raise ArgumentError("filter and permutation both choose rows: pass one of them")
        from destrier.foreign import as_permutation

        listing, table = as_permutation(permutation, table)
        listing.check_table(table)
        rows = listing.rows
    if not len(rows):
        raise EmptyError(f"{table.name} has no row to export")
    return rows, table


def exported_columns(table: Table) -> list[str]:
    """All columns but those that the writer made: counts, and the addresses of links."""
    companions = {(field.metadata or {}).get(LINK_KEY, b"").decode() for field in table.schema}
    return [
        field.name
        for field in table.schema
        if COUNT_KEY not in (field.metadata or {}) and field.name not in companions
    ]


def exported_schema(table: Table, names: Sequence[str]) -> pa.Schema:
    """As a sink gets it: blobs are bytes, and nothing says how Lance keeps a column."""
    read = Reader(table, list(names)).schema
    fields = []
    for field in (read.field(name) for name in names):
        metadata = {
            key: value
            for key, value in (field.metadata or {}).items()
            if not key.startswith(b"lance-encoding:")
        }
        fields.append(field.with_metadata(metadata or None))
    return pa.schema(fields, metadata=table.schema.metadata)


@dataclass(frozen=True)
class _Export:
    table: Table
    names: list[str]
    rows: RowList
    size: int
    sink: Sink
    store: Store

    def __call__(self, number: int, note: Note) -> Any:
        """Write one range of rows."""
        start = number * self.size
        stop = min(start + self.size, len(self.rows))
        try:
            return self.sink.write(self.store, number, self._batches(start, stop, note))
        except SourceError as error:
            if error.row is None:
                raise
            offset = int(self.rows.offsets(np.array([start + error.row]))[0])
            raise type(error)(
                f"row {offset} of {self.table.name} cannot be exported: {error}",
                row=offset,
                column=error.column,
            ) from error

    def _batches(self, start: int, stop: int, note: Note) -> Iterator[pa.RecordBatch]:
        reader = Reader(self.table, self.names)
        schema = exported_schema(self.table, self.names)
        step = max(1, min(_BATCH_ROWS, int(BATCH_BYTES // max(self.table.row_bytes, 1.0))))
        for first in range(start, stop, step):
            positions = np.arange(first, min(first + step, stop))
            rows = reader.read(self.rows.offsets(positions))
            batch = rows.batch if rows.index is None else rows.batch.take(pa.array(rows.index))
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            note(batch.num_rows)
