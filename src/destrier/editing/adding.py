"""New columns of a table, computed in parallel, without rewriting what is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import lance
import pyarrow as pa

from destrier.check import integer
from destrier.editing.changes import latest, plan_expression
from destrier.editing.newcolumns import Computer, Task, check_new
from destrier.errors import ArgumentError, ColumnError, ReadError, WorkerError, WriteError
from destrier.files import Store
from destrier.jobs.fingerprint import fingerprint
from destrier.lancecalls import lance_call
from destrier.table import Table
from destrier.writing.crew import Crew
from destrier.writing.journal import Journal
from destrier.writing.layout import is_blob, packed_schema, unpacked_schema
from destrier.writing.progress import progress
from destrier.writing.publish import commit_files, discard, leave, published_version, stage_clone

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = ["add_columns"]

Function: TypeAlias = "Callable[[pa.RecordBatch], Any]"

_ATTEMPTS = 10  # to commit, where others commit to the table at the same time
_CONFLICTS = ("commit conflict", "Incompatible transaction")
_LEGACY = "0.1"
_BATCH_ROWS = 1024
_BLOB_ROWS = 64
_BATCH_BYTES = 64 << 20


def add_columns(
    table: TableLike,
    what: Mapping[str, str] | Function,
    *,
    columns: Sequence[str] | None = None,
    schema: pa.Schema | None = None,
    batch_size: int | None = None,
    num_workers: int | None = None,
    restart: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> int:
    """Add columns, from SQL or from a function of the rows. The other columns are not rewritten.

    The function is run in worker processes, one fragment of the table at a time. A finished
    fragment is kept beside the table in ``URI.adding``, so that the same call goes on after a kill;
    all become visible in one commit. Rows that others append meanwhile are computed too.

    Args:
        table: The table.
        what: By name an expression in Lance's SQL; or a function that is called with RecordBatches
            and returns the new columns of their rows: a RecordBatch, or a dict of Arrow arrays,
            numpy arrays, torch tensors or lists.
        columns: Those that the function gets; None gives it all. Blobs come as bytes.
        schema: Of the new columns; None takes the types that the function returns for the first
            rows, which are then enforced.
        batch_size: Most rows in a batch; None is 1,024, or 64 with blob columns, and fewer of
            wide rows.
        num_workers: Processes; None is one a processor, 0 computes in this one.
        restart: Drop what an unfinished call has computed.
        storage_options: Passed to Lance untouched.

    Returns:
        The version with the new columns.

    Raises:
        ColumnError: If a new column is there already, or one to read is not.
        FilterError: If Lance cannot run an expression.
        TransformError: If the function raises, naming the rows.
        LengthError: If it returns another number of rows than it was given.
        SchemaError: If it returns another type than before, or than the schema's.
        WriteError: If the journal is of another call, or it cannot be written.

    Example:
        >>> add_columns("digits.lance", {"twice": "label * 2"})  # doctest: +SKIP
        2
        >>> def size(batch):
        ...     return {"size": [len(image.as_py()) for image in batch["image"]]}
        >>> add_columns("digits.lance", size, columns=["image"])  # doctest: +SKIP
        3
    """
    opened = latest(table, storage_options)
    if isinstance(what, Mapping):
        return _add_sql(opened, what)
    if not callable(what):
        raise ArgumentError(
            "new columns come from a dict of SQL expressions, or from a function; "
            f"got {type(what).__name__}"
        )
    if opened.dataset.data_storage_version == _LEGACY:
        raise WriteError(
            f"{opened.name} is of Lance's format {_LEGACY}, to which only columns in SQL can be "
            "added: write it anew with merge()"
        )
    names = opened.schema.names if columns is None else list(columns)
    if not names:
        raise ColumnError("columns is empty: name at least one column that the function gets")
    opened.check_columns(names)
    if schema is not None:
        check_new(opened, schema)
    if batch_size is not None:
        integer("batch_size", batch_size, 1)
    computer = Computer(
        what, tuple(names), batch_size or _batch_size(opened, names), schema is not None
    )
    job = {
        "job": "add_columns",
        "function": fingerprint(what),
        "columns": [[name, _field_id(opened.dataset, name)] for name in names],
        "schema": None if schema is None else packed_schema(schema),
    }
    with Journal(opened.uri, opened.storage_options, kind="adding").held() as journal:
        return _Run(opened, journal, computer, schema, num_workers).run(job, restart=restart)


def _add_sql(table: Table, expressions: Mapping[str, str]) -> int:
    if not expressions:
        raise ArgumentError("no expression is given: pass a dict from name to SQL")
    check_new(table, pa.schema([pa.field(name, pa.null()) for name in expressions]))
    for name, expression in expressions.items():
        what = f"the expression {expression!r} for column {name!r}"
        plan_expression(table, what, expression, table.schema.names[0])
    dataset = table.dataset
    try:
        lance_call(
            f"adding columns to {table.name}",
            lambda: dataset.add_columns(dict(expressions)),
            table.secrets,
        )
    except ReadError as error:
        raise WriteError(f"{error}; the table is as it was") from error
    return int(dataset.version)


@dataclass
class _Run:
    table: Table
    journal: Journal
    computer: Computer
    schema: pa.Schema | None
    num_workers: int | None
    stage: str = ""  # the folder in the journal that is written to

    def run(self, job: dict[str, Any], *, restart: bool) -> int:
        uri, options = self.table.uri, self.table.storage_options
        version = published_version(self.journal, uri, options)
        if version is not None:  # by a run that was killed before it could clear up
            fits = self.journal.matches(job)
            self.journal.clear()
            if fits and not restart:
                return version
        elif restart:
            discard(self.journal, uri, options)
        entry = self.journal.start(job, keep=True)
        if self.schema is None and "fixed" in entry:
            self.schema = unpacked_schema(entry["fixed"])
        try:
            with (
                progress("adding columns", self.table.num_rows) as note,
                Crew(self.computer, self.num_workers, on_note=note) as crew,
            ):
                if self.schema is None:
                    self.schema = self._probe(crew)
                    self.journal.write("job.json", {**entry, "fixed": packed_schema(self.schema)})
                version = self._until_committed(crew, self.schema)
        except BaseException as error:
            if leave(self.journal, uri, options, error) and isinstance(error, WorkerError):
                raise WorkerError(
                    f"{error}; run the same again to go on from the fragments that are finished"
                ) from error
            raise
        self.journal.clear()
        return version

    def _probe(self, crew: Crew) -> pa.Schema:
        fragments = self.table.dataset.get_fragments()
        if not fragments:
            raise ArgumentError(
                f"{self.table.name} has no rows, from which the new columns' types could be "
                "found out: pass schema="
            )
        task = Task(self.table, None, fragments[0].fragment_id, 0, None)
        ((_, schema),) = crew.run([task])
        check_new(self.table, schema)
        assert isinstance(schema, pa.Schema)
        return schema

    def _until_committed(self, crew: Crew, schema: pa.Schema) -> int:
        for _ in range(_ATTEMPTS):
            check_new(self.table, schema)
            self.table.check_columns(list(self.computer.columns))
            self.stage, staged = stage_clone(self.journal, self.table)
            done = self._usable()
            for _number, result in crew.run(self._tasks(staged, done, schema)):
                self.journal.finish({**result, "stage": self.stage})
                done[result["index"]] = {**result, "stage": self.stage}
            version = self._commit(staged, done, schema)
            if version is not None:
                return version
            self.table = latest(self.table)
        raise WriteError(
            f"others commit to {self.table.name} all the time, so that the columns could not be "
            "added; what was computed is kept: run the same again when they are done"
        )

    def _usable(self) -> dict[int, dict[str, Any]]:
        """What was computed of fragments that are as they were; the rest is dropped."""
        target = Store(self.table.uri, self.table.storage_options)
        now = {f.fragment_id: _fragment_json(f) for f in self.table.dataset.get_fragments()}
        found = {}
        for index, entry in self.journal.done().items():
            if index in now and _same_values(entry["base"], now[index]):
                found[index] = entry
                continue
            name = entry["file"]["path"]
            target.remove(f"data/{name}")
            target.remove(f"data/{name.removesuffix('.lance')}")
            self.journal.store.remove(f"done/{index:08d}.json")
        return found

    def _tasks(self, staged: Table, done: Mapping[int, Any], schema: pa.Schema) -> Iterator[Task]:
        first = 0
        for fragment in self.table.dataset.get_fragments():
            if fragment.fragment_id not in done:
                yield Task(self.table, staged, fragment.fragment_id, first, schema)
            first += fragment.metadata.num_rows

    def _commit(
        self, staged: Table, done: Mapping[int, dict[str, Any]], schema: pa.Schema
    ) -> int | None:
        """Make all columns visible; None if the table was changed meanwhile."""
        dataset = staged.dataset
        lance_call("extending the schema", lambda: dataset.add_columns(schema), staged.secrets)
        first = _field_id(dataset, schema.names[0])
        fragments, stages = [], dict[str, list[str]]()
        for fragment in self.table.dataset.get_fragments():
            entry = done[fragment.fragment_id]
            stages.setdefault(entry["stage"], []).append(entry["file"]["path"])
            # other columns may have come meanwhile, and taken the numbers
            numbers = [number - entry["first"] + first for number in entry["file"]["fields"]]
            metadata = _fragment_json(fragment)
            metadata["files"].append({**entry["file"], "fields": numbers})
            fragments.append(lance.FragmentMetadata.from_json(json.dumps(metadata)))
        try:
            return commit_files(
                self.journal,
                Store(self.table.uri, self.table.storage_options),
                [(self.journal.store.at(stage), each) for stage, each in stages.items()],
                lance.LanceOperation.Merge(fragments, dataset.lance_schema),
                read_version=self.table.version,
            )
        except ReadError as error:
            if any(words in str(error) for words in _CONFLICTS):
                return None
            raise WriteError(f"{error}; what was computed is kept: run the same again") from error


def _fragment_json(fragment: lance.LanceFragment) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(fragment.metadata.to_json()))
    return value


def _same_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a fragment holds the values it held; rows of it may have been deleted since.

    Columns that came or went are other files, or other numbers in them.
    """
    kept = [file for file in now["files"] if file in before["files"]]
    keys = ("physical_rows", "overlays")
    return kept == before["files"] and all(before.get(key) == now.get(key) for key in keys)


def _field_id(dataset: lance.LanceDataset, name: str) -> int:
    found = dataset.lance_schema.field(name)
    assert found is not None
    return int(found.id())


def _batch_size(table: Table, columns: list[str]) -> int:
    blobs = any(is_blob(table.schema.field(name)) for name in columns)
    rows = _BLOB_ROWS if blobs else _BATCH_ROWS
    return max(1, min(rows, int(_BATCH_BYTES / table.row_bytes)))
