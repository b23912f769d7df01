"""Packed blocks as samples: through datasets, loaders, mixtures and states."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
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
    View,
    subset,
)

HOW: dict[str, dict[str, Any]] = {
    "concatenate": {},
    "best fit": {"how": "best_fit", "pad_id": 0, "window": 64},
}
DOCUMENTS = 400


def documents(count: int = DOCUMENTS, first: int = 0) -> list[list[int]]:
    """Return documents of 0 to 12 tokens, all of them different."""
    return [list(range(1 + 20 * i, 1 + 20 * i + i * 7 % 13)) for i in range(first, first + count)]


def write(path: Path, rows: list[list[int]], **more: Any) -> str:
    table = {"tokens": pa.array(rows, pa.list_(pa.int32())), "i": range(len(rows)), **more}
    lance.write_dataset(pa.table(table), str(path), max_rows_per_file=max(150, len(rows) // 4))
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus.lance", documents())


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    return HOW[request.param]


def tokens_of(batches: Any) -> list[int]:
    """Return the tokens of all batches, without pads, in ascending order."""
    found = torch.cat([batch["input_ids"].ravel() for batch in batches])
    return sorted(found[found != 0].tolist())


def test_every_token_comes_once_but_for_a_stated_tail(corpus: str, how: dict[str, Any]):
    packed = Packed(corpus, block_size=32, **how)
    everything = [token for document in documents() for token in document]
    with StreamingDataLoader(packed, batch_size=8, remainder="keep") as loader:
        report = packed.report()
        stream = loader.dataset.stream()
        assert report.blocks == stream.count
        if not how:
            assert report.blocks == len(everything) // 32
        assert len(loader) == -(-report.blocks // 8)
        reached: set[int] = set()
        for _ in range(3):
            found = tokens_of(loader)
            assert len(found) == len(everything) - report.unreached
            assert set(found) <= set(everything)
            assert len(set(found)) == len(found)
            reached.update(found)
    assert report.tokens == len(everything)
    assert report.documents == DOCUMENTS
    assert report.empty == sum(not document for document in documents())
    assert report.waste == pytest.approx(1 - len(found) / (32 * report.blocks))
    assert report.unreached == (0 if how else len(everything) % 32)
    assert reached == set(everything), "another tail is left out in each epoch"


def test_only_what_the_filter_keeps_is_packed(corpus: str, how: dict[str, Any]):
    packed = Packed(corpus, block_size=16, **how)
    kept = {t for i, document in enumerate(documents()) if i % 3 == 1 for t in document}
    dataset = StreamingDataset(packed, filter="i % 3 = 1")
    with StreamingDataLoader(dataset, batch_size=4, remainder="keep") as loader:
        found = tokens_of(loader)
        assert set(found) <= kept
        assert len(found) > len(kept) - 16
    assert packed.report(filter="i % 3 = 1").tokens == len(kept)
    assert dataset.state_dict()["filter"] == "i % 3 = 1"


def test_views_and_permutations_are_packed_in_their_order(corpus: str):
    listed = [7, 300, 7, 12, 12, 2]
    line = [t for i in listed for t in documents()[i]]
    view = subset(corpus, rows=listed)
    permutation = pa.table({"row_offset": listed})
    for source, options in ((view, {}), (corpus, {"permutation": permutation})):
        packed = Packed(source, block_size=5, documents=True)
        with closing(StreamingDataset(packed, shuffle=False, batch_size=1, **options)) as dataset:
            batches = list(dataset)
        found = [t for batch in batches for t in batch["input_ids"].ravel().tolist()]
        assert found == line[: len(line) // 5 * 5]
        # documents that come twice in turn are two
        ends = np.cumsum([len(documents()[i]) for i in listed]).tolist()
        bounds = {
            5 * b + e for b, batch in enumerate(batches) for e in batch["cu_seqlens"][0].tolist()
        }
        assert {end for end in ends if end <= len(found)} <= bounds


def test_columns_of_a_view_are_not_those_of_blocks(corpus: str):
    packed = Packed(View(corpus, columns=["i"]), block_size=8)
    with StreamingDataLoader(packed, batch_size=2) as loader:
        assert list(next(iter(loader))) == ["input_ids"]


def test_table_order_has_the_same_cuts_in_every_epoch(corpus: str):
    with closing(
        StreamingDataset(Packed(corpus, block_size=32), shuffle=False, batch_size=4)
    ) as dataset:
        first, second = ([b["input_ids"].tolist() for b in dataset] for _ in range(2))
    assert first == second
    line = [token for document in documents() for token in document]
    assert [t for batch in first for block in batch for t in block] == line[: 32 * 4 * len(first)]


@pytest.mark.parametrize("memory", [1 << 20, 768 << 20])
def test_cuts_move_and_no_epoch_delivers_those_of_another(corpus: str, memory: int):
    line = [token for document in documents() for token in document]
    place = {token: i for i, token in enumerate(line)}
    firsts = []
    packed = Packed(corpus, block_size=16)
    with StreamingDataLoader(
        packed, batch_size=8, prefetch_bytes=memory, with_index=True
    ) as loader:
        for _ in range(4):
            starts = []
            for batch in loader:
                for ids, offset in zip(
                    batch["input_ids"].tolist(), batch["row_offset"].tolist(), strict=True
                ):
                    assert ids == [line[(offset + i) % len(line)] for i in range(16)]
                    starts.append(place[ids[0]])
            firsts.append({start % 16 for start in starts if start < 16 * len(starts)})
    assert len({min(first) for first in firsts}) > 1


def test_labels_are_the_next_tokens(corpus: str, how: dict[str, Any]):
    packed = Packed(corpus, block_size=16, labels=True, mask_borders=True, dtype="int32", **how)
    after = {a: b for d in documents() for a, b in zip(d, [*d, -100][1:], strict=True)} | {0: -100}
    with StreamingDataLoader(packed, batch_size=8) as loader:
        for batch in loader:
            assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int32
            ids, labels = batch["input_ids"].ravel().tolist(), batch["labels"].ravel().tolist()
            assert labels == [after[token] for token in ids]


def test_chosen_columns_of_blocks(corpus: str):
    packed = Packed(corpus, block_size=16, documents=True)
    dataset = StreamingDataset(packed, columns=["cu_seqlens", "input_ids"])
    with StreamingDataLoader(dataset, batch_size=4, format="arrow") as loader:
        assert next(iter(loader)).schema.names == ["cu_seqlens", "input_ids"]
    for columns, words in (
        (["tokens"], r"no column 'tokens' in blocks of .*; they have: input_ids, position_ids"),
        (["input_ids", "input_ids"], "named twice"),
        ([], "columns is empty"),
    ):
        loader = StreamingDataLoader(StreamingDataset(packed, columns=columns), batch_size=4)
        with pytest.raises(ColumnError, match=words):
            next(iter(loader))


def test_rows_of_row_mode_are_blocks(corpus: str):
    with closing(StreamingDataset(Packed(corpus, block_size=32), num_splits=4)) as dataset:
        rows = list(dataset)
    assert len(rows) == len(dataset) == dataset.stream().count // 4 * 4
    assert len(rows[0]["input_ids"]) == 32


def test_blocks_through_torch_workers(corpus: str):
    def batches(count: int) -> list[Any]:
        dataset = StreamingDataset(Packed(corpus, block_size=32), batch_size=8)
        context = "spawn" if count else None
        loader = DataLoader(
            dataset, batch_size=None, num_workers=count, multiprocessing_context=context
        )
        return [batch["input_ids"].tolist() for batch in loader]

    assert batches(2) == batches(0)


def test_packed_survives_a_pickle(corpus: str):
    packed = pickle.loads(pickle.dumps(Packed(corpus, block_size=32, parallel=["tokens"])))
    assert packed.packing == Packed(corpus, block_size=32, parallel=["tokens"]).packing
    assert "concatenate column=tokens block_size=32" in repr(packed)
    dataset = pickle.loads(pickle.dumps(StreamingDataset(packed)))
    assert dataset.stream().count == packed.report().blocks


# ---- states -----------------------------------------------------------------------------------


def test_a_state_says_how_documents_were_packed(corpus: str, how: dict[str, Any]):
    with StreamingDataLoader(Packed(corpus, block_size=32, **how), batch_size=8) as loader:
        whole = [batch["input_ids"].tolist() for batch in loader]
    with StreamingDataLoader(Packed(corpus, block_size=32, **how), batch_size=8) as loader:
        for _, _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
    assert state["packing"].startswith("destrier-pack-1 ")
    assert all(isinstance(value, str | int | bool | None) for value in state.values())
    # What is delivered beside the tokens may change.
    more = Packed(corpus, block_size=32, documents=True, labels=True, dtype="int32", **how)
    with StreamingDataLoader(more, global_batch_size=8) as loader:
        loader.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in loader] == whole[3:]


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 16},
        {"overlap": 1},
        {"eos_id": 1},
        {"how": "best_fit", "pad_id": 0},
        {"column": "others"},
        None,
    ],
    ids=str,
)
def test_other_blocks_are_refused(tmp_path: Path, change: dict[str, Any] | None):
    others = pa.array(documents())
    corpus = write(tmp_path / "t.lance", documents(), others=others)
    state = StreamingDataset(Packed(corpus, block_size=32), batch_size=8).state_dict()
    other: Any = corpus if change is None else Packed(corpus, **{"block_size": 32, **change})
    words = "rows that are not packed" if change is None else "destrier-pack-1"
    dataset = StreamingDataset(other, batch_size=8)
    with pytest.raises(StateError, match=rf"packing mismatch: .*block_size=32.*{words}"):
        dataset.load_state_dict(state)
    with pytest.raises(StateError, match="packing mismatch"):
        StreamingDataset(Packed(corpus, block_size=32), batch_size=8).load_state_dict(
            dataset.state_dict()
        )


def test_a_state_without_packing_is_none_of_blocks(corpus: str):
    dataset = StreamingDataset(Packed(corpus, block_size=32), batch_size=8)
    state = copy.copy(dataset.state_dict())
    with pytest.raises(StateError, match="packing of the state must be str, got 3"):
        dataset.load_state_dict({**state, "packing": 3})
    state.pop("packing")
    with pytest.raises(StateError, match=r"the state has rows that are not packed"):
        dataset.load_state_dict(state)


def test_lengths_are_a_part_of_the_plan(tmp_path: Path):
    """The same rows and filter, but other counts: what was saved is refused."""
    corpus = write(tmp_path / "t.lance", documents())
    lance.dataset(corpus).add_columns({"tokens_count": "array_length(tokens)"})
    state = StreamingDataset(Packed(corpus, block_size=32), batch_size=8).state_dict()
    dataset = StreamingDataset(Packed(corpus, block_size=32), batch_size=8)
    dataset.load_state_dict(state)
    lance.dataset(corpus).drop_columns(["tokens_count"])
    lance.dataset(corpus).add_columns({"tokens_count": "CAST(array_length(tokens) AS BIGINT) + 1"})
    version = lance.dataset(corpus).version
    changed = StreamingDataset(Packed(corpus, block_size=32), version=version, batch_size=8)
    with pytest.raises(StateError, match="plan_hash mismatch"):
        changed.load_state_dict(state)


def test_a_newer_version_goes_back_to_the_packed_one(corpus: str, how: dict[str, Any]):
    packed = Packed(corpus, block_size=32, **how)
    with closing(StreamingDataset(packed, batch_size=8)) as dataset:
        whole = [batch["input_ids"].tolist() for batch in dataset]
    state = StreamingDataset(packed, batch_size=8).state_dict()
    more = {"tokens": pa.array([[5, 6]], pa.list_(pa.int32())), "i": [1000]}
    lance.write_dataset(pa.table(more), corpus, mode="append")
    with closing(StreamingDataset(packed, batch_size=8)) as dataset:
        dataset.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in dataset] == whole


# ---- mixtures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1 << 20, 768 << 20])
def test_blocks_are_mixed(tmp_path: Path, how: dict[str, Any], memory: int):
    one = write(tmp_path / "one.lance", documents())
    other = write(tmp_path / "other.lance", documents(200, first=1000))
    options = {"block_size": 16, "labels": True, **how}

    def mixture() -> StreamingDataLoader:
        mixed = Mixture(
            {
                "one": StreamingDataset(Packed(one, **options)),
                "other": StreamingDataset(Packed(other, **options)),
            },
            weights={"one": 3, "other": 1},
            window=16,
        )
        return StreamingDataLoader(mixed, batch_size=16, prefetch_bytes=memory)

    with mixture() as loader:
        whole = [batch["input_ids"].tolist() for _ in range(2) for batch in loader]
    shares = np.mean([block[0] > 20_000 for batch in whole for block in batch])
    assert shares == pytest.approx(0.25, abs=0.05)
    with mixture() as loader:
        for _, _ in zip(range(2), loader, strict=False):
            pass
        state = loader.state_dict()
    with mixture() as loader:
        loader.load_state_dict(state)
        tail = [batch["input_ids"].tolist() for _ in range(2) for batch in loader]
    assert tail == whole[2:]


# ---- bad rows and arguments -------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1 << 20, 768 << 20])
def test_blocks_of_a_bad_document_are_skipped(tmp_path: Path, how: dict[str, Any], memory: int):
    rows = documents()
    rows[37] = [1, -5, 3]
    corpus = write(tmp_path / "bad.lance", rows)
    packed = Packed(corpus, block_size=16, **how)
    options: dict[str, Any] = {"batch_size": 8, "prefetch_bytes": memory, "remainder": "keep"}
    with (
        pytest.raises(ReadError, match=r"'tokens' of row 37 .*the token -5 at place 1"),
        StreamingDataLoader(packed, **options) as loader,
    ):
        list(loader)
    with StreamingDataLoader(packed, on_error="skip", with_index=True, **options) as loader:
        for _ in range(2):
            skipped = loader.rows_skipped
            batches = list(loader)
            assert len(batches) == len(loader)
            delivered = sum(len(batch["input_ids"]) for batch in batches)
            lost = loader.rows_skipped - skipped
            assert 1 <= lost <= 2
            assert delivered == loader.dataset.stream().count - lost
            assert not any((batch["input_ids"] == -5).any() for batch in batches)
        assert {error.offset for error in loader.failures} == {37}


def test_too_few_tokens(corpus: str):
    count = sum(map(len, documents()))
    with pytest.raises(EmptyError, match=rf"block_size is 5000, but all .* have {count} tokens"):
        StreamingDataset(Packed(corpus, block_size=5000)).stream()
    with pytest.raises(EmptyError, match="rows are fewer than one step"):
        len(StreamingDataLoader(Packed(corpus, block_size=1000), batch_size=8))


def test_an_order_of_blocks_is_no_list_of_rows(corpus: str):
    with pytest.raises(ArgumentError, match="packed blocks cannot be written down"):
        StreamingDataset(Packed(corpus, block_size=32)).permutation()


# ---- how it is read ---------------------------------------------------------------------------


def test_clumps_of_blocks_read_neighbouring_documents(tmp_path: Path):
    """Documents between two blocks of a clump are read once, not once for each block."""
    rows = [list(range(1, 50))] * 20_000
    corpus = write(tmp_path / "t.lance", rows)
    dataset = StreamingDataset(
        Packed(corpus, block_size=98), shuffle_clump_size=16, shuffle_window=4, num_splits=8
    )
    with (
        warnings.catch_warnings(),
        StreamingDataLoader(dataset, batch_size=64, prefetch_bytes=4 << 20) as loader,
    ):
        warnings.simplefilter("error")
        assert len(list(loader)) == 10_000 // 64
        read = loader.stats().stages["read"].rows
    assert read < 1.2 * 20_000


def test_a_cache_keeps_documents(corpus: str, tmp_path: Path, how: dict[str, Any]):
    def batches(**options: Any) -> list[Any]:
        packed = Packed(corpus, block_size=32, **how)
        with closing(StreamingDataset(packed, batch_size=8, **options)) as dataset:
            return [batch["input_ids"].tolist() for batch in dataset]

    plain = batches()
    for _ in range(2):
        assert batches(cache_dir=tmp_path / "cache") == plain
    assert any((tmp_path / "cache").rglob("*"))
