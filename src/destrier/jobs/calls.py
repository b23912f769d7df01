"""The rows that a function makes of its inputs."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa

from destrier.encoding.copies import copied
from destrier.encoding.encoder import Row
from destrier.encoding.frozen import freeze
from destrier.encoding.misfit import Misfit, shown
from destrier.errors import ArgumentError, SourceError

__all__ = ["Calls", "OnError", "check_on_error", "failure"]

OnError: TypeAlias = Literal["raise", "skip"]


def check_on_error(value: str) -> None:
    """Raise unless it is one of the ways to meet an error.

    Raises:
        ArgumentError: Naming them.
    """
    if value not in get_args(OnError):
        raise ArgumentError(
            f"on_error must be one of {', '.join(get_args(OnError))}, got {value!r}"
        )


def failure(error: BaseException) -> str:
    """Type and text of what a function raised."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class Calls:
    """The rows that a function makes of inputs.

    Args:
        function: Called with each input.
        inputs: Numbers and inputs; an input may be given as what is called to get it.
        on_error: Whether an input on which the function raises is skipped.
        failures: Where the skipped ones are noted.

    Attributes:
        given: Whether there was a row yet.
        raised: The error that ended it, which names an input.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        inputs: Iterable[tuple[int, Callable[[], Any]]],
        on_error: str,
        failures: list[tuple[int, str]],
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._skip = on_error == "skip"
        self._failures = failures
        self.given = False
        self.raised: SourceError | None = None
        # from here on every row is of the next input, or all are of one
        self._starts = array("q")
        self._numbers = array("q")
        self._many = array("b")

    def __iter__(self) -> Iterator[Row]:
        function = self._function
        row = 0
        shift = None
        for number, get in self._inputs:
            try:
                result = function(get())
            except Exception as error:
                self._failed(number, error)
                continue
            if type(result) is dict:
                if number - row != shift:
                    self._note(row, number, many=False)
                    shift = number - row
                    self.given = True
                row += 1
                yield result
                continue
            if result is None:
                continue
            self._note(row, number, many=True)
            shift = None
            for made in self._several(result, number):
                row += made.num_rows if isinstance(made, pa.RecordBatch | pa.Table) else 1
                self.given = row > 0
                yield made

    def _note(self, row: int, number: int, *, many: bool) -> None:
        self._starts.append(row)
        self._numbers.append(number)
        self._many.append(many)

    def name(self, row: int) -> str:
        """What errors call a row."""
        number, place = self.place(row)
        return f"input {number}" if place is None else f"row {place} of input {number}"

    def place(self, row: int) -> tuple[int, int | None]:
        """The number of the input that a row is of, and its own if that has several."""
        at = bisect.bisect_right(self._starts, row) - 1
        past = row - self._starts[at]
        return (self._numbers[at], past) if self._many[at] else (self._numbers[at] + past, None)

    def _several(self, result: Any, number: int) -> Iterator[Row]:
        if isinstance(result, Mapping | pa.RecordBatch | pa.Table):
            yield result
            return
        if not isinstance(result, list | tuple) and not hasattr(result, "__next__"):
            raise self._ended(
                f"the function returned {shown(result)} for input {number}: return a row, such as "
                "{'name': value}, a pyarrow.RecordBatch or None, or yield any number of them",
                number,
            )
        made = self._whole(result, number) if self._skip else self._made(result, number)
        for item in made:
            if not isinstance(item, Mapping | pa.RecordBatch | pa.Table):
                raise self._ended(
                    f"the function gave {shown(item)} as a row of input {number}: a row is a "
                    "dict, such as {'name': value}",
                    number,
                )
            yield item

    def _made(self, result: Iterable[Any], number: int) -> Iterator[Any]:
        items = iter(result)
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception as error:
                self._failed(number, error)
                return
            yield item

    def _whole(self, result: Iterable[Any], number: int) -> list[Any]:
        """All that an input gives, or nothing if it fails on the way."""
        failed = len(self._failures)
        held = [_kept(item) for item in self._made(result, number)]
        return held if len(self._failures) == failed else []

    def _failed(self, number: int, error: Exception) -> None:
        if self._skip and not isinstance(error, MemoryError):
            self._failures.append((number, failure(error)))
            return
        raise self._ended(
            f"the function raised on input {number}: {failure(error)}; on_error='skip' leaves such "
            "inputs out",
            number,
        ) from error

    def _ended(self, text: str, number: int) -> SourceError:
        self.raised = SourceError(text, row=number)
        return self.raised


def _kept(item: Any) -> Any:
    """A row that the function cannot change any more."""
    if isinstance(item, pa.RecordBatch | pa.Table):
        batches = [item] if isinstance(item, pa.RecordBatch) else item.to_batches()
        with suppress(pa.ArrowException):  # of a type that is refused later
            return pa.Table.from_batches([copied(batch) for batch in batches], item.schema)
        return item
    if not isinstance(item, Mapping):
        return item
    row = dict(item)
    for name, value in row.items():
        with suppress(Misfit):  # found again where its column is encoded
            row[name] = freeze(value)[0]
    return row
