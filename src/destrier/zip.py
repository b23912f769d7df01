"""Zip: one sample of each of several streams, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from destrier.bucketing.buckets import Batch, samples_of
from destrier.check import integer
from destrier.errors import ArgumentError, StateError
from destrier.mixing.parts import adopt_parts, check_sources, part_of, resolve_parts
from destrier.mixing.zipstream import STOPS, ZipStop, ZipStream, columns_by_source
from destrier.plan import Remainder
from destrier.resolving import OneOf
from destrier.rows import OnTransformError
from destrier.runner import DEFAULT_PREFETCH_BYTES
from destrier.sizing import default_num_splits
from destrier.state import check_state, parsed
from destrier.streaming import Streaming

if TYPE_CHECKING:
    from destrier.packing.packed import Packed
    from destrier.table import TableLike
    from destrier.topology import Replicas
    from destrier.view import View

__all__ = ["Zip"]


class Zip(Streaming):
    """One sample of each of several streams, side by side, on one counter.

    Goes wherever a `StreamingDataset` goes. Sample g of an epoch is made of sample g of each
    source, in that one's own order: with ``shuffle=False`` in the sources, row i stands beside row
    i. A batch has the columns of all sources; column ``jpg`` of source ``image`` is ``image.jpg``.

    A row that fails in one source fails as a whole.

    Args:
        sources: From name to table, view, `StreamingDataset` or mixture.
        stop: When an epoch is over: ``"shortest"``, with the shortest source; or ``"longest"``,
            when every source came in full, and shorter ones again, each time in another order.
        seed: Of the seeds that a transform receives. None is 0, or a loaded state's. The order of
            rows is the sources' own.
        columns: Names of the columns to read, as ``"image.jpg"``; None reads what each source says.
        num_splits: Lanes of the zip: sample g is of lane g mod num_splits. None chooses.
        epoch: The first epoch.
        rank: As for `StreamingDataset`, like all that follow.
        world_size: Number of processes; None finds it.
        replicas: How many successive ranks read the same data, or the data dimension of a mesh.
        batch_size: Rows of a batch of one rank: batch mode.
        global_batch_size: Rows of a batch over all ranks: batch mode.
        remainder: What happens to the last, short step: ``"drop"``, ``"keep"`` or ``"pad"``.
        uneven: Allow shares of a step that differ by one.
        with_index: Batch mode: add ``sample_index``, and of each source its ``row_offset``, as
            ``"image.row_offset"``.
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
        ColumnError: If ``columns`` names a column of no source, or none of one.

    Example:
        >>> pairs = Zip({"image": "images.lance", "text": "texts.lance"})  # doctest: +SKIP
        >>> for batch in StreamingDataLoader(pairs, batch_size=64):  # doctest: +SKIP
        ...     images, tokens = batch["image.jpg"], batch["text.tokens"]
    """

    def __init__(
        self,
        sources: Mapping[str, Streaming | TableLike | View | Packed],
        *,
        stop: ZipStop = "shortest",
        seed: int | None = None,
        columns: list[str] | None = None,
        num_splits: int | None = None,
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
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        worker_info_override: Any = None,
    ) -> None:
        super().__init__(
            columns=columns,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            replicas=replicas,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
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
        check_sources(sources, "a zip")
        for name in sources:
            if "." in name:
                raise ArgumentError(
                    f"the names of a zip's sources have no dot, because columns are called by "
                    f"source, a dot and column; got {name!r}"
                )
        if stop not in STOPS:
            raise ArgumentError(f"stop must be one of {', '.join(STOPS)}, got {stop!r}")
        columns_by_source(list(sources), columns)  # refuses what is of none
        self._stop_rule: ZipStop = stop
        self._seed = None if seed is None else integer("seed", seed, 0, 1 << 32)
        self._num_splits = None if num_splits is None else integer("num_splits", num_splits, 1)
        self._sources = {name: part_of(name, source, None) for name, source in sources.items()}
        self._adopted: ZipStream | None = None

    def __repr__(self) -> str:
        return f"Zip({', '.join(self._sources)}, epoch={self._position.epoch})"

    # ---- what is streamed -----------------------------------------------------------------------

    @property
    def sources(self) -> list[str]:
        """The names of the sources."""
        return list(self._sources)

    def stream(self, global_batch: Batch | None = None) -> ZipStream:
        """Resolve the sources and what is paired with what, at first use.

        Args:
            global_batch: What a step is, of the loader that asks.
        """
        stream = super().stream(global_batch)
        assert isinstance(stream, ZipStream)
        return stream

    def _resolve(self, batch: Batch | None) -> ZipStream:
        samples = samples_of(batch)
        sources = resolve_parts(self._sources, OneOf(len(self._sources), samples, zipped=True))
        if self._adopted is not None:
            return replace(self._adopted, sources=sources)
        stream = ZipStream(sources, self._stop_rule, 1, self._seed or 0)
        return replace(stream, num_splits=self._num_splits or self._chosen_splits(stream, samples))

    def _chosen_splits(self, stream: ZipStream, batch: int | None) -> int:
        """As many lanes as a table of its length has."""
        multiple = 1 if batch else self.topology.size
        if not any(leaf.identity.shuffle for leaf in stream.leaves):
            return multiple
        return default_num_splits(min(stream.count, 1 << 40), global_batch=batch, multiple=multiple)

    def _part(self) -> NoReturn:
        raise ArgumentError(
            f"{self!r} cannot be a source of another stream, because its samples are of several "
            "tables each; give its sources to one Zip, and mix or cycle them there"
        )

    def _as_source(self, one_of: OneOf) -> NoReturn:  # noqa: ARG002 - a stream's signature
        self._part()

    # ---- the state ------------------------------------------------------------------------------

    def _adopt_brief(self, brief: Any, batch: Batch | None) -> NoReturn:  # noqa: ARG002 - likewise
        self._part()

    def _adopt(
        self, state: Mapping[str, Any], batch: Batch | None
    ) -> tuple[ZipStream, Callable[[], None]]:
        checked = check_state(state, "Zip")
        briefs = parsed(state, "sources")
        if set(briefs) != set(self._sources):
            raise StateError(
                f"sources mismatch: the state has {', '.join(briefs)}, this zip has "
                f"{', '.join(self._sources)}; make it as it was, or {_start(state)}"
            )
        for name, given, key in (
            ("seed", self._seed, "shuffle_seed"),
            ("num_splits", self._num_splits, "num_splits"),
            ("stop", self._stop_rule, "stop"),
        ):
            if given is not None and given != checked[key]:
                raise StateError(
                    f"{name} mismatch: the state has {checked[key]!r}, this zip was made with "
                    f"{given!r}; make it as it was, or {_start(state)}"
                )
        found, commit = adopt_parts(self._sources, briefs, samples_of(batch))
        stream = ZipStream(
            dict(zip(self._sources, found, strict=True)),
            self._stop_rule,
            int(state["num_splits"]),
            int(state["shuffle_seed"]),
        )
        if stream.plan_hash != checked["plan_hash"]:
            raise StateError(
                f"plan_hash mismatch: the state has {checked['plan_hash']}, this zip "
                f"{stream.plan_hash}; {_start(state)}"
            )
        if int(state["counter"]) > stream.count:
            raise StateError(
                f"counter {state['counter']} of the state is beyond the {stream.count} samples of "
                "an epoch: the state is damaged"
            )

        def take_up() -> None:
            commit()
            self._adopted = stream

        return stream, take_up

    # ---- pickling -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._adopted is not None:  # its sources are resolved again
            state["_adopted"] = replace(self._adopted, sources={})
        return state


def _start(state: Mapping[str, Any]) -> str:
    return f"start the next epoch instead of loading: epoch={int(state['epoch']) + 1}"
