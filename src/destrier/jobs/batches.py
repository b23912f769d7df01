"""The rows that a function makes of many inputs at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from destrier.encoding.encoder import Row
from destrier.encoding.misfit import shown
from destrier.jobs.calls import Calls

__all__ = ["BatchCalls"]

_Item: TypeAlias = "tuple[int, Any]"
"""The number of an input, and the input."""


class BatchCalls(Calls):
    """The rows that a function makes of lists of inputs, one row or None for each input.

    Where the function raises on a list, it is called again with each input of it alone, to find
    the one that it fails on.

    Args:
        function: Called with lists of inputs.
        inputs: As for `Calls`.
        size: Inputs of a list; the last one may be shorter.
        on_error: Whether an input on which the function raises is skipped.
        failures: Where the skipped ones are noted.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        inputs: Iterable[tuple[int, Callable[[], Any]]],
        size: int,
        on_error: str,
        failures: list[tuple[int, str]],
    ) -> None:
        super().__init__(function, inputs, on_error, failures)
        self._size = size

    def __iter__(self) -> Iterator[Row]:
        inputs = iter(self._inputs)
        row = 0
        while group := list(itertools.islice(inputs, self._size)):
            for number, made in self._made_of(self._had(group)):
                self._note(row, number, many=False)
                row += made.num_rows if isinstance(made, pa.RecordBatch | pa.Table) else 1
                self.given = row > 0
                yield made

    def _had(self, group: list[tuple[int, Callable[[], Any]]]) -> list[_Item]:
        """The inputs that can be had."""
        items = []
        for number, get in group:
            try:
                items.append((number, get()))
            except Exception as error:
                self._failed(number, error)
        return items

    def _made_of(self, items: list[_Item]) -> Iterator[tuple[int, Row]]:
        """The number of each input that gives a row, and that row; or of the first, and all."""
        if not items:
            return
        try:
            results = self._results(items)
        except Exception as error:
            if error is self.raised:
                raise
            yield from self._alone(items, error)
            return
        if isinstance(results, pa.RecordBatch | pa.Table):
            gaps = [i for i in range(1, len(items)) if items[i][0] != items[i - 1][0] + 1]
            for start, stop in itertools.pairwise([0, *gaps, len(items)]):
                yield items[start][0], results.slice(start, stop - start)
            return
        for (number, _), result in zip(items, results, strict=True):
            if result is not None:
                yield number, result

    def _alone(self, items: list[_Item], error: Exception) -> Iterator[tuple[int, Row]]:
        """The rows of each input by itself, after the function raised on all of them."""
        numbers = _numbers(items)
        if len(items) == 1:
            self._failed(items[0][0], error)
            return
        if isinstance(error, MemoryError):
            raise self._ended(
                f"memory ran out in the function on {numbers}; pass a smaller batch_size "
                f"({self._size} now)",
                items[0][0],
            ) from error
        failed = len(self._failures)
        for item in items:
            yield from self._made_of([item])
        if len(self._failures) == failed:
            raise self._ended(
                f"the function raised on {numbers} together, though on none of them alone: "
                f"{type(error).__name__}: {error}; pass a smaller batch_size ({self._size} now)",
                items[0][0],
            ) from error

    def _results(self, items: list[_Item]) -> Any:
        """What the function returns for some inputs: rows or None, one for each."""
        result = self._function([item for _, item in items])
        first = items[0][0]
        if isinstance(result, pa.RecordBatch | pa.Table):
            self._check_count(result.num_rows, items)
            return result
        if not isinstance(result, list | tuple) and not hasattr(result, "__next__"):
            raise self._ended(
                f"the function returned {shown(result)} for {_numbers(items)}: with batch_size it "
                "returns a list of rows, one or None for each input, or a pyarrow.RecordBatch",
                first,
            )
        results = list(result)
        self._check_count(len(results), items)
        for (number, _), made in zip(items, results, strict=True):
            if made is not None and not isinstance(made, Mapping):
                raise self._ended(
                    f"the function gave {shown(made)} as the row of input {number}: a row is a "
                    "dict, such as {'name': value}, or None",
                    number,
                )
        return results

    def _check_count(self, count: int, items: list[_Item]) -> None:
        if count != len(items):
            raise self._ended(
                f"the function returned {count} rows for the {len(items)} inputs that are "
                f"{_numbers(items)}: with batch_size it returns one row, or None, for each input",
                items[0][0],
            )


def _numbers(items: list[_Item]) -> str:
    first, last = items[0][0], items[-1][0]
    return f"input {first}" if first == last else f"inputs {first} to {last}"
