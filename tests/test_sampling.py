"""sample: uniform, weighted and balanced draws."""

from __future__ import annotations

import itertools
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tables
from destrier import (
    ArgumentError,
    ColumnError,
    EmptyError,
    StreamingDataLoader,
    StreamingDataset,
    View,
    sample,
    subsample,
    subset,
)
from destrier.sampling import _log

quick = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def offsets(view: View) -> list[int]:
    found: list[int] = view.rows.offsets(np.arange(len(view))).tolist()
    return found


def counts(view: View, rows: int) -> np.ndarray[Any, Any]:
    return np.bincount(offsets(view), minlength=rows)


@given(
    n=st.integers(0, 1500),
    replacement=st.booleans(),
    how=st.sampled_from(["uniform", "weights", "array", "balance"]),
    seed=st.integers(0, (1 << 32) - 1),
)
@quick
def test_n_rows_come(table_path: str, n: int, replacement: bool, how: str, seed: int) -> None:
    options: dict[str, Any] = {
        "uniform": {},
        "weights": {"weights": "value"},
        "array": {"weights": np.arange(tables.ROWS)},
        "balance": {"balance": "label"},
    }[how]
    options.update(replacement=replacement, seed=seed)
    if not replacement and n > 900:
        n -= 900
    view = sample(table_path, n, **options)
    drawn = offsets(view)
    assert len(view) == len(drawn) == n
    assert drawn == offsets(sample(table_path, n, **options))
    if not replacement:
        assert drawn == sorted(set(drawn)), "none twice, in table order"
        return
    # Layers: each in table order, each a part of the one before.
    layers = np.split(drawn, np.flatnonzero(np.diff(drawn) <= 0) + 1)
    for before, after in itertools.pairwise(layers):
        assert set(after.tolist()) <= set(before.tolist())
        assert (np.diff(after) > 0).all()


def test_draws_are_a_promise(table_path: str) -> None:
    small = View(table_path)[:12]
    assert offsets(sample(small, 8, seed=5)) == [1, 3, 4, 8, 10, 1, 10, 1]
    assert offsets(sample(small, 6, weights="id", seed=5)) == [1, 4, 9, 10, 1, 10]
    assert offsets(sample(small, 6, weights="id", replacement=False, seed=5)) == [
        *(1, 2, 4, 8, 9, 11)
    ]
    assert offsets(sample(small, 6, balance="label % 2", seed=5)) == [1, 4, 9, 10, 1, 9]
    assert offsets(sample(small, 6, balance="label % 2", seed=5, replacement=False)) == [
        *(0, 3, 5, 6, 7, 10)
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_chances_are_in_proportion_to_weights(table_path: str, weighted: bool) -> None:
    weights = np.arange(25.0) ** 2 if weighted else np.ones(25)
    view = View(table_path)[:25]
    n = 50_000
    came = counts(sample(view, n, weights=weights if weighted else None, seed=2), 25)
    expected = n * weights / weights.sum()
    assert came[weights == 0].sum() == 0
    chi_square = ((came - expected)[weights > 0] ** 2 / expected[weights > 0]).sum()
    assert 9 < chi_square < 46  # of 23 or 24 degrees of freedom, 99 % of the time


def test_without_replacement_as_if_drawn_one_after_another(table_path: str) -> None:
    weights = np.array([1.0, 2.0, 3.0, 0.0, 4.0])
    view = View(table_path)[:5]
    seeds = 3000
    came = np.zeros((5, 5))
    for seed in range(seeds):
        a, b = offsets(sample(view, 2, weights=weights, replacement=False, seed=seed))
        came[a, b] += 1
    p = weights / 10
    for a in range(5):
        for b in range(a + 1, 5):
            expected = seeds * (p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b]))
            assert abs(came[a, b] - expected) <= 4 * np.sqrt(expected)


def test_logarithms_are_right_to_the_last_bits() -> None:
    u = (np.random.default_rng(0).random(10_000) + 2.0**-53) ** np.arange(1, 5)[:, None]
    for x in (*u, np.array([2.0**-53, 0.5, 2 / 3, 4 / 3, 1 - 2.0**-53])):
        assert np.allclose(_log(x), np.log(x), rtol=1e-15, atol=1e-16)


def test_weights_come_from_a_column_or_an_expression(table_path: str, table_ids: Any) -> None:
    some = "CAST(label = 3 AS DOUBLE)"
    assert {table_ids[o] % 10 for o in offsets(sample(table_path, 300, weights=some))} == {3}
    by_column = offsets(sample(table_path, 50, weights="label", seed=1))
    assert by_column == offsets(sample(table_path, 50, weights="label * 7", seed=1))
    assert by_column == offsets(sample(table_path, 50, weights=table_ids % 10, seed=1))
    assert not {table_ids[o] % 10 for o in by_column} & {0}
    everything = sample(table_path, 100, weights="label >= 0", replacement=False, seed=2)
    assert len(set(offsets(everything))) == 100


def test_weights_are_of_the_rows_of_the_view(table_path: str) -> None:
    view = subset(table_path, [900, 5, 5, 40])
    assert set(offsets(sample(view, 50, weights=[0, 0, 1, 0]))) == {5}
    assert set(offsets(sample(view, 50, weights="CAST(id > 200 AS INT)"))) == {900}
    assert sorted(offsets(sample(view, 4, replacement=False))) == [5, 5, 40, 900]
    nulls = subset(table_path, "maybe IS NOT NULL")
    assert len(sample(nulls, 10, weights="maybe")) == 10


def test_classes_are_balanced(tmp_path: Any) -> None:
    labels = np.array([*["b"] * 500, *["a"] * 40, *["c"] * 3])
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"label": labels, "number": np.arange(543) % 7}), uri)
    drawn = labels[offsets(sample(uri, 302, balance="label"))]
    assert {c: int((drawn == c).sum()) for c in "abc"} == {"b": 101, "a": 101, "c": 100}
    view = sample(uri, 8, balance="label", replacement=False)
    drawn = labels[offsets(view)]
    assert {c: int((drawn == c).sum()) for c in "abc"} == {"b": 3, "a": 3, "c": 2}
    assert len(set(offsets(view))) == 8
    with pytest.raises(
        ArgumentError, match=r"n=12 is 4 rows .* 3 classes, but label='c' has only 3"
    ):
        sample(uri, 12, balance="label", replacement=False)
    only = subset(uri, "label != 'c'")
    drawn = labels[offsets(sample(only, 80, balance="label", replacement=False))]
    assert (drawn == "a").sum() == 40
    by_expression = offsets(sample(uri, 100, balance="number = 3"))
    assert sum(i % 7 == 3 for i in by_expression) == 50
    # Within a class all rows are alike.
    came = counts(sample(uri, 60_000, balance="label"), 543)
    assert abs(came[500:540] - 500).max() < 5 * np.sqrt(500)
    few = sample(uri, 2, balance="label")
    assert labels[offsets(few)].tolist() == ["b", "a"], "n below the number of classes"


def test_a_sample_streams(table_path: str, table_ids: Any) -> None:
    view = sample(View(table_path, columns=["id"]), 700, weights="id * id", seed=3)
    with StreamingDataLoader(view, batch_size=64, remainder="keep") as loader:
        first = [i for batch in loader for i in batch["id"].tolist()]
        second = [i for batch in loader for i in batch["id"].tolist()]
    assert sorted(first) == sorted(second) == sorted(table_ids[offsets(view)].tolist())
    assert first != second
    clump = StreamingDataset(view, shuffle_clump_size=4, columns=["id"], global_batch_size=50)
    assert len(list(clump)) == 14
    clump.close()


def test_a_row_that_outweighs_all_others_costs_nothing(table_path: str) -> None:
    view = sample(table_path, 1_000_000, weights=[1.0, *[0.0] * (tables.ROWS - 1)])
    assert len(view) == 1_000_000
    assert view.rows.offsets(np.array([0, 999_999])).tolist() == [0, 0]
    assert len(view.rows.parts) == 1  # type: ignore[attr-defined]
    heavy = sample(table_path, 100, weights=[1e300, 1e-300, *[0.0] * (tables.ROWS - 2)])
    assert set(offsets(heavy)) == {0}
    both = sample(
        table_path, 2, weights=[1e300, 1e-300, *[0.0] * (tables.ROWS - 2)], replacement=False
    )
    assert offsets(both) == [0, 1]


def test_samples_that_cannot_be(table_path: str) -> None:
    ones = np.ones(tables.ROWS)

    def but(place: int, value: float) -> Any:
        changed = ones.copy()
        changed[place] = value
        return changed

    cases: list[tuple[dict[str, Any], str]] = [
        ({"weights": but(7, -2)}, r"-2\.0 for row 7 of the 1003"),
        ({"weights": but(9, np.nan)}, "nan for row 9"),
        ({"weights": but(9, np.inf)}, "inf for row 9"),
        ({"weights": "label - 1"}, r"weights='label - 1' is -1\.0 for row"),
        ({"weights": ones * 0}, "0 for all of the 1003 rows"),
        ({"weights": ones[:-1]}, r"shape \(1002,\).* 1003 rows"),
        ({"weights": 3.0}, r"shape \(\)"),
        ({"weights": ["a"] * tables.ROWS}, "weights must be a column"),
        ({"weights": "maybe"}, r"weights='maybe' is null for row \d+ .*IS NOT NULL"),
        ({"balance": "maybe"}, "balance='maybe' is null for row"),
        ({"weights": "label", "balance": "label"}, "both given"),
        ({"n": 1004, "replacement": False}, "n is 1004, but there are only 1003 rows"),
        (
            {"n": 5, "weights": [1, 1, *[0] * 1001], "replacement": False},
            "n is 5, but there are only 2 of 1003 rows with a weight over 0",
        ),
        ({"n": -1}, "n must be at least 0"),
        ({"n": 1.5}, "n must be an integer"),
        ({"seed": -1}, "seed must be from 0"),
        ({"weights": ""}, "SQL expression"),
        ({"balance": 3}, "SQL expression"),
    ]
    for options, message in cases:
        with pytest.raises(ArgumentError, match=message):
            sample(table_path, **{"n": 10, **options})
    for options, message in (
        ({"weights": "name"}, "weights='name' is string, but must be a number"),
        ({"weights": "wieght"}, "its columns are: id, label"),
        ({"balance": "tokens"}, "balance='tokens' is list"),
    ):
        with pytest.raises(ColumnError, match=message):
            sample(table_path, 10, **options)
    empty = subset(table_path, [])
    assert len(sample(empty, 0)) == 0
    with pytest.raises(EmptyError, match="no rows to draw 1 from"):
        sample(empty, 1)


def test_samples_of_repeats_are_of_each_copy(table_path: str) -> None:
    twice = subsample(table_path, 2)
    drawn = counts(sample(twice, 2006, replacement=False), tables.ROWS)
    assert (drawn == 2).all()
