"""Zip: what is paired with what, by the definition, on any topology, after any resume.

The plans here are lists from the definition. Of the library they take `Order.rows` for granted, and
of a mixture as a source what it gives when it is read alone.
"""

from __future__ import annotations

import itertools
import json
import pickle
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import battery
import tables
from destrier import (
    ArgumentError,
    ColumnError,
    DecodeError,
    DestrierWarning,
    EmptyError,
    Mixture,
    Order,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
    TransformError,
    Zip,
    cycle,
    generators,
    subset,
)
from destrier.state import expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

BATCH = 24
SHORT = 401
CLUMPS = {"num_splits": 8, "shuffle_clump_size": 3, "shuffle_window": 4}


# ---- sources, and what they give ----------------------------------------------------------------


@dataclass
class Part:
    """A source of a zip.

    Attributes:
        make: Makes it.
        listed: Of a table, the row offsets in the order of positions.
        size: Samples in an epoch; None where it has no end.
        ids: Row offset → id.
    """

    make: Callable[[], Any]
    listed: np.ndarray[Any, Any] | None = None
    size: int | None = None
    ids: np.ndarray[Any, Any] = field(default_factory=lambda: np.arange(SHORT))
    known: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.listed is not None:
            self.size = len(self.listed)

    def epoch(self, brief: Any, number: int, most: int) -> list[int]:
        """Return the row offset of each sample of one of its epochs."""
        if self.listed is not None:
            state = expanded(brief)
            order = Order(
                len(self.listed),
                seed=state["shuffle_seed"],
                epoch=number,
                num_splits=state["num_splits"],
                clump_size=state["clump_size"],
                window=state["window"],
                shuffle=state["shuffle"],
            )
            return self.listed[order.rows(np.arange(len(self.listed)))].tolist()
        if number not in self.known:
            self.known[number] = alone(self.make(), number, self.size or most)
        return self.known[number]

    def rows(self, brief: Any, epoch: int, count: int) -> list[int]:
        """Return what stands beside the samples of an epoch of a zip with so many of them."""
        if self.size is None:
            return self.epoch(brief, 0, 4 * count)[epoch * count :][:count]
        times = -(-count // self.size)
        passes = [self.epoch(brief, epoch * times + p, count) for p in range(times)]
        return list(itertools.chain(*passes))[:count]


def alone(stream: Any, epoch: int, most: int) -> list[int]:
    """Return the row offsets of the first samples of an epoch of a stream, in their order."""
    stream.set_epoch(epoch)
    with StreamingDataLoader(stream, batch_size=100, with_index=True, remainder="keep") as loader:
        batches = list(itertools.islice(loader, -(-most // 100)))
    samples, offsets = (
        list(itertools.chain(*(batch[name].tolist() for batch in batches)))
        for name in ("sample_index", "row_offset")
    )
    return [offset for _, offset in sorted(zip(samples, offsets, strict=True))]


@dataclass
class Case:
    """A zip.

    Attributes:
        parts: Its sources.
        stop: As it takes it.
        options: What else it is made with.
    """

    parts: dict[str, Part]
    stop: str = "shortest"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        sizes = [part.size for part in self.parts.values() if part.size is not None]
        return min(sizes) if self.stop == "shortest" else max(sizes)

    def make(self, **options: Any) -> Zip:
        made = {name: part.make() for name, part in self.parts.items()}
        return Zip(made, **{"stop": self.stop, **self.options, **options})  # type: ignore[arg-type]

    def plan(
        self, state: dict[str, Any], epoch: int, batch: int = BATCH, **stepping: Any
    ) -> list[list[tuple[int, ...]]]:
        """Return every step of an epoch: sample and row offsets, in canonical order."""
        briefs = json.loads(state["sources"])
        rows = [part.rows(briefs[name], epoch, self.count) for name, part in self.parts.items()]
        steps = battery.steps(self.count, lambda g: g % state["num_splits"], batch, **stepping)
        return [[(g, *(each[g % self.count] for each in rows)) for g in step] for step in steps]


CASES = (
    "shortest",
    "longest",
    "clumps",
    "table order",
    "filtered",
    "view",
    "mixture",
    "cycled",
    "endless",
)


@pytest.fixture(scope="module")
def short_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a table of 401 rows whose ids are their row offsets."""
    path = str(tmp_path_factory.mktemp("short") / "short.lance")
    tables.plain_table(path, SHORT, rows_per_fragment=150)
    return path


def make_case(name: str, long: str, short: str, ids: np.ndarray[Any, Any]) -> Case:
    every, few = np.arange(tables.ROWS), np.arange(SHORT)

    def part(path: Any, listed: Any, **options: Any) -> Part:
        make = partial(StreamingDataset, path, columns=["id"], **options)
        return Part(make, np.asarray(listed), ids=ids if path == long else few)

    labelled = every[ids % tables.CLASSES < 3]
    two = {seed: part(short, few, shuffle_seed=seed, **CLUMPS).make for seed in (1, 2)}

    def mixed() -> Mixture:
        parts = {"one": two[1](), "two": two[2]()}
        return Mixture(parts, weights={"one": 3, "two": 1}, window=16, num_splits=8, columns=["id"])

    cases = {
        "shortest": lambda: Case({"a": part(long, every), "b": part(short, few)}),
        "longest": lambda: Case({"a": part(long, every), "b": part(short, few)}, "longest"),
        "clumps": lambda: Case(
            {"a": part(long, every, shuffle_seed=5, **CLUMPS), "b": part(short, few, **CLUMPS)},
            "longest",
            {"num_splits": 16, "seed": 3},
        ),
        "table order": lambda: Case(
            {"a": part(long, every, shuffle=False), "b": part(short, few, shuffle=False)}, "longest"
        ),
        "filtered": lambda: Case(
            {"a": part(long, labelled, filter="label < 3"), "b": part(short, few)}
        ),
        "view": lambda: Case(
            {"a": part(long, every), "b": part(subset(short, few[::-3].tolist()), few[::-3])},
            "longest",
        ),
        "mixture": lambda: Case(
            {"a": part(long, every), "b": Part(mixed, size=528)},  # 33 windows of 16
            "longest",
        ),
        "cycled": lambda: Case(
            {"a": part(long, every), "b": Part(lambda: cycle(two[1](), length=300), size=300)},
        ),
        "endless": lambda: Case({"a": part(short, few), "b": Part(lambda: cycle(two[1]()))}),
    }
    return cases[name]()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, shared_table: Any, short_path: str) -> Case:
    return make_case(str(request.param), str(shared_table.path), short_path, shared_table.ids)


@pytest.fixture
def cycled(shared_table: Any, short_path: str) -> Case:
    return make_case("clumps", str(shared_table.path), short_path, shared_table.ids)


def loader(zipped: Zip, batch: int = BATCH, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(zipped, global_batch_size=batch, with_index=True, **options)


def read(case: Case, batches: Iterable[Any]) -> list[list[tuple[int, ...]]]:
    """Return sample and row offsets of each batch, once its ids are checked against them."""
    out = []
    for batch in batches:
        offsets = [batch[f"{name}.row_offset"] for name in case.parts]
        for (name, part), own in zip(case.parts.items(), offsets, strict=True):
            assert batch[f"{name}.id"].tolist() == part.ids[own.numpy()].tolist()
        columns = [batch["sample_index"].tolist(), *(own.tolist() for own in offsets)]
        out.append(list(zip(*columns, strict=True)))
    return out


def share(steps: Sequence[list[Any]], rank: int, size: int) -> list[list[Any]]:
    return [battery.share(step, rank, size) for step in steps]


# ---- coverage and steps -------------------------------------------------------------------------


def test_epochs_are_the_definition(case: Case) -> None:
    with loader(case.make()) as batches:
        for epoch in range(3):
            plan = case.plan(batches.state_dict(), epoch)
            assert len(plan) == len(batches) == case.count // BATCH
            assert read(case, batches) == plan


@pytest.mark.parametrize("remainder", ["keep", "pad"])
def test_every_sample_comes_once(case: Case, remainder: str) -> None:
    with loader(case.make(), remainder=remainder) as batches:
        plan = case.plan(batches.state_dict(), 0, remainder=remainder)
        got = read(case, batches)
    assert got == plan
    samples = [row[0] for step in got for row in step]
    whole = case.count if remainder == "keep" else -(-case.count // BATCH) * BATCH
    assert sorted(samples) == list(range(whole))


def test_a_short_source_comes_again_in_another_order(cycled: Case) -> None:
    with loader(cycled.make(), remainder="keep") as batches:
        rows = sorted(row for step in read(cycled, batches) for row in step)
    short = [row[2] for row in rows]
    passes = [short[:SHORT], short[SHORT : 2 * SHORT]]
    assert [sorted(each) for each in passes] == [list(range(SHORT))] * 2
    assert passes[0] != passes[1]
    assert sorted(row[1] for row in rows) == list(range(tables.ROWS))


def test_row_stands_beside_row_without_shuffle(short_path: str) -> None:
    parts = {n: StreamingDataset(short_path, shuffle=False, columns=["id"]) for n in ("x", "y")}
    with loader(Zip(parts), remainder="keep") as batches:
        rows = [(b["x.id"], b["y.id"], b["sample_index"]) for b in batches]
    for x, y, sample in rows:
        assert x.tolist() == y.tolist() == sample.tolist()
    assert sum(len(x) for x, *_ in rows) == SHORT


def test_equal_orders_shuffle_pairs_together(table_path: str, table_ids: Any) -> None:
    """Two tables of the same rows stay aligned, whatever a row of each takes."""
    same = {**CLUMPS, "shuffle_seed": 7}
    parts = {
        "x": StreamingDataset(table_path, columns=["id"], **same),
        "y": StreamingDataset(table_path, columns=["name", "vector"], **same),
    }
    with loader(Zip(parts)) as batches:
        for batch in batches:
            assert batch["y.name"] == [f"row {i}" for i in batch["x.id"].tolist()]
            assert batch["sample_index"].tolist() != batch["x.row_offset"].tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_ranks_share_the_same_steps(case: Case, size: int) -> None:
    ranks = []
    for rank in range(size):
        with loader(case.make(rank=rank, world_size=size)) as batches:
            plan = case.plan(batches.state_dict(), 0)
            ranks.append(read(case, batches))
            assert ranks[-1] == share(plan, rank, size)
    assert [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)] == plan


@pytest.mark.parametrize("budget", [1 << 10, 40 << 10, 1 << 20])
@pytest.mark.parametrize("format", ["torch", "rows"])
def test_memory_decides_how_not_what(cycled: Case, budget: int, format: Any) -> None:
    """All rows held, open windows, or the next rows: of rows in columns and in Arrow."""
    with loader(cycled.make()) as batches:
        plan = cycled.plan(batches.state_dict(), 0)
    tight = pytest.warns(DestrierWarning, match="prefetch_bytes")
    made = cycled.make()
    with (
        tight if budget == 1 << 10 else nullcontext(),
        loader(made, prefetch_bytes=budget, format=format) as batches,
    ):
        got = list(batches) if format == "rows" else read(cycled, batches)
    if format == "rows":
        keys = ("sample_index", "a.row_offset", "b.row_offset")
        got = [[tuple(row[key] for key in keys) for row in batch] for batch in got]
    assert got == plan


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sizes(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sources of 1 to 60 rows, any lanes and clumps, any batch."""
    folder = tmp_path_factory.mktemp("any")
    parts = {}
    for name in ("a", "b", "c")[: data.draw(st.integers(1, 3))]:
        rows = data.draw(st.integers(1, 60))
        tables.plain_table(folder / f"{name}.lance", rows)
        options = {
            "num_splits": data.draw(st.integers(1, rows)),
            "shuffle_clump_size": data.draw(st.integers(1, 5)),
            "shuffle_window": data.draw(st.integers(1, 4)),
            "shuffle_seed": data.draw(st.integers(0, 5)),
        }
        path = str(folder / f"{name}.lance")

        def make(path: str = path, options: Any = options) -> StreamingDataset:
            return StreamingDataset(path, columns=["id"], **options)

        parts[name] = Part(make, np.arange(rows), ids=np.arange(rows))
    case = Case(parts, data.draw(st.sampled_from(["shortest", "longest"])))
    case.options["num_splits"] = data.draw(st.integers(1, case.count))
    batch = data.draw(st.integers(1, 30))
    start = data.draw(st.integers(0, case.count))
    with loader(case.make(), batch, remainder="keep") as batches:
        state = batches.state_dict()
        batches.load_state_dict({**state, "counter": start, "epoch": 2})
        plan = case.plan(state, 2, batch, remainder="keep", start=start)
        assert read(case, batches) == plan
        assert read(case, batches) == case.plan(state, 3, batch, remainder="keep")


# ---- resume -------------------------------------------------------------------------------------


def test_resume_at_every_step(case: Case) -> None:
    """Each step is delivered by a fresh zip on another topology, from the state before it."""
    first = case.make()
    with loader(first) as batches:
        state = batches.state_dict()
        plan = case.plan(state, 1)
    state = {**state, "epoch": 1}
    sizes = (1, 2, 3, 4, 6)
    for k, step in enumerate(plan):
        size = sizes[k % len(sizes)]
        rank = k % size
        with loader(case.make(rank=rank, world_size=size)) as batches:
            batches.load_state_dict(json.loads(json.dumps(state)))
            got = read(case, itertools.islice(batches, 1))
            assert got == share([step], rank, size)
            state = batches.state_dict()
    assert state["counter"] == len(plan) * BATCH


@pytest.mark.parametrize("k", [0, 1, 7, 16])
def test_the_tail_is_the_same(case: Case, k: int) -> None:
    with loader(case.make()) as batches:
        iterator = iter(batches)
        for _ in range(min(k, len(batches))):
            next(iterator)
        state = batches.state_dict()
        tail = read(case, iterator)
        following = read(case, itertools.islice(batches, 2))
    with loader(case.make()) as batches:
        batches.load_state_dict(state)
        assert read(case, batches) == tail
        assert read(case, itertools.islice(batches, 2)) == following


@pytest.mark.parametrize("budget", [40 << 10, 1 << 28])
def test_a_skip_goes_on_there(case: Case, budget: int) -> None:
    """What was held stays, or is read anew."""
    with loader(case.make(), prefetch_bytes=budget) as batches:
        plan = case.plan(batches.state_dict(), 0)
        iterator = iter(batches)
        assert read(case, itertools.islice(iterator, 5)) == plan[:5]
        batches.skip(3)
        assert read(case, itertools.islice(iterator, 1)) == plan[8:9]
        batches.load_state_dict({**batches.state_dict(), "counter": BATCH})
        assert read(case, batches) == plan[1:]
        assert read(case, batches) == case.plan(batches.state_dict(), 1)


def test_another_batch_size_repeats_and_loses_nothing(cycled: Case) -> None:
    with loader(cycled.make(), remainder="keep") as batches:
        before = read(cycled, itertools.islice(batches, 5))
        state = batches.state_dict()
    with loader(cycled.make(rank=1, world_size=2), 10, remainder="keep") as batches:
        batches.load_state_dict(state)
        plan = cycled.plan(state, 0, 10, remainder="keep", start=5 * BATCH)
        assert read(cycled, batches) == share(plan, 1, 2)
    samples = [row[0] for step in (*before, *plan) for row in step]
    assert sorted(samples) == list(range(cycled.count))


def test_ends_of_epochs(cycled: Case) -> None:
    zipped = cycled.make()
    with loader(zipped) as batches:
        iterator = iter(batches)
        for _ in range(len(batches)):
            next(iterator)
        last = batches.state_dict()
        assert (last["epoch"], last["counter"]) == (0, len(batches) * BATCH)
        assert next(iterator, None) is None
        over = batches.state_dict()
        assert (over["epoch"], over["counter"]) == (1, 0)
    with loader(cycled.make()) as batches:
        batches.load_state_dict(last)
        assert list(batches) == []
        assert read(cycled, batches) == cycled.plan(last, 1)


# ---- other faces --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_the_dataset_itself(cycled: Case, workers: int) -> None:
    zipped = cycled.make(global_batch_size=BATCH, with_index=True)
    plan = cycled.plan(zipped.state_dict(), 0)
    context = {"multiprocessing_context": "spawn"} if workers else {}
    batches = DataLoader(zipped, batch_size=None, num_workers=workers, **context)  # type: ignore[arg-type]
    assert read(cycled, batches) == plan
    zipped.close()


def test_a_resumed_zip_is_pickled_with_its_place(cycled: Case) -> None:
    zipped = cycled.make(global_batch_size=BATCH, with_index=True)
    state = zipped.state_dict()
    other = cycled.make(global_batch_size=BATCH, with_index=True, seed=None, num_splits=None)
    other.load_state_dict({**state, "counter": 5 * BATCH})
    copy = pickle.loads(pickle.dumps(other))
    assert read(cycled, copy) == cycled.plan(state, 0)[5:]
    copy.close()


@pytest.mark.parametrize("size", [1, 2])
def test_row_mode(cycled: Case, size: int) -> None:
    """Each rank has a block of lanes; rows beyond the last whole cycle are left out."""
    for rank in range(size):
        zipped = cycled.make(rank=rank, world_size=size, seed=3)
        state = zipped.state_dict()
        splits = state["num_splits"]
        assert splits == 16
        rows = list(zipped)
        briefs = json.loads(state["sources"])
        a, b = (p.rows(briefs[n], 0, cycled.count) for n, p in cycled.parts.items())
        owned = range(rank * splits // size, (rank + 1) * splits // size)
        wanted = [
            {"a.id": int(cycled.parts["a"].ids[a[g]]), "b.id": b[g]}
            for cycle_ in range(cycled.count // splits)
            for g in (cycle_ * splits + lane for lane in owned)
        ]
        assert rows == wanted
        assert len(zipped) == len(rows)
        zipped.close()


def test_columns_are_chosen_by_source(table_path: str, short_path: str) -> None:
    zipped = Zip({"a": table_path, "b": short_path}, columns=["b.value", "a.name", "a.id"])
    with StreamingDataLoader(zipped, batch_size=8) as batches:
        batch = next(iter(batches))
    assert list(batch) == ["a.name", "a.id", "b.value"]
    assert batch["b.value"].dtype == torch.float32


def test_a_mixture_reads_what_each_source_was_made_with(short_path: str) -> None:
    parts = {n: StreamingDataset(short_path, columns=["id"]) for n in ("x", "y")}
    mixed = Mixture(parts, weights={"x": 1, "y": 1}, source_column="from")
    with StreamingDataLoader(mixed, batch_size=8) as batches:
        assert list(next(iter(batches))) == ["id", "from"]
        state = batches.state_dict()
    with StreamingDataLoader(Zip({"m": mixed, "n": short_path}), batch_size=8) as batches:
        assert list(next(iter(batches))) == ["m.id", "m.from", "n.id", "n.label", "n.value"]
    again = Mixture(parts, weights={"x": 1, "y": 1}, source_column="from")
    with StreamingDataLoader(again, batch_size=8) as batches:
        batches.load_state_dict(state)
        assert list(next(iter(batches))) == ["id", "from"]


def test_arrow_keeps_fields(short_path: str, tmp_path: Path) -> None:
    table = pa.table(
        [pa.array(range(SHORT), pa.int16())],
        schema=pa.schema([pa.field("x", pa.int16(), metadata={"unit": "m"})]),
    )
    lance.write_dataset(table, str(tmp_path / "x.lance"))
    zipped = Zip({"a": short_path, "b": str(tmp_path / "x.lance")})
    with loader(zipped, format="arrow") as batches:
        schema = next(iter(batches)).schema
    assert schema.names == [
        *("a.id", "a.label", "a.value", "b.x", "sample_index", "a.row_offset", "b.row_offset")
    ]
    assert schema.field("b.x").metadata == {b"unit": b"m"}


# ---- transforms ---------------------------------------------------------------------------------


def drawn(batch: dict[str, Any], seeds: Any) -> dict[str, Any]:
    """Draw from each generator of each row."""
    rows = [generators(seed) for seed in seeds.tolist()]
    return {
        "sample": batch["sample_index"],
        "drawn": [
            (r.random.random(), float(r.numpy.random()), float(torch.rand(1, generator=r.torch)))
            for r in rows
        ],
    }


def test_generators_depend_on_seed_epoch_and_sample_alone(cycled: Case) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()

    def draws(batch: int, rank: int, size: int, epoch: int, seed: int) -> dict[int, Any]:
        zipped = cycled.make(rank=rank, world_size=size, epoch=epoch, seed=seed)
        with loader(zipped, batch, transform=drawn) as batches:
            some = list(itertools.islice(batches, 240 // batch))
        pairs = [zip(b["sample"].tolist(), b["drawn"], strict=True) for b in some]
        return dict(itertools.chain(*pairs))

    whole = draws(24, 0, 1, 0, 3)
    shared = {**draws(48, 0, 2, 0, 3), **draws(48, 1, 2, 0, 3)}
    assert len(whole) == 240
    assert shared == whole
    for other in (draws(24, 0, 1, 1, 3), draws(24, 0, 1, 0, 4)):
        for i in range(3):
            assert len({row[i] for row in (*whole.values(), *other.values())}) == 480
    assert torch.equal(torch.get_rng_state(), before)


# ---- identity -----------------------------------------------------------------------------------


def test_what_is_given_is_compared_with_the_state(cycled: Case, short_path: str) -> None:
    with loader(cycled.make()) as batches:
        state = batches.state_dict()
    for options, said in (
        ({"stop": "shortest"}, "stop mismatch: the state has 'longest'"),
        ({"seed": 4}, "seed mismatch: the state has 3"),
        ({"num_splits": 8}, "num_splits mismatch: the state has 16"),
    ):
        with pytest.raises(StateError, match=said):
            loader(cycled.make(**options)).load_state_dict(state)
    with loader(cycled.make(seed=None, num_splits=None)) as batches:
        batches.load_state_dict(state)
        assert batches.state_dict() == state
    made = {name: part.make() for name, part in cycled.parts.items()}
    with loader(Zip(dict(reversed(made.items())), stop="longest")) as batches:
        batches.load_state_dict(state)
        assert batches.state_dict()["plan_hash"] == state["plan_hash"]
        assert read(cycled, batches) == cycled.plan(state, 0)
    for sources, said in (
        ({"a": made["a"]}, "the state has a, b, this zip has a"),
        ({**made, "c": short_path}, "the state has a, b, this zip has a, b, c"),
        ({"a": made["a"], "b": made["a"]}, "source 'b': .* mismatch"),
        ({"a": made["a"], "b": cycle(short_path, length=9)}, "source 'b'"),
        ({"a": made["a"], "b": StreamingDataset(short_path, filter="id > 1")}, "'id > 1'"),
    ):
        with pytest.raises(StateError, match=said):
            loader(Zip(sources, stop="longest")).load_state_dict(state)  # type: ignore[arg-type]


def test_states_of_other_kinds_are_refused(short_path: str) -> None:
    zipped = Zip({"a": short_path})
    mixed = Mixture({"a": short_path})
    table = StreamingDataset(short_path)
    streams: dict[str, Any] = {"Zip": zipped, "Mixture": mixed, "StreamingDataset": table}
    states = {name: stream.state_dict() for name, stream in streams.items()}
    for one, other in itertools.permutations(streams, 2):
        said = f"the state is of a {one}, and cannot be loaded into a {other}"
        with pytest.raises(StateError, match=said):
            streams[other].load_state_dict(states[one])
    assert zipped.merge_state_dicts([states["Zip"]] * 2) == states["Zip"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sources": "{"}, "sources of the state is damaged"),
        ({"sources": "[]"}, "sources of the state is damaged"),
        ({"sources": '{"a": 1, "b": []}'}, "source 'a': the state of a source is cut"),
        ({"counter": 5000}, "counter 5000 of the state is beyond"),
        ({"plan_hash": "0"}, "plan_hash mismatch"),
        ({"stop": 1}, "stop of the state must be str"),
    ],
)
def test_damaged_states(cycled: Case, change: dict[str, Any], said: str) -> None:
    zipped = cycled.make()
    with pytest.raises(StateError, match=said):
        zipped.load_state_dict({**zipped.state_dict(), **change})
    assert len(list(zipped.stream().sources)) == 2


def test_rows_appended_later_change_nothing(tmp_path: Path, short_path: str) -> None:
    path = str(tmp_path / "growing.lance")
    tables.plain_table(path, 300)
    with loader(Zip({"a": short_path, "b": path})) as batches:
        first = [b["b.id"].tolist() for b in itertools.islice(batches, 3)]
        state = batches.state_dict()
        batches.load_state_dict(state)
        rest = [b["b.id"].tolist() for b in batches]
    lance.write_dataset(lance.dataset(path).to_table(), path, mode="append")
    with loader(Zip({"a": short_path, "b": path})) as batches:
        assert next(iter(batches))["b.id"].tolist() != first[0]
        batches.load_state_dict(state)
        again = [b["b.id"].tolist() for b in batches]
        assert len(again) == 300 // BATCH - 3
    assert again == rest


def test_states_are_small_and_flat(table_path: str, short_path: str) -> None:
    names = [f"source {i}" for i in range(4)]
    zipped = Zip(dict(zip(names, [table_path, short_path] * 2, strict=True)))
    with loader(zipped, format="rows") as batches:
        before = batches.state_dict()
        next(iter(batches))
        after = batches.state_dict()
    assert all(isinstance(value, int | str | bool | None) for value in after.values())
    assert json.loads(json.dumps(after)) == after
    assert list(before) == list(after)
    assert len(json.dumps(after)) < 2048


# ---- bad rows -----------------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> dict[str, Any]:
    """Make images of which rows 5 and 9 are none, and numbers of which rows 9 and 14 are null."""
    path = str(tmp_path / "images.lance")
    rows = np.arange(40)
    good = tables_png()
    images = [b"none" if i in (5, 9) else good for i in rows.tolist()]
    lance.write_dataset(pa.table({"jpg": pa.array(images, pa.binary())}), path)
    numbers = pa.array(rows, pa.int32(), mask=np.isin(rows, [9, 14]))
    other = str(tmp_path / "numbers.lance")
    lance.write_dataset(pa.table({"x": numbers, "id": pa.array(rows)}), other)
    made = {"image": path, "number": other}
    return {name: StreamingDataset(uri, shuffle=False) for name, uri in made.items()}


def tables_png() -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (4, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def test_an_error_names_table_row_and_column(faulty: dict[str, Any]) -> None:
    with loader(Zip(faulty), 8, decode={"image.jpg": "gray"}) as batches:
        with pytest.raises(DecodeError, match=r"'jpg' of row 5 of .*images\.lance") as caught:
            list(batches)
        assert (caught.value.offset, caught.value.column) == (5, "jpg")
    with loader(Zip(faulty, columns=["image.jpg", "number.x"]), 8) as batches:
        with pytest.raises(DecodeError, match=r"'x' of row 9 of .*numbers\.lance") as caught:
            list(batches)
        assert (caught.value.offset, caught.value.column) == (9, "x")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_that_fails_in_one_source_fails_as_a_whole(faulty: dict[str, Any], rank: int) -> None:
    def zipped() -> Zip:
        return Zip(faulty, rank=rank, world_size=2)

    images = {"image.jpg": "gray"}
    for policy in ("skip", "fill"):
        with loader(zipped(), 8, decode=images, on_error=policy) as batches:
            seen = list(batches)
        assert len(seen) == 5
        found = [error.offset for error in batches.failures]
        mine = [i for i in (5, 9, 14) if i % 8 // 4 == rank]
        assert found == mine
        if policy == "skip":
            kept = [i for batch in seen for i in batch["number.id"].tolist()]
            assert kept == [i for i in range(40) if i % 8 // 4 == rank and i not in mine]
        for batch in seen:
            assert len({len(batch[name]) for name in batch}) == 1
            assert batch["number.id"].tolist() == batch["number.row_offset"].tolist()
            assert batch["image.row_offset"].tolist() == batch["number.row_offset"].tolist()
            if policy == "fill":
                assert len(batch["number.id"]) == 4
                assert not {5, 9, 14} & set(batch["number.id"].tolist())


def test_rows_that_cannot_be_read(faulty: dict[str, Any], tmp_path: Path) -> None:
    """The fault is in the second source: the first one's rows go with it."""
    external = tmp_path / "external.bin"
    external.write_bytes(bytes(400))
    blobs = [lance.blob.Blob.from_uri(external.as_uri(), 10 * i, 10) for i in range(40)]
    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("data")])
    table = pa.table({"id": np.arange(40), "data": lance.blob_array(blobs)}, schema=schema)
    path = str(tmp_path / "blobs.lance")
    lance.write_dataset(
        table, path, data_storage_version="2.2", allow_external_blob_outside_bases=True
    )
    external.write_bytes(bytes(305))  # rows 30 to 39 are gone
    sources = {"id": faulty["number"], "blob": StreamingDataset(path, shuffle=False)}
    zipped = Zip(sources, columns=["id.id", "blob.data"])
    for format in ("torch", "arrow"):
        with loader(zipped, 8, on_error="skip", format=format) as batches:
            ids = [batch["id.id"] for batch in batches]
        rows = [each.tolist() if format == "torch" else each.to_pylist() for each in ids]
        assert list(itertools.chain(*rows)) == list(range(30))
        assert {error.offset for error in batches.failures} == set(range(30, 40))
        assert all("blobs.lance" in str(error) for error in batches.failures)


def test_a_transform_that_fails_names_both_rows(faulty: dict[str, Any]) -> None:
    def refuse(batch: dict[str, Any]) -> Any:
        if 7 in batch["number.id"].tolist():
            raise ArithmeticError("seven")
        return batch

    zipped = Zip(faulty, columns=["image.jpg", "number.id"])
    with loader(zipped, 8, transform=refuse) as batches:
        said = r"row 7 of .*images\.lance.* with row 7 of .*numbers\.lance.*seven"
        with pytest.raises(TransformError, match=said):
            list(batches)


# ---- bad input ----------------------------------------------------------------------------------


def test_bad_arguments(table_path: str, short_path: str, tmp_path: Path) -> None:
    both = {"a": table_path, "b": short_path}
    for call, error, said in (
        (lambda: Zip({}), ArgumentError, "a zip is made of a dict"),
        (lambda: Zip([table_path]), ArgumentError, "a zip is made of a dict"),  # type: ignore[arg-type]
        (lambda: Zip({"a.b": table_path}), ArgumentError, "have no dot"),
        (lambda: Zip({1: table_path}), ArgumentError, "names of sources are texts"),  # type: ignore[dict-item]
        (lambda: Zip(both, stop="first"), ArgumentError, "stop must be one of shortest, longest"),  # type: ignore[arg-type]
        (lambda: Zip(both, columns=["id"]), ColumnError, "'id' is no column of a zip"),
        (lambda: Zip(both, columns=["c.id"]), ColumnError, "the sources are a, b"),
        (lambda: Zip(both, columns=["a.id"]), ColumnError, "none of source 'b'"),
        (lambda: Zip(both, seed=-1), ArgumentError, "seed"),
        (lambda: Zip(both, num_splits=0), ArgumentError, "num_splits"),
        (lambda: Mixture({"z": Zip(both)}), ArgumentError, "cannot be a source of another stream"),
        (lambda: Zip({"z": Zip(both)}), ArgumentError, "cannot be a source of another stream"),
        (lambda: cycle(Zip(both)), ArgumentError, "cannot be a source of another stream"),
        (
            lambda: Zip({"a": StreamingDataset(table_path, transform=dict)}),
            ArgumentError,
            "source 'a' has a transform",
        ),
    ):
        with pytest.raises(error, match=said):
            call()
    with pytest.raises(ColumnError, match="nix"):
        next(iter(loader(Zip(both, columns=["a.id", "b.nix"]))))
    empty = {"a": table_path, "b": StreamingDataset(short_path, filter="id < 0")}
    with pytest.raises(EmptyError, match="source 'b' is empty"):
        loader(Zip(empty)).state_dict()
    with pytest.raises(EmptyError, match="401 rows are fewer than one step of 500"):
        len(loader(Zip(both), 500))
    path = str(tmp_path / "taken.lance")
    lance.write_dataset(pa.table({"row_offset": list(range(50))}), path)
    with pytest.raises(ColumnError, match=r"'a\.row_offset'"):
        next(iter(loader(Zip({"a": path}))))


@pytest.mark.parametrize("mixed", [False, True])
def test_epochs_of_a_zip_without_end(short_path: str, mixed: bool) -> None:
    other: Any = short_path
    if mixed:
        other = Mixture({"t": short_path}, weights={"t": 1}, window=1)
    pairs = Zip({"a": cycle(short_path), "b": other}, stop="longest")
    orders = []
    for epoch in range(4):
        pairs.set_epoch(epoch)
        with StreamingDataLoader(pairs, batch_size=SHORT, with_index=True) as batches:
            batch = next(iter(batches))
        for name in ("a", "b"):
            order = batch[f"{name}.row_offset"][batch["sample_index"].argsort()].tolist()
            assert sorted(order) == list(range(SHORT)), "a source comes in full before it repeats"
            orders.append((name, order))
    assert all(orders.count(order) == 1 for order in orders)
