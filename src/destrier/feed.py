"""How a stream is read in this process: what stays in memory, and which rows lie where in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from destrier.arrays import grown
from destrier.batch import INDEX_COLUMNS, RawBatch
from destrier.block import Block, Line
from destrier.bucketing.buckets import Batch
from destrier.caching.location import CacheFolder
from destrier.columns import dense_type, from_arrow, memory_bytes
from destrier.counters import Counts
from destrier.decode import Decode, decoded_names
from destrier.errors import DestrierWarning, ReadError, RowError
from destrier.holding import Held, Holding, choose_held, holding
from destrier.plan import Shares
from destrier.pool import ArrowPool, ColumnPool, HeldArrow, HeldColumns, Pool
from destrier.read import Rows
from destrier.schedule import BLOCK_BYTES, DIRECT_SHARES, Schedule, block_rows
from destrier.selection import RowList
from destrier.topology import ONLY_WORKER, Topology, Worker

if TYPE_CHECKING:
    from destrier.keyed import Ints

__all__ = [
    "Blocks",
    "Feed",
    "FeedOptions",
    "Memory",
    "RowReader",
    "TableFeed",
    "TableMemory",
    "measured_row_bytes",
]

_SAMPLED_RUNS, _SAMPLED_ROWS = 4, 16
_REMOTE_DIRECT_SHARES = 1  # each row of them is a request: with 4, the first batch comes later
_REMOTE_RUN_BYTES = 2 << 20  # of a column in one request, where many rows are read in turn
# Bytes of a block, and how many blocks are read at once. Lance has 64 requests in flight for each
# take: four takes have as many as 5,000 requests a second, the most that it sends, need where each
# takes 50 ms. Where a block of windows is read from local disk, planning and describing it takes as
# long as reading it: half as many threads then do twice as much at a time.
_BLOCKS = BLOCK_BYTES, 4
_LOCAL_WINDOW_BLOCKS = 2 * BLOCK_BYTES, 2
_OBJECT_BYTES = 80  # of a Python object beside its content


@dataclass(frozen=True)
class FeedOptions:
    """What decides how a stream is read, beside the stream itself.

    Attributes:
        columns: Names of the columns to read; None reads all.
        topology: This rank's share.
        batch: What a step is; None in row mode.
        own_rows: Rows that this process delivers in an epoch.
        prefetch_bytes: What open rows and finished batches may take.
        columnar: Whether rows are held as numpy columns, else as Arrow.
        decode: Which columns will be decoded.
        tolerant: Whether a row that cannot be read is reported (else it is raised).
        worker: This worker of the rank.
        counts: Where bytes and seconds are added up.
        cache: A folder on local disk to read through.
    """

    columns: list[str] | None
    topology: Topology
    batch: Batch | None
    own_rows: int
    prefetch_bytes: int
    columnar: bool
    decode: Decode | None = None
    tolerant: bool = False
    worker: Worker = ONLY_WORKER
    counts: Counts | None = None
    cache: CacheFolder | None = None

    def of_source(self, *, own_rows: int, prefetch_bytes: int) -> FeedOptions:
        """For one of several tables: its part of the memory, and of what is delivered."""
        return replace(self, batch=None, own_rows=own_rows, prefetch_bytes=max(1, prefetch_bytes))


class RowReader(Protocol):
    """Reads rows by offset."""

    schema: pa.Schema
    columns: list[str]
    counts: Counts

    def read(self, offsets: Ints) -> Rows:
        """Read rows, each once."""
        ...

    def row_bytes(self) -> float:
        """Bytes of a row in memory, about, by types and statistics."""
        ...


class Memory(Protocol):
    """The rows that are held, from which shares are gathered."""

    @property
    def complete(self) -> Sequence[bool]:
        """For each table, whether all its rows are here."""
        ...

    def load(self, block: Any, rows: Any) -> None:
        """Take in what a block reads."""
        ...

    def share(self, block: Any, index: int, epoch: int) -> RawBatch:
        """Gather a share of the block that was loaded last, by its number in it."""
        ...

    def after_epoch(self) -> Memory:
        """What is kept for the next epoch."""
        ...


class Blocks(Protocol):
    """The blocks of an epoch, in order."""

    def __iter__(self) -> Iterator[Any]:
        """Plan them, one after another."""
        ...

    @property
    def complete(self) -> Sequence[bool]:
        """For each table, whether all its rows are in memory after the last one."""
        ...


class Feed(Protocol):
    """How a stream is read.

    Attributes:
        counts: Where bytes and seconds are added up.
        held_bytes: What stays in memory, about.
        block_bytes: What is read together, about.
        read_ahead: How many blocks are read at once, before the one that is next.
        row_bytes: Of a row in memory, about.
        schema: Of the columns that are read.
    """

    counts: Counts
    held_bytes: int
    block_bytes: int
    read_ahead: int
    row_bytes: float
    schema: pa.Schema

    @property
    def index_columns(self) -> Sequence[str]:
        """Names of the columns that say where rows come from, where somebody asks."""
        ...

    def read(self, block: Any) -> Any:
        """Read what a block names; called by several threads."""
        ...

    def memory(self) -> Memory:
        """An empty memory."""
        ...

    def blocks(self, epoch: int, shares: Any, complete: Sequence[bool]) -> Blocks:
        """The blocks of an epoch's shares.

        Args:
            epoch: Its number.
            shares: Which samples are delivered.
            complete: For each table, whether all its rows are in memory already; empty at first.
        """
        ...


class TableFeed:
    """Reads the rows of one table.

    Args:
        reader: Reads rows.
        rows: The row list that the order permutes.
        order: From an epoch to its order.
        options: How much memory there is, and in which form rows are held.
        open_rows: Rows that open windows hold in this process.
        remote: Whether the table lies in an object store.
        held: What stays in memory and its bytes; None chooses.
        direct_shares: How many shares at the start are read by themselves.
    """

    index_columns: Sequence[str] = INDEX_COLUMNS

    def __init__(
        self,
        reader: RowReader,
        rows: RowList,
        order: Callable[[int], Line],
        options: FeedOptions,
        *,
        open_rows: int,
        remote: bool,
        held: tuple[Held, int] | None = None,
        direct_shares: int = DIRECT_SHARES,
    ) -> None:
        self.reader = reader
        self.rows = rows
        self.counts = reader.counts
        self.schema = reader.schema
        self.order = order
        self.columnar = columnar = options.columnar
        self.views = decoded_names(self.schema, options.decode) if columnar else frozenset()
        self.remote = remote
        self._direct_shares = _REMOTE_DIRECT_SHARES if remote else direct_shares
        prefetch_bytes = options.prefetch_bytes
        self.row_bytes = measured_row_bytes(reader, rows, columnar=columnar)
        self.held: Held
        self.held, self.held_bytes = held or choose_held(
            len(rows),
            open_rows,
            # Only columns are gathered from all rows at no more than it takes from few.
            options.own_rows if columnar else 0,
            row_bytes=self.row_bytes,
            memory=prefetch_bytes,
        )
        if self.held == "shares" and open_rows and not self.held_bytes:
            wanted = int(open_rows * self.row_bytes)
            warnings.warn(
                f"the open windows of the shuffle take about {wanted >> 20} MiB in this process, "
                f"more than fit prefetch_bytes={prefetch_bytes} "
                f"({prefetch_bytes >> 20} MiB); rows are read one by one instead of in "
                "clumps, which is slower. Raise prefetch_bytes, or give a smaller "
                "shuffle_clump_size for a new run",
                DestrierWarning,
                stacklevel=5,
            )
        windows = self.held == "windows" and not remote
        block_bytes, self.read_ahead = _LOCAL_WINDOW_BLOCKS if windows else _BLOCKS
        self.block_bytes = min(block_bytes, prefetch_bytes // 32)

    def read(self, block: Block) -> Rows:
        """Read what a block names."""
        return self.reader.read(block.offsets)

    def memory(self) -> TableMemory:
        """An empty memory."""
        return TableMemory(
            self.schema, columnar=self.columnar, views=self.views, expected=self.held_rows
        )

    @property
    def held_rows(self) -> int:
        """Rows that stay in memory, at most: beside open windows those that just ended."""
        if self.held == "all":
            return len(self.rows)
        return 2 * int(self.held_bytes / self.row_bytes)

    def blocks(self, epoch: int, shares: Shares, complete: Sequence[bool]) -> Schedule:
        """The blocks of an epoch's shares."""
        return Schedule(
            self.order(epoch),
            self.rows,
            shares,
            row_bytes=self.row_bytes,
            held=self.held,
            loaded=any(complete),
            block_bytes=self.block_bytes,
            direct_shares=self._direct_shares,
            runs=self._runs,
        )

    def holding(self, order: Line, *, held: Held, loaded: bool) -> Holding:
        """How rows are read by an order that goes on over epochs."""
        most = block_rows(self.row_bytes, self.block_bytes)
        return holding(held, order, self.rows, most_rows=most, loaded=loaded, runs=self._runs)

    @property
    def _runs(self) -> int:
        if not self.remote:
            return 1
        return max(1, self.block_bytes // (_REMOTE_RUN_BYTES * len(self.reader.columns)))


class TableMemory:
    """Where the rows of the current block lie, and which of them could not be read.

    Args:
        schema: Of the columns that are read.
        columnar: Whether rows are held as numpy columns, else as Arrow.
        views: Columns whose bytes may be views of Arrow's memory.
        expected: Rows that will be held at once, about: room that grows is copied.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        columnar: bool,
        views: Collection[str] = (),
        expected: int = 0,
    ) -> None:
        self._columnar = columnar
        self._views = views
        self._pool: Pool = ColumnPool(schema, views) if columnar else ArrowPool(schema)
        self._pool.reserve(expected)
        self._pool_offsets = np.empty(0, np.int64)
        self._pool_errors: dict[int, RowError] = {}
        self._source: Pool | HeldColumns | HeldArrow = self._pool
        self._offsets = self._pool_offsets
        self._errors = self._pool_errors
        self._complete = False

    @property
    def complete(self) -> Sequence[bool]:
        """Whether all rows are here."""
        return (self._complete,)

    def load(self, block: Block, rows: Rows) -> None:
        """Take in what a block reads."""
        self._complete = self._complete or block.complete
        if block.targets is None:
            self._source = HeldColumns(rows, self._views) if self._columnar else HeldArrow(rows)
            self._offsets, self._errors = block.offsets, rows.errors
            return
        errors = self._pool_errors
        for start, stop in block.freed:
            self._pool.free(start, stop)
            for place in [k for k in errors if start <= k < stop]:
                del errors[place]
        self._pool.reserve(block.capacity)
        if len(self._pool_offsets) < block.capacity:
            more = block.capacity // 4
            self._pool_offsets = grown(self._pool_offsets, block.capacity + more)
        self._pool.put(block.targets, rows)
        self._pool_offsets[block.targets] = block.offsets
        errors.update({int(block.targets[i]): error for i, error in rows.errors.items()})
        self._source, self._offsets, self._errors = self._pool, self._pool_offsets, errors

    def share(self, block: Block, index: int, epoch: int) -> RawBatch:
        """Gather a share of the block that was loaded last, by its number in it."""
        part = slice(int(block.bounds[index]), int(block.bounds[index + 1]))
        places = block.places[part]
        failed: dict[int, RowError] = {}
        good = places
        if self._errors:
            failed = {
                i: self._errors[place]
                for i, place in enumerate(places.tolist())
                if place in self._errors
            }
            good = np.delete(places, list(failed))
        return RawBatch(
            epoch, block.samples[part], self._offsets[places], self._source.take(good), failed
        )

    def after_epoch(self) -> TableMemory:
        """Itself with all rows, if it has them, else with none.

        The memory of its pool stays: to have it anew takes longer than to fill it.
        """
        if not self._complete:
            self._pool.free(0, len(self._pool_offsets))
            self._pool_errors.clear()
            self._source, self._offsets = self._pool, self._pool_offsets
            self._errors = self._pool_errors
        return self


def measured_row_bytes(reader: RowReader, rows: RowList, *, columnar: bool) -> float:
    """Bytes of a row in memory: of some rows that are read, where the types do not say it.

    What files take says little: they are compressed. Nor does Arrow's size where rows are held as
    numpy columns: a list of texts takes five times as much as Python's objects.
    """
    expected = reader.row_bytes()
    if all(dense_type(field.type) for field in reader.schema):
        return expected
    count = len(rows)
    runs = min(_SAMPLED_RUNS, count)
    starts = np.arange(runs) * count // runs
    places = np.unique(starts[:, None] + np.arange(_SAMPLED_ROWS))
    try:
        sampled = reader.read(rows.offsets(places[places < count]))
    except ReadError:
        return expected  # it is an error where its batch comes
    number = max(1, sampled.batch.num_rows)
    measured: float = sampled.batch.nbytes / number + _OBJECT_BYTES
    if columnar:
        held = sum(memory_bytes(from_arrow(column)) for column in sampled.batch.columns)
        measured = held / number
    return max(expected, measured)
