"""Tables of the rows that functions make, and jobs that write files."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from destrier import StreamingDataLoader, StreamingDataset
from destrier.errors import (
    ArgumentError,
    DestrierWarning,
    EmptyError,
    SchemaError,
    SourceError,
    WorkerError,
    WriteError,
)
from destrier.jobs.fingerprint import fingerprint
from destrier.jobs.inputs import IterableSource, SequenceSource
from destrier.jobs.mapping import map as map_inputs
from destrier.jobs.optimizing import ALL_DONE, optimize
from destrier.jobs.streams import Stream, is_sequence
from destrier.writing.source import Measure


def rows_of(source: SequenceSource | IterableSource) -> list[dict[str, Any]]:
    """Read all shards as a worker would, through a pickle."""
    other = pickle.loads(pickle.dumps(source))
    batches: list[pa.RecordBatch] = []
    schema = source.schema
    first = source.first()
    shards = [first]
    for shard in shards:
        for unit in pickle.loads(pickle.dumps(shard)).units:
            for batch in other.read(unit, schema):
                schema = schema or batch.schema
                batches.append(batch)
        if shard is first:
            shards.extend(source.rest(Measure(other.taken, 100 * other.taken, 0.2)))
    assert [shard.index for shard in shards] == list(range(len(shards)))
    source.failures.extend(other.failures)
    return [row for batch in batches for row in batch.to_pylist()]


def read(path: Path) -> list[dict[str, Any]]:
    return lance.dataset(path).to_table().to_pylist()


class Squares(Sequence[int]):
    """A sequence of its own kind."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        return number * number


def one(number: int) -> dict[str, int]:
    return {"n": number}


def several(number: int) -> Any:
    for i in range(number % 4):
        yield {"n": number, "i": i}


def expected(numbers: Any) -> list[dict[str, int]]:
    return [row for number in numbers for row in several(number)]


# ---- what a function may return ---------------------------------------------------------------


def test_one_row_an_input() -> None:
    assert rows_of(SequenceSource(one, range(1000))) == [{"n": i} for i in range(1000)]
    assert rows_of(SequenceSource(one, Squares(70))) == [{"n": i * i} for i in range(70)]
    assert rows_of(SequenceSource(one, np.arange(3))) == [{"n": i} for i in range(3)]


def test_a_generator_filters_and_explodes() -> None:
    assert rows_of(SequenceSource(several, range(300))) == expected(range(300))
    assert rows_of(SequenceSource(lambda n: list(several(n)), range(300))) == expected(range(300))


def test_none_is_no_row() -> None:
    rows = rows_of(SequenceSource(lambda n: one(n) if n % 7 == 0 else None, range(200)))
    assert rows == [{"n": i} for i in range(0, 200, 7)]


def test_batches_of_rows() -> None:
    def batches(number: int) -> Any:
        if number % 2:
            return pa.record_batch({"n": [number], "i": [0]})
        return (pa.Table.from_pylist(list(several(n))) for n in (1, number, 2) if n % 4)

    rows = rows_of(SequenceSource(batches, range(100)))
    parts = [[{"n": n, "i": 0}] if n % 2 else expected([1, n, 2]) for n in range(100)]
    assert rows == [row for part in parts for row in part]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda n: n, "returned int 0 for input 0"),
        (lambda _: "text", "returned str 'text' for input 0"),
        (lambda _: iter([1]), "gave int 1 as a row of input 0"),
        (lambda _: [None], "gave NoneType None as a row of input 0"),
        (lambda _: {}, "input 0 has no columns"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_is_no_row(function: Any, text: str, on_error: str) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        rows_of(SequenceSource(function, range(3), None, on_error))
    assert caught.value.row == 0


@pytest.mark.parametrize("many", [False, True])
def test_a_row_of_another_type_names_its_input(many: bool) -> None:
    def function(number: int) -> Any:
        bad = number == 150
        if not many:
            return {"n": "x" if bad else 1}
        return ({"n": "x" if bad and i == 2 else 1} for i in range(number % 2 * 5 + 3 * bad))

    with pytest.raises(SchemaError) as caught:
        rows_of(SequenceSource(function, range(200)))
    assert (caught.value.row, caught.value.column) == (150, "n")
    assert str(caught.value).startswith("row 2 of input 150" if many else "input 150, column 'n'")


def test_a_declared_schema_is_kept() -> None:
    schema = pa.schema([pa.field("n", pa.int16(), metadata={"k": "v"})])
    source = SequenceSource(one, range(3), schema)
    assert source.schema is schema
    (batch,) = source.read(source.first().units[0], schema)
    assert batch.schema.equals(schema, check_metadata=True)
    with pytest.raises(SchemaError, match="input 0"):
        rows_of(SequenceSource(lambda _: {"n": 40_000}, [0], schema))


# ---- shards -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "nbytes", "seconds", "shards"),
    [
        (16, 1600, 0.1, 0),  # all are in the first shard
        (16 + 1000, 1600, 0.1, 1),  # cheap: some milliseconds in all
        (16 + 10_000_000, 1600, 0.1, 32),  # cheap, but many
        (16 + 640, 1600, 16.1, 32),  # a second each: even shares
        (16 + 6400, 1600, 160.1, 1000),  # ten seconds each: little is lost
        (16 + 3200, 16 << 20, 0.1, 13),  # a mebibyte each: no shard over 256 MiB
        (16 + 3, 16 << 30, 1600, 3),  # a gibibyte each
    ],
)
def test_shards_are_cut_by_what_the_first_one_took(
    count: int, nbytes: int, seconds: float, shards: int
) -> None:
    source = SequenceSource(one, range(count))
    measure = Measure(16, nbytes, seconds)
    rest = list(source.rest(measure))
    assert abs(len(rest) - shards) <= 1
    assert rest == list(SequenceSource(one, range(count)).rest(measure))
    bounds = [place for shard in rest for unit in shard.units for place in unit.place[:2]]
    assert bounds[::2] == [16, *bounds[1:-1:2]][: len(rest)]
    assert bounds[-1:] == [count][: len(rest)]


def taken(source: SequenceSource | IterableSource) -> int:
    """How many inputs the first shard takes."""
    for _ in source.read(source.first().units[0], source.schema):
        pass
    return source.taken


@pytest.mark.parametrize(
    ("first", "others", "count", "many"),
    [
        (0.0, 0.0, 1000, 256),
        (9.0, 0.0, 1000, 256),  # the first one loads much
        (0.0, 0.3, 1000, 16),
        (0.0, 0.3, 32, 5),  # few and slow: the other workers do not wait for them
        (9.0, 9.0, 32, 2),
    ],
)
def test_the_first_shard_takes_about_a_second(
    first: float, others: float, count: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def function(number: int) -> dict[str, int]:
        nonlocal now
        now += others if number else first
        return one(number)

    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("destrier.jobs.inputs.time", clock)
    assert taken(SequenceSource(function, range(count))) == many


def test_the_first_shard_takes_a_row() -> None:
    def none(_: int) -> None:
        return None

    schema = pa.schema([("n", pa.int64())])
    for source, many in [
        (SequenceSource(lambda n: one(n) if n == 700 else None, range(1000)), 701),
        (SequenceSource(none, range(1000)), 1000),
        (SequenceSource(none, range(1000), schema), 256),
        (IterableSource(one, numbers(1000)), 256),
    ]:
        assert taken(source) == many


def test_a_digest_names_function_inputs_and_options() -> None:
    def digest(function: Any = one, inputs: Any = range(10), *options: Any) -> str:
        return SequenceSource(function, inputs, *options).digest()

    digests = [
        digest(),
        digest(several),
        digest(lambda n: {"n": n}),
        digest(lambda n: {"n": n + 1}),
        digest(one, range(11)),
        digest(one, list(range(10))),
        digest(one, ["a"]),
        digest(one, ["b"]),
        digest(one, np.arange(3)),
        digest(one, [{"a": 1}]),
        digest(one, [{"a": 2}]),
        digest(one, range(10), pa.schema([("n", pa.int64())])),
        digest(one, range(10), None, "skip"),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digest()
    assert IterableSource(one, [1]).digest() != IterableSource(one, [1]).digest()


GLOBAL = 1


def uses_a_global(number: int) -> dict[str, int]:
    return {"n": GLOBAL}


def test_a_digest_sees_what_a_function_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def closure(value: Any) -> Any:
        def inner(number: int, also: Any = None) -> Any:
            return [value for _ in range(number)] if number else inner

        return inner

    assert fingerprint(closure([1, "a"])) == fingerprint(closure([1, "a"]))
    assert fingerprint(closure(1)) != fingerprint(closure(2))
    assert fingerprint(functools.partial(one, 1)) != fingerprint(functools.partial(one, 2))
    assert fingerprint(Squares(1).__getitem__) != fingerprint(Squares(2).__getitem__)
    assert fingerprint({"a": {1, "b"}}) == fingerprint({"a": {"b", 1}})
    same = "text" * 3
    assert fingerprint([same, same]) == fingerprint([same, "text" + "texttext"])
    cycle: list[Any] = []
    cycle.append(cycle)
    assert fingerprint(cycle) == fingerprint(cycle)
    lock = threading.Lock()
    assert fingerprint(lock) != fingerprint(lock)
    before = fingerprint(uses_a_global)
    monkeypatch.setitem(globals(), "GLOBAL", 2)
    assert fingerprint(uses_a_global) != before


MODULE = """
import enum

class Kind(enum.Enum):
    ONE = 1

class Base:
    def value(self):
        return {base}

class Row(Base):
    kind = Kind.ONE
    def made(self):
        return {made}

def fn(number):
    return {{"n": Row().made(), "kind": Kind.ONE.name}}
"""


def test_a_digest_sees_the_classes_of_the_functions_module() -> None:
    def digest(base: int, made: int) -> str:
        module = types.ModuleType("imported")
        exec(MODULE.format(base=base, made=made), module.__dict__)
        return fingerprint(module.fn)

    assert digest(1, 2) == digest(1, 2)
    assert len({digest(1, 2), digest(1, 3), digest(2, 2)}) == 3


CALLABLE = """
class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, number):
        return {{"n": scaled(number, self.factor)}}

def scaled(number, factor):
    return number * factor + {added}
"""


@pytest.mark.parametrize("partial", [False, True])
def test_a_digest_sees_the_class_of_an_object_that_is_called(
    partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(factor: int, added: int) -> str:
        module = types.ModuleType("imported_callable")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(CALLABLE.format(added=added), module.__dict__)
        fn = module.Scale(factor)
        return fingerprint(functools.partial(fn, 1) if partial else fn, [1, 2])

    assert digest(1, 2) == digest(1, 2)
    assert len({digest(1, 2), digest(1, 3), digest(2, 2)}) == 3


def test_a_digest_takes_tensors_by_value() -> None:
    def closure(value: Any) -> Any:
        return lambda _: value

    def digests() -> list[str]:
        tensors = [
            torch.arange(4),
            torch.arange(4).reshape(2, 2),
            torch.arange(4, dtype=torch.int32),
            torch.arange(8)[::2],
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(3, dtype=torch.complex64).conj(),
            torch.tensor(1),
        ]
        linear = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        held = [*tensors, {"a": tensors[0]}, [tensors[0]] * 2, linear]
        return [fingerprint(closure(value)) for value in held]

    first = digests()
    assert first == digests()
    assert len(set(first)) == len(first)


LOCK = threading.Lock()


def uses_a_lock(number: int) -> dict[str, int]:
    with LOCK:
        return {"n": number}


class Held:
    """Holds what pickle refuses."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.function = lambda: value


class Slotted:
    __slots__ = ("function", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.function = lambda: 1


class Listed(list[int]):
    def __init__(self, value: int) -> None:
        super().__init__([value])
        self.function = lambda: 1


def local_class(value: int) -> Any:
    class Local:
        by = value

    return Local()


@pytest.mark.parametrize("make", [Held, Slotted, Listed, local_class])
def test_a_digest_sees_what_an_object_holds(make: Any) -> None:
    assert fingerprint([make(1)]) == fingerprint([make(1)])
    assert fingerprint([make(1)]) != fingerprint([make(2)])
    cycle, other = make(1), make(1)
    if make is Held:
        cycle.value, other.value = cycle, other
        assert fingerprint(cycle) == fingerprint(other)
        assert fingerprint(make(LOCK)) != fingerprint(make(LOCK))


def test_a_lock_of_the_module_does_not_matter() -> None:
    assert fingerprint(uses_a_lock) == fingerprint(uses_a_lock)


# ---- errors -----------------------------------------------------------------------------------


def fails(number: int) -> Any:
    yield {"n": number}
    if number % 50 == 49:
        raise KeyError("missing")
    yield {"n": -number}


def test_an_error_names_the_input() -> None:
    with pytest.raises(SourceError, match=r"input 49: KeyError: 'missing'; on_error='skip'") as e:
        rows_of(SequenceSource(fails, range(100)))
    assert e.value.row == 49
    assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(SourceError, match="input 2: ZeroDivisionError"):
        rows_of(SequenceSource(lambda n: {"n": 1 // n}, [2, 1, 0]))


def test_a_skipped_input_leaves_no_row() -> None:
    source = SequenceSource(fails, range(200), None, "skip")
    rows = rows_of(source)
    kept = [n for n in range(200) if n % 50 != 49]
    assert rows == [{"n": n * sign} for n in kept for sign in (1, -1)]
    assert source.failures == [(n, "KeyError: 'missing'") for n in (49, 99, 149, 199)]


def test_a_skipped_input_does_not_hide_a_wrong_type() -> None:
    function = functools.partial(lambda n: {"n": "x" if n == 3 else n})
    with pytest.raises(SchemaError, match="input 3"):
        rows_of(SequenceSource(function, range(5), None, "skip"))


def test_rows_that_are_held_for_a_skip_are_copies() -> None:
    def function(number: int) -> Any:
        buffer, row = np.zeros(1), {}
        for i in range(3):
            buffer[:] = i
            row.update(x=buffer)
            yield row

    source = SequenceSource(function, range(2), None, "skip")
    (batch,) = source.read(source.first().units[0], None)
    assert batch["x"].storage.to_pylist() == [[0.0], [1.0], [2.0]] * 2


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("make", [pa.record_batch, pa.table])
def test_batches_whose_buffer_is_filled_anew(make: Any, on_error: str, tmp_path: Path) -> None:
    buffer = np.zeros(2)

    def function(number: int) -> Any:
        for i in range(2):
            buffer[:] = 10 * number + i
            yield make([pa.array(buffer)], ["x"])

    optimize(function, range(20), tmp_path / "t.lance", num_workers=0, on_error=on_error)
    expected = [float(10 * number + i) for number in range(20) for i in range(2) for _ in range(2)]
    assert [row["x"] for row in read(tmp_path / "t.lance")] == expected


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ("text", "pass a list of them"),
        (b"text", "pass a list of them"),
        ({"a": 1}, r"list\(inputs.items\(\)\)"),
        ({1, 2}, "sorted"),
        (pd.DataFrame({"a": [1]}), "to_dict"),
        (pd.Series([1]), "tolist"),
        (pa.table({"a": [1]}), "to_pylist"),
        (7, "a sequence, an iterable or a queue, got a int"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs_that_are_none(inputs: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=text):
        optimize(one, inputs, tmp_path / "t.lance")
    with pytest.raises(ArgumentError, match=text):
        map_inputs(one, inputs, tmp_path / "t.lance")


def test_arguments_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "t.lance"
    with pytest.raises(ArgumentError, match="fn must be a function"):
        optimize(1, [1], path)
    with pytest.raises(ArgumentError, match=r"schema must be a pyarrow\.Schema"):
        optimize(one, [1], path, schema={"n": "int"})
    with pytest.raises(ArgumentError, match="on_error must be one of raise, skip, got 'ignore'"):
        optimize(one, [1], path, on_error="ignore")
    for empty in ([], iter([])):
        with pytest.raises(EmptyError, match="no inputs"):
            optimize(one, empty, path)
    for inputs in (range(600), iter(range(600))):
        with pytest.raises(SourceError, match=r"no row came from .*: declare schema="):
            optimize(lambda _: None, inputs, path, num_workers=0)
    with (
        pytest.raises(SourceError, match="50 inputs were skipped, the first is 0: ZeroDivision"),
    ):
        optimize(lambda n: n // 0, range(50), path, num_workers=0, on_error="skip")
    assert not path.exists()


# ---- streams ----------------------------------------------------------------------------------


def numbers(count: int) -> Any:
    yield from range(count)


def measure_of(source: IterableSource, seconds: float) -> Measure:
    return Measure(taken(source), 10 * source.taken, seconds)


def test_an_iterable() -> None:
    assert rows_of(IterableSource(several, numbers(500))) == expected(range(500))


def test_shards_of_a_stream_grow() -> None:
    source = IterableSource(one, numbers(100_000))
    measure = measure_of(source, 1.7)
    lengths = np.diff([s.units[0].place[0] for s in source.rest(measure)])
    assert lengths[0] == 160
    assert lengths[-1] > 2000


def test_a_stream_is_pulled_only_as_asked() -> None:
    pulled = []

    def inputs() -> Any:
        for i in range(10_000):
            pulled.append(i)
            yield i

    source = IterableSource(one, inputs())
    measure = measure_of(source, 256.1)
    assert len(pulled) == 256
    next(source.rest(measure))
    assert len(pulled) < 300


def test_a_stream_that_comes_slowly_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("destrier.jobs.streams._WAIT_SECONDS", 0.0)
    stream = Stream(numbers(100))
    assert stream.chunk(50) == (0, [pickle.dumps(0, protocol=5)])
    chunk = stream.chunk(50, 5)
    assert chunk is not None
    assert [pickle.loads(data) for data in chunk[1]] == [1, 2, 3, 4, 5]
    stream.give_back(chunk[1][2:])
    chunk = stream.chunk(4, 4)
    assert chunk is not None
    assert (chunk[0], [pickle.loads(data) for data in chunk[1]]) == (3, [3, 4, 5, 6])


def test_a_queue_that_is_quiet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("destrier.jobs.streams._WAIT_SECONDS", 0.05)
    for q in (queue.Queue[Any](), queue.SimpleQueue[Any]()):
        for i in range(20):
            q.put(i)
        stream = Stream(q)
        chunk = stream.chunk(256, 16)
        assert chunk is not None
        assert len(chunk[1]) == 20
        q.put(ALL_DONE)
        assert stream.chunk(256) is None


def test_large_inputs_travel_in_small_numbers() -> None:
    source = IterableSource(len, (bytes(10_000_000) for _ in range(10)))
    assert len(source.first().units[0].place[1]) == 4


def test_an_input_that_fails_to_come_or_go() -> None:
    def inputs() -> Any:
        yield 1
        raise OSError("gone")

    with pytest.raises(SourceError, match="input 1 could not be had: OSError: gone"):
        rows_of(IterableSource(one, inputs()))
    empty = queue.Queue[int]()
    own = (i if i < 2 else empty.get(timeout=0) for i in range(9))
    with pytest.raises(SourceError, match="input 2 could not be had: Empty"):
        rows_of(IterableSource(one, own))
    with pytest.raises(SourceError, match=r"input 0 \(lock\) cannot be sent"):
        rows_of(IterableSource(one, iter([threading.Lock()])))


def test_a_queue_ends_with_all_done(tmp_path: Path) -> None:
    plain: queue.Queue[Any] = queue.Queue()
    shared = multiprocessing.get_context("spawn").Queue()
    for q in (plain, shared):
        for i in range(100):
            q.put(i)
        q.put(ALL_DONE)
        assert rows_of(IterableSource(several, q)) == expected(range(100))
    shared.close()
    assert pickle.loads(pickle.dumps(ALL_DONE)) is ALL_DONE
    assert repr(ALL_DONE) == "ALL_DONE"


def test_a_queue_that_is_filled_meanwhile(tmp_path: Path) -> None:
    q: queue.Queue[Any] = queue.Queue(maxsize=5)

    def fill() -> None:
        for i in [*range(200), ALL_DONE]:
            q.put(i)

    thread = threading.Thread(target=fill)
    thread.start()
    written = optimize(several, q, tmp_path / "t.lance", num_workers=0)
    thread.join()
    assert read(tmp_path / "t.lance") == expected(range(200))
    assert written.rows == 300


def test_a_loader_as_inputs(table_path: str, tmp_path: Path) -> None:
    loader = StreamingDataLoader(
        StreamingDataset(table_path, columns=["id"], shuffle=False), batch_size=59
    )

    def rows(batch: Any) -> Any:
        return ({"id": int(i)} for i in batch["id"])

    optimize(rows, loader, tmp_path / "t.lance", num_workers=0)
    ids = lance.dataset(table_path).to_table(columns=["id"])["id"].to_pylist()
    assert [row["id"] for row in read(tmp_path / "t.lance")] == ids[: len(ids) // 59 * 59]


class Numbers(torch.utils.data.Dataset[int]):
    """Reached by number."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> int:
        if not 0 <= number < 20:
            raise IndexError(number)
        return number * 3


def test_datasets_as_inputs(table_path: str, tmp_path: Path) -> None:
    """One that streams inherits from torch a method to reach items, which only raises."""
    rows = StreamingDataset(table_path, columns=["id"], shuffle=False)
    assert not is_sequence(rows)
    optimize(lambda row: {"id": int(row["id"])}, rows, tmp_path / "t.lance", num_workers=0)
    ids = lance.dataset(table_path).to_table(columns=["id"])["id"].to_pylist()
    assert [row["id"] for row in read(tmp_path / "t.lance")] == ids
    assert is_sequence(Numbers())
    optimize(lambda n: {"n": n}, Numbers(), tmp_path / "n.lance", num_workers=0)
    assert read(tmp_path / "n.lance") == [{"n": n * 3} for n in range(20)]


# ---- tables -----------------------------------------------------------------------------------


def test_the_same_table_for_any_number_of_workers(tmp_path: Path) -> None:
    offset = 3  # closed over

    def function(number: int) -> Any:
        for i in range(number % 4):
            yield {"n": number + offset, "x": i}

    for workers in (0, 2):
        path = tmp_path / f"{workers}.lance"
        written = optimize(function, range(2000), path, num_workers=workers)
        assert read(path) == [{"n": r["n"] + 3, "x": r["i"]} for r in expected(range(2000))]
        assert (written.rows, written.version) == (3000, 1)


def test_append_and_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "t.lance"
    optimize(one, range(3), path, num_workers=0)
    optimize(one, range(3, 5), path, num_workers=0, mode="append")
    assert read(path) == [{"n": i} for i in range(5)]
    with pytest.raises(SchemaError, match="'n'"):
        optimize(lambda _: {"n": "x"}, range(3), path, num_workers=0, mode="append")
    with pytest.raises(WriteError, match="mode="):
        optimize(one, range(3), path, num_workers=0)
    optimize(one, range(7, 9), path, num_workers=0, mode="overwrite")
    assert read(path) == [{"n": 7}, {"n": 8}]


def test_the_first_rows_may_be_far(tmp_path: Path) -> None:
    def function(number: int) -> Any:
        if number == 3:
            raise ValueError("bad")
        return {"n": number} if number % 1000 == 900 else None

    for inputs in (range(5000), numbers(5000)):
        path = tmp_path / f"{type(inputs).__name__}.lance"
        with pytest.warns(DestrierWarning, match="1 inputs were skipped"):
            written = optimize(function, inputs, path, num_workers=0, on_error="skip")
        assert read(path) == [{"n": i} for i in range(900, 5000, 1000)]
        assert (written.rows, written.rows_read) == (5, 5)
        assert written.skipped == ((3, "ValueError: bad"),)


def test_a_function_runs_on_one_thread(tmp_path: Path) -> None:
    def function(number: int) -> Any:
        import sqlite3

        known = vars(function)
        if "connection" not in known:
            known["connection"] = sqlite3.connect(":memory:")
        return {"n": known["connection"].execute("select ?", (number,)).fetchone()[0]}

    for workers in (0, 1):
        path = tmp_path / f"{workers}.lance"
        optimize(function, range(20_000), path, num_workers=workers)
        vars(function).clear()
        assert lance.dataset(path).count_rows() == 20_000


def test_skipped_inputs_are_reported(tmp_path: Path) -> None:
    with pytest.warns(DestrierWarning, match="2 inputs were skipped: 49: KeyError"):
        written = optimize(fails, range(100), tmp_path / "t.lance", num_workers=0, on_error="skip")
    assert written.skipped == ((49, "KeyError: 'missing'"), (99, "KeyError: 'missing'"))
    assert written.rows == 196


def test_an_error_leaves_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="input 49: KeyError"):
        optimize(fails, range(100), tmp_path / "t.lance", num_workers=0)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_job_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.mkdir()

    def function(number: int) -> dict[str, int]:
        if number == 90 and not (tmp_path / "mended").exists():
            os.kill(os.getpid(), 9)
        (calls / f"{number}-{os.getpid()}").touch()
        if number < 64:
            time.sleep(0.03)  # so that the others come in more than one shard
        return {"n": number}

    path = tmp_path / "t.lance"
    with pytest.raises(WorkerError, match="signal 9"):
        optimize(function, range(100), path, num_workers=1)
    assert not (path / "_versions").exists()
    before = len(list(calls.iterdir()))
    assert before >= 64
    (tmp_path / "mended").touch()
    optimize(function, range(100), path, num_workers=1)
    assert read(path) == [{"n": i} for i in range(100)]
    called = [int(p.name.split("-")[0]) for p in calls.iterdir()]
    assert called.count(0) == 1
    assert set(called) == set(range(100))


SCRIPT = """
import sys
import destrier.jobs.optimizing as o

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, n):
        return {"n": helper(n) * self.by}

def helper(n):
    return n + 1

o.optimize(Scale(10), range(100), sys.argv[1], num_workers=1)
"""


def test_functions_of_a_script_reach_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "t.lance"], check=True, timeout=100
    )
    assert read(tmp_path / "t.lance") == [{"n": (i + 1) * 10} for i in range(100)]


CACHED = """
import functools, sys
import destrier
import destrier.jobs.optimizing as o

@functools.lru_cache
def cached(n):
    return n + 1

try:
    o.optimize(lambda n: {"n": cached(n)}, range(9), sys.argv[1], num_workers=1)
except destrier.ArgumentError as error:
    print(error)
o.optimize(lambda n: {"n": cached(n)}, range(9), sys.argv[1], num_workers=0)
"""


def test_a_cached_function_of_a_script_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CACHED)
    made = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "t.lance"],
        check=True,
        timeout=100,
        capture_output=True,
        text=True,
    )
    for words in ("'cached'", "cannot be sent to worker processes", "num_workers=0"):
        assert words in made.stdout
    assert read(tmp_path / "t.lance") == [{"n": i + 1} for i in range(9)]


# ---- map --------------------------------------------------------------------------------------


def writer() -> Any:
    """Make a function that does not belong to this module, whose imports take long."""

    def write(number: int, folder: str) -> Any:
        if number == 13:
            raise ValueError("unlucky")
        (Path(folder) / f"{number}.txt").write_text(str(number))
        return f"wrote {number}" if number % 10 == 0 else None

    return write


@pytest.mark.parametrize(("workers", "stream"), [(2, False), (1, True), (0, True)])
def test_map_writes_files(tmp_path: Path, workers: int, stream: bool) -> None:
    folder = tmp_path / "made" / "here"
    inputs = iter(range(30)) if stream else range(30)
    mapped = map_inputs(writer(), inputs, folder, num_workers=workers, on_error="skip")
    assert mapped.count == 29
    assert mapped.reports == ("wrote 0", "wrote 10", "wrote 20")
    assert mapped.skipped == ((13, "ValueError: unlucky"),)
    assert {p.name for p in folder.iterdir()} == {f"{i}.txt" for i in range(30) if i != 13}


def test_map_raises(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="input 13: ValueError: unlucky") as caught:
        map_inputs(writer(), range(30), tmp_path, num_workers=0)
    assert caught.value.row == 13
    with pytest.raises(ArgumentError, match="on_error"):
        map_inputs(writer(), range(30), tmp_path, on_error="ignore")
    with pytest.raises(ArgumentError, match="fn must be"):
        map_inputs(None, range(30), tmp_path)
    assert map_inputs(writer(), [], tmp_path, num_workers=0).count == 0
