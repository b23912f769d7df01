"""The sources of a mixture: what is theirs, and what stays when they are added."""

from __future__ import annotations

import pickle
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from destrier import ArgumentError, Mixture, StateError, StreamingDataset


@pytest.fixture
def uris(tmp_path: Path) -> dict[str, str]:
    found = {}
    for i, (name, rows) in enumerate((("a", 20_000), ("b", 9_000), ("c", 5_000))):
        found[name] = str(tmp_path / f"{name}.lance")
        lance.write_dataset(pa.table({"id": np.arange(rows) + i * 100_000}), found[name])
    return found


def test_an_added_source_is_the_same_in_other_processes(uris: dict[str, str]):
    old = {name: uris[name] for name in "ab"}
    state = Mixture(old, weights={"a": 3, "b": 1}, global_batch_size=64).state_dict()
    wider = Mixture(uris, weights={"a": 2, "b": 1, "c": 1}, global_batch_size=64)
    wider.load_state_dict(state)
    there = pickle.loads(pickle.dumps(wider))
    assert there.state_dict() == wider.state_dict()


def test_a_mixture_in_a_mixture_is_a_copy(uris: dict[str, str]):
    def made() -> Mixture:
        return Mixture({name: uris[name] for name in "ab"}, weights={"a": 3, "b": 1})

    inner = made()
    outer = Mixture({"inner": inner, "c": uris["c"]}, weights={"inner": 1, "c": 1}, batch_size=64)
    outer.load_state_dict(outer.state_dict())
    assert inner.stream(512).plan_hash == made().stream(512).plan_hash


def test_ranks_with_other_weights_are_noticed(uris: dict[str, str]):
    sizes = {"num_splits": 64, "shuffle_clump_size": 4, "shuffle_window": 4}
    old = {name: StreamingDataset(uris[name], **sizes) for name in "ab"}  # type: ignore[arg-type]
    streams = [
        Mixture(old, weights=weights, stop="never", batch_size=64).stream()
        for weights in ({"a": 3, "b": 1}, {"a": 1, "b": 1})
    ]
    assert streams[0].plan_hash == streams[1].plan_hash  # a state goes on with other weights
    assert streams[0].plan != streams[1].plan


def test_another_global_batch_is_refused(uris: dict[str, str]):
    def made(batch: int) -> Mixture:
        old = {name: uris[name] for name in "ab"}
        options = {"weights": {"a": 3, "b": 1}, "batching": "stratified"}
        return Mixture(old, **options, global_batch_size=batch)  # type: ignore[arg-type]

    state = made(64).state_dict()
    for batch in (32, 128):
        other = made(batch)
        before = other.state_dict()
        with pytest.raises(StateError, match=f"global batch of 64 samples, got {batch}"):
            other.load_state_dict(state)
        assert other.state_dict() == before


def test_the_name_of_a_column_is_a_text(uris: dict[str, str]):
    with pytest.raises(ArgumentError, match="source_column must be a name, got 5"):
        Mixture(uris, source_column=5)  # type: ignore[arg-type]
