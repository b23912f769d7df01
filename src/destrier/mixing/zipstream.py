"""A zip, resolved: its sources, how often each is read, and how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from destrier.arrays import divided
from destrier.bucketing.buckets import Batch, samples_of
from destrier.errors import ColumnError
from destrier.feed import FeedOptions
from destrier.keyed import Ints
from destrier.mixing.course import ENDLESS, begun_endless
from destrier.mixing.feed import MixtureFeed
from destrier.mixing.passes import Passes
from destrier.mixing.stream import MixtureStream, Source
from destrier.mixing.zipfeed import ZipFeed
from destrier.order import ORDER_VERSION
from destrier.plan import Cycles, Remainder, Routes, Steps
from destrier.state import STATE_VERSION, State, compact
from destrier.stream import TableStream
from destrier.topology import ONLY_WORKER, Topology, Worker

__all__ = ["STOPS", "ZipStop", "ZipStream", "columns_by_source"]

ZipStop: TypeAlias = Literal["shortest", "longest"]
STOPS = ("shortest", "longest")


@dataclass(frozen=True)
class ZipStream:
    """Everything that decides which samples of a zip come in which order.

    Attributes:
        sources: From name to stream.
        stop: With which source an epoch ends.
        num_splits: Lanes, S: sample g is of lane g mod S.
        seed: Of the seeds that a transform receives.
    """

    sources: Mapping[str, Source]
    stop: ZipStop
    num_splits: int
    seed: int

    # ---- what it is -----------------------------------------------------------------------------
    @cached_property
    def leaves(self) -> Sequence[TableStream]:
        """The tables that it reads."""
        return [leaf for source in self.sources.values() for leaf in source.leaves]

    @cached_property
    def names(self) -> Sequence[str]:
        """Of its tables, for errors."""
        return [leaf.table.name for leaf in self.leaves]

    @cached_property
    def count(self) -> int:
        """Samples in an epoch, N."""
        counts = [source.count for source in self.sources.values()]
        return min(counts) if self.stop == "shortest" else max(counts)

    @cached_property
    def plan(self) -> str:
        """A digest of what is paired with what: ranks compare it."""
        return f"{self.plan_hash} of sources {', '.join(self.sources)}"

    @cached_property
    def plan_hash(self) -> str:
        """A digest of the zip's parameters and of the sources."""
        plans = {name: source.plan for name, source in self.sources.items()}
        parts = (ORDER_VERSION, "zip", self.stop, self.num_splits, self.seed, sorted(plans.items()))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def state(self, epoch: int, counter: int) -> State:
        """The state at a position."""
        per_split = counter // self.num_splits
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "counter": counter,
            "epoch": epoch,
            "shuffle_seed": self.seed,
            "num_splits": self.num_splits,
            "stop": self.stop,
            "sources": compact({name: source.brief() for name, source in self.sources.items()}),
            "plan_hash": self.plan_hash,
            "samples_consumed_per_split": per_split,
            "positions_consumed_per_split": per_split,
        }

    # ---- where samples come from ----------------------------------------------------------------

    def routes(self, epoch: int, g: Ints) -> Sequence[Routes]:
        """Where the sample of each source comes from, for samples of an epoch."""
        g = g % self.count  # of a padded step the first ones come again
        return [self._routes_of(source, epoch, g) for source in self.sources.values()]

    def _routes_of(self, source: Source, epoch: int, g: Ints) -> Routes:
        size, endless = source.count, self.count >= ENDLESS
        if size >= ENDLESS and not endless:  # its one epoch goes on from epoch to epoch
            return source.routes_of(np.zeros_like(g), epoch * self.count + g)
        passes, index = divided(g, size)
        begun = begun_endless(epoch, size) if endless else epoch * -(-self.count // size)
        return source.routes_of(begun + passes, index)

    # ---- how it is read -------------------------------------------------------------------------

    def steps(
        self, batch: Batch, topology: Topology, remainder: Remainder, worker: Worker = ONLY_WORKER
    ) -> Steps:
        """The steps of a whole epoch."""
        samples = samples_of(batch)
        assert samples is not None
        return Steps(self.count, 0, samples, self.num_splits, topology, remainder, worker)

    def cycles(self, topology: Topology, worker: Worker) -> Cycles:
        """The cycles of a whole epoch, in row mode."""
        return Cycles(self.count, 0, self.num_splits, topology, worker)

    def feed(self, options: FeedOptions) -> ZipFeed:
        """How its rows are read in this process.

        Raises:
            ColumnError: If a column is not in its source, or none is left of one.
        """
        columns = columns_by_source(list(self.sources), options.columns)
        left = options.prefetch_bytes
        feeds: dict[str, MixtureFeed] = {}
        by_size = sorted(self.sources, key=lambda name: self.sources[name].count)
        for done, name in enumerate(by_size):  # small sources leave more for the large ones
            source = self.sources[name]
            own = options.of_source(
                own_rows=min(options.own_rows, source.count),
                prefetch_bytes=left // (len(by_size) - done),
            )
            feeds[name] = _feed_of(name, source, replace(own, columns=columns[name]))
            left -= feeds[name].held_bytes
        return ZipFeed({name: feeds[name] for name in self.sources}, self.routes)


def _feed_of(name: str, source: Source, options: FeedOptions) -> MixtureFeed:
    """How a source is read: a table as a mixture of one."""
    if isinstance(source, MixtureStream):
        return source.feed(options)
    (leaf,) = source.leaves
    return MixtureFeed(
        [leaf.table.name],
        [leaf.feed(options)],
        [Passes(leaf.order)],
        together=[0],
        shares=[1.0],
        source_column=None,
        sources=[name],
    )


def columns_by_source(
    names: Sequence[str], columns: Sequence[str] | None
) -> Mapping[str, list[str] | None]:
    """Return the columns of each source, in its own words.

    Args:
        names: Of the sources.
        columns: As they are called in a batch; None is what each source says.

    Raises:
        ColumnError: If a column is of no source, or a source has none.
    """
    if columns is None:
        return dict.fromkeys(names)
    found: dict[str, list[str] | None] = {}
    for column in columns:
        source, _, own = str(column).partition(".")
        if source not in names or not own:
            raise ColumnError(
                f"{column!r} is no column of a zip: they are called by source, a dot and the "
                f"source's own name for it, and the sources are {', '.join(names)}"
            )
        found[source] = [*(found.get(source) or ()), own]
    if missing := [name for name in names if name not in found]:
        raise ColumnError(
            f"columns= has none of source {missing[0]!r}; name one, or leave the source out"
        )
    return found
