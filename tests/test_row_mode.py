"""Row mode: dict rows, with LanceDB's names and meanings.

The first half is code as users of ``lancedb.streaming`` write it. It runs twice, once with that
import and once with ours, and must hold for both.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

import battery
import destrier.dataset
import mixed
from destrier import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    EmptyError,
    IterationError,
    StateError,
    StreamingDataset,
    TransformError,
)
from destrier.sizing import default_num_splits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 103


@pytest.fixture
def table(tmp_path: Path) -> Any:
    data = pa.table({"id": range(ROWS), "label": [i % 3 for i in range(ROWS)]})
    return lancedb.connect(str(tmp_path)).create_table("rows", data)


@pytest.fixture(params=["lancedb.streaming", "destrier.dataset"])
def streaming(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module that the code imports its names from."""
    with warnings.catch_warnings():
        if request.param == "lancedb.streaming":
            warnings.simplefilter("ignore")
        yield importlib.import_module(request.param)


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


# ---- code for lancedb.streaming, with only the import changed ---------------------------------


def test_an_epoch_drops_only_the_surplus(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=8, shuffle_seed=3)
    rows = list(dataset)
    assert isinstance(rows[0], dict)
    assert set(rows[0]) == {"id", "label"}
    assert len(set(ids(rows))) == len(rows) == ROWS // 8 * 8
    assert all(row["label"] == row["id"] % 3 for row in rows)
    again = streaming.StreamingDataset(table, num_splits=8, shuffle_seed=3)
    assert ids(again) == ids(rows)
    other = streaming.StreamingDataset(table, num_splits=8, shuffle_seed=4)
    assert ids(other) != ids(rows)
    later = streaming.StreamingDataset(table, num_splits=8, shuffle_seed=3, epoch=1)
    assert ids(later) != ids(rows)


def test_ranks_and_workers_own_blocks_of_splits(streaming: Any, table: Any) -> None:
    whole = ids(streaming.StreamingDataset(table, num_splits=8))
    cycles = [whole[i : i + 8] for i in range(0, len(whole), 8)]
    for size in (1, 2, 4, 8):
        for workers in (1, 2):
            if 8 % (size * workers):
                continue
            owned = 8 // (size * workers)
            for part in range(size * workers):
                rank, worker = divmod(part, workers)
                dataset = streaming.StreamingDataset(
                    table,
                    num_splits=8,
                    rank=rank,
                    world_size=size,
                    worker_info_override=SimpleNamespace(id=worker, num_workers=workers),
                )
                lanes = slice(part * owned, (part + 1) * owned)
                assert ids(dataset) == [i for cycle in cycles for i in cycle[lanes]]


def test_without_shuffle_splits_are_contiguous(streaming: Any, table: Any) -> None:
    table.delete("id >= 96")
    dataset = streaming.StreamingDataset(table, num_splits=4, shuffle=False)
    assert ids(dataset) == np.arange(96).reshape(4, 24).T.ravel().tolist()
    one = streaming.StreamingDataset(table, num_splits=1, shuffle=False)
    assert ids(one) == list(range(96))


def test_columns_and_filter(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, columns=["id"], filter="label = 1", num_splits=2)
    rows = list(dataset)
    assert all(set(row) == {"id"} for row in rows)
    assert sorted(ids(rows)) == list(range(1, ROWS, 3))


def test_a_transform_gets_record_batches(streaming: Any, table: Any) -> None:
    sizes = []

    def transform(batch: pa.RecordBatch) -> list[tuple[int, int]]:
        assert isinstance(batch, pa.RecordBatch)
        sizes.append(batch.num_rows)
        return list(zip(batch["id"].to_pylist(), batch["label"].to_pylist(), strict=True))

    plain = streaming.StreamingDataset(table, num_splits=4)
    wanted = [(row["id"], row["label"]) for row in plain]
    dataset = streaming.StreamingDataset(
        table,
        num_splits=4,
        transform=transform,
        read_batch_size=10,
        transform_parallelism=2,
        transform_queue_depth=2,
        io_queue_depth=2,
    )
    assert list(dataset) == wanted
    assert max(sizes) <= 10
    assert sum(sizes) >= len(wanted)
    assert dataset.transform_time >= 0


def test_clumps_keep_their_rows_together(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=4, shuffle_clump_size=4)
    assert len(set(ids(dataset))) == ROWS // 4 * 4


def test_misuse_is_a_value_error(streaming: Any, table: Any) -> None:
    for bad in (
        {"transform_parallelism": 0},
        {"io_queue_depth": 0},
        {"transform_queue_depth": 0},
    ):
        with pytest.raises(ValueError, match="must be greater than 0"):
            streaming.StreamingDataset(table, **bad)
    with pytest.raises(ValueError, match="on_transform_error"):
        streaming.StreamingDataset(table, on_transform_error="never")
    with pytest.raises(ValueError, match=r"num_splits \(3\) must be divisible by world_size \(2\)"):
        next(iter(streaming.StreamingDataset(table, num_splits=3, rank=0, world_size=2)))
    with pytest.raises(ValueError, match="at least 1 row per split"):
        next(iter(streaming.StreamingDataset(table, num_splits=ROWS + 1)))
    worker = SimpleNamespace(id=0, num_workers=3)
    dataset = streaming.StreamingDataset(table, num_splits=4, worker_info_override=worker)
    with pytest.raises(ValueError, match="divisible by"):
        next(iter(dataset))


def test_a_wrong_column_fails_at_iteration(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=2, columns=["id", "nonsense"])
    with pytest.raises(Exception, match="nonsense"):
        next(iter(dataset))


def test_a_transform_of_the_wrong_length(streaming: Any, table: Any) -> None:
    for policy in ("raise", "skip"):
        dataset = streaming.StreamingDataset(
            table,
            num_splits=2,
            transform=lambda batch: batch["id"].to_pylist()[1:],
            on_transform_error=policy,
        )
        with pytest.raises(ValueError, match="one output row per input row"):
            list(dataset)


def test_bad_rows_raise_or_are_left_out(
    streaming: Any, table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {i for i in range(ROWS) if i % 50 == 0}
    options = {"num_splits": 1, "transform": battery.refuses}
    with pytest.raises(ValueError, match="multiple of 50"):
        list(streaming.StreamingDataset(table, **options))
    whole = ids(streaming.StreamingDataset(table, num_splits=1))
    for policy in ("skip", "warn", lambda error: isinstance(error, ValueError)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            dataset = streaming.StreamingDataset(table, on_transform_error=policy, **options)
            assert list(dataset) == [i for i in whole if i not in bad]
        assert dataset.rows_skipped == len(bad)
        getattr(dataset, "close", bool)()
        said = [r for r in caplog.records if "Skipped" in r.getMessage()]
        assert bool(said) == (policy == "warn")
    with pytest.raises(ValueError, match="multiple of 50"):
        list(streaming.StreamingDataset(table, on_transform_error=lambda _: False, **options))


def test_a_state_resumes_on_another_topology(streaming: Any, table: Any) -> None:
    whole = ids(streaming.StreamingDataset(table, num_splits=8, shuffle_seed=1))
    states, head = [], []
    for rank in range(2):
        dataset = streaming.StreamingDataset(
            table, num_splits=8, shuffle_seed=1, rank=rank, world_size=2
        )
        iterator = iter(dataset)
        head += [next(iterator)["id"] for _ in range(5 * 4)]
        states.append(dataset.state_dict())
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
    state = streaming.StreamingDataset.merge_state_dicts(states)
    assert {"shuffle_seed", "num_splits", "epoch"} <= set(state)
    assert (state["shuffle_seed"], state["num_splits"], state["epoch"]) == (1, 8, 0)
    for key in ("samples_consumed_per_split", "positions_consumed_per_split"):
        assert np.all(np.asarray(state[key]) == 5)
    tail = []
    for rank in range(4):
        dataset = streaming.StreamingDataset(
            table, num_splits=8, shuffle_seed=1, rank=rank, world_size=4
        )
        dataset.load_state_dict(state)
        tail += ids(dataset)
    assert sorted(head) == sorted(whole[:40])
    assert sorted(tail) == sorted(whole[40:])
    one = streaming.StreamingDataset(table, num_splits=8, shuffle_seed=1)
    one.load_state_dict(state)
    assert ids(one) == whole[40:]


def test_states_that_do_not_belong_are_refused(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=4, shuffle_seed=1)
    state = dataset.state_dict()
    for options, message in (
        ({"num_splits": 8, "shuffle_seed": 1}, "num_splits mismatch"),
        ({"num_splits": 4, "shuffle_seed": 2}, "shuffle_seed mismatch"),
    ):
        with pytest.raises(ValueError, match=message):
            streaming.StreamingDataset(table, **options).load_state_dict(state)
        other = streaming.StreamingDataset(table, **options).state_dict()
        with pytest.raises(ValueError, match="mismatch across state dicts"):
            streaming.StreamingDataset.merge_state_dicts([state, other])
    with pytest.raises(ValueError, match="at least one"):
        streaming.StreamingDataset.merge_state_dicts([])


def test_two_live_iterators_are_refused(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=2)
    first = iter(dataset)
    next(first)
    with pytest.raises(RuntimeError, match="concurrent"):
        next(iter(dataset))
    assert len(list(first)) == ROWS // 2 * 2 - 1


def test_counters_count(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=4)
    assert (dataset.bytes_loaded, dataset.consumed_rows, dataset.rows_skipped) == (0, 0, 0)
    iterator = iter(dataset)
    for _ in range(12):
        next(iterator)
    assert dataset.consumed_rows == 12
    assert dataset.bytes_loaded > 0
    assert dataset.fetch_time > 0
    assert dataset.transform_time >= 0
    assert 0 <= dataset.unscanned_rows <= 88
    assert dataset.raw_queue_depth >= 0
    assert 0 <= dataset.prefetch_queue_depth <= 88
    for _ in iterator:
        pass
    assert dataset.unscanned_rows == 0
    assert dataset.prefetch_queue_depth == 0


def test_a_data_loader_batches_rows(streaming: Any, table: Any) -> None:
    whole = ids(streaming.StreamingDataset(table, num_splits=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = streaming.StreamingDataset(table, num_splits=4)
        batches = list(DataLoader(dataset, batch_size=16))
    assert torch.cat([batch["id"] for batch in batches]).tolist() == whole
    assert batches[0]["label"].dtype == torch.int64


def test_the_streaming_data_loader_makes_batches(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, num_splits=8)
    loader = streaming.StreamingDataLoader(dataset, batch_size=8)
    iterator = iter(loader)
    head = [next(iterator)["id"] for _ in range(3)]
    state = dataset.state_dict()
    assert np.all(np.asarray(state["samples_consumed_per_split"]) == 3)
    del iterator
    other = streaming.StreamingDataset(table, num_splits=8)
    other.load_state_dict(state)
    tail = [batch["id"] for batch in streaming.StreamingDataLoader(other, batch_size=8)]
    assert len({*torch.cat([*head, *tail]).tolist()}) == ROWS // 8 * 8
    assert not set(torch.cat(head).tolist()) & set(torch.cat(tail).tolist())


def test_packing_needs_its_arguments(streaming: Any, table: Any) -> None:
    with pytest.raises(ValueError, match=r"eos_id|pack_sequences"):
        streaming.StreamingDataset(table, pack_sequences=8)


# ---- what is ours -----------------------------------------------------------------------------


@pytest.fixture
def kind(shared_table: Any, tmp_path: Path) -> battery.Kind:
    return battery.make_kind("clumps", str(shared_table.path), shared_table.ids, tmp_path)


OF_ROWS = [name for name in battery.KINDS if name not in battery.KINDS_OF_BATCHES]


@pytest.mark.parametrize("name", [*OF_ROWS, *mixed.KINDS])
def test_rows_are_the_definition(shared_table: Any, tmp_path: Path, name: str) -> None:
    path, ids_of = str(shared_table.path), shared_table.ids
    if name in mixed.KINDS:
        filtered = battery.make_kind("filtered", path, ids_of, tmp_path)
        kind: Any = mixed.make_kinds(filtered, tmp_path)[name]
    else:
        kind = battery.make_kind(name, path, ids_of, tmp_path)
    for rank, size in ((0, 1), (1, 2), (7, 8)):
        few = name in battery.KINDS and size > kind.options.get("num_splits", 1)
        if few and name not in ("plain", "filtered"):
            continue
        dataset = kind.make(columns=["id"], rank=rank, world_size=size)
        if not kind.any_batch:
            with pytest.raises(ArgumentError, match="needs a batch size"):
                dataset.state_dict()
            continue
        state = dataset.state_dict()
        for epoch in range(2):
            wanted = battery.rows_of(kind, state, epoch=epoch, rank=rank, size=size)
            assert len(dataset) == len(wanted)
            assert ids(dataset) == wanted
        dataset.close()


def test_a_dataset_pickles_plainly(table: Any) -> None:
    dataset = StreamingDataset(table, num_splits=4, shuffle_seed=6)
    assert ids(pickle.loads(pickle.dumps(dataset))) == ids(dataset)


class Connect:
    """Opens the table in another process, so that no credentials travel."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Any:
        assert name == "rows"
        return lancedb.connect(self.folder).open_table(name)


def test_a_connection_factory_opens_the_table(table: Any, tmp_path: Path) -> None:
    dataset = StreamingDataset(table, num_splits=4, connection_factory=Connect(str(tmp_path)))
    assert ids(pickle.loads(pickle.dumps(dataset))) == ids(dataset)


def test_values_of_rows_are_pythons(kind: battery.Kind) -> None:
    row = next(iter(StreamingDataset(kind.path, **kind.options)))
    i = row["id"]
    assert row == {
        "id": i,
        "label": i % 10,
        "value": i / 8,
        "vector": [i, i + 0.25, i + 0.5, i + 0.75],
        "name": f"row {i}",
        "blob": i.to_bytes(4, "little") * (1 + i % 9),
        "tokens": list(range(i, i + i % 5)),
        "maybe": None if i % 7 == 0 else i,
    }


def test_automatic_splits_suit_ranks_and_workers(table_path: str) -> None:
    def splits(**options: Any) -> int:
        return int(StreamingDataset(table_path, **options).num_splits)

    assert splits() == 8  # 1 003 rows: at least 64 cycles, so that few rows are left over
    assert splits(rank=0, world_size=2) == 8
    assert splits(rank=0, world_size=3) == 15
    assert splits(rank=0, world_size=3, filter="label = 1") == 3
    worker = SimpleNamespace(id=0, num_workers=5)
    assert splits(rank=0, world_size=3, worker_info_override=worker) == 15
    assert default_num_splits(100_000) == 256
    assert default_num_splits(100_000, multiple=3) == 258
    with pytest.raises(EmptyError, match="2 rows are too few for 3 ranks"):
        default_num_splits(2, multiple=3)
    assert splits(shuffle=False) == 1
    assert splits(shuffle=False, rank=0, world_size=3) == 3


def test_states_are_whole_cycles(kind: battery.Kind) -> None:
    dataset = StreamingDataset(kind.path, columns=["id"], **kind.options)
    whole = battery.rows_of(kind, dataset.state_dict(), epoch=0)
    iterator = iter(dataset)
    for n in range(1, len(whole) + 1):
        next(iterator)
        assert dataset.state_dict()["counter"] == n // 8 * 8
        if n in (1, 7, 8, 9, 500, len(whole)):
            fresh = StreamingDataset(kind.path, columns=["id"])
            fresh.load_state_dict(dataset.state_dict())
            assert ids(fresh) == whole[n // 8 * 8 :]
            assert ids(fresh) == battery.rows_of(kind, dataset.state_dict(), epoch=1)
            fresh.close()
    assert dataset.state_dict()["epoch"] == 0
    assert next(iterator, None) is None
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["counter"]) == (1, 0)
    dataset.close()


def test_an_epoch_left_early_and_set_epoch(kind: battery.Kind) -> None:
    dataset = StreamingDataset(kind.path, columns=["id"], **kind.options)
    state = dataset.state_dict()

    def of(epoch: int) -> list[int]:
        return battery.rows_of(kind, state, epoch=epoch)

    for row in dataset:
        assert row["id"] == of(0)[0]
        break
    assert dataset.state_dict()["epoch"] == 0
    assert ids(dataset) == of(1)
    dataset.set_epoch(6)
    assert ids(dataset) == of(6)
    assert dataset.epoch == 7
    dataset.close()


def test_skipped_rows_shift_nothing(kind: battery.Kind) -> None:
    options = {**kind.options, "transform": battery.refuses, "on_transform_error": "skip"}
    for rank in range(2):
        dataset = StreamingDataset(
            kind.path, columns=["id"], rank=rank, world_size=2, read_batch_size=7, **options
        )
        whole = battery.rows_of(kind, dataset.state_dict(), epoch=0, rank=rank, size=2)
        good = [i for i in whole if i % 50]
        assert list(dataset) == good
        assert dataset.rows_skipped == len(whole) - len(good)
        state = {**dataset.state_dict(), "epoch": 0, "counter": 400}
        dataset.load_state_dict(state)
        assert list(dataset) == [i for i in whole[200:] if i % 50]
        dataset.close()


def test_a_split_of_only_bad_rows_ends_nothing(table_path: str) -> None:
    dataset = StreamingDataset(
        table_path,
        columns=["id"],
        filter="id % 50 = 0",
        transform=battery.refuses,
        on_transform_error="skip",
        num_splits=2,
    )
    assert list(dataset) == []
    assert dataset.rows_skipped == len(dataset)
    dataset.close()


def test_an_error_of_a_transform_names_its_kind(kind: battery.Kind) -> None:
    options = {**kind.options, "columns": ["id"], "transform": battery.refuses}
    dataset = StreamingDataset(kind.path, **options)
    with pytest.raises(ValueError, match="multiple of 50"):
        list(dataset)
    batches = StreamingDataset(kind.path, batch_size=100, **options)
    with pytest.raises(TransformError, match="multiple of 50"):
        list(batches)


def test_our_misuse(table_path: str, table_ids: Any) -> None:
    with pytest.raises(ArgumentError, match="read_batch_size"):
        StreamingDataset(table_path, read_batch_size=0)
    for name in ("pack_sequences", "blocks_per_epoch"):
        with pytest.raises(ArgumentError, match=name):
            StreamingDataset(table_path, **{name: 8})
    with pytest.warns(DestrierWarning, match="io_queue_depth"):
        StreamingDataset(table_path, prefetch_batches=3)
    with pytest.raises(ArgumentError, match=r"1004.*1003 rows"):
        next(iter(StreamingDataset(table_path, num_splits=1004)))
    with pytest.raises(ColumnError, match=r"nonsense.*id, label"):
        next(iter(StreamingDataset(table_path, columns=["nonsense"])))
    with pytest.raises(ColumnError, match="empty"):
        next(iter(StreamingDataset(table_path, columns=[])))
    with pytest.raises(ColumnError, match="twice"):
        next(iter(StreamingDataset(table_path, columns=["id", "id"])))


def test_both_loaders_come_from_one_module() -> None:
    from destrier import StreamingDataLoader

    assert destrier.dataset.StreamingDataLoader is StreamingDataLoader
    with pytest.raises(AttributeError, match="nonsense"):
        _ = destrier.dataset.nonsense


def test_a_state_of_lancedb_is_refused_by_name(table: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = importlib.import_module("lancedb.streaming").StreamingDataset(table, num_splits=4)
        state = {**theirs.state_dict(), "epoch": 6}
    with pytest.raises(StateError, match=r"lancedb.streaming.*epoch=7"):
        StreamingDataset(table).load_state_dict(state)


def test_an_iterator_can_be_closed(kind: battery.Kind) -> None:
    dataset = StreamingDataset(kind.path, columns=["id"], **kind.options)
    iterator: Any = iter(dataset)
    next(iterator)
    iterator.close()
    assert list(iterator) == []
    assert ids(dataset) == battery.rows_of(kind, dataset.state_dict(), epoch=1)
    iterator = iter(dataset)
    next(iterator)
    dataset.close()
    with pytest.raises(IterationError, match="closed"):
        next(iterator)


def test_worker_override_warns_in_a_real_worker(
    kind: battery.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import _utils

    info = SimpleNamespace(id=1, num_workers=2, seed=5, dataset=None)
    monkeypatch.setattr(_utils.worker, "_worker_info", info)
    dataset = StreamingDataset(
        kind.path,
        columns=["id"],
        worker_info_override=SimpleNamespace(id=0, num_workers=4),
        **kind.options,
    )
    with pytest.warns(DestrierWarning, match="worker_info_override"):
        rows = ids(dataset)
    assert rows == battery.rows_of(kind, dataset.state_dict(), epoch=0, worker=0, workers=4)


def test_tables_of_both_libraries_stream_alike(table: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "rows.lance")
    sources = (table, lance.dataset(uri), uri, tmp_path / "rows.lance")
    first, *others = [ids(StreamingDataset(source)) for source in sources]
    assert all(other == first for other in others)
