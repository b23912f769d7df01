"""Runs a stream's pipeline over successive epochs and keeps it between them."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from destrier.batch import Finished, RawBatch
from destrier.columns import dense_bytes, dense_type, from_arrow, memory_bytes
from destrier.errors import ColumnError, DestrierError, DestrierWarning, ReadError, StateError
from destrier.links.columns import delivered_columns
from destrier.pipeline import READ_AHEAD, Delivery, Epoch, Kept, Pipeline
from destrier.plan import Shares, Steps
from destrier.read import Reader
from destrier.schedule import (
    BLOCK_BYTES,
    DIRECT_SHARES,
    Held,
    Schedule,
    choose_held,
    open_rows,
)
from destrier.stream import Stream
from destrier.topology import ONLY_WORKER, Topology, Worker

__all__ = [
    "DEFAULT_PREFETCH_BYTES",
    "Runner",
    "agree",
    "chosen_columns",
    "measured_row_bytes",
    "owned_rows",
    "read_row_bytes",
]

DEFAULT_PREFETCH_BYTES = 768 << 20
_EPOCHS = 1 << 32
_LOOKED_AT = 1 << 21  # samples
_SAMPLED_RUNS, _SAMPLED_ROWS = 4, 16
_REMOTE_DIRECT_SHARES = 1  # each row of them is a request: with 4, the first batch comes later
_REMOTE_RUN_BYTES = 2 << 20  # of a column in one request, where many rows are read in turn
_OBJECT_BYTES = 80  # of a Python object beside its content


def chosen_columns(stream: Stream, columns: list[str] | None) -> list[str]:
    """Return the columns to read, checked before Lance sees them.

    Raises:
        ColumnError: If one is not in the table, or none is left.
    """
    names = delivered_columns(stream.table.schema) if columns is None else list(columns)
    stream.table.check_columns(names)
    if not names:
        raise ColumnError(
            f"columns is empty; {stream.table.name} has: {', '.join(stream.table.schema.names)}"
        )
    return names


def read_row_bytes(stream: Stream, reader: Reader) -> float:
    """Bytes of a row of the columns that are read, about, once it is in memory."""
    variable = sum(dense_type(field.type) is None for field in reader.schema)
    fixed = sum(dense_bytes(field.type) for field in reader.schema)
    if not variable:
        return max(fixed, 1.0)
    others = sum(dense_bytes(f.type) for f in stream.table.schema if f.name not in reader.columns)
    rest = max(0.0, stream.table.row_bytes - fixed - others)
    return fixed + rest + _OBJECT_BYTES * variable


def agree(resolve: Callable[[], Stream], topology: Topology, group: Any = None) -> Stream:
    """Resolve the stream; under torch.distributed, let the ranks compare their plans.

    A rank that cannot resolve its stream tells the others, so that none of them waits for it.

    Args:
        resolve: Makes the stream.
        topology: This rank's share, and whether it was found in torch.distributed.
        group: The process group whose ranks read different data; None is all ranks.

    Raises:
        StateError: If another rank failed, or two ranks have different plans.
        DestrierError: What resolving raised here.
    """
    if not (topology.distributed and dist.is_available() and dist.is_initialized()):
        return resolve()
    stream, failure = None, None
    try:
        stream = resolve()
        mine = f"{stream.identity.plan_hash} of table {stream.identity.table_identity}"
    except DestrierError as error:
        failure, mine = error, f"failed: {error}"
    plans: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(plans, mine, group=group)
    if failure is not None or stream is None:
        raise failure or RuntimeError(mine)
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise StateError(
                f"the ranks disagree on the plan: rank 0 has {plans[0]}, rank {rank} has {plan}; "
                "they must open the same table, version, filter and seed"
            )
    return stream


def usable_cores() -> int:
    """Processors for this process: those it may run on, shared with the machine's other ranks."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // (int(ranks) if ranks.isdigit() and int(ranks) else 1))


@dataclass(frozen=True)
class Work:
    """How shares are made and what becomes of them.

    Attributes:
        stream: The resolved stream.
        reader: Reads the blocks.
        finish: From a share to what the consumer gets.
        shares: From a start counter to the shares of an epoch.
        columnar: Whether shares are numpy columns, else Arrow.
        threads: Threads that finish; 0 is the driving one.
        prefetch_bytes: What open rows and finished batches may take.
        open_rows: Rows that open windows hold in this process.
        padded: Whether samples from N on are repeats.
        most_ready: How many finished shares may wait, beside the limit in bytes.
    """

    stream: Stream
    reader: Reader
    finish: Callable[[RawBatch], Finished]
    shares: Callable[[int], Shares]
    columnar: bool
    threads: int
    prefetch_bytes: int
    open_rows: int
    padded: bool = False
    most_ready: int | None = None


class Runner:
    """Keeps one pipeline running, epoch after epoch, and restarts it where the position jumps.

    Args:
        work: What to run.
        owner: The object whose end ends the pipeline too.
    """

    def __init__(self, work: Work, owner: object) -> None:
        self.work = work
        self._owner = weakref.ref(owner)
        self._pipeline: Pipeline | None = None
        self._ending: list[Pipeline] = []
        self._kept = Kept()
        self._next: tuple[int, int] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        row_bytes = measured_row_bytes(work.stream, work.reader, columnar=work.columnar)
        self.row_bytes = row_bytes
        # Only columns are gathered from all rows at no more than it takes from few.
        own = work.shares(0).rows_left if work.columnar else 0
        self.held, held = choose_held(
            work.stream.count, work.open_rows, own, row_bytes=row_bytes, memory=work.prefetch_bytes
        )
        if self.held == "shares" and work.open_rows:
            wanted = int(work.open_rows * row_bytes)
            warnings.warn(
                f"the open windows of the shuffle take about {wanted >> 20} MiB in this process, "
                f"more than fit prefetch_bytes={work.prefetch_bytes} "
                f"({work.prefetch_bytes >> 20} MiB); rows are read one by one instead of in "
                "clumps, which is slower. Raise prefetch_bytes, or give a smaller "
                "shuffle_clump_size for a new run",
                DestrierWarning,
                stacklevel=4,
            )
        self._block_bytes = min(BLOCK_BYTES, work.prefetch_bytes // 32)
        ahead = (READ_AHEAD + 2) * self._block_bytes  # that are read, or were just read
        self._ready_bytes = max(work.prefetch_bytes - held - ahead, work.prefetch_bytes // 8)

    def start(self, epoch: int, counter: int) -> Shares:
        """Go to a position; costs nothing where the pipeline already stands there."""
        if self._next != (epoch, counter) or self._pipeline is None:
            self.stop()
            self._pipeline = Pipeline(
                self._epochs(epoch, counter),
                self.work.reader,
                self.work.finish,
                columnar=self.work.columnar,
                kept=self._kept,
                threads=self.work.threads,
                ready_bytes=self._ready_bytes,
                most_ready=self.work.most_ready,
            )
            owner = self._owner()
            if owner is not None:
                self._finalizer = weakref.finalize(owner, self._pipeline.stop)
                self._finalizer.atexit = False  # the pipeline sees to that
        self._next = None
        return self.work.shares(counter)

    def get(self) -> Delivery:
        """The next delivery."""
        pipeline = self._pipeline
        if pipeline is None:
            raise RuntimeError("the pipeline is stopped")
        try:
            delivery = pipeline.get()
        except BaseException:
            self._kept = Kept()
            raise
        if delivery.index < 0:
            self._next = (delivery.epoch + 1, 0)
        return delivery

    @property
    def pipeline(self) -> Pipeline | None:
        """The running pipeline, if any."""
        return self._pipeline

    def stop(self, *, wait: bool = False) -> None:
        """Stop the pipeline; with ``wait``, return when its threads, and earlier ones', ended."""
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self._pipeline is not None:
            self._pipeline.stop()
            self._ending.append(self._pipeline)
        if wait:
            for pipeline in self._ending:
                pipeline.join()
        self._ending = [pipeline for pipeline in self._ending if pipeline.alive]
        self._pipeline = None
        self._next = None

    def _epochs(self, epoch: int, counter: int) -> Iterator[Epoch]:
        # A generator of the work alone: the driving thread must not keep the owner alive.
        return _epochs(
            self.work,
            epoch,
            counter,
            row_bytes=self.row_bytes,
            block_bytes=self._block_bytes,
            held=self.held,
            loaded=self._kept.memory is not None,
        )


def _epochs(
    work: Work,
    epoch: int,
    counter: int,
    *,
    row_bytes: float,
    block_bytes: int,
    held: Held,
    loaded: bool,
) -> Iterator[Epoch]:
    remote = work.stream.table.remote
    runs = max(1, block_bytes // (_REMOTE_RUN_BYTES * len(work.reader.columns)))
    for number in range(epoch, _EPOCHS):
        schedule = Schedule(
            work.stream.order(number),
            work.stream.rows,
            work.shares(counter),
            row_bytes=row_bytes,
            held=held,
            loaded=loaded,
            block_bytes=block_bytes,
            direct_shares=_REMOTE_DIRECT_SHARES if remote else DIRECT_SHARES,
            runs=runs if remote else 1,
        )
        loaded = schedule.loads
        yield Epoch(number, schedule, work.stream.count if work.padded else None)
        counter = 0


def owned_rows(
    stream: Stream, topology: Topology, batch: int | None, worker: Worker = ONLY_WORKER
) -> int:
    """Rows that open windows hold in this process."""
    order = stream.order(0)
    if batch is None:
        return open_rows(order, order.num_splits // (topology.size * worker.count))
    # The lanes of a rank's shares come again after so many steps.
    period = order.num_splits // math.gcd(order.num_splits, batch)
    if period * batch > _LOOKED_AT:
        return open_rows(order, order.num_splits)
    steps = Steps(batch * period, 0, batch, order.num_splits, topology)
    return open_rows(order, len(np.unique(steps.samples(0, period)[0] % order.num_splits)))


def measured_row_bytes(stream: Stream, reader: Reader, *, columnar: bool) -> float:
    """Bytes of a row in memory: of some rows that are read, where the types do not say it.

    What files take says little: they are compressed. Nor does Arrow's size where rows are held as
    numpy columns: a list of texts takes five times as much as Python's objects.
    """
    expected = read_row_bytes(stream, reader)
    if all(dense_type(field.type) for field in reader.schema):
        return expected
    runs = min(_SAMPLED_RUNS, stream.count)
    starts = np.arange(runs) * stream.count // runs
    places = np.unique(starts[:, None] + np.arange(_SAMPLED_ROWS))
    try:
        rows = reader.read(stream.rows.offsets(places[places < stream.count]))
    except ReadError:
        return expected  # it is an error where its batch comes
    count = max(1, rows.batch.num_rows)
    measured: float = rows.batch.nbytes / count + _OBJECT_BYTES
    if columnar:
        measured = sum(memory_bytes(from_arrow(column)) for column in rows.batch.columns) / count
    return max(expected, measured)
