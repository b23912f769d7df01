"""How fast a table streams on this machine, beside what its storage and a trainer could do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from destrier.dataset import StreamingDataset
from destrier.decode import Decode
from destrier.description import blob_columns
from destrier.feed import TableFeed
from destrier.lancecalls import lance_call
from destrier.loader import StreamingDataLoader
from destrier.read import Reader
from destrier.schedule import BLOCK_BYTES
from destrier.stats import Stats
from destrier.table import Table

__all__ = ["SHARE", "BenchReport", "Headroom", "bench"]

SHARE = 0.25  # of the seconds, for each of the two other measurements


@dataclass(frozen=True)
class Headroom:
    """What there is to gain.

    Attributes:
        storage_bytes_per_second: That the same columns give when they are read in the order of
            the table, in large requests: by Lance's scan, or by large takes for blobs and links.
        storage_rows_per_second: Their rows.
        repeated_rows_per_second: Rows of one batch that is delivered again and again: what a
            trainer can get at most.
    """

    storage_bytes_per_second: float
    storage_rows_per_second: float
    repeated_rows_per_second: float


@dataclass(frozen=True)
class BenchReport:
    """What a loader did with a table in some seconds.

    Attributes:
        table: Its name and version.
        rows: Rows of an epoch.
        columns: That were read.
        batch_size: Rows of a batch.
        open_seconds: Until the rows were chosen: the table is opened and the filter run.
        first_batch_seconds: From then to the first batch.
        rows_per_second: After the first batch.
        bytes_per_second: Of delivered batches in memory, after the first one.
        cpu_seconds_per_row: Processor time of this process and of those of the transform.
        held_in_memory: Whether all rows were kept after the first pass, and read no more.
        headroom: What there is to gain.
        stats: Of the loader.
    """

    table: str
    rows: int
    columns: list[str]
    batch_size: int
    open_seconds: float
    first_batch_seconds: float
    rows_per_second: float
    bytes_per_second: float
    cpu_seconds_per_row: float
    held_in_memory: bool
    headroom: Headroom
    stats: Stats


def bench(
    make_dataset: Callable[[], StreamingDataset],
    *,
    batch_size: int,
    seconds: float,
    decode: Decode | None = None,
    transform: Callable[..., Any] | None = None,
    num_workers: int = 0,
    trace: str | os.PathLike[str] | None = None,
) -> BenchReport:
    """Stream a table for some seconds and measure it; then its storage, and one batch repeated.

    Args:
        make_dataset: Opens the table, which is part of the measurement.
        batch_size: Rows of a batch.
        seconds: How long the loader runs after its first batch; the two other measurements take a
            quarter of it each.
        decode: As `StreamingDataLoader` takes it.
        transform: Likewise.
        num_workers: Likewise.
        trace: A file for the trace of the loader's run.

    Raises:
        DestrierError: If the table cannot be streamed so.
    """

    def loader(dataset: StreamingDataset, *, repeat_batch: bool = False) -> StreamingDataLoader:
        return StreamingDataLoader(
            dataset,
            batch_size=batch_size,
            decode=decode,
            transform=transform,
            num_workers=num_workers,
            repeat_batch=repeat_batch,
        )

    elsewhere = _ended_processes()
    began = time.perf_counter()
    dataset = make_dataset()
    streamed = loader(dataset)
    stream = dataset.stream(streamed.global_batch)
    opened = time.perf_counter() - began
    columns = stream.table_columns(dataset.columns)
    with streamed, contextlib.ExitStack() as stack:
        if trace is not None:
            stack.enter_context(streamed.trace(trace))
        _run(streamed, seconds)
        stats = streamed.stats()
        runner = streamed._runner  # noqa: SLF001 - only measuring asks for it
        feed = None if runner is None else runner.work.feed
        held = isinstance(feed, TableFeed) and feed.held == "all"
    elsewhere = _ended_processes() - elsewhere
    with loader(dataset, repeat_batch=True) as repeating:
        _run(repeating, seconds * SHARE)
        repeated = repeating.stats()
    read_bytes, read_rows = _storage(stream.table, columns, seconds * SHARE)
    stats = replace(stats, bandwidth=read_bytes)
    return BenchReport(
        table=stream.table.name,
        rows=stream.count,
        columns=columns,
        batch_size=batch_size,
        open_seconds=opened,
        first_batch_seconds=stats.first_batch_seconds,
        rows_per_second=stats.rows_per_second,
        bytes_per_second=stats.rows_per_second * stats.bytes / stats.rows,
        cpu_seconds_per_row=(stats.cpu_seconds + elsewhere) / stats.rows,
        held_in_memory=held,
        headroom=Headroom(read_bytes, read_rows, repeated.rows_per_second),
        stats=stats,
    )


def _ended_processes() -> float:
    """Processor time of the processes that this one has started, and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _run(loader: StreamingDataLoader, seconds: float) -> None:
    """Take batches, epoch after epoch, for so long after the first one, and two at least."""
    until: float | None = None
    while True:
        for _ in loader:
            now = time.perf_counter()
            if until is None:
                until = now + seconds
            elif now >= until:
                return


def _storage(table: Table, columns: list[str], seconds: float) -> tuple[float, float]:
    """Bytes and rows a second of the columns in the order of the table."""
    blobs = set(blob_columns(table)) & set(columns)
    batches = _takes(table, columns) if blobs else _scan(table, columns)
    began, size, rows, elapsed = time.perf_counter(), 0, 0, 0.0
    while elapsed < seconds or not rows:
        read = lance_call(f"reading {table.name}", lambda: next(batches, None), table.secrets)
        elapsed = time.perf_counter() - began
        if read is None:
            break
        size, rows = size + read.nbytes, rows + read.num_rows
    return size / elapsed, rows / elapsed


def _scan(table: Table, columns: list[str]) -> Iterator[Any]:
    return iter(table.dataset.to_batches(columns=columns))


def _takes(table: Table, columns: list[str]) -> Iterator[Any]:
    reader = Reader(table, columns)
    rows = max(1, int(BLOCK_BYTES / max(1.0, table.row_bytes)))
    for first in range(0, table.num_rows, rows):
        yield reader.read(np.arange(first, min(first + rows, table.num_rows))).batch
