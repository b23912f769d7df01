"""Finishing a batch: decode, format, transform, and what happens to rows that fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from destrier.columns import Column, Columns, take
from destrier.counters import Counts
from destrier.decode import Format, decode_rows, to_format
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DecodeError,
    LengthError,
    RowError,
    TransformError,
    WorkerError,
)
from destrier.images import Image
from destrier.keyed import ROW_SEED_KEY, Ints, epoch_key, hash_words, subkey
from destrier.plan import Remainder
from destrier.pool import Gathered

__all__ = [
    "INDEX_COLUMNS",
    "Finished",
    "Finisher",
    "OnError",
    "Origin",
    "RawBatch",
    "batch_bytes",
    "check_extra_columns",
    "check_on_error",
    "choose",
]

OnError: TypeAlias = "Literal['raise', 'skip', 'fill'] | Callable[[Exception], bool]"
INDEX_COLUMNS = ("sample_index", "row_offset")
T = TypeVar("T")

_LOOKED_INTO = 16
_ARRAYS = (torch.Tensor, np.ndarray)


@dataclass(frozen=True)
class Origin:
    """Which rows some columns of a batch come from.

    Attributes:
        prefix: What the names of the columns begin with; all columns, if it is empty.
        offsets: Row offset of each row.
        sources: Of several tables, which one each row is of; None where it is the first one.
    """

    prefix: str
    offsets: Ints
    sources: Ints | None


@dataclass
class RawBatch:
    """One share as it comes from the pool.

    Attributes:
        epoch: Its epoch.
        samples: Sample index of each row.
        offsets: Row offset of each row.
        data: The rows that could be read, in order.
        errors: By position, the rows that could not.
        padded: With ``remainder="pad"``, which rows are repeats; None otherwise.
        sources: Of several tables, which one each row is of; None where there is one.
        zipped: Of a zip, the rows of each source; offsets and sources are those of the first.
    """

    epoch: int
    samples: Ints
    offsets: Ints
    data: Gathered
    errors: dict[int, RowError] = field(default_factory=dict)
    padded: NDArray[np.bool_] | None = None
    sources: Ints | None = None
    zipped: Sequence[Origin] = ()

    @property
    def origins(self) -> Sequence[Origin]:
        """Which rows its columns come from."""
        return self.zipped or (Origin("", self.offsets, self.sources),)


@dataclass
class Finished:
    """What the consumer gets, the rows that were left out or replaced on the way, and its size."""

    batch: Any
    failed: list[RowError] = field(default_factory=list)
    bytes: int = 0


def check_on_error(on_error: OnError) -> None:
    """Raise unless it is one of the policies."""
    if on_error not in ("raise", "skip", "fill") and not callable(on_error):
        raise ArgumentError(
            f"on_error must be 'raise', 'skip', 'fill' or a callable, got {on_error!r}"
        )


@dataclass
class Finisher:
    """Turns shares into batches. Has no state, so that it can work in any thread or process.

    Args:
        tables: The names of the tables, for errors.
        seed: The stream's seed, for the seeds of a transform.
        format: What the transform or the consumer receives.
        images: Image columns and how they are decoded.
        transform: Called with the batch in that format, and with per-row seeds if it takes two.
        collate_fn: Called last.
        on_error: What to do with rows that fail.
        with_index: Whether sample index and row offset are added.
        run_transform: How the transform is run; in this thread by default.
        counts: Where the seconds of its stages are added up.
    """

    tables: Sequence[str]
    seed: int
    format: Format
    images: Mapping[str, Image]
    transform: Callable[..., Any] | None = None
    collate_fn: Callable[[Any], Any] | None = None
    on_error: OnError = "raise"
    with_index: bool = False
    run_transform: Callable[..., Any] | None = None
    counts: Counts | None = None

    def __post_init__(self) -> None:
        self._wants_seeds = self.transform is not None and wants_seeds(self.transform)

    def __call__(self, raw: RawBatch) -> Finished:
        """Finish one share."""
        errors: dict[int, RowError] = dict(raw.errors)
        rows = np.arange(len(raw.samples))
        data = raw.data
        if errors:
            rows = np.delete(rows, list(errors))
        if isinstance(data, dict):
            with self._measured("decode", self.images, len(rows)):
                data, undecoded = self._decode(raw, data, rows)
            if undecoded:
                errors.update({int(rows[i]): error for i, error in undecoded.items()})
                keep = np.delete(np.arange(len(rows)), list(undecoded))
                data, rows = choose(data, keep), rows[keep]
        for position in sorted(errors):
            self._judge(errors[position])
        batch = self._attempt(raw, data, rows, errors)
        if self.collate_fn is not None:
            with self._measured("collate", self.collate_fn, len(rows)):
                batch = self.collate_fn(batch)
        failed = [errors[position] for position in sorted(errors)]
        return Finished(batch, failed)

    def _decode(
        self, raw: RawBatch, data: Columns, rows: Ints
    ) -> tuple[Columns, dict[int, DecodeError]]:
        """Decode the columns, in the names that their tables have for them."""
        errors: dict[int, DecodeError] = {}
        for origin in raw.origins:
            prefix = origin.prefix
            own, images = _unprefixed(data, prefix), _unprefixed(self.images, prefix)
            tables = partial(self._table, origin, rows)
            decoded, failed = decode_rows(own, images, origin.offsets[rows], tables)
            data = {**data, **{prefix + name: c for name, c in decoded.items()}}
            errors = {**failed, **errors}
        return data, errors

    def _table(self, origin: Origin, rows: Ints, i: int) -> str:
        """The name of the table that a row is of."""
        return self.tables[0 if origin.sources is None else int(origin.sources[rows[i]])]

    def _measured(self, stage: str, work: object, rows: int) -> AbstractContextManager[None]:
        """Count a stage, if there is work for it."""
        return self.counts.time(stage, rows) if self.counts and work else nullcontext()

    def _attempt(
        self, raw: RawBatch, data: Gathered, rows: Ints, errors: dict[int, RowError]
    ) -> Any:
        """Form the batch and transform it; where that fails, find the rows at fault and go on."""
        try:
            return self._deliver(raw, *self._fill(raw, data, rows, errors))
        except LengthError:
            raise
        except TransformError as error:
            first = error
        broken: list[int] = []
        for i, position in enumerate(rows.tolist()):
            one = rows[i : i + 1]
            try:
                self._deliver(raw, choose(data, np.array([i])), one, one)
            except TransformError as error:
                error.offset = int(raw.offsets[position])
                self._judge(error)
                errors[position] = error
                broken.append(i)
        if not broken:
            try:
                raise first  # it fails on the whole, but on no row by itself
            finally:
                del first
        del first  # its traceback holds this frame
        keep = np.delete(np.arange(len(rows)), broken)
        data, rows = choose(data, keep), rows[keep]
        return self._deliver(raw, *self._fill(raw, data, rows, errors))

    def _judge(self, error: RowError) -> None:
        """Raise the error unless the policy lets its row go."""
        if self.on_error == "raise" or (callable(self.on_error) and not self.on_error(error)):
            raise error

    def _fill(
        self, raw: RawBatch, data: Gathered, rows: Ints, errors: dict[int, RowError]
    ) -> tuple[Gathered, Ints, Ints]:
        """Return the rows to deliver, the positions they stand for, and those they come from."""
        # Where there is nothing to fill with, the batch is empty, as with skip.
        if self.on_error != "fill" or not errors or not len(rows):
            return data, rows, rows
        positions = np.arange(len(raw.samples))
        earlier = np.searchsorted(rows, positions, side="right") - 1
        later = np.minimum(earlier + 1, len(rows) - 1)
        before = np.where(earlier >= 0, positions - rows[np.maximum(earlier, 0)], np.inf)
        after = np.where(rows[later] >= positions, rows[later] - positions, np.inf)
        nearest = np.where(before <= after, earlier, later)
        return choose(data, nearest), positions, rows[nearest]

    def _deliver(self, raw: RawBatch, data: Gathered, positions: Ints, sources: Ints) -> Any:
        offsets = raw.offsets[sources]
        extra: dict[str, NDArray[Any]] = {}
        if self.with_index:
            extra = {"sample_index": raw.samples[positions]}
            for origin in raw.origins:
                extra[f"{origin.prefix}row_offset"] = origin.offsets[sources]
        if raw.padded is not None:
            extra["mask"] = raw.padded[positions]
        batch = self._form(data, extra)
        if self.transform is None:
            return batch
        seeds = (self._seeds(raw, positions),) if self._wants_seeds else ()
        run = self.run_transform or self.transform
        try:
            with self._measured("transform", run, len(positions)):
                out = run(batch, *seeds)
        except WorkerError:
            raise
        except Exception as error:
            if not len(offsets):
                return batch  # a transform need not understand a batch of no rows
            what = f"a batch of {len(offsets)} rows of {', '.join(self.tables)}"
            if len(offsets) == 1:
                what = " with ".join(
                    f"row {origin.offsets[sources[0]]} of {self._table(origin, sources, 0)}"
                    for origin in raw.origins
                )
            raise TransformError(
                f"the transform failed on {what}: {type(error).__name__}: {error}"
            ) from error
        check_length(out, len(positions))
        return out

    def _form(self, data: Gathered, extra: dict[str, NDArray[Any]]) -> Any:
        if isinstance(data, dict):
            columns = {**data, **{name: Column(values) for name, values in extra.items()}}
            return to_format(columns, self.format, self.images)
        for name, values in extra.items():
            data = data.append_column(name, pa.array(values))
        return data if self.format == "arrow" else data.to_pylist()

    def _seeds(self, raw: RawBatch, positions: Ints) -> Ints:
        """One seed a row, from seed, epoch and sample index alone."""
        key = np.uint64(subkey(epoch_key(self.seed, raw.epoch), ROW_SEED_KEY))
        words = hash_words(key ^ hash_words(raw.samples[positions].astype(np.uint64)))
        seeds: Ints = (words >> np.uint64(1)).astype(np.int64)
        return seeds


def _unprefixed(named: Mapping[str, T], prefix: str) -> Mapping[str, T]:
    """What has names that begin with a prefix, by what follows it."""
    if not prefix:
        return named
    return {name[len(prefix) :]: v for name, v in named.items() if name.startswith(prefix)}


def choose(data: Gathered, index: Ints) -> Gathered:
    """Some rows, by position."""
    if isinstance(data, dict):
        return {name: take(column, index) for name, column in data.items()}
    return data.take(pa.array(index))


def wants_seeds(transform: Callable[..., Any]) -> bool:
    """Whether a transform takes a second parameter, for per-row seeds."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(places) >= 2


def check_length(out: Any, rows: int) -> None:
    """Raise if a transform returned another number of rows than it was given.

    A transform may return anything; what has no row dimension of any length is not judged.

    Raises:
        LengthError: If it returned nothing, or nothing in the result has as many rows.
    """
    if out is None:
        raise LengthError(
            f"the transform returned None for a batch of {rows} rows; it must return the batch "
            "that is to be delivered"
        )
    lengths = set(_lengths(out))
    if lengths and rows not in lengths:
        raise LengthError(
            f"the transform returned {', '.join(map(str, sorted(lengths)))} rows for a batch of "
            f"{rows}; it must return one output row per input row. To leave rows out, raise in "
            "the transform and pass on_error='skip'"
        )


def _lengths(out: Any) -> Iterator[int]:
    """The lengths that could be those of rows."""
    if isinstance(out, Mapping):
        for value in out.values():
            yield from _lengths(value)
    elif isinstance(out, list | tuple):
        yield len(out)
        for value in out[:_LOOKED_INTO]:
            if not isinstance(value, list | tuple):
                yield from _lengths(value)
    elif isinstance(out, pa.RecordBatch | pa.Table):
        yield out.num_rows
    else:
        yield from getattr(out, "shape", ())


def batch_bytes(batch: Any) -> int:
    """Bytes of a batch in memory, about."""
    if type(batch) in _ARRAYS:  # most are, and what else it may be takes longer to see
        return _nbytes(batch)
    if isinstance(batch, Mapping):
        return sum(map(batch_bytes, batch.values()))
    if isinstance(batch, Column):
        values = batch.values
        return int(values.nbytes) if batch.dense else batch_bytes(list(values))
    if isinstance(batch, list | tuple):
        # Some are measured, the others taken to be alike.
        some = batch[:: max(1, len(batch) // 16)]
        return sum(map(batch_bytes, some)) * len(batch) // max(1, len(some))
    if isinstance(batch, bytes | str | pa.Buffer):
        return len(batch)
    return _nbytes(batch)


def _nbytes(array: Any) -> int:
    try:
        return int(array.nbytes)
    except Exception:  # has none, as a sparse tensor
        return 64


def check_extra_columns(
    columns: Sequence[str],
    index_columns: Sequence[str],
    remainder: Remainder,
    tables: Sequence[str],
) -> None:
    """Raise if a column that is added to batches has the name of one that is read.

    Args:
        columns: That are read.
        index_columns: That say where rows come from; none where nobody asks.
        remainder: ``"pad"`` adds a mask.
        tables: Their names.
    """
    for name in (*index_columns, *(("mask",) if remainder == "pad" else ())):
        if name in columns:
            raise ColumnError(
                f"the batch gets a column {name!r}, which {', '.join(tables)} has too; leave it "
                "out with columns="
            )
