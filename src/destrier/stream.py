"""A stream: one pinned table, its selection, and the order over it, resolved once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from destrier.buckets import DEFAULT_WINDOW, BucketedOrder, Buckets
from destrier.caching.location import CacheFolder
from destrier.check import integer
from destrier.counters import Counts
from destrier.errors import ArgumentError, ColumnError, StateError
from destrier.feed import Feed, FeedOptions, RowReader, TableFeed
from destrier.keyed import Ints
from destrier.links.columns import delivered_columns
from destrier.order import Order
from destrier.packing.documents import PackedRows
from destrier.packing.lengths import Lengths, find_lengths
from destrier.packing.packing import Packing
from destrier.packing.reader import PackedReader
from destrier.permutation import Permutation
from destrier.plan import Cycles, Remainder, Routes, Steps
from destrier.read import Reader
from destrier.rowlists import locality, streamed_rows
from destrier.schedule import DIRECT_SHARES, Held, Line, choose_held, open_rows
from destrier.selection import RowList, select_rows
from destrier.sizing import (
    OPEN_BYTES,
    default_clump,
    default_num_splits,
    default_source_splits,
)
from destrier.state import Identity, State
from destrier.table import Table
from destrier.topology import ONLY_WORKER, Topology, Worker

__all__ = [
    "OneOf",
    "Settings",
    "Stream",
    "TableStream",
    "check_table",
    "chosen_columns",
    "resolve_stream",
]

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


@dataclass(frozen=True)
class Settings:
    """What the user said about the order; None is to be chosen, or taken from a state."""

    filter: str | None = None
    permutation: Permutation | None = None
    view: RowList | None = None
    num_splits: int | None = None
    shuffle: bool | None = None
    shuffle_seed: int | None = None
    shuffle_clump_size: int | None = None
    shuffle_window: int | None = None
    packing: Packing | None = None
    bucket_by: str | None = None
    bucket_window: int | None = None
    bucket_batch: int | None = None

    def __post_init__(self) -> None:
        for name, least, below in (
            ("num_splits", 1, None),
            ("shuffle_clump_size", 1, None),
            ("shuffle_window", 1, None),
            ("bucket_window", 1, None),
            ("shuffle_seed", 0, 1 << 32),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(name, value, least, below))
        if self.shuffle is not None and not isinstance(self.shuffle, bool | np.bool_ | int):
            raise ArgumentError(f"shuffle must be True or False, got {self.shuffle!r}")
        object.__setattr__(self, "shuffle", None if self.shuffle is None else bool(self.shuffle))
        if self.filter is not None and not isinstance(self.filter, str):
            raise ArgumentError(f"filter must be an SQL expression, got {self.filter!r}")
        if self.filter is not None and self.permutation is not None:
            raise ArgumentError(
                "filter and permutation cannot be combined, because a permutation lists its rows; "
                "filter when it is built: PermutationBuilder(table).filter(...)"
            )

        if self.bucket_window is not None and self.bucket_by is None:
            raise ArgumentError(
                f"bucket_window={self.bucket_window} has no meaning without bucket_by, the column "
                "whose lengths count"
            )
        if self.bucket_by is not None and self.packing is not None:
            raise ArgumentError(
                f"bucket_by={self.bucket_by!r} has no meaning for packed blocks, which all have "
                "one length"
            )

    @property
    def shuffled(self) -> bool:
        """Whether rows are shuffled: unless a permutation lists them, where nobody said."""
        return self.permutation is None if self.shuffle is None else self.shuffle

    def adopt(self, state: State) -> Settings:
        """Take from a state what was left at None, and refuse what differs.

        Raises:
            StateError: Naming the setting and both values.
        """
        self._check_packing(state)
        taken: dict[str, Any] = {
            "permutation": self.permutation,
            "view": self.view,
            "packing": self.packing,
        }
        for name, key in (
            ("num_splits", "num_splits"),
            ("shuffle_seed", "shuffle_seed"),
            ("shuffle_clump_size", "clump_size"),
            ("shuffle_window", "window"),
            ("shuffle", "shuffle"),
            ("filter", "filter"),
        ):
            given, stored = getattr(self, name), state[key]
            if self.permutation is not None and name == "filter":
                continue
            if given is not None and given != stored and not self._without_meaning(name, state):
                raise StateError(
                    f"{name} mismatch: the state has {stored!r}, this stream was made with "
                    f"{given!r}; leave {name} out to take the state's, or start the next epoch "
                    f"instead of loading: epoch={int(state['epoch'] or 0) + 1}"
                )
            taken[name] = stored
        return Settings(**taken, **self._adopt_buckets(state))

    def _adopt_buckets(self, state: State) -> dict[str, Any]:
        stored = None if "buckets" not in state else Buckets.parse(state["buckets"])
        for name, given, value in (
            ("bucket_by", self.bucket_by, stored and stored.by),
            ("bucket_window", self.bucket_window, stored and stored.window),
        ):
            if given is not None and given != value:
                raise StateError(
                    f"{name} mismatch: the state has {value!r}, this stream was made with "
                    f"{given!r}; leave {name} out to take the state's, or start the next epoch "
                    f"instead of loading: epoch={_next(state)}"
                )
        if stored is None:
            return {}
        return {
            "bucket_by": stored.by,
            "bucket_window": stored.window,
            "bucket_batch": stored.batch,
        }

    def _check_packing(self, state: State) -> None:
        stored = state.get("packing")
        given = None if self.packing is None else self.packing.text
        if given != stored:
            raise StateError(
                f"packing mismatch: the state has {stored or 'rows that are not packed'}, this "
                f"stream {given or 'rows that are not packed'}; make the stream as it was, or "
                f"start the next epoch instead of loading: epoch={_next(state)}"
            )

    @staticmethod
    def _without_meaning(name: str, state: State) -> bool:
        """A window has no meaning where rows are permuted one by one or not at all."""
        if name == "shuffle_window":
            return state["clump_size"] == 1
        return name == "shuffle_clump_size" and not state["shuffle"]


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
        self, batch: int, topology: Topology, remainder: Remainder, worker: Worker = ONLY_WORKER
    ) -> Steps:
        """The steps of a whole epoch, the first one."""
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
        buckets: How batches of like length are formed, and the lengths.
        source_columns: Of one of several sources, the columns that it was made with.
    """

    table: Table
    rows: RowList
    identity: Identity
    listed: bool = False
    packed: PackedRows | None = None
    buckets: tuple[Buckets, Lengths] | None = None
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

    def routes_of(self, epochs: Ints, g: Ints) -> Routes:
        """Where samples of some epochs come from."""
        return Routes(np.zeros(len(g), np.int64), epochs * self.count + g, g % self.num_splits)

    def state(self, epoch: int, counter: int) -> State:
        """The state at a position."""
        return self.identity.state(epoch, counter)

    def steps(
        self, batch: int, topology: Topology, remainder: Remainder, worker: Worker = ONLY_WORKER
    ) -> Steps:
        """The steps of a whole epoch."""
        return Steps(self.count, 0, batch, self.num_splits, topology, remainder, worker)

    def cycles(self, topology: Topology, worker: Worker) -> Cycles:
        """The cycles of a whole epoch, in row mode."""
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
        return Reader(
            self.table, names, tolerant=tolerant, counts=counts, cache=cache, rows=self.rows
        )

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
        if self.buckets is not None:
            return open_rows(order, order.num_splits)  # a batch is of no lanes in particular
        if batch is None:
            shares = topology.size * options.worker.count
            return open_rows(order, max(1, order.num_splits // shares))
        # The lanes of a rank's shares come again after so many steps.
        period = order.num_splits // math.gcd(order.num_splits, batch)
        if period * batch > _LOOKED_AT:
            return open_rows(order, order.num_splits)
        steps = Steps(batch * period, 0, batch, order.num_splits, topology)
        return open_rows(order, len(np.unique(steps.samples(0, period)[0] % order.num_splits)))

    def order(self, epoch: int) -> Line:
        """The order of an epoch."""
        identity = self.identity
        order = Order(
            identity.count,
            seed=identity.shuffle_seed,
            epoch=epoch,
            num_splits=1 if self.listed else identity.num_splits,
            clump_size=identity.clump_size,
            window=identity.window,
            shuffle=identity.shuffle,
        )
        if self.buckets is not None:
            return BucketedOrder(order, self.buckets[1], self.buckets[0])
        return order if self.packed is None else self.packed.line(order)

    def check_plan(self, state: State) -> None:
        """Raise unless a state was saved over the same order of the same rows.

        Raises:
            StateError: Naming both plans.
        """
        if state["plan_hash"] != self.identity.plan_hash:
            raise StateError(
                f"plan_hash mismatch: the state has {state['plan_hash']}, this stream "
                f"{self.identity.plan_hash}: the filter, permutation or view has other rows "
                f"than it had ({self.count} now); start the next epoch: epoch={_next(state)}"
            )
        if int(state["counter"] or 0) > self.count:
            raise StateError(
                f"counter {state['counter']} of the state is beyond the {self.count} samples of an "
                "epoch: the state is damaged"
            )


def check_table(table: Table, state: State, *, version_given: bool) -> None:
    """Raise unless a state was saved over the rows of a table.

    Args:
        table: The table to be read.
        state: The state.
        version_given: Whether the version was chosen explicitly: it may then have more columns.

    Raises:
        StateError: Naming both tables.
    """
    if table.identity == state["table_identity"]:
        return
    if version_given:
        before = table.at(int(state["table_version"] or 0))
        if before.identity == state["table_identity"] and table.same_rows(before):
            return
    raise StateError(
        f"table mismatch: the state was saved on version {state['table_version']} of a table with "
        f"identity {state['table_identity']}, this stream reads {table.name} with identity "
        f"{table.identity}; open the table of the run, or start the next epoch on this one: "
        f"epoch={_next(state)}"
    )


def _next(state: State) -> int:
    return int(state["epoch"] or 0) + 1


@dataclass(frozen=True)
class OneOf:
    """That a table is one of several sources.

    Attributes:
        sources: How many there are.
        quota: Samples of it in a step, about; None where that is not known.
        zipped: Whether each sample has one of each source. A source then has as many lanes as a
            table alone, which are those of the whole.
    """

    sources: int
    quota: int | None
    zipped: bool = False


def resolve_stream(
    table: Table,
    settings: Settings,
    *,
    global_batch: int | None = None,
    multiple: int = 1,
    one_of: OneOf | None = None,
) -> TableStream:
    """Choose what was left open, from the pinned table and the global batch alone.

    Args:
        table: The pinned table.
        settings: What was given.
        global_batch: Samples in a step, where it is known.
        multiple: Row mode: what num_splits must be a multiple of, the world size.
        one_of: Of how many sources the table is one, where it is not read alone.
    """
    lanes = None
    if settings.permutation is not None:
        settings.permutation.check_table(table)
        rows: RowList = settings.permutation.rows
        lanes = settings.permutation.num_splits
    elif settings.view is not None:
        rows = streamed_rows(table, settings.view, settings.filter)
    else:
        rows = select_rows(table, settings.filter)
    shuffle = settings.shuffled
    packed, packing = None, settings.packing
    if packing is not None:
        packed = PackedRows(packing, rows, packing.blocks(table, rows), shuffle)
        rows, lanes = packed.addresses, None
    count = len(rows)
    listed = settings.permutation is not None and not shuffle
    num_splits = settings.num_splits
    if num_splits is None:
        if shuffle and one_of is not None and not one_of.zipped:
            num_splits = default_source_splits(count, quota=one_of.quota)
        elif shuffle:
            num_splits = default_num_splits(count, global_batch=global_batch, multiple=multiple)
        else:
            num_splits = max(lanes or 1, multiple)
    clump_size, window = 1, 1
    if shuffle:
        open_bytes = OPEN_BYTES // (1 if one_of is None else one_of.sources)
        clump_size, window = _shuffle_sizes(table, settings, rows, num_splits, open_bytes)
    buckets = _buckets(table, rows, settings, global_batch, one_of)
    identity = Identity(
        shuffle_seed=settings.shuffle_seed or 0,
        num_splits=num_splits,
        clump_size=clump_size,
        window=window,
        shuffle=shuffle,
        filter=settings.filter,
        table_identity=table.identity,
        table_version=table.version,
        rows=rows.digest if packed is None else packed.digest,
        count=count,
        packing=None if packing is None else packing.text,
        buckets=None if buckets is None else buckets[0].text,
        lengths=None if buckets is None else buckets[1].digest,
    )
    stream = TableStream(table, rows, identity, listed, packed, buckets)
    _ = stream.order(0)  # refuses sizes that no order can have
    return stream


def _buckets(
    table: Table,
    rows: RowList,
    settings: Settings,
    global_batch: int | None,
    one_of: OneOf | None,
) -> tuple[Buckets, Lengths] | None:
    """How batches of like length are formed, if they are."""
    by = settings.bucket_by
    if by is None:
        return None
    if one_of is not None:
        raise ArgumentError(
            f"bucket_by={by!r} cannot be given to a source of a mixture, whose batches are of "
            "several sources"
        )
    batch = settings.bucket_batch or global_batch
    if batch is None:
        raise ArgumentError(
            f"bucket_by={by!r} forms batches: give batch_size or "
            "global_batch_size, here or to a StreamingDataLoader"
        )
    buckets = Buckets(by, settings.bucket_window or DEFAULT_WINDOW, batch)
    return buckets, find_lengths(table, rows, by)


def _shuffle_sizes(
    table: Table, settings: Settings, rows: RowList, num_splits: int, open_bytes: int
) -> tuple[int, int]:
    clump_size = settings.shuffle_clump_size
    if settings.packing is not None:
        return default_clump(
            len(rows),
            num_splits=num_splits,
            row_bytes=settings.packing.row_bytes,
            remote=table.remote,
            clump_size=clump_size,
            window=settings.shuffle_window,
            open_bytes=open_bytes,
            read_bytes=settings.packing.read_bytes,
        )
    density = None if settings.permutation is not None else locality(rows, table.num_rows)
    if density is None and clump_size is None:
        clump_size = 1  # nothing is known of where successive entries of a listing lie
    return default_clump(
        len(rows),
        num_splits=num_splits,
        row_bytes=table.row_bytes / (density or 1.0),
        remote=table.remote,
        clump_size=clump_size,
        window=settings.shuffle_window,
        open_bytes=open_bytes,
    )
