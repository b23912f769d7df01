"""Runs a stream's pipeline over successive epochs and keeps it between them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from destrier.batch import Finished, RawBatch
from destrier.errors import DestrierError, StateError
from destrier.feed import Feed
from destrier.pipeline import Delivery, Epoch, Kept, Pipeline
from destrier.plan import Shares
from destrier.stream import Stream
from destrier.topology import Topology

__all__ = ["DEFAULT_PREFETCH_BYTES", "Runner", "Work", "agree", "usable_cores"]

DEFAULT_PREFETCH_BYTES = 768 << 20
_EPOCHS = 1 << 32


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
        mine = stream.plan
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
                "they must open the same table, version, filter and seed, and a mixture must have "
                "the same weights from the same sample on"
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
        feed: How its rows are read.
        finish: From a share to what the consumer gets.
        shares: From an epoch and the counter that it starts at to its shares.
        threads: Threads that finish; 0 is the driving one.
        prefetch_bytes: What open rows and finished batches may take.
        most_ready: How many finished shares may wait, beside the limit in bytes.
    """

    stream: Stream
    feed: Feed
    finish: Callable[[RawBatch], Finished]
    shares: Callable[[int, int], Shares]
    threads: int
    prefetch_bytes: int
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
        feed = work.feed
        ahead = (feed.read_ahead + 2) * feed.block_bytes  # that are read, or were just read
        room = work.prefetch_bytes - feed.held_bytes - ahead
        self._ready_bytes = max(room, work.prefetch_bytes // 8)

    def start(self, epoch: int, counter: int) -> Shares:
        """Go to a position; costs nothing where the pipeline already stands there."""
        if self._next != (epoch, counter) or self._pipeline is None:
            self.stop()
            self._pipeline = Pipeline(
                self._epochs(epoch, counter),
                self.work.feed,
                self.work.finish,
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
        return self.work.shares(epoch, counter)

    def change(self, stream: Stream, shares: Callable[[int, int], Shares]) -> None:
        """Go on with another stream that is read as the one before: what is held stays.

        Args:
            stream: The resolved stream.
            shares: From an epoch and a start counter to its shares.
        """
        self.stop()  # what was read ahead is of the stream before
        self.work = replace(self.work, stream=stream, shares=shares)

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
        memory = self._kept.memory
        return _epochs(self.work, epoch, counter, () if memory is None else memory.complete)


def _epochs(work: Work, epoch: int, counter: int, complete: Sequence[bool]) -> Iterator[Epoch]:
    for number in range(epoch, _EPOCHS):
        shares = work.shares(number, counter)
        blocks = work.feed.blocks(number, shares, complete)
        yield Epoch(number, blocks, shares.pad_from)
        complete = blocks.complete  # all of them were planned before the next epoch is
        counter = 0
