"""split, subset, subsample and concat: which rows they give."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tables
from destrier import (
    ArgumentError,
    ColumnError,
    EmptyError,
    FilterError,
    MissingRowError,
    Permutation,
    StateError,
    View,
    concat,
    split,
    subsample,
    subset,
)

quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def offsets(view: View) -> list[int]:
    found: list[int] = view.rows.offsets(np.arange(len(view))).tolist()
    return found


def table_of(path: Any, **columns: Any) -> str:
    lance.write_dataset(pa.table(columns), str(path), mode="overwrite")
    return str(path)


# ---- by row -----------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, (1 << 32) - 1),
    cut=st.integers(1, tables.ROWS),
)
@quick
def test_parts_cover_the_rows_and_share_none(
    table_path: str, weights: list[int], seed: int, cut: int
) -> None:
    source = View(table_path)[:cut]
    total = sum(weights)
    shares = [Fraction(weight, total) for weight in weights]
    parts = split(source, shares, seed=seed)
    listed = [offsets(part) for part in parts]
    assert sorted(o for part in listed for o in part) == list(range(cut))
    for part, share in zip(listed, shares, strict=True):
        assert part == sorted(part), "in the order of the table"
        assert abs(len(part) - share * cut) < 1
    # By largest remainder: who is rounded up had no less left than who is rounded down.
    left = [share * cut - int(share * cut) for share in shares]
    up = [f for f, p, s in zip(left, listed, shares, strict=True) if len(p) > int(s * cut)]
    down = [f for f, p, s in zip(left, listed, shares, strict=True) if len(p) == int(s * cut)]
    assert not up or not down or min(up) >= max(down)


def test_sizes_are_what_the_decimals_say(table_path: str) -> None:
    view = View(table_path)[:1000]
    assert [len(p) for p in split(view, [0.7, 0.2, 0.1])] == [700, 200, 100]
    assert [len(p) for p in split(view, [1 / 3] * 3)] == [334, 333, 333]
    assert [len(p) for p in split(view, [1.0])] == [1000]
    assert [len(p) for p in split(view, np.array([0.5, 0.5]).tolist())] == [500, 500]
    some = split(view, [np.int64(600), 300, 0])
    assert [len(p) for p in some] == [600, 300, 0]
    assert len({o for part in some for o in offsets(part)}) == 900, "the rest is in no part"


def test_parts_depend_on_the_seed_alone(table_path: str) -> None:
    first = [offsets(p) for p in split(table_path, [0.5, 0.5], seed=1)]
    assert first == [offsets(p) for p in split(table_path, [0.5, 0.5], seed=1)]
    assert first != [offsets(p) for p in split(table_path, [0.5, 0.5], seed=2)]
    # What is drawn is a promise: the same on every machine and in every version.
    small = View(table_path)[:12]
    assert [offsets(p) for p in split(small, [6, 3, 3], seed=5)] == [
        [2, 3, 5, 8, 9, 11],
        [1, 4, 6],
        [0, 7, 10],
    ]
    assert offsets(subsample(small, 0.5, seed=5)) == [2, 3, 4, 5, 8, 9]


def test_every_row_is_as_likely_as_any_other(table_path: str) -> None:
    view = View(table_path)[:20]
    seeds = 800
    came = np.zeros(20)
    for seed in range(seeds):
        came[offsets(split(view, [5, 15], seed=seed)[0])] += 1
    chi_square = ((came - seeds / 4) ** 2 / (seeds / 4 * 3 / 4)).sum() * 19 / 20
    assert 7 < chi_square < 37  # of 19 degrees of freedom, 99 % of the time


def test_names_make_a_dict(table_path: str) -> None:
    parts = split(table_path, [0.8, 0.2], names=["train", "val"])
    assert list(parts) == ["train", "val"]
    assert offsets(parts["val"]) == offsets(split(table_path, [0.8, 0.2])[1])


def test_splits_of_splits(table_path: str) -> None:
    train, rest = split(table_path, [0.8, 0.2], seed=3)
    val, test = split(rest, [0.5, 0.5], seed=3)
    joined = sorted(offsets(train) + offsets(val) + offsets(test))
    assert joined == list(range(tables.ROWS))


def test_shares_that_cannot_be(table_path: str) -> None:
    cases: list[tuple[Any, str]] = [
        ([0.8, 0.1], r"0\.8, 0\.1 sum to 0\.9, not to 1"),
        ([0.8, 0.3], r"sum to 1\.1"),
        ([900, 104], r"900, 104 sum to 1004, .* only 1003 rows"),
        ([0.5, 1], "all fractions or all counts"),
        ([1.5, -0.5], "not be negative"),
        ([-1, 5], "at least 0 rows, got -1"),
        ([float("nan"), 1.0], "finite"),
        (["a", "b"], "finite"),
        ([True, False], "True"),
        ([], "shares must be a list"),
        ("0.5", "shares must be a list"),
        (0.8, "shares must be a list"),
    ]
    for shares, message in cases:
        with pytest.raises(ArgumentError, match=message):
            split(table_path, shares)
    for names in (["a"], ["a", "a"], "ab", ["a", ""], ["a", 3]):
        with pytest.raises(ArgumentError, match="names"):
            split(table_path, [0.5, 0.5], names=names)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="seed must be from 0"):
        split(table_path, [0.5, 0.5], seed=-1)
    with pytest.raises(ArgumentError, match=r"group='label' and hash='id'"):
        split(table_path, [0.5, 0.5], group="label", hash="id")


def test_copies_of_a_row_are_not_split_by_row(table_path: str) -> None:
    twice = subsample(table_path, 1.5)
    with pytest.raises(ArgumentError, match=r"has 1505 rows, of which only 1003 are different"):
        split(twice, [0.5, 0.5])
    with pytest.raises(ArgumentError, match="3 rows, of which only 2"):
        split(subset(table_path, [1, 0, 1]), [0.5, 0.5])
    train, val = split(twice, [0.5, 0.5], hash="id")
    assert not set(offsets(train)) & set(offsets(val))
    assert len(train) + len(val) == 1505
    train, val = split(twice, [0.5, 0.5], group="id")
    assert not set(offsets(train)) & set(offsets(val))
    assert abs(len(train) - len(val)) <= 2
    halves = split(table_path, [0.5, 0.5])
    whole = concat(halves)
    assert sorted(o for p in split(whole, [0.1, 0.9]) for o in offsets(p)) == sorted(offsets(whole))


# ---- by group ---------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    weights=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@quick
def test_groups_never_straddle(
    tmp_path_factory: Any, sizes: list[int], weights: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    uri = table_of(tmp_path_factory.mktemp("t") / "t.lance", who=[f"p{g}" for g in groups])
    n, total = len(groups), sum(weights)
    shares = [Fraction(weight, total) for weight in weights]
    largest = max(len(part) for part in split(uri, shares))
    if max(sizes) > largest:
        with pytest.raises(ArgumentError, match=f"has {max(sizes)} rows, .* to have {largest}"):
            split(uri, shares, group="who", seed=seed)
        return
    try:
        parts = split(uri, shares, group="who", seed=seed)
    except ArgumentError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:  # a part would be empty, because its share is less than the groups that are left
        assert "gets none of the" in refused
        assert len(sizes) < 4 * total
        return
    listed = [offsets(part) for part in parts]
    assert sorted(o for part in listed for o in part) == list(range(n))
    mine = [set(groups[part].tolist()) for part in listed]
    assert sum(len(m) for m in mine) == len(sizes), "a group is in one part"
    # No part is over its share by more than one group.
    for part, share in zip(listed, shares, strict=True):
        assert len(part) < share * n + max(sizes) + 1


def test_group_sizes_are_exact_where_groups_allow(tmp_path: Any) -> None:
    groups = np.repeat(np.arange(200), 5)
    uri = table_of(tmp_path / "t.lance", who=groups)
    parts = split(uri, [0.8, 0.1, 0.1], group="who")
    assert [len(part) for part in parts] == [800, 100, 100]
    assert [offsets(p) for p in parts] != [offsets(p) for p in split(uri, [0.8, 0.1, 0.1], seed=1)]
    some = split(uri, [500, 250], group="who", names=["a", "b"])
    assert {name: len(part) for name, part in some.items()} == {"a": 500, "b": 250}
    by_expression = split(uri, [0.5, 0.5], group="who % 20")
    held = [{o // 5 % 20 for o in offsets(part)} for part in by_expression]
    assert not held[0] & held[1]


def test_large_groups_are_in_every_part(tmp_path: Any) -> None:
    """A part of the small groups alone would say nothing of the others."""
    sizes = np.concatenate([np.arange(50, 90), np.full(400, 5)])
    uri = table_of(tmp_path / "t.lance", who=np.repeat(np.arange(len(sizes)), sizes))
    got = []
    for seed in range(40):
        train, val = split(uri, [0.7, 0.3], group="who", seed=seed)
        assert abs(len(train) - 0.7 * sizes.sum()) <= 5
        got.append(len({row["who"] for row in val if row["who"] < 40}))
    assert 9 < np.mean(got) < 15, "of 40 large groups 0.3"
    assert len(set(got)) > 2


def test_groups_that_cannot_be_split(tmp_path: Any) -> None:
    uri = table_of(tmp_path / "t.lance", who=["big"] * 90 + ["a", "b"] * 5, maybe=[None] + [1] * 99)
    with pytest.raises(ArgumentError, match=r"who='big' has 90 rows, but the largest .* have 80"):
        split(uri, [0.8, 0.1, 0.1], group="who")
    with pytest.raises(ArgumentError, match=r"part val is to have 1 rows.*smallest has 5 rows"):
        split(uri, [0.99, 0.01], group="who", names=["train", "val"])
    with pytest.raises(ArgumentError, match=r"group='maybe' is null for row 0.*IS NOT NULL"):
        split(uri, [0.5, 0.5], group="maybe")
    assert len(split(subset(uri, "maybe IS NOT NULL"), [1.0], group="maybe")[0]) == 99
    with pytest.raises(ColumnError, match="its columns are: who, maybe"):
        split(uri, [0.5, 0.5], group="patient")
    with pytest.raises(ArgumentError, match="must be a column"):
        split(uri, [0.5, 0.5], group=3)  # type: ignore[call-overload]


def test_groups_of_a_list_cannot_be(table_path: str) -> None:
    with pytest.raises(ColumnError, match=r"group='tokens' is list<.*>, but must be"):
        split(table_path, [0.5, 0.5], group="tokens")


# ---- by hash ----------------------------------------------------------------------------------


def test_rows_keep_their_part_by_hash(tmp_path: Any) -> None:
    ids = np.arange(3000)
    uri = table_of(tmp_path / "t.lance", id=ids)
    parts = split(uri, [0.8, 0.1, 0.1], hash="id", seed=2)
    listed = [offsets(part) for part in parts]
    assert sorted(o for part in listed for o in part) == ids.tolist()
    for part, share in zip(listed, [0.8, 0.1, 0.1], strict=True):
        assert abs(len(part) - 3000 * share) < 80
    where = {i: k for k, part in enumerate(listed) for i in part}
    more = np.random.default_rng(0).permutation(5000)
    other = table_of(tmp_path / "more.lance", id=more)
    for k, part in enumerate(split(other, [0.8, 0.1, 0.1], hash="id", seed=2)):
        assert all(where.get(i, k) == k for i in more[offsets(part)].tolist())
    assert listed != [offsets(p) for p in split(uri, [0.8, 0.1, 0.1], hash="id", seed=3)]
    assert len(split(uri, [0.5, 0.5], hash="id % 2", seed=0)[0]) in (0, 1500, 3000)


def test_hashes_have_no_counts(table_path: str) -> None:
    with pytest.raises(ArgumentError, match="must be fractions, got the counts 500, 503"):
        split(table_path, [500, 503], hash="id")
    with pytest.raises(ArgumentError, match="hash='maybe' is null for row"):
        split(table_path, [0.5, 0.5], hash="maybe")


# ---- subset -----------------------------------------------------------------------------------


def test_a_subset_is_what_it_lists(table_path: str, table_ids: Any) -> None:
    view = View(table_path, columns=["id"])
    for rows in (
        [5, 3, 3, 900],
        (7,),
        np.array([1, 2], np.uint8),
        torch.tensor([4, 4]),
        range(10, 0, -3),
        [],
    ):
        got = [row["id"] for row in subset(view, rows)]  # type: ignore[arg-type]
        assert got == table_ids[[int(i) for i in rows]].tolist()
    assert offsets(subset(view, slice(3, 30, 9))) == [3, 12, 21]
    few = subset(view, [9, 8, 7])
    assert offsets(subset(few, [2, 0])) == [7, 9]
    kept = subset(few, f"id = {table_ids[8]} OR id = {table_ids[1]}")
    assert offsets(kept) == [8]


def test_a_filter_keeps_repeats_and_order(table_path: str, table_ids: Any) -> None:
    rows = [10, 500, 10, 2, 999, 2]
    view = subset(subset(table_path, rows), "label < 6")
    assert offsets(view) == [o for o in rows if table_ids[o] % 10 < 6]
    plain = subset(table_path, "label < 6")
    assert offsets(plain) == np.flatnonzero(table_ids % 10 < 6).tolist()


def test_subsets_that_cannot_be(table_path: str) -> None:
    cases: list[tuple[Any, str]] = [
        ([0, 1003], "place 1 of the list is row 1003, but there are 1003 rows"),
        ([-1], "row -1"),
        ([0.5], "float64"),
        ([True, False], "flatnonzero"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (["a"], "list of"),
        (None, "NoneType"),
        (7, "int"),
        ({"a": 1}, "dict"),
    ]
    for rows, message in cases:
        with pytest.raises(ArgumentError, match=message):
            subset(table_path, rows)
    with pytest.raises(IndexError) as caught:
        subset(table_path, [2000])
    assert isinstance(caught.value, MissingRowError)
    with pytest.raises(EmptyError, match="keeps none of the 1003 rows"):
        subset(table_path, "label > 100")
    with pytest.raises(FilterError, match="its columns are"):
        subset(table_path, "lable > 100")
    with pytest.raises(ArgumentError, match="a table is"):
        subset(3, [1])  # type: ignore[arg-type]


def test_a_permutation_lists_rows_of_a_table(table_path: str, own_table: Any) -> None:
    listing = Permutation.of(pa.table({"row_offset": [5, 1, 5]}), table_path)
    assert offsets(subset(table_path, listing)) == [5, 1, 5]
    with pytest.raises(ArgumentError, match="the source is a view of 10"):
        subset(View(table_path)[:10], listing)
    with pytest.raises(StateError, match="the permutation was made for"):
        subset(str(own_table.path), listing)


# ---- subsample --------------------------------------------------------------------------------


def test_a_fraction_is_exact_and_in_table_order(table_path: str) -> None:
    for fraction, count in ((0.1, 100), (0.5, 502), (1, 1003), (0.0001, 0), (1 / 3, 334)):
        chosen = offsets(subsample(table_path, fraction))
        assert len(chosen) == len(set(chosen)) == count
        assert chosen == sorted(chosen)
    small, large = (set(offsets(subsample(table_path, f, seed=4))) for f in (0.2, 0.7))
    assert small < large, "with one seed the smaller is a part of the larger"
    assert small != set(offsets(subsample(table_path, 0.2, seed=5)))


def test_more_than_all_repeats(table_path: str) -> None:
    everything = list(range(tables.ROWS))
    rest = offsets(subsample(table_path, 0.25, seed=3))
    assert offsets(subsample(table_path, 2.25, seed=3)) == everything * 2 + rest
    assert offsets(subsample(table_path, 3)) == everything * 3
    once = subsample(table_path, 0.1)
    assert len(subsample(once, 12.5)) == 1250
    nested = subsample(subsample(table_path, 2), 1.5, seed=1)
    assert len(nested) == 3009
    assert set(np.bincount(offsets(nested))) <= {2, 3, 4}


@pytest.mark.parametrize("fraction", [0, -0.5, float("nan"), float("inf"), "much", None, True])
def test_fractions_that_cannot_be(table_path: str, fraction: Any) -> None:
    with pytest.raises(ArgumentError, match="fraction must be a finite number over 0"):
        subsample(table_path, fraction)


# ---- concat -----------------------------------------------------------------------------------


def test_views_one_after_another(table_path: str) -> None:
    view = View(table_path)
    joined = concat([view[5:8], view[:2], view[::-500], view[5:8]])
    assert offsets(joined) == [5, 6, 7, 0, 1, 1002, 502, 2, 5, 6, 7]
    assert len(concat([table_path, view])) == 2 * tables.ROWS


def test_views_that_do_not_go_together(table_path: str, own_table: Any) -> None:
    view, other = View(table_path), View(str(own_table.path))
    with pytest.raises(ArgumentError, match="Mixture") as caught:
        concat([view, other])
    assert view.table.identity in str(caught.value)
    assert other.table.identity in str(caught.value)
    with pytest.raises(ArgumentError, match=r"\['id'\] and all"):
        concat([View(view, columns=["id"]), view])
    for wrong in ([], view, table_path, 3):
        with pytest.raises(ArgumentError, match="a list of views"):
            concat(wrong)  # type: ignore[arg-type]
