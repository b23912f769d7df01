"""Permutations: parts, orders written down, and lists that others made."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import lance
import lancedb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lancedb.permutation import permutation_builder

from destrier import lists, membership
from destrier.builder import PermutationBuilder, _bounds
from destrier.errors import (
    ArgumentError,
    ColumnError,
    EmptyError,
    FilterError,
    StateError,
    TableError,
    VersionError,
)
from destrier.foreign import as_permutation
from destrier.keyed import mix
from destrier.membership import RandomMembership, hash_rows
from destrier.order import Order
from destrier.permutation import METADATA_KEY, Permutation
from destrier.selection import OffsetRows, RangeRows, select_rows
from destrier.table import open_table

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 1003


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESTRIER_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("base") / "base.lance")
    ids = np.arange(ROWS)
    data = pa.table(
        {
            "id": ids,
            "label": ids * 7 % 10,
            "kind": pa.array([None if i % 50 == 0 else "abc"[i % 3] for i in range(ROWS)]),
            "size": ids / 4.0,
            "vector": pa.array([[0.0, 1.0]] * ROWS, pa.list_(pa.float32(), 2)),
        }
    )
    lance.write_dataset(data, path, max_rows_per_file=400)
    return path


def rows_of(p: Permutation) -> list[int]:
    rows = p.rows
    return rows.offsets(np.arange(len(rows))).tolist()


def parts_of(p: Permutation) -> dict[str, list[int]]:
    return {name: rows_of(p[name]) if len(p[name]) else [] for name in p.parts}


# ---- parts: sizes ---------------------------------------------------------------------------


@given(
    n=st.integers(1, 5000),
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    rest=st.integers(0, 20),
)
def test_sizes_are_cumulative_floors_of_exact_fractions(n: int, weights: list[int], rest: int):
    total = sum(weights) + rest
    bounds = _bounds(n, [Fraction(w, total) for w in weights], None, None)
    assert bounds == [n * int(s) // total for s in np.cumsum([0, *weights])]
    assert bounds[-1] == n or rest


@pytest.mark.parametrize(
    ("n", "ratios", "sizes"),
    [
        (1000, [0.7, 0.2, 0.1], [700, 200, 100]),
        (1003, [0.8, 0.2], [802, 201]),
        (3, [1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        (10**9, [1 / 3, 2 / 3], [333333333, 666666667]),
        (1000, [0.1] * 10, [100] * 10),
        (943, [0.5, 0.25], [471, 236]),
        (7, [np.float32(0.5), np.float64(0.5)], [3, 4]),
        (1, [0.5, 0.5], [0, 1]),
    ],
)
def test_ratios_mean_the_decimals_that_they_print_as(n: int, ratios: list[float], sizes: list[int]):
    assert np.diff(_bounds(n, ratios, None, None)).tolist() == sizes


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 2000),
    cuts=st.lists(st.integers(0, 2000), min_size=1, max_size=7),
    seed=st.integers(0, 2**32 - 1),
    clump=st.integers(1, 300),
)
def test_random_parts_are_exact_disjoint_and_cover(n: int, cuts: list[int], seed: int, clump: int):
    bounds = [0, *sorted(min(cut, n) for cut in cuts)]
    member = RandomMembership(n, bounds, seed=seed, clump_size=clump)
    found = [member.positions(i) for i in range(len(bounds) - 1)]
    assert [len(part) for part in found] == np.diff(bounds).tolist()
    every = np.concatenate([part.offsets(np.arange(len(part))) for part in found])
    assert len(np.unique(every)) == len(every) == bounds[-1]
    line = member.line(np.arange(n))
    assert sorted(line.tolist()) == list(range(n))
    runs = np.flatnonzero(np.diff(line) != 1) + 1  # inside a clump the line is consecutive
    assert np.isin(np.flatnonzero(np.arange(1, n) % clump) + 1, runs).sum() == 0


def test_few_and_many_parts_are_cut_alike():
    few = RandomMembership(ROWS, [0, 100, 400, ROWS], seed=5)
    many = RandomMembership(ROWS, [0, 100, 400, *range(401, ROWS + 1)], seed=5)
    assert len(many.bounds) > 255 > membership._KEPT
    for i in range(2):
        positions = few.positions(i)
        every = np.arange(len(positions))
        assert (positions.offsets(every) == many.positions(i).offsets(every)).all()


def test_random_parts_depend_on_the_seed_alone(uri: str):
    def build(seed: int) -> dict[str, list[int]]:
        return parts_of(
            PermutationBuilder(uri).split_random(ratios=[0.5, 0.5], seed=seed).execute()
        )

    first = build(3)
    assert first == build(3) != build(4)
    assert sorted(first["0"] + first["1"]) == list(range(ROWS))
    assert all(part == sorted(part) for part in first.values())
    # a known value: the cut must not change between versions
    assert first["0"][:8] == [0, 4, 6, 12, 14, 16, 18, 19]


def test_clumps_stay_together(uri: str):
    p = PermutationBuilder(uri).split_random(counts=[320, 320], clump_size=32, seed=1).execute()
    owners = {row: name for name, rows in parts_of(p).items() for row in rows}
    clumps = [{owners.get(row) for row in range(i, min(i + 32, ROWS))} for i in range(0, ROWS, 32)]
    assert sum(len(clump) > 1 for clump in clumps) <= 2
    assert [len(p[name]) for name in p.parts] == [320, 320]


def test_sequential_parts_are_ranges_of_the_selection(uri: str):
    p = PermutationBuilder(uri).filter("label < 5").split_sequential(fixed=3).execute()
    kept = [i for i in range(ROWS) if i * 7 % 10 < 5]
    parts = parts_of(p)
    assert [row for part in parts.values() for row in part] == kept
    sizes = [len(part) for part in parts.values()]
    assert max(sizes) - min(sizes) <= 1
    assert p.identity["filter"] == "label < 5"
    counts = PermutationBuilder(uri).split_sequential(counts=[3, 2], names=["a", "b"]).execute()
    assert parts_of(counts) == {"a": [0, 1, 2], "b": [3, 4]}


# ---- parts: hash and SQL --------------------------------------------------------------------


def word(value: Any) -> int:
    if value is None:
        return mix(mix(4))
    if isinstance(value, float):
        return mix(int(np.float64(value).view(np.uint64)) ^ mix(2))
    if isinstance(value, str):
        digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
        return mix(int.from_bytes(digest, "little") ^ mix(3))
    return mix((value % 2**64) ^ mix(1))


def row_hash(*values: Any) -> int:
    h = 0
    for value in values:
        h = mix(h ^ word(value))
    return h


@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.floats(allow_nan=False).map(lambda x: x + 0.0),
            st.none() | st.text(max_size=5),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_the_hash_is_the_documented_one(rows: list[tuple[Any, ...]]):
    kinds = (pa.int64(), pa.float64(), pa.string(), pa.bool_())
    columns = [
        pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    ]
    assert hash_rows(columns).tolist() == [row_hash(*row) for row in rows]


def test_the_hash_is_one_of_values_not_of_types():
    def same(*columns: pa.Array) -> bool:
        return len({hash_rows([column])[0] for column in columns}) == 1

    assert same(
        *(pa.array([5], kind) for kind in (pa.int8(), pa.uint16(), pa.int64(), pa.uint64()))
    )
    assert same(pa.array([0.5], pa.float16()), pa.array([0.5], pa.float32()), pa.array([0.5]))
    texts = [pa.array(["x"], kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    assert same(*texts, pa.array(["x"]).dictionary_encode(), pa.array([b"x"], pa.binary(1)))
    assert same(pa.array([0.0]), pa.array([-0.0]))
    assert same(*(pa.array([x]) for x in (np.nan, -np.nan)))
    assert same(
        pa.nulls(1), *(pa.nulls(1, kind) for kind in (pa.int8(), pa.string(), pa.float32()))
    )
    for kind in (pa.date32(), pa.date64(), pa.timestamp("us"), pa.timestamp("s", "UTC")):
        assert hash_rows([pa.array([86_400_000], pa.int64()).cast(pa.int32()).cast(pa.int64())])
        assert len(hash_rows([pa.array([None, 0], kind)])) == 2
    for kind in (pa.time32("s"), pa.time64("us"), pa.duration("ms"), pa.decimal128(5, 2)):
        assert len(hash_rows([pa.array([None], kind)])) == 1


def test_hash_parts_follow_the_values(uri: str):
    p = PermutationBuilder(uri).split_hash(["label"], [7, 3], names=["train", "val"]).execute()
    parts = parts_of(p)
    assert sorted(parts["train"] + parts["val"]) == list(range(ROWS))
    labels = {name: {i * 7 % 10 for i in rows} for name, rows in parts.items()}
    assert labels["train"] & labels["val"] == set()
    expected = {n for n in range(10) if (row_hash(n) >> 32) * 10 >> 32 >= 7}
    assert labels["val"] == expected
    ids = PermutationBuilder(uri).filter("id < 20").split_hash("id", [8, 2]).execute()
    assert parts_of(ids)["1"] == [2, 3, 7, 16]


def test_hash_parts_do_not_move_when_rows_are_added(uri: str, tmp_path: Path):
    path = str(tmp_path / "more.lance")
    lance.write_dataset(lance.dataset(uri).to_table(), path)

    def build() -> dict[str, list[int]]:
        builder = PermutationBuilder(path).split_hash(["id", "kind"], [2, 1], discard_weight=1)
        return parts_of(builder.execute())

    before = build()
    sizes = [len(rows) for rows in before.values()]
    assert abs(sizes[0] - ROWS / 2) < 80
    assert abs(sizes[1] - ROWS / 4) < 80
    lance.write_dataset(lance.dataset(uri).to_table(limit=100), path, mode="append")
    after = build()
    for name, rows in before.items():
        assert [row for row in after[name] if row < ROWS] == rows


def test_calculated_parts(uri: str):
    ids = list(range(ROWS))
    p = PermutationBuilder(uri).split_calculated("label % 3").execute()
    assert parts_of(p) == {str(k): [i for i in ids if i * 7 % 10 % 3 == k] for k in range(3)}
    p = PermutationBuilder(uri).filter("id > 3").split_calculated("kind").execute()
    kinds = {k: [i for i in ids[4:] if i % 50 and "abc"[i % 3] == k] for k in "abc"}
    assert parts_of(p) == kinds  # rows whose kind is null are in no part
    assert p.parts == ["a", "b", "c"]
    p = PermutationBuilder(uri).split_calculated("kind", names=["c", "z", "b", "a"]).execute()
    assert p.parts == ["c", "z", "b", "a"]
    assert len(p["z"]) == 0
    with pytest.raises(EmptyError, match="part 'z' lists no rows"):
        _ = p["z"].rows
    p = PermutationBuilder(uri).split_calculated("size > 200", names=["train", "val"]).execute()
    assert parts_of(p)["val"] == [i for i in ids if i / 4 > 200]


@pytest.mark.parametrize(
    ("sql", "names", "error", "text"),
    [
        ("nope + 1", None, FilterError, "columns are: id, label, kind, size, vector"),
        ("label +", None, FilterError, "columns are"),
        ("size", None, ArgumentError, "of type double"),
        ("label - 1", None, ArgumentError, "is -1 for a row"),
        ("label", ["a", "b"], ArgumentError, "it must be 0 to 1, for the names a, b"),
        ("kind", ["a", "b"], ArgumentError, "is 'c' for a row, which is none of the names: a, b"),
    ],
)
def test_calculated_parts_refuse(
    uri: str, sql: str, names: list[str] | None, error: type[Exception], text: str
):
    with pytest.raises(error, match=text):
        PermutationBuilder(uri).split_calculated(sql, names=names).execute()


# ---- order ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    lanes=st.integers(1, 40),
    clump=st.integers(1, 40),
    window=st.none() | st.integers(1, 9),
    sql=st.sampled_from([None, "label < 4", "id % 100 = 7"]),
)
def test_the_table_is_the_order(
    uri: str, seed: int, epoch: int, lanes: int, clump: int, window: int | None, sql: str | None
):
    table = open_table(uri)
    rows = select_rows(table, sql)
    lanes = min(lanes, len(rows))
    builder = PermutationBuilder(table)
    if sql is not None:
        builder.filter(sql)
    builder.shuffle(seed=seed, epoch=epoch, num_splits=lanes, clump_size=clump, window=window)
    order = Order(len(rows), seed, epoch, lanes, clump, window or (8 if clump > 1 else 1))
    p = builder.execute()
    assert rows_of(p) == rows.offsets(order.rows(np.arange(len(rows)))).tolist()
    assert p.num_splits == lanes
    written = Permutation.of_order(table, rows, order, filter=sql)
    assert written.identity == p.identity
    assert written.to_arrow().equals(p.to_arrow(), check_metadata=True)


def test_each_part_has_the_order_of_a_stream_over_it(uri: str):
    builder = PermutationBuilder(uri).split_random(fixed=3, seed=2)
    plain = parts_of(builder.execute())
    shuffled = parts_of(builder.shuffle(seed=9, clump_size=4, num_splits=5, window=2).execute())
    for name, rows in plain.items():
        order = Order(len(rows), 9, 0, 5, 4, 2)
        assert shuffled[name] == np.array(rows)[order.rows(np.arange(len(rows)))].tolist()


def test_an_order_without_shuffle_is_written_too(uri: str):
    table = open_table(uri)
    rows = RangeRows(ROWS)
    plain = Permutation.of_order(table, rows, Order(ROWS, shuffle=False))
    assert rows_of(plain) == list(range(ROWS))
    assert plain.identity["seed"] is None
    dealt = Permutation.of_order(table, rows, Order(ROWS, num_splits=3, shuffle=False))
    assert rows_of(dealt)[:6] == [0, 335, 669, 1, 336, 670]
    assert dealt.num_splits == 3
    with pytest.raises(ArgumentError, match="one of 5 rows, the list has 1003"):
        Permutation.of_order(table, rows, Order(5))


def test_nothing_is_computed_before_rows_are_asked_for(uri: str):
    table = open_table(uri)
    p = Permutation.of_order(table, RangeRows(10**9), Order(10**9, 7, 0, 256, 32, 8))
    assert len(p) == 10**9
    assert p.rows.offsets(np.array([0, 10**9 - 1])).shape == (2,)
    assert len(json.dumps(p.identity)) < 1000
    assert len(pickle.dumps(p)) < 3000


def test_digests_tell_lists_apart(uri: str):
    def digest(**arguments: int) -> str:
        return str(PermutationBuilder(uri).shuffle(**arguments).execute().identity["digest"])

    found = [
        PermutationBuilder(uri).execute().identity["digest"],
        PermutationBuilder(uri).filter("id < 9").execute().identity["digest"],
        PermutationBuilder(uri).split_random(fixed=2).execute()["0"].rows.digest,
        PermutationBuilder(uri).split_random(fixed=2).execute()["1"].rows.digest,
        PermutationBuilder(uri).split_random(fixed=2, seed=1).execute()["0"].rows.digest,
        PermutationBuilder(uri).split_sequential(fixed=2).execute()["0"].rows.digest,
        PermutationBuilder(uri).split_hash("id", [1, 1]).execute()["0"].rows.digest,
        PermutationBuilder(uri).split_calculated("id % 2").execute()["0"].rows.digest,
        digest(seed=0),
        digest(seed=1),
        digest(epoch=1),
        digest(num_splits=2),
        digest(clump_size=2),
        digest(clump_size=2, window=3),
    ]
    assert len(set(found)) == len(found)
    assert digest(seed=1) == digest(seed=1, clump_size=1, window=5)


# ---- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "got none"),
        ({"ratios": [0.5], "fixed": 2}, "got ratios and fixed"),
        ({"ratios": [0.9, 0.2]}, "sum to 1.1"),
        ({"ratios": [0.9, float("nan")]}, "finite number, got nan"),
        ({"ratios": [float("inf")]}, "finite number, got inf"),
        ({"ratios": [1.5, -0.5]}, "over 0, got -0.5"),
        ({"ratios": ["half"]}, "finite number, got 'half'"),
        ({"ratios": []}, "1 to 65535 parts, got 0"),
        ({"counts": [1000, 4]}, "counts sum to 1004, but there are only 1003 rows"),
        ({"counts": [1, 0]}, "at least 1, got 0"),
        ({"counts": [1.5]}, "must be an integer of at least 1, got 1.5"),
        ({"fixed": 0}, "at least 1, got 0"),
        ({"fixed": True}, "must be an integer"),
        ({"fixed": 1004}, "fixed is 1004, but there are only 1003 rows"),
        ({"fixed": 2, "names": ["a"]}, "2 parts but 1 names: a"),
        ({"fixed": 2, "names": ["a", "a"]}, "two parts have the name 'a'"),
        ({"fixed": 2, "names": "ab"}, "list of names, got 'ab'"),
        ({"fixed": 2, "names": ["a", ""]}, "must be text, got ''"),
        ({"fixed": 2, "seed": -1}, "seed must be at least 0, got -1"),
        ({"fixed": 2, "seed": 2**32}, r"seed must be from 0 to 2\*\*32 - 1"),
        ({"fixed": 2, "clump_size": 0}, "clump_size must be at least 1"),
    ],
)
def test_bad_parts(uri: str, arguments: dict[str, Any], text: str):
    with pytest.raises(ArgumentError, match=text):
        PermutationBuilder(uri).split_random(**arguments).execute()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**32}, r"seed must be from 0 to 2\*\*32 - 1"),
        ({"epoch": 2**32}, r"epoch must be from 0 to 2\*\*32 - 1"),
        ({"clump_size": 0}, "clump_size must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"num_splits": 0}, "num_splits must be at least 1"),
        ({"num_splits": 1004}, "num_splits is 1004, but there are only 1003 rows"),
        ({"seed": "x"}, "seed must be an integer of at least 0, got 'x'"),
    ],
)
def test_bad_shuffles(uri: str, arguments: dict[str, Any], text: str):
    with pytest.raises(ArgumentError, match=text):
        PermutationBuilder(uri).shuffle(**arguments).execute()


def test_bad_calls(uri: str):
    builder = PermutationBuilder(uri).split_random(fixed=2).shuffle().filter("id < 100")
    with pytest.raises(ArgumentError, match="split_hash after split_random"):
        builder.split_hash("id", [1])
    with pytest.raises(ArgumentError, match="shuffle is called twice"):
        builder.shuffle()
    with pytest.raises(ArgumentError, match="with AND"):
        builder.filter("id > 3")
    with pytest.raises(ArgumentError, match="part '0' has only 50 rows"):
        PermutationBuilder(uri).filter("id < 100").split_random(fixed=2).shuffle(
            num_splits=51
        ).execute()
    with pytest.raises(ColumnError, match="no column 'nope'"):
        PermutationBuilder(uri).split_hash(["nope"], [1])
    with pytest.raises(ColumnError, match="cannot hash the column 'vector'"):
        PermutationBuilder(uri).split_hash(["vector"], [1])
    with pytest.raises(ArgumentError, match="a weight must be at least 1, got 0"):
        PermutationBuilder(uri).split_hash("id", [1, 0])
    with pytest.raises(ArgumentError, match="discard_weight must be at least 0"):
        PermutationBuilder(uri).split_hash("id", [1], discard_weight=-1)
    with pytest.raises(FilterError, match="its columns are: id, label"):
        PermutationBuilder(uri).filter("nope = 1").execute()
    with pytest.raises(EmptyError, match="keeps none"):
        PermutationBuilder(uri).filter("id < 0").execute()
    with pytest.raises(EmptyError, match="split_calculated leaves none"):
        PermutationBuilder(uri).filter("id = 0").split_calculated("kind", names=["a"]).execute()
    with pytest.raises(VersionError, match="version 99"):
        PermutationBuilder(uri, version=99)


def test_parts_must_be_chosen(uri: str):
    p = PermutationBuilder(uri).split_random(fixed=2, names=["train", "val"]).execute()
    with pytest.raises(ArgumentError, match=r"parts 'train', 'val': choose one, .*\['train'\]"):
        _ = p.rows
    with pytest.raises(ArgumentError, match="no part 'test'; the parts are: 'train', 'val'"):
        _ = p["test"]
    assert rows_of(p["val"]["val"]) == rows_of(p["val"])
    whole = PermutationBuilder(uri).execute()
    assert whole.parts == []
    with pytest.raises(ArgumentError, match="one list without parts"):
        _ = whole["train"]
    many = PermutationBuilder(uri).split_random(fixed=100).execute()
    assert repr(many) == "Permutation(1003 rows, parts: 0 10, 1 10, 2 10, 3 10 and 96 more)"


# ---- saved ----------------------------------------------------------------------------------


@pytest.fixture(params=["kept in memory", "read where it lies"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "read where it lies":
        monkeypatch.setattr(lists, "_CACHED_ROWS", 0)
        monkeypatch.setattr(lists, "_SCANNED_ROWS", 100)


@pytest.mark.parametrize("place", ["path", "database"])
def test_saved_and_opened(uri: str, tmp_path: Path, place: str, reading: None):
    builder = PermutationBuilder(uri).filter("label < 7").split_random(ratios=[0.8, 0.2], seed=1)
    p = builder.shuffle(seed=3, clump_size=4, num_splits=8).execute()
    if place == "path":
        saved = p.save(tmp_path / "p.lance")
    else:
        db = lancedb.connect(tmp_path)
        saved = p.save(db, name="mine")
        assert "mine" in db.list_tables().tables
        opened = Permutation.open(db.open_table("mine"))
        assert opened.identity == p.identity
    opened = Permutation.open(saved)
    assert opened.identity == p.identity
    assert repr(opened) == repr(p)
    assert parts_of(opened) == parts_of(p)
    assert opened.to_arrow().equals(p.to_arrow(), check_metadata=True)
    assert opened["1"].num_splits == 8
    wanted = np.random.default_rng(0).integers(0, len(p["1"]), 300)  # any order, with repeats
    rows = pickle.loads(pickle.dumps(opened["1"])).rows
    assert rows.offsets(wanted).tolist() == p["1"].rows.offsets(wanted).tolist()
    assert rows.offsets(np.empty(0, np.int64)).tolist() == []
    one = Permutation.open(opened["1"].save(tmp_path / "one.lance"))
    assert one.rows.digest == p["1"].rows.digest
    assert rows_of(one) == rows_of(p["1"])
    assert as_permutation(saved, open_table(uri))[0].identity == p.identity


def test_the_saved_table(uri: str, tmp_path: Path):
    p = PermutationBuilder(uri).split_sequential(counts=[2, 1], names=["a", "b"]).execute()
    stored = lance.dataset(p.save(tmp_path / "p.lance"))
    assert stored.to_table().to_pydict() == {"row_offset": [0, 1, 2], "part": ["a", "a", "b"]}
    identity = json.loads(stored.schema.metadata[METADATA_KEY])
    assert identity == p.identity
    assert uri not in json.dumps(identity)
    assert [(x["name"], x["start"], x["count"]) for x in identity["parts"]] == [
        ("a", 0, 2),
        ("b", 2, 1),
    ]
    assert p.to_polars()["row_offset"].to_list() == [0, 1, 2]
    plain = lance.dataset(PermutationBuilder(uri).execute().save(tmp_path / "q.lance"))
    assert plain.schema.names == ["row_offset"]


def test_saving_does_not_replace_unless_told(uri: str, tmp_path: Path):
    p = PermutationBuilder(uri).execute()
    db = lancedb.connect(tmp_path)
    for target in (tmp_path / "p.lance", db):
        p.save(target)
        with pytest.raises(ArgumentError, match="overwrite=True"):
            p.save(target)
        shuffled = PermutationBuilder(uri).shuffle(seed=1).execute()
        assert Permutation.open(shuffled.save(target, overwrite=True)).identity == shuffled.identity
    for target in ("memory://x", "db://x", lancedb.connect("memory://")):
        with pytest.raises(ArgumentError, match="cannot be saved at"):
            p.save(target)
    with pytest.raises(ArgumentError, match="a LanceDB connection, got int"):
        p.save(3)
    with pytest.raises(TableError, match="cannot save the permutation at"):
        p.save("nowhere://at/all")


def test_saving_replaces_permutations_only(tmp_path: Path):
    db = lancedb.connect(tmp_path)
    rows = pa.table({"row_offset": range(9), "word": ["x"] * 9})
    data = lance.write_dataset(rows, tmp_path / "data.lance")
    other = lance.write_dataset(rows, tmp_path / "other.lance")
    p = PermutationBuilder(data).shuffle().execute()
    extended = p.to_arrow().append_column("word", rows["word"])  # keeps the metadata
    kept = lance.write_dataset(extended, tmp_path / "kept.lance")
    for overwrite in (False, True):
        for target, name in ((data.uri, ""), (db, "data")):
            with pytest.raises(ArgumentError, match=r"whose rows the permutation lists.* another"):
                p.save(target, name, overwrite=overwrite)
        for target, name in ((other.uri, ""), (db, "other"), (kept.uri, ""), (db, "kept")):
            with pytest.raises(ArgumentError, match=r"word, is no saved permutation") as caught:
                p.save(target, name, overwrite=overwrite)
            assert "other" in str(caught.value) or "kept" in str(caught.value)
            assert open_table(data).identity in str(caught.value)
    data.insert(rows)  # the table at a later version is still the source
    for target in (data.uri, db):
        with pytest.raises(ArgumentError, match="whose rows the permutation lists"):
            p.save(target, "data", overwrite=True)
    assert [lance.dataset(x.uri).version for x in (data, other, kept)] == [2, 1, 1]


def test_a_permutation_of_a_permutation_does_not_replace_it(uri: str, tmp_path: Path):
    saved = PermutationBuilder(uri).execute().save(tmp_path / "p.lance")
    listed = PermutationBuilder(saved).shuffle().execute()
    with pytest.raises(ArgumentError, match="whose rows the permutation lists"):
        listed.save(saved, overwrite=True)
    again = Permutation.open(saved)
    assert Permutation.open(again.save(saved, overwrite=True)).identity == again.identity


def test_saving_where_something_else_is(uri: str, tmp_path: Path):
    p = PermutationBuilder(uri).execute()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for overwrite in (False, True):
        with pytest.raises(ArgumentError, match=r"there is a file at .*file"):
            p.save(tmp_path / "file", overwrite=overwrite)
        with pytest.raises(ArgumentError, match=r"permutation\.lance"):
            p.save(tmp_path, overwrite=overwrite)
    assert len(Permutation.open(p.save(tmp_path / "empty"))) == len(p)
    for manifest in (tmp_path / "empty" / "_versions").iterdir():
        manifest.write_bytes(b"damaged")
    for target in (tmp_path / "empty", "nowhere://at/all"):
        with pytest.raises(TableError, match="cannot save the permutation at"):
            p.save(target, overwrite=True)


def test_an_error_while_saving_is_the_first_one(uri: str, tmp_path: Path):
    class Broken(RangeRows):
        def offsets(self, positions: Any) -> Any:  # noqa: ARG002
            raise FilterError("the filter keeps other rows now")

    p = Permutation.of_order(open_table(uri), Broken(9), Order(9))
    with pytest.raises(FilterError, match="keeps other rows now"):
        p.save(tmp_path / "p.lance")
    with pytest.raises(FilterError, match="keeps other rows now"):
        p.save(lancedb.connect(tmp_path))


def test_what_cannot_be_opened(uri: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match="is no saved permutation"):
        Permutation.open(uri)
    with pytest.raises(TableError, match="no such file"):
        Permutation.open(tmp_path / "nothing.lance")
    path = PermutationBuilder(uri).execute().save(tmp_path / "p.lance")
    lance.dataset(path).delete("row_offset = 7")
    with pytest.raises(StateError, match="saved with 1003 rows and has 1002"):
        Permutation.open(path)
    for value, text in ((b"{", "damaged"), (b'{"format": 1}', "damaged")):
        broken = pa.table({"row_offset": [1]}).replace_schema_metadata({METADATA_KEY: value})
        with pytest.raises(StateError, match=text):
            Permutation.open(lance.write_dataset(broken, path, mode="overwrite").uri)
    later = pa.table({"row_offset": [1]}).replace_schema_metadata(
        {METADATA_KEY: b'{"format": 2, "count": 1, "parts": []}'}
    )
    with pytest.raises(StateError, match="format 2, this Destrier reads format 1"):
        Permutation.open(lance.write_dataset(later, path, mode="overwrite").uri)


def test_a_permutation_belongs_to_its_rows(uri: str, tmp_path: Path):
    path = str(tmp_path / "base.lance")
    lance.write_dataset(lance.dataset(uri).to_table(), path)
    first = open_table(path)
    saved = PermutationBuilder(path).shuffle().execute().save(tmp_path / "p.lance")
    lance.dataset(path).add_columns({"twice": "id * 2"})
    p, table = as_permutation(saved, open_table(path))  # only a column was added
    assert table.version == first.version + 1
    assert p.version == first.version
    lance.write_dataset(lance.dataset(path).to_table(limit=5), path, mode="append")
    with pytest.raises(StateError, match=f"{first.identity} at version 1, .*version=1") as caught:
        as_permutation(p, open_table(path))
    assert open_table(path).identity in str(caught.value)
    assert as_permutation(p, open_table(path, version=1))[1].version == 1
    with pytest.raises(StateError, match="make the permutation again"):
        as_permutation(saved, open_table(uri))


def test_the_selection_is_found_again_in_another_process(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    p = PermutationBuilder(uri).filter("label < 7").shuffle().execute()
    data = pickle.dumps(p)
    assert len(data) < 3000
    again = pickle.loads(data)
    assert rows_of(again) == rows_of(p)
    moved = pickle.loads(data)
    moved.rows.base.digest = "another"
    with pytest.raises(StateError, match="must give the same rows each time"):
        rows_of(moved)


def test_memory_of_a_save_does_not_grow_with_the_rows(uri: str, tmp_path: Path):
    script = """
import resource, sys
import numpy as np
from destrier.order import Order
from destrier.permutation import Permutation
from destrier.selection import RangeRows
from destrier.table import open_table

def save(rows, name):
    order = Order(rows, 7, 0, 64, 16, 8)
    p = Permutation.of_order(open_table(sys.argv[1]), RangeRows(rows), order)
    path = p.save(sys.argv[2] + name)
    assert len(Permutation.open(path)) == rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small = save(600_000, "/small")
print((save(6_000_000, "/large") - small) // 1024)
"""
    found = subprocess.run(
        [sys.executable, "-c", script, uri, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    assert (
        int(found.stdout) < 90
    )  # MB; 6 million offsets are 46 in memory, and as much again as a table


# ---- lists that others made -----------------------------------------------------------------

CURRICULUM = [5, 1, 1002, 1, 0]


@pytest.mark.parametrize(
    "source",
    [
        pa.table({"row_offset": CURRICULUM}),
        pa.table({"row_offset": CURRICULUM, "score": CURRICULUM}),
        pa.table({"anything": pa.array(CURRICULUM, pa.uint16()), "why": list("abcde")}),
        pa.record_batch({"row_offset": pa.array(CURRICULUM, pa.int32())}),
        pa.table({"row_offset": CURRICULUM}).to_reader(),
        pl.DataFrame({"row_offset": CURRICULUM}),
        pl.DataFrame({"n": CURRICULUM}, schema={"n": pl.UInt64}),
    ],
    ids=["arrow", "two", "one integer", "batch", "reader", "polars", "unsigned"],
)
def test_lists_in_memory(uri: str, source: Any):
    p, table = as_permutation(source, open_table(uri))
    assert rows_of(p) == CURRICULUM
    assert p.num_splits == 1
    assert p.rows.digest == OffsetRows(np.array(CURRICULUM)).digest
    assert table.version == p.version


@pytest.mark.parametrize("kept", [True, False])
def test_lists_in_tables(uri: str, tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch):
    if not kept:
        monkeypatch.setattr("destrier.foreign._KEPT_ROWS", 1)
    data = pa.table({"row_offset": CURRICULUM})
    dataset = lance.write_dataset(data, str(tmp_path / "list.lance"))
    stored = lancedb.connect(tmp_path / "db").create_table("list", data)
    for source in (dataset, dataset.uri, tmp_path / "list.lance", stored):
        p, _ = as_permutation(source, open_table(uri))
        assert rows_of(p) == CURRICULUM
        assert p.rows.digest == OffsetRows(np.array(CURRICULUM)).digest
    again = Permutation.open(p.save(tmp_path / "p.lance"))
    assert again.identity == p.identity


def test_lists_with_parts(uri: str, tmp_path: Path):
    data = pa.table({"row_offset": [9, 8, 7, 8], "part": ["b", "a", "b", "b"]})
    stored = lance.write_dataset(data, str(tmp_path / "list.lance"))
    for source in (data, stored, pl.from_arrow(data)):
        p, _ = as_permutation(source, open_table(uri))
        assert parts_of(p) == {"b": [9, 7, 8], "a": [8]}
    with pytest.raises(ArgumentError, match="part is null at row 1"):
        as_permutation(data.set_column(1, "part", pa.array(["b", None, "b", "b"])), open_table(uri))


def test_an_arrow_table_of_ours(uri: str, tmp_path: Path):
    p = PermutationBuilder(uri).split_random(fixed=2).shuffle(num_splits=4).execute()
    again, _ = as_permutation(p.to_arrow(), open_table(uri))
    assert parts_of(again) == parts_of(p)
    assert again.num_splits == 4
    fewer, _ = as_permutation(p.to_arrow().slice(0, 10), open_table(uri))
    assert fewer.num_splits == 1
    other = lance.write_dataset(lance.dataset(uri).to_table(), str(tmp_path / "other.lance"))
    with pytest.raises(StateError, match="was made for table"):
        as_permutation(p.to_arrow(), open_table(other))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("column", "error", "text"),
    [
        ([4, None, 2], ArgumentError, "at row 1 of the permutation is null; .* has 1003 rows"),
        ([4, 2, -1], ArgumentError, "row offset -1 at row 2 .* has 1003 rows"),
        ([1003, 2, -1], ArgumentError, "row offset 1003 at row 0"),
        (pa.array([1, 2**63], pa.uint64()), ArgumentError, f"row offset {2**63} at row 1"),
        ([0.5], ColumnError, "must hold integers, it is double"),
        ([True], ColumnError, "must hold integers, it is bool"),
        (pa.array([], pa.int64()), EmptyError, "lists no rows"),
    ],
)
def test_bad_lists(
    uri: str, tmp_path: Path, stored: bool, column: Any, error: type[Exception], text: str
):
    source = pa.table({"row_offset": column})
    if stored:
        source = lance.write_dataset(source, str(tmp_path / "list.lance"))
    with pytest.raises(error, match=text):
        as_permutation(source, open_table(uri))


def test_no_list_at_all(uri: str):
    table = open_table(uri)
    with pytest.raises(ColumnError, match=r"a \(int64\), b \(int64\)"):
        as_permutation(pa.table({"a": [1], "b": [1]}), table)
    with pytest.raises(ColumnError, match=r"a \(string\)"):
        as_permutation(pa.table({"a": ["1"]}), table)
    for rows in ([1, 2], np.arange(2), pa.array([1, 2]), pa.chunked_array([[1]]), pl.Series([1])):
        shown = rf'got {type(rows).__name__}; .* pa\.table\({{"row_offset": rows}}\)'
        with pytest.raises(ArgumentError, match=shown):
            as_permutation(rows, table)


# ---- LanceDB's own builder ------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Any:
    """A table whose row ids are not its offsets."""
    table = lancedb.connect(tmp_path / "db").create_table("t", pa.table({"x": range(1003)}))
    table.add(pa.table({"x": range(1003, 1100)}))
    table.delete("x % 7 = 3")
    return table


def lanes_of(table: Any, data: pa.Table) -> list[list[int]]:
    """For each lane, the values of x that LanceDB means, by its own row ids."""
    found = table.to_lance().scanner(columns=["x"], with_row_id=True).to_table()
    by_id = dict(zip(found["_rowid"].to_pylist(), found["x"].to_pylist(), strict=True))
    lanes: list[list[int]] = [[] for _ in range(max(data["split_id"].to_pylist()) + 1)]
    for row, lane in zip(data["row_id"].to_pylist(), data["split_id"].to_pylist(), strict=True):
        lanes[lane].append(by_id[row])
    return lanes


def test_lancedb_lanes(base: Any):
    made = permutation_builder(base).split_random(fixed=4, seed=3).shuffle(seed=1).execute()
    p, table = as_permutation(made, open_table(base))
    assert p.num_splits == 4
    assert table.version == p.version == base.version
    lanes = lanes_of(base, made.to_arrow())
    expected = [lanes[g % 4][g // 4] for g in range(4 * min(map(len, lanes)))]
    values = table.dataset.take(rows_of(p), columns=["x"])["x"].to_pylist()
    assert values == expected
    arrow, _ = as_permutation(made.to_arrow(), open_table(base))
    assert arrow.identity == p.identity


def test_lancedb_lanes_of_unequal_length_are_cut_to_the_shortest(base: Any):
    made = permutation_builder(base).split_sequential(counts=[10, 7, 9]).execute()
    p, table = as_permutation(made, open_table(base))
    lanes = lanes_of(base, made.to_arrow())
    assert [len(lane) for lane in lanes] == [10, 7, 9]
    values = table.dataset.take(rows_of(p), columns=["x"])["x"].to_pylist()
    assert values == [lanes[g % 3][g // 3] for g in range(21)]


def test_lancedb_names_are_parts(base: Any):
    builder = permutation_builder(base).filter("x > 5")
    made = builder.split_random(ratios=[0.75, 0.25], split_names=["train", "val"]).execute()
    p, table = as_permutation(made, open_table(base))
    assert p.parts == ["train", "val"]
    assert p.num_splits == 1
    for name, lane in zip(p.parts, lanes_of(base, made.to_arrow()), strict=True):
        assert table.dataset.take(rows_of(p[name]), columns=["x"])["x"].to_pylist() == lane


def test_lancedb_base_version_is_pinned(base: Any):
    made = permutation_builder(base).shuffle(seed=1).execute()
    version = base.version
    before = lanes_of(base, made.to_arrow())[0]
    base.delete("x = 4")
    base.add(pa.table({"x": [5000]}))
    p, table = as_permutation(made, open_table(base))
    assert table.version == p.version == version != base.version
    assert table.dataset.take(rows_of(p), columns=["x"])["x"].to_pylist() == before
    base.checkout(version)
    base.restore()
    base.to_lance().add_columns({"y": "x + 1"})
    kept = made.to_arrow().replace_schema_metadata({b"base_version": str(version).encode()})
    assert as_permutation(kept, open_table(base.uri))[1].version > version  # the same rows


def test_lancedb_bad_tables(base: Any, tmp_path: Path):
    data = permutation_builder(base).split_random(fixed=3).execute().to_arrow()
    table = open_table(base)
    row_ids = data["row_id"].to_pylist()
    row_ids[2] = 3  # a deleted row
    bad = data.set_column(0, "row_id", pa.array(row_ids, pa.uint64()))
    with pytest.raises(ArgumentError, match="row id 3 at row 2 of the permutation is not in"):
        as_permutation(bad, table)
    row_ids[1] = None
    with pytest.raises(ArgumentError, match="row_id is null at row 1"):
        as_permutation(data.set_column(0, "row_id", pa.array(row_ids, pa.uint64())), table)
    with pytest.raises(EmptyError, match="split_id 0 of the permutation has no rows"):
        as_permutation(data.filter(pa.compute.not_equal(data["split_id"], 0)), table)
    with pytest.raises(EmptyError, match="lists no rows"):
        as_permutation(data.slice(0, 0), table)
    with pytest.raises(ArgumentError, match="split_id is -1 at row 0"):
        as_permutation(pa.table({"row_id": [0], "split_id": [-1]}), table)
    gone = data.replace_schema_metadata({b"base_version": b"77"})
    with pytest.raises(VersionError, match="version 77"):
        as_permutation(gone, table)
    branch = data.replace_schema_metadata({b"base_version": b"1", b"base_branch": b"side"})
    with pytest.raises(StateError, match="branch 'side'"):
        as_permutation(branch, table)
    stored = lancedb.connect(tmp_path / "db").create_table("perm", data)
    assert as_permutation(stored, table)[0].num_splits == 3
