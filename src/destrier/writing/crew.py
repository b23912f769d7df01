"""Worker processes for writing: fresh interpreters that do the tasks of one job.

They are started as programs, not through `multiprocessing`, so that a script needs no guard around
its main part, and functions of a script or notebook, lambdas and closures reach them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeAlias

from destrier.check import integer
from destrier.errors import ArgumentError, WorkerError
from destrier.raised import RemoteTraceback, portable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Crew", "Note", "Work", "default_workers"]

Note: TypeAlias = Callable[[int], None]
"""Tells the parent of so many more rows done."""
Work: TypeAlias = Callable[[Any, Note], Any]
"""What a worker does: from a task to its result; both cross between processes."""

# The working folder, which "" stands for, may hold modules that are named like Python's own: the
# first imports do without it.
_BOOT = (
    "import sys\n"
    "sys.path[:] = filter(None, sys.argv[2:])\n"
    "from destrier.writing.crew import serve\n"
    "sys.path[:] = sys.argv[2:]\n"
    "del sys.argv[2:]\n"
    "serve(int(sys.argv.pop()))\n"
)
_NOTE_SECONDS = 0.2
_END = object()  # of the tasks
_STOP_SECONDS = 5


def default_workers() -> int:
    """The number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


class Crew:
    """Processes that do the tasks of one job. A context manager; leaving it ends them.

    A worker ends by itself when this process dies. With no workers the tasks run in this process.

    Args:
        work: Called as ``work(task, note)`` in a worker; ``note(rows)`` reports progress. Sent once
            to each worker, by cloudpickle.
        num_workers: Number of processes; None takes one a processor.
        on_note: Called here with what the workers report.

    Example:
        >>> with Crew(lambda task, note: task * 2, 2) as crew:
        ...     sorted(crew.run([1, 2, 3]))
        [(0, 2), (1, 4), (2, 6)]
    """

    def __init__(
        self, work: Work, num_workers: int | None = None, *, on_note: Note | None = None
    ) -> None:
        count = default_workers() if num_workers is None else num_workers
        self.num_workers = integer("num_workers", count)
        self._work = work
        self._on_note = on_note or (lambda _: None)
        self._members: list[_Member] = []
        self._job: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(at_once=kind is not None)

    def hire(self, tasks: int | None = None) -> None:
        """Start the workers for so many tasks, or all, before the first task needs them."""
        count = self.num_workers if tasks is None else min(tasks, self.num_workers)
        while len(self._members) < count:
            self._hire()

    @staticmethod
    def size_for(num_workers: int | None, tasks: int) -> int | None:
        """The number of workers for so many tasks, where it was left open.

        A single one is done in this process, rather than by one that has to be started.
        """
        return 0 if num_workers is None and tasks <= 1 else num_workers

    def run(self, tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Do tasks; yields the number and result of each when it is done, in no order.

        Args:
            tasks: Asked for only when a worker is free. None is no task: nothing has come yet, so
                the workers are heard before it is asked again.

        Raises:
            WorkerError: If a worker died; the others are stopped.
            Exception: What a task raised; the others are stopped.
        """
        if not self.num_workers:
            there = (task for task in tasks if task is not None)
            for number, task in enumerate(there):
                yield number, self._work(task, self._on_note)
            return
        try:
            yield from self._spread(iter(tasks))
        except BaseException:
            self.close(at_once=True)
            raise

    def _spread(self, tasks: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        idle = list(self._members)
        busy: dict[Connection, tuple[_Member, int]] = {}
        more, number = True, 0
        while more or busy:
            quiet = False
            while more and not quiet and (idle or len(self._members) < self.num_workers):
                task = next(tasks, _END)
                more, quiet = task is not _END, task is None
                if not more or quiet:
                    continue
                member = idle.pop() if idle else self._hire()
                member.send(task)
                busy[member.connection] = (member, number)
                number += 1
            for ready in wait(list(busy), 0 if quiet else None) if busy else ():
                assert isinstance(ready, Connection)
                member, done = busy[ready]
                kind, value = member.receive()
                if kind == "note":
                    self._on_note(value)
                    continue
                del busy[ready]
                idle.append(member)
                if kind == "raised":
                    error, trace = value
                    raise error from RemoteTraceback(trace)
                yield done, value

    def _hire(self) -> _Member:
        if self._job is None:
            import cloudpickle

            try:
                self._job = cloudpickle.dumps(self._work)
            except Exception as error:
                raise ArgumentError(
                    f"the function cannot be sent to worker processes: {type(error).__name__}: "
                    f"{error}; make what it refers to picklable, or pass num_workers=0"
                ) from error
        member = _Member(self._job, self.num_workers)
        self._members.append(member)
        return member

    def close(self, *, at_once: bool = False) -> None:
        """End the workers."""
        for member in self._members:
            member.dismiss(at_once=at_once)
        until = time.monotonic() + _STOP_SECONDS
        for member in self._members:
            member.wait(max(0.0, until - time.monotonic()))
        self._members.clear()


def _path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]


class _Member:
    def __init__(self, job: bytes, crew: int) -> None:
        ours, theirs = socket.socketpair()
        share = max(1, default_workers() // crew)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *_path()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"LANCE_CPU_THREADS": str(share), **os.environ},
            )
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())
        self._task: Any = None
        with contextlib.suppress(OSError):  # found out at the next receive
            self.connection.send_bytes(job)

    def send(self, task: Any) -> None:
        self._task = task
        message = pickle.dumps(task)
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        return answer

    def _died(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        code = self._process.returncode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        return WorkerError(
            f"worker process {self._process.pid} died {how}; nothing of what it was doing is kept"
        )

    def dismiss(self, *, at_once: bool) -> None:
        if at_once:
            self._process.kill()
        else:
            with contextlib.suppress(OSError):
                self.connection.send_bytes(b"")

    def wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.connection.close()


# ---- in the worker ----------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Do what arrives until the parent says so or is gone. Run in the worker."""
    connection = Connection(descriptor)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while message := connection.recv_bytes():
                tasks.put(message)
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, whatever is being done here
        tasks.put(b"")

    job = connection.recv_bytes()
    threading.Thread(target=listen, daemon=True).start()
    notes = _Notes(connection)
    try:
        work = pickle.loads(job)  # noqa: S301 - from our parent
    except BaseException as error:
        refused = ArgumentError(
            f"the function cannot be loaded in a worker process: {type(error).__name__}: {error}"
        )
        if tasks.get():
            notes.send("raised", portable(refused))
        return
    while message := tasks.get():
        try:
            answer = "done", work(pickle.loads(message), notes.note)  # noqa: S301 - likewise
        except BaseException as error:
            answer = "raised", portable(error)
        notes.flush()
        notes.send(*answer)


class _Notes:
    """Sends to the parent; notes are gathered, so that it is not busy with them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held = 0
        self._sent = time.monotonic()

    def note(self, rows: int) -> None:
        self._held += rows
        if time.monotonic() - self._sent > _NOTE_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._held:
            self.send("note", self._held)
        self._held, self._sent = 0, time.monotonic()

    def send(self, kind: str, value: Any) -> None:
        try:
            message = pickle.dumps((kind, value))
        except Exception as error:
            refused = TypeError(f"the result cannot be pickled: {type(error).__name__}: {error}")
            message = pickle.dumps(("raised", portable(refused)))
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)
