"""The work of `add_columns` in a worker: one fragment's new columns, by a user's function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.editing.changes import write_through
from destrier.editing.conform import blob_array, one_kind
from destrier.encoding.copies import copied_array
from destrier.encoding.frozen import freeze
from destrier.encoding.misfit import Misfit
from destrier.encoding.values import encode
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierError,
    LengthError,
    ReadError,
    SchemaError,
    TransformError,
)
from destrier.lancecalls import lance_call
from destrier.table import Table
from destrier.writing.crew import Note
from destrier.writing.layout import is_blob

__all__ = ["Computer", "Task", "check_new"]

_BLOB_FORMAT = (2, 2)
_READ_AHEAD = 2  # batches
_READ_BYTES = 64 << 20


def check_new(table: Table, schema: pa.Schema) -> None:
    """Raise unless columns can be added to a table.

    Raises:
        ColumnError: Naming the column.
    """
    if not schema.names:
        raise ColumnError("there is no new column")
    # Lance would write what it cannot read
    old = tuple(map(int, table.dataset.data_storage_version.split("."))) < _BLOB_FORMAT
    for place, field in enumerate(schema):
        name = field.name
        if name in table.schema.names:
            raise ColumnError(
                f"column {name!r} is in {table.name} already: choose another name, or drop it "
                f"first with lance.dataset(uri).drop_columns([{name!r}])"
            )
        if name in schema.names[:place]:
            raise ColumnError(f"the new column {name!r} is there twice")
        if not name or name.startswith("_row") or "." in name:
            raise ColumnError(f"a column cannot be named {name!r} in a Lance table")
        if old and is_blob(field):
            raise ColumnError(
                f"{table.name} is of Lance's format {table.dataset.data_storage_version}, which "
                f"cannot hold the blobs of the new column {name!r}: declare large_binary"
            )
        if not field.nullable:
            raise ColumnError(
                f"the new column {name!r} must be nullable, for deleted rows have no value"
            )


@dataclass(frozen=True)
class Task:
    """A fragment to compute.

    Attributes:
        table: What is read.
        staged: A clone of it, to which the columns are written; None only finds the schema.
        fragment: Its id.
        first: The offset of its first row.
        schema: Of the new columns.
    """

    table: Table
    staged: Table | None
    fragment: int
    first: int
    schema: pa.Schema | None


@dataclass
class Computer:
    """From a task to the new columns of its fragment.

    Attributes:
        function: The user's.
        columns: What it gets.
        batch_size: Most rows at a time.
        declared: Whether the user gave the new columns' schema, to which values may be cast where
            that is exact.
    """

    function: Callable[[pa.RecordBatch], Any]
    columns: tuple[str, ...]
    batch_size: int
    declared: bool

    def __call__(self, task: Task, note: Note) -> Any:
        """Compute a fragment.

        Returns:
            Its metadata before and its new file, for the journal; or the schema of the new
            columns, if it was asked for.
        """
        if task.staged is None:
            offset, batch = next(self._batches(task))
            return self._new(batch, None, offset, task.table.name).schema
        assert task.schema is not None
        return self._write(task, task.staged, task.schema, note)

    def _write(self, task: Task, staged: Table, schema: pa.Schema, note: Note) -> dict[str, Any]:
        fragment = staged.dataset.get_fragment(task.fragment)
        assert fragment is not None
        before = task.table.dataset.get_fragment(task.fragment)
        assert before is not None

        def rows() -> Iterator[pa.RecordBatch]:
            for offset, batch in self._batches(task):
                yield self._new(batch, schema, offset, task.table.name)
                note(batch.num_rows)

        metadata, extended = write_through(
            rows(),
            schema,
            fragment.merge_columns,
            f"writing new columns of {task.table.name}",
            staged.secrets,
        )
        first = extended.field(schema.names[0])
        assert first is not None
        written = json.loads(json.dumps(metadata.to_json()))
        return {
            "index": task.fragment,
            "base": json.loads(json.dumps(before.metadata.to_json())),
            "file": written["files"][-1],
            "first": first.id(),
        }

    def _batches(self, task: Task) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The live rows of the fragment, with the offset of each batch's first one."""
        table, offset = task.table, task.first
        fragment = table.dataset.get_fragment(task.fragment)
        assert fragment is not None
        end = offset + fragment.metadata.num_rows
        if any(is_blob(table.schema.field(name)) for name in self.columns):
            from destrier.read import Reader  # which imports torch

            reader = Reader(table, list(self.columns))
            while offset < end:
                stop = min(offset + self.batch_size, end)
                yield offset, reader.read(np.arange(offset, stop)).batch
                offset = stop
            return
        scanner = table.dataset.scanner(
            columns=list(self.columns),
            fragments=[fragment],
            batch_size=self.batch_size,
            strict_batch_size=True,
            batch_readahead=_READ_AHEAD,
            io_buffer_size=_READ_BYTES,
        )
        doing = f"reading {table.name}"
        batches = lance_call(doing, lambda: iter(scanner.to_batches()), table.secrets)
        while batch := lance_call(doing, lambda: next(batches, None), table.secrets):
            yield offset, batch
            offset += batch.num_rows
        if offset != end:
            raise ReadError(f"{table.name}: read {offset} rows of {end}")

    def _new(
        self, batch: pa.RecordBatch, schema: pa.Schema | None, offset: int, name: str
    ) -> pa.RecordBatch:
        """The new columns of a batch, as the schema has them."""
        rows = f"rows {offset} to {offset + batch.num_rows - 1} of {name}"
        try:
            given = self.function(batch)
        except DestrierError:
            raise
        except Exception as error:
            raise TransformError(
                f"the function failed on {rows}: {type(error).__name__}: {error}", offset=offset
            ) from error
        arrays = _arrays(given, schema, rows, self.declared)
        for column, array in arrays.items():
            if len(array) != batch.num_rows:
                raise LengthError(
                    f"the function returned {len(array)} values of column {column!r} for the "
                    f"{batch.num_rows} {rows}; it must return one for each row",
                    offset=offset,
                    column=column,
                )
        if schema is None:
            return _first_batch(arrays, rows)
        if set(arrays) != set(schema.names):
            raise SchemaError(
                f"the function returned the columns {', '.join(arrays)} for {rows}; those to add "
                f"are {', '.join(schema.names)}",
                row=offset,
            )
        columns = [_fit(arrays[field.name], field, rows, offset) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _first_batch(arrays: Mapping[str, pa.Array], rows: str) -> pa.RecordBatch:
    for column, array in arrays.items():
        if pa.types.is_null(array.type):
            raise SchemaError(
                f"the function returned only nulls in column {column!r} for {rows}, which have no "
                "type: pass schema=",
                column=column,
            )
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


def _arrays(given: Any, schema: pa.Schema | None, rows: str, declared: bool) -> dict[str, pa.Array]:
    if isinstance(given, pa.RecordBatch | pa.Table):
        given = dict(zip(given.schema.names, given.columns, strict=True))
    if not isinstance(given, Mapping):
        raise TransformError(
            f"the function returned {type(given).__name__} for {rows}; it must return a "
            "RecordBatch, or a dict from the new columns' names to arrays or lists"
        )
    found = {}
    for name, values in given.items():
        if not isinstance(name, str):
            raise ArgumentError(f"the name of a new column is {name!r}, not a str")
        field = schema.field(name) if schema is not None and name in schema.names else None
        found[name] = _array(name, values, field, rows, declared)
    return found


def _array(name: str, values: Any, field: pa.Field | None, rows: str, declared: bool) -> pa.Array:
    # copies, since a function may fill the same memory for each batch
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return copied_array(values)
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biuf":
        array = pa.array(values.copy())
        if field is None or array.type == field.type:
            return array
    elif isinstance(values, np.ndarray) and values.ndim:
        values = list(np.ascontiguousarray(values))
    elif not isinstance(values, list | tuple):
        raise TransformError(
            f"the function returned {type(values).__name__} as column {name!r} for {rows}; a "
            "column is an array of Arrow or numpy, a tensor, or a list"
        )
    return _encoded(name, values, field, rows, declared)


def _encoded(
    name: str, values: Sequence[Any], field: pa.Field | None, rows: str, declared: bool
) -> pa.Array:
    want = None if field is None else pa.large_binary() if is_blob(field) else field.type
    if not len(values):
        return pa.nulls(0, want or pa.null())
    try:
        return encode([freeze(value)[0] for value in values], want, declared=declared)
    except Misfit as misfit:
        raise SchemaError(
            f"the function returned in column {name!r}{misfit.path}, at {misfit.index} of {rows}: "
            f"{misfit.text}",
            column=name,
        ) from None


def _fit(array: pa.Array, field: pa.Field, rows: str, offset: int) -> pa.Array:
    if array.type == field.type:
        return array
    wanted = pa.large_binary() if is_blob(field) else field.type
    if one_kind(array.type) != one_kind(wanted):
        raise SchemaError(
            f"the function returned {array.type} in column {field.name!r} for {rows}, but the "
            f"column is {wanted}; nothing is coerced: cast it in the function, or declare schema=",
            row=offset,
            column=field.name,
        )
    array = array.cast(wanted)
    return blob_array(array) if is_blob(field) else array
