"""A stream: one pinned table, its selection, and the order over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from destrier.arrays import divided
from destrier.block import Line
from destrier.bucketing.bucketing import Bucketing
from destrier.bucketing.buckets import Batch, BudgetBuckets, check_batch_of
from destrier.bucketing.counted import CountedReader
from destrier.bucketing.steps import BudgetEpochs
from destrier.caching.location import CacheFolder
from destrier.counters import Counts
from destrier.errors import ArgumentError, ColumnError, StateError
from destrier.feed import Feed, FeedOptions, RowReader, TableFeed
from destrier.holding import Held, choose_held
from destrier.keyed import Ints
from destrier.links.columns import delivered_columns
from destrier.order import Order
from destrier.packing.documents import PackedRows
from destrier.packing.lengths import counted_by
from destrier.packing.reader import PackedReader
from destrier.plan import Cycles, Epochs, Remainder, Routes, Steps
from destrier.read import Reader
from destrier.schedule import DIRECT_SHARES
from destrier.selection import RowList
from destrier.state import Identity, State, next_epoch
from destrier.table import Table
from destrier.topology import ONLY_WORKER, Topology, Worker
from destrier.windows import open_rows

__all__ = ["Stream", "TableStream", "chosen_columns"]

_LOOKED_AT = 1 << 21  # samples


def chosen_columns(table: Table, columns: list[str] | None) -> list[str]:
    """Return the columns to read, checked before Lance sees them.

    Raises:
        ColumnError: If one is not in the table, or none is left.
    """
    names = delivered_columns(table.schema) if columns is None else list(columns)
    table.check_columns(names)
    if not names:
        raise ColumnError(f"columns is empty; {table.name} has: {', '.join(table.schema.names)}")
    return names


class Stream(Protocol):
    """Everything that decides which samples come in which order, and how they are read."""

    @property
    def names(self) -> Sequence[str]:
        """Of its tables, for errors."""
        ...

    @property
    def count(self) -> int:
        """Samples in an epoch, N."""
        ...

    @property
    def num_splits(self) -> int:
        """Lanes, S."""
        ...

    @property
    def seed(self) -> int:
        """The seed of its order."""
        ...

    @property
    def plan(self) -> str:
        """A digest of the order and of what it is over: ranks compare it."""
        ...

    def state(self, epoch: int, counter: int) -> State:
        """The state at a position."""
        ...

    def steps(
        self, batch: Batch, topology: Topology, remainder: Remainder, worker: Worker = ONLY_WORKER
    ) -> Epochs:
        """The steps of any epoch.

        Raises:
            DestrierError: If it cannot have such steps.
        """
        ...

    def cycles(self, topology: Topology, worker: Worker) -> Cycles:
        """The cycles of a whole epoch, the first one, in row mode."""
        ...

    def feed(self, options: FeedOptions) -> Feed:
        """How its rows are read in this process."""
        ...


@dataclass(frozen=True)
class TableStream:
    """Everything that decides which rows of a table come in which order.

    Attributes:
        table: The pinned table.
        rows: The row list that the order permutes.
        identity: The parameters, and the digests of table and rows.
        listed: Whether sample g is listing entry g (a permutation that is not shuffled).
        packed: The documents and their blocks, where the rows are blocks.
        bucketing: How batches of like length are formed.
        source_columns: Of one of several sources, the columns that it was made with.
    """

    table: Table
    rows: RowList
    identity: Identity
    listed: bool = False
    packed: PackedRows | None = None
    bucketing: Bucketing | None = None
    source_columns: list[str] | None = None

    @property
    def count(self) -> int:
        """Samples in an epoch, N."""
        return self.identity.count

    @property
    def num_splits(self) -> int:
        """Lanes, S."""
        return self.identity.num_splits

    @property
    def names(self) -> Sequence[str]:
        """Of the table, for errors."""
        return (self.table.name,)

    @property
    def seed(self) -> int:
        """The seed of its order."""
        return self.identity.shuffle_seed

    @property
    def plan(self) -> str:
        """A digest of the order and of what it is over: ranks compare it."""
        return f"{self.identity.plan_hash} of table {self.identity.table_identity}"

    @property
    def leaves(self) -> Sequence[TableStream]:
        """Itself: the tables that it reads."""
        return (self,)

    def brief(self) -> Any:
        """What the state of a mixture says of it, as JSON."""
        return self.identity.brief()

    def routes_of(self, epochs: Ints | int, g: Ints) -> Routes:
        """Where samples come from: of some epochs, one for each, or all of one."""
        _, lane = divided(g, self.num_splits)
        return Routes(np.zeros(len(g), np.int64), epochs * self.count + g, lane)

    def state(self, epoch: int, counter: int) -> State:
        """The state at a position."""
        return self.identity.state(epoch, counter)

    def steps(
        self, batch: Batch, topology: Topology, remainder: Remainder, worker: Worker = ONLY_WORKER
    ) -> Epochs:
        """The steps of any epoch.

        Raises:
            ArgumentError: If they have a budget, and nothing says of which lengths.
            StateError: If a state brought other ones.
        """
        bucketing = self.bucketing
        check_batch_of(None if bucketing is None else bucketing.buckets, batch)
        if bucketing is not None and isinstance(bucketing.buckets, BudgetBuckets):
            budget_order = bucketing.budget_order
            return BudgetEpochs(
                lambda epoch: budget_order(self._row_order(epoch)), topology, remainder, worker
            )
        assert isinstance(batch, int)
        return Steps(self.count, 0, batch, self.num_splits, topology, remainder, worker)

    def cycles(self, topology: Topology, worker: Worker) -> Cycles:
        """The cycles of a whole epoch, in row mode.

        Raises:
            ArgumentError: If a state brought batches with a budget.
        """
        buckets = None if self.bucketing is None else self.bucketing.buckets
        if isinstance(buckets, BudgetBuckets):
            raise ArgumentError(
                f"the state is of batches of global_batch_tokens={buckets.tokens}; give that here "
                "or to a StreamingDataLoader"
            )
        return Cycles(self.count, 0, self.num_splits, topology, worker)

    def feed(self, options: FeedOptions) -> TableFeed:
        """How its rows are read in this process.

        Raises:
            ColumnError: If a column is not in the table, or none is left.
        """
        reader = self.reader(
            self.source_columns if options.columns is None else options.columns,
            tolerant=options.tolerant,
            counts=options.counts,
            cache=options.cache,
        )
        open_rows = self._owned_rows(options)
        return TableFeed(
            reader,
            self.rows,
            self.order,
            options,
            open_rows=open_rows,
            remote=self.table.remote,
            held=self._hold(reader, open_rows, options),
            # each block of these shares needs the packing of a window of its own
            direct_shares=DIRECT_SHARES if self.packed is None else 1,
        )

    def _hold(
        self, reader: RowReader, open_rows: int, options: FeedOptions
    ) -> tuple[Held, int] | None:
        """What stays in memory where that is not rows as they are delivered."""
        if self.packed is None or not self.packed.moves:
            return None
        held, size = self.choose_held(
            reader.columns,
            open_rows,
            options.own_rows,
            row_bytes=reader.row_bytes(),
            memory=options.prefetch_bytes,
        )
        if held != "all":
            return held, size
        assert isinstance(reader, PackedReader)
        reader.keep()
        return "shares", size

    def choose_held(
        self,
        columns: list[str],
        open_rows: int,
        own_rows: int,
        *,
        row_bytes: float,
        memory: int,
    ) -> tuple[Held, int]:
        """Choose what stays in memory, as `destrier.schedule.choose_held` does.

        Where blocks move it is all documents, from which each epoch cuts its own.
        """
        if self.packed is not None and self.packed.moves:
            everything = self.packed.kept_bytes(self.table, columns) / self.count
            held = choose_held(self.count, 0, own_rows, row_bytes=everything, memory=memory)
            if held[0] == "all":
                return held
            own_rows = 0
        return choose_held(self.count, open_rows, own_rows, row_bytes=row_bytes, memory=memory)

    def reader(
        self,
        columns: list[str] | None,
        *,
        tolerant: bool = False,
        counts: Counts | None = None,
        cache: CacheFolder | None = None,
    ) -> RowReader:
        """What reads its rows by offset, or its blocks by address.

        Args:
            columns: Names of the columns; None is all.
            tolerant: Whether a row that cannot be read is reported (else it is raised).
            counts: Where bytes and seconds are added up.
            cache: A folder on local disk to read through.

        Raises:
            ColumnError: If there is no such column, or none is left.
        """
        if self.packed is not None:
            return self.packed.reader(
                self.table, columns, tolerant=tolerant, counts=counts, cache=cache
            )
        names = chosen_columns(self.table, columns)
        read, lists = names, None if self.bucketing is None else self.bucketing.buckets.by
        numbers = counted_by(self.table, lists) if lists in names else None
        if numbers is not None and numbers not in names:
            read = [*names, numbers]
        reader = Reader(
            self.table, read, tolerant=tolerant, counts=counts, cache=cache, rows=self.rows
        )
        if lists is None or numbers is None:
            return reader
        return CountedReader(reader, names, lists=lists, numbers=numbers)

    def columns(self, columns: list[str] | None) -> list[str]:
        """The columns that are delivered; None is all.

        Raises:
            ColumnError: If there is no such column, or none is left.
        """
        if self.packed is None:
            return chosen_columns(self.table, columns)
        return self.packed.columns(self.table, columns)

    def table_columns(self, columns: list[str] | None) -> list[str]:
        """The columns of the table that are read for some columns of samples."""
        names = self.columns(columns)
        return names if self.packed is None else self.packed.packing.read_columns(names)

    def _owned_rows(self, options: FeedOptions) -> int:
        """Rows that open windows hold in this process."""
        order, batch, topology = self.order(0), options.batch, options.topology
        if self.bucketing is not None:
            return open_rows(order, order.num_splits)  # a batch is of no lanes in particular
        if batch is None:
            shares = topology.size * options.worker.count
            return open_rows(order, max(1, order.num_splits // shares))
        assert isinstance(batch, int)
        # The lanes of a rank's shares come again after so many steps.
        period = order.num_splits // math.gcd(order.num_splits, batch)
        if period * batch > _LOOKED_AT:
            return open_rows(order, order.num_splits)
        steps = Steps(batch * period, 0, batch, order.num_splits, topology)
        return open_rows(order, len(np.unique(steps.samples(0, period)[0] % order.num_splits)))

    def order(self, epoch: int) -> Line:
        """The order of an epoch."""
        order = self._row_order(epoch)
        if self.bucketing is not None:
            return self.bucketing.order(order)
        return order if self.packed is None else self.packed.line(order)

    def _row_order(self, epoch: int) -> Order:
        identity = self.identity
        return Order(
            identity.count,
            seed=identity.shuffle_seed,
            epoch=epoch,
            num_splits=1 if self.listed else identity.num_splits,
            clump_size=identity.clump_size,
            window=identity.window,
            shuffle=identity.shuffle,
        )

    def check_plan(self, state: State) -> None:
        """Raise unless a state was saved over the same order of the same rows.

        Raises:
            StateError: Naming both plans.
        """
        if state["plan_hash"] != self.identity.plan_hash:
            by = None if self.bucketing is None else self.bucketing.buckets.by
            lengths = "" if by is None else f", or the lengths of {by!r} are others"
            raise StateError(
                f"plan_hash mismatch: the state has {state['plan_hash']}, this stream "
                f"{self.identity.plan_hash}: the filter, permutation or view has other rows than "
                f"it had ({self.count} now){lengths}; start the next epoch: "
                f"epoch={next_epoch(state)}"
            )
        if int(state["counter"] or 0) > self.count:
            raise StateError(
                f"counter {state['counter']} of the state is beyond the {self.count} samples of an "
                "epoch: the state is damaged"
            )
        if self.bucketing is not None and isinstance(self.bucketing.buckets, BudgetBuckets):
            order = self.bucketing.budget_order(self._row_order(int(state["epoch"] or 0)))
            _ = order.find(int(state["counter"] or 0))
