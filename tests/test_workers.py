"""Worker processes: what crosses unchanged, what becomes of errors, and what is left behind."""

from __future__ import annotations

import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import resource_sharer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

import tables
from destrier import StreamingDataLoader, StreamingDataset, TransformError, WorkerError, workers
from destrier.workers import TransformWorkers

if TYPE_CHECKING:
    from collections.abc import Iterator

HANG = 60.0


class Pair(NamedTuple):
    one: Any
    two: Any


class Two(Exception):  # noqa: N818 - as users name them
    """Pickles, but cannot be made again: its constructor wants more than its text."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Mute(Exception):  # noqa: N818
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def work(what: str, value: Any) -> Any:
    """Do in a worker what a test asks for."""
    if what == "type":
        return f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()
    if what == "change":
        value[...] = value + 1
        return value
    if what == "make":
        return np.ones(value, np.uint8)
    if what == "sleep":
        time.sleep(value)
    if what == "fail":
        _fails(value)
    if what == "lambda":
        return lambda: value
    if what == "descriptors":
        gc.collect()
        return len(os.listdir("/proc/self/fd"))
    return value


def _fails(how: str) -> None:
    if how == "local":

        class Local(Exception):  # noqa: N818
            pass

        raise Local("a local class")
    if how == "two":
        raise Two("this", "that")
    if how == "lock":
        raise ValueError("holds a lock", threading.Lock())
    if how == "mute":
        raise Mute
    if how == "stop":
        raise StopIteration
    raise KeyError("plain")


def slow(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that is never done."""
    time.sleep(3600)
    return batch


def tardy(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that takes its time."""
    time.sleep(0.5)
    return batch


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def pool() -> Iterator[TransformWorkers]:
    """One worker for most of the tests."""
    made = TransformWorkers(work, 1, "spawn")
    yield made
    made.close()


@pytest.fixture
def table(tmp_path: Path) -> str:
    tables.plain_table(tmp_path / "t.lance", tables.ROWS)
    return str(tmp_path / "t.lance")


# ---- what crosses -----------------------------------------------------------------------------


def same(one: Any, two: Any) -> None:
    """Assert that two values are equal, of the same types, all the way down."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (two.dtype, two.shape, two.layout)
        if one.layout is not torch.strided:
            one, two = one.to_dense(), two.to_dense()
        if one.dtype.itemsize == 1 and one.dtype.is_floating_point:
            one, two = one.view(torch.uint8), two.view(torch.uint8)
        assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert np.array_equal(one, two)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            same(a, b)
    elif isinstance(one, pa.RecordBatch):
        assert one.equals(two, check_metadata=True)
    else:
        assert one == two


def batch_of_arrow() -> pa.RecordBatch:
    metadata = {b"key": b"value"}
    columns = {
        "id": pa.array([1, None, 3]),
        "name": pa.array(["a", None, ""]),
        "list": pa.array([[1.5], [], None]),
        "blob": pa.array([b"\0" * 1000, b"", None], pa.large_binary()),
        "word": pa.array(["x", "y", "x"]).dictionary_encode(),
    }
    made = pa.RecordBatch.from_pydict(columns)
    return made.replace_schema_metadata(metadata)


VALUES: dict[str, Any] = {
    "scalars": {"a": 1, "b": 2.5, "c": None, "d": True, "e": "text", "f": b"bytes", "g": 1 << 80},
    "bytes": [b"", b"\0\1" * 5, os.urandom(300_000), bytearray(b"abc")],
    "array": np.arange(1000),
    "strided": np.arange(1000).reshape(10, 100)[::2, 1::3],
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "scalar array": np.array(5.5),
    "empty arrays": [np.empty(0), np.empty((0, 3), np.int8), np.empty((2, 0), np.float16)],
    "objects": np.array([None, "a", [1]], object),
    "structured": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "tensor": torch.arange(1000).reshape(10, 100),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "scalar tensors": [torch.tensor(5), torch.tensor(True), torch.tensor(1.5).bfloat16()],
    "bfloat16": torch.arange(100).to(torch.bfloat16).reshape(4, 25)[:, ::2],
    "half": torch.arange(10).half(),
    "float8": torch.arange(8.0).to(torch.float8_e4m3fn),
    "complex": torch.complex(torch.arange(3.0), -torch.arange(3.0)),
    "conjugate": torch.complex(torch.arange(3.0), torch.arange(3.0)).conj(),
    "sparse": torch.eye(4).to_sparse(),
    "empty tensors": [torch.empty(0), torch.empty(0, 3, dtype=torch.bfloat16)],
    "empty and full": {"a": torch.empty(0, 4), "b": torch.ones(3), "c": np.empty((0, 2)), "d": []},
    "gradient": torch.ones(3, requires_grad=True),
    "nested": {"a": [{"b": (torch.ones(2), [np.zeros(3), "x"])}], "pair": Pair(torch.ones(1), 2)},
    "arrow": batch_of_arrow(),
    "part of arrow": batch_of_arrow().slice(1, 1),
    "empty arrow": batch_of_arrow().slice(0, 0),
    "the same twice": [np.arange(5)] * 2,
}


@pytest.mark.parametrize("name", VALUES)
def test_it_crosses_unchanged(pool: TransformWorkers, name: str) -> None:
    value = VALUES[name]
    back = pool("echo", value)
    same(back, value)
    kind = pool("type", value)
    assert kind == f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()


@pytest.mark.parametrize("value", [np.arange(10), torch.arange(10), np.empty(0), torch.empty(0)])
def test_it_can_be_written_to_on_both_sides(pool: TransformWorkers, value: Any) -> None:
    back = pool("change", value)
    same(back, value + 1)
    back += 1
    same(back, value + 2)


def test_what_came_back_outlives_the_next_call(pool: TransformWorkers) -> None:
    kept = [pool("echo", np.full(1000, i)) for i in range(20)]
    assert [int(array.sum()) for array in kept] == [1000 * i for i in range(20)]


def test_large_messages_both_ways(pool: TransformWorkers) -> None:
    # Out of band, and in band: longer than what a pipe or a socket takes at once.
    value = {"array": np.arange(4 << 20), "text": "x" * (8 << 20), "bytes": os.urandom(1 << 20)}
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(pool("echo", value)), daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive()
    same(result[0], value)
    many = [np.full(100, i) for i in range(5000)]
    same(pool("echo", many), many)


def test_lengths_around_the_alignment(pool: TransformWorkers) -> None:
    for sizes in ([0], [1], [63, 64, 65], [0, 1, 0], [64, 0], [0, 0]):
        value = [np.arange(size, dtype=np.uint8) for size in sizes]
        same(pool("echo", value), value)


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("plain", KeyError, "plain"),
        ("local", RuntimeError, "Local: a local class"),
        ("two", RuntimeError, "Two: this and that"),
        ("lock", RuntimeError, "ValueError: .*holds a lock"),
        ("mute", RuntimeError, "Mute"),
        ("stop", StopIteration, ""),
    ],
)
def test_an_error_arrives(pool: TransformWorkers, how: str, kind: Any, text: str) -> None:
    with pytest.raises(kind) as caught:
        pool("fail", how)
    if text:
        caught.match(text)
    trace = str(caught.value.__cause__)
    assert "Traceback" in trace
    assert "test_workers.py" in trace
    assert "_fails" in trace
    assert pool("echo", 5) == 5


def test_what_cannot_be_sent_is_an_error_and_ends_nothing(pool: TransformWorkers) -> None:
    with pytest.raises(TypeError, match=r"(?s)result cannot be pickled"):
        pool("lambda", 5)
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        pool("echo", threading.Lock())
    assert pool("echo", 6) == 6
    assert pool.alive


def test_a_descriptor_that_cannot_be_had_is_an_error(
    pool: TransformWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(workers, "_nameless_file", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        pool("echo", np.arange(10))
    monkeypatch.undo()
    same(pool("echo", np.arange(10)), np.arange(10))


# ---- what is left -----------------------------------------------------------------------------


def test_no_descriptor_is_left_on_either_side(pool: TransformWorkers) -> None:
    value = {"a": torch.ones(100), "b": np.ones(1000), "c": torch.empty(0), "d": "text"}
    pool("echo", value)
    here, there = descriptors(), pool("descriptors", None)
    for _ in range(50):
        pool("echo", value)
        with pytest.raises(KeyError):
            pool("fail", "plain")
    assert descriptors() == here
    assert pool("descriptors", None) == there
    sharer = resource_sharer._resource_sharer
    assert not sharer._cache
    assert sharer._listener is None


def test_batches_that_are_kept_need_no_descriptors(pool: TransformWorkers) -> None:
    before = descriptors()
    kept = [pool("make", 100) for _ in range(50)]
    assert descriptors() <= before + 2
    assert len(kept) == 50


def test_closed_workers_leave_nothing(table: str) -> None:
    def run() -> None:
        dataset = StreamingDataset(table, columns=["id"])
        loader = StreamingDataLoader(dataset, batch_size=100, transform=tardy, num_workers=1)
        next(iter(loader))
        loader.close()

    run()
    before = descriptors()
    run()
    assert descriptors() <= before


# ---- stopping busy workers --------------------------------------------------------------------


@pytest.mark.parametrize("transform", [slow, tardy])
def test_busy_workers_are_stopped_and_no_row_is_blamed(
    table: str, monkeypatch: pytest.MonkeyPatch, transform: Any
) -> None:
    monkeypatch.setattr(workers, "_STOP_SECONDS", 0.5 if transform is slow else 20)
    blamed: list[Exception] = []
    dataset = StreamingDataset(table, columns=["id"])
    loader = StreamingDataLoader(
        dataset,
        batch_size=100,
        transform=transform,
        num_workers=1,
        on_error=lambda error: blamed.append(error) or True,
    )

    def stop_while_busy(stop: Any) -> None:
        iterator = iter(loader)
        running = loader._runner.pipeline
        until = time.monotonic() + HANG
        while not running.unfinished:
            assert time.monotonic() < until
            time.sleep(0.01)
        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        thread.join(HANG)
        assert not thread.is_alive()
        running.join(time.monotonic() + HANG)
        assert not any(
            each.name.startswith("destrier") and each.is_alive() for each in threading.enumerate()
        )
        del iterator

    stop_while_busy(lambda: loader.load_state_dict(loader.state_dict()))
    if transform is slow:
        stop_while_busy(loader.close)
    assert not blamed
    assert loader.rows_skipped == 0
    assert loader.state_dict()["counter"] == 0


def test_a_thread_that_waits_for_a_worker_is_told() -> None:
    pool = TransformWorkers(work, 1, "spawn")
    told: list[BaseException] = []

    def call() -> None:
        try:
            pool("sleep", 1.0)
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not pool._idle.empty():
        time.sleep(0.01)
    pool.close()
    thread.join(HANG)
    assert not thread.is_alive()
    assert [type(error) for error in told] == [WorkerError]
    with pytest.raises(WorkerError, match="stopped"):
        pool("echo", 1)


# ---- the interpreter's exit -------------------------------------------------------------------

EXIT = """
import sys
import psutil
sys.path.insert(0, sys.argv[2])
from destrier import StreamingDataLoader
import test_workers

if __name__ == "__main__":
    made = []
    loader = StreamingDataLoader(
        sys.argv[1], batch_size=10, transform=test_workers.slow, num_workers=2
    )
    made.append(iter(loader))
    print(*[child.pid for child in psutil.Process().children()], flush=True)
"""


def test_the_interpreter_ends_while_workers_are_busy(table: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(EXIT), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script), table, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    until = time.monotonic() + HANG
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a worker outlived its parent"
        time.sleep(0.05)


def test_a_worker_error_is_a_transform_error_of_its_rows(table: str) -> None:
    import battery

    dataset = StreamingDataset(table, columns=["id"])
    with StreamingDataLoader(
        dataset, batch_size=100, transform=battery.odd_only, num_workers=1, on_error="skip"
    ) as loader:
        found = [i for batch in loader for i in batch["id"].tolist()]
        assert all(i % 50 for i in found)
        assert len(found) + loader.rows_skipped == 1000
        assert all(isinstance(error, TransformError) for error in loader.failures)
        assert {error.offset % 50 for error in loader.failures} == {0}
        assert all(isinstance(error.__cause__, ValueError) for error in loader.failures)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, np.uint8])
def test_values_without_gaps_cross_as_they_lie(order, kind):
    """Images have their channels last: to bring them into order would cost a slow copy."""
    if kind is np.uint8:
        value = np.arange(120, dtype=np.uint8).reshape(2, 3, 4, 5).transpose(order)
        strides = value.strides
    else:
        value = torch.arange(120).to(kind).reshape(2, 3, 4, 5).permute(order)
        strides = value.stride()
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    workers._Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    assert len(buffers) == 1
    arrived = pickle.loads(stream.getvalue(), buffers=buffers)
    assert type(arrived) is type(value)
    assert arrived.dtype == value.dtype
    assert (arrived.strides if kind is np.uint8 else arrived.stride()) == strides
    assert bool((arrived == value).all())


def test_values_with_gaps_cross_too():
    for value in (torch.arange(24).reshape(4, 6)[:, ::2], torch.ones(3, 1).expand(3, 4)):
        stream = io.BytesIO()
        workers._Pickler(stream, protocol=5).dump((value, value.numpy()))
        tensor, array = pickle.loads(stream.getvalue())
        assert torch.equal(tensor, value)
        assert np.array_equal(array, value.numpy())
