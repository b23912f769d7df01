"""Takes by offset, on every kind of table and way of reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import destrier
from destrier import StreamingDataLoader, StreamingDataset, uring
from destrier.errors import ReadError
from destrier.read import Reader
from destrier.table import open_table
from destrier.take import Takes
from destrier.writing.layout import is_blob


@pytest.fixture(params=["uring", "ordinary"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ordinary":
        monkeypatch.setenv("DESTRIER_IO_URING", "0")
    elif not uring._allowed():
        pytest.skip("the kernel allows no io_uring here")
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Fragments of 100 rows, of which some are deleted, one wholly."""
    place = str(tmp_path / "a table.lance")
    rows = pa.table(
        {
            "id": np.arange(1000),
            "text": [f"row {i}" for i in range(1000)],
            "x": [[i] for i in range(1000)],
        }
    )
    dataset = lance.write_dataset(rows, place, max_rows_per_file=100)
    dataset.delete("id % 7 = 3 OR (id >= 300 AND id < 400)")
    dataset.add_columns({"later": "id * 2"})
    return place


def live() -> list[int]:
    return [i for i in range(1000) if i % 7 != 3 and not 300 <= i < 400]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("step", [1, 2, 90])
def test_takes_are_what_lance_takes(path: str, step: int) -> None:
    takes = Takes(open_table(path))
    offsets = np.arange(0, len(live()), step)
    names = ["later", "id", "text", "x"]
    found = takes.take(offsets, names)
    ids = [live()[i] for i in offsets.tolist()]
    assert found["id"].to_pylist() == ids
    assert found["later"].to_pylist() == [2 * i for i in ids]
    assert found["text"].to_pylist() == [f"row {i}" for i in ids]
    assert found["x"].to_pylist() == [[i] for i in ids]
    assert takes.take(np.array([len(live()) - 1]), ["id"])["id"].to_pylist() == live()[-1:]


@pytest.mark.usefixtures("way")
def test_an_offset_that_is_not_there_is_an_error(path: str) -> None:
    with pytest.raises(ReadError):
        Reader(open_table(path), ["id"]).read(np.array([0, len(live())]))


def test_local_tables_are_read_through_the_ring(path: str, way: str) -> None:
    address = open_table(path).bulk.uri
    assert address.startswith("file+uring://") is (way == "uring")


@pytest.mark.parametrize("uri", ["s3://bucket/t.lance", "/data/50%.lance", "relative.lance"])
def test_other_addresses_are_left_alone(uri: str) -> None:
    assert uring.uring_uri(uri) is None


@pytest.mark.parametrize(
    ("mounts", "allowed"),
    [
        ("disk / ext4 rw 0 0\n", True),
        ("disk / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n", False),
        ("server:/x / nfs4 rw 0 0\ndisk /data xfs rw 0 0\n", True),
        ("disk / ext4 rw 0 0\nserver:/x /dat nfs4 rw 0 0\n", True),
        ("disk / ext4 rw 0 0\nserver:/x /da\\040ta nfs4 rw 0 0\n", True),
        ("disk / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\ndisk /data ext4 rw 0 0\n", True),
        ("disk / ext4 rw 0 0\ndisk /data xfs rw 0 0\nserver:/x /data nfs4 rw 0 0\n", False),
        ("", False),
    ],
)
def test_only_disks_of_the_machine_are_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, allowed: bool
) -> None:
    file = tmp_path / "mounts"
    file.write_text(mounts)
    monkeypatch.setattr(uring, "_MOUNTS", str(file))
    monkeypatch.setattr(uring, "_allowed", lambda: True)
    assert (uring.uring_uri("/data/t.lance") is not None) is allowed


def test_mount_points_may_have_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mounts"
    file.write_text("disk / ext4 rw 0 0\nserver:/x /my\\040data\\134 nfs4 rw 0 0\n")
    monkeypatch.setattr(uring, "_MOUNTS", str(file))
    monkeypatch.setattr(uring, "_allowed", lambda: True)
    assert uring.uring_uri("/my data\\/t.lance") is None
    assert uring.uring_uri("/my data/t.lance") is not None


def test_without_a_ring_tables_are_read_all_the_same(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids_of(path)
    monkeypatch.setattr(uring, "_allowed", lambda: False)
    assert ids_of(path) == expected


def ids_of(path: str) -> list[Any]:
    with StreamingDataLoader(StreamingDataset(path, columns=["id"]), batch_size=10) as loader:
        return [batch["id"].tolist() for batch in loader]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["blob v1", "blob v2", "linked"])
def test_blobs_of_large_fragments(tmp_path: Path, kind: str) -> None:
    values = [bytes([i % 256]) * (i % 50 + 1) for i in range(1000)]
    place = str(tmp_path / "blobs.lance")
    if kind == "linked":
        folder = tmp_path / "files"
        folder.mkdir()
        for i, value in enumerate(values):
            (folder / f"{i:04}.bin").write_bytes(value)
        destrier.link(folder, place, format="folder", pattern="*.bin")
        dataset = lance.dataset(place)
        name = next(f.name for f in dataset.schema if is_blob(f))
    elif kind == "blob v2":
        name = "image"
        schema = pa.schema([lance.blob_field(name), pa.field("id", pa.int64())])
        rows = pa.table({name: lance.blob_array(values), "id": range(1000)}, schema=schema)
        lance.write_dataset(rows, place, data_storage_version="2.2")
    else:
        name = "image"
        metadata = {"lance-encoding:blob": "true"}
        schema = pa.schema(
            [pa.field(name, pa.large_binary(), metadata=metadata), pa.field("id", pa.int64())]
        )
        rows = pa.table({name: values, "id": range(1000)}, schema=schema)
        lance.write_dataset(rows, place, data_storage_version="2.0")
    reader = Reader(open_table(place), [name])
    found = reader.read(np.arange(1000)).batch.column(0).to_pylist()
    assert found == values
    some = np.array([3, 40, 41, 999])
    assert reader.read(some).batch.column(0).to_pylist() == [values[i] for i in some]


def test_a_ring_that_fails_later_is_left(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_table(path)
    plain = table.dataset
    takes = Takes(table)

    class Broken:
        """Stands for a dataset whose threads could not make their rings."""

        def take(self, *_: Any, **__: Any) -> Any:
            raise OSError("Generic UringReader error: io_uring thread died")

    monkeypatch.setattr(table, "_bulk", Broken())
    monkeypatch.setattr("destrier.take._ROWS_OF_A_FRAGMENT", 10_000)
    assert takes.take(np.arange(0, 500, 2), ["id"])["id"].to_pylist() == live()[0:500:2]
    assert table.bulk is plain

    monkeypatch.setattr(table, "_bulk", plain)
    with pytest.raises(OSError, match="out"):
        takes._tried(lambda: (_ for _ in ()).throw(OSError("out of io_uring")))
