"""What a stream would read, as plain data for people and scripts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from destrier.block import Line
from destrier.bucketing.buckets import Batch
from destrier.bucketing.order import WindowedOrder
from destrier.bucketing.report import BucketReport, report_buckets
from destrier.caching.advice import CachedColumn, report_cache
from destrier.description import stored_bytes
from destrier.errors import ArgumentError, StorageError
from destrier.feed import measured_row_bytes
from destrier.holding import Held
from destrier.keyed import Ints
from destrier.lancecalls import lance_call
from destrier.links.columns import outside_row_bytes
from destrier.packing.documents import PackingReport
from destrier.plan import Shares
from destrier.runner import DEFAULT_PREFETCH_BYTES
from destrier.schedule import Schedule
from destrier.topology import Topology
from destrier.windows import open_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from destrier.stream import TableStream

__all__ = [
    "PlanReport",
    "Share",
    "design_effect",
    "report_plan",
]

_LOOKED_AT_ROWS = 1 << 20  # rows of windows whose neighbours are counted
_LOOKED_AT_RANKS = 8
_LOOKED_AT_SAMPLES = 1 << 22
_SUCCESSIVE = 16


@dataclass(frozen=True)
class Share:
    """What one rank reads in one step: sample indices and row offsets, in canonical order."""

    rank: int
    samples: list[int]
    rows: list[int]


@dataclass(frozen=True)
class PlanReport:
    """What a stream reads.

    Attributes:
        table: Name and version of the table.
        rows: Rows in the selection: the samples of an epoch.
        steps: Steps of an epoch.
        surplus_rows: Rows of an epoch that fill no step.
        shares: What each rank reads in the step. Where rows are blocks of tokens, their offsets are
            addresses of blocks, as ``row_offset`` of batches is.
        requests_a_step: Over all ranks, about, in the middle of an epoch: one for each run of
            neighbouring rows (documents, where rows are blocks) and column. Lance joins those that
            lie close.
        bytes_a_step: Over all ranks: as many rows (whole documents) as are read, of average size on
            disk.
        open_rows: Rows that the windows of all ranks hold at once.
        open_bytes: Of them in memory, about.
        held: What a loader of columns with the default ``prefetch_bytes`` holds: ``"all"`` rows,
            read once in table order; open ``"windows"``; or the rows of the next ``"shares"``.
        held_bytes: Of that in each rank, about.
        deff: Variance of the mean of a batch over that of a uniform order, by the rule in
            `design_effect`; None where nothing is shuffled. Where rows are blocks, over that of a
            uniform order of documents: it is as many times more as a block has documents, which
            are neighbours.
        deff_successive: The same of 16 successive batches.
        cache: What ``cache_dir=`` would keep of each column, without those whose rows must be read
            to tell and cannot be.
        packing: What packing makes of the documents, where rows are blocks of tokens.
        buckets: The batches, where they are of rows of like length. With a budget of tokens,
            ``global_batch`` is the usual number of rows, and ``steps`` those of this epoch.
    """

    table: str
    table_rows: int
    filter: str | None
    rows: int
    shuffle: bool
    seed: int
    epoch: int
    num_splits: int
    clump_size: int
    window: int
    global_batch: int
    world_size: int
    steps: int
    surplus_rows: int
    step: int
    shares: list[Share]
    columns: list[str]
    requests_a_step: float
    bytes_a_step: float
    open_rows: int
    open_bytes: float
    held: Held
    held_bytes: int
    deff: float | None
    deff_successive: float | None
    cache: list[CachedColumn]
    notes: list[str]
    read_columns: list[str]
    packing: PackingReport | None = None
    buckets: BucketReport | None = None

    @property
    def requests_a_row(self) -> float:
        """Requests for a sample, a row or a block, of one column, about."""
        return self.requests_a_step / (self.global_batch * len(self.read_columns))


def design_effect(samples: int, *, num_splits: int, window: int, clump_size: int) -> float:
    """Variance of the mean of successive samples over that of as many uniform ones.

    ``1 + (m/S - 1)/w`` for m samples, S splits and windows of w clumps, and 1 where it would be
    less. It supposes the worst case, that the rows of a clump are alike, as in a sorted table.

    Example:
        >>> design_effect(16 * 256, num_splits=256, window=8, clump_size=32)
        2.875
    """
    if clump_size == 1:
        return 1.0
    return 1 + max(0.0, samples / num_splits - 1) / window


def report_plan(
    stream: TableStream,
    *,
    global_batch: Batch,
    world_size: int = 1,
    step: int = 0,
    epoch: int = 0,
    columns: Sequence[str] | None = None,
) -> PlanReport:
    """Describe what a stream reads from the start of an epoch on.

    Args:
        stream: The resolved stream.
        global_batch: What a step is.
        world_size: Number of ranks.
        step: The step whose rows are listed.
        epoch: Its epoch.
        columns: Columns that are delivered; None is all.

    Raises:
        ArgumentError: If the ranks cannot share a step, or the epoch has no such step.
    """
    if world_size < 1:
        raise ArgumentError(f"world_size must be at least 1, got {world_size}")
    names = stream.columns(None if columns is None else list(columns))
    plan = _Plan(stream, names, global_batch, world_size, epoch)
    steps = len(plan.ranks[0])
    if not 0 <= step < steps:
        raise ArgumentError(f"no step {step}: the epoch has the steps 0 to {steps - 1}")
    identity, samples = stream.identity, plan.global_batch
    requests, rows = plan.reads(step)
    packing = None if stream.packed is None else stream.packed.report()

    def effect(samples: int) -> float | None:
        if not identity.shuffle:
            return None
        alike = 1.0 if packing is None else packing.documents_a_block
        return alike * design_effect(
            samples,
            num_splits=identity.num_splits,
            window=identity.window,
            clump_size=identity.clump_size,
        )

    return PlanReport(
        table=stream.table.name,
        table_rows=stream.table.num_rows,
        filter=identity.filter,
        rows=stream.count,
        shuffle=identity.shuffle,
        seed=identity.shuffle_seed,
        epoch=epoch,
        num_splits=identity.num_splits,
        clump_size=identity.clump_size,
        window=identity.window,
        global_batch=samples,
        world_size=world_size,
        steps=steps,
        surplus_rows=stream.count - plan.delivered,
        step=step,
        shares=[plan.share(rank, step) for rank in range(world_size)],
        columns=names,
        requests_a_step=requests,
        bytes_a_step=rows * plan.stored_row_bytes,
        open_rows=plan.open_rows,
        open_bytes=plan.open_rows * plan.row_bytes,
        held=plan.held[0],
        held_bytes=plan.held[1],
        deff=effect(samples),
        deff_successive=effect(_SUCCESSIVE * samples),
        cache=report_cache(
            stream.table,
            stream.rows if stream.packed is None else stream.packed.rows,
            plan.read_columns,
        ),
        notes=plan.notes(),
        read_columns=plan.read_columns,
        packing=packing,
        buckets=plan.buckets(),
    )


class _Plan:
    """Who reads what, and how much of it."""

    def __init__(
        self,
        stream: TableStream,
        columns: list[str],
        global_batch: Batch,
        world_size: int,
        epoch: int,
    ) -> None:
        self.stream = stream
        self.columns = columns
        self.read_columns = stream.table_columns(columns)
        self.order = stream.order(epoch)
        self.ranks: list[Shares] = []
        for rank in range(world_size):
            steps = stream.steps(global_batch, Topology(rank, world_size), "drop")
            steps.check(uneven=False)
            self.ranks.append(steps.at(epoch, 0))
        self.delivered = self.ranks[0].counter(len(self.ranks[0]))
        self.global_batch = round(self.delivered / len(self.ranks[0]))
        reader = stream.reader(columns)
        try:
            self.row_bytes = measured_row_bytes(reader, stream.rows, columnar=True)
        except StorageError:  # what a plan says of the order needs no rows
            self.row_bytes = reader.row_bytes()

    @cached_property
    def stored_row_bytes(self) -> float:
        """Average bytes on disk of a row of the table, in the columns that are read."""
        table = self.stream.table
        stored = lance_call(f"describing {table.name}", lambda: stored_bytes(table))
        fragments = table.dataset.get_fragments()
        physical = sum(fragment.metadata.physical_rows for fragment in fragments)
        kept = float(sum(stored[name] for name in self.read_columns) / physical)
        return kept + outside_row_bytes(table, self.read_columns)

    def share(self, rank: int, step: int) -> Share:
        """What one rank reads in one step."""
        samples = self._samples(self.ranks[rank], step)
        return Share(rank, samples.tolist(), self._offsets(samples).tolist())

    @staticmethod
    def _samples(steps: Shares, step: int) -> Ints:
        return steps.samples(step, step + 1)[0]

    def _offsets(self, samples: Ints) -> Ints:
        return self.stream.rows.offsets(self.order.rows(samples))

    def _in_base(self, samples: Ints) -> tuple[Line, Ints]:
        """The order whose windows are read, and what samples are in it."""
        if isinstance(self.order, WindowedOrder):
            return self.order.base, self.order.samples(samples)
        return self.order, samples

    def buckets(self) -> BucketReport | None:
        """The batches, where they are of rows of like length."""
        bucketing = self.stream.bucketing
        if bucketing is None:
            return None
        assert isinstance(self.order, WindowedOrder)
        rows = self.delivered / len(self.ranks[0])
        return report_buckets(bucketing, self.order, rows_a_step=rows)

    @cached_property
    def _splits_read(self) -> int:
        """Splits that a rank reads, summed over ranks: each split once if no two share one."""
        splits = self.stream.num_splits
        period = min(splits // math.gcd(splits, self.global_batch), len(self.ranks[0]))
        period = max(1, min(period, _LOOKED_AT_SAMPLES // self.global_batch))
        return sum(
            len(np.unique(self._in_base(steps.samples(0, period)[0])[1] % splits))
            for steps in self.ranks
        )

    @cached_property
    def open_rows(self) -> int:
        """Rows that the windows of all ranks hold at once."""
        return open_rows(self.order, self._splits_read)

    def _choose(self, own_rows: int) -> tuple[Held, int]:
        return self.stream.choose_held(
            self.columns,
            self.open_rows // len(self.ranks),
            own_rows,
            row_bytes=self.row_bytes,
            memory=DEFAULT_PREFETCH_BYTES,
        )

    @cached_property
    def held(self) -> tuple[Held, int]:
        """What a rank holds with the memory that a loader takes by default, and its bytes."""
        return self._choose(self.ranks[0].rows_left)

    @property
    def pooled(self) -> bool:
        """Whether windows are read as a whole, where not all rows are held."""
        return self.open_rows > 0 and self._choose(0)[0] == "windows"

    def reads(self, step: int) -> tuple[float, float]:
        """Requests and rows of the table read in a step, over all ranks, once it has settled."""
        if self.pooled:
            rows = self.global_batch * self._splits_read / self.stream.num_splits
            runs, read = (each * rows for each in self._window_reads(step))
            return runs * len(self.read_columns), read
        runs = read = 0.0
        looked_at = self.ranks[:_LOOKED_AT_RANKS]
        for steps in looked_at:
            schedule = Schedule(
                self.order, self.stream.rows, steps, row_bytes=self.row_bytes, held="shares"
            )
            last = min(step + schedule.shares_per_block, len(steps))
            samples, _ = steps.samples(step, last)
            more_runs, more_read = self._reads(self._offsets(samples))
            runs += more_runs / (last - step)
            read += more_read / (last - step)
        times = len(self.ranks) / len(looked_at)
        return runs * times * len(self.read_columns), read * times

    def _reads(self, offsets: Ints) -> tuple[int, int]:
        """Runs of neighbouring rows of the table that samples consist of, and how many rows."""
        packed = self.stream.packed
        rows = np.unique(offsets) if packed is None else packed.read_rows(offsets)
        runs = 1 + int((np.diff(rows) > 1).sum())
        return runs, len(offsets) if packed is None else len(rows)

    def _window_reads(self, step: int) -> tuple[float, float]:
        """The same for each sample, in windows that the step takes samples from."""
        samples = np.concatenate([self._samples(steps, step) for steps in self.ranks])
        order, samples = self._in_base(samples)
        lo, hi, place = order.locate(samples)
        splits = order.num_splits
        _, index = np.unique(lo, return_index=True)
        runs = read = taken = 0
        for i in index[: max(1, _LOOKED_AT_ROWS // order.window_rows)].tolist():
            # A split consumes a window place by place, and begins inside of one.
            cycle, split = divmod(int(samples[i]), splits)
            cycles = len(range(split, order.n, splits))
            places = np.arange(hi[i] - lo[i]) - place[i]
            window = (cycle + places) % cycles * splits + split
            more_runs, more_read = self._reads(self.stream.rows.offsets(order.rows(window)))
            runs += more_runs
            read += more_read
            taken += len(window)
        return runs / taken, read / taken

    def notes(self) -> list[str]:
        """What deserves attention."""
        notes = []
        if self.order.windowed and self.held[0] == "shares":
            held = int(self.open_rows * self.row_bytes / len(self.ranks))
            notes.append(
                f"the open rows of a rank take about {held >> 20} MiB, more than fit the default "
                f"prefetch_bytes of {DEFAULT_PREFETCH_BYTES >> 20} MiB: rows are then read one by "
                "one"
            )
        if self.order.windowed and self._splits_read > self.stream.num_splits:
            times = self._splits_read / self.stream.num_splits
            notes.append(
                f"each split is read by {times:.1f} ranks on average; by one alone where "
                "num_splits and the global batch divide each other and the world size divides both"
            )
        return notes
