"""What every stream has: a topology, a position, iterators of epochs, a state."""

from __future__ import annotations

import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from destrier.batch import Finished, Finisher, RawBatch, check_extra_columns
from destrier.bucketing.buckets import Batch
from destrier.bucketing.sizes import check_sizes
from destrier.caching.location import CacheFolder
from destrier.check import check_positive, integer
from destrier.counters import Consumer, Counted
from destrier.errors import ArgumentError, DestrierWarning, IterationError
from destrier.feed import Feed, FeedOptions
from destrier.iteration import DatasetIterator
from destrier.plan import Cycles, Remainder, Shares
from destrier.process import check_process
from destrier.resolving import OneOf
from destrier.rows import OnTransformError, RowFinisher, check_on_transform_error
from destrier.runner import DEFAULT_PREFETCH_BYTES, Runner, Work, agree, usable_cores
from destrier.sharing import Shared
from destrier.state import Position, State, merge_states
from destrier.stream import Stream
from destrier.topology import ONLY_WORKER, Topology, Worker, current_worker, resolve_topology

if TYPE_CHECKING:
    from typing_extensions import Self

    from destrier.mixing.stream import Source
    from destrier.topology import Replicas

__all__ = ["Streaming"]


class Streaming(Counted, IterableDataset[Any], ABC):
    """A dataset that is iterated epoch by epoch, on any number of ranks and workers.

    Args:
        columns: Names of the columns to read; None reads all.
        epoch: The first epoch.
        rank: This process's rank; None finds it (torch.distributed, then RANK).
        world_size: Number of processes; None finds it.
        replicas: How many successive ranks read the same data, or the data dimension of a mesh.
        batch_size: Rows of a batch of one rank: batch mode.
        global_batch_size: Rows of a batch over all ranks: batch mode.
        global_batch_tokens: Batch mode: tokens of a batch over all ranks, with pads, at most.
        batch_multiple: With it, what the number of rows of a batch is a multiple of.
        remainder: What happens to the last, short step: ``"drop"``, ``"keep"`` or ``"pad"``.
        uneven: Allow shares of a step that differ by one.
        with_index: Batch mode: add where each row comes from.
        transform: Called with RecordBatches.
        on_transform_error: Row mode: ``"raise"``, ``"skip"``, ``"warn"`` or a callable.
        transform_parallelism: Threads that run the transform; None takes the processor count.
        transform_queue_depth: Row mode: batches of ``read_batch_size`` that may wait transformed.
        read_batch_size: Row mode: rows of a RecordBatch handed to the transform.
        prefetch_bytes: What open rows and batches that wait may take in this process.
        cache_dir: A folder on local disk that keeps what is read, for later epochs and other jobs.
        cache_bytes: What the folder may take; None is 32 GiB.
        worker_info_override: An object with ``id`` and ``num_workers``, for tests.

    Raises:
        ArgumentError: If an argument cannot be used.
    """

    def __init__(
        self,
        *,
        columns: list[str] | None,
        epoch: int,
        rank: int | None,
        world_size: int | None,
        replicas: Replicas | None,
        batch_size: int | None,
        global_batch_size: int | None,
        global_batch_tokens: int | None = None,
        batch_multiple: int | None = None,
        remainder: Remainder,
        uneven: bool,
        with_index: bool,
        transform: Callable[..., Any] | None,
        on_transform_error: OnTransformError,
        transform_parallelism: int | None,
        transform_queue_depth: int | None,
        read_batch_size: int,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        cache_dir: str | os.PathLike[str] | None,
        cache_bytes: int | None,
        worker_info_override: Any,
    ) -> None:
        super().__init__()
        _check_options(columns, transform)
        check_positive(
            read_batch_size=read_batch_size,
            transform_parallelism=transform_parallelism,
            transform_queue_depth=transform_queue_depth,
            prefetch_bytes=prefetch_bytes,
        )
        check_on_transform_error(on_transform_error)
        self._sizes = check_sizes(
            batch_size, global_batch_size, global_batch_tokens, batch_multiple, remainder
        )
        self.columns = columns
        self.transform = transform
        self.batch_size = self._sizes.batch_size
        self.global_batch_size = self._sizes.global_batch_size
        self.remainder = remainder
        self.uneven = uneven
        self.with_index = with_index
        self._on_transform_error = on_transform_error
        self._threads = transform_parallelism
        self._queue_depth = transform_queue_depth
        self._read_batch_size = read_batch_size
        self._prefetch_bytes = prefetch_bytes
        self._cache = CacheFolder.of(cache_dir, cache_bytes)
        self._worker_override = worker_info_override
        self._topology_given = (rank, world_size, replicas)
        self._topology: Topology | None = None
        self._position = Position(integer("epoch", epoch, 0, 1 << 32))
        self._stream: Stream | None = None
        self._runner: Runner | None = None
        self._live: weakref.ref[Consumer] | None = None
        self._stream_batch: Batch | None = None
        self._agreed: Stream | None = None
        self._last_consumed = 0
        self._shared: Shared | None = None
        self._placed = False
        self._is_part = False
        if rank is not None or world_size is not None:
            _ = self.topology  # refuses a rank out of range at once

    @abstractmethod
    def _resolve(self, batch: Batch | None) -> Stream:
        """Choose what was left open, for what a step is where that is known."""

    @abstractmethod
    def _adopt(
        self, state: Mapping[str, Any], batch: Batch | None
    ) -> tuple[Stream, Callable[[], None]]:
        """The stream of a state, and what takes it up, which cannot fail."""

    @abstractmethod
    def _adopt_brief(self, brief: Any, batch: Batch | None) -> tuple[Source, Callable[[], None]]:
        """The same of what the state of a mixture says of one of its sources."""

    @abstractmethod
    def _as_source(self, one_of: OneOf) -> Source:
        """Choose what was left open, as one of several sources."""

    def _part(self) -> Self:
        """A copy that is a part of another stream: it is never iterated by itself."""
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__)
        part._runner = part._live = part._stream = part._agreed = part._shared = None
        part._is_part = True
        return part

    # ---- what is streamed -----------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """This process's share; found at first use and fixed from then on."""
        if self._topology is None:
            self._topology = resolve_topology(*self._topology_given)
        return self._topology

    def _replicate(self, replicas: Replicas) -> None:
        """Let groups of ranks read the same data, before rank and world size are used.

        Args:
            replicas: As the constructor takes it.

        Raises:
            ArgumentError: If it was given before, or the share of this rank is fixed.
        """
        rank, world_size, given = self._topology_given
        if given is not None or self._stream is not None:
            raise ArgumentError(
                f"replicas={replicas!r} comes too late: the dataset has replicas={given!r} and "
                f"reads share {self.topology.rank} of {self.topology.size}; give it to the dataset"
            )
        self._topology_given, self._topology = (rank, world_size, replicas), None
        if rank is not None or world_size is not None:
            _ = self.topology

    @property
    def num_splits(self) -> int:
        """Lanes of the order."""
        return self.stream().num_splits

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._position.epoch

    def stream(self, global_batch: Batch | None = None) -> Stream:
        """Resolve what is read and its order, at first use.

        Args:
            global_batch: What a step is, of the loader that asks.
        """
        batch = global_batch or self.global_batch
        known = self._stream
        # What the batch decides is settled by the first iterator or state, not by a look.
        if known is None or (self._agreed is not known and batch != self._stream_batch):
            self._stream = self._resolve(batch)
            self._stream_batch = batch
            return self._stream
        return known

    @property
    def global_batch(self) -> Batch | None:
        """What a step is over all ranks: so many rows, or a `TokenBudget`; None in row mode."""
        return self._sizes.step(self.topology.size) if self._sizes.given else None

    def _worker(self) -> Worker:
        real = current_worker()
        if self._worker_override is None:
            return real or Worker()
        if real is not None:
            warnings.warn(
                "worker_info_override takes the place of torch's worker info",
                DestrierWarning,
                stacklevel=3,
            )
        return Worker(self._worker_override.id, self._worker_override.num_workers)

    # ---- iteration ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Row mode: rows of this rank in an epoch. Batch mode: its steps."""
        shares = self._shares(ONLY_WORKER)(self.epoch, 0)
        return shares.rows_left if isinstance(shares, Cycles) else len(shares)

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch: the loaded position once, else the next epoch.

        Raises:
            IterationError: In a forked process, or at the first ``next`` while another iterator of
                this dataset is live.
        """
        check_process()
        if current_worker() is not None and self._shared is not None:
            if self._placed:
                self._shared.begin_at(self._position.epoch)
            else:
                self._position = Position(*self._shared.begin())
        self._placed = False
        return DatasetIterator(self)

    def _shares(self, worker: Worker) -> Callable[[int, int], Shares]:
        """From an epoch and a start counter to its shares."""
        stream = self.stream()
        topology = self.topology
        batch = self.global_batch
        if batch is None:
            whole = stream.cycles(topology, worker)
            rows = max(self._read_batch_size, whole.owned)
            return lambda epoch, start: whole.at(epoch, start, rows)
        steps = stream.steps(batch, topology, self.remainder, worker)
        steps.check(uneven=self.uneven)
        return steps.at

    def _start(self, position: Position) -> tuple[Runner, Shares]:
        """The running pipeline at a position."""
        stream = self._settle()
        if self._runner is not None and self._runner.work.stream is not stream:
            self._runner.stop()  # the stream was changed since, as by `Mixture.reweight`
            self._runner = None
        if self._runner is None:
            worker = self._worker()
            shares = self._shares(worker)
            batch = self.global_batch
            feed = stream.feed(
                FeedOptions(
                    columns=self.columns,
                    topology=self.topology,
                    batch=batch,
                    own_rows=shares(0, 0).rows_left,
                    prefetch_bytes=self._prefetch_bytes,
                    columnar=batch is not None and self.transform is None,
                    worker=worker,
                    counts=self._counts,
                    cache=self._cache,
                )
            )
            threads = 0 if self.transform is None else self._threads or usable_cores()
            finish: Callable[[RawBatch], Finished]
            if batch is None:
                finish = RowFinisher(
                    self.transform, self._on_transform_error, self._read_batch_size
                )
            else:
                finish = self._batch_finisher(feed, stream)
            work = Work(
                stream=stream,
                feed=feed,
                finish=finish,
                shares=shares,
                threads=threads,
                prefetch_bytes=self._prefetch_bytes,
                most_ready=self._queue_depth,
            )
            self._runner = Runner(work, self)
        return self._runner, self._runner.start(position.epoch, position.counter)

    def _batch_finisher(self, feed: Feed, stream: Stream) -> Finisher:
        index = feed.index_columns if self.with_index else ()
        check_extra_columns(feed.schema.names, index, self.remainder, stream.names)
        return Finisher(
            stream.names,
            stream.seed,
            "torch" if self.transform is None else "arrow",
            {},
            transform=self.transform,
            with_index=self.with_index,
        )

    def _settle(self, global_batch: Batch | None = None) -> Stream:
        """The stream for an iterator; the ranks compare it once, before the first batch.

        Raises:
            StateError: If two ranks have different plans.
        """
        if self._agreed is None or self._agreed is not self._stream:
            self._agreed = self._compared(lambda: self.stream(global_batch))
        return self._agreed

    def _compared(self, resolve: Callable[[], Stream]) -> Stream:
        """What resolving gives, once the ranks have found that they have the same.

        Raises:
            StateError: If two ranks have different plans.
        """
        if current_worker() is not None:  # workers belong to no process group
            return resolve()
        mesh = self._topology_given[2]
        group = None if mesh is None or isinstance(mesh, int) else mesh.get_group()
        return agree(resolve, self.topology, group)

    def _leave(self, iterator: Consumer) -> None:
        """Forget an iterator, if it is the live one."""
        if self._live is not None and self._live() in (None, iterator):
            self._live = None
            self._last_consumed = iterator.consumed

    def _check_free(self) -> None:
        """Raise if an iterator of this dataset, or of a loader over it, is live."""
        if self._live is not None and self._live() is not None:
            raise IterationError(
                f"{type(self).__name__} does not support concurrent iteration: another iterator of "
                "this dataset, or of a loader over it, is live; exhaust or close() it first, or "
                "make a second dataset"
            )

    # ---- the state ------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The position and identity, as JSON scalars; the same on every rank.

        In row mode the counter is whole cycles: a part of a cycle is repeated after a resume.

        Raises:
            IterationError: In the parent of DataLoader workers, which run ahead of the consumer.
        """
        if self._shared is not None and self._shared.reading and current_worker() is None:
            raise IterationError(
                "DataLoader workers read ahead of the consumer, so this dataset does not know the "
                "position; use destrier.StreamingDataLoader, whose state_dict does"
            )
        position = self._position
        return self.stream().state(position.epoch, position.counter)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the next ``iter`` continues there.

        Args:
            state: From `state_dict`, of any rank. An empty one does nothing.

        Raises:
            StateError: If it is not a state, or of another stream; names both values.
            VersionError: If the table's version of the state is gone.
        """
        self._load(state, self.global_batch)

    def _load(self, state: Mapping[str, Any], batch: Batch | None) -> None:
        if isinstance(state, Mapping) and not state:
            return
        stream, take_up = self._adopt(state, batch)
        self._stop()
        take_up()
        self._stream = stream
        self._stream_batch = batch
        self._position = Position(int(state["epoch"]), int(state["counter"]))
        self._place()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter``.

        The number of a loaded, unfinished epoch changes nothing; another drops the loaded
        position, with a warning.
        """
        epoch = integer("epoch", epoch, 0, 1 << 32)
        before = self._position
        if self._shared is not None and self._shared.reading and current_worker() is None:
            before = Position(epoch)  # DataLoader workers took up the loaded one
        if not before.begun and before.counter and before.epoch != epoch:
            warnings.warn(
                f"set_epoch({epoch}) drops the loaded position: epoch {before.epoch}, counter "
                f"{before.counter}",
                DestrierWarning,
                stacklevel=2,
            )
        self._position = before.with_epoch(epoch)
        self._place()

    def _place(self) -> None:
        """Tell the copies in workers where the next iterator begins."""
        if current_worker() is not None:
            self._placed = True
        elif self._shared is not None:
            ahead = self._position.begin()
            self._shared.place(ahead.epoch, ahead.counter)

    @staticmethod
    def merge_state_dicts(states: list[State]) -> State:
        """Check that all ranks saved the same state, and return it.

        Raises:
            StateError: If two differ; names the key and both values.
        """
        return merge_states(states)

    def close(self) -> None:
        """Stop reading ahead, and wait for the threads to end."""
        self._stop(wait=True)

    def _stop(self, *, wait: bool = False) -> None:
        live = None if self._live is None else self._live()
        if live is not None:
            live.end("the dataset or loader was closed, or a state was loaded")
        if self._runner is not None:
            self._runner.stop(wait=wait)
        self._runner = None
        self._live = None

    # ---- pickling -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the running parts; the topology is fixed here, in the parent."""
        if not self._is_part:
            _ = self.topology
            if get_spawning_popen() is not None:
                self._settle()  # workers cannot: see `_compared`
            if self._shared is None:
                self._shared = Shared()
                self._place()
        state = self.__dict__.copy()
        state.update(_runner=None, _live=None, _last_consumed=0, _topology_given=(None, None, None))
        # The stream is resolved again in the other process, from the selection's shared file.
        state["_stream"] = state["_agreed"] = None
        return state


def _check_options(columns: Any, transform: Any) -> None:
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence)):
        raise ArgumentError(f"columns must be a list of names, got {columns!r}")
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform must be callable, got {transform!r}")
