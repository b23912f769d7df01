"""Where a permutation is saved, and what is there already."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import lance
import pyarrow as pa

from destrier.errors import ArgumentError, TableError
from destrier.lancecalls import redact
from destrier.table import Table, open_table

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Place", "find_place", "hand_over", "on_one_thread"]

T = TypeVar("T")

_AHEAD = 2  # batches that wait to be written
_NOT_FOUND = ("was not found", "Table not found")  # what Lance and LanceDB say of no table


@dataclass(frozen=True)
class Place:
    """A place for a table.

    Attributes:
        shown: Its address without credentials, for messages.
        table: The table that is there already.
        write: Writes batches there in a mode of Lance, and returns the table's URI.
    """

    shown: str
    table: Table | None
    write: Callable[[pa.RecordBatchReader, str], str]


def find_place(target: Any, name: str, storage_options: Mapping[str, str] | None) -> Place:
    """Find out where a table would lie, and which one lies there.

    Args:
        target: A URI or path, or a LanceDB connection.
        name: Name of the table in the connection.
        storage_options: Passed to Lance untouched.

    Raises:
        ArgumentError: If the target is of no known kind, or something else than a table is there.
        TableError: If it cannot be looked at.
    """
    options = dict(storage_options) if storage_options else None
    if isinstance(target, str | os.PathLike):
        uri = os.fspath(target)
        if "://" not in uri:
            uri = os.path.abspath(os.path.expanduser(uri))
        _refuse(uri)

        def write(reader: pa.RecordBatchReader, mode: str) -> str:
            lance.write_dataset(reader, uri, mode=mode, storage_options=options)
            return uri

        return Place(redact(uri), _table_at(uri, options), write)
    if not (type(target).__module__.startswith("lancedb") and hasattr(target, "create_table")):
        raise ArgumentError(
            "a permutation is saved at a URI or path, or in a LanceDB connection, "
            f"got {type(target).__name__}"
        )
    if "Async" in type(target).__name__ or not hasattr(target, "uri"):
        raise ArgumentError(
            f"cannot save in a {type(target).__name__}: pass the URI of a Lance dataset instead"
        )
    _refuse(str(target.uri))

    def create(reader: pa.RecordBatchReader, mode: str) -> str:
        return str(target.create_table(name, reader, mode=mode, storage_options=options).uri)

    shown = f"{redact(str(target.uri))} as {name!r}"
    return Place(shown, _table_in(target, name, options, shown), create)


def _table_at(uri: str, options: Mapping[str, str] | None) -> Table | None:
    if "://" not in uri:
        if not os.path.lexists(uri):
            return None
        if not os.path.isdir(uri):
            raise ArgumentError(f"there is a file at {uri}: choose another place")
        if not os.path.isdir(os.path.join(uri, "_versions")):
            if os.listdir(uri):
                raise ArgumentError(
                    f"{uri} is a folder that holds something else than a table: choose another "
                    f"place, for example {os.path.join(uri, 'permutation.lance')}"
                )
            return None
    try:
        return open_table(uri, storage_options=options)
    except TableError as error:
        if _says_nothing_is_there(error):
            return None
        raise TableError(f"cannot save the permutation at {redact(uri)}: {error}") from error


def _table_in(
    connection: Any, name: str, options: Mapping[str, str] | None, shown: str
) -> Table | None:
    try:
        table = connection.open_table(name, storage_options=options)
    except Exception as error:
        if _says_nothing_is_there(error):
            return None
        said = redact(str(error))
        cause = error if said == str(error) else None
        raise TableError(f"cannot save the permutation at {shown}: {said}") from cause
    return open_table(table)


def _says_nothing_is_there(error: Exception) -> bool:
    return any(words in str(error) for words in _NOT_FOUND)


def _refuse(uri: str) -> None:
    for scheme in ("db://", "memory://"):
        if uri.startswith(scheme):
            raise ArgumentError(
                f"a permutation cannot be saved at {scheme}, because workers and other ranks "
                "could not read it there: pass a path, or the URI of a bucket"
            )


def hand_over(
    batches: Iterator[pa.RecordBatch], write: Callable[[Iterator[pa.RecordBatch]], T]
) -> T:
    """Make batches on this thread and write them on another, a few batches behind.

    What makes them may belong to the thread that it began on, as a connection to a database does,
    while Lance asks for each batch from another of its threads.

    Args:
        batches: An iterator; it is closed.
        write: Called on the other thread with the same batches.

    Returns:
        What it returned.

    Raises:
        BaseException: What ``batches`` raised, or else ``write``. The thread has ended then.
    """
    belt = _Belt()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(write(iter(belt.take, None)))
        except BaseException as error:
            errors.append(error)
        finally:
            belt.drop()

    thread = threading.Thread(target=work, name="destrier-save", daemon=True)
    thread.start()
    try:
        for batch in batches:
            if not belt.put(batch):
                break
        belt.end()
        thread.join()
    except BaseException as error:
        belt.fail(error)
        thread.join()
        raise
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
    if errors:
        raise errors[0]
    return results[0]


class _Belt:
    """Takes batches from one thread to another, few at a time."""

    def __init__(self) -> None:
        self._batches: deque[pa.RecordBatch] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._dropped = False
        self._error: BaseException | None = None

    def put(self, batch: pa.RecordBatch) -> bool:
        """Wait until there is room; whether anybody will take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._dropped or len(self._batches) < _AHEAD)
            self._batches.append(batch)
            self._changed.notify_all()
            return not self._dropped

    def take(self) -> pa.RecordBatch | None:
        """The next one, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._error or self._batches)
            if self._error is not None:
                raise RuntimeError("the rows end here, by an error") from self._error
            batch = self._batches.popleft() if self._batches else None
            self._changed.notify_all()
            return batch

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def drop(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._dropped = True
            self._batches.clear()
            self._changed.notify_all()


def on_one_thread(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run an iterator on one thread, one batch ahead.

    Lance asks for each batch from another of its threads, and what numpy needs on the way would
    stay in the heaps of all of them.
    """
    with ThreadPoolExecutor(1, "destrier-save") as thread:
        ahead = thread.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = thread.submit(next, batches, None)
            yield batch
