"""What a mixture would read, as plain data for people and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from destrier.errors import ArgumentError
from destrier.feed import FeedOptions, TableFeed
from destrier.holding import Held
from destrier.mixing.course import ENDLESS, Stop
from destrier.mixing.shares import MixtureSteps
from destrier.mixing.stream import Batching, MixtureStream
from destrier.plan import check_batch
from destrier.runner import DEFAULT_PREFETCH_BYTES
from destrier.stream import TableStream
from destrier.topology import Topology

__all__ = ["MixtureReport", "SourceReport", "report_mixture"]

_LOOKED_AT = 1 << 20  # samples


@dataclass(frozen=True)
class SourceReport:
    """What is read of one table.

    Attributes:
        table: Name and version.
        rows: In its selection.
        share: Of the samples.
        samples: In the epoch; None where that has no end.
        times: How often its rows come in the epoch, on average; None where that has no end.
        least_a_step: The fewest samples of it in a step, of those that were looked at.
        most_a_step: The most.
        num_splits: Lanes of its own order.
        held: What a loader of columns with the default ``prefetch_bytes`` holds of it.
        held_bytes: Of that in each rank, about.
    """

    name: str
    table: str
    filter: str | None
    rows: int
    share: float
    samples: int | None
    times: float | None
    least_a_step: int
    most_a_step: int
    shuffle: bool
    seed: int
    num_splits: int
    clump_size: int
    window: int
    held: Held
    held_bytes: int


@dataclass(frozen=True)
class MixtureReport:
    """What a mixture reads.

    Attributes:
        slots: Slots of a window: in each, proportions are exact.
        unit: Samples of a slot.
        steps: Of the epoch; None where that has no end, like the next one.
        surplus_rows: Samples of the epoch that fill no step.
        looked_at_steps: The steps at the start of the epoch in which samples were counted.
        shares: For each rank, how many samples of each source it reads in the step.
    """

    sources: list[SourceReport]
    seed: int
    batching: Batching
    slots: int
    unit: int
    stop: Stop
    num_splits: int
    epoch: int
    global_batch: int
    world_size: int
    steps: int | None
    surplus_rows: int | None
    looked_at_steps: int
    step: int
    shares: list[dict[str, int]]


def report_mixture(
    stream: MixtureStream,
    *,
    global_batch: int,
    world_size: int = 1,
    step: int = 0,
    epoch: int = 0,
    columns: Sequence[str] | None = None,
) -> MixtureReport:
    """Describe what a mixture of tables reads from the start of an epoch on.

    Args:
        stream: The resolved stream; its sources are tables.
        global_batch: Samples in a step.
        world_size: Number of ranks.
        step: The step whose samples are counted by rank.
        epoch: Its epoch.
        columns: Columns that are read; None reads all.

    Raises:
        ArgumentError: If the ranks cannot share a step, or the epoch has no such step.
    """
    check_batch(global_batch, world_size, uneven=False)
    ranks = [
        stream.steps(global_batch, Topology(rank, world_size), "drop") for rank in range(world_size)
    ]
    ranks[0].check(uneven=False)
    ranks = [steps.at(epoch, 0) for steps in ranks]
    steps, samples = len(ranks[0]), stream.samples(epoch)
    if not 0 <= step < steps:
        raise ArgumentError(f"no step {step}: the epoch has the steps 0 to {steps - 1}")
    endless = samples >= ENDLESS
    looked_at = min(steps, max(1, _LOOKED_AT // global_batch))
    counts = _counts(stream, epoch, looked_at, global_batch)
    feed = stream.feed(
        FeedOptions(
            columns=None if columns is None else list(columns),
            topology=Topology(0, world_size),
            batch=global_batch,
            own_rows=ranks[0].rows_left,
            prefetch_bytes=DEFAULT_PREFETCH_BYTES,
            columnar=True,
        )
    )
    drawn = None if endless else stream.course.counts(epoch)
    weights = stream.course.segments[-1].weights
    names = stream.course.names
    return MixtureReport(
        sources=[
            _source(
                name,
                leaf,
                feed.feeds[i],
                share=weights[i] / sum(weights),
                samples=None if drawn is None else drawn[i],
                least=int(counts[:, i].min()),
                most=int(counts[:, i].max()),
            )
            for i, (name, leaf) in enumerate(zip(names, stream.leaves, strict=True))
        ],
        seed=stream.seed,
        batching=stream.batching,
        slots=stream.course.window,
        unit=stream.course.unit,
        stop=stream.course.stop,
        num_splits=stream.num_splits,
        epoch=epoch,
        global_batch=global_batch,
        world_size=world_size,
        steps=None if endless else steps,
        surplus_rows=None if endless else samples - steps * global_batch,
        looked_at_steps=looked_at,
        step=step,
        shares=[_share(names, own, step) for own in ranks],
    )


def _source(
    name: str,
    leaf: TableStream,
    feed: TableFeed,
    *,
    share: float,
    samples: int | None,
    least: int,
    most: int,
) -> SourceReport:
    identity = leaf.identity
    return SourceReport(
        name=name,
        table=leaf.table.name,
        filter=identity.filter,
        rows=leaf.count,
        share=share,
        samples=samples,
        times=None if samples is None else samples / leaf.count,
        least_a_step=least,
        most_a_step=most,
        shuffle=identity.shuffle,
        seed=identity.shuffle_seed,
        num_splits=identity.num_splits,
        clump_size=identity.clump_size,
        window=identity.window,
        held=feed.held,
        held_bytes=feed.held_bytes,
    )


def _counts(
    stream: MixtureStream, epoch: int, steps: int, global_batch: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Samples of each source in each of the first steps of an epoch."""
    leaf = stream.routes(epoch, np.arange(steps * global_batch)).leaf
    number = len(stream.leaves)
    of_step = np.repeat(np.arange(steps), global_batch) * number
    return np.bincount(of_step + leaf, minlength=steps * number).reshape(steps, number)


def _share(names: Sequence[str], steps: MixtureSteps, step: int) -> dict[str, int]:
    """How many samples of each source a rank reads in a step."""
    leaf = steps.routed(step, step + 1)[2].leaf
    return dict(zip(names, np.bincount(leaf, minlength=len(names)).tolist(), strict=True))
