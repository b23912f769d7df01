"""Reading several tables for one stream.

Each table is read as it would be alone, by windows of its own order; all rows lie in one pool, so
that a batch is gathered from it as from one table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.arrays import grown
from destrier.batch import INDEX_COLUMNS, RawBatch
from destrier.block import Block
from destrier.columns import Column
from destrier.counters import Counts
from destrier.errors import RowError, SchemaError
from destrier.feed import TableFeed
from destrier.keyed import Ints
from destrier.mixing.blocks import MixtureBlock, Reading, Spans, common_block_bytes
from destrier.mixing.passes import Passes
from destrier.mixing.shares import RoutedShares
from destrier.pool import ArrowPool, ColumnPool, Gathered, Pool
from destrier.read import Rows

__all__ = ["MixtureBlocks", "MixtureFeed", "MixtureMemory", "common_schema"]

_ROUTED = 1 << 19  # samples whose tables are found at once: of all ranks, some 100 bytes each
_TEXTS = ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()))


class MixtureBlocks:
    """The blocks of one epoch, in order.

    Args:
        feed: How the tables are read.
        shares: Which samples are delivered, and of which table each is.
        complete: For each table, whether all its rows are in memory already; empty at first.
    """

    def __init__(self, feed: MixtureFeed, shares: RoutedShares, complete: Sequence[bool]) -> None:
        self._feed = feed
        self._shares = shares
        self._spans = Spans(
            feed.feeds,
            shares,
            row_bytes=feed.row_bytes,
            block_bytes=feed.block_bytes,
            complete=complete,
            most_shares=_ROUTED // max(1, shares.routed_each),
        )

    @property
    def complete(self) -> Sequence[bool]:
        """For each table, whether all its rows are in memory: one that gave none is not read."""
        return self._spans.loaded

    def __iter__(self) -> Iterator[MixtureBlock]:
        held, direct = (self._feed.reading(self._spans.loaded, alone=a) for a in (False, True))
        for first, last, alone in self._spans:
            samples, bounds, routes = self._shares.routed(first, last)
            reading, each = direct if alone else held, self._spans.each
            for blocks in reading.blocks(first, samples, bounds, routes, each=each):
                yield from blocks


class MixtureFeed:
    """How several tables are read for one stream.

    Args:
        names: Of the tables, for errors.
        feeds: How each is read.
        passes: The epochs of each.
        together: Tables whose rows come in the same batches, and so must have the same columns: a
            number for each table, the same for those.
        shares: The share of each table in the samples.
        source_column: The column that each row's source is named in; None adds none.
        sources: The source of each table.

    Raises:
        SchemaError: If the columns differ, or one has the name of the source's column.
    """

    index_columns: Sequence[str] = INDEX_COLUMNS

    def __init__(
        self,
        names: Sequence[str],
        feeds: Sequence[TableFeed],
        passes: Sequence[Passes],
        *,
        together: Sequence[int],
        shares: Sequence[float],
        source_column: str | None,
        sources: Sequence[str],
    ) -> None:
        self.feeds = feeds
        self.passes = passes
        self.counts: Counts = feeds[0].counts
        self.schemas = [feed.schema for feed in feeds]
        for number in set(together):
            mine = [i for i, group in enumerate(together) if group == number]
            common = common_schema([names[i] for i in mine], [self.schemas[i] for i in mine])
            for i in mine:
                self.schemas[i] = common
        fields = {field.name: field for schema in reversed(self.schemas) for field in schema}
        self.schema = pa.schema(list(fields.values()))
        self._column = None
        if source_column is not None:
            if source_column in fields:
                raise SchemaError(
                    f"source_column={source_column!r} is a column of the sources already; take "
                    "another name, or leave that one out with columns="
                )
            self.schema = self.schema.append(pa.field(source_column, pa.string()))
            self._column = _SourceColumn(source_column, np.array(sources, np.object_))
        self.held_bytes = sum(feed.held_bytes for feed in feeds)
        self.block_bytes = common_block_bytes(feeds)
        self.read_ahead = max(feed.read_ahead for feed in feeds)
        each = zip(feeds, shares, strict=True)
        self.row_bytes = max(1.0, sum(feed.row_bytes * share for feed, share in each))

    def read(self, block: MixtureBlock) -> list[Rows]:
        """Read what a block names."""
        return [self._read(number, part) for number, _, part in block.parts]

    def _read(self, number: int, part: Block) -> Rows:
        rows = self.feeds[number].read(part)
        schema = self.schemas[number]
        if rows.batch.schema != schema:
            columns = [rows.batch.column(field.name).cast(field.type) for field in schema]
            rows.batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        return rows

    def memory(self) -> MixtureMemory:
        """An empty memory."""
        return MixtureMemory(
            self.schemas,
            columnar=self.feeds[0].columnar,
            views={name for feed in self.feeds for name in feed.views},
            expected=[feed.held_rows for feed in self.feeds],
            column=self._column,
        )

    def blocks(self, epoch: int, shares: RoutedShares, complete: Sequence[bool]) -> MixtureBlocks:
        """The blocks of an epoch's shares."""
        assert shares.epoch == epoch
        return MixtureBlocks(self, shares, complete)

    def reading(self, loaded: list[bool], first: int = 0, *, alone: bool) -> Reading:
        """How its tables, from that number on, are read for successive shares."""
        return Reading(self.feeds, self.passes, loaded, first, alone=alone)


class MixtureMemory:
    """The rows of all tables in one pool, or in one for each set of columns.

    Args:
        schemas: Of the columns that are read of each table; the same object where they share one.
        columnar: Whether rows are held as numpy columns, else as Arrow.
        views: Columns whose bytes may be views of Arrow's memory.
        expected: Rows of each table that will be held at once, about: room that grows is copied.
        column: Names each row's source; None where nobody asks.
    """

    def __init__(
        self,
        schemas: Sequence[pa.Schema],
        *,
        columnar: bool,
        views: Collection[str] = (),
        expected: Sequence[int],
        column: _SourceColumn | None = None,
    ) -> None:
        self._column = column
        places: dict[int, int] = {}
        for schema, rows in zip(schemas, expected, strict=True):
            places[id(schema)] = places.get(id(schema), 0) + rows
        pools: dict[int, _Places] = {}
        for schema in schemas:
            if id(schema) not in pools:
                pool = ColumnPool(schema, views) if columnar else ArrowPool(schema)
                pool.reserve(places[id(schema)])
                pools[id(schema)] = _Places(pool)
        self._tables = [_Region(pools[id(schema)]) for schema in schemas]

    @property
    def complete(self) -> Sequence[bool]:
        """For each table, whether all its rows are here."""
        return [table.complete for table in self._tables]

    def load(self, block: MixtureBlock, rows: list[Rows]) -> None:
        """Take in what a block reads, and find its samples."""
        # In the block, since a pipeline that was just stopped may still have one of this memory.
        block.places = np.empty(len(block.samples), np.int64)
        for (number, mine, part), read in zip(block.parts, rows, strict=True):
            table = self._tables[number]
            table.load(part, read)
            if len(part.samples):
                block.places[mine] = table.find(part)

    def share(self, block: MixtureBlock, index: int, epoch: int) -> RawBatch:
        """Gather a share of the block that was loaded last, by its number in it."""
        part = slice(int(block.bounds[index]), int(block.bounds[index + 1]))
        places, leaf = block.places[part], block.leaf[part]
        # Tables of other columns have pools of their own: then all samples are of one table.
        pool = self._tables[int(leaf[0]) if len(leaf) else 0].pool
        failed = pool.errors_at(places)
        good = np.delete(places, list(failed)) if failed else places
        data = pool.rows.take(good)
        if self._column is not None:
            data = self._column.add(data, np.delete(leaf, list(failed)) if failed else leaf)
        return RawBatch(
            epoch, block.samples[part], pool.offsets[places], data, failed, sources=leaf
        )

    def after_epoch(self) -> MixtureMemory:
        """Itself: what is not needed any more is written over."""
        for table in self._tables:
            table.end_epoch()
        return self


@dataclass(frozen=True)
class _SourceColumn:
    """The column that names each row's source.

    Attributes:
        name: Of the column.
        sources: The source of each table.
    """

    name: str
    sources: NDArray[np.object_]

    def add(self, data: Gathered, leaf: Ints) -> Gathered:
        """The rows with the column."""
        values = self.sources[leaf]
        if isinstance(data, dict):
            return {**data, self.name: Column(values)}
        return data.append_column(self.name, pa.array(values, pa.string()))


class _Places:
    """A pool with the row offset of each place, and which could not be read."""

    def __init__(self, rows: Pool) -> None:
        self.rows = rows
        self.capacity = 0
        self.offsets = np.empty(0, np.int64)
        self.errors: dict[int, RowError] = {}

    def grow(self, more: int) -> Ints:
        """New places, so many."""
        first = self.capacity
        self.capacity += more
        self.rows.reserve(self.capacity)
        if len(self.offsets) < self.capacity:
            self.offsets = grown(self.offsets, self.capacity + self.capacity // 4)
        return np.arange(first, self.capacity)

    def put(self, places: Ints, offsets: Ints, rows: Rows) -> None:
        """Put rows at places."""
        if self.errors:
            for place in places.tolist():
                self.errors.pop(place, None)
        self.rows.put(places, rows)
        self.offsets[places] = offsets
        self.errors.update({int(places[i]): error for i, error in rows.errors.items()})

    def errors_at(self, places: Ints) -> dict[int, RowError]:
        """What could not be read, by position."""
        if not self.errors:
            return {}
        return {
            i: self.errors[place] for i, place in enumerate(places.tolist()) if place in self.errors
        }


class _Region:
    """Where the rows of one table lie in the pool.

    A table counts its places from 0 on, and needs more of them as it goes: they are taken from the
    pool as they are needed, and stay its own.
    """

    def __init__(self, pool: _Places) -> None:
        self.pool = pool
        self.complete = False
        self._held = np.empty(0, np.int64)  # from the table's place to the pool's
        self._read = np.empty(0, np.int64)  # for rows that do not stay

    def load(self, part: Block, rows: Rows) -> None:
        """Put what was read where it belongs."""
        self.complete = self.complete or part.complete
        if part.targets is None:
            self._free(self._read)
            if len(self._read) < len(part.offsets):
                more = self.pool.grow(len(part.offsets) - len(self._read))
                self._read = np.concatenate([self._read, more])
            self.pool.put(self._read[: len(part.offsets)], part.offsets, rows)
            return
        if len(self._held) < part.capacity:
            more = self.pool.grow(part.capacity - len(self._held))
            self._held = np.concatenate([self._held, more])
        for start, stop in part.freed:
            self._free(self._held[start:stop])
        if len(part.targets):
            self.pool.put(self._held[part.targets], part.offsets, rows)

    def _free(self, places: Ints) -> None:
        """Let go of rows; the places of a window may lie in several runs."""
        if not self.pool.rows.frees:
            return
        edges = np.flatnonzero(np.diff(places) != 1) + 1
        for run in np.split(places, edges):
            if len(run):
                self.pool.rows.free(int(run[0]), int(run[-1]) + 1)

    def find(self, part: Block) -> Ints:
        """Where the samples of a block lie in the pool."""
        return (self._read if part.targets is None else self._held)[part.places]

    def end_epoch(self) -> None:
        """Let go of rows that do not stay."""
        if not self.complete:
            self._free(self._held)
        self._free(self._read)


def common_schema(names: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns that several tables have in common: the same, in the first one's order.

    Raises:
        SchemaError: If a column is missing, or of another type.
    """
    first = schemas[0]
    fields = []
    for own in first:
        kind = own.type
        for name, schema in zip(names, schemas, strict=True):
            if own.name not in schema.names:
                raise SchemaError(
                    f"{names[0]} has a column {own.name!r}, {name} has none (it has "
                    f"{', '.join(schema.names)}); choose common ones with columns=, or take each "
                    "batch from one source: batching='per_source'"
                )
            kind = _common_type(kind, schema.field(own.name).type, own.name, names[0], name)
        fields.append(own.with_type(kind).with_nullable(True))
    for name, schema in zip(names, schemas, strict=True):
        more = [column for column in schema.names if column not in first.names]
        if more:
            raise SchemaError(
                f"{name} has columns that {names[0]} has not: {', '.join(more)}; choose common "
                "ones with columns=, or take each batch from one source: batching='per_source'"
            )
    return pa.schema(fields)


def _common_type(
    one: pa.DataType, other: pa.DataType, column: str, first: str, name: str
) -> pa.DataType:
    if one == other:
        return one
    for narrow, wide in _TEXTS:
        if one in (narrow, wide) and other in (narrow, wide):
            return wide
    raise SchemaError(
        f"column {column!r} is {one} in {first}, but {other} in {name}; write one of them anew, "
        "leave the column out with columns=, or take each batch from one source: "
        "batching='per_source'"
    )
