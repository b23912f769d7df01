"""StreamingDataset: which rows in which order, as a torch IterableDataset."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from destrier.batch import Finished, Finisher, RawBatch, check_extra_columns
from destrier.caching.location import CacheFolder
from destrier.check import integer
from destrier.counters import Consumer, Counted
from destrier.errors import ArgumentError, DestrierWarning, IterationError, StateError, VersionError
from destrier.foreign import as_permutation
from destrier.iteration import DatasetIterator
from destrier.permutation import Part, Permutation, describe
from destrier.plan import Cycles, Remainder, Shares, Steps, check_sizes, steps_of_epoch
from destrier.process import check_process
from destrier.read import Reader
from destrier.rows import OnTransformError, RowFinisher, check_on_transform_error
from destrier.runner import (
    DEFAULT_PREFETCH_BYTES,
    Runner,
    Work,
    agree,
    chosen_columns,
    owned_rows,
    usable_cores,
)
from destrier.sharing import Shared
from destrier.state import Position, State, check_state, merge_states
from destrier.stream import Settings, Stream, check_table, resolve_stream
from destrier.table import Table, open_table
from destrier.topology import ONLY_WORKER, Topology, Worker, current_worker, resolve_topology
from destrier.view import View

if TYPE_CHECKING:
    from destrier.foreign import PermutationLike
    from destrier.loader import StreamingDataLoader
    from destrier.refreshing import StorageOptions
    from destrier.table import TableLike
    from destrier.topology import Replicas

__all__ = ["StreamingDataLoader", "StreamingDataset"]

_PACKING = ("pack_sequences", "eos_id", "pad_id", "blocks_per_epoch")


def __getattr__(name: str) -> Any:
    # Code written for lancedb.streaming imports both names from one module.
    if name == "StreamingDataLoader":
        from destrier.loader import StreamingDataLoader

        return StreamingDataLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class StreamingDataset(Counted, IterableDataset[Any]):
    """Streams the rows of a Lance table in an order that does not depend on the topology.

    Without a batch size it yields rows as dicts (*row mode*, as LanceDB's StreamingDataset): each
    rank owns a contiguous block of splits, each DataLoader worker a part of it. With a batch size
    it yields whole batches as dicts of tensors (*batch mode*): use ``DataLoader(dataset,
    batch_size=None)``. Best of all, hand it to a `StreamingDataLoader`.

    Each ``iter`` gives one epoch; the next one gives the next epoch. The state is one counter and
    the identity of the stream, so it can be loaded on any number of ranks and workers.

    Args:
        table: A URI or path of a Lance dataset, a `lance.LanceDataset`, a LanceDB table, or a
            `View` of one, whose rows and version are then those of the stream.
        version: Version number or tag. None takes the latest, or a loaded state's.
        storage_options: Passed to Lance, with limits on retries where they name none; or a
            function that returns them and is called again before their ``expires_at_millis``.
        pin: Tags the version under this name, so that a cleanup cannot remove it (rank 0 writes).
        columns: Names of the columns to read; None reads all, or those of a view.
        filter: SQL expression; applied once, before anything is read. None takes a state's.
        permutation: A `Permutation`, or any table with a column of row offsets, that lists the
            rows. LanceDB's permutation tables too.
        num_splits: Lanes that the order is dealt into. Row mode: a multiple of world size times
            workers. None chooses.
        shuffle: False gives table order. None is True, or False with a permutation.
        shuffle_seed: From 0 to 2**32 - 1. None is 0, or a loaded state's.
        shuffle_clump_size: Rows that are permuted as one and read as one. None chooses by size.
        shuffle_window: Clumps inside which rows are permuted. None chooses.
        epoch: The first epoch.
        rank: This process's rank; None finds it (torch.distributed, then RANK).
        world_size: Number of processes; None finds it.
        replicas: How many successive ranks read the same data, or the data dimension of a mesh.
        batch_size: Rows of a batch of one rank: batch mode.
        global_batch_size: Rows of a batch over all ranks: batch mode.
        remainder: What happens to the last, short step: ``"drop"``, ``"keep"`` or ``"pad"``.
        uneven: Allow shares of a step that differ by one.
        with_index: Batch mode: add ``sample_index`` and ``row_offset``.
        transform: Called with RecordBatches. Row mode: of at most ``read_batch_size`` rows; returns
            one output row per input row. Batch mode: of one batch; its result is the batch.
        on_transform_error: Row mode: ``"raise"``, ``"skip"``, ``"warn"`` or a callable.
        transform_parallelism: Threads that run the transform; None takes the processor count.
        transform_queue_depth: Row mode: batches of ``read_batch_size`` that may wait transformed.
        read_batch_size: Row mode: rows of a RecordBatch handed to the transform.
        io_queue_depth: Accepted for LanceDB's sake; reads are sized by bytes.
        prefetch_bytes: What open rows and batches that wait may take in this process.
        cache_dir: A folder on local disk that keeps what is read, for later epochs and other jobs.
        cache_bytes: What the folder may take; None is 32 GiB.
        connection_factory: Called with the table's name in another process to open the table
            there, so that no credentials travel in a pickle.
        worker_info_override: An object with ``id`` and ``num_workers``, for tests.
        prefetch_batches: Deprecated name of io_queue_depth.
        pack_sequences: Packing is not available yet; must be None.
        eos_id: As pack_sequences.
        pad_id: As pack_sequences.
        blocks_per_epoch: As pack_sequences.

    Raises:
        ArgumentError: If an argument cannot be used.
        TableError: If the table cannot be opened.

    Example:
        >>> dataset = StreamingDataset("digits.lance", filter="label < 5")  # doctest: +SKIP
        >>> row = next(iter(dataset))  # doctest: +SKIP
    """

    def __init__(
        self,
        table: TableLike | View,
        *,
        version: int | str | None = None,
        storage_options: StorageOptions | None = None,
        pin: str | None = None,
        columns: list[str] | None = None,
        filter: str | None = None,
        permutation: PermutationLike = None,
        num_splits: int | None = None,
        shuffle: bool | None = None,
        shuffle_seed: int | None = None,
        shuffle_clump_size: int | None = None,
        shuffle_window: int | None = None,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        replicas: Replicas | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        remainder: Remainder = "drop",
        uneven: bool = False,
        with_index: bool = False,
        transform: Callable[..., Any] | None = None,
        on_transform_error: OnTransformError = "raise",
        transform_parallelism: int | None = None,
        transform_queue_depth: int | None = None,
        read_batch_size: int = 64,
        io_queue_depth: int = 4,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        connection_factory: Callable[[str], Any] | None = None,
        worker_info_override: Any = None,
        prefetch_batches: int | None = None,
        pack_sequences: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        blocks_per_epoch: int | str | None = None,
    ) -> None:
        super().__init__()
        _refuse_packing((pack_sequences, eos_id, pad_id, blocks_per_epoch))
        if prefetch_batches is not None:
            warnings.warn(
                "prefetch_batches is deprecated, pass io_queue_depth", DestrierWarning, stacklevel=2
            )
            io_queue_depth = prefetch_batches
        _check_options(
            columns,
            transform,
            read_batch_size=read_batch_size,
            io_queue_depth=io_queue_depth,
            transform_parallelism=transform_parallelism,
            transform_queue_depth=transform_queue_depth,
            prefetch_bytes=prefetch_bytes,
        )
        check_on_transform_error(on_transform_error)
        sizes = check_sizes(batch_size, global_batch_size, remainder)
        view = None
        if isinstance(table, View):
            _check_view(table, version, permutation)
            columns = table.columns if columns is None else columns
            view, table = table.rows, table.table
        self._settings = Settings(
            filter=filter,
            view=view,
            num_splits=num_splits,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_clump_size=shuffle_clump_size,
            shuffle_window=shuffle_window,
        )
        self.columns = columns
        self.transform = transform
        self.batch_size, self.global_batch_size = sizes
        self.remainder = remainder
        self.uneven = uneven
        self.with_index = with_index
        self._on_transform_error = on_transform_error
        self._threads = transform_parallelism
        self._queue_depth = transform_queue_depth
        self._read_batch_size = read_batch_size
        self._prefetch_bytes = prefetch_bytes
        self._cache = CacheFolder.of(cache_dir, cache_bytes)
        self._connection_factory = connection_factory
        self._worker_override = worker_info_override
        self._topology_given = (rank, world_size, replicas)
        self._topology: Topology | None = None
        self._position = Position(integer("epoch", epoch, 0, 1 << 32))
        self._stream: Stream | None = None
        self._runner: Runner | None = None
        self._live: weakref.ref[Consumer] | None = None
        self._stream_batch: int | None = None
        self._agreed: Stream | None = None
        self._last_consumed = 0
        self._shared: Shared | None = None
        self._placed = False
        self._adopted: Settings | None = None
        # The rows of a view hold for its version, as those of a version that was given.
        self._version_given = version is not None or view is not None
        if rank is not None or world_size is not None:
            _ = self.topology  # refuses a rank out of range at once
        self._table = open_table(table, version=version, storage_options=storage_options)
        if permutation is not None:
            listing, self._table = as_permutation(permutation, self._table)
            self._settings = replace(self._settings, permutation=listing)
        if pin is not None and self.topology.rank == 0:
            self._table.pin(pin)
        self._table.warn_if_scattered()

    def __repr__(self) -> str:
        return f"StreamingDataset({self._table!r}, epoch={self._position.epoch})"

    # ---- what is streamed -----------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """The pinned table."""
        return self._table

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

    def stream(self, global_batch: int | None = None) -> Stream:
        """Resolve the table, the selection and the order, at first use.

        Args:
            global_batch: Samples in a step, of the loader that asks.
        """
        batch = global_batch or self._global_batch()
        known = self._stream
        # What the batch decides is settled by the first iterator or state, not by a look.
        if known is None or (self._agreed is not known and batch != self._stream_batch):
            multiple = 1 if batch else self.topology.size
            self._stream = resolve_stream(
                self._table,
                self._adopted or self._settings,
                global_batch=batch,
                multiple=multiple,
            )
            self._stream_batch = batch
            return self._stream
        return known

    def _global_batch(self) -> int | None:
        if self.global_batch_size is not None:
            return self.global_batch_size
        return None if self.batch_size is None else self.batch_size * self.topology.size

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

    def permutation(self, epoch: int | None = None) -> Permutation:
        """Write an epoch's order down: streaming the result gives the same samples.

        Args:
            epoch: None takes the current epoch.
        """
        stream = self.stream()
        if stream.listed:
            header = describe(stream.table, num_splits=stream.num_splits)
            return Permutation([Part(None, stream.rows)], header)
        number = self._position.epoch if epoch is None else epoch
        return Permutation.of_order(
            stream.table, stream.rows, stream.order(number), filter=stream.identity.filter
        )

    # ---- iteration ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Row mode: rows of this rank in an epoch. Batch mode: its steps."""
        shares = self._shares(ONLY_WORKER)(0)
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

    def _shares(self, worker: Worker) -> Callable[[int], Shares]:
        """From a start counter to the shares of an epoch."""
        stream = self.stream()
        topology = self.topology
        batch = self._global_batch()
        if batch is None:
            whole = Cycles(stream.count, 0, stream.num_splits, topology, worker)
            rows = max(self._read_batch_size, whole.owned)
            return lambda start: replace(whole, start=start, rows=rows)
        steps = Steps(stream.count, 0, batch, stream.num_splits, topology, self.remainder, worker)
        return steps_of_epoch(steps, uneven=self.uneven)

    def _start(self, position: Position) -> tuple[Runner, Shares]:
        """The running pipeline at a position."""
        if self._runner is None:
            worker = self._worker()
            stream = self._settle()
            shares = self._shares(worker)
            columns = chosen_columns(stream, self.columns)
            reader = Reader(
                stream.table, columns, counts=self._counts, cache=self._cache, rows=stream.rows
            )
            batch = self._global_batch()
            held = owned_rows(stream, self.topology, batch, worker)
            threads = 0 if self.transform is None else self._threads or usable_cores()
            finish: Callable[[RawBatch], Finished]
            if batch is None:
                finish = RowFinisher(
                    self.transform, self._on_transform_error, self._read_batch_size
                )
            else:
                finish = self._batch_finisher(reader, stream)
            work = Work(
                stream=stream,
                reader=reader,
                finish=finish,
                shares=shares,
                columnar=batch is not None and self.transform is None,
                threads=threads,
                prefetch_bytes=self._prefetch_bytes,
                open_rows=held,
                padded=batch is not None and self.remainder == "pad",
                most_ready=self._queue_depth,
            )
            self._runner = Runner(work, self)
        return self._runner, self._runner.start(position.epoch, position.counter)

    def _batch_finisher(self, reader: Reader, stream: Stream) -> Finisher:
        check_extra_columns(reader.columns, self.with_index, self.remainder, stream.table)
        return Finisher(
            stream.table.name,
            stream.identity.shuffle_seed,
            "torch" if self.transform is None else "arrow",
            {},
            transform=self.transform,
            with_index=self.with_index,
        )

    def _settle(self, global_batch: int | None = None) -> Stream:
        """The stream for an iterator; the ranks compare it once, before the first batch.

        Raises:
            StateError: If two ranks have different plans.
        """
        if self._agreed is None or self._agreed is not self._stream:
            if current_worker() is None:
                mesh = self._topology_given[2]
                group = None if mesh is None or isinstance(mesh, int) else mesh.get_group()
                agree(lambda: self.stream(global_batch), self.topology, group)
            self._agreed = self.stream(global_batch)
        return self._agreed

    def _leave(self, iterator: Consumer) -> None:
        """Forget an iterator, if it is the live one."""
        if self._live is not None and self._live() in (None, iterator):
            self._live = None
            self._last_consumed = iterator.consumed

    def _check_free(self) -> None:
        """Raise if an iterator of this dataset, or of a loader over it, is live."""
        if self._live is not None and self._live() is not None:
            raise IterationError(
                "StreamingDataset does not support concurrent iteration: another iterator of this "
                "dataset, or of a loader over it, is live; exhaust or close() it first, or make a "
                "second dataset"
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
        return self.stream().identity.state(position.epoch, position.counter)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the next ``iter`` continues there.

        Args:
            state: From `state_dict`, of any rank. An empty one does nothing.

        Raises:
            StateError: If it is not a state, or of another stream; names both values.
            VersionError: If the table's version of the state is gone.
        """
        self._load(state, self._global_batch())

    def _load(self, state: Mapping[str, Any], batch: int | None) -> None:
        if isinstance(state, Mapping) and not state:
            return
        checked = check_state(state)
        settings = self._settings.adopt(checked)
        table = self._table
        if table.identity != checked["table_identity"] and not self._version_given:
            table = self._table_of(checked)
        check_table(table, checked, version_given=self._version_given)
        multiple = 1 if batch else self.topology.size
        try:
            stream = resolve_stream(table, settings, global_batch=batch, multiple=multiple)
        except ArgumentError as error:
            raise StateError(f"the state does not fit {table.name}: {error}") from error
        stream.check_plan(checked)
        self._stop()
        self._table, self._stream, self._adopted = table, stream, settings
        self._stream_batch = batch
        self._position = Position(int(checked["epoch"] or 0), int(checked["counter"] or 0))
        self._place()

    def _table_of(self, state: State) -> Table:
        """The table at the version of a state."""
        try:
            return self._table.at(int(state["table_version"] or 0))
        except VersionError as error:
            raise VersionError(
                f"the state was saved on version {state['table_version']} of a table with identity "
                f"{state['table_identity']}, this stream reads {self._table.name} with identity "
                f"{self._table.identity}: {error}"
            ) from error

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter``.

        The number of a loaded, unfinished epoch changes nothing; another drops the loaded
        position, with a warning.
        """
        epoch = integer("epoch", epoch, 0, 1 << 32)
        before = self._position
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
        _ = self.topology
        if get_spawning_popen() is not None:
            self._settle()  # workers belong to no process group
        if self._shared is None:
            self._shared = Shared()
            self._place()
        state = self.__dict__.copy()
        state.update(_runner=None, _live=None, _last_consumed=0, _topology_given=(None, None, None))
        # The stream is resolved again in the other process, from the selection's shared file.
        state["_stream"] = state["_agreed"] = None
        if self._connection_factory is not None:
            state["_table"] = Table(self._table.uri, self._table.version)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._connection_factory is not None:
            name = os.path.basename(self._table.uri.rstrip("/")).removesuffix(".lance")
            source = self._connection_factory(name)
            self._table = open_table(source, version=self._table.version)


def _refuse_packing(values: tuple[Any, ...]) -> None:
    for name, value in zip(_PACKING, values, strict=True):
        if value is not None:
            raise ArgumentError(f"{name} is not available yet: pack tokens before writing them")


def _check_view(view: View, version: Any, permutation: Any) -> None:
    """Raise if what a view says already is said otherwise."""
    if version is not None:
        raise ArgumentError(
            f"version={version!r} cannot be given with a view, whose rows are those of version "
            f"{view.table.version}: make the view of the table at the version that you want"
        )
    if permutation is not None:
        raise ArgumentError(
            f"permutation cannot be given with a view of {len(view)} rows, because both list the "
            "rows: give the table with the permutation, or the view alone"
        )


def _check_options(columns: Any, transform: Any, **sizes: int | None) -> None:
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence)):
        raise ArgumentError(f"columns must be a list of names, got {columns!r}")
    if transform is not None and not callable(transform):
        raise ArgumentError(f"transform must be callable, got {transform!r}")
    for name, size in sizes.items():
        if size is not None and integer(name, size, -(1 << 62)) <= 0:
            raise ArgumentError(f"{name} must be greater than 0, got {size}")
