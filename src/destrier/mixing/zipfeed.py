"""Reading several sources side by side: one sample of each makes one of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from destrier.batch import Origin, RawBatch, choose
from destrier.columns import Columns
from destrier.counters import Counts
from destrier.errors import RowError
from destrier.keyed import Ints
from destrier.mixing.blocks import MixtureBlock, Spans, common_block_bytes
from destrier.mixing.feed import MixtureFeed, MixtureMemory
from destrier.plan import Routes, Shares
from destrier.pool import Gathered
from destrier.read import Rows

__all__ = ["ZipBlocks", "ZipFeed", "ZipMemory"]

Router: TypeAlias = Callable[[int, Ints], Sequence[Routes]]
"""From samples of an epoch to where those of each source come from."""


@dataclass
class ZipBlock:
    """Some shares that are planned and read together.

    Attributes:
        first: Index of the first share.
        bounds: Where each share begins; one more than there are shares.
        parts: The number of a source, and what is read of it; all of them, or some that only load.
        complete: Whether all rows of all tables are in memory with it.
    """

    first: int
    bounds: Ints
    parts: list[tuple[int, MixtureBlock]]
    complete: bool = False


class ZipBlocks:
    """The blocks of one epoch, in order.

    Args:
        feed: How the sources are read.
        epoch: Its number.
        shares: Which samples are delivered.
        complete: For each table, whether all its rows are in memory already; empty at first.
    """

    def __init__(self, feed: ZipFeed, epoch: int, shares: Shares, complete: Sequence[bool]) -> None:
        self._feed = feed
        self._epoch = epoch
        self._shares = shares
        self._spans = Spans(
            [each for source in feed.feeds for each in source.feeds],
            shares,
            row_bytes=feed.row_bytes,
            block_bytes=feed.block_bytes,
            complete=complete,
        )

    @property
    def complete(self) -> Sequence[bool]:
        """For each table, whether all its rows are in memory: one that gave none is not read."""
        return self._spans.loaded

    def __iter__(self) -> Iterator[ZipBlock]:
        sizes = [len(feed.feeds) for feed in self._feed.feeds]
        each = list(zip(self._feed.feeds, [0, *accumulate(sizes)], strict=False))
        loaded = self._spans.loaded
        held, direct = (
            [feed.reading(loaded, first, alone=alone) for feed, first in each]
            for alone in (False, True)
        )
        for first, last, alone in self._spans:
            samples, bounds = self._shares.samples(first, last)
            routes = self._feed.router(self._epoch, samples)
            readings = zip(direct if alone else held, routes, strict=True)
            runs = [
                reading.blocks(first, samples, bounds, own, each=self._spans.each)
                for reading, own in readings
            ]
            for sources in zip(*runs, strict=True):
                yield from self._run(sources)

    def _run(self, sources: Sequence[Iterator[MixtureBlock]]) -> Iterator[ZipBlock]:
        """The block of a run of shares, after those that only load rows."""
        parts: list[tuple[int, MixtureBlock]] = []
        for number, blocks in enumerate(sources):
            for block in blocks:
                if len(block.bounds) > 1:
                    parts.append((number, block))
                else:
                    yield ZipBlock(block.first, block.bounds, [(number, block)])
        whole = parts[0][1]
        complete = all(block.complete for _, block in parts)
        yield ZipBlock(whole.first, whole.bounds, parts, complete)


class ZipFeed:
    """How several sources are read side by side.

    Args:
        sources: How each is read, by name: a column has that name, a dot, and its own.
        router: Where samples come from.
    """

    def __init__(self, sources: Mapping[str, MixtureFeed], router: Router) -> None:
        self.prefixes = [f"{name}." for name in sources]
        self.feeds = feeds = list(sources.values())
        self.router = router
        self.counts: Counts = feeds[0].counts
        self.index_columns = ("sample_index", *(f"{prefix}row_offset" for prefix in self.prefixes))
        pairs = zip(self.prefixes, feeds, strict=True)
        self.schema = pa.schema(
            [field for prefix, feed in pairs for field in _named(feed.schema, prefix)]
        )
        self.held_bytes = sum(feed.held_bytes for feed in feeds)
        self.block_bytes = common_block_bytes([table for feed in feeds for table in feed.feeds])
        self.read_ahead = max(feed.read_ahead for feed in feeds)
        self.row_bytes = sum(feed.row_bytes for feed in feeds)

    def read(self, block: ZipBlock) -> list[list[Rows]]:
        """Read what a block names."""
        return [self.feeds[number].read(part) for number, part in block.parts]

    def memory(self) -> ZipMemory:
        """An empty memory."""
        return ZipMemory(self.prefixes, [feed.memory() for feed in self.feeds])

    def blocks(self, epoch: int, shares: Shares, complete: Sequence[bool]) -> ZipBlocks:
        """The blocks of an epoch's shares."""
        return ZipBlocks(self, epoch, shares, complete)


class ZipMemory:
    """The rows of each source.

    Args:
        prefixes: What the names of the columns of each begin with.
        sources: The memory of each.
    """

    def __init__(self, prefixes: Sequence[str], sources: Sequence[MixtureMemory]) -> None:
        self._prefixes = prefixes
        self._sources = sources

    @property
    def complete(self) -> Sequence[bool]:
        """For each table, whether all its rows are here."""
        return [complete for source in self._sources for complete in source.complete]

    def load(self, block: ZipBlock, rows: list[list[Rows]]) -> None:
        """Take in what a block reads, and find its samples."""
        for (number, part), read in zip(block.parts, rows, strict=True):
            self._sources[number].load(part, read)

    def share(self, block: ZipBlock, index: int, epoch: int) -> RawBatch:
        """Gather a share of the block that was loaded last, by its number in it."""
        raws = [self._sources[number].share(part, index, epoch) for number, part in block.parts]
        failed: dict[int, RowError] = {}
        for raw in reversed(raws):
            failed.update(raw.errors)  # of a row that fails twice the first source's error
        origins: list[Origin] = []
        parts: dict[str, Gathered] = {}
        first = 0
        for prefix, source, raw in zip(self._prefixes, self._sources, raws, strict=True):
            assert raw.sources is not None
            origins.append(Origin(prefix, raw.offsets, raw.sources + first))
            parts[prefix] = _without(raw, failed)
            first += len(source.complete)
        return RawBatch(
            epoch,
            raws[0].samples,
            raws[0].offsets,
            _side_by_side(parts),
            failed,
            sources=raws[0].sources,
            zipped=origins,
        )

    def after_epoch(self) -> ZipMemory:
        """Itself: what is not needed any more is written over."""
        for source in self._sources:
            source.after_epoch()
        return self


def _named(schema: pa.Schema, prefix: str) -> list[pa.Field]:
    return [field.with_name(prefix + field.name) for field in schema]


def _without(raw: RawBatch, failed: dict[int, RowError]) -> Gathered:
    """The rows of a source, without those that failed in another one."""
    if len(failed) == len(raw.errors):
        return raw.data
    own = np.delete(np.arange(len(raw.samples)), list(raw.errors))
    return choose(raw.data, np.flatnonzero(~np.isin(own, list(failed))))


def _side_by_side(parts: Mapping[str, Gathered]) -> Gathered:
    """The columns of all sources, with the prefix of each before their names."""
    columns: Columns = {}
    arrays: list[pa.Array] = []
    fields: list[pa.Field] = []
    for prefix, data in parts.items():
        if isinstance(data, dict):
            columns.update({prefix + name: column for name, column in data.items()})
        else:
            arrays += data.columns
            fields += _named(data.schema, prefix)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if fields else columns
