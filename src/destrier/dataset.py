"""StreamingDataset: which rows in which order, as a torch IterableDataset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from destrier.bucketing.buckets import Batch
from destrier.check import check_positive
from destrier.errors import ArgumentError, DestrierWarning, StateError, VersionError
from destrier.foreign import as_permutation
from destrier.order import Order
from destrier.packing.packed import Packed
from destrier.packing.per_epoch import BudgetPacking, block_rows, budget_packing
from destrier.permutation import Part, Permutation, describe
from destrier.plan import Remainder
from destrier.resolving import OneOf, check_table, resolve_stream
from destrier.rows import OnTransformError
from destrier.runner import (
    DEFAULT_PREFETCH_BYTES,
)
from destrier.settings import Settings
from destrier.state import State, check_state, expanded
from destrier.stream import TableStream
from destrier.streaming import Streaming
from destrier.table import Table, open_table
from destrier.view import View

if TYPE_CHECKING:
    from destrier.foreign import PermutationLike
    from destrier.loader import StreamingDataLoader
    from destrier.refreshing import StorageOptions
    from destrier.table import TableLike
    from destrier.topology import Replicas

__all__ = ["StreamingDataLoader", "StreamingDataset"]


def __getattr__(name: str) -> Any:
    # Code written for lancedb.streaming imports both names from one module.
    if name == "StreamingDataLoader":
        from destrier.loader import StreamingDataLoader

        return StreamingDataLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class StreamingDataset(Streaming):
    """Streams the rows of a Lance table in an order that does not depend on the topology.

    Without a batch size it yields rows as dicts (*row mode*, as LanceDB's StreamingDataset): each
    rank owns a contiguous block of splits, each DataLoader worker a part of it. With a batch size
    it yields whole batches as dicts of tensors (*batch mode*): use ``DataLoader(dataset,
    batch_size=None)``. Best of all, hand it to a `StreamingDataLoader`.

    Each ``iter`` gives one epoch; the next one gives the next epoch. The state is one counter and
    the identity of the stream, so it can be loaded on any number of ranks and workers.

    Args:
        table: A URI or path of a Lance dataset, a `lance.LanceDataset`, a LanceDB table, a `View`
            of one, whose rows and version are then those of the stream; or the documents of any of
            these as blocks of tokens, `Packed`.
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
        bucket_by: Batch mode and loaders: a column of lists, or of integers that are lengths; every
            batch has rows that are about equally long, so that little is padded. Other rows are
            together in each epoch.
        bucket_window: Batches whose rows are sorted by length together. None is 64.
        epoch: The first epoch.
        rank: This process's rank; None finds it (torch.distributed, then RANK).
        world_size: Number of processes; None finds it.
        replicas: How many successive ranks read the same data, or the data dimension of a mesh.
        batch_size: Rows of a batch of one rank: batch mode.
        global_batch_size: Rows of a batch over all ranks: batch mode.
        global_batch_tokens: Batch mode, with ``bucket_by``: the most tokens of a batch over all
            ranks, padded to its longest row. Batches then have a varying number of rows.
        batch_multiple: With ``global_batch_tokens``: what the number of rows of a batch is a
            multiple of, so that the ranks share it equally. None is the world size of the first
            start; a state keeps it.
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
        pack_sequences: Row mode: rows are blocks of so many tokens, ``input_ids`` and ``doc_ids``,
            of the documents in the one list column that ``columns`` names. With batches use
            `Packed`, which can do more.
        eos_id: With pack_sequences: the token to end each document with.
        pad_id: With pack_sequences: the token that fills blocks where tokens are too few. No
            document has it.
        blocks_per_epoch: With pack_sequences: how many blocks an epoch has over all ranks, a
            multiple of num_splits; or ``"auto"``, all that the tokens fill.

    Raises:
        ArgumentError: If an argument cannot be used.
        TableError: If the table cannot be opened.

    Example:
        >>> dataset = StreamingDataset("digits.lance", filter="label < 5")  # doctest: +SKIP
        >>> row = next(iter(dataset))  # doctest: +SKIP
    """

    def __init__(
        self,
        table: TableLike | View | Packed,
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
        bucket_by: str | None = None,
        bucket_window: int | None = None,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        replicas: Replicas | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        batch_multiple: int | None = None,
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
        budget = None
        if pack_sequences is not None:
            sizes = {
                "batch_size": batch_size,
                "global_batch_size": global_batch_size,
                "global_batch_tokens": global_batch_tokens,
            }
            _check_row_mode(table, transform, sizes)
            budget = budget_packing(
                pack_sequences,
                eos_id=eos_id,
                pad_id=pad_id,
                blocks_per_epoch=blocks_per_epoch,
                columns=columns,
                num_splits=num_splits,
            )
            columns, transform = None, block_rows
        else:
            _check_unpacked(blocks_per_epoch=blocks_per_epoch, eos_id=eos_id, pad_id=pad_id)
        if prefetch_batches is not None:
            warnings.warn(
                "prefetch_batches is deprecated, pass io_queue_depth", DestrierWarning, stacklevel=2
            )
            io_queue_depth = prefetch_batches
        check_positive(io_queue_depth=io_queue_depth)
        super().__init__(
            columns=columns,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            replicas=replicas,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            global_batch_tokens=global_batch_tokens,
            batch_multiple=batch_multiple,
            remainder=remainder,
            uneven=uneven,
            with_index=with_index,
            transform=transform,
            on_transform_error=on_transform_error,
            transform_parallelism=transform_parallelism,
            transform_queue_depth=transform_queue_depth,
            read_batch_size=read_batch_size,
            prefetch_bytes=prefetch_bytes,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            worker_info_override=worker_info_override,
        )
        packed = table if isinstance(table, Packed) else None
        source = table.table if isinstance(table, Packed) else table
        view = None
        if isinstance(source, View):
            _check_view(source, version, permutation)
            if packed is None and budget is None and columns is None:
                self.columns = source.columns
            view, source = source.rows, source.table
        self._settings = Settings(
            filter=filter,
            view=view,
            num_splits=num_splits,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_clump_size=shuffle_clump_size,
            shuffle_window=shuffle_window,
            packing=budget if packed is None else packed.packing,
            bucket_by=bucket_by,
            bucket_window=bucket_window,
        )
        self.packs = pack_sequences is not None
        self._connection_factory = connection_factory
        self._adopted: Settings | None = None
        # The rows of a view hold for its version, as those of a version that was given.
        self._version_given = version is not None or view is not None
        self._table = open_table(source, version=version, storage_options=storage_options)
        if permutation is not None:
            listing, self._table = as_permutation(permutation, self._table)
            self._settings = replace(self._settings, permutation=listing)
        if pin is not None and self.topology.rank == 0:
            self._table.pin(pin)
        if budget is not None:
            budget.schema(self._table)  # refuses a column that holds no tokens
        self._table.warn_if_scattered()

    def __repr__(self) -> str:
        return f"StreamingDataset({self._table!r}, epoch={self._position.epoch})"

    # ---- what is streamed -----------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """The pinned table."""
        return self._table

    def stream(self, global_batch: Batch | None = None) -> TableStream:
        """Resolve the table, the selection and the order, at first use.

        Args:
            global_batch: What a step is, of the loader that asks.
        """
        stream = super().stream(global_batch)
        assert isinstance(stream, TableStream)
        return stream

    def _resolve(self, batch: Batch | None) -> TableStream:
        multiple = 1 if batch else self.topology.size
        settings = self._adopted or self._settings
        packing = settings.packing
        if isinstance(packing, BudgetPacking) and settings.num_splits is None and batch is None:
            splits = packing.num_splits(multiple, shuffle=settings.shuffled)
            settings = replace(settings, num_splits=splits)
        return resolve_stream(self._table, settings, global_batch=batch, multiple=multiple)

    def _as_source(self, one_of: OneOf) -> TableStream:
        settings = self._adopted or self._settings
        stream = resolve_stream(
            self._table, settings, global_batch=one_of.global_batch, one_of=one_of
        )
        return self._with_columns(stream)

    def _with_columns(self, stream: TableStream) -> TableStream:
        """The stream as a source, of which the feed of the whole does not know the columns."""
        return replace(stream, source_columns=self.columns)

    def permutation(self, epoch: int | None = None) -> Permutation:
        """Write an epoch's order down: streaming the result gives the same samples.

        Args:
            epoch: None takes the current epoch.
        """
        stream = self.stream()
        if stream.packed is not None or stream.bucketing is not None:
            what = "packed blocks" if stream.packed is not None else "batches by length"
            raise ArgumentError(
                f"the order of {what} cannot be written down as a list of rows; save the "
                "permutation of the rows that they are made of"
            )
        if stream.listed:
            header = describe(stream.table, num_splits=stream.num_splits)
            return Permutation([Part(None, stream.rows)], header)
        number = self._position.epoch if epoch is None else epoch
        order = stream.order(number)
        assert isinstance(order, Order)
        return Permutation.of_order(stream.table, stream.rows, order, filter=stream.identity.filter)

    # ---- the state ------------------------------------------------------------------------------

    def _adopt_brief(
        self, brief: Any, batch: Batch | None
    ) -> tuple[TableStream, Callable[[], None]]:
        stream, take_up = self._adopt(expanded(brief), batch)
        return self._with_columns(stream), take_up

    def _adopt(
        self, state: Mapping[str, Any], batch: Batch | None
    ) -> tuple[TableStream, Callable[[], None]]:
        checked = check_state(state)
        try:
            settings = self._settings.adopt(checked)
        except ArgumentError as error:
            raise StateError(f"the state is damaged: {error}") from error
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

        def take_up() -> None:
            self._table, self._adopted = table, settings

        return stream, take_up

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

    # ---- pickling -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._connection_factory is not None:
            state["_table"] = Table(self._table.uri, self._table.version)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._connection_factory is not None:
            name = os.path.basename(self._table.uri.rstrip("/")).removesuffix(".lance")
            source = self._connection_factory(name)
            self._table = open_table(source, version=self._table.version)


def _check_row_mode(table: Any, transform: Any, sizes: dict[str, Any]) -> None:
    """Raise if something is given that pack_sequences does not go with."""
    if isinstance(table, Packed):
        raise ArgumentError("pack_sequences cannot be given with a Packed, which packs already")
    if transform is not None:
        raise ArgumentError("transform cannot be combined with pack_sequences")
    for name, value in sizes.items():
        if value is not None:
            raise ArgumentError(
                f"{name}={value!r} cannot be combined with pack_sequences, which gives single "
                "blocks: pass Packed(table, block_size=...) as the table"
            )


def _check_unpacked(**given: Any) -> None:
    """Raise if something is given that is of no use without pack_sequences."""
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"{name} requires pack_sequences, which is not given, so {name}={value!r} would "
                "have no effect; blocks for training come from Packed(table, block_size=...)"
            )


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
