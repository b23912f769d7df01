"""Mixtures: what is refused and how, new weights, added sources, states, formats, workers."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image as PillowImage
from torch.utils.data import DataLoader

import battery
import mixed
import tables
from battery import Kind, expected, joined, read
from destrier import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    EmptyError,
    FilterError,
    IterationError,
    Mixture,
    ReadError,
    SchemaError,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
    TableError,
    TransformError,
    VersionError,
    Zip,
    cycle,
)
from destrier.sizing import OPEN_BYTES
from mixed import Mixed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH = 24
WEIGHTS = {"a": 3, "b": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables a, b and c of 300, 100 and 40 rows, without an id in common. Read only."""
    folder = tmp_path_factory.mktemp("sources")
    for number, (name, rows) in enumerate((("a", 300), ("b", 100), ("c", 40), ("one", 1))):
        table = tables.columns(rows, 1000 * number)
        lance.write_dataset(table, str(folder / f"{name}.lance"), max_rows_per_file=70)
    return folder


@pytest.fixture
def a(folder: Path) -> str:
    return str(folder / "a.lance")


@pytest.fixture
def b(folder: Path) -> str:
    return str(folder / "b.lance")


@pytest.fixture
def c(folder: Path) -> str:
    return str(folder / "c.lance")


@pytest.fixture
def kind(a: str, b: str) -> Mixed:
    """A mixture of a and b, 3:1, of which an epoch has 400 samples: 16 steps."""
    parts = {
        "a": Kind(a, np.arange(300), mixed.CLUMPS, np.arange(300)),
        "b": Kind(b, np.arange(1000, 1100), {}, np.arange(100)),
    }
    return Mixed(parts, {"weights": WEIGHTS, "window": 16, "seed": 5})


def of(kind: Mixed, **options: Any) -> Mixture:
    return kind.make(**{"columns": battery.COLUMNS, **options})


def loaded(mixture: Any, **options: Any) -> StreamingDataLoader:
    settings = {"global_batch_size": BATCH, "with_index": True, **options}
    return StreamingDataLoader(mixture, **settings)


def change(kind: Mixed, epoch: int, at: int, weights: tuple[float, ...]) -> Mixed:
    """The kind, reweighted."""
    return Mixed(kind.parts, kind.options, changes=(*kind.changes, (epoch, at, weights)))


# ---- arguments that cannot be used ----------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": -1, "b": 1}, "weight of 'a' must be finite and not negative, got -1"),
        ({"a": 1, "b": math.nan}, "weight of 'b' must be finite and not negative, got nan"),
        ({"a": 1, "b": math.inf}, "weight of 'b' must be finite and not negative, got inf"),
        ({"a": 0, "b": 0.0}, r"all weights are 0 \(a, b\)"),
        ({"a": 1}, "sources are a, b, and weights are given for a; 0 leaves"),
        ({"a": 1, "b": 1, "c": 1}, "sources are a, b, and weights are given for a, b, c"),
        ({}, "weights are given for none"),
        ({"a": "3", "b": 1}, "weight of 'a' must be an int or a float, got '3'"),
        ({"a": True, "b": 1}, "weight of 'a' must be a number, got True"),
        ({"a": np.array([1, 2]), "b": 1}, r"weight of 'a' must be an int or a float, got array"),
        ({"a": torch.tensor([1, 2]), "b": 1}, "weight of 'a' must be an int or a float, got tens"),
        ([3, 1], r"a dict with a number for each source \(a, b\), got \[3, 1\]"),
    ],
)
def test_weights_that_are_none(a: str, b: str, weights: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Mixture({"a": a, "b": b}, weights=weights)
    mixture = Mixture({"a": a, "b": b}, weights=WEIGHTS, window=16)
    state = mixture.state_dict()
    with pytest.raises(ArgumentError, match=message):
        mixture.reweight(weights)
    assert mixture.state_dict() == state


def test_weights_of_numpy_and_torch_are_numbers(a: str, b: str) -> None:
    weights = {"a": np.float32(3), "b": torch.tensor(1)}
    states = [
        Mixture({"a": a, "b": b}, weights=w, window=16).state_dict() for w in (weights, WEIGHTS)
    ]
    assert states[0]["plan_hash"] == states[1]["plan_hash"]
    assert json.loads(str(states[0]["schedule"]))["weights"] == [[0, [3.0, 1]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": WEIGHTS, "temperature": 2}, "weights=.* and temperature=2 are both given"),
        ({"temperature": 0}, "temperature must be a number above 0, got 0"),
        ({"temperature": math.nan}, "temperature must be a number above 0, got nan"),
        ({"stop": "sometimes"}, "stop must be one of first_exhausted.* got 'sometimes'"),
        ({"stop": "never", "length": 5}, "stop='never' and length=5 are both given"),
        ({"length": 0}, "length must be .* got 0"),
        ({"batching": "mixd"}, "batching must be one of mixed, .* got 'mixd'"),
        ({"unit": 4}, "unit is for batching='per_source', not 'mixed'"),
        ({"batching": "stratified", "window": 8}, "window of batching='stratified' is the"),
        ({"batching": "per_source"}, "cannot read every row once"),
        ({"window": 0}, "window must be .* got 0"),
        ({"seed": -1}, "seed must be .* got -1"),
        ({"num_splits": 0}, "num_splits must be .* got 0"),
    ],
)
def test_arguments_that_cannot_be_used(
    a: str, b: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Mixture({"a": a, "b": b}, **options)


@pytest.mark.parametrize("sources", [{}, None, ["a.lance"], "a.lance"])
def test_sources_are_a_dict(sources: Any) -> None:
    with pytest.raises(ArgumentError, match="a dict from name to source"):
        Mixture(sources)


@pytest.mark.parametrize("name", ["", 3, None])
def test_names_are_texts(a: str, name: Any) -> None:
    with pytest.raises(ArgumentError, match=f"names of sources are texts, got {name!r}"):
        Mixture({name: a})


def test_windows_that_cannot_hold_a_quota(a: str, b: str) -> None:
    with pytest.raises(ArgumentError, match=r"'b' has 0\.01 .* window of 64.* at least 100"):
        Mixture({"a": a, "b": b}, weights={"a": 99, "b": 1}, window=64).state_dict()
    with pytest.raises(ArgumentError, match=r"'b' has 0\.01 .* window of 24.* at least 100"):
        len(loaded(Mixture({"a": a, "b": b}, weights={"a": 99, "b": 1}, batching="stratified")))


def test_an_epoch_without_a_sample(a: str, b: str) -> None:
    with pytest.raises(EmptyError, match=r"window of 1024 slots.*\(a 300, b 100\).*window="):
        len(loaded(Mixture({"a": a, "b": b}, weights=WEIGHTS, window=1024)))


def test_an_empty_source_is_named(a: str, b: str, tmp_path: Path) -> None:
    nothing = StreamingDataset(b, filter="id < 0")
    lance.write_dataset(tables.columns(3).slice(0, 0), str(tmp_path / "empty.lance"))
    for empty in (nothing, str(tmp_path / "empty.lance")):
        mixture = Mixture({"a": a, "none": empty}, weights={"a": 1, "none": 0})
        with pytest.raises(EmptyError, match="source 'none' is empty"):
            mixture.state_dict()


def test_a_transform_belongs_to_the_mixture(a: str) -> None:
    source = StreamingDataset(a, transform=battery.refuses)
    with pytest.raises(ArgumentError, match="source 'a' has a transform; give it to the whole"):
        Mixture({"a": source})


def test_batches_that_belong_together_cannot_be_mixed_again(a: str, b: str) -> None:
    inner = Mixture({"a": a, "b": b}, weights=WEIGHTS, batching="stratified")
    with pytest.raises(ArgumentError, match="batching='stratified' cannot be a source"):
        len(loaded(Mixture({"inner": inner})))


def test_a_source_without_end(a: str, b: str) -> None:
    sources = {"a": cycle(a, columns=["id"]), "b": StreamingDataset(b, columns=["id"])}
    for options in ({}, {"temperature": 2}):
        with pytest.raises(ArgumentError, match="source 'a' has no end, so it needs a weight"):
            len(loaded(Mixture(sources, **options)))
    with pytest.raises(ArgumentError, match="source 'a' has no end, so stop='all_exhausted'"):
        len(loaded(Mixture(sources, weights=WEIGHTS, stop="all_exhausted")))
    assert len(loaded(Mixture(sources, weights=WEIGHTS, window=16), global_batch_size=16)) == 25
    both = Mixture({"a": cycle(a), "b": cycle(b)}, weights=WEIGHTS, window=16, columns=["id"])
    assert len(loaded(both, global_batch_size=1)) == 1 << 62
    assert len(next(iter(loaded(both)))["id"]) == BATCH


# ---- columns --------------------------------------------------------------------------------


def table_of(folder: Path, name: str, **columns: Any) -> str:
    lance.write_dataset(pa.table(columns), str(folder / f"{name}.lance"))
    return str(folder / f"{name}.lance")


def test_columns_must_be_the_same(tmp_path: Path) -> None:
    one = table_of(tmp_path, "one", id=range(50), text=["x"] * 50)
    for other, message in (
        ({"id": range(50)}, r"source 'p' .* has a column 'text', source 'q' .* has none"),
        (
            {"id": range(50), "text": ["y"] * 50, "more": range(50)},
            r"source 'q' .* has columns that source 'p' .* has not: more",
        ),
        (
            {"id": pa.array(range(50), pa.int32()), "text": ["y"] * 50},
            r"column 'id' is int64 in source 'p' .*, but int32 in source 'q'",
        ),
    ):
        path = table_of(tmp_path, f"other{len(message)}", **other)
        with pytest.raises(SchemaError, match=message):
            next(iter(loaded(Mixture({"p": one, "q": path}))))
        both = Mixture({"p": one, "q": path}, columns=["id"])
        if len(other["id"]) and not isinstance(other["id"], pa.Array):
            assert len(list(loaded(both, global_batch_size=10))) == 10


def test_texts_and_the_order_of_columns_are_reconciled(tmp_path: Path) -> None:
    one = table_of(tmp_path, "one", id=range(50), text=pa.array([f"p{i}" for i in range(50)]))
    two = table_of(
        tmp_path,
        "two",
        text=pa.array([f"q{i}" for i in range(50)], pa.large_string()),
        id=range(50),
    )
    for format in ("torch", "arrow"):
        texts = []
        for batch in loaded(Mixture({"p": one, "q": two}), global_batch_size=10, format=format):
            pairs = batch.to_pydict() if format == "arrow" else batch
            assert [t[1:] for t in pairs["text"]] == [str(int(i)) for i in pairs["id"]]
            texts += pairs["text"]
        assert sorted(texts) == sorted(f"{s}{i}" for s in "pq" for i in range(50))


def test_a_source_reads_the_columns_that_it_was_made_with(a: str, b: str) -> None:
    sources = {name: StreamingDataset(path, columns=["id"]) for name, path in (("a", a), ("b", b))}
    batch = next(iter(loaded(Mixture(sources), with_index=False)))
    assert set(batch) == {"id"}
    nested = Mixture({"inner": Mixture(sources), "b": StreamingDataset(b, columns=["id"])})
    assert set(next(iter(loaded(nested, with_index=False)))) == {"id"}
    batch = next(iter(loaded(Mixture(sources, columns=["id", "label"]), with_index=False)))
    assert set(batch) == {"id", "label"}
    row = next(iter(Mixture(sources)))
    assert set(row) == {"id"}
    with pytest.raises(ColumnError, match="nothing"):
        next(iter(loaded(Mixture(sources, columns=["nothing"]))))


def test_the_name_of_the_source_is_a_column(kind: Mixed) -> None:
    for format in ("torch", "numpy", "arrow", "rows"):
        batch = next(iter(loaded(of(kind), format=format)))
        if format == "rows":
            pairs = [(row["id"], row["source"]) for row in batch]
        else:
            columns = batch.to_pydict() if format == "arrow" else batch
            pairs = list(zip(map(int, columns["id"]), columns["source"], strict=True))
        assert all(name == ("a" if i < 1000 else "b") for i, name in pairs)
        assert {name for _, name in pairs} == {"a", "b"}
    assert {row["source"] for row in of(kind)} == {"a", "b"}
    with pytest.raises(SchemaError, match="source_column='id' is a column of the sources already"):
        next(iter(loaded(of(kind, source_column="id"))))


# ---- batches of one source ------------------------------------------------------------------


@pytest.fixture
def unlike(a: str, b: str, tmp_path: Path) -> dict[str, Any]:
    """Sources of other columns, one of them a mixture of two tables with the same."""
    wide = table_of(tmp_path, "wide", id=range(9000, 9090), x=pa.array(range(90), pa.float64()))
    inner = Mixture(
        {
            name: StreamingDataset(path, columns=["id", "name"])
            for name, path in (("a", a), ("b", b))
        }
    )
    return {"wide": wide, "inner": inner}


def check_alone(batch: dict[str, Any]) -> str:
    """Check a batch of one of them, and return its name."""
    ids = batch["id"].tolist()
    if "x" in batch:
        assert batch["x"].tolist() == [i - 9000 for i in ids]
        return "wide"
    assert batch["name"] == [f"row {i}" for i in ids]
    return "inner"


@pytest.mark.parametrize("held", [0.25, math.inf])
@pytest.mark.parametrize("budget", [1, 1 << 28])
def test_sources_of_other_columns(
    unlike: dict[str, Any], held: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.holding._LEAST_OWN", held)
    weights = {"wide": 1, "inner": 2}
    mixture = Mixture(
        unlike, weights=weights, batching="per_source", window=3, stop="all_exhausted"
    )
    with loaded(mixture, prefetch_bytes=budget) as loader:
        for _ in range(3):
            seen = [check_alone(batch) for batch in loader]
            windows = [Counter(seen[i : i + 3]) for i in range(0, len(seen), 3)]
            assert all(window == {"wide": 1, "inner": 2} for window in windows)


def test_each_rank_has_a_source_of_its_own(unlike: dict[str, Any]) -> None:
    options = {"weights": {"wide": 1, "inner": 2}, "stop": "all_exhausted", "window": 3}
    per_rank = {**options, "batching": "per_source", "unit": 8}
    for remainder in ("drop", "keep", "pad"):
        ranks = []
        for rank in range(3):
            mixture = Mixture(unlike, rank=rank, world_size=3, **per_rank)
            with loaded(mixture, remainder=remainder) as loader:
                ranks.append([check_alone(b) for b in loader if len(b["id"])])
        assert {frozenset(step) for step in zip(*ranks, strict=False)} == {
            frozenset({"wide", "inner"})
        }
    # Another world size has units of several sources in one batch, which then have no columns.
    with pytest.raises(SchemaError, match=r"source 'wide' .* has a column 'x', source 'inner'"):
        next(iter(loaded(Mixture(unlike, rank=0, world_size=1, **per_rank))))
    with pytest.raises(ArgumentError, match="3 units of 8, which world_size 2 cannot share"):
        next(iter(loaded(Mixture(unlike, rank=0, world_size=2, **per_rank))))
    with pytest.raises(SchemaError, match=r"source 'wide' .* has a column 'x'"):
        next(iter(Mixture(unlike, **per_rank)))


def test_short_steps_are_cut_between_units(a: str, b: str) -> None:
    options = {"weights": {"a": 4, "b": 1}, "batching": "per_source", "unit": 8, "window": 10}
    sizes, sources = [], []
    for rank in range(3):
        mixture = Mixture(
            {"a": a, "b": b},
            rank=rank,
            world_size=3,
            source_column="source",
            columns=["id"],
            **options,
        )
        with loaded(mixture, remainder="keep") as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
        sizes.append([len(batch["id"]) for batch in batches])
        sources += [set(batch["source"]) for batch in batches]
    last = [rank[-1] for rank in sizes]
    assert sum(map(sum, sizes)) == sum(last) + 24 * (len(sizes[0]) - 1)
    assert sum(last) % 24
    assert set(last) <= {0, 8}
    assert all(len(names) <= 1 for names in sources)


def test_a_batch_size_that_does_not_fit_the_batching(a: str, b: str) -> None:
    for batching in ("stratified", "per_source"):
        options = {"weights": WEIGHTS, "batching": batching, "stop": "all_exhausted"}
        options["columns"] = ["id"]
        window = {"window": 4} if batching == "per_source" else {}
        with loaded(Mixture({"a": a, "b": b}, **options, **window)) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with loaded(Mixture({"a": a, "b": b}, **options, **window), global_batch_size=36) as loader:
            before = loader.dataset.epoch
            way_out = "keep the global batch" if batching == "stratified" else "take a multiple"
            with pytest.raises(StateError, match=rf"{batching}.* 24 samples.* 36.*; {way_out}"):
                loader.load_state_dict(state)
            assert loader.dataset.epoch == before
    with pytest.raises(ArgumentError, match="length=100 is no multiple of the 24 samples"):
        len(loaded(Mixture({"a": a, "b": b}, weights=WEIGHTS, batching="per_source", length=100)))


def test_a_larger_batch_has_several_units(a: str, b: str) -> None:
    options = {"weights": WEIGHTS, "batching": "per_source", "window": 4, "stop": "all_exhausted"}

    def made(batch: int, **place: Any) -> StreamingDataLoader:
        mixture = Mixture({"a": a, "b": b}, columns=["id"], source_column="of", **options, **place)
        return loaded(mixture, global_batch_size=batch)

    with made(24) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        tail = list(iterator)
    assert (state["unit"], len(tail) % 2) == (24, 1)
    assert all(len(set(batch["of"])) == 1 for batch in tail)
    ranks = []
    for rank in range(2):
        with made(48, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            ranks.append(list(loader))
    for i, pair in enumerate(zip(*ranks, strict=True)):
        for rank, batch in enumerate(pair):
            assert batch["id"].tolist() == tail[2 * i + rank]["id"].tolist()
    with made(48) as loader:
        loader.load_state_dict(state)
        for i, batch in enumerate(loader):
            both = torch.cat([tail[2 * i]["id"], tail[2 * i + 1]["id"]])
            assert batch["id"].tolist() == both.tolist()
    with made(48, rank=0, world_size=3) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ArgumentError, match="2 units of 24, which world_size 3 cannot share"):
            next(iter(loader))


STAGES = (
    ("made", lambda loader: loader()),
    ("len", lambda loader: len(loader())),
    ("state", lambda loader: loader().state_dict()),
    ("iter", lambda loader: iter(loader())),
)


@pytest.mark.parametrize("several", [None, Mixture, Zip], ids=["dataset", "mixture", "zip"])
@pytest.mark.parametrize(
    ("error", "options", "late"),
    [
        (TableError, {"version": 99}, {"made", "len", "state", "iter"}),
        (FilterError, {"filter": "nope > 3"}, {"len", "state", "iter"}),
        (EmptyError, {"filter": "id > 3000"}, {"len", "state", "iter"}),
        (ColumnError, {"columns": ["nope"]}, {"iter"}),
    ],
)
def test_errors_come_when_a_dataset_would_raise_them(
    a: str, several: Any, error: Any, options: dict[str, Any], late: set[str]
) -> None:
    def loader() -> StreamingDataLoader:
        one = StreamingDataset(a, **options)
        return StreamingDataLoader(several({"a": one}) if several else one, batch_size=4)

    for stage, reach in STAGES:
        name = "source 'a'" if several and error in (FilterError, EmptyError) else None
        with pytest.raises(error, match=name) if stage in late else nullcontext():
            reach(loader)


def test_sources_that_say_what_only_the_whole_can(a: str, b: str, tmp_path: Path) -> None:
    for source, problem in (
        (StreamingDataset(a, epoch=3), "was made with epoch=3"),
        (StreamingDataset(a, cache_dir=tmp_path), "has cache_dir"),
        (StreamingDataset(a, transform=list), "has a transform"),
    ):
        with pytest.raises(ArgumentError, match=f"source 'a' .*{problem}|source 'a' {problem}"):
            Mixture({"a": source, "b": b})


# ---- states that do not fit -----------------------------------------------------------------


def test_states_of_tables_and_mixtures(kind: Mixed, a: str, b: str, c: str) -> None:
    table = StreamingDataset(a)
    with pytest.raises(StateError, match=r"is of a StreamingDataset, .* into a Mixture"):
        of(kind).load_state_dict(table.state_dict())
    with pytest.raises(StateError, match=r"is of a Mixture, .* into a StreamingDataset"):
        table.load_state_dict(of(kind).state_dict())
    nested = Mixture({"a": Mixture({"x": a, "y": c}), "b": b}, columns=["id"])
    flat = Mixture({"a": a, "b": b}, columns=["id"])
    with pytest.raises(StateError, match="source 'a': the state has a mixture here, this is a tab"):
        flat.load_state_dict(nested.state_dict())
    with pytest.raises(StateError, match="source 'a': the state has a table here, this is a mixt"):
        nested.load_state_dict(flat.state_dict())


def test_sources_that_were_renamed_or_dropped(a: str, b: str, c: str) -> None:
    made = Mixture({"a": a, "b": b}, weights=WEIGHTS, window=16)
    state = made.state_dict()
    for sources in ({"a": a, "new": b}, {"a": a}):
        weights = dict.fromkeys(sources, 1)
        other = Mixture(sources, weights=weights, window=16)
        with pytest.raises(StateError, match=f"the state has a, b, .* has {', '.join(sources)}"):
            other.load_state_dict(state)
    without = Mixture({"a": a, "b": b, "c": c}, window=16)
    with pytest.raises(StateError, match="stop mismatch: the state has 'first_exhausted'"):
        without.load_state_dict(state)
    swapped = Mixture({"a": b, "b": a}, weights=WEIGHTS, window=16)
    with pytest.raises(StateError, match="source 'a': table mismatch"):
        swapped.load_state_dict(state)
    assert list(swapped.state_dict()) == list(state)


def test_the_order_of_names_does_not_matter(kind: Mixed) -> None:
    with loaded(of(kind)) as loader:
        head = read(kind, loader, 3)
        state = loader.state_dict()
    parts = {name: kind.parts[name] for name in ("b", "a")}
    other = Mixed(parts, {**kind.options, "weights": {"b": 1, "a": 3}})
    with loaded(of(other)) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert head + read(kind, loader) == expected(kind, state, epoch=0, batch=BATCH)


@pytest.mark.parametrize(
    ("name", "given", "made"),
    [
        ("seed", 6, 5),
        ("window", 32, 16),
        ("stop", "all_exhausted", "first_exhausted"),
        ("num_splits", 7, 264),
        ("batching", "stratified", "mixed"),
        ("weights", {"a": 2, "b": 1}, {"a": 3, "b": 1}),
        ("temperature", 2, {"a": 3, "b": 1}),
    ],
)
def test_arguments_that_differ_from_a_state(kind: Mixed, name: str, given: Any, made: Any) -> None:
    with loaded(of(kind)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    options: dict[str, Any] = {name: given}
    if name == "batching":
        options["window"] = None
    if name == "temperature":
        options["weights"] = None
    with loaded(of(kind, **options)) as loader:
        before = loader.state_dict()
        what = "weights" if name == "temperature" else name
        with pytest.raises(StateError, match=f"{what} mismatch") as caught:
            loader.load_state_dict(state)
        assert repr(made) in str(caught.value)
        assert name == "temperature" or repr(given) in str(caught.value)
        assert loader.state_dict() == before


def test_a_state_goes_back_to_the_versions_of_its_tables(tmp_path: Path) -> None:
    paths = {name: str(tmp_path / f"{name}.lance") for name in "ab"}
    for number, path in enumerate(paths.values()):
        lance.write_dataset(tables.columns(100, 1000 * number), path)

    def make(**options: Any) -> Mixture:
        return Mixture(paths, weights={"a": 1, "b": 1}, window=10, columns=["id"], **options)

    with loaded(make()) as loader:
        whole = [batch["id"].tolist() for batch in loader]
    with loaded(make()) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    lance.dataset(paths["b"]).delete("id < 1050")  # it shrinks
    lance.write_dataset(tables.columns(9, 5000), paths["a"], mode="append")
    with loaded(make()) as loader:
        loader.load_state_dict(state)
        assert [batch["id"].tolist() for batch in loader] == whole[1:]
    shrunk = StreamingDataset(paths["b"], version=lance.dataset(paths["b"]).version)
    paths["b"] = shrunk  # type: ignore[assignment]
    with (
        loaded(make()) as loader,
        pytest.raises(StateError, match=r"source 'b': table mismatch.* version 1 .* identity"),
    ):
        loader.load_state_dict(state)
    lance.dataset(paths["a"]).cleanup_old_versions(timedelta(0), delete_unverified=True)
    paths["b"] = str(tmp_path / "b.lance")
    with loaded(make()) as loader, pytest.raises(VersionError, match=r"source 'a': .*version 1"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schedule", "{"),
        ("schedule", "[]"),
        ("schedule", "{}"),
        ("schedule", '{"epoch":0,"spent":[0],"made":[3,1],"weights":[[0,[3,1]]]}'),
        ("schedule", '{"epoch":0,"spent":[0,0],"made":[3,1],"weights":[]}'),
        ("schedule", '{"epoch":0,"spent":[0,0],"made":[3,1],"weights":[[4,[3,1]]]}'),
        ("schedule", '{"epoch":0,"spent":[0,0],"made":[3,1],"weights":[[0,[3,-1]]]}'),
        ("schedule", '{"epoch":0,"spent":[0,0],"made":[3,1],"weights":[[0,[3]]]}'),
        ("schedule", '{"epoch":0,"spent":[-5,0],"made":[3,1],"weights":[[0,[3,1]]]}'),
        ("schedule", '{"epoch":0,"spent":[0.5,0],"made":[3,1],"weights":[[0,[3,1]]]}'),
        ("schedule", '{"epoch":0,"spent":[[0],0],"made":[3,1],"weights":[[0,[3,1]]]}'),
        ("schedule", '{"epoch":-1,"spent":[0,0],"made":[3,1],"weights":[[0,[3,1]]]}'),
        ("sources", "no json"),
        ("sources", '{"a":[1],"b":[2]}'),
        ("slots", 0),
        ("plan_hash", "0" * 32),
        ("counter", 10**6),
    ],
)
def test_damaged_states(kind: Mixed, key: str, value: Any) -> None:
    mixture = of(kind, window=None)
    state = of(kind).state_dict()
    with pytest.raises(StateError):
        mixture.load_state_dict({**state, key: value})
    mixture.load_state_dict(state)
    assert mixture.state_dict() == state


# ---- new weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0.25, math.inf])
@pytest.mark.parametrize("ahead", [None, 0, 1, 40])
def test_new_weights_while_a_loader_iterates(
    kind: Mixed, ahead: int | None, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.holding._LEAST_OWN", held)
    with loaded(of(kind)) as loader:
        iterator = iter(loader)
        head = [battery.check(kind, next(iterator)) for _ in range(3)]
        state = loader.state_dict()
        at = 3 * BATCH + (ahead or 0)
        loader.dataset.reweight({"a": 1, "b": 1}, at=None if ahead is None else at)
        assert loader.state_dict() == {**loader.state_dict(), "counter": 3 * BATCH, "epoch": 0}
        rest = [battery.check(kind, batch) for batch in iterator]
        after = change(kind, 0, at, (1, 1))
        assert head == expected(kind, state, epoch=0, batch=BATCH)[:3]
        now = loader.state_dict()
        assert rest == expected(after, now, epoch=0, batch=BATCH, start=3 * BATCH)
        assert read(kind, loader) == expected(after, now, epoch=1, batch=BATCH)


def test_len_and_masks_are_of_the_epoch(kind: Mixed) -> None:
    with loaded(of(kind), remainder="pad", global_batch_size=40) as loader:
        assert len(loader) == 10
        iterator = iter(loader)
        next(iterator)
        loader.dataset.reweight({"a": 1, "b": 1})
        first = 1 + len(list(iterator))
        second = list(loader)
        state = loader.state_dict()
        after = change(kind, 0, 40, (1, 1))
        assert [len(second), first] == [
            len(expected(after, state, epoch=epoch, batch=40, remainder="pad")) for epoch in (1, 0)
        ]
        assert len(loader) == len(second) != first
        assert [battery.check(kind, batch) for batch in second] == expected(
            after, state, epoch=1, batch=40, remainder="pad"
        )


def test_new_weights_before_an_epoch_and_after_a_break(kind: Mixed) -> None:
    with loaded(of(kind)) as loader:
        loader.dataset.reweight({"a": 1, "b": 1})
        state = loader.state_dict()
        once = change(kind, 0, 0, (1, 1))
        assert read(kind, loader, 2) == expected(once, state, epoch=0, batch=BATCH)[:2]
        loader.dataset.reweight({"a": 0, "b": 1})  # the epoch was left: it holds from the next on
        state = loader.state_dict()
        assert (state["epoch"], state["counter"]) == (1, 0)
        twice = change(once, 1, 0, (0, 1))
        batches = read(kind, loader)
        assert batches == expected(twice, state, epoch=1, batch=BATCH)
        assert {name for b in batches for name, _ in b.rows} == {"b"}
        loader.set_epoch(0)
        with pytest.raises(ArgumentError, match="reweighted in epoch 1: the weights of epoch 0"):
            list(loader)


def test_new_weights_resume_anywhere(kind: Mixed) -> None:
    with loaded(of(kind)) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.dataset.reweight({"a": 1, "b": 1}, at=2 * BATCH + 5)
        next(iterator)
        loader.dataset.reweight({"a": 1, "b": 3}, at=4 * BATCH)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    after = change(change(kind, 0, 2 * BATCH + 5, (1, 1)), 0, 4 * BATCH, (1, 3))
    whole = expected(after, state, epoch=0, batch=BATCH)
    for weights in (WEIGHTS, {"a": 1, "b": 3}):  # of the beginning, and the last ones
        ranks = []
        for rank in range(4):
            with loaded(of(kind, weights=weights, rank=rank, world_size=4)) as loader:
                loader.load_state_dict(state)
                ranks.append(read(kind, loader))
                assert (
                    read(kind, loader, 2)
                    == expected(after, state, epoch=1, batch=BATCH, rank=rank, size=4)[:2]
                )
        assert joined(ranks) == whole[3:]
    with (
        loaded(of(kind, weights={"a": 1, "b": 2})) as loader,
        pytest.raises(StateError, match=r"weights mismatch: .*'b': 3.*'b': 2.*'b': 1"),
    ):
        loader.load_state_dict(state)


def test_a_script_resumes_after_new_weights_in_several_epochs(kind: Mixed) -> None:
    state: dict[str, Any] = {}
    after = kind
    for epoch, weights in enumerate([(1, 1), (2, 1), (1, 3)]):
        with loaded(of(kind)) as loader:
            loader.load_state_dict(state)
            loader.dataset.reweight(dict(zip("ab", weights, strict=True)))
            after = change(after, epoch, 0, weights)
            batches = read(kind, loader)
            state = loader.state_dict()
        assert batches == expected(after, state, epoch=epoch, batch=BATCH)


def test_new_weights_keep_what_is_held_and_the_workers(kind: Mixed) -> None:
    """Only the routes change, unless a source is drawn that was not before."""
    mixture = of(kind, weights={"a": 3, "b": 1}, stop="all_exhausted")
    with loaded(mixture, transform=dict, num_workers=1) as loader:
        assert len(list(loader)) == len(loader)
        iterator = iter(loader)
        next(iterator)
        workers, rows = loader._workers, loader.stats().stages["read"].rows
        mixture.reweight({"a": 1, "b": 2})
        assert [*iterator, *loader]
        assert loader._workers is workers
        assert loader.stats().stages["read"].rows == rows, "no row was read again"
        mixture.reweight({"a": 1, "b": 0})
        assert len(list(loader)) == len(loader)
        mixture.reweight({"a": 1, "b": 1})
        assert len(list(loader)) == len(loader)


RANK = """
import os, sys
import torch.distributed as dist
from destrier import ArgumentError, Mixture, StateError, StreamingDataLoader

a, b, meet = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
mixture = Mixture({"a": a, "b": b}, columns=["id"], weights={"a": 3, "b": 1}, window=16)
with StreamingDataLoader(mixture, global_batch_size=24) as loader:
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for weights, error, words in (
        ({"a": 1, "b": 1 + rank}, StateError, ["disagree", "[24, [1, 1]]", "[24, [1, 2]]"]),
        ({"a": 1, "b": 1} if rank else {"a": 1}, StateError if rank else ArgumentError, ["for a;"]),
    ):
        try:
            mixture.reweight(weights)
        except error as raised:
            assert all(word in str(raised) for word in words), raised
        else:
            raise AssertionError(f"{weights} on rank {rank} were not noticed")
        assert loader.state_dict() == state
    mixture.reweight({"a": 1, "b": 1})
    ids = next(iterator)["id"].tolist()
    both = [None] * 2
    dist.all_gather_object(both, ids)
    assert len({*both[0], *both[1]}) == 24, both
dist.destroy_process_group()
"""


def test_ranks_change_to_the_same_weights(a: str, b: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), a, b, str(tmp_path / "meet")]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)


def test_the_state_of_a_mixture_without_end_does_not_grow(kind: Mixed) -> None:
    """However often its weights change; earlier states have those that were in force."""
    options = {"weights": WEIGHTS, "stop": "never"}
    with loaded(of(kind, **options)) as loader:
        iterator = iter(loader)
        states, batches = [], []
        for i in range(100):
            states.append(loader.state_dict())
            batches.append(battery.check(kind, next(iterator)).rows)
            loader.dataset.reweight({"a": 1 + i % 3, "b": 1 + i % 2})
        sizes = [len(str(state["schedule"])) for state in states]
        assert max(sizes[3:]) < sizes[3] + 8  # a few digits
        for number in (70, 3, 98):
            loader.load_state_dict(states[number])
            assert battery.check(kind, next(iter(loader))).rows == batches[number]
        changes = [(0, (i + 1) * BATCH, (1 + i % 3, 1 + i % 2)) for i in range(100)]
        whole = Mixed(kind.parts, {**kind.options, **options}, changes=tuple(changes), most=2400)
        some = expected(whole, states[0], epoch=0, batch=BATCH)
        assert batches == [batch.rows for batch in some]


def test_states_without_a_base_are_read(kind: Mixed) -> None:
    with loaded(of(kind)) as loader:
        read(kind, loader, 3)
        loader.dataset.reweight({"a": 1, "b": 1}, at=100)
        state = loader.state_dict()
    schedule = json.loads(str(state["schedule"]))
    assert schedule.pop("before") == [0, 0]
    with loaded(of(kind)) as loader:
        loader.load_state_dict({**state, "schedule": json.dumps(schedule)})
        assert loader.state_dict() == state
    for damage in ([4, 0], [0], [-1, 1], 3):
        schedule["before"] = damage
        with pytest.raises(StateError, match="damaged"):
            of(kind).load_state_dict({**state, "schedule": json.dumps(schedule)})


def test_new_weights_that_cannot_be(kind: Mixed, a: str, b: str) -> None:
    with loaded(of(kind)) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        for weights, at, error, message in (
            (WEIGHTS, 5, ArgumentError, "at=5 has passed: the counter is 24"),
            (WEIGHTS, 10**6, ArgumentError, "from 0 to 400 .* got 1000000"),
            ({"a": 40, "b": 1}, None, ArgumentError, r"'b' has 0\.0244.* window of 16"),
        ):
            with pytest.raises(error, match=message):
                loader.dataset.reweight(weights, at=at)
        assert loader.state_dict() == state
        assert battery.check(kind, next(iterator)) == expected(kind, state, epoch=0, batch=BATCH)[1]
    with pytest.raises(ArgumentError, match="without weights reads every row once"):
        Mixture({"a": a, "b": b}).reweight(WEIGHTS)


def test_new_weights_and_other_iterators(kind: Mixed) -> None:
    mixture = of(kind, global_batch_size=BATCH, with_index=True)
    iterator = iter(mixture)
    next(iterator)
    with pytest.raises(IterationError, match=r"being iterated.*StreamingDataLoader"):
        mixture.reweight({"a": 1, "b": 1})
    iterator.close()
    mixture.reweight({"a": 1, "b": 1})
    state = mixture.state_dict()
    after = change(kind, 1, 0, (1, 1))
    assert read(kind, mixture) == expected(after, state, epoch=1, batch=BATCH)


# ---- sources that come and go ---------------------------------------------------------------


def test_a_source_is_added_at_a_resume(kind: Mixed, c: str) -> None:
    with loaded(of(kind)) as loader:
        read(kind, loader, 5)
        state = loader.state_dict()
    more = Mixed(
        {**kind.parts, "c": Kind(c, np.arange(2000, 2040), {}, np.arange(40))},
        {**kind.options, "weights": {"a": 2, "b": 1, "c": 1}},
    )
    with loaded(of(more)) as loader:
        loader.load_state_dict(state)
        added = loader.state_dict()
        assert (added["epoch"], added["counter"]) == (0, 5 * BATCH)
        batches = read(more, loader)
        second = read(more, loader)
    # What was read has no c; from there on it begins at its beginning.
    changed = Mixed(
        more.parts,
        {**more.options, "weights": {"a": 3, "b": 1, "c": 0}},
        changes=((0, 5 * BATCH, (2, 1, 1)),),
    )
    whole = expected(changed, added, epoch=0, batch=BATCH)
    assert batches == whole[5:]
    assert not any(name == "c" for batch in whole[:5] for name, _ in batch.rows)
    assert second == expected(changed, added, epoch=1, batch=BATCH)
    with loaded(of(more)) as loader:
        loader.load_state_dict(added)
        assert read(more, loader) == whole[5:]
    with (
        loaded(of(kind)) as loader,
        pytest.raises(StateError, match="the state has a, b, c, this mixture has a, b;"),
    ):
        loader.load_state_dict(added)


def test_a_source_of_weight_0_is_never_read(a: str, b: str, tmp_path: Path) -> None:
    ids = Counter()
    mixture = Mixture({"a": a, "b": b}, weights={"a": 1, "b": 0}, window=10, columns=["id"], seed=3)
    with loaded(mixture) as loader:
        for batch in loader:
            ids.update(batch["id"].tolist())
        state = loader.state_dict()
        assert len(ids) == 288
        assert max(ids) < 1000
        mixture.reweight({"a": 1, "b": 1})
        assert any(i >= 1000 for batch in loader for i in batch["id"].tolist())
    with loaded(Mixture({"a": a, "b": b}, weights={"a": 1, "b": 0}, window=10)) as loader:
        loader.load_state_dict(state)


def test_a_source_of_one_row_comes_as_often_as_its_weight(folder: Path, a: str) -> None:
    one = str(folder / "one.lance")
    mixture = Mixture(
        {"a": a, "one": one}, weights={"a": 9, "one": 1}, length=4000, columns=["id"], window=10
    )
    with loaded(mixture, global_batch_size=1000) as loader:
        for batch in loader:
            counts = Counter(batch["id"].tolist())
            assert counts[3000] == 100
            assert len(counts) == 301


def test_a_rare_source_of_which_little_is_read(a: str, c: str) -> None:
    # All of it may lie in the first steps of an epoch, which do not fill the memory.
    for seed in range(6):
        mixture = Mixture(
            {"a": a, "c": c}, weights={"a": 99, "c": 1}, window=100, columns=["id"], seed=seed
        )
        with loaded(mixture, global_batch_size=20) as loader:
            for _ in range(4):
                ids = [i for batch in loader for i in batch["id"].tolist()]
                assert len(ids) == 300
                assert sum(2000 <= i < 2040 for i in ids) == 3
                assert len(set(ids)) == 300


# ---- what a state is ------------------------------------------------------------------------


def test_a_state_is_small_and_has_no_secrets(folder: Path) -> None:
    names = ["a_source_of_text", "another_of_code", "a_third_of_pictures", "the_fourth_one"]
    paths = [str(folder / f"{name}.lance") for name in ("a", "b", "c", "one")]
    sources = {
        name: StreamingDataset(
            path, storage_options={"aws_secret_access_key": "hush"}, columns=["id"]
        )
        for name, path in zip(names, paths, strict=True)
    }
    weights = {name: 0.1 * (i + 1) for i, name in enumerate(names)}
    mixture = Mixture(sources, weights=weights, length=10**9, source_column="source")
    with loaded(mixture) as loader:
        states = [loader.state_dict()]
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
            states.append(loader.state_dict())
        mixture.reweight(weights)
        states.append(loader.state_dict())
    for state in states:
        assert len(json.dumps(state)) <= 2048
        assert all(isinstance(v, int | str | bool | type(None)) for v in state.values())
        assert "hush" not in json.dumps(state)
        assert str(folder) not in json.dumps(state)
    assert [set(state) for state in states] == [set(states[0])] * len(states)
    for state in states[:-1]:
        assert state == {**states[0], **{k: state[k] for k in COUNTED}}
    assert "hush" not in repr(mixture)


COUNTED = ("counter", "samples_consumed_per_split", "positions_consumed_per_split")


@pytest.mark.filterwarnings("ignore:.*no_dist|.*single process:UserWarning")
def test_states_survive_every_way_of_saving(kind: Mixed, tmp_path: Path) -> None:
    with loaded(of(kind)) as loader:
        read(kind, loader, 4)
        state = loader.state_dict()
    kept = io.BytesIO()
    torch.save(state, kept)
    kept.seek(0)
    dcp.save({"data": dict(state)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    empty = {"data": of(kind).state_dict()}
    dcp.load(empty, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for back in (json.loads(json.dumps(state)), torch.load(kept, weights_only=True), empty["data"]):
        assert back == state
        with loaded(of(kind)) as loader:
            loader.load_state_dict(back)
            assert read(kind, loader) == expected(kind, state, epoch=0, batch=BATCH)[4:]


def test_pickles_hold_no_tables_that_were_resolved(kind: Mixed) -> None:
    mixture = of(kind, global_batch_size=BATCH, with_index=True)
    mixture.reweight({"a": 1, "b": 1})
    copy = pickle.loads(pickle.dumps(mixture))
    assert copy._adopted.sources == ()
    after = change(kind, 0, 0, (1, 1))
    state = mixture.state_dict()
    assert copy.state_dict() == state
    assert read(kind, copy) == expected(after, state, epoch=0, batch=BATCH)


# ---- lengths --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, 400),
        ({"weights": WEIGHTS, "window": 16}, 400),
        ({"weights": {"a": 1, "b": 1}, "window": 10}, 200),
        ({"weights": {"a": 1, "b": 1}, "window": 10, "stop": "all_exhausted"}, 600),
        ({"weights": WEIGHTS, "length": 1234}, 1234),
        ({"temperature": 1, "window": 16}, 400),
        ({"temperature": 1e9, "window": 16}, 192),
    ],
)
def test_lengths(a: str, b: str, options: dict[str, Any], samples: int) -> None:
    mixture = Mixture({"a": a, "b": b}, columns=["id"], **options)
    with loaded(mixture, global_batch_size=50, remainder="keep") as loader:
        for _ in range(2):
            assert len(loader) == -(-samples // 50)
            assert sum(len(batch["id"]) for batch in loader) == samples
    assert len(mixture) == samples // mixture.num_splits * mixture.num_splits


# ---- cycle ----------------------------------------------------------------------------------


def test_cycle_goes_on_over_epochs(c: str, b: str) -> None:
    inner = Mixture({"b": b, "c": c}, weights={"b": 2, "c": 1}, window=30, columns=["id"])
    view = StreamingDataset(c, filter="id < 2030")
    for source, count in ((c, 40), (view, 30), (inner, 120)):
        with loaded(cycle(source, length=100, columns=["id"]), global_batch_size=10) as loader:
            ids = [i for _ in range(6) for batch in loader for i in batch["id"].tolist()]
        passes = [tuple(ids[i : i + count]) for i in range(0, 600 - count + 1, count)]
        if source is not inner:
            assert all(len(set(one)) == count for one in passes)
        assert len(set(passes)) == len(passes), "every time through is another order"
        with loaded(cycle(source, columns=["id"]), global_batch_size=10) as loader:
            iterator = iter(loader)
            assert [i for _ in range(60) for i in next(iterator)["id"].tolist()] == ids
            state = loader.state_dict()
            following = next(iterator)["id"].tolist()
        with loaded(cycle(source, columns=["id"]), global_batch_size=10) as loader:
            loader.load_state_dict(state)
            assert next(iter(loader))["id"].tolist() == following


# ---- workers and processes ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_spawned_workers_of_torch(kind: Mixed) -> None:
    mixture = of(kind, global_batch_size=BATCH, with_index=True)
    mixture.reweight({"a": 1, "b": 1}, at=50)
    state = mixture.state_dict()
    after = change(kind, 0, 50, (1, 1))
    loader = DataLoader(
        mixture,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    for epoch in range(2):
        batches = [battery.check(kind, batch) for batch in loader]
        assert batches == expected(after, state, epoch=epoch, batch=BATCH)
    with pytest.raises(IterationError, match="does not know the position"):
        mixture.reweight({"a": 1, "b": 1})


def test_new_weights_with_transform_workers(kind: Mixed) -> None:
    with loaded(of(kind), transform=battery.doubled, num_workers=1) as loader:
        iterator = iter(loader)
        head = [next(iterator) for _ in range(2)]
        loader.dataset.reweight({"a": 1, "b": 1})
        batches = head + list(iterator)
        state = loader.state_dict()
    after = change(kind, 0, 2 * BATCH, (1, 1))
    assert [battery.check(kind, batch) for batch in batches] == expected(
        after, state, epoch=0, batch=BATCH
    )
    assert all(batch["double"].tolist() == (2 * batch["id"]).tolist() for batch in batches)


# ---- topologies, memory ---------------------------------------------------------------------


def test_replicas_and_uneven_shares(kind: Mixed) -> None:
    ranks = []
    for rank in range(6):
        with loaded(of(kind, rank=rank, world_size=6, replicas=2)) as loader:
            state = loader.state_dict()
            ranks.append(read(kind, loader))
    assert ranks[0] == ranks[1]
    assert joined(ranks[::2]) == expected(kind, state, epoch=0, batch=BATCH)
    ranks = []
    for rank in range(5):
        with loaded(of(kind, rank=rank, world_size=5), uneven=True) as loader:
            ranks.append(read(kind, loader))
    assert {len(b.samples) for mine in ranks for b in mine} == {4, 5}
    assert joined(ranks) == expected(kind, state, epoch=0, batch=BATCH)
    with pytest.raises(ArgumentError, match="cannot be shared equally by world_size 5"):
        next(iter(loaded(of(kind, rank=0, world_size=5))))


@pytest.mark.parametrize("held", [0.25, math.inf])
@pytest.mark.parametrize("budget", [1, 20_000, 1 << 28])
def test_the_budget_does_not_change_the_batches(
    kind: Mixed, budget: int, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.holding._LEAST_OWN", held)
    tight = budget < 1 << 20
    with loaded(of(kind), prefetch_bytes=budget) as loader:
        with pytest.warns(DestrierWarning, match="prefetch_bytes") if tight else nullcontext():
            batches = read(kind, loader)
        state = loader.state_dict()
        assert batches == expected(kind, state, epoch=0, batch=BATCH)
        assert read(kind, loader) == expected(kind, state, epoch=1, batch=BATCH)
        kept = loader._runner.work.feed.feeds[0].held  # type: ignore[union-attr]
        wide = "all" if held < 1 else "windows"
        assert kept == ("shares" if tight else wide)


def test_skips_while_everything_is_held(kind: Mixed) -> None:
    # The pipeline that is left may still be at work on the memory that the next one goes on with.
    with loaded(of(kind)) as loader:
        state = loader.state_dict()
        for epoch in range(12):
            whole = expected(kind, state, epoch=epoch, batch=BATCH)
            iterator = iter(loader)
            given, at = [], 0
            while at < len(whole) - 2:
                given.append(battery.check(kind, next(iterator)))
                loader.skip(1)
                at += 2
            assert given == whole[: len(given) * 2 : 2]
            list(iterator)


def test_all_sources_share_what_may_be_open(a: str, b: str) -> None:
    stream = loaded(Mixture({"a": a, "b": b})).dataset.stream(BATCH)
    for leaf in stream.leaves:  # type: ignore[attr-defined]
        identity = leaf.identity
        rows = identity.num_splits * identity.window * identity.clump_size
        assert rows * leaf.table.row_bytes <= OPEN_BYTES


# ---- rows that fail -------------------------------------------------------------------------


def pictures(path: str, colours: list[int], spoiled: int) -> None:
    values = []
    for i, colour in enumerate(colours):
        kept = io.BytesIO()
        PillowImage.new("RGB", (8, 8), (colour, 0, i)).save(kept, "PNG")
        values.append(b"no picture" if i == spoiled else kept.getvalue())
    data = pa.table({"id": range(len(colours)), "image": pa.array(values, pa.binary())})
    lance.write_dataset(data, path)


@pytest.fixture
def spoiled(tmp_path: Path) -> dict[str, str]:
    """Two tables of pictures; the sixth one of the second is none."""
    paths = {name: str(tmp_path / f"pictures_{name}.lance") for name in ("red", "dark")}
    pictures(paths["red"], [255] * 40, -1)
    pictures(paths["dark"], [9] * 20, 5)
    return paths


def test_a_picture_that_cannot_be_decoded(spoiled: dict[str, str]) -> None:
    options = {"global_batch_size": 10, "decode": {"image": "rgb"}}

    def mixture() -> Mixture:
        return Mixture(spoiled, source_column="source")

    with (
        loaded(mixture(), **options) as loader,
        pytest.raises(Exception, match=r"row 5 of .*pictures_dark") as caught,
    ):
        list(loader)
    assert caught.value.offset == 5
    with loaded(mixture(), format="rows", global_batch_size=10) as loader:
        whole = [
            [(row["source"], row["row_offset"], row["id"]) for row in batch] for batch in loader
        ]
    for policy in ("skip", "fill"):
        with loaded(mixture(), on_error=policy, **options) as loader:
            for batch, rows in zip(loader, whole, strict=True):
                names, offsets = batch["source"], batch["row_offset"].tolist()
                good = [row for row in rows if row[:2] != ("dark", 5)]
                if policy == "skip":
                    assert list(zip(names, offsets, batch["id"].tolist(), strict=True)) == good
                assert len(names) == len(rows if policy == "fill" else good)
                for name, offset, image in zip(names, offsets, batch["image"], strict=True):
                    assert image[0].unique().tolist() == [255 if name == "red" else 9]
                    assert image[2].unique().tolist() == [offset]
            assert [error.offset for error in loader.failures] == [5]
            assert "pictures_dark" in str(loader.failures[0])


def test_a_transform_that_fails_names_the_table(kind: Mixed, a: str, b: str) -> None:
    def fails(batch: dict[str, Any]) -> dict[str, Any]:
        if (batch["id"] == 1007).any():
            raise ValueError("no")
        return batch

    with loaded(of(kind), transform=fails) as loader:
        with pytest.raises(TransformError, match=rf"row 7 of .*{b}") as caught:
            list(loader)
        assert caught.value.offset == 7
    with loaded(of(kind), transform=fails, on_error="skip") as loader:
        given = [i for batch in loader for i in batch["id"].tolist()]
        assert 1007 not in given
        assert len(given) == 384 - 1


def test_a_row_that_cannot_be_read_names_the_table(
    kind: Mixed, b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from destrier.read import Reader

    take: Callable[..., Any] = Reader._take

    def spoiled(self: Reader, offsets: Any, columns: list[str]) -> Any:
        if self.table.uri == b and 7 in offsets.tolist() and "name" in columns:
            raise ReadError("it is rotten")
        return take(self, offsets, columns)

    monkeypatch.setattr(Reader, "_take", spoiled)
    with loaded(of(kind)) as loader:
        with pytest.raises(ReadError, match=rf"column 'name' of row 7 of {b}") as caught:
            list(loader)
        assert (caught.value.offset, caught.value.column) == (7, "name")
    for policy, count in (("skip", 383), ("fill", 384)):
        with loaded(of(kind), on_error=policy) as loader:
            rows = [row for batch in read(kind, loader) for row in batch.rows]
            assert len(rows) == count
            assert ("b", 7) not in rows
            assert [(e.offset, e.column) for e in loader.failures] == [(7, "name")]
