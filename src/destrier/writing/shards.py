"""Writes one shard of a source as Lance fragments, in a worker."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa

from destrier.errors import DestrierError, SourceError, WriteError
from destrier.lancecalls import lance_call, redact
from destrier.saving import hand_over
from destrier.writing.crew import Note
from destrier.writing.filtering import RowFilter
from destrier.writing.layout import Layout, Origin
from destrier.writing.source import Shard, Source, Unit

__all__ = ["Done", "NoRowsError", "ShardWriter"]

_SAMPLE_BYTES = 32 << 20  # of the first shard, by which the layout is chosen
_FRAGMENT_BYTES = 256 << 20
_FORMAT = "2.2"

_Part: TypeAlias = "tuple[pa.RecordBatch, str, Origin | None]"
"""Rows, the name of their unit, and where each came from if that is stored."""


class NoRowsError(SourceError):
    """The first shard gave no row, and the columns are not declared.

    Attributes:
        skipped: Number and error of each input that was skipped.
    """

    def __init__(self, message: str, skipped: list[tuple[int, str]]) -> None:
        super().__init__(message)
        self.skipped = skipped

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.skipped)


@dataclass(frozen=True)
class Done:
    """A finished shard.

    Attributes:
        index: Its number.
        fragments: What was written, as Lance's JSON.
        rows_in: Number of rows that were read, or of inputs of a function.
        rows_out: Number of rows that were written.
        noted: What was noted of its progress.
        nbytes: Size of the rows that were written.
        seconds: What it took.
        skipped: Number and error of each input that was skipped.
        layout: Of the table.
    """

    index: int
    fragments: list[str]
    rows_in: int
    rows_out: int
    noted: int
    nbytes: int
    seconds: float
    skipped: list[tuple[int, str]]
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        """For the journal; the layout is kept with the job."""
        return {
            "index": self.index,
            "fragments": self.fragments,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "noted": self.noted,
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class ShardWriter:
    """The work of a worker: from a shard and the layout, if it is fixed yet, to fragments.

    Attributes:
        source: What is read.
        uri: The folder that the fragments are written to.
        storage_options: Of that folder.
        columns: The columns to keep, or None for all.
        filter: Rows to keep, in Lance's SQL.
        compression: By column.
        provenance: Whether file and row are stored.
        crc: Whether CRCs of linked values are stored.
        target: Schema of the table that is appended to, and its name; or None.
        version: Lance's storage version.
    """

    source: Source
    uri: str
    storage_options: Mapping[str, str] | None = None
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    compression: Mapping[str, str] | None = None
    provenance: bool = False
    crc: bool = False
    target: tuple[pa.Schema, str] | None = None
    version: str = _FORMAT

    def __call__(self, task: tuple[Shard, Layout | None], note: Note) -> Done:
        """Write a shard."""
        shard, layout = task
        return _ShardRun(self, shard, layout, note).write()


@dataclass
class _ShardRun:
    job: ShardWriter
    shard: Shard
    layout: Layout | None
    note: Note
    rows_in: int = 0
    rows_out: int = 0
    noted: int = 0
    nbytes: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)
    known: pa.Schema | None = None  # of the source's batches

    def write(self) -> Done:
        from lance.fragment import write_fragments

        began = time.perf_counter()
        parts = self._rows()
        first = self._sample(parts) if self.layout is None else []
        layout = self.layout
        assert layout is not None
        secrets = tuple((self.job.storage_options or {}).values())

        def stored() -> Iterator[pa.RecordBatch]:
            while first:
                yield self._stored(layout, *first.pop(0))
            for part in parts:
                yield self._stored(layout, *part)

        def write(batches: Iterator[pa.RecordBatch]) -> Any:
            reader = pa.RecordBatchReader.from_batches(layout.stored, batches)
            try:
                return lance_call(
                    f"writing {redact(self.job.uri)}",
                    lambda: write_fragments(
                        reader,
                        self.job.uri,
                        schema=layout.stored,
                        mode="create",
                        max_rows_per_file=max(1, int(_FRAGMENT_BYTES // layout.row_bytes)),
                        max_rows_per_group=1024,
                        data_storage_version=self.job.version,
                        storage_options=dict(self.job.storage_options or {}) or None,
                        allow_external_blob_outside_bases=True,
                    ),
                    secrets,
                )
            except DestrierError as error:
                raise _cause(str(error)) from error

        fragments = hand_over(stored(), write)
        fragments = [f for f in fragments if f.physical_rows]
        written = sum(f.physical_rows for f in fragments)
        if written != self.rows_out:
            raise WriteError(
                f"Lance wrote {written} rows of shard {self.shard.index}, not {self.rows_out}"
            )
        return Done(
            self.shard.index,
            [json.dumps(f.to_json()) for f in fragments],
            self.rows_in,
            self.rows_out,
            self.noted,
            self.nbytes,
            time.perf_counter() - began,
            self.skipped,
            layout,
        )

    def _sample(self, parts: Iterator[_Part]) -> list[_Part]:
        """The first rows of the first shard, from which the layout is chosen."""
        first: list[_Part] = []
        held = 0
        for part in parts:
            first.append(part)
            held += part[0].nbytes
            if held >= _SAMPLE_BYTES:
                break
        schema = self.known
        if schema is None:
            text = f"no row came from {self.job.source.shown}, so the columns are not known"
            if self.skipped:
                number, error = self.skipped[0]
                text += (
                    f" ({len(self.skipped)} inputs were skipped, the first is {number}: {error})"
                )
            raise NoRowsError(f"{text}: declare schema=", self.skipped)
        layout = Layout.choose(
            schema,
            [batch for batch, _, _ in first],
            columns=self.job.columns,
            compression=self.job.compression,
            provenance=self.job.provenance,
            crc=self.job.crc,
        )
        if self.job.target is not None:
            layout = layout.fit(*self.job.target)
        self.layout = layout
        return first

    def _stored(
        self, layout: Layout, batch: pa.RecordBatch, file: str, origin: Origin | None
    ) -> pa.RecordBatch:
        self.rows_out += batch.num_rows
        self.nbytes += batch.nbytes
        return layout.store(batch, file, origin, self.job.storage_options)

    def _rows(self) -> Iterator[_Part]:
        """The rows that are kept, with the name of their unit and where they came from."""
        chosen = None if self.job.filter is None else RowFilter(self.job.filter)
        for unit in self.shard.units:
            count = 0
            for batch in self._batches(unit):
                origin = None
                if self.job.provenance:
                    origin = self.job.source.origins(unit, count, batch.num_rows)
                kept, origin = _keep(chosen, batch, origin)
                if kept.num_rows:
                    yield kept, unit.name, origin
                count += batch.num_rows
                if unit.inputs is None:
                    self._note(batch.num_rows)
            taken = getattr(self.job.source, "taken", None)
            if unit.inputs is not None:
                self._note(unit.inputs if taken is None else taken)
            self.rows_in += count if taken is None else taken
            failures = getattr(self.job.source, "failures", None)
            if failures:
                self.skipped.extend(failures)
                failures.clear()
            if unit.rows is not None and count != unit.rows:
                raise SourceError(
                    f"{unit.name} gave {count} rows, but {unit.rows} are declared",
                    file=unit.file or unit.name,
                )

    def _note(self, count: int) -> None:
        self.noted += count
        self.note(count)

    def _batches(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        source = self.job.source
        if self.known is None:
            self.known = source.schema if self.layout is None else self.layout.source
        try:
            for batch in source.read(unit, self.known):
                if self.known is None:
                    self.known = batch.schema
                yield batch
        except UnicodeError as error:
            raise SourceError(
                f"{unit.name} has text that UTF-8 cannot hold: {error}", file=unit.file or unit.name
            ) from error


def _keep(
    chosen: RowFilter | None, batch: pa.RecordBatch, origin: Origin | None
) -> tuple[pa.RecordBatch, Origin | None]:
    if chosen is None:
        return batch, origin
    rows = chosen.rows(batch)
    if len(rows) == batch.num_rows:
        return batch, origin
    places = pa.array(rows)
    return batch.take(places), origin and (origin[0].take(places), origin[1].take(places))


def _cause(text: str) -> WriteError:
    if "No space left" in text or f"os error {errno.ENOSPC}" in text:
        return WriteError(errno.ENOSPC, f"no space is left: {text}")
    return WriteError(text)
