"""Jobs that write files: a function called on inputs, in processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from destrier.errors import ArgumentError, SourceError
from destrier.jobs.calls import check_on_error, failure
from destrier.jobs.streams import Stream, is_sequence
from destrier.writing.crew import Crew, Note
from destrier.writing.progress import progress

__all__ = ["Mapped", "map"]

_TASKS = 64  # a worker, for even shares
_MOST = 256  # inputs in a task

_Task: TypeAlias = "tuple[int, int | list[bytes]]"
"""The number of the first input, and the number past the last, or the inputs."""
_Result: TypeAlias = "tuple[int, list[Any], list[tuple[int, str]]]"


@dataclass(frozen=True)
class Mapped:
    """What a function was called on.

    Attributes:
        count: Number of inputs that were done.
        reports: What the function returned, in the order of the inputs, where it was not None.
        skipped: Number and error of each input that was skipped.
    """

    count: int
    reports: tuple[Any, ...] = ()
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class _Work:
    function: Callable[[Any, str], Any]
    inputs: Any
    folder: str
    skip: bool

    def __call__(self, task: _Task, note: Note) -> _Result:
        count = 0
        reports: list[Any] = []
        skipped: list[tuple[int, str]] = []
        for number, get in self._items(task):
            try:
                report = self.function(get(), self.folder)
            except Exception as error:
                if not self.skip or isinstance(error, MemoryError):
                    raise SourceError(
                        f"the function raised on input {number}: {failure(error)}; "
                        "on_error='skip' leaves such inputs out",
                        row=number,
                    ) from error
                skipped.append((number, failure(error)))
            else:
                count += 1
                if report is not None:
                    reports.append(report)
            note(1)
        return count, reports, skipped

    def _items(self, task: _Task) -> Iterator[tuple[int, Callable[[], Any]]]:
        start, stop = task
        if isinstance(stop, int):
            for number in range(start, stop):
                yield number, lambda: self.inputs[number]  # noqa: B023 - called before the next
            return
        for number, data in enumerate(stop, start):
            yield number, lambda: pickle.loads(data)  # noqa: B023, S301 - pickled by our parent


def map(
    fn: Callable[[Any, str], Any],
    inputs: Any,
    output_dir: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    on_error: str = "raise",
) -> Mapped:
    """Call a function that writes files on each input, in worker processes.

    What it writes is its own affair: nothing is undone where it raises, and a second call does
    all inputs again. For rows of a table use `optimize`, which can be continued.

    Args:
        fn: Called as ``fn(input, output_dir)``. It returns None, or something to report.
        inputs: A sequence, an iterable, or a queue that ends with `ALL_DONE`.
        output_dir: A folder, which is made; a URI is passed on as it is.
        num_workers: Processes; None is one a processor, 0 calls the function in this one.
        on_error: ``"raise"`` stops where the function raises, ``"skip"`` goes on and reports it.

    Raises:
        SourceError: If the function raises.
        WorkerError: If a worker died.

    Example:
        >>> def copy(path, output_dir):
        ...     shutil.copy(path, output_dir)
        >>> map(copy, paths, "copies", num_workers=2)  # doctest: +SKIP
    """
    if not callable(fn):
        raise ArgumentError(f"fn must be a function of two arguments, got a {type(fn).__name__}")
    check_on_error(on_error)
    folder = os.fspath(output_dir)
    if "://" not in folder:
        folder = os.path.abspath(os.path.expanduser(folder))
        os.makedirs(folder, exist_ok=True)
    known = is_sequence(inputs)
    total = len(inputs) if known else None
    work = _Work(fn, inputs if known else None, folder, on_error == "skip")
    with progress("mapping", total, "inputs") as note:
        crew = Crew(work, num_workers, on_note=note)
        each = _MOST if total is None else total // (max(1, crew.num_workers) * _TASKS)
        each = min(max(each, 1), _MOST)
        tasks = _streamed(Stream(inputs)) if total is None else _cut(total, each)
        with crew:
            results = dict(crew.run(tasks))
    ordered = [results[number] for number in sorted(results)]
    return Mapped(
        sum(count for count, _, _ in ordered),
        tuple(report for _, reports, _ in ordered for report in reports),
        tuple(skip for _, _, skipped in ordered for skip in skipped),
    )


def _cut(total: int, each: int) -> Iterator[_Task]:
    for start in range(0, total, each):
        yield start, min(start + each, total)


def _streamed(stream: Stream) -> Iterator[_Task]:
    """Few inputs at first, since each may take long."""
    most = 1
    while (chunk := stream.chunk(most)) is not None:
        yield chunk
        most = min(max(1, stream.count // _TASKS), _MOST)
