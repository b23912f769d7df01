"""LanceDB's packing arguments, in row mode, beside LanceDB's own streaming."""

from __future__ import annotations

import importlib
import json
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from destrier import (
    ArgumentError,
    ColumnError,
    EmptyError,
    Mixture,
    Packed,
    ReadError,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
)
from destrier.packing import lengthfile
from destrier.packing.lengths import Lengths
from destrier.packing.per_epoch import Budget

if TYPE_CHECKING:
    from collections.abc import Iterator

EOS, PAD = 1, 0
BLOCK = 8


def documents(count: int, seed: int = 0, least: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    starts = 2 + np.arange(count) * 100
    return [(s + np.arange(rng.integers(least, 30))).tolist() for s in starts]


def table_of(folder: Path, tokens: list[list[int]], name: str = "t") -> Any:
    data = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32())), "id": range(len(tokens))})
    return lancedb.connect(str(folder)).create_table(name, data)


@pytest.fixture
def table(tmp_path: Path) -> Any:
    return table_of(tmp_path, documents(60))


@pytest.fixture(params=["lancedb.streaming", "destrier.dataset"])
def streaming(request: pytest.FixtureRequest) -> Iterator[Any]:
    with warnings.catch_warnings():
        if request.param == "lancedb.streaming":
            warnings.simplefilter("ignore")
        yield importlib.import_module(request.param)


def theirs(table: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(lancedb.streaming.StreamingDataset(table, **options))


def options(blocks: Any, **more: Any) -> dict[str, Any]:
    given = {"pack_sequences": BLOCK, "eos_id": EOS, "pad_id": PAD, "blocks_per_epoch": blocks}
    return {**given, "columns": ["tokens"], **more}


def plain(blocks: Any) -> list[tuple[list[int], list[int]]]:
    return [(block["input_ids"].tolist(), block["doc_ids"].tolist()) for block in blocks]


def content(blocks: Any) -> Counter[int]:
    return Counter(t for ids, _ in plain(blocks) for t in ids if t not in (EOS, PAD))


# ---- code for lancedb.streaming, with only the import changed ---------------------------------


@pytest.mark.parametrize("blocks", [4, 64, 160, "auto"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_layout_is_theirs(streaming: Any, table: Any, blocks: Any, shuffle: bool) -> None:
    dataset = streaming.StreamingDataset(table, **options(blocks, num_splits=4, shuffle=shuffle))
    rows = list(dataset)
    assert len(rows) % 4 == 0
    if blocks != "auto":
        assert len(rows) == blocks
    for row in rows:
        assert list(row) == ["input_ids", "doc_ids"]
        for tensor in row.values():
            assert (type(tensor), tensor.dtype) == (torch.Tensor, torch.int64)
            assert tensor.shape == (BLOCK,)
        ids, numbers = row["input_ids"].tolist(), row["doc_ids"].tolist()
        assert numbers[0] == 0
        for i in range(1, BLOCK):
            # a document begins after an end, and pads belong to the document before them
            assert numbers[i] - numbers[i - 1] == int(ids[i - 1] == EOS and ids[i] != PAD)
    assert all(count == 1 for count in content(rows).values())


def test_a_loader_collates_blocks(streaming: Any, table: Any) -> None:
    dataset = streaming.StreamingDataset(table, **options(64, num_splits=4))
    loader = streaming.StreamingDataLoader(dataset, batch_size=16)
    batches = list(loader)
    getattr(loader, "close", bool)()
    assert len(batches) == 4
    for batch in batches:
        assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.items()} == {
            "input_ids": (torch.int64, (16, BLOCK)),
            "doc_ids": (torch.int64, (16, BLOCK)),
        }


def test_ranks_and_workers_own_blocks_of_splits(streaming: Any, table: Any) -> None:
    whole = plain(streaming.StreamingDataset(table, **options(64, num_splits=8)))
    for size, workers in ((2, 1), (4, 1), (2, 2), (1, 4)):
        owned = 8 // (size * workers)
        for part in range(size * workers):
            rank, worker = divmod(part, workers)
            dataset = streaming.StreamingDataset(
                table,
                **options(64, num_splits=8, rank=rank, world_size=size),
                worker_info_override=SimpleNamespace(id=worker, num_workers=workers),
            )
            lanes = slice(part * owned, (part + 1) * owned)
            wanted = [block for i in range(0, 64, 8) for block in whole[i : i + 8][lanes]]
            assert plain(dataset) == wanted


def test_a_state_resumes_on_another_topology(streaming: Any, table: Any) -> None:
    given = options(64, num_splits=8)
    whole = plain(streaming.StreamingDataset(table, **given))
    states, head = [], []
    for rank in range(2):
        dataset = streaming.StreamingDataset(table, **given, rank=rank, world_size=2)
        iterator = iter(dataset)
        head += plain(next(iterator) for _ in range(3 * 4))
        states.append(dataset.state_dict())
        iterator.close()
    state = streaming.StreamingDataset.merge_state_dicts(states)
    tail = []
    for rank in range(4):
        dataset = streaming.StreamingDataset(table, **given, rank=rank, world_size=4)
        dataset.load_state_dict(state)
        tail += plain(dataset)
    assert sorted(head) == sorted(whole[:24])
    assert sorted(tail) == sorted(whole[24:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eos_id": None}, "eos_id is required when pack_sequences is set"),
        ({"pad_id": None}, "pad_id is required when pack_sequences is set"),
        ({"blocks_per_epoch": None}, "blocks_per_epoch is required when pack_sequences is set"),
        ({"blocks_per_epoch": 0}, "blocks_per_epoch must be"),
        ({"blocks_per_epoch": True}, "blocks_per_epoch must be"),
        ({"blocks_per_epoch": "all"}, "blocks_per_epoch must be"),
        ({"blocks_per_epoch": 6, "num_splits": 4}, r"blocks_per_epoch \(6\) must be divisible by"),
        ({"pack_sequences": 0}, "pack_sequences must be"),
        ({"pack_sequences": None}, "blocks_per_epoch requires pack_sequences"),
        ({"columns": None}, "pack_sequences requires columns to name exactly one"),
        ({"columns": ["tokens", "id"]}, "pack_sequences requires columns to name exactly one"),
        ({"transform": list}, "transform cannot be combined with pack_sequences"),
        ({"columns": ["id"]}, "int64"),
    ],
)
def test_misuse_is_a_value_error(streaming: Any, table: Any, change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        streaming.StreamingDataset(table, **{**options(64, num_splits=4), **change})


@pytest.mark.parametrize(("name", "value"), [("eos_id", 1), ("pad_id", 0)])
def test_ids_without_packing_are_refused(table: Any, name: str, value: int) -> None:
    """LanceDB leaves them unused in silence."""
    with pytest.raises(ArgumentError, match=f"{name} requires pack_sequences, .* {name}={value} "):
        StreamingDataset(table, columns=["id"], **{name: value})


# ---- beside theirs ----------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 50, 119, 150])
def test_one_split_in_table_order_has_their_blocks(table: Any, blocks: int) -> None:
    given = options(blocks, num_splits=1, shuffle=False)
    found = plain(StreamingDataset(table, **given))
    wanted = plain(theirs(table, **given))
    assert found == wanted
    assert len(found) == blocks


def test_a_number_beyond_the_tokens_leaves_none_out(tmp_path: Path) -> None:
    tokens = documents(40, least=0)
    table = table_of(tmp_path, tokens)
    total = sum(len(t) + 1 for t in tokens if t)
    blocks = -(-total // BLOCK) + 5
    blocks += -blocks % 4
    for epoch in range(3):
        dataset = StreamingDataset(table, **options(blocks, num_splits=4, epoch=epoch))
        rows = list(dataset)
        assert content(rows) == Counter(t for document in tokens for t in document)
        ids = np.array([ids for ids, _ in plain(rows)])
        assert (ids == PAD).sum() == blocks * BLOCK - total
        assert ((ids == PAD).all(axis=1)).sum() == blocks - -(-total // BLOCK)


def test_a_number_below_the_tokens_takes_other_ones_each_epoch(table: Any) -> None:
    dataset = StreamingDataset(table, **options(16, num_splits=4))
    seen = [content(dataset) for _ in range(20)]
    assert all(count.most_common(1)[0][1] == 1 for count in seen)
    assert len({tuple(sorted(count)) for count in seen}) >= 15
    lowest = [min(t for t in count) // 100 for count in seen]
    highest = [max(t for t in count) // 100 for count in seen]
    assert max(lowest) < 15
    assert min(highest) > 45, "blocks are from all over the table"


def test_auto_is_exact(table: Any) -> None:
    total = sum(len(t) + 1 for t in documents(60))
    rows = list(StreamingDataset(table, **options("auto", num_splits=4)))
    assert len(rows) == total // BLOCK // 4 * 4
    assert not any(PAD in ids for ids, _ in plain(rows))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1), st.integers(1, 20), st.integers(1, 90), st.data())
def test_blocks_of_any_number(lengths: list[int], size: int, count: int, data: Any) -> None:
    total = sum(lengths)
    if total < size:
        return
    stored = lengthfile._in_memory([np.array(lengths, np.uint32)])
    blocks = Budget(Lengths(stored.values, stored.sums, stored.digest, 0), size, count)
    epoch, shuffle = data.draw(st.integers(0, 5)), data.draw(st.booleans())
    rows = blocks.rows(7, epoch, shuffle=shuffle)
    addresses = rows.offsets(np.arange(count))
    assert len(set(addresses.tolist())) == count == len(rows)
    pieces = blocks.pieces(addresses)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    places = [
        starts[d] + b + i
        for d, b, n in zip(pieces.document, pieces.begin, pieces.length, strict=True)
        for i in range(n)
    ]
    assert len(places) == len(set(places)) == blocks.tokens == total - blocks.unreached
    used = np.bincount(pieces.block, weights=pieces.length, minlength=count)
    full = min(count, total // size)
    assert (used[:full] == size).all()
    assert used[full:].sum() == (total % size if count > total // size else 0)
    one = data.draw(st.integers(0, count - 1))
    alone = blocks.pieces(addresses[one : one + 1])
    assert alone.document.tolist() == pieces.document[pieces.block == one].tolist()
    assert alone.at.tolist() == pieces.at[pieces.block == one].tolist()


# ---- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [16, 160])
def test_every_cycle_resumes_exactly(table: Any, blocks: int) -> None:
    given = options(blocks, num_splits=4)
    whole = StreamingDataset(table, **given)
    rows = [plain(whole), plain(whole)]
    assert rows[0] != rows[1]
    dataset = StreamingDataset(table, **given)
    states = []
    for i, _ in enumerate(dataset, 1):
        if i % 4 == 0:
            states.append((i, json.loads(json.dumps(dataset.state_dict()))))
    assert all(isinstance(v, str | int | bool | None) for v in states[0][1].values())
    assert len({len(state) for _, state in states}) == 1
    for i, state in states[:: max(1, len(states) // 6)]:
        assert state["counter"] == i
        other = StreamingDataset(table, **options(blocks))  # the state knows the splits
        other.load_state_dict(state)
        assert plain(other) == rows[0][i:]
        assert plain(other) == rows[1]


def test_states_that_do_not_belong_are_refused(table: Any) -> None:
    state = StreamingDataset(table, **options(64, num_splits=4)).state_dict()
    for change in ({"blocks_per_epoch": 32}, {"pack_sequences": 4}, {"eos_id": 7}):
        other = StreamingDataset(table, **{**options(64, num_splits=4), **change})
        with pytest.raises(StateError, match="packing mismatch"):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="packing mismatch"):
        StreamingDataset(table, num_splits=4).load_state_dict(state)
    packed = StreamingDataset(Packed(table, block_size=BLOCK, eos_id=EOS), num_splits=4)
    with pytest.raises(StateError, match="packing mismatch"):
        packed.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        their = lancedb.streaming.StreamingDataset(table, **options(64, num_splits=4)).state_dict()
    with pytest.raises(StateError, match=r"lancedb\.streaming"):
        StreamingDataset(table, **options(64, num_splits=4)).load_state_dict(their)


# ---- topologies, sources, bad input -----------------------------------------------------------


def test_splits_are_chosen_so_that_they_divide_the_blocks(table: Any) -> None:
    for blocks, size in ((64, 1), (97, 1), (130, 2), (90, 3)):
        dataset = StreamingDataset(table, **options(blocks, rank=0, world_size=size))
        assert len(dataset) == blocks // size
        assert dataset.num_splits % size == 0
    with pytest.raises(ArgumentError, match=r"blocks_per_epoch \(64\) .* world_size \(3\)"):
        len(StreamingDataset(table, **options(64, rank=0, world_size=3)))
    ordered = StreamingDataset(table, **options(64, shuffle=False, rank=0, world_size=2))
    assert ordered.num_splits == 2


def test_a_torch_loader_with_workers(table: Any) -> None:
    dataset = StreamingDataset(table, **options(64, num_splits=4))
    whole = plain(StreamingDataset(table, **options(64, num_splits=4)))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="spawn")
    found = [block for batch in loader for block in zip(*batch.values(), strict=True)]
    assert sorted((i.tolist(), d.tolist()) for i, d in found) == sorted(whole)


def test_a_filter_chooses_documents(table: Any) -> None:
    rows = list(StreamingDataset(table, **options("auto", num_splits=2, filter="id < 30")))
    assert max(content(rows)) < 2 + 3000


def test_batches_and_other_packings_are_refused(table: Any) -> None:
    for change in ({"batch_size": 4}, {"global_batch_size": 4}):
        with pytest.raises(ArgumentError, match="Packed"):
            StreamingDataset(table, **options(64), **change)
    with pytest.raises(ArgumentError, match="Packed"):
        StreamingDataset(Packed(table, block_size=8), **options(64))
    with pytest.raises(ArgumentError, match=r"has pack_sequences, .* Packed\(table"):
        Mixture({"a": StreamingDataset(table, **options(64)), "b": table})


def test_bad_tokens_name_their_row(tmp_path: Path) -> None:
    tokens = documents(20)
    with pytest.raises(EmptyError, match="block_size is 10000"):
        next(iter(StreamingDataset(table_of(tmp_path, tokens), **options(1, pack_sequences=10000))))
    tokens[7][0] = PAD
    with pytest.raises(ReadError, match=r"row 7 .* pad_id"):
        list(StreamingDataset(table_of(tmp_path, tokens, "pads"), **options("auto", num_splits=1)))
    tokens[7] = None  # type: ignore[call-overload]
    with pytest.raises(ReadError, match="row 7"):
        list(StreamingDataset(table_of(tmp_path, tokens, "nulls"), **options("auto", num_splits=1)))
    with pytest.raises(ColumnError, match="no column 'text'"):
        StreamingDataset(table_of(tmp_path, tokens, "u"), **options(8, columns=["text"]))


def test_a_loader_of_ours_resumes(table: Any) -> None:
    def loader(rank: int, size: int) -> StreamingDataLoader:
        dataset = StreamingDataset(table, **options(60), rank=rank, world_size=size)
        return StreamingDataLoader(dataset, global_batch_size=12)

    with loader(0, 1) as whole:
        batches = list(whole)
    assert len(batches) == 5
    with loader(0, 1) as first:
        next(iter(first))
        state = first.state_dict()
    shares = []
    for rank in range(3):
        with loader(rank, 3) as part:
            part.load_state_dict(state)
            shares.append(list(part))
    for k in range(4):
        found = torch.cat([share[k]["input_ids"] for share in shares])
        assert torch.equal(found, batches[k + 1]["input_ids"])
