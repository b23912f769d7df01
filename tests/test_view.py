"""Views: rows of a table as a map-style dataset, and as a stream."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, Subset

import tables
from destrier import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    EmptyError,
    IterationError,
    MissingKeyError,
    MissingRowError,
    Mixture,
    Packed,
    Permutation,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
    View,
    concat,
    gather,
    index,
    sample,
    split,
    subsample,
    subset,
)
from destrier.rowlists import StackedRows, compact, contains, intersect, locality, sliced, stack
from destrier.selection import BitmapRows, OffsetRows, RangeRows

if TYPE_CHECKING:
    from collections.abc import Callable

TOTAL = 700
quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def offsets(view: View) -> list[int]:
    found: list[int] = view.rows.offsets(np.arange(len(view))).tolist()
    return found


# ---- row lists --------------------------------------------------------------------------------


@st.composite
def lists(draw: Any) -> list[int]:
    """A list of rows: ascending or not, dense or sparse, with repeats or without."""
    kind = draw(st.sampled_from(["sparse", "dense", "run", "any", "several", "empty"]))
    seed = draw(st.integers(0, 1 << 32))
    rng = np.random.default_rng(seed)
    if kind == "sparse":
        return np.flatnonzero(rng.random(TOTAL) < 0.005).tolist()
    if kind == "dense":
        return np.flatnonzero(rng.random(TOTAL) < 0.4).tolist()
    if kind == "run":
        a, b = sorted(rng.integers(0, TOTAL, 2).tolist())
        return list(range(a, b))
    if kind == "several":
        return [*range(300), *np.flatnonzero(rng.random(TOTAL) < 0.6).tolist(), *range(300)]
    return [] if kind == "empty" else rng.integers(0, TOTAL, 50).tolist()


@given(listed=lists(), other=lists(), cuts=st.lists(st.integers(0, 1200), max_size=5))
@quick
@pytest.mark.parametrize("least_run", [1, 1 << 12])
def test_row_lists_are_their_offsets(
    listed: list[int],
    other: list[int],
    cuts: list[int],
    least_run: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("destrier.rowlists._LEAST_RUN", least_run)
        pieces = np.split(np.array(listed, np.int64), sorted(min(c, len(listed)) for c in cuts))
        rows = compact(pieces, TOTAL)
        second = compact([np.array(other, np.int64)], TOTAL)
        assert len(rows) == len(listed)
        assert rows.offsets(np.arange(len(rows))).tolist() == listed
        backwards = np.arange(len(rows))[::-1]
        assert rows.offsets(backwards).tolist() == listed[::-1]
        assert rows.digest == compact([np.array(listed, np.int64)], TOTAL).digest
        everything = np.arange(TOTAL)
        assert np.flatnonzero(contains(rows, everything)).tolist() == sorted(set(listed))
        both = intersect(rows, second, TOTAL)
        assert both.offsets(np.arange(len(both))).tolist() == [i for i in listed if i in set(other)]
        twice = stack([(rows, 2), (second, 1), (rows, 1)])
        expected = [*listed, *listed, *other, *listed]
        assert twice.offsets(np.arange(len(expected))).tolist() == expected
        for start, stop, step in ((3, 90, 1), (None, None, -1), (-40, None, 3), (5, 2, 1)):
            places = range(len(expected))[start:stop:step]
            cut = sliced(twice, places, TOTAL)
            assert cut.offsets(np.arange(len(cut))).tolist() == expected[start:stop:step]


def test_what_a_list_costs_follows_from_its_rows() -> None:
    def kind(rows: Any) -> type:
        return type(compact([np.asarray(rows, np.int64)], 1 << 16))

    everything = np.arange(1 << 16)
    assert kind(everything) is kind(everything[50:90]) is RangeRows
    assert kind(everything[::3]) is BitmapRows
    assert kind(everything[::100]) is OffsetRows
    assert kind(everything[::-1]) is OffsetRows
    assert kind(np.concatenate([everything, everything])) is StackedRows
    thrice = stack([(RangeRows(10), 1), (RangeRows(10), 2)])
    assert isinstance(thrice, StackedRows)
    assert len(thrice.parts) == 1, "what comes several times is held once"
    assert RangeRows(10, 3).digest != RangeRows(10).digest != RangeRows(11).digest


def test_successive_rows_of_a_bitmap_are_those_of_its_definition() -> None:
    for density in (0.02, 0.5, 0.999):
        bits = np.random.default_rng(1).random(150_000) < density
        words = np.packbits(bits, bitorder="little")
        words = np.concatenate([words, np.zeros(-len(words) % 8, np.uint8)])
        rows = BitmapRows(words.view(np.uint64))
        listed = np.flatnonzero(bits)
        for first, last in ((0, len(rows)), (17, 2500), (len(rows) - 1100, len(rows))):
            assert np.array_equal(rows.offsets(np.arange(first, last)), listed[first:last])


def test_locality_says_how_near_neighbours_lie() -> None:
    even = BitmapRows(np.full(100, 0x5555555555555555, np.uint64))
    assert locality(RangeRows(10, 5), 6400) == 1
    assert locality(even, 6400) == 0.5
    assert locality(OffsetRows(np.array([3, 2])), 6400) is None
    assert locality(stack([(RangeRows(3200), 2), (even, 1)]), 6400) == pytest.approx(2.5 / 3)
    assert locality(stack([(even, 1), (OffsetRows(np.array([3, 2])), 1)]), 6400) is None


# ---- a map-style dataset ----------------------------------------------------------------------


def test_rows_by_place(table_path: str, table_ids: Any) -> None:
    view = View(table_path)
    assert len(view) == tables.ROWS
    place = 17
    number = int(table_ids[place])
    row = view[place]
    assert row["id"] == number
    assert row["name"] == f"row {number}"
    assert row["blob"] == tables.blob(number)
    assert row["tokens"] == list(range(number, number + number % 5))
    assert row == view[np.int64(place)] == view[torch.tensor(place)] == view[place - len(view)]
    for beyond in (len(view), -len(view) - 1):
        with pytest.raises(IndexError, match=rf"no row {beyond} .* {len(view)} rows") as caught:
            _ = view[beyond]
        assert isinstance(caught.value, MissingRowError)
    for wrong in ("id", 1.5, None, True):
        with pytest.raises(ArgumentError, match="integer or a slice"):
            _ = view[wrong]  # type: ignore[index]


def test_slices_are_views(table_path: str, table_ids: Any) -> None:
    view = View(table_path, columns=["id"])
    for where in (
        slice(5, 9),
        slice(None, None, -100),
        slice(-3, None),
        slice(9, 2),
        slice(0, 2000),
    ):
        part = view[where]
        assert isinstance(part, View)
        assert [row["id"] for row in part] == table_ids[where].tolist()
    assert view[3:][-1] == {"id": table_ids[-1]}
    with pytest.raises(MissingRowError):
        _ = view[9:2][0]


def test_many_rows_are_read_in_one_request(table_path: str, table_ids: Any) -> None:
    view = View(table_path, columns=["id", "label"])
    places = [900, 3, 3, -1, 500]
    _ = view[0]
    calls = []
    reader = view._reader
    assert reader is not None
    read = reader.read

    def counted(wanted: Any) -> Any:
        calls.append(len(wanted))
        return read(wanted)

    reader.read = counted  # type: ignore[method-assign]
    rows = view.__getitems__(places)
    assert [row["id"] for row in rows] == table_ids[places].tolist()
    assert list(rows[0]) == ["id", "label"]
    assert calls == [5]
    assert view.__getitems__([]) == []
    with pytest.raises(MissingRowError, match="no row 1003"):
        view.__getitems__([0, 1003])


def test_samplers_of_torch(table_path: str, table_ids: Any) -> None:
    view = split(View(table_path, columns=["id", "vector"]), [0.3, 0.7], seed=4)[0]
    ids = table_ids[offsets(view)]
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(view, batch_size=32, sampler=RandomSampler(view, generator=generator))
    seen = torch.cat([batch["id"] for batch in loader])
    assert len(loader) == -(-len(view) // 32)
    assert sorted(seen.tolist()) == ids.tolist() != seen.tolist()
    chosen = DataLoader(Subset(view, [4, 2, 2]), batch_size=3)
    assert next(iter(chosen))["id"].tolist() == ids[[4, 2, 2]].tolist()


def test_workers_open_the_table_themselves(table_path: str, table_ids: Any) -> None:
    view = subsample(View(table_path, columns=["id"]), 0.2)
    _ = view[0]
    loader = DataLoader(view, batch_size=50, num_workers=2, multiprocessing_context="spawn")
    assert [i for batch in loader for i in batch["id"].tolist()] == table_ids[
        offsets(view)
    ].tolist()
    forked = iter(DataLoader(view, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(IterationError, match="multiprocessing_context='spawn'"):
        next(forked)
    forked._shutdown_workers()  # type: ignore[attr-defined]  # quicker than when it is collected


def test_pickles_are_small_and_the_same(table_path: str) -> None:
    for view in (View(table_path), split(table_path, [0.5, 0.5])[1], subsample(table_path, 900)):
        text = pickle.dumps(view)
        again = pickle.loads(text)
        assert len(text) < 2000
        assert offsets(again[:3000]) == offsets(view[:3000])
        assert again.rows.digest == view.rows.digest
        assert again[-1] == view[-1]


def test_rows_by_key(table_path: str, own_table: Any) -> None:
    index(str(own_table.path), "id")
    view = subset(str(own_table.path), "label < 5")
    number = int(own_table.ids[own_table.ids % 10 < 5][7])
    other = int(own_table.ids[own_table.ids % 10 >= 5][7])
    assert view.get(number)["name"] == f"row {number}"
    first = view[0]
    rows = View(view, columns=["id"]).get([number, first["id"], number])
    assert rows == [{"id": number}, {"id": first["id"]}, {"id": number}]
    assert view.get([]) == []
    for key in (other, [number, other]):
        with pytest.raises(KeyError, match=f"{other} .* not among the {len(view)} rows") as caught:
            view.get(key)
        assert isinstance(caught.value, MissingKeyError)
    with pytest.raises(MissingKeyError, match="no row of"):
        view.get(10**6)
    with pytest.warns(DestrierWarning, match="no index of column 'name'"):
        assert view.get(f"row {number}", on="name")["id"] == number


def test_views_stay_at_their_version(own_table: Any) -> None:
    path = str(own_table.path)
    before = View(path)
    lance.dataset(path).delete("id % 2 = 0")
    assert len(before) == tables.ROWS
    assert before[:2][1]["id"] == own_table.ids[1]
    after = View(path)
    assert len(after) < tables.ROWS
    assert len(View(path, version=before.table.version)) == tables.ROWS
    with pytest.raises(ArgumentError, match=f"version={before.table.version} .* version"):
        View(after, version=before.table.version)


def test_columns_are_checked(table_path: str) -> None:
    with pytest.raises(ColumnError, match="'lable'"):
        View(table_path, columns=["lable"])
    for wrong in ("label", [], 3):
        with pytest.raises(ArgumentError, match="columns must be a list"):
            View(table_path, columns=wrong)  # type: ignore[arg-type]
    view = View(table_path, columns=["id"])
    assert View(view).columns == ["id"] == split(view, [0.5, 0.5])[0].columns
    assert list(View(view, columns=["name", "id"])[0]) == ["name", "id"]


def test_a_view_is_saved_as_a_permutation(table_path: str, tmp_path: Any) -> None:
    view = split(table_path, [0.9, 0.1], seed=8)[1]
    uri = view.permutation().save(str(tmp_path / "val.lance"))
    again = subset(table_path, Permutation.open(uri))
    assert again.rows.digest == view.rows.digest
    assert offsets(again) == offsets(view)


# ---- a stream ---------------------------------------------------------------------------------


def ids_of(loader: StreamingDataLoader) -> list[int]:
    return [i for batch in loader for i in batch["id"].tolist()]


def test_a_view_streams_as_a_table(table_path: str, table_ids: Any) -> None:
    everything = StreamingDataset(View(table_path), columns=["id"])
    assert everything.state_dict() == StreamingDataset(table_path).state_dict()
    train = split(View(table_path, columns=["id"]), [0.8, 0.2], seed=1)[0]
    with StreamingDataLoader(train, batch_size=50, remainder="keep") as loader:
        batch = next(iter(loader))
        assert list(batch) == ["id"], "the columns of the view"
        assert loader.state_dict()["shuffle"] is True
        assert sorted(ids_of(loader)) == table_ids[offsets(train)].tolist()
    dataset = StreamingDataset(train, columns=["name"])
    assert list(next(iter(dataset))) == ["name"]
    dataset.close()


@pytest.mark.parametrize("clump", [None, 8])
def test_filters_compose(table_path: str, table_ids: Any, clump: int | None) -> None:
    twice = concat([subset(table_path, slice(100, 700)), subset(table_path, [5, 3, 650])])
    dataset = StreamingDataset(twice, filter="label < 4", shuffle_clump_size=clump, columns=["id"])
    with StreamingDataLoader(dataset, batch_size=10, remainder="keep") as loader:
        got = ids_of(loader)
        state = loader.state_dict()
    wanted = [i for i in table_ids[[*range(100, 700), 5, 3, 650]].tolist() if i % 10 < 4]
    assert sorted(got) == sorted(wanted)
    assert state["filter"] == "label < 4"
    plain = StreamingDataset(twice, columns=["id"], shuffle_clump_size=clump)
    with StreamingDataLoader(plain, batch_size=10) as loader:
        loader.load_state_dict(state)  # takes the filter too
        assert loader.state_dict() == state


def test_clumps_are_chosen_from_where_the_rows_lie(tmp_path: Any) -> None:
    uri = str(tmp_path / "plain.lance")
    tables.plain_table(uri, 200_000)

    def clump(view: View, **options: Any) -> Any:
        return StreamingDataset(view, **options).state_dict()["clump_size"]

    filtered = StreamingDataset(uri, filter="id % 3 = 0").state_dict()
    assert StreamingDataset(subset(uri, "id % 3 = 0")).state_dict() == {**filtered, "filter": None}
    assert clump(View(uri)) == clump(subsample(uri, 3.0)[:200_000]) > 1
    assert clump(subset(uri, "id % 3 = 0")) > 1
    shuffled = np.random.default_rng(0).permutation(200_000)
    assert clump(subset(uri, shuffled)) == 1, "nothing is known of where neighbours lie"
    assert clump(subset(uri, shuffled), shuffle_clump_size=4) == 4


def state_of(view: View, **options: Any) -> dict[str, Any]:
    dataset = StreamingDataset(view, columns=["id"], **options)
    loader = StreamingDataLoader(dataset, batch_size=20)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    return state


def load(view: View, state: dict[str, Any], **options: Any) -> None:
    StreamingDataset(view, **options).load_state_dict(state)


def test_states_are_small_and_of_one_view(table_path: str) -> None:
    train, val = split(table_path, [0.5, 0.5], seed=1)
    state = state_of(train)
    assert len(json.dumps(state)) < 1000
    assert len(json.dumps(state_of(subsample(table_path, 700)))) < 1000
    load(split(table_path, [0.5, 0.5], seed=1)[0], state)
    others: list[Callable[[], View]] = [
        lambda: val,
        lambda: View(table_path),
        lambda: split(table_path, [0.5, 0.5], seed=2)[0],
        lambda: train[1:],
        lambda: subset(train, [1, 0, *range(2, len(train))]),
    ]
    for other in others:
        with pytest.raises(StateError, match="mismatch") as caught:
            load(other(), state)
        assert state["plan_hash"] in str(caught.value)


def test_a_view_holds_for_its_version(own_table: Any, table_path: str) -> None:
    path = str(own_table.path)
    old = subsample(path, 0.5)
    state = state_of(old)
    dataset = lance.dataset(path)
    dataset.add_columns({"double": "id * 2"})
    load(subsample(path, 0.5), state)  # the rows are the same
    dataset = lance.dataset(path)
    dataset.delete("id % 2 = 0")
    newer = subsample(path, 0.5)
    with pytest.raises(StateError, match="table mismatch") as caught:
        load(newer, state)
    assert old.table.identity in str(caught.value)
    assert newer.table.identity in str(caught.value)
    with pytest.raises(StateError, match="table mismatch"):
        load(old, state_of(newer))
    with pytest.raises(StateError, match="table mismatch"):
        load(View(table_path), state)
    load(old, state)


def test_what_a_view_says_is_not_said_twice(table_path: str) -> None:
    view = subsample(table_path, 0.5)
    version = view.table.version
    with pytest.raises(ArgumentError, match=f"version={version} .* version {version}"):
        StreamingDataset(view, version=version)
    with pytest.raises(ArgumentError, match=f"permutation .* view of {len(view)} rows"):
        StreamingDataset(view, permutation=view.permutation())


def test_a_view_without_rows(table_path: str) -> None:
    none, whole = split(table_path, [0.0, 1.0])
    assert (len(none), len(whole)) == (0, tables.ROWS)
    assert list(none) == []
    for empty in (none, whole[5:5], subset(whole, []), sample(whole, 0)):
        assert len(empty) == 0
        with pytest.raises(EmptyError, match="no rows"):
            next(iter(StreamingDataset(empty)))
        with pytest.raises(EmptyError, match="no rows"):
            len(StreamingDataLoader(empty, batch_size=5))
    with pytest.raises(EmptyError, match="keeps none of the 10 rows of the view"):
        next(iter(StreamingDataset(whole[:10], filter=f"id = {View(whole)[-1]['id']}")))


def test_processes_read_a_view(table_path: str, table_ids: Any) -> None:
    view = subsample(View(table_path, columns=["id"]), 1.3)
    dataset = StreamingDataset(view, global_batch_size=100, remainder="keep")
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver"
    )
    got = [i for batch in loader for i in batch["id"].tolist()]
    assert sorted(got) == sorted(table_ids[offsets(view)].tolist())


@pytest.mark.parametrize("remainder", ["drop", "keep"])
def test_a_view_is_kept_in_a_cache(table_path: str, tmp_path: Any, remainder: Any) -> None:
    for rows in (subset(table_path, slice(200, 400)), subsample(table_path, 1.5)):
        view = View(rows, columns=["id", "name"])
        plain = StreamingDataset(view, batch_size=50, remainder=remainder)
        cached = StreamingDataset(
            view, batch_size=50, remainder=remainder, cache_dir=tmp_path / "cache"
        )
        for _ in range(2):
            pairs = zip(plain, cached, strict=True)
            assert all(a["id"].tolist() == b["id"].tolist() for a, b in pairs)
        plain.close()
        cached.close()


@pytest.mark.parametrize("kind", ["range", "end", "bitmap", "list", "repeats"])
def test_the_documents_of_a_view_are_packed(table_path: str, kind: str) -> None:
    whole = View(table_path, columns=["tokens"])
    view = {
        "range": whole[100:400],
        "end": whole[700:],
        "bitmap": subset(whole, slice(3, 900, 2)),
        "list": subset(whole, [900, 3, 3, 40, 17, 18]),
        "repeats": subsample(whole, 1.5),
    }[kind]
    tokens = [token for row in view for token in row["tokens"]]
    dataset = StreamingDataset(Packed(view, block_size=4), shuffle=False)
    packed = [token for row in dataset for token in row["input_ids"]]
    assert packed == tokens[: len(tokens) // 4 * 4]
    dataset.close()


def test_views_are_mixed(table_path: str, table_ids: Any) -> None:
    a, b = split(table_path, [0.5, 0.5])
    mixture = Mixture({"a": a, "b": subsample(b, 0.1)}, weights={"a": 3, "b": 1}, columns=["id"])
    with StreamingDataLoader(mixture, batch_size=40, remainder="keep") as loader:
        ids = [i for batch in loader for i in batch["id"].tolist()]
    of_a = set(table_ids[offsets(a)].tolist())
    assert sum(i in of_a for i in ids) == len(ids) * 3 // 4
    with pytest.raises(ArgumentError, match="has no one table order"):
        gather([1], [0], loader)
