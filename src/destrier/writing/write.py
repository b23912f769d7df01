"""The writer: from the shards of a source to one commit, in the order of the input."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from destrier.errors import (
    ArgumentError,
    DestrierWarning,
    SourceError,
    WorkerError,
    WriteError,
)
from destrier.files import Store
from destrier.process import check_process
from destrier.table import Table
from destrier.writing.crew import Crew
from destrier.writing.destination import check_destination, field_ids, table_there
from destrier.writing.journal import Journal
from destrier.writing.layout import Layout
from destrier.writing.progress import progress
from destrier.writing.publish import discard, leave, publish, published_version
from destrier.writing.shards import Done, ShardWriter
from destrier.writing.source import FileSource, Measure, Source

__all__ = ["Written", "write_table"]

_SHOWN_SKIPPED = 3


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        uri: Of the table.
        version: That holds the rows.
        rows: Number of rows written.
        rows_read: Number of rows that the source gave.
        skipped: Number and error of each input that was skipped.
    """

    uri: str
    version: int
    rows: int
    rows_read: int
    skipped: tuple[tuple[int, str], ...] = ()


def write_table(
    source: Source,
    uri: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    mode: str = "create",
    restart: bool = False,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    compression: Mapping[str, str] | None = None,
    provenance: bool = False,
    crc: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Written:
    """Write a source as a table, or onto one.

    Args:
        source: What to write.
        uri: Of the table.
        num_workers: Processes; None is one a processor, 0 writes in this one.
        mode: ``"create"``, ``"append"`` or ``"overwrite"``.
        restart: Drop what an unfinished job has written there.
        columns: Those to keep; None keeps all.
        filter: The rows to keep, in Lance's SQL.
        compression: By column: ``"zstd"``, ``"zstd:9"``, ``"lz4"``, ``"fsst"`` or ``"none"``.
        provenance: Store file and row of the source in two more columns.
        crc: Store CRCs of linked values, for which all of them are read.
        storage_options: Of the table, as Lance takes them.

    Raises:
        SourceError: If the source is damaged, or holds what cannot be kept exactly.
        WriteError: If something is there already, or it cannot be written there.
        WorkerError: If a worker died; the same call goes on from what was finished.
    """
    check_process()
    store = Store(uri, storage_options)
    check_destination(store, mode)
    if compression and mode == "append":
        raise ArgumentError("compression= is a choice of new tables: the table has made its own")
    job = {
        "source": source.digest(),
        "mode": mode,
        "columns": None if columns is None else list(columns),
        "filter": filter,
        "compression": dict(compression or {}),
        "provenance": provenance,
        "crc": crc,
    }
    if isinstance(source, FileSource):
        num_workers = Crew.size_for(num_workers, len(source.shards()))
    with Journal(store.uri, storage_options).held() as journal:
        run = _Run(source, store, journal, mode, storage_options)
        return run.write(job, num_workers, restart=restart)


@dataclass
class _Run:
    source: Source
    store: Store
    journal: Journal
    mode: str
    storage_options: Mapping[str, str] | None

    def write(self, job: dict[str, Any], num_workers: int | None, *, restart: bool) -> Written:
        version = self._published(job)
        if version is None:
            keep = self.source.resumable and not restart
            if not keep:
                self._drop(say=not restart)
            base = self._base()
            entry = self._start(job, base, keep=keep)
            try:
                dones, layout = self._write_shards(job, entry, base, num_workers)
                version = self._publish(dones, layout, base)
            except BaseException as error:
                if self._leave(error) and isinstance(error, WorkerError):
                    raise WorkerError(
                        f"{error}; run the same again to go on from the shards that are finished"
                    ) from error
                raise
        summary = (self.journal.publishing() or {})["summary"]
        self.journal.clear()
        return self._written(version, **summary)

    def _published(self, job: dict[str, Any]) -> int | None:
        """The version that a killed run of this job has published, but for the clearing up."""
        version = published_version(self.journal, self.store.uri, self.storage_options)
        if version is not None and not self.journal.matches(job):
            self.journal.clear()
            return None
        return version

    def _drop(self, *, say: bool) -> None:
        if self.journal.read("job.json") is None:
            return
        if say:
            warnings.warn(
                f"the job in {self.journal.shown} was not finished, and its inputs cannot be "
                "asked for again: it starts anew",
                DestrierWarning,
                stacklevel=5,
            )
        discard(self.journal, self.store.uri, self.storage_options)

    def _base(self) -> Table | None:
        """The table that is there; raise if it must not be, or must."""
        unfinished = self.journal.publishing() is not None
        return table_there(self.store, self.mode, unfinished=unfinished)

    def _start(self, job: dict[str, Any], base: Table | None, *, keep: bool) -> dict[str, Any]:
        """Begin or go on; files for other columns than the table has now would not fit it."""
        columns = field_ids(base) if base is not None and self.mode == "append" else None
        return self.journal.start({**job, "columns of the table": columns}, keep=keep)

    def _write_shards(
        self,
        job: dict[str, Any],
        entry: dict[str, Any],
        base: Table | None,
        num_workers: int | None,
    ) -> tuple[dict[int, dict[str, Any]], Layout]:
        appended = base if self.mode == "append" else None
        writer = ShardWriter(
            self.source,
            self.journal.store.uri,
            self.storage_options,
            columns=None if job["columns"] is None else tuple(job["columns"]),
            filter=job["filter"],
            compression=job["compression"],
            provenance=job["provenance"],
            crc=job["crc"],
            target=None if appended is None else (appended.schema, appended.name),
            version="2.2" if appended is None else appended.dataset.data_storage_version,
        )
        dones = self.journal.done()
        inputs = self.source.total_inputs
        total, what = (self.source.total_rows, "rows") if inputs is None else (inputs, "inputs")
        with progress("writing", total, what) as note:
            note(sum(done["noted"] for done in dones.values()))
            with Crew(writer, num_workers, on_note=note) as crew:
                if isinstance(self.source, FileSource):
                    crew.hire(len(self.source.shards()) - len(dones))
                else:
                    crew.hire()
                layout, measure = self._first(crew, entry, dones)
                tasks = (
                    shard and (shard, layout)
                    for shard in self.source.rest(measure)
                    if shard is None or shard.index not in dones
                )
                for _, done in crew.run(tasks):
                    self._finish(done, dones)
        return dones, layout

    def _first(
        self, crew: Crew, entry: dict[str, Any], dones: dict[int, dict[str, Any]]
    ) -> tuple[Layout, Measure]:
        """The first shard fixes the layout before any other is written."""
        shard = self.source.first()
        if shard.index in dones and "layout" in entry:
            return Layout.from_json(entry["layout"]), Measure(**entry["measure"])
        ((_, done),) = crew.run([(shard, None)])
        measure = Measure(done.rows_in, done.nbytes, done.seconds)
        self.journal.write(
            "job.json",
            {**entry, "layout": done.layout.to_json(), "measure": vars(measure)},
        )
        self._finish(done, dones)
        return done.layout, measure

    def _finish(self, done: Done, dones: dict[int, dict[str, Any]]) -> None:
        dones[done.index] = done.to_json()
        self.journal.finish(dones[done.index])

    def _publish(self, dones: dict[int, dict[str, Any]], layout: Layout, base: Table | None) -> int:
        if sorted(dones) != list(range(len(dones))):
            raise WriteError(f"shards are missing: {len(dones)} are done, the last is {max(dones)}")
        total = self.source.total_rows
        read = sum(done["rows_in"] for done in dones.values())
        if total is not None and read != total:
            raise SourceError(f"{self.source.shown} gave {read} rows, but declares {total}")
        ordered = [dones[index] for index in sorted(dones)]
        return publish(
            self.journal,
            self.store.uri,
            layout.stored,
            [text for done in ordered for text in done["fragments"]],
            overwrite=self.mode != "append",
            base=base,
            storage_options=self.storage_options,
            summary={
                "rows": sum(done["rows_out"] for done in ordered),
                "rows_read": read,
                "skipped": [each for done in ordered for each in done["skipped"]],
            },
        )

    def _leave(self, error: BaseException) -> bool:
        return leave(
            self.journal,
            self.store.uri,
            self.storage_options,
            error,
            resumable=self.source.resumable,
        )

    def _written(
        self, version: int, rows: int, rows_read: int, skipped: list[tuple[int, str]]
    ) -> Written:
        if skipped:
            shown = "; ".join(f"{i}: {e}" for i, e in skipped[:_SHOWN_SKIPPED])
            warnings.warn(
                f"{len(skipped)} inputs were skipped: {shown}"
                + (" ..." if len(skipped) > _SHOWN_SKIPPED else ""),
                DestrierWarning,
                stacklevel=5,
            )
        pairs = tuple((int(number), str(error)) for number, error in skipped)
        return Written(self.store.uri, version, rows, rows_read, pairs)
