"""Sources whose rows a function makes from inputs: a sequence of them, or a stream."""

from __future__ import annotations

import operator
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, ClassVar

import pyarrow as pa

from destrier.encoding.encoder import RowEncoder
from destrier.errors import ArgumentError, EmptyError, SourceError
from destrier.jobs.batches import BatchCalls
from destrier.jobs.calls import Calls, check_on_error
from destrier.jobs.fingerprint import fingerprint
from destrier.jobs.streams import Stream
from destrier.writing.source import Measure, Shard, Source, Unit

__all__ = ["IterableSource", "SequenceSource"]

# The first shard: few inputs, since one worker does them while the others wait, but enough to tell
# the types of the rows.
_FIRST = 256
_FIRST_SECONDS = 1.0  # after the first input, with which much may be loaded
_FIRST_LEAST = 16
_SHARD_BYTES = 256 << 20  # of rows
_SHARD_SECONDS = 60.0
_LEAST_SECONDS = 1.0
_START_SECONDS = 0.1  # of the first shard, that are not work
_LEAST_EACH = 5e-6  # seconds that an input takes at least, to be called and written
_SHARDS = 32  # for even shares of the work, where an input takes long
_MOST_SHARDS = 1000  # so that a table does not consist of crumbs


class _Job:
    """The function and its inputs, which reach another process by cloudpickle."""

    def __init__(self, *parts: Any) -> None:
        self._parts: tuple[Any, ...] | None = parts
        self._pickled: bytes | None = None

    def __getstate__(self) -> bytes:
        if self._pickled is None:
            import cloudpickle

            self._pickled = cloudpickle.dumps(self._parts)
        return self._pickled

    def __setstate__(self, state: bytes) -> None:
        self._parts = None
        self._pickled = state

    def parts(self) -> tuple[Any, ...]:
        if self._parts is None:
            assert self._pickled is not None
            try:
                self._parts = pickle.loads(self._pickled)  # noqa: S301 - of our own parent process
            except (AttributeError, ImportError) as error:
                raise ArgumentError(
                    f"the function or its inputs cannot be sent to worker processes: {error}; "
                    "what is decorated, as by functools.lru_cache, or made by C in a script or "
                    "notebook is only known there: define it in a module that is imported, or "
                    "pass num_workers=0"
                ) from error
            self._pickled = None
        return self._parts


class _FunctionSource(Source):
    """What sources of functions share.

    Attributes:
        failures: Number and error of the inputs that were skipped while reading.
        taken: Number of inputs of the unit that was read last.
    """

    def __init__(
        self,
        job: _Job,
        schema: pa.Schema | None,
        on_error: str,
        batch_size: int | None,
    ) -> None:
        check_on_error(on_error)
        self._job = job
        self._schema = RowEncoder(schema).schema  # which checks it
        self._on_error = on_error
        self._batch_size = batch_size
        self._step = batch_size or 1
        self.failures: list[tuple[int, str]] = []
        self.taken = 0

    @property
    def schema(self) -> pa.Schema | None:
        """That which was declared."""
        return self._schema

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
        """Call the function on the inputs of a unit.

        Raises:
            SchemaError: If a row has other columns or types than those before it.
            SourceError: If the function raises, or makes what cannot be kept exactly.
        """
        if schema is None:
            schema = self._schema
        encoder = RowEncoder(schema, declared=self._schema is not None)
        function = self._job.parts()[0]
        inputs = self._taken(unit, lambda: rows.given)
        size, skip = self._batch_size, self._on_error
        rows = (
            Calls(function, inputs, skip, self.failures)
            if size is None
            else BatchCalls(function, inputs, size, skip, self.failures)
        )
        try:
            yield from encoder.batches(rows, name=rows.name)
        except SourceError as error:
            if error is not rows.raised and error.row is not None:
                error.row = rows.place(error.row)[0]
            raise

    def _taken(
        self, unit: Unit, given: Callable[[], bool]
    ) -> Iterator[tuple[int, Callable[[], Any]]]:
        """The inputs of a unit; of the first one no more than it takes to know the rows."""
        self.taken = 0
        least = unit.place[2]
        late = float("inf")
        for item in self._inputs(unit):
            if least is not None and self.taken and self.taken % self._step == 0:
                now = time.monotonic()
                if self.taken == self._step:
                    late = now + _FIRST_SECONDS
                enough = self.taken >= _FIRST or (now > late and self.taken >= least)
                if enough and (given() or self._schema is not None):
                    return
            self.taken += 1
            yield item

    def _inputs(self, unit: Unit) -> Iterator[tuple[int, Callable[[], Any]]]:
        raise NotImplementedError

    def more(self, skipped: list[tuple[int, str]]) -> bool:  # noqa: ARG002 - of a stream
        """Whether there are inputs after a first shard that gave no row."""
        return False


class SequenceSource(_FunctionSource):
    """The rows that a function makes of the items of a sequence. Can be continued.

    Args:
        fn: From an item to a row, to a batch, to None, or to any number of rows.
        inputs: With a length, reached by number.
        schema: Of the rows, or None to find it.
        on_error: ``"raise"``, or ``"skip"`` to leave out the inputs that the function fails on.
        batch_size: Items in the lists that ``fn`` is called with; None calls it with each item.
    """

    format: ClassVar[str] = "function"

    def __init__(
        self,
        fn: Callable[[Any], Any],
        inputs: Any,
        schema: pa.Schema | None = None,
        on_error: str = "raise",
        batch_size: int | None = None,
    ) -> None:
        super().__init__(_Job(fn, inputs), schema, on_error, batch_size)
        self._count = len(inputs)
        if not self._count:
            raise EmptyError("there are no inputs")

    @property
    def total_inputs(self) -> int:
        """How many inputs there are."""
        return self._count

    @property
    def shown(self) -> str:
        """How many inputs there are."""
        return f"{self._count} inputs"

    def digest(self) -> str:
        """A digest of function, inputs and options."""
        schema = None if self._schema is None else self._schema.serialize().to_pybytes()
        size = () if self._batch_size is None else (self._batch_size,)
        return fingerprint(*self._job.parts(), schema, self._on_error, *size)

    def first(self) -> Shard:
        """The first few inputs, and as many more as it takes to get a row.

        How many is found out while they are read, and told by the measure.
        """
        return Shard(0, (self._unit(0, self._count, 0, min(_FIRST_LEAST, -(-self._count // 16))),))

    def rest(self, measure: Measure) -> Iterator[Shard]:
        """The others, in shards of even length.

        Cheap inputs go into few of them. Where an input takes long they are short, so that workers
        have even shares and little is lost when one is killed; but a table of many inputs does not
        come in crumbs, and the rows of a shard stay below 256 MiB.
        """
        first = measure.rows
        rest = self._count - first
        if not rest:
            return
        seconds, nbytes = _each(measure)
        length = max(rest / _SHARDS, _LEAST_SECONDS / seconds)
        length = max(min(length, _SHARD_SECONDS / seconds), rest / _MOST_SHARDS)
        length = max(1.0, min(length, _SHARD_BYTES / nbytes))
        lists = -(-rest // self._step)  # which the function gets whole
        shards = min(lists, max(1, round(rest / length)))
        for index in range(shards):
            start = first + index * lists // shards * self._step
            stop = min(self._count, first + (index + 1) * lists // shards * self._step)
            yield Shard(index + 1, (self._unit(start, stop, int(nbytes * (stop - start))),))

    def _unit(self, start: int, stop: int, nbytes: int, least: int | None = None) -> Unit:
        name = f"inputs {start} to {stop - 1}"
        return Unit(name, None, nbytes, (start, stop, least), inputs=stop - start)

    def _inputs(self, unit: Unit) -> Iterator[tuple[int, Callable[[], Any]]]:
        inputs = self._job.parts()[1]
        start, stop, _ = unit.place
        together = self._batch_size is not None and hasattr(inputs, "__getitems__")
        for first in range(start, stop, self._step):
            numbers = range(first, min(first + self._step, stop))
            items = _Together(inputs, numbers) if together else inputs
            for number in numbers:
                yield number, partial(operator.getitem, items, number)


class _Together:
    """Inputs that are had at once, when the first is asked for; one by one where that fails."""

    def __init__(self, inputs: Any, numbers: range) -> None:
        self._inputs = inputs
        self._numbers = numbers

    def __getitem__(self, number: int) -> Any:
        items = self._items
        return items[number - self._numbers.start] if items else self._inputs[number]

    @cached_property
    def _items(self) -> list[Any]:
        try:
            items = list(self._inputs.__getitems__(list(self._numbers)))
        except Exception:
            return []
        return items if len(items) == len(self._numbers) else []


def _each(measure: Measure) -> tuple[float, float]:
    """Seconds and bytes that an input takes."""
    inputs = max(measure.rows, 1)
    seconds = max((measure.seconds - _START_SECONDS) / inputs, _LEAST_EACH)
    return seconds, max(measure.nbytes, 1) / inputs


class IterableSource(_FunctionSource):
    """The rows that a function makes of a stream, which is read here. Cannot be continued.

    Args:
        fn: From an item to a row, to a batch, to None, or to any number of rows.
        inputs: An iterable, or a queue that ends with `ALL_DONE`.
        schema: Of the rows, or None to find it.
        on_error: ``"raise"``, or ``"skip"`` to leave out the inputs that the function fails on.
        batch_size: Items at most in the lists that ``fn`` is called with; None calls it with each.
    """

    format: ClassVar[str] = "function"
    resumable: ClassVar[bool] = False

    def __init__(
        self,
        fn: Callable[[Any], Any],
        inputs: Any,
        schema: pa.Schema | None = None,
        on_error: str = "raise",
        batch_size: int | None = None,
    ) -> None:
        super().__init__(_Job(fn), schema, on_error, batch_size)
        self._stream: Stream | None = Stream(inputs)
        self._first: tuple[int, list[bytes]] | None = None
        self._before: list[tuple[int, str]] = []  # inputs skipped before the first shard
        self._name = type(inputs).__name__

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None, "_first": None}

    @property
    def shown(self) -> str:
        """What the inputs come from."""
        return f"the inputs of a {self._name}"

    def digest(self) -> str:
        """A name that no other job has, since what comes is not known."""
        return uuid.uuid4().hex

    def first(self) -> Shard:
        """The first few inputs; what is not needed of them to know the rows comes again."""
        if self._first is None and not self.more([]):
            raise EmptyError("there are no inputs")
        assert self._first is not None
        start, pulled = self._first
        return self._shard(0, start, pulled, 0, _FIRST_LEAST)

    def more(self, skipped: list[tuple[int, str]]) -> bool:
        """Go on to the next inputs, after a first shard that gave no row; whether there are any.

        Args:
            skipped: Number and error of the inputs that were skipped so far.
        """
        assert self._stream is not None
        self._before = skipped
        self._first = self._stream.chunk(self._whole(_FIRST), self._whole(_FIRST_LEAST))
        return self._first is not None

    def rest(self, measure: Measure) -> Iterator[Shard | None]:
        """The others as they come, in shards that grow with what has come."""
        assert self._stream is not None
        assert self._first is not None
        self._stream.give_back(self._first[1][measure.rows :])
        self._first = None
        seconds, nbytes = _each(measure)
        index = 1
        while True:
            length = max(self._stream.count / _SHARDS, _LEAST_SECONDS / seconds)
            length = min(length, _SHARD_SECONDS / seconds, _SHARD_BYTES / nbytes)
            chunk = self._stream.chunk(self._whole(max(1, int(length))), 0)
            if chunk is None:
                return
            if not chunk[1]:
                yield None
                continue
            yield self._shard(index, *chunk, nbytes)
            index += 1

    def _whole(self, count: int) -> int:
        """At least so many inputs, in whole lists."""
        return -(-count // self._step) * self._step

    def _shard(
        self, index: int, start: int, pulled: list[bytes], nbytes: float, least: int | None = None
    ) -> Shard:
        name = f"inputs {start} to {start + len(pulled) - 1}"
        place = (start, pulled, least)
        return Shard(index, (Unit(name, None, int(nbytes * len(pulled)), place),))

    def _inputs(self, unit: Unit) -> Iterator[tuple[int, Callable[[], Any]]]:
        start, pulled, least = unit.place
        if least is not None:
            self.failures.extend(self._before)
        for number, data in enumerate(pulled, start):
            yield number, partial(pickle.loads, data)
