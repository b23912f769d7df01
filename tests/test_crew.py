"""Worker processes of the writer: what they answer, what they die of, and who hears it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from destrier.errors import ArgumentError, WorkerError
from destrier.saving import hand_over
from destrier.writing.crew import Crew


def children() -> list[int]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "destrier.writing.crew" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test ends its workers and threads."""
    before = set(threading.enumerate())
    yield
    assert children() == []
    assert set(threading.enumerate()) <= before


def make_double() -> Callable[[int, Callable[[int], None]], int]:
    def double(task: int, note: Callable[[int], None]) -> int:
        note(task)
        return task * 2

    return double


double = make_double()


def test_tasks_and_notes() -> None:
    notes: list[int] = []
    for workers in (0, 2):
        with Crew(double, workers, on_note=notes.append) as crew:
            assert dict(crew.run(range(20))) == {i: 2 * i for i in range(20)}
            assert dict(crew.run([7])) == {0: 14}  # the same workers again
        assert sum(notes) == 197
        notes.clear()


def test_workers_are_hired_ahead() -> None:
    with Crew(double, 2) as crew:
        crew.hire(1)
        hired = set(children())
        assert len(hired) == 1
        crew.hire(1)
        assert set(children()) == hired
        crew.hire()
        hired = set(children())
        assert len(hired) == 2
        assert dict(crew.run([1, 2])) == {0: 2, 1: 4}
        assert set(children()) == hired
    with Crew(double, 0) as crew:
        crew.hire()
        assert children() == []


@pytest.mark.parametrize(
    ("asked", "tasks", "size"), [(None, 0, 0), (None, 1, 0), (None, 2, None), (0, 9, 0), (3, 1, 3)]
)
def test_a_single_task_needs_no_worker(asked: int | None, tasks: int, size: int | None) -> None:
    assert Crew.size_for(asked, tasks) == size


def test_no_workers() -> None:
    def where(_task: int, _note: object) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name

    with Crew(where, 0) as crew:
        assert dict(crew.run([0])) == {0: (os.getpid(), threading.current_thread().name)}
    with Crew(lambda _task, _note: 1 // 0, 0) as crew, pytest.raises(ZeroDivisionError):
        list(crew.run([0]))


def make_work() -> Callable[[str, object], Any]:
    """Make a function that does not belong to this module, whose imports take long."""

    class OddError(Exception):
        """Survives no pickle."""

        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"odd {one} {two}")

    def work(task: str, _note: object) -> Any:
        import os
        import threading

        if task == "raise":
            raise KeyError("missing")
        if task == "odd":
            raise OddError(1, 2)
        if task == "result":
            return threading.Lock()
        if task == "exit":
            os._exit(3)
        if task == "kill":
            os.kill(os.getpid(), 9)
        return task

    return work


work = make_work()


@pytest.mark.parametrize(
    ("task", "kind", "text"),
    [
        ("raise", KeyError, "missing"),
        ("odd", RuntimeError, "OddError: odd 1 2"),
        ("result", TypeError, "the result cannot be pickled: TypeError"),
        ("exit", WorkerError, "died with exit code 3"),
        ("kill", WorkerError, r"died by signal 9 \(out of memory\?\)"),
    ],
)
def test_what_fails_in_a_worker(task: str, kind: type[Exception], text: str) -> None:
    with Crew(work, 2) as crew, pytest.raises(kind, match=text) as caught:
        list(crew.run(["fine", task, "fine"]))
    if kind is KeyError:
        assert "in work\nKeyError: 'missing'" in str(caught.value.__cause__)


def test_a_function_that_cannot_travel() -> None:
    lock = threading.Lock()
    with (
        Crew(lambda _task, _note: lock, 1) as crew,
        pytest.raises(ArgumentError, match="cannot be sent to worker processes: TypeError"),
    ):
        list(crew.run([0]))


class Unwelcome:
    """Pickles, but does not come out again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


def test_a_function_that_does_not_arrive() -> None:
    held = Unwelcome()
    with (
        Crew(lambda _task, _note: held, 1) as crew,
        pytest.raises(ArgumentError, match="cannot be loaded in a worker process: ZeroDivision"),
    ):
        list(crew.run([0]))


# ---- tasks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "kind"), [("raise", KeyError), ("kill", WorkerError)])
def test_an_error_is_heard_while_no_task_comes(task: str, kind: type[Exception]) -> None:
    def tasks() -> Iterator[str | None]:
        yield task
        while True:
            time.sleep(0.01)
            yield None

    with Crew(work, 2) as crew, pytest.raises(kind):
        list(crew.run(tasks()))


@pytest.mark.parametrize("workers", [0, 2])
def test_tasks_that_come_slowly_keep_their_numbers(workers: int) -> None:
    def tasks() -> Iterator[str | None]:
        for i in range(5):
            yield None
            time.sleep(0.02)
            yield str(i)

    with Crew(work, workers) as crew:
        assert dict(crew.run(tasks())) == {i: str(i) for i in range(5)}


def test_tasks_that_raise() -> None:
    def tasks() -> Iterator[str]:
        yield "fine"
        raise OSError("gone")

    with Crew(work, 2) as crew, pytest.raises(OSError, match="gone"):
        list(crew.run(tasks()))


def test_tasks_are_asked_for_on_the_thread_of_the_caller() -> None:
    threads = set()

    def tasks() -> Iterator[str]:
        for i in range(5):
            threads.add(threading.current_thread())
            yield str(i)

    with Crew(work, 2) as crew:
        assert len(list(crew.run(tasks()))) == 5
    assert threads == {threading.current_thread()}


# ---- parents and folders ----------------------------------------------------------------------

PARENT = """
import time
from destrier.writing.crew import Crew

def wait(task, note):
    time.sleep(600)

with Crew(wait, 2) as crew:
    crew.hire()
    print(*(member._process.pid for member in crew._members), flush=True)
    list(crew.run([0, 1]))
"""


def test_workers_end_with_their_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_a_folder_with_modules_named_like_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "socket", "pickle", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "of_the_folder.py").write_text("def call(task, note):\n    return task + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr(sys, "path", ["", *filter(None, sys.path), tmp_path])  # a Path does no harm

    def call(task: int, note: object) -> Any:
        import of_the_folder  # type: ignore[import-not-found]

        return of_the_folder.call(task, note), sys.argv

    with Crew(call, 1) as crew:
        assert dict(crew.run([1])) == {0: (2, ["-c"])}


# ---- batches from one thread to another -------------------------------------------------------


def batches(count: int, threads: set[threading.Thread]) -> Iterator[pa.RecordBatch]:
    for i in range(count):
        threads.add(threading.current_thread())
        yield pa.record_batch({"n": [i]})


def test_batches_are_made_on_one_thread_and_written_on_another() -> None:
    threads: set[threading.Thread] = set()
    writers = []

    def write(given: Iterator[pa.RecordBatch]) -> list[int]:
        writers.append(threading.current_thread())
        return [batch["n"][0].as_py() for batch in given]

    assert hand_over(batches(50, threads), write) == list(range(50))
    assert threads == {threading.current_thread()}
    assert writers[0] is not threading.current_thread()
    assert not writers[0].is_alive()


def test_few_batches_wait() -> None:
    made = 0
    most = 0

    def many() -> Iterator[pa.RecordBatch]:
        nonlocal made
        for batch in batches(30, set()):
            made += 1
            yield batch

    def write(given: Iterator[pa.RecordBatch]) -> None:
        nonlocal most
        for number, _ in enumerate(given):
            time.sleep(0.005)
            most = max(most, made - number)

    hand_over(many(), write)
    assert made == 30
    assert most <= 5


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_fails_on_either_side(kind: type[BaseException]) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(3, set())
        raise kind("made")

    with pytest.raises(kind, match="made"):
        hand_over(failing(), list)

    closed = False

    def endless() -> Iterator[pa.RecordBatch]:
        nonlocal closed
        try:
            while True:
                yield from batches(1, set())
        finally:
            closed = True

    def write(given: Iterator[pa.RecordBatch]) -> None:
        next(given)
        raise kind("written")

    with pytest.raises(kind, match="written"):
        hand_over(endless(), write)
    assert closed


def test_an_interrupt_while_the_writer_is_waited_for() -> None:
    def write(given: Iterator[pa.RecordBatch]) -> None:
        next(given)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        for _ in given:
            pass

    with pytest.raises(KeyboardInterrupt):
        hand_over(batches(10, set()), write)
