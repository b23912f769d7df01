"""What always holds, for every kind of stream, through our loader and through the dataset."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import battery
import mixed
import tables
import zipped
from battery import FACES, KINDS, WORLD_SIZES, expected, joined, opened, read
from destrier import (
    ArgumentError,
    DestrierWarning,
    EmptyError,
    IterationError,
    Permutation,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
    VersionError,
)
from destrier.plan import Cycles, Steps
from destrier.topology import Topology, Worker

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 120  # every one of the world sizes divides it
REMAINDERS = battery.REMAINDERS
quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def kinds(shared_table: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every kind of stream over the shared table."""
    made: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DESTRIER_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name in KINDS:
            folder = tmp_path_factory.mktemp("kind")
            made[name] = battery.make_kind(name, str(shared_table.path), shared_table.ids, folder)
        made.update(mixed.make_kinds(made["filtered"], tmp_path_factory.mktemp("mixed")))
        short = mixed.small_table(tmp_path_factory.mktemp("zip"), "short", 501, 5000)
        made.update(zipped.make_kinds(made["filtered clumps"], short))
    return made


@pytest.fixture(params=[*KINDS, *mixed.KINDS, *zipped.KINDS])
def kind(request: pytest.FixtureRequest, kinds: dict[str, Any]) -> battery.AnyKind:
    return kinds[request.param]


@pytest.fixture(params=KINDS)
def kind_of_table(request: pytest.FixtureRequest, kinds: dict[str, Any]) -> battery.Kind:
    return kinds[request.param]


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["all rows are held", "open windows are held"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading; small tables would only be read in the first."""
    if request.param.startswith("open"):
        monkeypatch.setattr("destrier.holding._LEAST_OWN", math.inf)


# ---- the plan by itself -----------------------------------------------------------------------


@given(
    count=st.integers(1, 400),
    splits=st.integers(1, 40),
    batch=st.integers(1, 60),
    size=st.integers(1, 9),
    workers=st.integers(1, 4),
    begun=st.integers(0, 400),
    remainder=st.sampled_from(REMAINDERS),
)
@example(count=1, splits=1, batch=8, size=4, workers=1, begun=0, remainder="keep")
@example(count=3, splits=3, batch=2, size=2, workers=3, begun=1, remainder="pad")
@settings(max_examples=300, deadline=None, derandomize=True)
def test_plan_is_its_definition(
    count: int, splits: int, batch: int, size: int, workers: int, begun: int, remainder: Any
) -> None:
    splits, start = min(splits, count), min(begun, count)
    slow = battery.steps(count, lambda g: g % splits, batch, start=start, remainder=remainder)
    for rank in range(size):
        seen: dict[int, list[int]] = {}
        for worker in range(workers):
            plan = Steps(
                count,
                start,
                batch,
                splits,
                Topology(rank, size),
                remainder,
                Worker(worker, workers),
            )
            samples, bounds = plan.samples(0, len(plan))
            for i in range(len(plan)):
                seen[plan.step(i)] = samples[bounds[i] : bounds[i + 1]].tolist()
                assert len(seen[plan.step(i)]) <= plan.largest
        assert [seen[j] for j in range(len(slow))] == [battery.share(s, rank, size) for s in slow]
        assert len(seen) == len(slow)


@given(
    count=st.integers(1, 300),
    splits=st.integers(1, 24),
    size=st.sampled_from([1, 2, 3, 4]),
    workers=st.sampled_from([1, 2, 3]),
    rows=st.integers(1, 80),
    begun=st.integers(0, 300),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_cycles_are_their_definition(
    count: int, splits: int, size: int, workers: int, rows: int, begun: int
) -> None:
    splits = splits * size * workers
    if splits > count:
        with pytest.raises(EmptyError, match="at least 1 row per split"):
            Cycles(count, 0, splits)
        return
    begun = min(begun, count)
    first = begun // splits
    for rank in range(size):
        for worker in range(workers):
            plan = Cycles(count, begun, splits, Topology(rank, size), Worker(worker, workers), rows)
            owned = splits // size // workers
            lanes = range((rank * workers + worker) * owned, (rank * workers + worker + 1) * owned)
            slow = [c * splits + lane for c in range(first, count // splits) for lane in lanes]
            samples, bounds = plan.samples(0, len(plan))
            assert samples.tolist() == slow
            for i in range(len(plan)):
                assert plan.counter(i) == (first + bounds[i] // owned) * splits
            assert plan.counter(len(plan)) == max(first, count // splits) * splits


# ---- coverage ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_three_epochs_give_every_row_once(kind: battery.AnyKind, face: str) -> None:
    with opened(face, kind, batch=BATCH, remainder="keep") as stream:
        state = stream.state_dict()
        length = len(stream)
        for epoch in range(3):
            batches = read(kind, stream)
            assert len(stream) == len(batches) == length
            assert batches == expected(kind, state, epoch=epoch, batch=BATCH, remainder="keep")
            kind.check_coverage([row for batch in batches for row in batch.rows], state, epoch)


@pytest.mark.parametrize("remainder", REMAINDERS)
def test_the_remainder_is_dropped_kept_or_padded(
    kind: battery.AnyKind, face: str, remainder: Any
) -> None:
    size, batch = 3, 48
    ranks, lengths = [], set()
    for rank in range(size):
        where = {"rank": rank, "world_size": size}
        with opened(face, kind, batch=batch, remainder=remainder, **where) as stream:
            state = stream.state_dict()
            ranks.append(read(kind, stream))
            lengths.add(len(stream))
    assert joined(ranks) == expected(kind, state, epoch=0, batch=batch, remainder=remainder)
    count = kind.samples(state)
    whole, rest = divmod(count, batch)
    assert lengths == {whole if remainder == "drop" else whole + bool(rest)} == {len(ranks[0])}
    if remainder == "keep":
        shares = {len(mine[-1].samples) for mine in ranks}
        assert max(shares) - min(shares) <= kind.unit
        assert sum(len(b.samples) for mine in ranks for b in mine) == count
    if remainder == "pad":
        assert all(len(b.samples) == batch // size for mine in ranks for b in mine)
        repeats = [m for mine in ranks for b in mine for m in b.mask or ()]
        assert sum(repeats) == (batch - rest) % batch


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_tables_of_a_few_rows(tmp_path: Path, rows: int, remainder: Any, face: str) -> None:
    tables.varied_table(tmp_path / "few.lance", rows)
    ids = np.sort(lance.dataset(str(tmp_path / "few.lance")).to_table(["id"])["id"].to_numpy())
    kind = battery.Kind(str(tmp_path / "few.lance"), ids, {}, np.arange(rows))
    for size, batch in ((1, 1), (1, 3), (2, 2), (4, 4), (8, 8), (3, 6)):
        ranks = []
        for rank in range(size):
            where = {"rank": rank, "world_size": size}
            with opened(face, kind, batch=batch, remainder=remainder, **where) as stream:
                if remainder == "drop" and rows < batch:
                    with pytest.raises(EmptyError, match=rf"{rows} rows .* {batch}"):
                        len(stream)
                    with pytest.raises(EmptyError, match=rf"{rows} rows .* {batch}"):
                        next(iter(stream))
                    continue
                state = stream.state_dict()
                length = len(stream)
                epochs = [read(kind, stream) for _ in range(3)]
                assert {len(batches) for batches in epochs} == {length}
                ranks.append(epochs)
        for epoch in range(3 if ranks else 0):
            assert joined([epochs[epoch] for epochs in ranks]) == expected(
                kind, state, epoch=epoch, batch=batch, remainder=remainder
            )


def test_an_empty_share_is_a_batch_of_no_rows(tmp_path: Path) -> None:
    tables.varied_table(tmp_path / "few.lance", 3)
    dataset = StreamingDataset(str(tmp_path / "few.lance"), rank=0, world_size=8)
    for name in ("torch", "numpy", "arrow", "rows"):
        with StreamingDataLoader(
            dataset, global_batch_size=8, remainder="keep", format=name, with_index=True
        ) as loader:
            (batch,) = list(loader)
        if name == "arrow":
            assert batch.num_rows == 0
            assert batch.schema.names == [*dataset.table.schema.names, "sample_index", "row_offset"]
        elif name == "rows":
            assert batch == []
        else:
            assert {len(value) for value in batch.values()} == {0}
            assert batch["vector"].shape == (0, 4)


def test_rows_deleted_later_are_not_in_the_selection(own_table: Any, face: str) -> None:
    dataset = lance.dataset(str(own_table.path))
    dataset.delete("id % 2 = 0")
    ids = own_table.ids[own_table.ids % 2 == 1]
    kind = battery.Kind(str(own_table.path), ids, {}, np.arange(len(ids)))
    with opened(face, kind, batch=BATCH, remainder="keep") as stream:
        given = [offset for batch in read(kind, stream) for offset in batch.rows]
    assert sorted(given) == list(range(len(ids)))


def test_length_stays_the_same_through_a_resume(kind: battery.AnyKind, face: str) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        before = len(stream)
        read(kind, stream, 3)
        during = len(stream)
        state = stream.state_dict()
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(state)
        loaded = len(stream)
        tail = read(kind, stream)
        assert before == during == loaded == len(stream) == len(tail) + 3
        assert len(read(kind, stream)) == before


# ---- steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [BATCH, 96])
def test_global_batches_are_the_same_for_every_world_size(
    kind: battery.AnyKind, face: str, batch: int
) -> None:
    # Each rank of a mixture opens several tables, so there are fewer of them.
    every = face == "loader" and isinstance(kind, battery.Kind)
    sizes = WORLD_SIZES if every else (1, 2, 5, 12)
    for size in battery.sharing(kind, batch, sizes if batch == BATCH else (3, 12)):
        ranks = []
        for rank in range(size):
            with opened(face, kind, batch=batch, rank=rank, world_size=size) as stream:
                state = stream.state_dict()
                ranks.append(read(kind, stream))
                assert stream.state_dict() == {**state, "epoch": 1}
        assert joined(ranks) == expected(kind, state, epoch=0, batch=batch), size


def test_batch_size_is_of_one_rank(kinds: dict[str, battery.Kind]) -> None:
    kind = kinds["clumps"]
    for rank in range(3):
        dataset = StreamingDataset(
            kind.path, columns=battery.COLUMNS, rank=rank, world_size=3, **kind.options
        )
        with StreamingDataLoader(dataset, batch_size=40, with_index=True) as loader:
            assert (loader.batch_size, loader.total_batch_size) == (40, 120)
            mine = read(kind, loader)
        state = loader.state_dict()
        assert mine == expected(kind, state, epoch=0, batch=120, rank=rank, size=3)


def test_uneven_shares_differ_by_one_and_steps_stay_equal(kind: battery.AnyKind, face: str) -> None:
    if not battery.sharing(kind, BATCH, [7]):
        with (
            opened(face, kind, batch=BATCH, uneven=True, rank=3, world_size=7) as stream,
            pytest.raises(ArgumentError, match=f"units of {kind.unit}, which world_size 7"),
        ):
            next(iter(stream))
        return
    ranks = []
    for rank in range(7):
        with opened(face, kind, batch=BATCH, uneven=True, rank=rank, world_size=7) as stream:
            state = stream.state_dict()
            ranks.append(read(kind, stream))
    assert {len(b.samples) for mine in ranks for b in mine} == {17, 18}
    assert joined(ranks) == expected(kind, state, epoch=0, batch=BATCH)


def test_replicas_read_the_same(kinds: dict[str, battery.Kind], face: str) -> None:
    kind = kinds["clumps"]
    ranks = []
    for rank in range(6):
        where = {"rank": rank, "world_size": 6, "replicas": 2}
        with opened(face, kind, batch=BATCH, **where) as stream:
            state = stream.state_dict()
            ranks.append(read(kind, stream))
    assert ranks[0] == ranks[1]
    assert ranks[4] == ranks[5]
    assert joined(ranks[::2]) == expected(kind, state, epoch=0, batch=BATCH)


@pytest.mark.parametrize("budget", [1, 10_000, 1 << 30])
def test_the_budget_does_not_change_the_batches(
    kinds: dict[str, battery.Kind], face: str, budget: int
) -> None:
    for name in ("plain", "filtered clumps"):
        kind = kinds[name]
        dataset = StreamingDataset(
            kind.path,
            columns=battery.COLUMNS,
            global_batch_size=96,
            with_index=True,
            prefetch_bytes=budget,
            **kind.options,
        )
        stream: Any = dataset
        if face == "loader":
            stream = StreamingDataLoader(dataset, prefetch_bytes=budget)
        small = budget < 1 << 20 and name != "plain"
        with pytest.warns(DestrierWarning, match="prefetch_bytes") if small else nullcontext():
            batches = read(kind, stream)
        assert batches == expected(kind, stream.state_dict(), epoch=0, batch=96)
        stream.close()


@given(
    splits=st.integers(1, 60),
    clump=st.integers(1, 40),
    window=st.integers(1, 9),
    batch=st.integers(1, 300),
    size=st.integers(1, 6),
    step=st.integers(0, 6),
    epoch=st.integers(0, 3),
    remainder=st.sampled_from(REMAINDERS),
    face=st.sampled_from(FACES),
)
@quick
def test_any_settings_give_the_definition(
    shared_table: Any,
    splits: int,
    clump: int,
    window: int,
    batch: int,
    size: int,
    step: int,
    epoch: int,
    remainder: Any,
    face: str,
) -> None:
    options = {"num_splits": splits, "shuffle_clump_size": clump, "shuffle_window": window}
    everything = np.arange(len(shared_table.ids))
    kind = battery.Kind(str(shared_table.path), shared_table.ids, options, everything)
    rank = step % size
    how = {"batch": batch, "remainder": remainder, "uneven": True, "epoch": epoch}
    with opened(face, kind, rank=rank, world_size=size, **how) as stream:
        state = stream.state_dict()
        whole = expected(
            kind, state, epoch=epoch, batch=batch, rank=rank, size=size, remainder=remainder
        )
        step = min(step, len(whole))
        assert read(kind, stream, step) == whole[:step]
        state = stream.state_dict()
    with opened(face, kind, rank=rank, world_size=size, **how) as stream:
        stream.load_state_dict(state)
        assert read(kind, stream) == whole[step:]


# ---- resume -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_resume_at_every_step_on_another_world_size(kind: battery.AnyKind, face: str) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        state = fresh = stream.state_dict()
        states = [state]
        whole = []
        for batch in stream:
            whole.append(battery.check(kind, batch))
            states.append(stream.state_dict())
    assert whole == expected(kind, fresh, epoch=0, batch=BATCH)
    for step, state in enumerate(states):
        assert state == {**state, "counter": step * BATCH, "epoch": 0}
        sizes = battery.sharing(kind, BATCH, (3, 8, 5, 2))
        size = sizes[step % len(sizes)]
        for rank in {0, size // 2, size - 1} if isinstance(kind, battery.Kind) else {step % size}:
            with opened(face, kind, batch=BATCH, rank=rank, world_size=size) as stream:
                stream.load_state_dict(state)
                tail = read(kind, stream)
            share = partial(battery.share, rank=rank, size=size, unit=kind.unit)
            assert tail == [
                battery.Batch(tuple(share(b.samples)), tuple(share(b.rows))) for b in whole[step:]
            ]


def test_every_rank_has_the_same_state_which_serves_all(kind: battery.AnyKind, face: str) -> None:
    states = []
    for rank in range(4):
        with opened(face, kind, batch=BATCH, rank=rank, world_size=4) as stream:
            read(kind, stream, 2)
            states.append(stream.state_dict())
    assert all(state == states[0] for state in states)
    assert StreamingDataset.merge_state_dicts(states) == states[0]
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(states[3])
        whole = expected(kind, states[0], epoch=0, batch=BATCH)
        assert read(kind, stream) == whole[2:]


def test_five_hops_equal_none(kind: battery.AnyKind, face: str) -> None:
    with opened(face, kind, batch=60) as stream:
        state = stream.state_dict()
        whole = expected(kind, state, epoch=0, batch=60)
    given = []
    for hop, wanted in enumerate((1, 2, 5, 3, 12, 4)):
        size = wanted if battery.sharing(kind, 60, [wanted]) else 6
        ranks = []
        for rank in range(size):
            with opened(face, kind, batch=60, rank=rank, world_size=size) as stream:
                stream.load_state_dict(json.loads(json.dumps(state)))
                ranks.append(read(kind, stream, 1 if hop < 5 else None))
                after = stream.state_dict()
        given += joined(ranks)
        state = after
    assert given == whole


def test_the_faces_share_their_states(kind: battery.AnyKind) -> None:
    with opened("loader", kind, batch=BATCH) as loader:
        read(kind, loader, 2)
        state = loader.state_dict()
    with opened("dataset", kind, batch=BATCH) as dataset:
        dataset.load_state_dict(state)
        tail = read(kind, dataset)
    assert tail == expected(kind, state, epoch=0, batch=BATCH)[2:]


def test_a_changed_batch_size_repeats_and_loses_nothing(kind: battery.AnyKind, face: str) -> None:
    given = []
    state: dict[str, Any] = {}
    counter = 0
    if not kind.any_batch:
        with opened(face, kind, batch=48) as stream:
            state = stream.state_dict()
        problem = r"of 48 samples.* 100.*(keep the global batch|take a multiple)"
        with opened(face, kind, batch=100) as stream, pytest.raises(StateError, match=problem):
            stream.load_state_dict(state)
        return
    for batch, most in ((48, 3), (100, 1), (kind.unit, 7), (30, None)):
        how = {"batch": batch, "remainder": "keep"}
        with opened(face, kind, **how) as stream:
            stream.load_state_dict(state)
            part = read(kind, stream, most)
            state = stream.state_dict()
        whole = expected(kind, state, epoch=0, start=counter, **how)
        assert part == whole[:most]
        counter += sum(len(b.samples) for b in part)
        given += part
    assert sorted(g for b in given for g in b.samples) == list(range(kind.samples(state)))


def test_resume_reads_no_more_late_than_early(tmp_path: Path) -> None:
    uri = str(tmp_path / "wide.lance")
    write_wide(uri, 16_384)
    loaded = []
    for counter in (128, 15_872):
        dataset = StreamingDataset(uri, num_splits=64, shuffle_clump_size=8, shuffle_window=4)
        with StreamingDataLoader(dataset, batch_size=128) as loader:
            loader.load_state_dict({**loader.state_dict(), "counter": counter})
            io_before = stats(dataset)
            for _, _batch in zip(range(2), loader, strict=False):
                pass
            settle(loader)
            loaded.append((stats(dataset) - io_before)[1])
    assert loaded[1] <= 1.2 * loaded[0]


# ---- epochs -----------------------------------------------------------------------------------


def test_epochs_follow_each_other_and_differ(kind: battery.AnyKind, face: str) -> None:
    with opened(face, kind, batch=BATCH, epoch=4) as stream:
        state = stream.state_dict()
        assert (state["epoch"], state["counter"]) == (4, 0)
        first, second = read(kind, stream), read(kind, stream)
        assert stream.state_dict() == {**state, "epoch": 6}
    assert first == expected(kind, state, epoch=4, batch=BATCH)
    assert second == expected(kind, state, epoch=5, batch=BATCH)
    assert (first == second) == kind.repeats(state)


def test_a_state_of_the_last_batch_gives_nothing_then_the_next_epoch(
    kind: battery.AnyKind, face: str
) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        length = len(stream)
        iterator = iter(stream)
        for _ in range(length):
            next(iterator)
        state = stream.state_dict()
        assert (state["epoch"], state["counter"]) == (0, length * BATCH)
        with pytest.raises(StopIteration):
            next(iterator)
        over = stream.state_dict()
        assert (over["epoch"], over["counter"]) == (1, 0)
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        assert read(kind, stream) == []
        assert stream.state_dict() == over
        assert read(kind, stream) == expected(kind, state, epoch=1, batch=BATCH)
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(over)
        assert read(kind, stream) == expected(kind, state, epoch=1, batch=BATCH)


def test_an_epoch_left_early_keeps_its_place_until_the_next(
    face: str, kind: battery.AnyKind
) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        fresh = stream.state_dict()
        read(kind, stream, 2)
        left = stream.state_dict()
        assert (left["epoch"], left["counter"]) == (0, 2 * BATCH)
        assert read(kind, stream) == expected(kind, fresh, epoch=1, batch=BATCH)
        assert stream.state_dict() == {**fresh, "epoch": 2}


def test_a_loaded_state_continues_as_the_loop_would(
    kinds: dict[str, battery.Kind], face: str
) -> None:
    kind = kinds["clumps"]
    for remainder in REMAINDERS:
        how = {"batch": 100, "remainder": remainder}
        with opened(face, kind, **how) as stream:
            state = stream.state_dict()
            whole = [expected(kind, state, epoch=epoch, **how) for epoch in range(3)]
            read(kind, stream, 4)
            state = stream.state_dict()
        with opened(face, kind, **how) as stream:
            stream.load_state_dict(state)
            assert read(kind, stream) == whole[0][4:]
            assert read(kind, stream) == whole[1]
            assert read(kind, stream, 3) == whole[2][:3]
            state = stream.state_dict()
        with opened(face, kind, **how) as stream:
            stream.load_state_dict(state)
            assert read(kind, stream) == whole[2][3:]


def test_set_epoch_acts_on_the_next_iterator(kinds: dict[str, battery.Kind], face: str) -> None:
    kind = kinds["clumps"]
    with opened(face, kind, batch=BATCH) as stream:
        state = stream.state_dict()

        def of(epoch: int) -> list[battery.Batch]:
            return expected(kind, state, epoch=epoch, batch=BATCH)

        stream.set_epoch(3)
        assert stream.state_dict()["epoch"] == 3
        assert read(kind, stream) == of(3)
        stream.set_epoch(3)
        assert read(kind, stream) == of(3)
        assert read(kind, stream) == of(4)
        iterator = iter(stream)
        head = [battery.check(kind, next(iterator))]
        stream.set_epoch(8)
        assert (stream.state_dict()["epoch"], stream.state_dict()["counter"]) == (5, BATCH)
        assert head + [battery.check(kind, batch) for batch in iterator] == of(5)
        assert stream.state_dict() == {**state, "epoch": 8}, "a state goes on as the loop does"
        assert read(kind, stream) == of(8)


def test_set_epoch_after_a_load(kinds: dict[str, battery.Kind], face: str) -> None:
    kind = kinds["clumps"]
    with opened(face, kind, batch=BATCH) as stream:
        stream.set_epoch(2)
        read(kind, stream, 3)
        state = stream.state_dict()
        whole = [expected(kind, state, epoch=epoch, batch=BATCH) for epoch in range(5)]
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(state)
        stream.set_epoch(2)
        assert read(kind, stream) == whole[2][3:]
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(state)
        with pytest.warns(DestrierWarning, match=r"set_epoch\(4\) drops .*epoch 2, counter 360"):
            stream.set_epoch(4)
        assert read(kind, stream) == whole[4]


def test_epochs_are_numbers_below_two_to_the_32(table_path: str) -> None:
    with StreamingDataLoader(table_path, batch_size=8) as loader:
        for bad in (-1, 1 << 32):
            with pytest.raises(ArgumentError, match=str(bad)):
                loader.set_epoch(bad)
            with pytest.raises(ArgumentError, match=str(bad)):
                StreamingDataset(table_path, epoch=bad)
            with pytest.raises(ArgumentError, match=str(bad)):
                StreamingDataset(table_path, shuffle_seed=bad)


def test_a_newer_iterator_of_a_loader_closes_the_older(kinds: dict[str, battery.Kind]) -> None:
    kind = kinds["clumps"]
    with opened("loader", kind, batch=BATCH) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        state = loader.state_dict()
        assert battery.check(kind, next(newer)) == expected(kind, state, epoch=1, batch=BATCH)[0]
        with pytest.raises(IterationError, match="newer iterator"):
            next(older)
        assert len(list(newer)) == len(loader) - 1


def test_a_second_live_iterator_of_a_dataset_is_refused(kinds: dict[str, battery.Kind]) -> None:
    kind = kinds["clumps"]
    with opened("dataset", kind, batch=BATCH) as dataset:
        first = iter(dataset)
        next(first)
        with pytest.raises(RuntimeError, match="concurrent"):
            next(iter(dataset))
        assert len(list(first)) == len(dataset) - 1
        assert len(list(dataset)) == len(dataset)


def test_an_iterator_from_before_a_load_is_closed(
    face: str, kinds: dict[str, battery.Kind]
) -> None:
    kind = kinds["clumps"]
    with opened(face, kind, batch=BATCH) as stream:
        older = iter(stream)
        next(older)
        state = stream.state_dict()
        next(older)
        stream.load_state_dict(state)
        newer = iter(stream)
        tail = [battery.check(kind, next(newer))]
        with pytest.raises(IterationError):
            next(older)
        del older
        tail += [battery.check(kind, batch) for batch in newer]
        assert tail == expected(kind, state, epoch=0, batch=BATCH)[1:]


def test_skip_leaves_out_batches(kinds: dict[str, battery.Kind]) -> None:
    kind = kinds["clumps"]
    with opened("loader", kind, batch=BATCH) as loader:
        state = loader.state_dict()
        whole = [expected(kind, state, epoch=epoch, batch=BATCH) for epoch in range(5)]
        loader.skip(3)
        assert loader.state_dict()["counter"] == 3 * BATCH
        assert read(kind, loader) == whole[0][3:]
        iterator = iter(loader)
        head = battery.check(kind, next(iterator))
        loader.skip(2)
        assert [head, *(battery.check(kind, b) for b in iterator)] == [whole[1][0], *whole[1][3:]]
        loader.skip(2)
        loader.skip(1)
        assert read(kind, loader, 2) == whole[2][3:5]
        loader.skip(1)
        assert read(kind, loader) == whole[3][1:]
        loader.skip(10_000)
        assert read(kind, loader) == []
        with pytest.raises(ArgumentError, match="-1"):
            loader.skip(-1)


# ---- identity ---------------------------------------------------------------------------------


def change(path: str, how: str) -> None:
    dataset = lance.dataset(path)
    if how == "append":
        lance.write_dataset(tables.columns(100, 5000), path, mode="append")
    elif how == "update":
        dataset.update({"label": "label + 1"}, where="id % 3 = 0")
    elif how == "delete":
        dataset.delete("id % 3 = 0")
    elif how == "compact":
        dataset.optimize.compact_files()
    elif how == "add column":
        dataset.add_columns({"double": "id * 2"})


@pytest.mark.parametrize("how", ["append", "update", "delete", "compact", "add column"])
def test_changes_after_the_state_change_nothing(own_table: Any, face: str, how: str) -> None:
    for options in (
        {"num_splits": 8, "shuffle_clump_size": 3, "shuffle_window": 4},
        {"filter": "label < 7"},
    ):
        everything = np.arange(len(own_table.ids))
        keep = everything[own_table.ids % 10 < 7] if "filter" in options else everything
        kind = battery.Kind(str(own_table.path), own_table.ids, options, keep)
        with opened(face, kind, batch=BATCH) as stream:
            read(kind, stream, 2)
            state = stream.state_dict()
        change(kind.path, how)
        with opened(face, kind, batch=BATCH) as stream:
            stream.load_state_dict(state)
            assert read(kind, stream) == expected(kind, state, epoch=0, batch=BATCH)[2:]
            assert read(kind, stream) == expected(kind, state, epoch=1, batch=BATCH)
        lance.dataset(kind.path, version=state["table_version"]).restore()


def test_an_added_column_can_be_read_in_a_run(own_table: Any) -> None:
    path = str(own_table.path)
    before = StreamingDataset(path, columns=["id"])
    with StreamingDataLoader(before, batch_size=100) as loader:
        next(iter(loader))
        state = loader.state_dict()
    change(path, "add column")
    newer = StreamingDataset(path, version=lance.dataset(path).version, columns=["id", "double"])
    with StreamingDataLoader(newer, batch_size=100, with_index=True) as loader:
        loader.load_state_dict(state)
        batches = list(loader)
        assert len(batches) == len(loader) - 1
        for batch in batches:
            assert batch["double"].tolist() == (2 * batch["id"]).tolist()
            assert batch["id"].tolist() == own_table.ids[batch["row_offset"]].tolist()


def test_a_version_with_other_rows_is_refused(own_table: Any, face: str) -> None:
    path = str(own_table.path)
    kind = battery.Kind(path, own_table.ids, {}, np.arange(len(own_table.ids)))
    with opened(face, kind, batch=BATCH) as stream:
        state = stream.state_dict()
    change(path, "append")
    version = lance.dataset(path).version
    with opened(face, kind, batch=BATCH, version=version) as stream:
        with pytest.raises(StateError, match="table mismatch") as caught:
            stream.load_state_dict(state)
        assert state["table_identity"] in str(caught.value)
        assert stream.state_dict()["table_identity"] in str(caught.value)


def test_a_version_that_is_gone_is_named(own_table: Any, face: str) -> None:
    path = str(own_table.path)
    kind = battery.Kind(path, own_table.ids, {}, np.arange(len(own_table.ids)))
    with opened(face, kind, batch=BATCH) as stream:
        state = stream.state_dict()
    change(path, "compact")
    lance.dataset(path).cleanup_old_versions(timedelta(0), delete_unverified=True)
    with opened(face, kind, batch=BATCH) as stream:
        with pytest.raises(VersionError, match=str(state["table_version"])) as caught:
            stream.load_state_dict(state)
        assert "pin" in str(caught.value)


def test_a_pinned_version_survives_a_cleanup(own_table: Any) -> None:
    path = str(own_table.path)
    pinned = StreamingDataset(path, pin="run", columns=["id"])
    with StreamingDataLoader(pinned, batch_size=100) as loader:
        next(iter(loader))
        state = loader.state_dict()
        whole = len(loader)
    change(path, "compact")
    lance.dataset(path).cleanup_old_versions(
        timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )
    later = StreamingDataset(path, columns=["id"])
    with StreamingDataLoader(later, batch_size=100) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == whole - 1


def test_a_copy_or_a_moved_table_is_the_same(own_table: Any, tmp_path: Path) -> None:
    dataset = StreamingDataset(str(own_table.path), columns=["id"])
    with StreamingDataLoader(dataset, batch_size=100, with_index=True) as loader:
        state = loader.state_dict()
        samples = [batch["row_offset"].tolist() for batch in loader]
    shutil.copytree(own_table.path, tmp_path / "copy.lance")
    dataset = StreamingDataset(str(tmp_path / "copy.lance"), columns=["id"])
    with StreamingDataLoader(dataset, batch_size=100, with_index=True) as loader:
        loader.load_state_dict(state)
        assert [batch["row_offset"].tolist() for batch in loader] == samples


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_splits", 16),
        ("shuffle_seed", 4),
        ("shuffle_clump_size", 5),
        ("shuffle_window", 3),
        ("shuffle", False),
        ("filter", "label < 8"),
    ],
)
def test_explicit_arguments_that_differ_are_refused(
    table_path: str, face: str, name: str, value: Any, table_ids: Any
) -> None:
    options = {
        "filter": "label < 7",
        "num_splits": 8,
        "shuffle_seed": 3,
        "shuffle_clump_size": 4,
        "shuffle_window": 4,
        "shuffle": True,
    }
    kind = battery.Kind(table_path, table_ids, options, np.arange(0))
    with opened(face, kind, batch=BATCH) as stream:
        state = stream.state_dict()
    with opened(face, kind, batch=BATCH, **{name: value}) as stream:
        with pytest.raises(StateError, match=f"{name} mismatch") as caught:
            stream.load_state_dict(state)
        assert repr(value) in str(caught.value)
        assert repr(options[name]) in str(caught.value)
    kind = battery.Kind(table_path, table_ids, {}, np.flatnonzero(table_ids % 10 < 7))
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        assert read(kind, stream) == expected(kind, state, epoch=0, batch=BATCH)


def test_another_table_and_another_permutation_are_refused(
    own_table: Any, table_path: str, kinds: dict[str, battery.Kind], face: str
) -> None:
    kind = kinds["plain"]
    with opened(face, kind, batch=BATCH) as stream:
        state = stream.state_dict()
    other = battery.Kind(str(own_table.path), own_table.ids, {}, kind.listed)
    with opened(face, other, batch=BATCH) as stream:
        with pytest.raises(StateError, match="table mismatch") as caught:
            stream.load_state_dict(state)
        assert state["table_identity"] in str(caught.value)
        assert stream.state_dict()["table_identity"] in str(caught.value)
    with (
        opened(face, kinds["curriculum"], batch=BATCH) as stream,
        pytest.raises(StateError, match="mismatch"),
    ):
        stream.load_state_dict(state)


def test_a_selection_that_changed_is_refused(own_table: Any, tmp_path: Path) -> None:
    # The text of a filter is not its meaning: the state knows what was selected.
    path = str(own_table.path)
    dataset = StreamingDataset(path, filter="label < 7")
    with StreamingDataLoader(dataset, batch_size=50) as loader:
        state = loader.state_dict()
    with StreamingDataLoader(StreamingDataset(path), batch_size=50) as loader:
        with pytest.raises(StateError, match="plan_hash") as caught:
            loader.load_state_dict({**state, "plan_hash": "0" * 32})
        assert "0" * 32 in str(caught.value)
        assert state["plan_hash"] in str(caught.value)


def test_automatic_choices_do_not_depend_on_the_topology(table_path: str) -> None:
    wanted = []
    for size in WORLD_SIZES:
        dataset = StreamingDataset(table_path, rank=size - 1, world_size=size)
        with StreamingDataLoader(
            dataset, global_batch_size=BATCH, prefetch_bytes=1 << 20
        ) as loader:
            wanted.append(loader.state_dict())
    narrow = StreamingDataset(table_path, columns=["id"])
    with StreamingDataLoader(narrow, global_batch_size=BATCH) as loader:
        wanted.append(loader.state_dict())
    assert all(state == wanted[0] for state in wanted)
    assert wanted[0]["num_splits"] == 360, "the batch times the least number that gives 256"


def test_an_order_written_down_streams_the_same(
    kind_of_table: battery.Kind, tmp_path: Path
) -> None:
    kind = kind_of_table
    dataset = StreamingDataset(kind.source, global_batch_size=BATCH, **kind.options)
    if isinstance(kind, battery.PackedKind | battery.BucketKind):
        with pytest.raises(ArgumentError, match="cannot be written down"):
            dataset.permutation(3)
        return
    uri = dataset.permutation(3).save(str(tmp_path / "order.lance"))
    with opened("loader", kind, batch=BATCH, epoch=3) as loader:
        whole = read(kind, loader)
    saved = battery.Kind(kind.uri, kind.ids, {"permutation": Permutation.open(uri)}, kind.listed)
    for size in (1, 4):
        ranks = []
        for rank in range(size):
            with opened("loader", saved, batch=BATCH, rank=rank, world_size=size) as loader:
                ranks.append(read(kind, loader))
        assert joined(ranks) == whole


# ---- memory and I/O ---------------------------------------------------------------------------


def write_wide(uri: str, rows: int, width: int = 256) -> None:
    values = np.arange(rows * width, dtype=np.float32)
    table = pa.table(
        {
            "id": np.arange(rows),
            "wide": pa.FixedSizeListArray.from_arrays(pa.array(values), width),
            "other": pa.FixedSizeListArray.from_arrays(pa.array(values), width),
        }
    )
    lance.write_dataset(table, uri)


class Io(tuple):
    """Requests and bytes."""

    def __sub__(self, other: Any) -> Io:
        return Io(a - b for a, b in zip(self, other, strict=True))


def stats(dataset: StreamingDataset) -> Io:
    seen = dataset.table.dataset.io_stats_snapshot()
    return Io((seen.read_iops, seen.read_bytes))


def settle(loader: StreamingDataLoader) -> int:
    """Wait until a stream that nobody consumes stands still; return how many batches wait."""
    pipeline = loader._runner.pipeline  # type: ignore[union-attr]
    before, quiet = (-1, -1), 0
    for _ in range(2000):
        now = (pipeline.queued, loader.dataset.bytes_loaded)  # type: ignore[union-attr]
        quiet = quiet + 1 if now == before else 0
        if quiet == 30:
            return now[0]
        before = now
        time.sleep(0.01)
    raise AssertionError("the stream does not come to rest")


@pytest.mark.parametrize("clump", [1, 8])
def test_a_consumer_that_sleeps_holds_the_pipeline(tmp_path: Path, clump: int) -> None:
    uri = str(tmp_path / "wide.lance")
    write_wide(uri, 32_768)  # 32 MiB a column
    budget = 4 << 20
    dataset = StreamingDataset(
        uri, columns=["wide"], num_splits=32, shuffle_clump_size=clump, shuffle_window=8
    )
    with StreamingDataLoader(dataset, batch_size=128, prefetch_bytes=budget) as loader:
        iterator = iter(loader)
        next(iterator)
        waiting = settle(loader)
        assert waiting * 128 * 1024 <= budget
        for _ in range(5):
            next(iterator)
        assert settle(loader) == waiting
        consumed = 6 * 128 * 1024
        loaded = loader.dataset.bytes_loaded  # type: ignore[union-attr]
        assert loaded <= consumed + 1.5 * budget


def test_a_transform_that_makes_rows_large_is_bounded_too(tmp_path: Path) -> None:
    tables.plain_table(tmp_path / "plain.lance", 20_000)

    def enlarge(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"large": torch.zeros(len(batch["id"]), 1000)}

    with StreamingDataLoader(
        str(tmp_path / "plain.lance"), batch_size=50, transform=enlarge, prefetch_bytes=4 << 20
    ) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        for _ in range(64):  # what was queued before its size was known
            next(iterator)
        assert settle(loader) <= (4 << 20) // (50 * 4000)


def test_one_epoch_is_made_ahead_not_many(tmp_path: Path) -> None:
    tables.plain_table(tmp_path / "plain.lance", 30)
    journal = battery.Journal()
    with StreamingDataLoader(
        str(tmp_path / "plain.lance"), batch_size=10, transform=journal
    ) as loader:
        assert len(list(loader)) == 3
        settle(loader)
        assert len(journal.calls) <= 3 * 3


def test_clumps_are_read_in_few_requests(tmp_path: Path) -> None:
    uri = str(tmp_path / "wide.lance")
    rows = 32_768
    write_wide(uri, rows)
    for columns in (["wide"], ["wide", "other"]):
        dataset = StreamingDataset(
            uri, columns=columns, num_splits=16, shuffle_clump_size=32, shuffle_window=8
        )
        with StreamingDataLoader(dataset, batch_size=256) as loader:
            before = stats(dataset)
            iterator = iter(loader)
            for _ in range(len(loader)):
                next(iterator)
            requests, loaded = stats(dataset) - before
        assert requests / (rows * len(columns)) <= 0.06
        assert loaded <= 1.6 * rows * 1024 * len(columns)


def test_columns_not_asked_for_are_never_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "wide.lance")
    write_wide(uri, 8192)
    dataset = StreamingDataset(uri, columns=["id"])
    with StreamingDataLoader(dataset, batch_size=256) as loader:
        before = stats(dataset)
        assert all(set(batch) == {"id"} for batch in loader)
        _, loaded = stats(dataset) - before
    assert loaded < 8192 * 1024 / 4


def test_rows_that_the_filter_drops_are_not_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "wide.lance")
    write_wide(uri, 16_384)
    dataset = StreamingDataset(uri, columns=["wide"], filter="id >= 2000 AND id < 3000")
    with StreamingDataLoader(dataset, batch_size=100) as loader:
        assert len(loader) == 10
        before = stats(dataset)
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        _, loaded = stats(dataset) - before
    assert loaded <= 4 * 1000 * 1024


# ---- manners ----------------------------------------------------------------------------------


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


def test_reading_writes_nothing_to_the_table(own_table: Any, face: str) -> None:
    before = digest(own_table.path)
    kind = battery.Kind(
        str(own_table.path),
        own_table.ids,
        {"filter": "label < 7"},
        np.flatnonzero(own_table.ids % 10 < 7),
    )
    with opened(face, kind, batch=BATCH) as stream:
        read(kind, stream)
        state = stream.state_dict()
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(state)
        read(kind, stream)
    assert list(StreamingDataset(str(own_table.path), columns=["id"]))
    assert digest(own_table.path) == before


def test_nothing_global_is_changed(table_path: str) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)

    def world() -> dict[str, Any]:
        return {
            "random": random.getstate(),
            "numpy": repr(np.random.get_state()),  # noqa: NPY002
            "torch": torch.get_rng_state().tolist(),
            "start method": multiprocessing.get_start_method(allow_none=True),
            "sharing": torch.multiprocessing.get_sharing_strategy(),
            "handlers": list(logging.getLogger().handlers),
            "own handlers": list(logging.getLogger("destrier").handlers),
            "level": (logging.getLogger().level, logging.getLogger("destrier").level),
            "signals": [signal.getsignal(s) for s in signal.valid_signals()],
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
        }

    before = world()
    with StreamingDataLoader(
        StreamingDataset(table_path, columns=battery.COLUMNS, filter="label < 7"),
        batch_size=100,
        transform=battery.Journal(),
    ) as loader:
        list(loader)
        loader.load_state_dict(loader.state_dict())
        list(loader)
    assert list(StreamingDataset(table_path, columns=["id"]))
    assert world() == before


def test_importing_is_cheap_and_starts_no_thread() -> None:
    code = (
        "import sys, threading\n"
        "import torch, lance, pyarrow, numpy\n"
        "threads = set(threading.enumerate())\n"
        "before = set(sys.modules)\n"
        "import destrier, destrier.dataset\n"
        "assert set(threading.enumerate()) == threads\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "unwanted = new & {'lancedb', 'polars', 'PIL', 'pandas', 'matplotlib', 'torchdata'}\n"
        "assert not unwanted, unwanted\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.fixture
def threads() -> Any:
    """Threads of ours that the test started; a loader of another one may be in a cycle still."""
    others = set(threading.enumerate())

    def ours() -> list[str]:
        running = set(threading.enumerate()) - others
        return [t.name for t in running if t.name.startswith("destrier")]

    return ours


def test_close_ends_every_thread(kinds: dict[str, battery.Kind], face: str, threads: Any) -> None:
    with opened(face, kinds["clumps"], batch=BATCH) as stream:
        rows = iter(stream)  # one that is dropped would end its threads by itself
        next(rows)
        assert threads()
    assert not threads()


def test_a_stream_that_is_dropped_ends_its_threads(
    kinds: dict[str, battery.Kind], face: str, threads: Any
) -> None:
    kind = kinds["clumps"]
    dataset: Any = StreamingDataset(
        kind.path, columns=["id"], global_batch_size=BATCH, **kind.options
    )
    stream = StreamingDataLoader(dataset) if face == "loader" else dataset
    next(iter(stream))
    del stream, dataset
    gc.collect()
    wait_for(lambda: not threads())


def wait_for(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def test_replicas_can_be_given_to_the_loader(table_path: str) -> None:
    def first(rank: int) -> list[int]:
        dataset = StreamingDataset(table_path, columns=["id"], rank=rank, world_size=4)
        with StreamingDataLoader(
            dataset, global_batch_size=12, replicas=2, with_index=True
        ) as loader:
            return next(iter(loader))["row_offset"].tolist()

    shares = [first(rank) for rank in range(4)]
    assert shares[0] == shares[1] != shares[2] == shares[3]
    assert len(shares[0]) == 6
    dataset = StreamingDataset(table_path, columns=["id"], rank=0, world_size=4, replicas=2)
    with pytest.raises(ArgumentError, match="replicas=4"):
        StreamingDataLoader(dataset, batch_size=2, replicas=4)
