"""A mixture, resolved: its sources, its course, and how it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from destrier.bucketing.buckets import Batch, samples_of
from destrier.errors import ArgumentError
from destrier.feed import FeedOptions, TableFeed
from destrier.keyed import Ints
from destrier.mixing.course import ENDLESS, Course
from destrier.mixing.feed import MixtureFeed
from destrier.mixing.passes import Passes
from destrier.mixing.shares import MixtureCycles, MixtureSteps
from destrier.order import ORDER_VERSION
from destrier.plan import Remainder, Routes
from destrier.state import STATE_VERSION, State, compact
from destrier.stream import TableStream
from destrier.topology import ONLY_WORKER, Topology, Worker

__all__ = ["BATCHINGS", "Batching", "MixtureStream", "Source"]

Batching: TypeAlias = Literal["mixed", "stratified", "per_source"]
BATCHINGS = ("mixed", "stratified", "per_source")


class Source(Protocol):
    """A stream that a mixture reads from: of a table, or another mixture."""

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        ...

    @property
    def leaves(self) -> Sequence[TableStream]:
        """The tables that it reads."""
        ...

    @property
    def plan(self) -> str:
        """A digest of the order and of what it is over."""
        ...

    def routes_of(self, epochs: Ints | int, g: Ints) -> Routes:
        """Where samples come from: of some epochs, one for each, or all of one."""
        ...

    def brief(self) -> Any:
        """What a state says of it, as JSON."""
        ...


@dataclass(frozen=True)
class MixtureStream:
    """Everything that decides which samples of a mixture come in which order.

    Attributes:
        course: Which source each sample is of.
        sources: The streams, in the order of the course's names.
        batching: How the samples of a step are chosen.
        num_splits: Lanes of row mode, S.
        source_column: The column that each row's source is named in; None adds none.
    """

    course: Course
    sources: tuple[Source, ...]
    batching: Batching
    num_splits: int
    source_column: str | None = None

    # ---- what it is -----------------------------------------------------------------------------

    @cached_property
    def leaves(self) -> Sequence[TableStream]:
        """The tables that it reads."""
        return [leaf for source in self.sources for leaf in source.leaves]

    @cached_property
    def names(self) -> Sequence[str]:
        """Of its tables, for errors."""
        return [leaf.table.name for leaf in self.leaves]

    @cached_property
    def source_of_leaf(self) -> Sequence[str]:
        """The name of the source that each table belongs to."""
        pairs = zip(self.course.names, self.sources, strict=True)
        return [name for name, source in pairs for _ in source.leaves]

    @cached_property
    def count(self) -> int:
        """Samples in the first epoch of the course."""
        return self.course.samples(self.course.epoch)

    @property
    def seed(self) -> int:
        """The seed of its schedule."""
        return self.course.seed

    @cached_property
    def plan(self) -> str:
        """A digest of the schedule and of what it is over: ranks compare it."""
        course = self.course
        weights = [[segment.start, list(segment.weights)] for segment in course.segments]
        before = f" after {list(course.before)}" if any(course.before) else ""
        return f"{self.plan_hash} of sources {', '.join(course.names)}, weights {weights}{before}"

    @cached_property
    def plan_hash(self) -> str:
        """A digest of the schedule's parameters, but for its weights, and of the sources."""
        course = self.course
        parts = (
            ORDER_VERSION,
            course.seed,
            self.num_splits,
            course.window,
            course.unit,
            course.stop,
            course.length,
            [[n, s.plan] for n, s in zip(course.names, self.sources, strict=True)],
        )
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def brief(self) -> Any:
        """What a state says of it, as JSON."""
        course = self.course
        pairs = zip(course.names, self.sources, strict=True)
        return {
            "seed": course.seed,
            "num_splits": self.num_splits,
            "batching": self.batching,
            "slots": course.window,
            "unit": course.unit,
            "stop": course.stop,
            "length": course.length,
            "schedule": {
                "epoch": course.epoch,
                "spent": list(course.spent),
                "made": list(course.made),
                "before": list(course.before),
                "weights": [[s.start, list(s.weights)] for s in course.segments],
            },
            "sources": {name: source.brief() for name, source in pairs},
        }

    def state(self, epoch: int, counter: int) -> State:
        """The state at a position."""
        brief = self.brief()
        per_split = counter // self.num_splits
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "counter": counter,
            "epoch": epoch,
            "shuffle_seed": brief["seed"],
            "num_splits": brief["num_splits"],
            "batching": brief["batching"],
            "slots": brief["slots"],
            "unit": brief["unit"],
            "stop": brief["stop"],
            "length": brief["length"],
            "schedule": compact(brief["schedule"]),
            "sources": compact(brief["sources"]),
            "plan_hash": self.plan_hash,
            "samples_consumed_per_split": per_split,
            "positions_consumed_per_split": per_split,
        }

    # ---- where samples come from ----------------------------------------------------------------

    def samples(self, epoch: int) -> int:
        """Samples of an epoch."""
        return self.course.samples(epoch)

    def routes(self, epoch: int, g: Ints) -> Routes:
        """Where samples of an epoch come from."""
        leaf, found, lane = (np.empty(len(g), np.int64) for _ in range(3))
        firsts = [0, *accumulate(len(source.leaves) for source in self.sources)]
        for number, mine, epochs, samples in self.course.by_source(epoch, g):
            inner = self.sources[number].routes_of(epochs, samples)
            found[mine], lane[mine] = inner.sample, inner.lane
            leaf[mine] = firsts[number] + inner.leaf
        return Routes(leaf, found, lane)

    def routes_of(self, epochs: Ints | int, g: Ints) -> Routes:
        """Where samples come from: of some epochs, one for each, or all of one."""
        if isinstance(epochs, int):
            return self.routes(epochs, g)
        leaf, index, lane = (np.empty(len(g), np.int64) for _ in range(3))
        by_epoch = np.argsort(epochs, kind="stable")
        cuts = np.flatnonzero(np.diff(epochs[by_epoch])) + 1
        for mine in np.split(by_epoch, cuts) if len(g) else ():
            found = self.routes(int(epochs[mine[0]]), g[mine])
            leaf[mine], index[mine], lane[mine] = found
        return Routes(leaf, index, lane)

    # ---- how it is read -------------------------------------------------------------------------

    def steps(
        self, batch: Batch, topology: Topology, remainder: Remainder, worker: Worker = ONLY_WORKER
    ) -> MixtureSteps:
        """The steps of a whole epoch, the first one.

        Raises:
            ArgumentError: If a step does not fit the mixture's batches.
        """
        course, samples = self.course, samples_of(batch)
        assert samples is not None
        self.check_batch(samples)
        return MixtureSteps(
            self.count,
            0,
            samples,
            self.num_splits,
            topology,
            remainder,
            worker,
            course.epoch,
            router=self,
            unit=course.unit,
        )

    def check_batch(self, batch: int) -> None:
        """Raise if a global batch is not one that the mixture was made for.

        Raises:
            ArgumentError: Naming both sizes.
        """
        window, unit = self.course.window, self.course.unit
        if self.batching == "stratified" and batch != window:
            raise ArgumentError(
                f"batching='stratified' was made for a global batch of {window} samples, got "
                f"{batch}; keep the global batch, or make another mixture"
            )
        if self.batching == "per_source" and batch % unit:
            raise ArgumentError(
                f"batching='per_source' was made for units of {unit} samples of one source, and a "
                f"global batch of {batch} is no multiple of it; take a multiple"
            )

    def cycles(self, topology: Topology, worker: Worker) -> MixtureCycles:
        """The cycles of a whole epoch, the first one, in row mode."""
        return MixtureCycles(self.count, 0, self.num_splits, topology, worker, router=self)

    def feed(self, options: FeedOptions) -> MixtureFeed:
        """How its rows are read in this process.

        Raises:
            SchemaError: If its tables have different columns, and batches are of several tables.
        """
        left = options.prefetch_bytes
        feeds: dict[int, TableFeed] = {}
        order = sorted(range(len(self.leaves)), key=lambda i: self.leaves[i].count)
        drawn = self._drawn()
        for done, number in enumerate(order):  # small tables leave more for the large ones
            leaf = self.leaves[number]
            own = int(drawn[number] / max(1, options.topology.size * options.worker.count))
            feeds[number] = leaf.feed(
                options.of_source(
                    own_rows=min(own, leaf.count), prefetch_bytes=left // (len(order) - done)
                )
            )
            left -= feeds[number].held_bytes
        total = sum(drawn)
        pairs = zip(self.source_of_leaf, self.names, strict=True)
        names = [f"source {source!r} ({name})" for source, name in pairs]
        return MixtureFeed(
            names,
            [feeds[number] for number in range(len(self.leaves))],
            [Passes(leaf.order) for leaf in self.leaves],
            together=self._together(options),
            shares=[each / total for each in drawn],
            source_column=self.source_column,
            sources=self.source_of_leaf,
        )

    def reads_as(self, other: object) -> bool:
        """Whether what reads another stream reads this one too: other weights, the same tables.

        Not where a source is drawn that was not before: more of it may then be worth holding.
        """
        if not isinstance(other, MixtureStream) or other.sources is not self.sources:
            return False
        drawn, before = (
            [weight > 0 for weight in stream.course.segments[-1].weights]
            for stream in (self, other)
        )
        return drawn == before

    def _together(self, options: FeedOptions) -> Sequence[int]:
        """For each table a number, the same where rows come in the same batches."""
        unit, batch = self.course.unit, options.batch
        # A rank that has several units of a step, as on a smaller world, has a batch of several.
        apart = self.batching == "per_source" and batch in (unit, unit * options.topology.size)
        numbers = range(len(self.sources)) if apart else (0,) * len(self.sources)
        pairs = zip(numbers, self.sources, strict=True)
        return [number for number, source in pairs for _ in source.leaves]

    def _drawn(self) -> list[float]:
        """Samples of each table in an epoch, or relative numbers where that has no end."""
        drawn: list[float] = []
        course = self.course
        counts: Sequence[float] = list(course.segments[-1].weights)
        if self.count >= ENDLESS:
            scale = max(course.sizes) / max(counts)
        elif course.goes_on:
            scale = self.count / sum(counts)
        else:
            counts, scale = course.counts(course.epoch), 1.0
        for source, count in zip(self.sources, counts, strict=True):
            inner = [leaf.count for leaf in source.leaves]
            drawn += [count * scale * each / sum(inner) for each in inner]
        return [max(each, 1e-9) for each in drawn]
