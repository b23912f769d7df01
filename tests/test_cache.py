"""The cache on local disk: the same batches, nothing damaged, and never above its limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import tables
from destrier import (
    ArgumentError,
    DestrierWarning,
    PermutationBuilder,
    StorageError,
    StreamingDataLoader,
    StreamingDataset,
)
from destrier.caching.cached import CachedColumns
from destrier.caching.entry import DamagedError, FileValues, pack
from destrier.caching.location import CacheFolder
from destrier.caching.store import Store
from destrier.caching.values import assembled
from destrier.read import Reader
from destrier.selection import OffsetRows, select_rows
from destrier.table import open_table

if TYPE_CHECKING:
    from conftest import Made

KEY = "0" * 32


def batches(uri: str, **options: Any) -> list[dict[str, list[Any]]]:
    dataset = StreamingDataset(uri, **options)
    with StreamingDataLoader(dataset, batch_size=64, format="arrow", remainder="keep") as loader:
        return [batch.to_pydict() for batch in loader]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.arrow"))


def disk(folder: Path) -> int:
    """What ``du`` says."""
    total = 0
    for parent, folders, files in os.walk(folder):  # which does not mind what is gone meanwhile
        for path in [parent, *(os.path.join(parent, name) for name in (*folders, *files))]:
            with contextlib.suppress(FileNotFoundError):
                total += 512 * os.stat(path).st_blocks
    return total


def hide_data(uri: str) -> None:
    os.rename(os.path.join(uri, "data"), os.path.join(uri, "hidden"))


def show_data(uri: str) -> None:
    os.rename(os.path.join(uri, "hidden"), os.path.join(uri, "data"))


# ---- the same batches -------------------------------------------------------------------------


def test_batches_are_the_same_and_later_ones_ask_nothing_of_the_table(
    own_table: Made, tmp_path: Path
) -> None:
    uri = str(own_table.path)
    without = batches(uri)
    assert batches(uri, cache_dir=tmp_path / "c") == without
    filtered = batches(uri, filter="label < 7", shuffle_seed=3)
    hide_data(uri)
    assert batches(uri, cache_dir=tmp_path / "c") == without
    show_data(uri)
    kept = {path: path.stat().st_ino for path in entries(tmp_path / "c")}
    assert batches(uri, filter="label < 7", shuffle_seed=3, cache_dir=tmp_path / "c") == filtered
    assert batches(uri, shuffle_clump_size=1, cache_dir=tmp_path / "c") == batches(
        uri, shuffle_clump_size=1
    )
    assert {path: path.stat().st_ino for path in entries(tmp_path / "c")} == kept


def test_stats_say_what_the_cache_did_not_have(own_table: Made, tmp_path: Path) -> None:
    def stages(**options: Any) -> dict[str, Any]:
        dataset = StreamingDataset(str(own_table.path), columns=["id", "vector"], **options)
        with StreamingDataLoader(dataset, batch_size=100) as loader:
            for _ in loader:
                pass
            return dict(loader.stats().stages)

    assert stages()["fetch"].rows == 0
    first = stages(cache_dir=tmp_path / "c")["fetch"]
    assert first.rows >= 1003
    assert first.bytes >= 1003 * (8 + 16)
    assert first.seconds > 0
    again = stages(cache_dir=tmp_path / "c")
    assert again["fetch"].rows == 0
    assert again["read"].bytes >= 1003 * (8 + 16)


def test_two_epochs_of_one_loader(own_table: Made, tmp_path: Path) -> None:
    dataset = StreamingDataset(
        str(own_table.path), columns=["id", "blob"], cache_dir=tmp_path / "c"
    )
    with StreamingDataLoader(dataset, batch_size=64, remainder="keep") as loader:
        first = sorted(i for batch in loader for i in batch["id"].tolist())
        hide_data(str(own_table.path))
        assert sorted(i for batch in loader for i in batch["id"].tolist()) == first


def test_a_resume(table_path: str, tmp_path: Path) -> None:
    def loader() -> StreamingDataLoader:
        dataset = StreamingDataset(table_path, cache_dir=tmp_path / "c", columns=["id", "blob"])
        return StreamingDataLoader(dataset, batch_size=64, remainder="keep", format="rows")

    with loader() as first:
        seen = []
        for batch in first:
            seen.append(batch)
            if len(seen) == 5:
                state = first.state_dict()
    assert not any("cache" in key for key in state)
    with loader() as second:
        second.load_state_dict(state)
        assert list(second) == seen[5:]


def test_a_permutation(table_path: str, tmp_path: Path) -> None:
    parts = PermutationBuilder(table_path).split_random(ratios=[0.8, 0.2], names=["a", "b"])
    part = parts.execute()["b"]
    cached = batches(table_path, permutation=part, cache_dir=tmp_path / "c")
    assert cached == batches(table_path, permutation=part)
    assert entries(tmp_path / "c")


def test_row_mode_in_workers(table_path: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(table_path, cache_dir=tmp_path / "c", columns=["id"])
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    plain = StreamingDataset(table_path, columns=["id"])
    assert sorted(row["id"] for row in loader) == sorted(row["id"] for row in plain)
    assert len(entries(tmp_path / "c")) == 1


def types() -> pa.Table:
    rng = np.random.default_rng(0)
    n = 300
    wide = [rng.bytes(int(size)) for size in rng.integers(0, 9000, n)]
    lists = [rng.integers(0, 9, int(size)).tolist() for size in rng.integers(0, 3000, n)]
    none = rng.random(n) < 0.2
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(n * 7, np.float32)), 7)
    return pa.table(
        {
            "id": pa.array(range(n)),
            "flag": pa.array(rng.random(n) < 0.5),
            "half": pa.array(rng.random(n).astype(np.float16)),
            "maybe": pa.array(rng.random(n), mask=none),
            "wide": pa.array(wide, pa.binary()),
            "wide_or_not": pa.array(
                [None if gone else w for w, gone in zip(wide, none, strict=True)], pa.large_binary()
            ),
            "tokens": pa.array(lists, pa.list_(pa.int32())),
            "vector": vectors,
            "holes": pa.array([[1.0, None], [2.0, 3.0]] * (n // 2), pa.list_(pa.float32(), 2)),
            "ragged": pa.array([[None], [1, 2], []] * (n // 3), pa.list_(pa.int64())),
            "text": pa.array([f"é{i}" * (i % 5) for i in range(n)]),
            "record": pa.array([{"a": i, "b": str(i)} for i in range(n)]),
            "time": pa.array(range(n), pa.timestamp("us", "UTC")),
            "fixed": pa.array([bytes([i % 256] * 5) for i in range(n)], pa.binary(5)),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(
                rng.random((n, 2, 3), dtype=np.float32)
            ),
        }
    )


def test_every_type_and_any_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # small blocks, so that reads meet borders of blocks
    monkeypatch.setattr("destrier.caching.blocks.BLOCK_BYTES", 40_000)
    monkeypatch.setattr("destrier.caching.cached._KNOWN_BYTES", 4_000)
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(types(), uri, max_rows_per_file=110)
    table = open_table(uri)
    names = table.schema.names
    plain = Reader(table, names)
    cached = Reader(table, names, cache=CacheFolder.of(tmp_path / "c", None))
    rng = np.random.default_rng(1)
    for count in (1, 3, 300, 40, 150, 299, 7):
        offsets = rng.permutation(300)[:count]
        found, expected = cached.read(offsets), plain.read(offsets)
        found.batch.validate(full=True)
        assert found.batch.schema == expected.batch.schema
        assert found.batch.to_pylist() == expected.batch.to_pylist()
    assert len(entries(tmp_path / "c")) > 60


def test_nulls_inside_of_lists_stay(tmp_path: Path) -> None:
    wide = [[i, None, *range(1000)] for i in range(40)]
    uri = str(tmp_path / "t.lance")
    names = ["narrow", "wide"]
    lance.write_dataset(pa.table([[[i, None] for i in range(40)], wide], names=names), uri)
    table = open_table(uri)
    expected = Reader(table, names).read(np.arange(40)).batch.to_pylist()
    assert expected[1]["narrow"] == [1, None]
    for limit in (None, 1):  # with room, and without
        reader = Reader(table, names, cache=CacheFolder.of(tmp_path / str(limit), limit))
        for _ in range(2):
            assert reader.read(np.arange(40)).batch.to_pylist() == expected


def test_blobs(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = [rng.bytes(int(size)) for size in rng.integers(0, 9000, 300)]
    missing: list[bytes | None] = [None if i % 9 == 4 else v for i, v in enumerate(values)]
    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("image")])
    table = pa.table([pa.array(range(300)), lance.blob_array(missing)], schema=schema)
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(table, uri, data_storage_version="2.2", max_rows_per_file=110)
    lance.dataset(uri).delete("id % 10 = 3")
    without = batches(uri)
    assert {row for batch in without for row in batch["image"]} == {
        value for i, value in enumerate(missing) if i % 10 != 3
    }
    assert batches(uri, cache_dir=tmp_path / "c") == without
    hide_data(uri)
    assert batches(uri, cache_dir=tmp_path / "c") == without


# ---- what is kept under which name ------------------------------------------------------------


def test_a_version_with_another_column_uses_what_is_there(own_table: Made, tmp_path: Path) -> None:
    uri = str(own_table.path)
    batches(uri, cache_dir=tmp_path / "c")
    before = entries(tmp_path / "c")
    lance.dataset(uri).add_columns({"double": "id * 2"})
    wanted = batches(uri)
    assert batches(uri, cache_dir=tmp_path / "c") == wanted
    assert len(entries(tmp_path / "c")) == len(before) + 1
    copy = str(tmp_path / "copy.lance")
    shutil.copytree(uri, copy)
    hide_data(copy)
    assert batches(copy, cache_dir=tmp_path / "c") == wanted


def test_other_data_is_not_taken_for_it(own_table: Made, tmp_path: Path) -> None:
    uri = str(own_table.path)
    batches(uri, cache_dir=tmp_path / "c")
    dataset = lance.dataset(uri)
    dataset.delete("id % 2 = 0")
    assert batches(uri, cache_dir=tmp_path / "c") == batches(uri)
    lance.write_dataset(tables.columns(500, 7), uri, mode="overwrite")
    assert batches(uri, cache_dir=tmp_path / "c") == batches(uri)


def test_columns_that_exchange_their_names(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": [1] * 200, "b": [2] * 200}), uri)
    batches(uri, cache_dir=tmp_path / "c")
    dataset = lance.dataset(uri)
    dataset.alter_columns({"path": "a", "name": "x"})
    dataset.alter_columns({"path": "b", "name": "a"})
    assert batches(uri, cache_dir=tmp_path / "c")[0]["a"] == [2] * 64


def test_sparse_blocks_are_read_directly(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    n = 2000
    payload = pa.array([bytes([i % 256]) * 10_000 for i in range(n)])
    lance.write_dataset(pa.table({"id": np.arange(n), "data": payload}), uri)
    rare = {"filter": "id % 100 = 0", "columns": ["data"]}
    assert batches(uri, cache_dir=tmp_path / "c", **rare) == batches(uri, **rare)
    assert entries(tmp_path / "c") == []
    dense = {"filter": "id >= 600 AND id < 900", "columns": ["data"]}
    assert batches(uri, cache_dir=tmp_path / "c", **dense) == batches(uri, **dense)
    size = int(next((tmp_path / "c").glob("*-*")).name.split("-")[1])
    assert len(entries(tmp_path / "c")) == -(-900 // size) - 600 // size


# ---- damage -----------------------------------------------------------------------------------


def damages(content: bytes, steps: int) -> list[bytes]:
    found = [content[:cut] for cut in np.linspace(0, len(content) - 1, steps).astype(int)]
    for place in np.linspace(0, len(content) - 1, 4 * steps).astype(int).tolist():
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        found.append(bytes(flipped))
    return [*found, content + b"x", bytes(len(content)), b"\xff" * len(content)]


@pytest.mark.parametrize("column", ["wide", "text", "maybe", "vector"])
def test_no_damaged_bytes_are_served(tmp_path: Path, column: str) -> None:
    array = types()[column].combine_chunks().slice(0, 50)
    good = pack(array, column=KEY, block=3)
    path = tmp_path / "x"
    for content in [good, *damages(good, 60)]:
        path.write_bytes(content)
        try:
            values = FileValues(partial(os.open, path, os.O_RDONLY), column=KEY, block=3, rows=50)
            served = assembled([(values, np.arange(50))], array.type)
        except DamagedError:
            assert content != good
        else:
            assert served == array  # flips of padding, or none


def test_another_block_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(pack(pa.array(range(9)), column=KEY, block=3))
    for other in ({"block": 4}, {"column": "1" * 32}, {"rows": 8}):
        wanted = {"column": KEY, "block": 3, "rows": 9, **other}
        with pytest.raises(DamagedError):
            FileValues(partial(os.open, path, os.O_RDONLY), **wanted)


def test_damaged_files_are_read_again_even_while_in_use(own_table: Made, tmp_path: Path) -> None:
    uri = str(own_table.path)
    table = open_table(uri)
    reader = Reader(table, table.schema.names, cache=CacheFolder.of(tmp_path / "c", None))
    good = reader.read(np.arange(1003)).batch
    kept = {path: path.read_bytes() for path in entries(tmp_path / "c")}
    for path, content in kept.items():
        for damaged in damages(content, 2):
            path.write_bytes(damaged)  # the same file, which is open
            assert reader.read(np.arange(1003)).batch == good
            assert path.read_bytes() in (content, damaged)
    assert batches(uri, cache_dir=tmp_path / "c") == batches(uri)


@pytest.mark.parametrize("place", [-1, 100])  # in the tail, and in a page of values
def test_a_damaged_file_that_cannot_be_removed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    table = open_table(str(lance_table(tmp_path)))
    cache = CacheFolder.of(tmp_path / "c", None)
    good = Reader(table, ["id"], cache=cache).read(np.arange(1000)).batch
    (path,) = entries(tmp_path / "c")
    content = bytearray(path.read_bytes())
    content[place] ^= 255
    path.write_bytes(content)
    asked: list[int] = []

    def remove(self: Store, folder: Any, block: int) -> None:
        assert len(asked) < 9
        asked.append(block)

    monkeypatch.setattr(Store, "remove", remove)
    reader = Reader(table, ["id"], cache=cache)
    for _ in range(2):
        assert reader.read(np.arange(1000)).batch == good
    assert asked == [0]


def test_a_file_that_cannot_be_opened_for_a_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_table(str(lance_table(tmp_path)))
    cache = CacheFolder.of(tmp_path / "c", None)
    reader = Reader(table, ["id"], cache=cache)
    good = reader.read(np.arange(1000)).batch
    (path,) = entries(tmp_path / "c")
    open_file, refused = os.open, []

    def refusing(file: Any, *arguments: Any, **options: Any) -> int:
        if str(file) == str(path):
            refused.append(file)
            raise OSError(errno.EMFILE, "too many open files")
        return open_file(file, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        for each in (reader, Reader(table, ["id"], cache=cache)):
            before = len(refused)
            assert each.read(np.arange(1000)).batch == good
            assert len(refused) > before
    assert path.exists()
    hide_data(table.uri)
    assert reader.read(np.arange(1000)).batch == good


def test_a_damaged_row_is_an_error_of_that_row_alone(tmp_path: Path) -> None:
    table = open_table(str(lance_table(tmp_path)))
    reader = Reader(table, ["id"])

    def fetch(offsets: Any, columns: list[str]) -> dict[str, pa.Array]:
        if 5 in offsets:
            raise OSError("row 5 is damaged")
        return reader._fetch(offsets, columns)

    store = Store(tmp_path / "c", 1 << 30)
    cached = CachedColumns(store, table, reader.schema, rows=None, fetch=fetch, depends={})
    for _ in range(2):
        assert cached.take(np.array([4, 6]), ["id"])["id"].to_pylist() == [4, 6]
        with pytest.raises(OSError, match="row 5"):
            cached.take(np.array([4, 5]), ["id"])


@pytest.mark.parametrize("readable", [True, False])
def test_the_width_of_values_is_found_without_rows_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, readable: bool
) -> None:
    monkeypatch.setattr("destrier.caching.blocks.BLOCK_BYTES", 4000)
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"text": [str(i) * 9 for i in range(500)]}), uri)
    table = open_table(uri)
    reader = Reader(table, ["text"])
    calls: list[int] = []

    def fetch(offsets: Any, columns: list[str]) -> dict[str, pa.Array]:
        calls.append(len(offsets))
        if 5 in offsets or not (readable or len(offsets) == 2):
            raise OSError("row 5 is damaged")
        return reader._fetch(offsets, columns)

    store = Store(tmp_path / "c", 1 << 30)
    cached = CachedColumns(store, table, reader.schema, rows=None, fetch=fetch, depends={})
    for _ in range(2):
        calls.clear()
        found = cached.take(np.array([400, 401]), ["text"])["text"].to_pylist()
        assert found == ["400" * 9, "401" * 9]
    assert calls == ([] if readable else [2])
    assert bool(entries(tmp_path / "c")) == readable


@pytest.mark.parametrize("column", ["id", "text"])  # a read of "text" begins with a sample of it
def test_an_outage_is_waited_for_once_and_nothing_is_given_up(tmp_path: Path, column: str) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": np.arange(500), "text": [str(i) for i in range(500)]}), uri)
    table = open_table(uri)
    reader = Reader(table, [column])
    calls: list[int] = []
    down = True

    def fetch(offsets: Any, columns: list[str]) -> dict[str, pa.Array]:
        calls.append(len(offsets))
        if down:
            raise StorageError("the object store failed 9 times in 60 s")
        return reader._fetch(offsets, columns)

    store = Store(tmp_path / "c", 1 << 30)
    cached = CachedColumns(store, table, reader.schema, rows=None, fetch=fetch, depends={})
    with pytest.raises(StorageError):
        cached.take(np.arange(9), [column])
    assert len(calls) == 1
    down = False
    expected = reader.read(np.arange(9)).batch.column(0)
    assert cached.take(np.arange(9), [column])[column] == expected
    assert len(entries(tmp_path / "c")) == 1


def lance_table(folder: Path, rows: int = 1000) -> Path:
    tables.plain_table(folder / "plain.lance", rows)
    return folder / "plain.lance"


# ---- the limit --------------------------------------------------------------------------------


_FILL = """
import os, sys
from pathlib import Path
from destrier.caching.store import Store
root, digit, limit = sys.argv[1:]
store = Store(Path(root), int(limit))
folder = store.make_column(digit * 32, 64)
for block in range(60):
    store.save(folder, {block: os.urandom(100_000)})
"""


def test_the_limit_holds_at_every_moment_with_two_processes(tmp_path: Path) -> None:
    limit = 3_000_000
    processes = [
        subprocess.Popen([sys.executable, "-c", _FILL, str(tmp_path), digit, str(limit)])
        for digit in "ab"
    ]
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, disk(tmp_path))
    assert [process.returncode for process in processes] == [0, 0]
    assert limit / 2 < max(most, disk(tmp_path)) <= limit


def test_columns_in_no_use_make_room_and_those_in_use_stay(tmp_path: Path) -> None:
    limit = 1_000_000
    store = Store(tmp_path, limit)
    first = store.make_column("a" * 32, 64)
    assert first is not None
    store.save(first, {i: bytes(100_000) for i in range(20)})
    kept = len(entries(tmp_path))
    assert 7 <= kept <= 9
    second = store.make_column("b" * 32, 64)
    assert second is None or len(list(second.path.glob("*.arrow"))) == 0
    assert len(list(first.path.glob("*.arrow"))) == kept  # in use
    path = first.path
    del first, second
    other = Store(tmp_path, limit)
    third = other.make_column("c" * 32, 64)
    assert third is not None
    other.save(third, {i: bytes(100_000) for i in range(5)})
    assert len(list(third.path.glob("*.arrow"))) == 5
    assert len(list(path.glob("*.arrow"))) < kept
    assert disk(tmp_path) <= limit
    del third
    Store(tmp_path, 200_000)  # a smaller limit is kept from the start
    assert disk(tmp_path) <= 200_000


def test_what_is_removed_gives_back_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Larger:  # as on a file system that takes disk in large pieces
        def __init__(self, status: os.stat_result) -> None:
            self.st_size, self.st_blocks = status.st_size, status.st_blocks + 10_000

    store = Store(tmp_path, 1 << 24)
    folder = store.make_column("a" * 32, 64)
    assert folder is not None
    before = (tmp_path / "lock").read_text()
    store.save(folder, {0: bytes(100_000)})
    assert (tmp_path / "lock").read_text() != before
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **options: Larger(stat(self, **options)))
    store.remove(folder, 0)
    monkeypatch.undo()
    assert entries(tmp_path) == []
    assert (tmp_path / "lock").read_text() == before


def test_a_table_larger_than_the_limit(table_path: str, tmp_path: Path) -> None:
    limit = 120_000
    assert batches(table_path, cache_dir=tmp_path / "c", cache_bytes=limit) == batches(table_path)
    assert entries(tmp_path / "c")
    assert disk(tmp_path / "c") <= limit
    assert batches(table_path, cache_dir=tmp_path / "c", cache_bytes=limit) == batches(table_path)


def test_two_tables_share_a_folder(own_table: Made, plain: Any, tmp_path: Path) -> None:
    for uri in (str(own_table.path), plain.uri):
        batches(uri, cache_dir=tmp_path / "c")
    for uri in (str(own_table.path), plain.uri):
        wanted = batches(uri)
        hide_data(uri)
        assert batches(uri, cache_dir=tmp_path / "c") == wanted


_KILLED = """
import os, signal, sys
from pathlib import Path
from destrier.caching import store
def write(file, content):
    os.write(file, content[:1000])
    os.kill(os.getpid(), signal.SIGKILL)
store._write = write
s = store.Store(Path(sys.argv[1]), 1 << 20)
s.save(s.make_column("a" * 32, 64), {0: bytes(100_000), 1: bytes(100_000)})
"""


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/*.part"))) == 2
    store = Store(tmp_path, 1 << 20)  # no lock was left behind
    assert list(tmp_path.glob("*/*.part")) == []
    folder = store.column("a" * 32)
    assert folder is not None
    assert folder.open(0) is None
    store.save(folder, {0: bytes(100_000)})
    assert [path.name for path in entries(tmp_path)] == ["0.arrow"]


def test_the_same_block_is_fetched_once(tmp_path: Path) -> None:
    table = open_table(str(lance_table(tmp_path)))
    reader = Reader(table, ["id"])
    calls = []
    together = threading.Event()

    def fetch(offsets: Any, columns: list[str]) -> dict[str, pa.Array]:
        calls.append(len(offsets))
        together.wait(0.3)
        return reader._fetch(offsets, columns)

    store = Store(tmp_path / "c", 1 << 30)
    cached = CachedColumns(store, table, reader.schema, rows=None, fetch=fetch, depends={})
    found: list[list[int]] = []

    def read(first: int) -> None:
        found.append(cached.take(np.arange(first, 900), ["id"])["id"].to_pylist())

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [list(range(first, 900)) for first in range(4)]
    assert calls == [1000]


def test_a_column_that_had_no_room_is_kept_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.caching.store._FULL_SECONDS", 0.0)
    monkeypatch.setattr("destrier.caching.store._FULL_LOOKS", 0)
    table = open_table(str(lance_table(tmp_path)))
    store = Store(tmp_path / "c", 100_000)
    full = store.make_column("a" * 32, 64)
    assert full is not None
    store.save(full, {i: bytes(3000) for i in range(40)})
    reader = Reader(table, ["id"], cache=None)
    cached = CachedColumns(store, table, reader.schema, rows=None, fetch=reader._fetch, depends={})
    others = entries(tmp_path / "c")
    assert cached.take(np.arange(9), ["id"])["id"].to_pylist() == list(range(9))
    assert entries(tmp_path / "c") == others
    del full
    assert cached.take(np.arange(9), ["id"])["id"].to_pylist() == list(range(9))
    assert set(entries(tmp_path / "c")) - set(others)


@pytest.mark.filterwarnings("error")
def test_a_folder_that_others_are_busy_in_is_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.caching.store._PATIENCE_SECONDS", 0.01)
    table = open_table(str(lance_table(tmp_path)))
    (tmp_path / "c").mkdir()
    with open(tmp_path / "c" / "lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        reader = Reader(table, ["id", "label"], cache=CacheFolder.of(tmp_path / "c", None))
        # that it waited once is enough
        monkeypatch.setattr("destrier.caching.store._PATIENCE_SECONDS", 1e9)
        for _ in range(2):
            assert reader.read(np.arange(9)).batch.num_rows == 9
    assert reader.read(np.arange(9)).batch.num_rows == 9
    assert len(entries(tmp_path / "c")) == 2


# ---- folders that cannot be used --------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_one_warning(table_path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [batches(table_path, cache_dir=tmp_path / "file" / "c") for _ in range(2)]
    assert found == [batches(table_path)] * 2
    assert [w.category for w in caught] == [DestrierWarning]
    assert "cannot be written" in str(caught[0].message)


def test_a_full_disk_is_one_warning(
    table_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(DestrierWarning, match="No space left") as caught:
        assert batches(table_path, cache_dir=tmp_path / "c") == batches(table_path)
    assert len(caught) == 1
    assert [p.name for p in (tmp_path / "c").glob("*/*") if p.name != "used"] == []


def test_a_folder_that_is_removed_meanwhile(table_path: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(table_path, cache_dir=tmp_path / "c", columns=["id"])
    with StreamingDataLoader(dataset, batch_size=64, remainder="keep") as loader:
        first = sorted(i for batch in loader for i in batch["id"].tolist())
        shutil.rmtree(tmp_path / "c")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DestrierWarning)
            assert sorted(i for batch in loader for i in batch["id"].tolist()) == first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache_bytes": 5}, "without cache_dir"),
        ({"cache_dir": "s3://bucket/c"}, "folder of this machine"),
        ({"cache_dir": 5}, "path of a folder"),
        ({"cache_dir": "c", "cache_bytes": 0}, "at least 1"),
    ],
)
def test_arguments(table_path: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        StreamingDataset(table_path, **options)


_NO_LOCKS = """
import sys
sys.modules["fcntl"] = None
import destrier
dataset = destrier.StreamingDataset(sys.argv[1], shuffle=False)
print(next(iter(dataset))["id"])
try:
    destrier.StreamingDataset(sys.argv[1], cache_dir="c")
except destrier.ArgumentError as error:
    print(error)
"""


def test_a_system_without_file_locks_streams_without_a_cache(table_path: str) -> None:
    command = [sys.executable, "-c", _NO_LOCKS, table_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first, refused = done.stdout.splitlines()
    assert first.isdecimal()
    assert refused.startswith("cache_dir='c' needs file locks")


def test_density_counts_the_rows_of_each_block(plain: Any) -> None:
    from destrier.caching.blocks import Density

    table = open_table(plain)
    rows = select_rows(table, "id < 512 OR id % 2 = 0")
    chosen = rows.offsets(np.arange(len(rows)))
    for each in (rows, OffsetRows(chosen)):
        found = Density(each, table.num_rows).of(512, np.arange(2))
        assert found.tolist() == [1.0, (chosen >= 512).sum() / (1003 - 512)]


def test_plan_says_what_would_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "t.lance")
    payload = pa.array([bytes(10_000)] * 2000)
    lance.write_dataset(pa.table({"id": np.arange(2000), "data": payload}), uri)
    from destrier.cli import main

    assert main(["plan", uri, "--filter", "id % 50 = 0", "--global-batch", "8"]) == 0
    lines = [line.split("cache_dir=")[-1] for line in capsys.readouterr().out.splitlines()]
    assert any("id in blocks of 262,144 rows, all kept" in line for line in lines)
    assert any("data in blocks of 128 rows, none kept: fewer than 1 in 8" in line for line in lines)
