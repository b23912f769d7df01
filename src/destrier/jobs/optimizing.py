"""Tables of the rows that a function makes of inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from destrier.check import integer
from destrier.errors import ArgumentError
from destrier.jobs.inputs import IterableSource, SequenceSource
from destrier.jobs.streams import ALL_DONE, is_sequence
from destrier.writing.shards import NoRowsError
from destrier.writing.write import Written, write_table

__all__ = ["ALL_DONE", "optimize"]


def optimize(
    fn: Callable[[Any], Any],
    inputs: Any,
    uri: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    num_workers: int | None = None,
    mode: str = "create",
    schema: pa.Schema | None = None,
    on_error: str = "raise",
    restart: bool = False,
    compression: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Written:
    """Write the rows that a function makes of inputs as a table, in the order of the inputs.

    The columns and their types are those of the first rows, or of ``schema``. They are enforced:
    a row of another type is an error that names it; nothing is coerced.

    Args:
        fn: Called with each input, in a worker process. It returns a row (a dict of values by
            column), a `pyarrow.RecordBatch`, or None for no row, or yields any number of rows and
            batches. A lambda, a closure or a function of a script or notebook will do.
        inputs: A sequence (with a length, reached by number); or an iterable, such as a generator
            or a loader, or a queue that ends with `ALL_DONE`, which are read in this process.
        uri: Of the table.
        batch_size: Call the function with lists of so many inputs (the last may be shorter, as may
            those of an iterable), as tokenizers want them. It returns a list of rows, one or None
            for each input, or a `pyarrow.RecordBatch` with a row for each. None calls it with each
            input.
        num_workers: Processes; None is one a processor, 0 calls the function in this one.
        mode: ``"create"``, ``"append"`` or ``"overwrite"``.
        schema: Of the rows. Values are then converted to its types, exactly or not at all.
        on_error: ``"raise"`` stops where the function raises. ``"skip"`` leaves such inputs out,
            each with all its rows, and reports them.
        restart: Drop what a call that was not finished has written. Without it the same call goes
            on where that stopped; a sequence can be continued, an iterable or a queue starts anew.
        compression: By column: ``"zstd"``, ``"zstd:9"``, ``"lz4"``, ``"fsst"`` or ``"none"``.
        storage_options: Of the table, as Lance takes them.

    Returns:
        What was written, with the inputs that were skipped.

    Raises:
        SchemaError: If a row has other columns or types than those before it.
        SourceError: If the function raises, or makes what cannot be kept exactly.
        WriteError: If something is there already, or it cannot be written there.
        WorkerError: If a worker died; the same call goes on from what was finished.

    Example:
        >>> def row(number):
        ...     return {"id": number, "square": number**2}
        >>> optimize(row, range(1000), "squares.lance", num_workers=2)  # doctest: +SKIP
    """
    if not callable(fn):
        raise ArgumentError(f"fn must be a function of one input, got a {type(fn).__name__}")
    if schema is not None and not isinstance(schema, pa.Schema):
        raise ArgumentError(f"schema must be a pyarrow.Schema, got a {type(schema).__name__}")
    if batch_size is not None:
        batch_size = integer("batch_size", batch_size, 1)
    kind = SequenceSource if is_sequence(inputs) else IterableSource
    source = kind(fn, inputs, schema, on_error, batch_size)
    while True:
        try:
            written = write_table(
                source,
                uri,
                num_workers=num_workers,
                mode=mode,
                restart=restart,
                compression=compression,
                storage_options=storage_options,
            )
        except NoRowsError as error:
            if not source.more(error.skipped):
                raise
        else:
            return replace(written, rows_read=written.rows)  # the writer counts inputs
