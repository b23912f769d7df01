"""The stages on threads: they end, hold nothing, make no more than was asked, and lose nothing."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import itertools
import json
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

import tables
from destrier import (
    ArgumentError,
    DestrierWarning,
    IterationError,
    Order,
    ReadError,
    StreamingDataLoader,
    StreamingDataset,
    TransformError,
    feed,
    holding,
    pipeline,
    schedule,
    selection,
    windows,
)
from destrier.batch import batch_bytes
from destrier.columns import Column, from_arrow
from destrier.plan import Cycles, Steps
from destrier.pool import ArrowPool, ColumnPool
from destrier.read import Reader, Rows
from destrier.selection import RangeRows
from destrier.threads import Threads
from destrier.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROWS = tables.ROWS
HANG = 60.0  # seconds after which something is taken to hang
LAST_EPOCH = 2**32 - 1


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a table of id, label and value. Read only."""
    path = tmp_path_factory.mktemp("pipeline") / "t.lance"
    tables.plain_table(path, ROWS, rows_per_fragment=400)
    return str(path)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave cycles where they are, so that what is in one is seen to be alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


_others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def threads() -> set[threading.Thread]:
    """Threads of ours that the test started; a loader of another one may be in a cycle still."""
    running = set(threading.enumerate()) - set(_others)
    return {thread for thread in running if thread.name.startswith("destrier")}


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    _others.update(threading.enumerate())
    yield
    if threads():
        gc.collect()
        eventually(lambda: not threads())


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


def settled(value: Callable[[], int]) -> int:
    """Return a number once it has not changed for a while."""
    last, since = value(), time.monotonic()
    while time.monotonic() - since < 0.25:
        time.sleep(0.02)
        now = value()
        if now != last:
            last, since = now, time.monotonic()
    return last


def within(call: Callable[[], Any]) -> None:
    """Run a call on a thread of its own, which must come back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive(), "it hangs"


class Counter:
    """A transform that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, batch: Any) -> Any:
        with self._lock:
            self.calls += 1
        return batch


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["id"].tolist()]


# ---- stopping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["read", "finish"])
def test_stop_while_the_driver_hands_out_work(
    table: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    submit = Threads.submit
    loader = StreamingDataLoader(table, batch_size=50, transform=Counter())

    def stopping(self: Threads, call: Callable[..., Any], *arguments: Any) -> Any:
        if (call.__name__ == "read") == (stage == "read"):
            for running in list(pipeline._running):
                if threading.current_thread() is running._driver:
                    running.stop()
        return submit(self, call, *arguments)

    monkeypatch.setattr(Threads, "submit", stopping)

    def run() -> None:
        with pytest.raises(RuntimeError, match="stopped"):
            for _ in loader:
                pass
        loader.close()

    within(run)
    eventually(lambda: not threads())


def test_stop_on_a_thread_that_is_inside_the_pipeline(table: str) -> None:
    loader = StreamingDataLoader(table, batch_size=50)
    next(iter(loader))
    running = loader._runner.pipeline

    def run() -> None:
        with running._condition:
            running.stop()
        running.join()

    within(run)
    assert not running.alive
    loader.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_close_in_a_transform_does_not_wait_for_itself(table: str, threads: int) -> None:
    def closes(batch: Any) -> Any:
        loader.close()
        return batch

    dataset = StreamingDataset(table, transform=closes, transform_parallelism=threads)
    loader = StreamingDataLoader(dataset, batch_size=5)

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            for _ in itertools.islice(loader, 3):
                pass
        loader.close()

    within(run)
    eventually(lambda: not pipeline._running)


@pytest.mark.parametrize("where", ["drive", "read", "finish"])
def test_a_loader_in_a_cycle_is_collected_by_a_thread_of_its_own(
    table: str, monkeypatch: pytest.MonkeyPatch, no_collector: None, where: str
) -> None:
    dropped, reached = threading.Event(), threading.Event()

    def collecting(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = call(*arguments)
            if dropped.is_set():
                gc.collect()
                reached.set()
            return result

        return run

    if where == "drive":
        monkeypatch.setattr(feed.TableMemory, "share", collecting(feed.TableMemory.share))
    if where == "read":
        monkeypatch.setattr(Reader, "read", collecting(Reader.read))

    def waits(batch: Any) -> Any:
        dropped.wait(HANG)
        return batch

    transform = collecting(waits) if where == "finish" else waits
    loader = StreamingDataLoader(table, batch_size=5, transform=transform, prefetch_bytes=1 << 16)
    loader.itself = loader  # type: ignore[attr-defined]
    gone = weakref.ref(loader)
    iterator = iter(loader)
    del loader, iterator
    assert gone() is not None
    dropped.set()
    if where == "finish":
        assert reached.wait(HANG)
    eventually(lambda: gone() is None or reached.is_set() or settled(lambda: 0) == 0)
    gc.collect()
    assert gone() is None
    eventually(lambda: not threads())


def test_a_dropped_iterator_of_rows_ends_its_threads(table: str) -> None:
    dataset = StreamingDataset(table, num_splits=4)
    iterator = iter(dataset)
    next(iterator)
    del iterator, dataset
    gc.collect()
    eventually(lambda: not threads())


def test_after_an_error_no_thread_stays_even_unclosed(table: str) -> None:
    loader = StreamingDataLoader(table, batch_size=50, transform=lambda _: 1 / 0)
    with pytest.raises(TransformError):
        list(loader)
    eventually(lambda: not threads())


# ---- StopIteration is no end of an epoch ------------------------------------------------------


def stops(batch: Any) -> Any:
    raise StopIteration


def faces(table: str) -> dict[str, Callable[[], Any]]:
    return {
        "collate_fn": lambda: StreamingDataLoader(table, batch_size=50, collate_fn=stops),
        "transform": lambda: StreamingDataLoader(table, batch_size=50, transform=stops),
        "arrow": lambda: StreamingDataLoader(
            table, batch_size=50, format="arrow", collate_fn=stops
        ),
        "skip": lambda: StreamingDataLoader(
            table, batch_size=50, collate_fn=stops, on_error="skip"
        ),
        "rows": lambda: StreamingDataset(table, transform=stops, num_splits=4),
        "rows on one thread": lambda: StreamingDataset(
            table, transform=stops, num_splits=4, transform_parallelism=1
        ),
        "batches": lambda: StreamingDataset(table, transform=stops, batch_size=50),
    }


@pytest.mark.parametrize("face", list(faces("")))
def test_stop_iteration_is_an_error(table: str, face: str) -> None:
    stream = faces(table)[face]()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(stream)
        assert (stream.state_dict()["epoch"], stream.state_dict()["counter"]) == (0, 0)
    stream.close()


def test_stop_iteration_of_a_policy_is_an_error(table: str) -> None:
    def fails(batch: Any) -> Any:
        raise ValueError

    loader = StreamingDataLoader(table, batch_size=50, transform=fails, on_error=stops)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)
    loader.close()


# ---- one consumer at a time -------------------------------------------------------------------


def openers(dataset: StreamingDataset) -> dict[str, Callable[[], Any]]:
    loaders = [StreamingDataLoader(dataset, batch_size=size) for size in (50, 100)]
    return {
        "loader": lambda: iter(loaders[0]),
        "other loader": lambda: iter(loaders[1]),
        "dataset": lambda: iter(dataset),
    }


@pytest.mark.parametrize("leave", ["exhaust", "close", "drop"])
@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.permutations(["loader", "other loader", "dataset"], 2)),
)
def test_a_second_live_consumer_is_refused(table: str, first: str, second: str, leave: str) -> None:
    dataset = StreamingDataset(table, num_splits=100, columns=["id"])
    opened = openers(dataset)
    iterator = opened[first]()
    next(iterator)
    before = dataset.state_dict()
    with pytest.raises(IterationError, match="concurrent"):
        next(opened[second]())
    assert dataset.state_dict() == before
    if leave == "exhaust":
        collections.deque(iterator, maxlen=0)
        assert (dataset.state_dict()["epoch"], dataset.state_dict()["counter"]) == (1, 0)
    elif leave == "close":
        dataset.close()
    else:
        del iterator
        gc.collect()
    later = opened[second]()
    next(later)
    state = dataset.state_dict()
    size = {"loader": 50, "other loader": 100, "dataset": 0}[second]
    assert (state["epoch"], state["counter"]) == (1, size)
    assert sum(1 for _ in later) == {"loader": 19, "other loader": 9, "dataset": 999}[second]
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["counter"]) == (2, 0)
    if leave == "close" and first != second:
        with pytest.raises(IterationError, match="closed"):
            next(iterator)
    dataset.close()
    del later, opened


def test_one_loader_goes_on_where_another_stood(table: str) -> None:
    dataset = StreamingDataset(table, num_splits=100, columns=["id"])
    one = StreamingDataLoader(dataset, batch_size=50)
    two = StreamingDataLoader(dataset, batch_size=100)
    reference = StreamingDataLoader(
        StreamingDataset(table, num_splits=100, columns=["id"]), batch_size=100
    )
    epochs = [ids(reference) for _ in range(4)]
    assert sorted(ids(one)) == sorted(epochs[0])
    assert ids(two) == epochs[1]
    assert sorted(ids(one)) == sorted(epochs[2])
    one.load_state_dict({**reference.state_dict(), "epoch": 3, "counter": 300})
    assert ids(two) == epochs[3][300:]
    for loader in (one, two, reference):
        loader.close()


def test_a_state_loaded_into_the_dataset_reaches_its_loader(table: str) -> None:
    other = StreamingDataLoader(
        StreamingDataset(table, shuffle_seed=7, num_splits=20, columns=["id"]), batch_size=100
    )
    state = other.state_dict()
    dataset = StreamingDataset(table, columns=["id"])
    loader = StreamingDataLoader(dataset, batch_size=100)
    assert len(ids(loader)) == 1000
    dataset.load_state_dict(state)
    assert loader.state_dict() == state
    assert ids(loader) == ids(other)
    loader.close()
    other.close()


# ---- a look settles nothing -------------------------------------------------------------------


LOOKS: dict[str, Callable[[StreamingDataset], Any]] = {
    "num_splits": lambda dataset: dataset.num_splits,
    "len": len,
    "repr": repr,
    "state_dict": lambda dataset: dataset.state_dict(),
    "permutation": lambda dataset: dataset.permutation(),
    "stream": lambda dataset: dataset.stream(64),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_does_not_change_the_order(table: str, look: str) -> None:
    with StreamingDataLoader(StreamingDataset(table, columns=["id"]), batch_size=96) as loader:
        expected = ids(loader)
        assert loader.dataset.num_splits == 288
    dataset = StreamingDataset(table, columns=["id"])
    with StreamingDataLoader(dataset, batch_size=96) as loader:
        LOOKS[look](dataset)
        state = loader.state_dict()
        assert state["num_splits"] == 288
        LOOKS[look](dataset)
        assert len(loader) == 10
        assert ids(loader) == expected
        LOOKS[look](dataset)
        assert dataset.num_splits == 288
        assert dataset.state_dict()["plan_hash"] == state["plan_hash"]
        assert loader.state_dict() == dataset.state_dict()


# ---- the last epoch ---------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["loader", "rows", "batches"])
@pytest.mark.parametrize("left", ["whole", "early"])
def test_the_last_epoch_and_none_after(table: str, face: str, left: str) -> None:
    size = {"batch_size": 100} if face == "batches" else {}
    stream: Any = StreamingDataset(table, epoch=LAST_EPOCH, num_splits=20, **size)
    if face == "loader":
        stream = StreamingDataLoader(stream, batch_size=100)
    if left == "whole":
        assert len(list(stream)) == (1000 if face == "rows" else 10)
    else:
        next(iter(stream))

    def run() -> None:
        for _ in range(2):
            with pytest.raises((RuntimeError, ArgumentError), match="epoch"):
                next(iter(stream))

    within(run)
    stream.set_epoch(3)
    next(iter(stream))
    assert stream.state_dict()["epoch"] == 3
    stream.close()


# ---- errors of reading ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 100},
        {"batch_size": 8},
        {"batch_size": 8, "prefetch_bytes": 4096},  # blocks of a few rows
        {"batch_size": 8, "on_error": "fill"},
        {"batch_size": 8, "on_error": lambda _: True},
    ],
)
def test_a_table_that_cannot_be_read_is_an_error(
    table: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    takes = Counter()

    def fails(self: Reader, *_: Any) -> Any:
        takes(None)
        raise ReadError("no such luck")

    monkeypatch.setattr(Reader, "_take", fails)
    with StreamingDataLoader(table, **{"on_error": "skip", **options}) as loader:
        batches: list[Any] = []
        with pytest.raises(ReadError, match=r"none of \d+ rows"):
            batches.extend(loader)
        assert loader.rows_skipped <= 64
    assert settled(lambda: takes.calls) < 1500


def test_some_bad_rows_are_not_hopeless(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Reader._take

    def fails(self: Reader, offsets: Any, *rest: Any) -> Any:
        if (offsets % 2).any():
            raise ReadError("an odd one")
        return take(self, offsets, *rest)

    monkeypatch.setattr(Reader, "_take", fails)
    dataset = StreamingDataset(table, columns=["id"])
    with StreamingDataLoader(dataset, batch_size=100, on_error="skip") as loader:
        found = ids(loader)
        assert all(i % 2 == 0 for i in found)
        assert len(found) + loader.rows_skipped == 1000


# ---- counters ---------------------------------------------------------------------------------


def test_sums_never_fall(table: str) -> None:
    dataset = StreamingDataset(table, columns=["id"])
    seen: list[tuple[float, float, float]] = [(0, 0, 0)]

    def look() -> None:
        now = (dataset.transform_time, dataset.bytes_loaded, dataset.fetch_time)
        assert all(a >= b for a, b in zip(now, seen[-1], strict=True))
        seen.append(now)

    def slow(batch: Any) -> Any:
        time.sleep(0.001)
        return batch

    loader = StreamingDataLoader(dataset, batch_size=100, transform=slow)
    for jump in (None, 5, 9):
        if jump is not None:
            loader.set_epoch(jump)
        for i, _ in enumerate(loader):
            look()
            assert dataset.consumed_rows == 100 * (i + 1)
            if i == 4:
                break
        look()
        loader.close()
        look()
    assert dataset.consumed_rows == 500
    list(loader)
    look()
    loader.load_state_dict(loader.state_dict())
    look()
    loader.close()
    assert seen[-1][0] > 0
    assert seen[-1][1] >= 8 * 1000


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"batch_size": 100}, 1000),
        ({"batch_size": 100, "remainder": "keep"}, ROWS),
        ({"batch_size": ROWS}, ROWS),
    ],
)
def test_consumed_rows_after_an_epoch(table: str, options: Any, rows: int) -> None:
    dataset = StreamingDataset(table, columns=["id"], **options)
    assert sum(len(batch["id"]) for batch in dataset) == dataset.consumed_rows == rows
    dataset.close()
    with StreamingDataLoader(StreamingDataset(table, columns=["id"]), **options) as loader:
        assert len(ids(loader)) == loader.dataset.consumed_rows == rows
        assert loader.dataset.unscanned_rows == loader.dataset.prefetch_queue_depth == 0


def test_skipped_rows_are_counted_on_both(table: str) -> None:
    def fails(batch: Any) -> Any:
        if (batch["id"] % 10 == 0).any():
            raise ValueError("a tenth")
        return batch

    loader = StreamingDataLoader(table, global_batch_size=ROWS, transform=fails, on_error="skip")
    found = ids(loader)
    assert len(found) == ROWS - 101
    assert loader.rows_skipped == loader.dataset.rows_skipped == 101
    assert len(loader.failures) == 101
    assert {error.offset % 10 for error in loader.failures} == {0}
    loader.close()


# ---- how much is made -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_little_is_made_of_an_epoch_that_nobody_asked_for(table: str, steps: int) -> None:
    batch = ROWS // steps
    reference = StreamingDataset(table, columns=["id"])
    with StreamingDataLoader(reference, batch_size=batch) as loader:
        expected = [ids(loader) for _ in range(5)]
    made = Counter()
    dataset = StreamingDataset(table, columns=["id"])
    loader = StreamingDataLoader(dataset, batch_size=batch, transform=made)
    for epoch in range(5):
        assert ids(loader) == expected[epoch]
        ahead = settled(lambda: made.calls) - steps * (epoch + 1)
        assert ahead == min(2, steps)  # and what was made is used: else there would be more
        assert loader.state_dict()["epoch"] == epoch + 1
    loader.close()


def test_the_queue_grows_though_nobody_asks(table: str) -> None:
    go = threading.Event()

    def waits(batch: Any) -> Any:
        go.wait(HANG)
        return batch

    loader = StreamingDataLoader(table, batch_size=50, transform=waits)
    iterator = iter(loader)
    running = loader._runner.pipeline
    assert settled(lambda: running.queued) == 2  # nothing is known of sizes yet
    go.set()
    eventually(lambda: running.queued >= 20)
    assert sum(1 for _ in iterator) == 20
    loader.close()


def test_the_queue_holds_no_more_bytes_than_it_may(table: str) -> None:
    made = Counter()
    loader = StreamingDataLoader(
        table, batch_size=10, transform=made, prefetch_bytes=1 << 13, format="numpy"
    )
    iterator = iter(loader)
    assert 1 <= settled(lambda: made.calls) <= 60
    assert sum(1 for _ in iterator) == 100
    loader.close()


# ---- arguments --------------------------------------------------------------------------------


def test_integers_of_numpy(table: str) -> None:
    plain = StreamingDataset(table, columns=["id"], shuffle_seed=5, epoch=2, num_splits=8)
    fancy = StreamingDataset(
        table,
        columns=["id"],
        shuffle_seed=np.uint8(5),
        epoch=np.int16(2),
        num_splits=np.int64(8),
        shuffle_clump_size=None,
    )
    one = StreamingDataLoader(plain, batch_size=100)
    two = StreamingDataLoader(fancy, batch_size=np.int32(100), num_workers=np.int64(0))
    assert ids(one) == ids(two)
    two.set_epoch(np.int64(4))
    two.skip(np.int64(3))
    one.set_epoch(4)
    one.skip(3)
    assert json.dumps(one.state_dict()) == json.dumps(two.state_dict())
    assert ids(one) == ids(two)
    next(iter(one))
    next(iter(two))
    state = json.loads(json.dumps(two.state_dict()))
    assert state == one.state_dict()
    one.load_state_dict(state)
    batches = StreamingDataset(table, global_batch_size=np.uint16(100), columns=["id"])
    next(iter(batches))
    json.dumps(batches.state_dict())
    for stream in (one, two, batches):
        stream.close()


@pytest.mark.parametrize("bad", [1.0, np.float64(2), True, np.bool_(True), "3", [4], -1])
@pytest.mark.parametrize(
    "name",
    ["shuffle_seed", "epoch", "num_splits", "batch_size", "global_batch_size", "read_batch_size"],
)
def test_what_is_no_integer_is_refused(table: str, name: str, bad: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        StreamingDataset(table, **{name: bad})
    if name.endswith("batch_size") and not name.startswith("read"):
        with pytest.raises(ArgumentError, match=name):
            StreamingDataLoader(table, **{name: bad})
    if name == "epoch":
        dataset = StreamingDataset(table)
        with pytest.raises(ArgumentError, match=name):
            dataset.set_epoch(bad)
        with pytest.raises(ArgumentError, match=name):
            StreamingDataLoader(dataset, batch_size=4).set_epoch(bad)


def test_shuffle_by_other_words(table: str) -> None:
    for given, meant in ((1, True), (0, False), (np.bool_(True), True)):
        dataset = StreamingDataset(table, shuffle=given, columns=["id"])
        other = StreamingDataset(table, shuffle=meant, columns=["id"])
        with (
            StreamingDataLoader(dataset, batch_size=100) as loader,
            StreamingDataLoader(other, batch_size=100) as same,
        ):
            assert ids(loader) == ids(same)
            state = json.loads(json.dumps(loader.state_dict()))
            assert state["shuffle"] is meant
            loader.load_state_dict(state)
            same.load_state_dict(state)
            assert ids(loader) == ids(same)
    for bad in ("no", 1.5, []):
        with pytest.raises(ArgumentError, match="shuffle"):
            StreamingDataset(table, shuffle=bad)  # type: ignore[arg-type]


def test_columns_are_a_list(table: str) -> None:
    for bad in ("id", {"id": 1}, 5):
        with pytest.raises(ArgumentError, match="columns"):
            StreamingDataset(table, columns=bad)  # type: ignore[arg-type]
    with StreamingDataLoader(StreamingDataset(table, columns=("id",)), batch_size=9) as loader:  # type: ignore[arg-type]
        assert list(next(iter(loader))) == ["id"]


# ---- what is held -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["numpy", "arrow", "rows"])
@pytest.mark.parametrize("how", ["close", "drop", "load", "error"])
def test_a_stopped_pipeline_holds_no_rows(  # noqa: C901 - a branch a way to stop
    table: str, monkeypatch: pytest.MonkeyPatch, no_collector: None, form: str, how: str
) -> None:
    held: list[weakref.ref[Any]] = []
    read, put, load = Reader.read, ColumnPool.put, feed.TableMemory.load

    def reading(self: Reader, offsets: Any) -> Rows:
        rows = read(self, offsets)
        held.append(weakref.ref(rows.batch))
        return rows

    def putting(self: ColumnPool, targets: Any, rows: Rows) -> None:
        put(self, targets, rows)
        held.extend(weakref.ref(values) for values in self._values.values())

    def loading(self: Any, block: Any, rows: Any) -> None:
        load(self, block, rows)
        held.append(weakref.ref(self._pool))

    monkeypatch.setattr(Reader, "read", reading)
    monkeypatch.setattr(ColumnPool, "put", putting)
    monkeypatch.setattr(feed.TableMemory, "load", loading)
    calls = Counter()

    def fails_late(batch: Any) -> Any:
        if how == "error" and calls(1) and calls.calls > 8:
            raise ValueError("late")
        return batch

    dataset = StreamingDataset(table, num_splits=8, shuffle_clump_size=4, shuffle_window=2)
    loader = StreamingDataLoader(dataset, batch_size=20, format=form, transform=fails_late)
    running = None
    if how == "error":
        with pytest.raises(TransformError):
            for _ in loader:
                pass
    else:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        del iterator
        running = loader._runner.pipeline
        settled(lambda: running.queued)
        assert any(each() is not None for each in held)
    if how == "close":
        loader.close()
    elif how == "load":
        loader.load_state_dict(loader.state_dict())
    elif how == "drop":
        del loader
    eventually(lambda: not threads())
    assert all(each() is None for each in held)
    assert running is None or running.queued == 0


class Fails:
    def __call__(self, _: Any) -> Any:
        raise ValueError("always")


class Passes:
    def __call__(self, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("face", ["loader", "collate", "skip", "warn", "rows", "batches"])
def test_an_error_keeps_nothing_alive(
    table: str, monkeypatch: pytest.MonkeyPatch, no_collector: None, face: str, reading: bool
) -> None:
    function: Any = Passes() if reading else Fails()
    if reading:

        def fails(self: Reader, *_: Any) -> Any:
            raise ReadError("no such luck")

        monkeypatch.setattr(Reader, "_take", fails)
    stream: Any
    if face == "loader":
        stream = StreamingDataLoader(table, batch_size=50, transform=function)
    elif face == "collate":
        stream = StreamingDataLoader(table, batch_size=50, collate_fn=function)
    elif face == "skip":
        stream = StreamingDataLoader(table, batch_size=50, transform=function, on_error="skip")
    elif face == "warn":
        stream = StreamingDataset(
            table, num_splits=4, transform=function, on_transform_error="warn"
        )
    elif face == "rows":
        stream = StreamingDataset(table, num_splits=4, transform=function)
    else:
        stream = StreamingDataset(table, batch_size=50, transform=function)
    gone = [weakref.ref(stream), weakref.ref(function)]
    failed = None
    try:
        for _ in stream:
            pass
    except Exception as error:
        failed = type(error)
    assert (failed is None) == (face in ("skip", "warn") and not reading)
    eventually(lambda: not threads() or failed is None)
    del stream, function
    eventually(lambda: not threads())
    assert [each() for each in gone] == [None, None]


def test_failures_are_kept_without_their_batches(table: str, no_collector: None) -> None:
    batches: list[weakref.ref[Any]] = []

    def fails(batch: Any) -> Any:
        batches.append(weakref.ref(batch["id"]))
        if (batch["id"] % 10 == 0).any():
            raise ValueError("a tenth")
        return batch

    with StreamingDataLoader(
        table, batch_size=100, transform=fails, on_error="skip", format="numpy"
    ) as loader:
        collections.deque(loader, maxlen=0)
    error = loader.failures[0]
    assert isinstance(error.__cause__, ValueError)
    assert "ValueError: a tenth" in str(error)
    assert all(each() is None for each in batches)


def test_an_error_shows_where_the_transform_failed(table: str) -> None:
    def my_transform(batch: Any) -> Any:
        local = "a local of the transform"
        raise ValueError(local)

    loader = StreamingDataLoader(table, batch_size=100, transform=my_transform)
    with pytest.raises(TransformError) as caught:
        list(loader)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    trace = cause.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    assert trace.tb_frame.f_code.co_name == "my_transform"
    assert "local" in trace.tb_frame.f_locals  # for a debugger
    loader.close()


def test_an_error_that_is_its_own_cause(table: str) -> None:
    def odd(batch: Any) -> Any:
        try:
            raise ValueError("odd")
        except ValueError as error:
            error.__cause__ = error
            raise

    loader = StreamingDataLoader(table, batch_size=100, transform=odd)

    def run() -> None:
        with pytest.raises(TransformError):
            list(loader)

    within(run)
    loader.close()


# ---- the interpreter's exit -------------------------------------------------------------------

EXIT = """
import sys, time
from destrier import StreamingDataLoader, StreamingDataset, pipeline

pipeline._EXIT_SECONDS = 1.0

def waits(batch):
    time.sleep(3600)

path = sys.argv[1]
plain = iter(StreamingDataLoader(path, batch_size=10))
next(plain)
slow = StreamingDataLoader(path, batch_size=10, transform=waits)
waiting = iter(slow)
rows = iter(StreamingDataset(path, num_splits=4, transform=lambda b: b.to_pylist()))
next(rows)
failed = StreamingDataLoader(path, batch_size=10, collate_fn=lambda rows: 1 / 0)
try:
    next(iter(failed))
except ZeroDivisionError:
    print("reached the end", flush=True)
"""


def test_the_interpreter_ends_while_pipelines_run(table: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), table],
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    assert done.stdout == "reached the end\n"
    assert done.stderr == ""
    assert done.returncode == 0


# ---- the schedule -----------------------------------------------------------------------------

PLANS: dict[str, tuple[Order, Any]] = {
    "whole steps": (
        Order(4001, seed=1, num_splits=8, clump_size=5, window=4),
        lambda o: Steps(o.n, 0, 40, o.num_splits),
    ),
    "from the middle": (
        Order(4001, seed=2, epoch=3, num_splits=8, clump_size=5, window=4),
        lambda o: Steps(o.n, 1717, 40, o.num_splits, remainder="keep"),
    ),
    "padded": (
        Order(999, seed=3, num_splits=7, clump_size=4, window=3),
        lambda o: Steps(o.n, 0, 50, o.num_splits, remainder="pad"),
    ),
    "one of three ranks": (
        Order(3000, seed=4, num_splits=12, clump_size=8, window=2),
        lambda o: Steps(o.n, 0, 60, o.num_splits, Topology(1, 3)),
    ),
    "windows larger than splits": (
        Order(2000, seed=5, num_splits=50, clump_size=64, window=8),
        lambda o: Steps(o.n, 0, 100, o.num_splits),
    ),
    "rows": (
        Order(4001, seed=6, num_splits=8, clump_size=5, window=4),
        lambda o: Cycles(o.n, 0, o.num_splits, Topology(1, 2), rows=32),
    ),
    "no windows": (
        Order(1500, seed=7, num_splits=8),
        lambda o: Steps(o.n, 0, 40, o.num_splits),
    ),
}


@pytest.mark.parametrize("what", ["all", "windows", "shares"])
@pytest.mark.parametrize("most_rows", [1, 16, 100, 1000, 100_000])
@pytest.mark.parametrize("name", PLANS)
def test_places_hold_the_rows_of_the_order(
    name: str, most_rows: int, what: holding.Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "all":
        monkeypatch.setattr(schedule, "BLOCK_ROWS", most_rows)  # how many are planned at once
    order, shares_of = PLANS[name]
    shares = shares_of(order)
    blocks = schedule.Schedule(
        order, RangeRows(order.n), shares, row_bytes=1.0, held=what, block_bytes=most_rows
    )
    held: dict[int, int] = {}  # place in the pool → row
    delivered: list[np.ndarray[Any, Any]] = []
    expected_first = 0
    most_capacity = most_held = widest = 0
    for block in blocks:
        assert block.first == expected_first
        expected_first += len(block.bounds) - 1
        wanted = order.rows(block.samples % order.n)
        delivered += [block.samples[a:b] for a, b in itertools.pairwise(block.bounds.tolist())]
        assert block.bounds[-1] == len(block.samples)
        widest = max(widest, len(block.samples))
        if block.targets is None:
            assert block.offsets[block.places].tolist() == wanted.tolist()
            continue
        for start, stop in block.freed:
            for place in range(start, stop):
                held.pop(place, None)
        targets = block.targets.tolist()
        assert len(set(targets)) == len(targets) == len(block.offsets)
        assert not set(targets) & held.keys(), "an open window's place was given away"
        assert max(targets, default=0) < block.capacity
        held.update(zip(targets, block.offsets.tolist(), strict=True))
        assert len(set(held.values())) == len(held), "a row is held twice"
        assert [held[place] for place in block.places.tolist()] == wanted.tolist()
        most_capacity, most_held = max(most_capacity, block.capacity), max(most_held, len(held))
    assert expected_first == len(shares)
    samples, bounds = shares.samples(0, len(shares))
    assert [part.tolist() for part in delivered] == [
        samples[a:b].tolist() for a, b in itertools.pairwise(bounds.tolist())
    ]
    if blocks.held == "all":
        assert sorted(held.values()) == list(range(order.n))
    elif blocks.held == "windows":
        slot = windows.slot_rows(order)
        # An open window of each split, and those that a block needs at once or that just ended.
        per_split = 2 + -(-widest // order.num_splits) // max(1, order.clump_size)
        assert most_held <= most_capacity <= (order.num_splits + 1) * slot * per_split


@pytest.mark.parametrize(("n", "most", "runs"), [(1, 8, 4), (10, 100, 3), (1000, 64, 4), (7, 2, 5)])
def test_what_is_read_in_runs(n: int, most: int, runs: int) -> None:
    blocks = list(holding._in_runs(n, most, runs))
    assert sorted(np.concatenate(blocks).tolist()) == list(range(n))
    assert all((np.diff(block) > 0).all() for block in blocks)
    assert all(1 + int((np.diff(block) > 1).sum()) <= runs for block in blocks)
    assert all(len(block) <= max(most, runs) for block in blocks)


def test_memory_stays_bounded_over_a_long_epoch() -> None:
    order = Order(200_000, seed=8, num_splits=16, clump_size=8, window=4)
    shares = Steps(order.n, 0, 160, order.num_splits)
    blocks = schedule.Schedule(
        order, RangeRows(order.n), shares, row_bytes=1.0, held="windows", block_bytes=320
    )
    capacities = [block.capacity for block in blocks if block.targets is not None]
    freed = sum(stop - start for block in blocks for start, stop in block.freed)
    assert max(capacities) <= 4 * windows.open_rows(order, order.num_splits)
    assert capacities[-1] <= 2 * capacities[len(capacities) // 10]
    assert freed >= order.n * 0.9


@pytest.mark.parametrize("block_rows", [256, 1024, 4096])
def test_windows_are_read_twice_at_most(block_rows: int) -> None:
    # All lanes come back to the windows that they began with within shares planned together.
    order = Order(8192, seed=7, num_splits=256, clump_size=32, window=8)
    shares = Steps(order.n, 0, 256, order.num_splits)
    blocks = schedule.Schedule(
        order, RangeRows(order.n), shares, row_bytes=1.0, held="windows", block_bytes=block_rows
    )
    assert order.n <= sum(len(block.offsets) for block in blocks) <= 2 * order.n


# ---- pools ------------------------------------------------------------------------------------


def rows_of(values: dict[str, Any]) -> Rows:
    return Rows(pa.RecordBatch.from_pydict(values), None)


def test_a_freed_batch_is_let_go(no_collector: None) -> None:
    one, two = rows_of({"a": [1, 2, 3, 4]}), rows_of({"a": [5, 6]})
    pool = ArrowPool(one.batch.schema)
    pool.reserve(8)
    pool.put(np.array([0, 1, 4, 5]), one)
    pool.put(np.array([2, 6]), two)
    gone = [weakref.ref(one.batch), weakref.ref(two.batch)]
    del one, two
    assert pool.take(np.array([6, 0, 5, 0])).to_pydict() == {"a": [6, 1, 4, 1]}
    pool.free(0, 2)
    assert gone[0]() is not None
    pool.free(4, 6)
    assert gone[0]() is None
    pool.free(0, 8)
    assert gone[1]() is None
    assert pool.take(np.empty(0, np.int64)).num_rows == 0


def test_what_views_look_into_is_counted() -> None:
    rows = rows_of({"image": [bytes(100_000)] * 20, "id": list(range(20))})
    pool = ColumnPool(rows.batch.schema, {"image"})
    pool.reserve(20)
    pool.put(np.arange(20), rows)
    assert batch_bytes(pool.take(np.arange(20))) >= 20 * 100_000


def test_what_views_look_into_is_let_go_with_the_last_of_them(no_collector: None) -> None:
    one = rows_of({"image": [b"a" * 4000, b"b" * 4000, None], "id": [1, 2, 3]})
    pool = ColumnPool(one.batch.schema, {"image"})
    pool.reserve(4)
    before = pa.total_allocated_bytes()
    more = pa.array([b"c" * (1 << 20), b"d" * (1 << 20)])
    two = Rows(pa.record_batch({"image": more, "id": [4, 5]}), None)
    pool.put(np.array([0, 1, 2]), one)
    pool.put(np.array([3, 0]), two)
    del more, two
    found = pool.take(np.array([3, 1, 2]))["image"].values
    assert [type(value) for value in found] == [pa.Buffer, pa.Buffer, type(None)]
    assert bytes(found[1]) == b"b" * 4000
    del found
    pool.free(3, 4)
    assert pa.total_allocated_bytes() >= before + (2 << 20)
    pool.free(0, 1)
    assert pa.total_allocated_bytes() < before + (1 << 20)


def test_a_freed_object_is_let_go_and_nulls_do_not_stay(no_collector: None) -> None:
    first = rows_of({"a": [None, 2], "s": ["x" * 100, None]})
    pool = ColumnPool(first.batch.schema)
    pool.reserve(4)
    pool.put(np.array([0, 3]), first)
    taken = pool.take(np.array([3, 0, 3]))
    assert taken["a"].valid is not None
    assert taken["a"].valid.tolist() == [True, False, True]
    assert taken["s"].values.tolist() == [None, "x" * 100, None]
    pool.free(0, 4)
    assert pool._values["s"].tolist()[:4] == [None] * 4
    pool.put(np.array([3, 0]), rows_of({"a": [7, 8], "s": ["y", "z"]}))
    taken = pool.take(np.array([0, 3]))
    assert taken["a"].values.tolist() == [8, 7]
    assert taken["a"].valid is None or taken["a"].valid.all()
    assert taken["s"].values.tolist() == ["z", "y"]
    pool.reserve(100)
    assert pool.take(np.array([3, 0]))["a"].values.tolist() == [7, 8]
    assert isinstance(from_arrow(pa.array([1])), Column)


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_what_is_done_to_a_batch_changes_no_later_one(tmp_path: Path, format: Any) -> None:
    ids = range(60)
    rows = {
        "id": list(ids),
        "tokens": [[i, i] for i in ids],
        "nested": [[[i], []] for i in ids],
        "record": [{"a": [i]} for i in ids],
        "map": pa.array([[("k", [i])] for i in ids], pa.map_(pa.string(), pa.list_(pa.int8()))),
    }
    lance.write_dataset(pa.table(rows), tmp_path / "t.lance", data_storage_version="2.2")
    with StreamingDataLoader(str(tmp_path / "t.lance"), batch_size=10, format=format) as loader:
        for _ in range(2):
            for batch in loader:
                assert [each.tolist() for each in batch["tokens"]] == [[i, i] for i in batch["id"]]
                assert batch["nested"] == [[[i], []] for i in batch["id"]]
                assert batch["record"] == [{"a": [i]} for i in batch["id"]]
                assert batch["map"] == [[("k", [i])] for i in batch["id"]]
                for i in range(10):
                    batch["tokens"][i][:] = -1
                    batch["nested"][i][0].append(-1)
                    batch["record"][i]["a"].append(-1)
                    batch["map"][i][0][1].append(-1)
                batch["id"][:] = -1


def test_python_objects_are_counted_as_what_they_take(tmp_path: Path) -> None:
    words = [[f"word {i} {j}" for j in range(10)] for i in range(200)]
    lance.write_dataset(pa.table({"words": words}), tmp_path / "t.lance")
    dataset = StreamingDataset(tmp_path / "t.lance")
    taken = sum(sys.getsizeof(each) + sum(map(sys.getsizeof, each)) for each in words) / 200
    with StreamingDataLoader(dataset, batch_size=10) as loader:
        next(iter(loader))
        assert loader._runner is not None
        assert loader._runner.work.feed.row_bytes == pytest.approx(taken, rel=0.2)
    for rows, held in ((450, "all"), (350, "windows")):
        with StreamingDataLoader(
            dataset, batch_size=10, prefetch_bytes=int(rows * taken)
        ) as loader:
            next(iter(loader))
            assert loader._runner is not None
            assert loader._runner.work.feed.held == held


def test_narrow_columns_lie_close() -> None:
    schema = pa.schema([(str(i), pa.int8() if i % 2 else pa.int64()) for i in range(12)])
    pool = ColumnPool(schema)
    assert pool._packed.dtype.itemsize == 56
    batch = pa.RecordBatch.from_arrays([pa.array([i, -i]) for i in range(12)], list("abcdefghijkl"))
    pool.reserve(2)
    pool.put(np.arange(2), Rows(batch, None))
    taken = pool.take(np.array([1, 0]))
    assert [taken[str(i)].values.tolist() for i in range(12)] == [[-i, i] for i in range(12)]


def test_tensors_as_arrow_makes_them_are_tensors(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    made = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    assert made.type.permutation == [0, 1]
    lance.write_dataset(pa.table({"x": made}), tmp_path / "t.lance")
    dataset = StreamingDataset(tmp_path / "t.lance", shuffle=False)
    with StreamingDataLoader(dataset, batch_size=4) as loader:
        (batch,) = loader
    assert torch.equal(batch["x"], torch.from_numpy(values))


def test_narrow_columns_may_have_any_name_and_lie_without_gaps() -> None:
    values = {
        "": pa.array([1, 2, 3], pa.int8()),
        "f0": pa.array([1, 2, 3], pa.int64()),
        "f1": pa.array([True, False, True]),
        "x": pa.array([1, 2, 3], pa.int16()),
        "y": pa.array([1, 2, 3], pa.float32()),
    }
    rows = rows_of(values)
    pool = ColumnPool(rows.batch.schema)
    pool.reserve(4)
    pool.put(np.array([2, 0, 1]), rows)
    taken = pool.take(np.array([2, 1]))
    assert list(taken) == list(values)
    assert [taken[name].values.tolist() for name in ("", "f0", "x", "y")] == [[1, 3]] * 4
    assert taken["f1"].values.tolist() == [True, True]
    assert taken["f0"].values.dtype == np.int64
    assert pool._packed.itemsize == 1 + 8 + 1 + 2 + 4


# ---- device -----------------------------------------------------------------------------------


class Pair(NamedTuple):
    one: Any
    two: Any


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As tokenizers return it: made in another way than dicts are."""

    def __init__(self, data: Any, *, kind: str) -> None:
        super().__init__(data)
        self.kind = kind


def test_containers_keep_their_types_on_their_way_to_a_device(table: str) -> None:
    made: list[Any] = []

    def dressed(batch: Any) -> Any:
        given = collections.defaultdict(list, {"id": batch["id"]})
        out = Encoding(
            {
                "id": batch["id"],
                "default": given,
                "pair": Pair(batch["id"], "text"),
                "ordered": collections.OrderedDict(id=batch["id"]),
                "user": collections.UserDict(id=batch["id"]),
                "list": [batch["id"], (batch["id"], None)],
                "number": 5,
            },
            kind="special",
        )
        made.append(out)
        return out

    dataset = StreamingDataset(table, columns=["id"])
    loader = StreamingDataLoader(dataset, batch_size=100, transform=dressed, device="meta")
    batch = next(iter(loader))
    assert type(batch) is Encoding
    assert batch.kind == "special"
    assert type(batch["default"]) is collections.defaultdict
    assert batch["default"].default_factory is list
    assert type(batch["pair"]) is Pair
    assert batch["pair"].two == "text"
    assert type(batch["ordered"]) is collections.OrderedDict
    assert type(batch["user"]) is collections.UserDict
    assert type(batch["list"][1]) is tuple
    assert batch["number"] == 5
    moved = [
        batch["id"],
        batch["default"]["id"],
        batch["pair"].one,
        batch["ordered"]["id"],
        batch["user"]["id"],
        batch["list"][0],
        batch["list"][1][0],
    ]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert all(each["default"]["id"].device.type == "cpu" for each in copy.copy(made))
    assert all(isinstance(each["id"], torch.Tensor) for each in copy.copy(made))
    loader.close()


# ---- a stuck holder of the selection's lock ---------------------------------------------------

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(3600)
"""


def test_a_stuck_holder_of_the_lock_is_not_waited_for(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESTRIER_CACHE", str(tmp_path))
    expected = len(StreamingDataset(table, filter="label < 3", num_splits=1))
    (path,) = tmp_path.glob("*.rows")
    path.unlink()
    monkeypatch.setattr(selection, "_LOCK_WARN", 0.2)
    monkeypatch.setattr(selection, "_LOCK_GIVE_UP", 0.6)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path.with_suffix(".lock"))], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.warns(DestrierWarning, match="another process has been building") as seen:
                found = len(StreamingDataset(table, filter="label < 3", num_splits=1))
        finally:
            holder.kill()
    assert found == expected
    assert len(seen) == 1
    assert path.exists()


# ---- all rows are held ------------------------------------------------------------------------


def test_rows_that_are_held_are_read_once(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, rows = Reader.read, 0

    def reading(self: Reader, offsets: Any) -> Rows:
        nonlocal rows
        rows += len(offsets)
        return read(self, offsets)

    dataset = StreamingDataset(table, num_splits=8, with_index=True)
    with StreamingDataLoader(dataset, batch_size=20) as loader:
        count = dataset.stream(20).count
        monkeypatch.setattr(Reader, "read", reading)
        whole = [batch["row_offset"].tolist() for batch in loader]
        first = 4 * 20  # are read by themselves
        assert count <= rows <= first + count
        before = rows
        for epoch in range(1, 3):
            given = [batch["row_offset"].tolist() for batch in loader]
            assert given != whole
            assert loader.state_dict()["epoch"] == epoch + 1
        iterator = iter(loader)
        given = [next(iterator)["row_offset"].tolist() for _ in range(7)]
        del iterator  # left in the midst of the epoch
        given += [batch["row_offset"].tolist() for batch in loader]
        assert rows == before
    with StreamingDataLoader(
        StreamingDataset(table, num_splits=8, with_index=True, epoch=3), batch_size=20
    ) as fresh:
        assert given[:7] == [b["row_offset"].tolist() for b in itertools.islice(fresh, 7)]


def test_few_batches_do_not_load_all(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, most = Reader.read, 0

    def reading(self: Reader, offsets: Any) -> Rows:
        nonlocal most
        most = max(most, len(offsets))
        return read(self, offsets)

    dataset = StreamingDataset(table, filter="id < 60")
    with StreamingDataLoader(dataset, batch_size=20) as loader:
        loader.dataset.stream(20)
        monkeypatch.setattr(Reader, "read", reading)
        for _ in range(3):
            assert len(list(loader)) == 3
        assert most <= 60
