"""Mixture: several streams as one, in exact proportions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from destrier.bucketing.buckets import Batch, samples_of
from destrier.check import integer
from destrier.errors import ArgumentError, IterationError, StateError
from destrier.iteration import LoaderIterator
from destrier.mixing.course import ENDLESS, Course, Segment, Stop
from destrier.mixing.parts import adopt_parts, check_sources, keep_chosen, part_of, resolve_parts
from destrier.mixing.quotas import default_window, exact_shares
from destrier.mixing.stream import BATCHINGS, Batching, MixtureStream, Source
from destrier.mixing.weights import check_weights, tempered
from destrier.plan import Remainder
from destrier.resolving import OneOf
from destrier.rows import OnTransformError
from destrier.runner import DEFAULT_PREFETCH_BYTES
from destrier.sizing import default_num_splits
from destrier.state import check_state, parsed
from destrier.streaming import Streaming
from destrier.topology import current_worker

if TYPE_CHECKING:
    from typing_extensions import Self

    from destrier.packing.packed import Packed
    from destrier.table import TableLike
    from destrier.topology import Replicas
    from destrier.view import View

__all__ = ["Mixture", "cycle"]

_STOPS = ("first_exhausted", "all_exhausted", "never")


class Mixture(Streaming):
    """Several streams as one, in exact proportions, on one counter.

    Goes wherever a `StreamingDataset` goes. Each window of ``window`` samples holds the share of
    every source exactly, in an order that differs by epoch; a source is read in its own order, and
    begins its next epoch, in another order, whenever it is through.

    Without ``weights`` and ``temperature`` every row of every source comes once.

    Args:
        sources: From name to table, view, `Packed`, `StreamingDataset` or mixture. Of a stream its
            rows, their order and its columns count, nothing else.
        weights: From name to a number, not negative: in which proportion samples come.
        temperature: Weights by length instead: length to the power of 1/temperature.
        seed: Of the order in which sources come. None is 0, or a loaded state's.
        stop: When an epoch is over: ``"first_exhausted"`` (the default with weights), before a
            source would come again; ``"all_exhausted"``, when every source came in full, and
            smaller ones again; ``"never"``.
        length: Samples in an epoch instead; the next one goes on where it stopped.
        batching: ``"mixed"``; ``"stratified"``, where each global batch has its exact quota; or
            ``"per_source"``, where each unit of samples is of one source.
        unit: Samples of a unit, of which global batches are multiples; None is the global batch of
            the start. The batch of a rank gives each rank a source of its own.
        window: Samples (units, for ``"per_source"``) in which the proportions are exact. None
            chooses 1,024, fewer for small sources; the global batch for ``"stratified"``.
        source_column: The name of a column that is added, with the name of each row's source.
        columns: Names of the columns to read; None reads what each source says. Sources must have
            the same columns, unless batches are of one source.
        num_splits: Lanes of row mode. None chooses.
        epoch: The first epoch.
        rank: As for `StreamingDataset`, like all that follow.
        world_size: Number of processes; None finds it.
        replicas: How many successive ranks read the same data, or the data dimension of a mesh.
        batch_size: Rows of a batch of one rank: batch mode.
        global_batch_size: Rows of a batch over all ranks: batch mode.
        remainder: What happens to the last, short step: ``"drop"``, ``"keep"`` or ``"pad"``.
        uneven: Allow shares of a step that differ by one.
        with_index: Batch mode: add ``sample_index`` and ``row_offset``.
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

    Example:
        >>> mixture = Mixture(  # doctest: +SKIP
        ...     {"web": "web.lance", "code": "code.lance"}, weights={"web": 3, "code": 1}
        ... )
        >>> loader = StreamingDataLoader(mixture, batch_size=64)  # doctest: +SKIP
    """

    def __init__(
        self,
        sources: Mapping[str, Streaming | TableLike | View | Packed],
        *,
        weights: Mapping[str, float] | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: str | None = None,
        length: int | None = None,
        batching: Batching = "mixed",
        unit: int | None = None,
        window: int | None = None,
        source_column: str | None = None,
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
        check_sources(sources, "a mixture")
        names = list(sources)
        if weights is not None and temperature is not None:
            raise ArgumentError(
                f"weights={weights!r} and temperature={temperature!r} are both given; pass one"
            )
        if temperature is not None:
            tempered([1], temperature)  # refuses what is no temperature
        self._weights = None if weights is None else check_weights(weights, names)
        self._temperature = temperature
        self._stop_rule = _stop_rule(stop, length, weighted=weights or temperature)
        self._length = length if length is None else integer("length", length, 1, 1 << 62)
        if batching not in BATCHINGS:
            raise ArgumentError(f"batching must be one of {', '.join(BATCHINGS)}, got {batching!r}")
        self._batching: Batching = batching
        for name, value, rule in (("unit", unit, "per_source"), ("window", window, None)):
            if value is not None:
                integer(name, value, 1)
                if rule not in (None, batching):
                    raise ArgumentError(f"{name} is for batching={rule!r}, not {batching!r}")
        if batching == "stratified" and window is not None:
            raise ArgumentError("the window of batching='stratified' is the global batch")
        if batching == "per_source" and self._stop_rule == "every_row_once":
            raise ArgumentError(
                "batching='per_source' cannot read every row once, because the rows of a source "
                "need not fill its last unit; give weights=, temperature= or length="
            )
        self._unit, self._window = unit, window
        self._seed = None if seed is None else integer("seed", seed, 0, 1 << 32)
        self._num_splits = None if num_splits is None else integer("num_splits", num_splits, 1)
        if source_column is not None and not isinstance(source_column, str):
            raise ArgumentError(f"source_column must be a name, got {source_column!r}")
        self.source_column = source_column
        self._sources = {name: part_of(name, source, columns) for name, source in sources.items()}
        self._adopted: MixtureStream | None = None

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self._sources)}, epoch={self._position.epoch})"

    # ---- what is streamed -----------------------------------------------------------------------

    @property
    def sources(self) -> list[str]:
        """The names of the sources."""
        return list(self._sources)

    def stream(self, global_batch: Batch | None = None) -> MixtureStream:
        """Resolve the sources and the course, at first use.

        Args:
            global_batch: What a step is, of the loader that asks.
        """
        stream = super().stream(global_batch)
        assert isinstance(stream, MixtureStream)
        return stream

    def _part(self) -> Self:
        part = super()._part()
        part._sources = {name: source._part() for name, source in self._sources.items()}
        return part

    def _as_source(self, one_of: OneOf) -> MixtureStream:
        if self._batching != "mixed":
            raise ArgumentError(
                f"a mixture with batching={self._batching!r} cannot be a source of another one: "
                "its batches would not stay together"
            )
        stream = self._resolve(one_of.global_batch)
        last = stream.course.segments[-1].weights
        # Its epochs are numbered anew, and all of them have the weights that it has now.
        course = replace(
            stream.course, segments=(Segment(0, last),), epoch=0, spent=(), made=(), before=()
        )
        return replace(stream, course=course)

    def _resolve(self, batch: Batch | None) -> MixtureStream:
        samples = samples_of(batch)
        sources = self._resolved(self._sources, samples)
        adopted = self._adopted
        if adopted is not None:
            return replace(adopted, sources=sources)
        weights = self._weights
        sizes = tuple(source.count for source in sources)
        if weights is None:
            for name, size in zip(self._sources, sizes, strict=True):
                if size >= ENDLESS:
                    raise ArgumentError(f"source {name!r} has no end, so it needs a weight")
            weights = sizes if self._temperature is None else tempered(sizes, self._temperature)
        return self._made(tuple(self._sources), sources, weights, samples)

    def _made(
        self,
        names: tuple[str, ...],
        sources: tuple[Source, ...],
        weights: tuple[float, ...],
        batch: int | None,
    ) -> MixtureStream:
        window, unit = self._window, 1
        if self._batching != "mixed":
            size = self._unit or batch
            if size is None:
                raise ArgumentError(
                    f"batching={self._batching!r} needs a batch size: give batch_size= or "
                    "global_batch_size=, or use a StreamingDataLoader"
                )
            window, unit = (size, 1) if self._batching == "stratified" else (window, size)
        course = Course(
            names=names,
            sizes=tuple(source.count for source in sources),
            segments=(Segment(0, weights),),
            window=window
            or default_window(exact_shares(weights), [source.count // unit for source in sources]),
            unit=unit,
            stop=self._stop_rule,
            seed=self._seed or 0,
            length=self._length,
        )
        splits = self._num_splits
        if splits is None:
            count = min(course.samples(0), 1 << 40)
            multiple = 1 if batch else self.topology.size
            splits = default_num_splits(count, global_batch=batch, multiple=multiple)
        return MixtureStream(course, sources, self._batching, splits, self.source_column)

    def _resolved(self, parts: Mapping[str, Streaming], batch: int | None) -> tuple[Source, ...]:
        return tuple(resolve_parts(parts, OneOf(len(self._sources), batch)).values())

    # ---- the state ------------------------------------------------------------------------------

    def _adopt(
        self, state: Mapping[str, Any], batch: Batch | None
    ) -> tuple[MixtureStream, Callable[[], None]]:
        checked = check_state(state, "Mixture")
        brief = {
            **checked,
            "seed": checked["shuffle_seed"],
            "schedule": parsed(state, "schedule"),
            "sources": parsed(state, "sources"),
        }
        position = int(state["epoch"]), int(state["counter"])
        stream, commit = self._adopt_brief(brief, batch, position)
        new = len(stream.sources) > len(brief["sources"])
        if not new and stream.plan_hash != checked["plan_hash"]:
            raise StateError(
                f"plan_hash mismatch: the state has {checked['plan_hash']}, this mixture "
                f"{stream.plan_hash}; start the next epoch: epoch={position[0] + 1}"
            )
        if position[1] > stream.samples(position[0]):
            raise StateError(
                f"counter {position[1]} of the state is beyond the {stream.samples(position[0])} "
                "samples of an epoch: the state is damaged"
            )
        samples = samples_of(batch)
        if samples is not None:
            try:
                stream.check_batch(samples)
            except ArgumentError as error:
                raise StateError(f"the state does not fit this mixture: {error}") from error
        return stream, commit

    def _adopt_brief(
        self, brief: Any, batch: Batch | None, position: tuple[int, int] | None = None
    ) -> tuple[MixtureStream, Callable[[], None]]:
        """Take up what a state says of a mixture; with its position, sources may be added there."""
        if not isinstance(brief, Mapping) or not isinstance(brief.get("sources"), Mapping):
            raise StateError(f"the state has a table here, this is a mixture: {self!r}")
        known = list(brief["sources"])
        gone = [name for name in known if name not in self._sources]
        new = [name for name in self._sources if name not in known]
        if gone or (new and position is None):
            raise StateError(
                f"sources mismatch: the state has {', '.join(known)}, this mixture has "
                f"{', '.join(self._sources)}; a source that is no longer wanted stays, with a "
                "weight of 0: see reweight"
            )
        self._check_settings(brief)
        samples = samples_of(batch)
        parts = {name: self._sources[name] for name in (*known, *new)}
        found, commit = adopt_parts(
            {name: parts[name] for name in known}, brief["sources"], samples
        )
        added = self._resolved({name: parts[name] for name in new}, samples)
        found += added
        commit_added = keep_chosen({name: parts[name] for name in new}, added)
        names = (*known, *new)
        course = _course(brief, names, tuple(source.count for source in found))
        if new:
            assert position is not None
            weights = self._new_weights(names)
            course = course.reweighted(*position, weights, passed=position[1])
            course = replace(course, made=weights)
        else:
            self._check_weights(course)
        stream = MixtureStream(
            course, tuple(found), brief["batching"], int(brief["num_splits"]), self.source_column
        )

        def take_up() -> None:
            commit()
            commit_added()
            self._sources, self._adopted = parts, stream

        return stream, take_up

    def _check_settings(self, brief: Mapping[str, Any]) -> None:
        for name, given, key in (
            ("seed", self._seed, "seed"),
            ("num_splits", self._num_splits, "num_splits"),
            ("batching", self._batching, "batching"),
            ("window", self._window, "slots"),
            ("unit", self._unit, "unit"),
            ("stop", self._stop_rule, "stop"),
            ("length", self._length, "length"),
        ):
            if given is not None and given != brief[key]:
                raise StateError(
                    f"{name} mismatch: the state has {brief[key]!r}, this mixture was made with "
                    f"{given!r}; make it as it was, or start the next epoch instead of loading"
                )

    def _check_weights(self, course: Course) -> None:
        """Raise unless the weights that were given are those of the state."""
        weights = self._weights
        if weights is None and self._temperature is not None:
            weights = tempered(course.sizes, self._temperature)
            given = dict(zip(course.names, weights, strict=True))
        elif weights is not None:
            given = dict(zip(self._sources, weights, strict=True))
        else:
            return
        stored = dict(zip(course.names, course.segments[-1].weights, strict=True))
        made = dict(zip(course.names, course.made, strict=True))
        if given not in (stored, made):
            raise StateError(
                f"weights mismatch: the state has {stored}, this mixture was made with {given}; "
                f"make it with the state's or those of the beginning, {made}, load, and change "
                "them with reweight()"
            )

    def _new_weights(self, names: tuple[str, ...]) -> tuple[float, ...]:
        if self._weights is None:
            raise StateError(
                f"this mixture has more sources ({', '.join(names)}) than the state; give the "
                "weights that all of them have from there on: weights="
            )
        given = dict(zip(self._sources, self._weights, strict=True))
        return tuple(given[name] for name in names)

    def reweight(self, weights: Mapping[str, float], *, at: int | None = None) -> None:
        """Change the weights from a sample of the epoch in progress on, and for all after it.

        Nothing is read twice and nothing left out: each source goes on where it is. All ranks of
        torch.distributed must call it at the same step: they compare what they change to.

        Args:
            weights: From name to a number, for every source; 0 leaves one out.
            at: The counter from which on they hold; None is the present one.

        Raises:
            ArgumentError: If a weight is none, or ``at`` was passed already.
            EmptyError: If the epochs after this one would have no sample.
            IterationError: If the mixture is being iterated without a `StreamingDataLoader`.
            StateError: If another rank changes to other weights, or at another sample, or cannot.
                Then no rank changes anything.
        """
        if self._shared is not None and self._shared.reading and current_worker() is None:
            raise IterationError(
                "DataLoader workers read ahead of the consumer, so this mixture does not know the "
                "position; call set_epoch first, and make the DataLoader anew, or use "
                "destrier.StreamingDataLoader"
            )
        live = None if self._live is None else self._live()
        if live is not None and not isinstance(live, LoaderIterator):
            raise IterationError(
                "the mixture is being iterated: exhaust or close() the iterator first, or iterate "
                "it with a StreamingDataLoader"
            )
        reading = live is not None
        del live  # an error that somebody keeps must not keep the iterator
        position = self._position
        if not reading and position.begun:
            position = replace(position.begin(), begun=False)
        stream = self.stream(self._stream_batch)

        def changed() -> MixtureStream:
            counter = position.counter if at is None else integer("at", at)
            if counter < position.counter:
                raise ArgumentError(
                    f"at={counter} has passed: the counter is {position.counter} already"
                )
            checked = check_weights(weights, stream.course.names)
            course = stream.course.reweighted(
                position.epoch, counter, checked, passed=position.counter
            )
            return replace(stream, course=course)

        agreed = self._agreed is stream
        adopted = self._compared(changed) if agreed else changed()  # else at the first iterator
        assert isinstance(adopted, MixtureStream)
        keep_chosen(self._sources, stream.sources)()  # whatever the weights are
        self._weights = self._temperature = None
        self._agreed = adopted if agreed else None
        self._stream, self._adopted, self._position = adopted, adopted, position
        self._place()
        live = None if self._live is None else self._live()
        if not isinstance(live, LoaderIterator):
            self._stop()  # what was read ahead is of the old weights
        else:
            live.restart()

    # ---- pickling -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._adopted is not None:  # its sources are resolved again
            state["_adopted"] = replace(self._adopted, sources=())
        return state


def cycle(
    source: Streaming | TableLike | View | Packed, *, length: int | None = None, **options: Any
) -> Mixture:
    """A stream over and over: epochs of any length, or one without end.

    Each time through the source is its next epoch, in another order. An epoch goes on where the
    one before it stopped.

    Args:
        source: A table, view, `StreamingDataset` or mixture.
        length: Samples in an epoch; None is without end.
        options: As `Mixture` takes them.

    Example:
        >>> epochs_of_1000 = cycle("digits.lance", length=1000)  # doctest: +SKIP
    """
    stop = "never" if length is None else None
    return Mixture({"source": source}, weights={"source": 1}, length=length, stop=stop, **options)


def _stop_rule(stop: str | None, length: int | None, *, weighted: Any) -> Stop:
    if length is not None:
        if stop is not None:
            raise ArgumentError(f"stop={stop!r} and length={length} are both given; pass one")
        return "length"
    if stop is None:
        return "first_exhausted" if weighted else "every_row_once"
    if stop not in _STOPS:
        raise ArgumentError(f"stop must be one of {', '.join(_STOPS)}, got {stop!r}")
    return stop  # type: ignore[return-value]


def _course(brief: Mapping[str, Any], names: tuple[str, ...], sizes: tuple[int, ...]) -> Course:
    """The course that a state describes; sources that are new have had no weight in it."""
    schedule = brief["schedule"]
    known = names[: len(brief["sources"])]
    new = (0,) * (len(names) - len(known))
    try:
        segments = [
            Segment(start, (*check_weights(dict(zip(known, weights, strict=True)), known), *new))
            for start, weights in schedule["weights"]
        ]
        starts = [integer("start", segment.start) for segment in segments]
        made = check_weights(dict(zip(known, schedule["made"], strict=True)), known)
        spent = [integer("spent", epochs, 0, ENDLESS) for epochs in schedule["spent"]]
        before = schedule.get("before", [0] * len(known))
        before = [integer("before", slots, 0, ENDLESS) for slots in before]
        if sum(before) != starts[0] or starts != sorted(starts):
            raise ValueError(starts)
        if len(spent) != len(known) or len(before) != len(known):
            raise ValueError(spent, before)
        return Course(
            names=names,
            sizes=sizes,
            segments=tuple(segments),
            window=int(brief["slots"]),
            unit=int(brief["unit"]),
            stop=brief["stop"],
            seed=int(brief["seed"]),
            length=brief["length"],
            epoch=integer("epoch", schedule["epoch"], 0, 1 << 32),
            spent=(*spent, *new),
            made=(*made, *new),
            before=(*before, *new),
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"the schedule of the state is damaged: {schedule!r}") from error
