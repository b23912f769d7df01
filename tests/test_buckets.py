"""Batches of like length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from destrier import (
    ArgumentError,
    ColumnError,
    Mixture,
    Packed,
    ReadError,
    StateError,
    StreamingDataLoader,
    StreamingDataset,
)

ROWS = 3000


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    lengths = np.random.default_rng(0).integers(1, 100, ROWS)
    rows = pa.array([[i] * n for i, n in enumerate(lengths.tolist())])
    columns = {"tokens": rows, "i": range(ROWS), "name": ["a"] * ROWS, "size": lengths + 5}
    lance.write_dataset(pa.table(columns), str(tmp_path / "t.lance"))
    return str(tmp_path / "t.lance")


def loader(corpus: str, size: int = 32, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(corpus, **options), batch_size=size)


def padding(batches: Any) -> float:
    """Return the share of pads if each batch were padded to its longest row."""
    sizes = [[len(row) for row in batch["tokens"]] for batch in batches]
    return 1 - sum(map(sum, sizes)) / sum(max(batch) * len(batch) for batch in sizes)


@pytest.mark.parametrize("memory", [1 << 21, 768 << 20])
def test_little_is_padded_and_other_rows_meet_in_each_epoch(corpus: str, memory: int):
    dataset = StreamingDataset(corpus, bucket_by="tokens", shuffle_clump_size=4, num_splits=16)
    with StreamingDataLoader(dataset, batch_size=32, prefetch_bytes=memory) as by_length:
        epochs = [list(by_length) for _ in range(2)]
        with loader(corpus) as plain:
            mixed = list(plain)
        for batches in epochs:
            assert len(batches) == len(by_length) == len(mixed) == ROWS // 32
            rows = [i for batch in batches for i in batch["i"].tolist()]
            assert len(set(rows)) == len(rows)
            assert padding(batches) < 0.05
            assert padding(mixed) > 0.4
        one, other = ({frozenset(b["i"].tolist()) for b in batches} for batches in epochs)
        assert not one & other
        means = [np.mean([len(row) for row in batch["tokens"]]) for batch in epochs[0]]
        assert abs(np.corrcoef(range(len(means)), means)[0, 1]) < 0.5, "short and long in turn"


def test_a_column_of_lengths_does_as_well(corpus: str):
    by_list, by_number = (
        [batch["i"].tolist() for batch in loader(corpus, bucket_by=name)]
        for name in ("tokens", "size")
    )
    assert by_list == by_number


def test_all_ranks_take_the_same_steps_of_the_same_length(corpus: str):
    def shares(rank: int) -> list[Any]:
        dataset = StreamingDataset(corpus, bucket_by="tokens", rank=rank, world_size=4)
        with StreamingDataLoader(dataset, global_batch_size=64) as mine:
            return list(mine)

    ranks = [shares(rank) for rank in range(4)]
    assert {len(mine) for mine in ranks} == {ROWS // 64}
    whole = [
        [row for share in step for row in share["tokens"]] for step in zip(*ranks, strict=True)
    ]
    assert padding([{"tokens": step} for step in whole]) < 0.1


def test_a_state_brings_its_buckets(corpus: str):
    with loader(corpus, bucket_by="tokens", bucket_window=7) as one:
        whole = [batch["i"].tolist() for batch in one]
    with loader(corpus, bucket_by="tokens", bucket_window=7) as one:
        for _, _ in zip(range(5), one, strict=False):
            pass
        state = one.state_dict()
    assert state["buckets"] == '["tokens",7,32]'
    for options in ({}, {"bucket_by": "tokens"}, {"bucket_window": 7, "bucket_by": "tokens"}):
        with loader(corpus, **options) as other:
            other.load_state_dict(state)
            assert [batch["i"].tolist() for batch in other] == whole[5:]
    # Steps of another size repeat and lose nothing; the rows come as they would have.
    with loader(corpus, size=16) as other:
        other.load_state_dict(state)
        rows = [i for batch in other for i in batch["i"].tolist()]
        assert len(rows) == (ROWS - 5 * 32) // 16 * 16
        rest = {i for batch in whole[5:] for i in batch}
        assert rest <= set(rows)


@pytest.mark.parametrize(
    ("saved", "options", "words"),
    [
        (
            {"bucket_by": "tokens"},
            {"bucket_by": "others"},
            "bucket_by mismatch: .*'tokens'.*'others",
        ),
        ({"bucket_by": "tokens"}, {"bucket_by": "tokens", "bucket_window": 3}, "has 64, .* with 3"),
        ({}, {"bucket_by": "tokens"}, "bucket_by mismatch: the state has None, .*'tokens'"),
    ],
)
def test_other_buckets_are_refused(
    corpus: str, saved: dict[str, Any], options: dict[str, Any], words: str
):
    state = loader(corpus, **saved).state_dict()
    with pytest.raises(StateError, match=words):
        loader(corpus, **options).load_state_dict(state)


@pytest.mark.parametrize("text", ["", "[]", '["tokens",0,3]', '["tokens",3]', "3"])
def test_a_damaged_state(corpus: str, text: str):
    state = loader(corpus, bucket_by="tokens").state_dict()
    with pytest.raises(StateError, match="buckets of the state are damaged"):
        loader(corpus).load_state_dict({**state, "buckets": text})


def test_arguments_that_cannot_be_used(corpus: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match="bucket_window=3 has no meaning without bucket_by"):
        StreamingDataset(corpus, bucket_window=3)
    with pytest.raises(ArgumentError, match=r"bucket_window must be from 1 .* got 0"):
        StreamingDataset(corpus, bucket_by="tokens", bucket_window=0)
    with pytest.raises(ArgumentError, match="no meaning for packed blocks"):
        StreamingDataset(Packed(corpus, block_size=8), bucket_by="tokens")
    with pytest.raises(ArgumentError, match="forms batches: give batch_size"):
        next(iter(StreamingDataset(corpus, bucket_by="tokens")))
    with pytest.raises(ColumnError, match=r"'name' .*is of type string, which has no lengths"):
        len(loader(corpus, bucket_by="name"))
    source = StreamingDataset(corpus, bucket_by="tokens")
    mixed = StreamingDataLoader(Mixture({"a": source}, weights={"a": 1}), batch_size=8)
    with pytest.raises(ArgumentError, match="source of a mixture"):
        len(mixed)
    missing = pa.table({"tokens": pa.array([[1], None])})
    lance.write_dataset(missing, str(tmp_path / "missing.lance"))
    with pytest.raises(ReadError, match=r"'tokens' of row 1 .*is null"):
        len(loader(str(tmp_path / "missing.lance"), bucket_by="tokens"))
