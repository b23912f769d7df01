"""Batches with a budget of tokens, beside a slow plan that is written from the definition."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from destrier import (
    ArgumentError,
    EmptyError,
    Mixture,
    Order,
    ReadError,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
    Zip,
    subset,
)
from destrier.bucketing.buckets import BudgetBuckets
from destrier.bucketing.budget import BudgetOrder
from destrier.bucketing.steps import BudgetSteps
from destrier.cli import main
from destrier.keyed import BUCKET_KEY, epoch_key, mix, subkey
from destrier.packing.lengthfile import Sums
from destrier.packing.lengths import Lengths
from destrier.topology import Topology, Worker

ROWS, LONGEST = 603, 40
TOKENS, MULTIPLE = 500, 12
BUDGET: dict[str, Any] = {"global_batch_tokens": TOKENS, "batch_multiple": MULTIPLE}


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    drawn = np.random.default_rng(0).lognormal(2, 1, ROWS).astype(int)
    return np.minimum(drawn, LONGEST).tolist()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> str:
    path = str(tmp_path_factory.mktemp("corpus") / "t.lance")
    rows = pa.array([[i] * n for i, n in enumerate(lengths)], pa.list_(pa.int32()))
    columns = {"tokens": rows, "i": range(ROWS), "third": np.arange(ROWS) % 3}
    lance.write_dataset(pa.table(columns), path, max_rows_per_file=200)
    return path


def dataset(table: Any, **options: Any) -> StreamingDataset:
    settings = {"bucket_by": "tokens", "bucket_window": 5, "num_splits": 8, **options}
    settings.setdefault("world_size", 1)
    settings.setdefault("rank", 0)
    return StreamingDataset(table, **settings)


def loader(table: Any, remainder: Any = "drop", **options: Any) -> StreamingDataLoader:
    own = {k: options.pop(k) for k in ("uneven", "prefetch_bytes", *BUDGET) if k in options}
    stream = dataset(table, **options)
    return StreamingDataLoader(stream, **{**BUDGET, **own}, remainder=remainder, with_index=True)


def ids(batches: Any) -> list[list[int]]:
    return [batch["i"].tolist() for batch in batches]


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    return [[i for share in step for i in share] for step in zip(*ranks, strict=True)]


def oracle(
    listed: list[int],
    lengths: list[int],
    state: dict[str, Any],
    epoch: int,
    remainder: str = "drop",
) -> list[list[int]]:
    """Return the rows of all steps of an epoch, from the definition in docs/tokens.md."""
    names = ("shuffle_seed", "num_splits", "clump_size", "window", "shuffle")
    seed, splits, clump, window, shuffle = (state[name] for name in names)
    n = len(listed)
    positions = Order(n, seed, epoch, splits, clump, window, shuffle).rows(np.arange(n))
    line = [listed[p] for p in positions.tolist()]
    _, batches, tokens, multiple, size = json.loads(state["buckets"])
    total = sum(lengths[row] for row in listed)
    assert size == max(1, batches * tokens * n // total // multiple) * multiple
    key = subkey(epoch_key(seed, epoch if shuffle else 0), BUCKET_KEY)
    steps = cut([lengths[row] for row in line], splits, key, tokens, multiple, size)
    rows = [[line[g] for g in step] for step in steps]
    if n % multiple and remainder == "drop":
        rows.pop()
    if n % multiple and remainder == "pad":
        rows[-1] += [row for step in rows for row in step][: -n % multiple]
    return rows


def cut(
    lengths: list[int], splits: int, key: int, tokens: int, multiple: int, size: int
) -> list[list[int]]:
    """Return the samples of all steps of an order with such lengths, from the definition."""
    whole = len(lengths) // multiple * multiple

    def by_lane(samples: list[int]) -> list[int]:
        return sorted(samples, key=lambda g: (g % splits, g))

    steps = []
    for first in range(0, whole, size):
        rest = sorted(range(first, min(first + size, whole)), key=lambda g: -lengths[g])
        found = []
        while rest:
            longest, count = max(1, lengths[rest[0]]), 0
            while count < len(rest) and (count + multiple) * longest <= tokens:
                count += multiple
            found.append(by_lane(rest[:count]))
            rest = rest[count:]
        steps += [found[i] for i in sorted(range(len(found)), key=lambda i: mix((first + i) ^ key))]
    last = by_lane(list(range(whole, len(lengths))))
    return [*steps, last] if last else steps


# ---- what an epoch is ---------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle_clump_size": 3, "shuffle_window": 4, "shuffle_seed": 3},
        {"shuffle": False},
        {"filter": "third < 2", "num_splits": 5},
        {"bucket_window": 1000},
        {"bucket_window": 1, "global_batch_tokens": 480},
        {"batch_multiple": 1, "bucket_window": 3},
    ],
    ids=["plain", "clumps", "table order", "filter", "one window", "tight", "singly"],
)
def test_steps_are_those_of_the_definition(
    corpus: str, lengths: list[int], options: dict[str, Any], remainder: str
):
    listed = [i for i in range(ROWS) if "filter" not in options or i % 3 < 2]
    with loader(corpus, remainder, **options) as stream:
        epochs = []
        for epoch in range(2):
            steps = len(stream)
            batches = list(stream)
            state = stream.state_dict()
            _, _, tokens, multiple, _ = json.loads(state["buckets"])
            assert ids(batches) == oracle(listed, lengths, state, epoch, remainder)
            assert len(batches) == steps
            rows = [i for batch in ids(batches) for i in batch]
            repeats = -len(listed) % multiple if remainder == "pad" else 0
            left = len(listed) % multiple if remainder == "drop" else 0
            assert len(rows) == len(listed) + repeats - left
            assert len(set(rows)) == len(listed) - left
            sizes = [len(batch["i"]) for batch in batches]
            longest = [max(len(row) for row in batch["tokens"]) for batch in batches]
            assert all(n * m <= tokens for n, m in zip(sizes, longest, strict=True))
            assert {size % multiple for size in sizes[:-1]} == {0}
            places = [g for batch in batches for g in batch["sample_index"].tolist()]
            assert places == list(range(len(rows)))
            if remainder == "pad":
                masks = [m for batch in batches for m in batch["mask"].tolist()]
                assert masks == [False] * len(listed) + [True] * repeats
            epochs.append(ids(batches))
        assert (epochs[0] == epochs[1]) == (options.get("shuffle") is False)


def test_little_memory_changes_nothing(corpus: str, lengths: list[int]):
    options = {"shuffle_clump_size": 3, "shuffle_window": 4}
    with loader(corpus, prefetch_bytes=1 << 16, **options) as stream:
        assert ids(stream) == oracle(list(range(ROWS)), lengths, stream.state_dict(), 0)


def test_a_view(corpus: str, lengths: list[int]):
    with loader(subset(corpus, slice(100, 500)), num_splits=None) as stream:
        assert ids(stream) == oracle(list(range(100, 500)), lengths, stream.state_dict(), 0)


def test_epochs_have_each_its_own_number_of_steps(corpus: str):
    with loader(corpus, batch_multiple=1) as stream:
        numbers = []
        for epoch in range(12):
            stream.set_epoch(epoch)
            numbers.append(len(stream))
            assert numbers[-1] == sum(1 for _ in stream)
    assert len(set(numbers)) > 1
    assert max(numbers) - min(numbers) < 0.1 * max(numbers)


def test_steps_are_counted_alike_in_windows_side_by_side_and_one_by_one(
    corpus: str, monkeypatch: pytest.MonkeyPatch
):
    with loader(corpus, bucket_window=2, batch_multiple=3) as stream:
        order = stream._stream().order(0)
        assert isinstance(order, BudgetOrder)
        one_by_one = [len(order.borders(v)) - 1 for v in range(order.windows)]
        assert order.windows > 4
        for at_once in (1, 2 * order.buckets.samples, 1 << 17):
            monkeypatch.setattr("destrier.bucketing.budget._AT_ONCE", at_once)
            order._counts[:] = -1
            assert order.counts(0, order.windows).tolist() == one_by_one
            order._counts[:] = -1
            assert len(stream) == sum(one_by_one)


def test_borders_that_were_forgotten_are_looked_for_again(
    corpus: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("destrier.bucketing.budget._KEPT_BORDERS", 6)
    with loader(corpus, bucket_window=1) as stream:
        order = stream._stream().order(0)
    wanted = {v: order.borders(v).tolist() for v in range(order.windows)}
    assert order.windows > 12
    for window in (0, 1, 2, 3, 4, 5, 0, 6, 0, 7, 6, 1, 8, 0, 9, 10, 11, 0):
        order._window(window)
        order.borders(window - window % 3)
        for kept in list(order._kept):
            assert order.borders(kept).tolist() == wanted[kept]


def test_the_order_that_is_in_use_is_kept(corpus: str):
    with loader(corpus) as stream:
        made = stream._stream()
    first = made.order(5)
    for epoch in range(9):
        made.order(epoch)
        assert made.order(5) is first


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=150),
    st.integers(1, 6),
    st.integers(0, 150),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["drop", "keep", "pad"]),
    st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_orders_of_all_sorts(
    lengths: list[int],
    multiple: int,
    more: int,
    windows: int,
    size: int,
    workers: int,
    remainder: Any,
    epoch: int,
):
    n = len(lengths)
    tokens = max(1, *lengths) * multiple + more
    splits = min(n, 1 + epoch)
    base = Order(n, 5, epoch, splits, 1, 1, True)
    places = base.rows(np.arange(n)).tolist()
    sums = Sums(np.array([0, sum(lengths)]), np.array([0, n]))
    buckets = BudgetBuckets("x", 1, tokens, multiple, windows * multiple)
    order = BudgetOrder(base, Lengths(np.array(lengths, np.uint32), sums, ""), buckets)
    key = subkey(epoch_key(5, epoch), BUCKET_KEY)
    steps = cut([lengths[p] for p in places], splits, key, tokens, multiple, windows * multiple)
    assert order.samples(np.arange(n)).tolist() == [g for step in steps for g in step]
    ends = np.cumsum([0, *map(len, steps)]).tolist()
    taken = [list(range(a, b)) for a, b in pairwise(ends)]
    if n % multiple and remainder == "drop":
        taken.pop()
    if n % multiple and remainder == "pad":
        taken[-1] += range(n, n + -n % multiple)
    for k, start in enumerate(ends):
        left = taken[k:]
        for worker in range(workers):
            mine = left[worker::workers]
            shares = []
            for rank in range(size):
                share = BudgetSteps(
                    order, start, Topology(rank, size), remainder, Worker(worker, workers)
                )
                assert [share.at_most(m) for m in (0, 1, 3)] == [
                    min(m, len(mine)) for m in (0, 1, 3)
                ]
                samples, bounds = share.samples(0, len(mine))
                shares.append([samples[a:b].tolist() for a, b in pairwise(bounds.tolist())])
                assert [share.size(i) for i in range(len(mine))] == [len(s) for s in shares[-1]]
                assert len(share) == len(mine)
                after = [left[: i * workers] for i in range(len(mine) + 1)]
                counters = [min(n, start + sum(map(len, some))) for some in after]
                assert [share.counter(i) for i in range(len(mine) + 1)] == counters
            for step, parts in zip(mine, zip(*shares, strict=True), strict=True):
                assert [g for part in parts for g in part] == step
                assert len({len(part) for part in parts}) <= 2
    for counter in set(range(n)) - set(ends):
        with pytest.raises(StateError, match=f"counter {counter} is inside"):
            order.find(counter)


def test_the_vector_of_the_documentation(tmp_path: Path):
    lists = pa.array([[1] * n for n in (5, 17, 0, 8, 3, 8, 1, 9, 2, 6)])
    lance.write_dataset(pa.table({"tokens": lists, "i": range(10)}), tmp_path / "t.lance")
    options = {"shuffle_seed": 7, "epoch": 4, "num_splits": 2, "shuffle_clump_size": 1}
    options |= {"bucket_window": 1, "global_batch_tokens": 51, "batch_multiple": 3}
    with loader(str(tmp_path / "t.lance"), "keep", **options) as stream:
        assert ids(stream) == [[5, 7, 3], [6, 9, 0], [4, 8, 2], [1]]


# ---- ranks and workers --------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_global_batches_are_the_same_for_any_number_of_ranks(
    corpus: str, size: int, remainder: str
):
    uneven = size == 5
    with loader(corpus, remainder) as whole:
        expected = ids(whole)
    ranks = []
    for rank in range(size):
        with loader(corpus, remainder, rank=rank, world_size=size, uneven=uneven) as mine:
            assert len(mine) == len(expected)
            ranks.append(ids(mine))
    assert joined(ranks) == expected
    for step in list(zip(*ranks, strict=True))[: -1 if remainder == "keep" else None]:
        counts = {len(share) for share in step}
        assert max(counts) - min(counts) <= uneven


@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_take_turns_at_the_steps(corpus: str, workers: int, remainder: Any):
    with loader(corpus, remainder, rank=1, world_size=2) as mine:
        expected = ids(mine)
    parts = []
    for number in range(workers):
        one = dataset(
            corpus,
            rank=1,
            world_size=2,
            remainder=remainder,
            worker_info_override=SimpleNamespace(id=number, num_workers=workers),
            **BUDGET,
        )
        assert len(one) == len(expected)
        counters, batches = [], []
        for batch in one:
            batches.append(batch["i"].tolist())
            counters.append(one.state_dict()["counter"])
        parts.append(batches)
        assert counters == sorted(counters)
        assert one.state_dict()["epoch"] == 1
    assert [part[k] for k in range(len(parts[0])) for part in parts if k < len(part)] == expected


def test_processes_go_on_from_a_state(corpus: str):
    with loader(corpus, rank=1, world_size=2) as mine:
        batches = iter(mine)
        for _ in range(7):
            next(batches)
        state = mine.state_dict()
        expected = [ids(batches), ids(mine)]
    for workers in (0, 2):
        stream = dataset(corpus, rank=1, world_size=2, **BUDGET)
        stream.load_state_dict(state)
        through = DataLoader(
            stream,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
            persistent_workers=workers > 0,
        )
        assert [ids(through), ids(through)] == expected
        stream.close()


def test_the_multiple_is_that_of_the_first_start(corpus: str):
    with loader(corpus, rank=0, world_size=4, batch_multiple=None) as four:
        next(iter(four))
        state = four.state_dict()
    assert json.loads(str(state["buckets"]))[3] == 4
    expected = ids(loader(corpus, batch_multiple=4))[1:]
    with loader(corpus, batch_multiple=None) as one:
        one.load_state_dict(state)
        assert ids(one) == expected
    with loader(corpus, rank=0, world_size=3, batch_multiple=None) as three:
        three.load_state_dict(state)
        with pytest.raises(ArgumentError, match="batch_multiple 4 cannot be shared equally by "):
            next(iter(three))


# ---- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
def test_every_step_can_be_resumed_on_another_number_of_ranks(corpus: str, remainder: str):
    with loader(corpus, remainder) as whole:
        steps = len(whole)
        states, expected = [whole.state_dict()], []
        for batch in whole:
            expected.append(batch["i"].tolist())
            states.append(whole.state_dict())
        following = ids(whole)
    ranks = [loader(corpus, remainder, rank=rank, world_size=2) for rank in range(2)]
    for k, state in enumerate(states):
        for rank in ranks:
            rank.load_state_dict(state)
            assert len(rank) == steps
        assert joined([ids(rank) for rank in ranks]) == expected[k:]
    assert joined([ids(rank) for rank in ranks]) == following
    for rank in ranks:
        rank.close()


def test_a_resume_looks_at_nothing_before_it(corpus: str, monkeypatch: pytest.MonkeyPatch):
    with loader(corpus, bucket_window=1) as stream:
        steps = len(stream)
        stream.skip(steps - 3)
        state = stream.state_dict()
    looked_at: list[int] = []
    found = BudgetOrder._sorted
    counted = BudgetOrder._counted

    def sorts(order: BudgetOrder, number: int) -> Any:
        looked_at.extend([number] * (order.base.epoch == 0))
        return found(order, number)

    def counts(order: BudgetOrder, first: int, last: int) -> Any:
        looked_at.extend(range(first, last) if order.base.epoch == 0 else [])
        return counted(order, first, last)

    monkeypatch.setattr(BudgetOrder, "_sorted", sorts)
    monkeypatch.setattr(BudgetOrder, "_counted", counts)
    with loader(corpus, bucket_window=1) as stream:
        stream.load_state_dict(state)
        batches = iter(stream)
        assert len([next(batches) for _ in range(3)]) == 3
    window = json.loads(str(state["buckets"]))[4]
    assert min(looked_at) >= int(state["counter"] or 0) // window
    assert window < ROWS / 4


def test_skip(corpus: str):
    with loader(corpus) as stream:
        whole = ids(stream)
        stream.set_epoch(0)
        stream.skip(5)
        batches = iter(stream)
        assert next(batches)["i"].tolist() == whole[5]
        stream.skip(3)
        assert ids(batches) == whole[9:]
        stream.set_epoch(0)
        stream.skip(10**9)
        assert ids(stream) == []


def test_a_state_brings_its_batches(corpus: str):
    with loader(corpus, bucket_window=7, shuffle_seed=2) as one:
        whole = ids(one)
        one.set_epoch(0)
        one.skip(4)
        state = one.state_dict()
    size = ROWS  # at most
    assert json.loads(str(state["buckets"]))[:4] == ["tokens", 7, TOKENS, MULTIPLE]
    assert json.loads(str(state["buckets"]))[4] < size
    for options in ({"bucket_by": None}, {}, {"batch_multiple": None}, {"bucket_window": 7}):
        settings = {"bucket_window": None, "num_splits": None, **options}
        with loader(corpus, **settings) as other:
            other.load_state_dict(state)
            assert ids(other) == whole[4:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_tokens": 600}, "has global_batch_tokens=500, .* with global_batch_tokens="),
        ({"batch_multiple": 6}, "has batch_multiple=12, .* with batch_multiple=6"),
        ({"bucket_window": 6}, "bucket_window mismatch: the state has 5, .* with 6"),
        ({"bucket_by": "others"}, "bucket_by mismatch: the state has 'tokens', .* with 'others'"),
    ],
)
def test_a_state_of_another_budget_is_refused(corpus: str, options: dict[str, Any], words: str):
    state = loader(corpus).state_dict()
    with pytest.raises(StateError, match=words):
        loader(corpus, **options).load_state_dict(state)


def test_a_state_of_other_batches_is_refused(corpus: str):
    with_budget = loader(corpus).state_dict()
    fixed = StreamingDataLoader(dataset(corpus), batch_size=32)
    with pytest.raises(StateError, match=r"global_batch_tokens=500, .* with batches of 32 samples"):
        fixed.load_state_dict(with_budget)
    with pytest.raises(StateError, match=r"batches of 32 samples, .* with global_batch_tokens=500"):
        loader(corpus).load_state_dict(fixed.state_dict())
    plain = StreamingDataLoader(dataset(corpus, bucket_by=None, bucket_window=None), batch_size=32)
    with pytest.raises(StateError, match="bucket_by mismatch: the state has None"):
        loader(corpus).load_state_dict(plain.state_dict())
    rows = dataset(corpus)
    rows.load_state_dict(with_budget)
    with pytest.raises(ArgumentError, match="is of batches of global_batch_tokens=500"):
        next(iter(rows))
    with pytest.raises(StateError, match=r"global_batch_tokens=500, .* with batches of 8 samples"):
        len(StreamingDataLoader(rows, batch_size=8))


def test_a_counter_inside_of_a_batch_names_its_neighbours(corpus: str):
    with loader(corpus) as stream:
        first, second = (len(batch) for batch, _ in zip(ids(stream), range(2), strict=False))
        state = stream.state_dict()
    words = f"counter {first + 1} .* begin at {first} and {first + second};"
    with pytest.raises(StateError, match=words):
        loader(corpus).load_state_dict({**state, "epoch": 0, "counter": first + 1})
    last = ROWS - ROWS % MULTIPLE
    with pytest.raises(StateError, match=f"begin at {last} and {ROWS};"):
        loader(corpus).load_state_dict({**state, "epoch": 0, "counter": last + 1})


@pytest.mark.parametrize(
    "text",
    ['["tokens",5,500,12]', '["tokens",5,500,12,13]', '["tokens",5,500,0,0]', '["t",5,5,5,5.0]'],
)
def test_a_damaged_state(corpus: str, text: str):
    state = loader(corpus).state_dict()
    with pytest.raises(StateError, match="buckets of the state are damaged"):
        loader(corpus).load_state_dict({**state, "buckets": text})


def test_states_of_all_ranks_are_the_same(corpus: str):
    states = []
    for rank in range(3):
        with loader(corpus, rank=rank, world_size=3) as stream:
            for _ in zip(range(4), stream, strict=False):
                pass
            states.append(json.loads(json.dumps(stream.state_dict())))
    assert StreamingDataset.merge_state_dicts(states) == states[0]


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"global_batch_tokens": TOKENS}, {"batch_size": 50}])
def test_a_count_that_is_not_that_of_its_list(tmp_path: Path, options: dict[str, int]):
    lists = [[1] * n for n in (3, 4, 0, 7, 2)]
    uris = []
    for name, counts in (("right", [3, 4, 0, 7, 2]), ("wrong", [3, 4, 0, 5, 2])):
        uris.append(str(tmp_path / name))
        columns = {"tokens": lists, "tokens_count": counts, "i": range(5)}
        lance.write_dataset(pa.table(columns), uris[-1])
    right, wrong = (
        StreamingDataset(uri, bucket_by="tokens", remainder="keep", columns=["i", "tokens"])
        for uri in uris
    )
    with StreamingDataLoader(right, **options) as stream:
        (batch,) = stream
        assert list(batch) == ["i", "tokens"]
        assert [len(tokens) for tokens in batch["tokens"]] == [len(lists[i]) for i in batch["i"]]
    with StreamingDataLoader(wrong, **options) as stream:
        message = "'tokens' of row 3 .* has 7 elements, but 'tokens_count' says 5"
        with pytest.raises(ReadError, match=message) as caught:
            next(iter(stream))
        assert (caught.value.offset, caught.value.column) == (3, "tokens")
    # Nobody sees the lists.
    only = StreamingDataset(uris[1], bucket_by="tokens", remainder="keep", columns=["i"])
    with StreamingDataLoader(only, **options) as stream:
        assert sorted(i for batch in stream for i in batch["i"].tolist()) == list(range(5))


def test_huge_sizes_are_those_of_a_whole_epoch(corpus: str):
    most = (1 << 48) - 1
    for options in ({}, {"bucket_window": most}, {"global_batch_tokens": most}):
        with loader(corpus, "keep", **options) as stream:
            assert sorted(i for batch in ids(stream) for i in batch) == list(range(ROWS))
    large = StreamingDataset(corpus, bucket_by="tokens", bucket_window=most, remainder="keep")
    with StreamingDataLoader(large, batch_size=most) as stream:
        (batch,) = ids(stream)
        assert sorted(batch) == list(range(ROWS))
    mixture = Mixture({"a": StreamingDataset(corpus)}, stop="all_exhausted")
    with StreamingDataLoader(mixture, batch_size=most, remainder="keep") as stream:
        (batch,) = ids(stream)
        assert set(batch) == set(range(ROWS))


def test_arguments_that_cannot_be_used(corpus: str, lengths: list[int]):
    with pytest.raises(ArgumentError, match="global_batch_tokens=500 needs bucket_by"):
        len(loader(corpus, bucket_by=None, bucket_window=None))
    with pytest.raises(ArgumentError, match=r"batch_size=8 .* global_batch_tokens=500 .* both"):
        StreamingDataLoader(dataset(corpus), batch_size=8, global_batch_tokens=500)
    with pytest.raises(ArgumentError, match=r"global_batch_size=8 .* global_batch_tokens=500 .* b"):
        dataset(corpus, global_batch_size=8, global_batch_tokens=500)
    with pytest.raises(ArgumentError, match=r"global_batch_tokens must be from 1 .* got 0"):
        dataset(corpus, global_batch_tokens=0)
    with pytest.raises(ArgumentError, match=r"global_batch_tokens must be an integer .* got 1.5"):
        dataset(corpus, global_batch_tokens=1.5)
    with pytest.raises(ArgumentError, match=r"batch_multiple must be from 1 .* got -2"):
        dataset(corpus, global_batch_tokens=500, batch_multiple=-2)
    with pytest.raises(ArgumentError, match="batch_multiple=2 has no meaning without global_batch"):
        StreamingDataLoader(dataset(corpus), batch_size=8, batch_multiple=2)
    with pytest.raises(ArgumentError, match="global_batch_tokens=9 cannot be combined with pack_"):
        StreamingDataset(corpus, columns=["tokens"], pack_sequences=8, global_batch_tokens=9)
    for name in ("global_batch_tokens", "batch_multiple", "bucket_window"):
        with pytest.raises(ArgumentError, match=rf"{name} must be from 1 to 2\*\*48 - 1, got 2814"):
            loader(corpus, **{name: 1 << 48})
    row = lengths.index(LONGEST)
    words = f"row {row} has 40 in 'tokens', and a step of 12 .* 480 tokens, .*global_batch_tokens="
    with pytest.raises(ArgumentError, match=words + "479"):
        len(loader(corpus, global_batch_tokens=479))
    with pytest.raises(ArgumentError, match=r"batch_multiple 12 cannot be shared .* world_size 5"):
        len(loader(corpus, rank=0, world_size=5))
    with pytest.raises(EmptyError, match="2 rows are fewer than batch_multiple 12"):
        len(loader(corpus, filter="i < 2", num_splits=None))
    with loader(corpus, "keep", filter="i < 2", num_splits=None) as few:
        assert [sorted(batch) for batch in ids(few)] == [[0, 1]]


def test_sources_of_a_mixture_or_zip_are_refused(corpus: str):
    for make in (Mixture, Zip):
        plain = StreamingDataset(corpus, columns=["i"], rank=0, world_size=1)
        with pytest.raises(ArgumentError, match=r"global_batch_tokens=500 .* a mixture or zip"):
            StreamingDataLoader(make({"a": plain}), **BUDGET)
        with pytest.raises(ArgumentError, match="source of a mixture or zip"):
            len(StreamingDataLoader(make({"a": dataset(corpus, **BUDGET)}), batch_size=8))


def test_what_trainers_look_at(corpus: str):
    with loader(corpus) as stream:
        assert stream.batch_size is None
        assert stream.total_batch_size is None
        assert "global_batch_tokens=500" in repr(stream)
        batch = next(iter(stream))
        assert batch["i"].dtype == torch.int64


def test_lists_of_one_size(tmp_path: Path):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(range(100 * 8), pa.int32()), 8)
    lance.write_dataset(pa.table({"tokens": lists, "i": range(100)}), tmp_path / "t.lance")
    with loader(str(tmp_path / "t.lance"), global_batch_tokens=90, batch_multiple=2) as stream:
        sizes = [len(batch) for batch in ids(stream)]
    assert sum(sizes) == 100
    assert sizes.count(10) >= 8, "as many as fit: 10 of 8 tokens"


# ---- what a plan says ---------------------------------------------------------------------------


def test_a_plan_says_what_the_steps_are(corpus: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["plan", corpus, "--bucket-by", "tokens", "--bucket-window", "5"]
    arguments += ["--num-splits", "8", "--world-size", "2", "--step", "4", "--epoch", "1"]
    arguments += ["--global-batch-tokens", str(TOKENS), "--batch-multiple", str(MULTIPLE)]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    with loader(corpus, epoch=1) as stream:
        batches = list(stream)
    sizes = [[len(row) for row in batch["tokens"]] for batch in batches]
    padded = sum(max(batch) * len(batch) for batch in sizes)
    assert report["steps"] == len(batches)
    assert report["surplus_rows"] == ROWS % MULTIPLE
    assert report["buckets"] == {
        "by": "tokens",
        "window": 5,
        "tokens": TOKENS,
        "multiple": MULTIPLE,
        "rows_a_step": sum(map(len, sizes)) / len(sizes),
        "waste": pytest.approx(1 - sum(map(sum, sizes)) / padded),
    }
    rows = [row for share in report["shares"] for row in share["rows"]]
    assert rows == batches[4]["i"].tolist()
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "a multiple of 12 within 500 tokens" in said
    assert "of like length by tokens" in said


def test_a_plan_of_fixed_batches_says_its_waste(corpus: str, capsys: pytest.CaptureFixture[str]):
    arguments = ["plan", corpus, "--bucket-by", "tokens", "--num-splits", "8", "--json"]
    assert main([*arguments, "--global-batch", "32"]) == 0
    report = json.loads(capsys.readouterr().out)
    stream = StreamingDataLoader(dataset(corpus, bucket_window=None), batch_size=32)
    with stream:
        sizes = [[len(row) for row in batch["tokens"]] for batch in stream]
    padded = sum(max(batch) * len(batch) for batch in sizes)
    assert report["buckets"]["waste"] == pytest.approx(1 - sum(map(sum, sizes)) / padded)
    assert report["buckets"]["tokens"] is None
    assert report["steps"] == len(sizes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--global-batch-tokens", "500"], "needs --bucket-by"),
        (["--global-batch-tokens", "500", "--global-batch", "8"], "are both given"),
        (["--bucket-by", "tokens", "--weights", "1"], "--bucket-by is for a plan of one table"),
        (["--bucket-by", "i", "--global-batch-tokens", "9"], "more than --global-batch-tokens"),
    ],
)
def test_a_plan_that_cannot_be(
    corpus: str, capsys: pytest.CaptureFixture[str], options: list[str], words: str
):
    assert main(["plan", corpus, *options]) == 1
    assert words in capsys.readouterr().err
