"""Linked columns: values that stay in their files, read in streams, checked, and moved."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zlib
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.blob import Blob
from torch.utils.data import DataLoader

import test_object_store
from destrier import (
    ArgumentError,
    ColumnError,
    LinkError,
    ReadError,
    StreamingDataLoader,
    StreamingDataset,
    open_table,
)
from destrier.errors import StorageError
from destrier.files import Store
from destrier.links import relinking
from destrier.links.columns import delivered_columns, outside_row_bytes
from destrier.links.files import open_linked, read_at_once, read_linked
from destrier.links.relinking import relink
from destrier.read import Reader
from destrier.report import report_plan
from destrier.resolving import resolve_stream
from destrier.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROWS = 203
FILES = 4
RECORDED = pa.struct([("file_size", pa.uint64()), ("file_stamp", pa.int64())])
WITH_CRC = pa.struct([*RECORDED, pa.field("crc32", pa.uint32())])


@dataclass
class Linked:
    """A linked table and what it should give."""

    path: str
    folder: Path
    files: list[Path]
    values: list[bytes | None]


def payload(i: int) -> bytes:
    return (b"%05d" % i) * (20 + i % 13)


def make(folder: Path, *, crc: bool = False, rows: int = ROWS, **options: Any) -> Linked:
    """Write files of several values each, with odd names, and a table that links to them.

    Row 7 is null, row 9 empty; there are three fragments; rows with id % 10 = 3 are deleted.
    """
    data = folder / "data é"
    data.mkdir(parents=True)
    files = [data / f"shard {n}#%20.bin" for n in range(FILES)]
    values: list[bytes | None] = [payload(i) for i in range(rows)]
    values[7], values[9] = None, b""
    places: dict[int, tuple[int, int]] = {}
    for n, file in enumerate(files):
        body = b""
        for i in range(n, rows, FILES):
            body += b"\0" * (i % 7)
            places[i] = (len(body), len(values[i] or b""))
            body += values[i] or b""
        file.write_bytes(body)
    blobs: list[Any] = []
    recorded: list[dict[str, int] | None] = []
    for i, value in enumerate(values):
        file = files[i % FILES]
        info = file.stat()
        entry = {"file_size": info.st_size, "file_stamp": info.st_mtime_ns}
        if crc:
            entry["crc32"] = zlib.crc32(value or b"")
        if value:
            blobs.append(Blob.from_uri("file://" + quote(str(file)), *places[i]))
        else:
            blobs.append(None if value is None else Blob.empty())
        recorded.append(None if value is None else entry)
    path = str(folder / "linked.lance")
    write(path, blobs, pa.array(recorded, WITH_CRC if crc else RECORDED), **options)
    keep = [i for i in range(rows) if i % 10 != 3]
    return Linked(path, data, files, [values[i] for i in keep])


def write(path: str, blobs: list[Any], recorded: pa.Array, **options: Any) -> None:
    image = lance.blob_field("image").with_metadata(
        {b"destrier:link": b"image_link", b"content_type": b"application/x-test"}
    )
    ids = pa.array(range(len(blobs)), pa.int64())
    schema = pa.schema([pa.field("id", pa.int64()), image, pa.field("image_link", recorded.type)])
    table = pa.table([ids, lance.blob_array(blobs), recorded], schema=schema)
    lance.write_dataset(
        table,
        path,
        data_storage_version="2.2",
        allow_external_blob_outside_bases=True,
        max_rows_per_file=80,
        **options,
    )
    lance.dataset(path).delete("id % 10 = 3")


@pytest.fixture
def linked(tmp_path: Path) -> Linked:
    return make(tmp_path)


def read(path: str, offsets: Iterable[int] | None = None, **options: Any) -> list[bytes | None]:
    table = open_table(path)
    places = np.arange(table.num_rows) if offsets is None else np.array(list(offsets))
    rows = Reader(table, ["image"], **options).read(places)
    found: list[bytes | None] = rows.batch.column(0).to_pylist()
    return found if rows.index is None else [found[i] for i in rows.index.tolist()]


def touch(file: Path, *, by: int = 1_000_000_000) -> None:
    info = file.stat()
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns + by))


# ---- reading --------------------------------------------------------------------------------


def test_values_are_the_ranges_of_their_files(linked: Linked) -> None:
    assert read(linked.path) == linked.values
    assert linked.values.count(None) == linked.values.count(b"") == 1
    offsets = [5, 170, 5, 0, 8, 6, 99]
    assert read(linked.path, offsets) == [linked.values[i] for i in offsets]
    assert read(linked.path, []) == []


def test_a_reader_keeps_the_content_type_and_hides_how_it_is_stored(linked: Linked) -> None:
    reader = Reader(open_table(linked.path), ["image", "id"])
    assert reader.schema.field("image").type == pa.large_binary()
    assert reader.schema.field("image").metadata == {b"content_type": b"application/x-test"}
    assert reader.read(np.array([3])).batch.schema.equals(reader.schema, check_metadata=True)


def test_lance_reads_the_same_bytes(linked: Linked) -> None:
    dataset = lance.dataset(linked.path)
    offsets = list(range(dataset.count_rows()))
    pairs = dataset.read_blobs("image", indices=offsets, preserve_order=True)
    assert [value for _, value in pairs] == linked.values


def test_companions_are_left_out_unless_they_are_named(linked: Linked) -> None:
    assert delivered_columns(open_table(linked.path).schema) == ["id", "image"]
    loader = StreamingDataLoader(StreamingDataset(linked.path), batch_size=8, format="rows")
    assert set(next(iter(loader))[0]) == {"id", "image"}
    loader.close()
    named = StreamingDataset(linked.path, columns=["image_link"], shuffle=False)
    row = next(iter(named))
    size = linked.files[0].stat()
    assert row == {"image_link": {"file_size": size.st_size, "file_stamp": size.st_mtime_ns}}


def test_values_in_the_table_itself_stand_beside_linked_ones(tmp_path: Path) -> None:
    file = tmp_path / "one.bin"
    file.write_bytes(b"0123456789")
    info = file.stat()
    uri = "file://" + quote(str(file))
    large = bytes(range(256)) * 400  # too large for Lance to keep it in the data file
    blobs = [
        Blob.from_uri(uri, 2, 3),
        b"inline",
        Blob.from_uri(uri),
        large,
        Blob.from_uri(uri, 9, 1),
    ]
    recorded = [{"file_size": info.st_size, "file_stamp": info.st_mtime_ns}] * 5
    path = str(tmp_path / "mixed.lance")
    write(path, blobs, pa.array(recorded, RECORDED))
    assert read(path) == [b"234", b"inline", b"0123456789", b"9"]  # row 3 is deleted
    moved = tmp_path / "two.bin"
    file.rename(moved)
    assert relink(path, file, moved) == 3
    assert read(path) == [b"234", b"inline", b"0123456789", b"9"]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("on_rows", [True, False])
def test_streams_deliver_linked_values(linked: Linked, *, shuffle: bool, on_rows: bool) -> None:
    size = None if on_rows else 16
    dataset = StreamingDataset(
        linked.path,
        shuffle=shuffle,
        num_splits=1,
        batch_size=size,
        remainder="keep",
        columns=["id", "image"],
    )
    seen: list[tuple[int, bytes | None]] = []
    for each in dataset:
        if on_rows:
            seen.append((each["id"], each["image"]))
        else:
            seen.extend(zip(each["id"].tolist(), each["image"], strict=True))
    live = [i for i in range(ROWS) if i % 10 != 3]
    expected = list(zip(live, linked.values, strict=True))
    assert sorted(seen, key=lambda pair: pair[0]) == expected
    assert (seen == expected) is not shuffle


def test_a_stream_resumes_in_the_middle_of_an_epoch(linked: Linked) -> None:
    def loader() -> StreamingDataLoader:
        return StreamingDataLoader(
            StreamingDataset(linked.path), batch_size=16, format="rows", with_index=True
        )

    with loader() as whole:
        batches = list(whole)
    with loader() as first:
        iterator = iter(first)
        head = [next(iterator) for _ in range(4)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert head + list(second) == batches


def test_a_cache_keeps_linked_values(linked: Linked, tmp_path: Path) -> None:
    def epochs(count: int, **options: Any) -> Iterator[list[Any]]:
        dataset = StreamingDataset(linked.path, columns=["id", "image"], **options)
        with StreamingDataLoader(
            dataset, batch_size=32, format="arrow", remainder="keep"
        ) as batches:
            for _ in range(count):
                yield [batch.to_pydict() for batch in batches]

    without = list(epochs(2))
    assert {value for batch in without[0] for value in batch["image"]} == set(linked.values)
    cached = epochs(2, cache_dir=tmp_path / "c")
    assert next(cached) == without[0]
    linked.folder.rename(tmp_path / "files that are away")
    assert next(cached) == without[1]
    assert list(epochs(2, cache_dir=tmp_path / "c")) == without


def test_worker_processes_read_links(linked: Linked) -> None:
    dataset = StreamingDataset(linked.path, batch_size=32, remainder="keep")
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    seen = [value for batch in loader for value in batch["image"]]
    assert sorted(seen, key=repr) == sorted(linked.values, key=repr)


def test_a_reader_can_be_copied_to_a_process(linked: Linked) -> None:
    table = pickle.loads(pickle.dumps(open_table(linked.path)))
    assert Reader(table, ["image"]).read(np.array([0])).batch.column(0)[0].as_py() == payload(0)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_files_are_closed_and_few_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    blobs, recorded = [], []
    for i in range(300):
        file = folder / f"{i}.bin"
        file.write_bytes(payload(i))
        info = file.stat()
        blobs.append(Blob.from_uri("file://" + quote(str(file)), 0, info.st_size))
        recorded.append({"file_size": info.st_size, "file_stamp": info.st_mtime_ns})
    path = str(tmp_path / "many.lance")
    write(path, blobs, pa.array(recorded, RECORDED))

    def open_files() -> int:
        return sum(
            f"{folder}/" in os.readlink(each)
            for each in Path("/proc/self/fd").iterdir()
            if each.is_symlink()
        )

    most = 0

    def counting(*arguments: Any) -> None:
        nonlocal most
        most = max(most, open_files())
        read_linked(*arguments)

    monkeypatch.setattr("destrier.links.reader.read_linked", counting)
    monkeypatch.setattr("destrier.links.reader.read_at_once", lambda *_: False)
    reader = Reader(open_table(path), ["image"])
    found = reader.read(np.arange(270)).batch.column(0).to_pylist()
    assert found == [payload(i) for i in range(300) if i % 10 != 3]
    assert 0 < most <= 64
    assert open_files() == 0
    (folder / "7.bin").unlink()
    with pytest.raises(ReadError, match=r"7\.bin"):
        reader.read(np.arange(270))
    assert open_files() == 0


def test_row_bytes_count_what_lies_outside_the_table(linked: Linked) -> None:
    table = open_table(linked.path)
    mean = sum(len(value or b"") for value in linked.values) / len(linked.values)
    assert outside_row_bytes(table, ["image", "id"]) == pytest.approx(mean, rel=0.1)
    assert outside_row_bytes(table, ["id"]) == 0
    assert table.row_bytes > mean * 0.9
    stream = resolve_stream(table, Settings(), global_batch=16)
    plan = report_plan(stream, global_batch=16)
    assert plan.columns == ["id", "image"]
    assert plan.bytes_a_step > 16 * mean * 0.9


def test_a_plan_needs_no_file_that_is_gone(linked: Linked) -> None:
    for file in linked.files:
        file.unlink()
    stream = resolve_stream(open_table(linked.path), Settings(), global_batch=16)
    plan = report_plan(stream, global_batch=16)
    assert plan.columns == ["id", "image"]
    assert [column.name for column in plan.cache] == ["id"]
    assert plan.held_bytes > 0


def test_a_plan_needs_no_storage_for_its_rows(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = resolve_stream(open_table(linked.path), Settings(), global_batch=16)

    def down(*_: Any) -> None:
        raise StorageError("the storage is down")

    monkeypatch.setattr(Reader, "read", down)
    plan = report_plan(stream, global_batch=16)
    assert [column.name for column in plan.cache] == ["id"]
    assert plan.held_bytes > 0


# ---- checks ---------------------------------------------------------------------------------


def cut(file: Path) -> None:
    body, info = file.read_bytes(), file.stat()
    file.write_bytes(body[:-1])
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, r"there is no file .*shard%201.*relink"),
        (touch, r"shard%201.* has \d+ bytes of .*, but was linked with \d+ bytes of .*Link the"),
        (cut, r"has (\d+) bytes .*, but was linked with (?!\1)\d+ bytes"),
        (grow, r"has (\d+) bytes .*, but was linked with (?!\1)\d+ bytes"),
        (to_folder, r"shard%201.* is not a file"),
        (to_pipe, r"shard%201.* is not a file"),
    ],
)
def test_a_file_that_is_another_one_is_an_error(
    linked: Linked, damage: Callable[[Path], None], said: str
) -> None:
    damage(linked.files[1])
    with pytest.raises(LinkError, match=said) as caught:
        read(linked.path)
    assert caught.value.offset == 1
    assert caught.value.column == "image"
    assert isinstance(caught.value, ReadError)
    others = [i for i in range(203) if i % 10 != 3]
    good = [place for place, i in enumerate(others) if i % FILES != 1]
    assert read(linked.path, good) == [linked.values[place] for place in good]


def test_a_changed_file_is_seen_after_it_was_mended(linked: Linked) -> None:
    reader = Reader(open_table(linked.path), ["image"])
    info = linked.files[0].stat()
    touch(linked.files[0])
    with pytest.raises(LinkError):
        reader.read(np.array([0]))
    os.utime(linked.files[0], ns=(info.st_atime_ns, info.st_mtime_ns))
    assert reader.read(np.array([0])).batch.column(0)[0].as_py() == payload(0)


def test_a_file_cut_after_it_was_opened_is_an_error(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(uri: str, path: str, size: int, stamp: int) -> int:
        descriptor = open_linked(uri, path, size, stamp)
        os.truncate(path, 10)
        return descriptor

    monkeypatch.setattr("destrier.links.reader.open_linked", opened)
    with pytest.raises(LinkError, match="was cut while it was read"):
        Reader(open_table(linked.path), ["image"]).read(np.arange(8))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_values_that_are_not_in_memory_are_read_from_the_disk(
    linked: Linked, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    calls = count(1)

    def at_once(descriptor: int, position: int, into: memoryview) -> bool:
        if next(calls) % every:
            return read_at_once(descriptor, position, into)
        into[: len(into) // 2] = b"?" * (len(into) // 2)  # memory may be filled in part
        return False

    monkeypatch.setattr("destrier.links.reader.read_at_once", at_once)
    found = Reader(open_table(linked.path), ["image"]).read(np.arange(len(linked.values)))
    assert found.batch.column(0).to_pylist() == linked.values


def test_a_file_cut_while_it_is_read_is_an_error_not_a_crash(linked: Linked) -> None:
    file = linked.files[0]
    info = file.stat()
    uri = f"file://{file}"
    descriptor = open_linked(uri, str(file), info.st_size, info.st_mtime_ns)
    os.truncate(file, 10)
    with pytest.raises(LinkError, match="was cut while it was read"):
        read_linked(descriptor, uri, 0, memoryview(bytearray(info.st_size)))
    os.close(descriptor)
    with pytest.raises(LinkError, match="it was changed since"):
        Reader(open_table(linked.path), ["image"]).read(np.array([0]))


@pytest.mark.parametrize("policy", ["skip", "fill"])
def test_rows_of_a_missing_file_are_skipped_or_filled(linked: Linked, policy: str) -> None:
    def epoch(on_error: Any) -> tuple[list[list[dict[str, Any]]], list[Any]]:
        with StreamingDataLoader(
            StreamingDataset(linked.path),
            batch_size=29,
            format="rows",
            on_error=on_error,
            with_index=True,
        ) as loader:
            return list(loader), loader.failures

    whole, _ = epoch("raise")
    linked.files[2].unlink()
    with pytest.raises(LinkError, match="there is no file"):
        epoch("raise")
    batches, failures = epoch(policy)
    assert len(batches) == len(whole)
    bad = {row["row_offset"] for batch in whole for row in batch if row["id"] % FILES == 2}
    assert {error.offset for error in failures} == bad
    assert all(isinstance(error, LinkError) and error.column == "image" for error in failures)
    for before, after in zip(whole, batches, strict=True):
        good = [row for row in before if row["row_offset"] not in bad]
        if policy == "skip":
            assert after == good
        else:
            assert len(after) == len(before)
            assert [a for a, b in zip(after, before, strict=True) if b in good] == good


def changed_record(linked: Linked, **values: int | None) -> str:
    """Write the table again, with other sizes and times in the companion."""
    dataset = lance.dataset(linked.path)
    table = dataset.to_table(columns=["image", "image_link"])
    described = table.column("image").to_pylist()
    recorded = table.column("image_link").to_pylist()
    blobs = [
        d
        if d is None
        else Blob.from_uri(d["blob_uri"], d["position"], d["size"])
        if d["size"]
        else b""
        for d in described
    ]
    path = linked.path + ".again.lance"
    entries = [None if r is None or None in values.values() else {**r, **values} for r in recorded]
    write(path, blobs, pa.array(entries, RECORDED))
    return path


def test_a_store_without_times_has_its_sizes_compared(linked: Linked) -> None:
    path = changed_record(linked, file_stamp=0)
    for file in linked.files:
        touch(file)
    kept = [i for i in range(len(linked.values)) if i % 10 != 3]
    assert read(path) == [linked.values[i] for i in kept]
    grow(linked.files[0])
    with pytest.raises(LinkError, match=r"has .* bytes of .*, but was linked with .* bytes:"):
        read(path)


def test_ranges_beyond_the_file_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"0123456789")
    info = file.stat()
    uri = "file://" + quote(str(file))
    ranges = [
        (0, 10),
        (5, 6),
        (10, 1),
        (11, 1),
        (1 << 63, 2),
        (1, (1 << 64) - 2),
        (1 << 62, 1 << 63),
    ]
    entry = {"file_size": info.st_size, "file_stamp": info.st_mtime_ns}
    path = str(tmp_path / "bad.lance")
    blobs = [Blob.from_uri(uri, *each) for each in ranges]
    blobs.insert(3, None)  # the row that is deleted
    write(path, blobs, pa.array([entry] * len(blobs), RECORDED))
    assert read(path, [0]) == [b"0123456789"]
    for row in range(1, len(ranges)):
        with pytest.raises(LinkError, match=f"{ranges[row][1]} bytes at {ranges[row][0]} of .* 10"):
            read(path, [row])
    rows = Reader(open_table(path), ["image"], tolerant=True).read(np.arange(len(ranges)))
    assert rows.batch.column(0).to_pylist() == [b"0123456789"]
    assert sorted(rows.errors) == list(range(1, len(ranges)))


def test_a_recorded_size_that_no_memory_holds_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"0123456789")
    path = str(tmp_path / "huge.lance")
    blob = Blob.from_uri("file://" + quote(str(file)), 0, (1 << 64) - 2)
    recorded = pa.array([{"file_size": (1 << 64) - 1, "file_stamp": 0}] * 2, RECORDED)
    write(path, [blob, blob], recorded)
    for rows in ([0], [0, 1]):
        with pytest.raises(LinkError, match="more than there is memory"):
            read(path, rows)


def test_a_link_without_a_record_is_an_error(linked: Linked) -> None:
    path = changed_record(linked, file_size=None)
    with pytest.raises(LinkError, match="not recorded"):
        read(path, [0])


@pytest.mark.parametrize("statement", ["drop", "rename"])
def test_a_companion_that_is_gone_is_an_error(linked: Linked, statement: str) -> None:
    dataset = lance.dataset(linked.path)
    if statement == "drop":
        dataset.drop_columns(["image_link"])
    else:
        dataset.alter_columns({"path": "image_link", "name": "x"})
    with pytest.raises(ColumnError, match="'image' is linked, but 'image_link'"):
        Reader(open_table(linked.path), ["image"])
    assert read_ids(linked.path) == [i for i in range(ROWS) if i % 10 != 3]


def read_ids(path: str) -> list[int]:
    return [row["id"] for row in StreamingDataset(path, columns=["id"], shuffle=False)]


# ---- relink ---------------------------------------------------------------------------------


def data_files(path: str) -> list[str]:
    return sorted(os.listdir(Path(path) / "data"))


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("spelled", ["path", "uri", "slash", "relative"])
def test_relink_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str, *, stable: bool
) -> None:
    linked = make(tmp_path, enable_stable_row_ids=stable)
    dataset = lance.dataset(linked.path)
    dataset.create_scalar_index("id", "BTREE")
    dataset = lance.dataset(linked.path)
    before = dataset.to_table(columns=["id"], with_row_id=True, with_row_address=True)
    moved = tmp_path / "moved" / "to é"
    shutil.copytree(linked.folder, moved)  # a copy: with other times
    for file in moved.iterdir():
        touch(file)
    shutil.rmtree(linked.folder)
    old: Any = linked.folder
    new: Any = moved
    if spelled == "uri":
        old, new = ("file://" + quote(str(each)) for each in (old, new))
    elif spelled == "slash":
        old, new = f"{old}/", f"{new}/"
    elif spelled == "relative":
        monkeypatch.chdir(tmp_path)
        old, new = "data é", Path("moved") / "to é"
    with pytest.raises(LinkError):
        read(linked.path)
    links = sum(bool(value) for value in linked.values)
    assert relink(linked.path, old, new) == links
    assert read(linked.path) == linked.values
    after = lance.dataset(linked.path)
    assert after.version == dataset.version + 1
    assert after.to_table(columns=["id"], with_row_id=True, with_row_address=True) == before
    assert after.schema.equals(dataset.schema, check_metadata=True)
    after.validate()
    assert after.to_table(filter="id = 42", columns=["id"]).num_rows == 1
    assert relink(linked.path, new, new) == 0  # nothing to change: no version
    assert lance.dataset(linked.path).version == after.version


def test_relink_takes_new_times_in_place(linked: Linked) -> None:
    touch(linked.files[0])
    with pytest.raises(LinkError, match="relink"):
        read(linked.path)
    in_first = sum(bool(linked.values[p]) for p, i in enumerate(live()) if i % FILES == 0)
    assert relink(linked.path, linked.folder, linked.folder) == in_first
    assert read(linked.path) == linked.values


def live() -> list[int]:
    return [i for i in range(ROWS) if i % 10 != 3]


def test_relink_of_one_file_leaves_the_others(linked: Linked) -> None:
    target = linked.folder.parent / "elsewhere.bin"
    linked.files[1].rename(target)
    assert relink(linked.path, linked.files[1], target) > 0
    assert read(linked.path) == linked.values


def test_relink_matches_whole_names_only(linked: Linked) -> None:
    prefix = str(linked.folder)[:-1]
    with pytest.raises(ArgumentError, match=re.escape(f"begins with {prefix}; one is to file://")):
        relink(linked.path, prefix, "/elsewhere")


@pytest.mark.parametrize("damage", [Path.unlink, grow, cut])
def test_relink_leaves_the_table_as_it_was_where_a_file_is_not_as_it_was(
    linked: Linked, damage: Callable[[Path], None]
) -> None:
    moved = linked.folder.parent / "moved"
    shutil.move(linked.folder, moved)
    damage(moved / linked.files[3].name)
    version, files = lance.dataset(linked.path).version, data_files(linked.path)
    with pytest.raises(LinkError, match=r"moved/shard%203.*the table is as it was"):
        relink(linked.path, linked.folder, moved)
    assert lance.dataset(linked.path).version == version
    assert data_files(linked.path) == files


def test_relink_that_fails_late_leaves_no_files(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = linked.folder.parent / "moved"
    shutil.move(linked.folder, moved)
    version, files = lance.dataset(linked.path).version, data_files(linked.path)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(lance.LanceDataset, "commit", fail)
    with pytest.raises(OSError, match="the disk is full; the table is as it was"):
        relink(linked.path, linked.folder, moved)
    monkeypatch.undo()
    assert lance.dataset(linked.path).version == version
    assert data_files(linked.path) == files


def test_relink_without_a_check_believes(linked: Linked) -> None:
    assert relink(linked.path, linked.folder, "s3://bucket/a folder", check=False) > 0
    described = lance.dataset(linked.path).take([0], columns=["image"]).to_pylist()[0]["image"]
    assert described["blob_uri"] == "s3://bucket/a%20folder/shard%200%23%2520.bin"
    assert relink(linked.path, "s3://bucket/a%20folder", linked.folder, check=False) > 0
    assert read(linked.path) == linked.values


def test_relink_does_not_undo_what_others_did_meanwhile(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = linked.folder.parent / "moved"
    shutil.move(linked.folder, moved)
    commit = lance.LanceDataset.commit

    def late(*args: Any, **options: Any) -> Any:
        lance.dataset(linked.path).delete("id = 0")
        monkeypatch.undo()
        return commit(*args, **options)

    monkeypatch.setattr(lance.LanceDataset, "commit", late)
    try:
        relink(linked.path, linked.folder, moved)
    except OSError:
        relink(linked.path, linked.folder, moved)
    assert read_ids(linked.path)[0] == 1
    assert read(linked.path) == linked.values[1:]


def test_a_running_stream_goes_on_after_relink(linked: Linked) -> None:
    def loader(**options: Any) -> StreamingDataLoader:
        dataset = StreamingDataset(linked.path, **options)
        return StreamingDataLoader(dataset, batch_size=16, format="rows")

    with loader() as whole:
        batches = list(whole)
    with loader() as first:
        iterator = iter(first)
        head = [next(iterator) for _ in range(3)]
        state = first.state_dict()
    moved = linked.folder.parent / "moved"
    shutil.move(linked.folder, moved)
    relink(linked.path, linked.folder, moved)
    with loader(version=lance.dataset(linked.path).version) as second:
        second.load_state_dict(state)
        assert head + list(second) == batches


@pytest.mark.parametrize("when", ["_commit", "commit_files"])
def test_a_killed_relink_leaves_nothing_after_the_next(
    linked: Linked, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    class KillError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KillError

    moved = linked.folder.parent / "moved"
    shutil.move(linked.folder, moved)
    with monkeypatch.context() as patch:
        patch.setattr(relinking, when, kill)
        patch.setattr(relinking, "discard", lambda *_: None)  # a kill runs no clean-up
        with pytest.raises(KillError):
            relink(linked.path, linked.folder, moved)
    assert relink(linked.path, linked.folder, moved) > 0
    data = {path.name for path in Path(linked.path, "data").iterdir()}
    used: set[str] = set()
    for version in lance.dataset(linked.path).versions():
        for fragment in lance.dataset(linked.path, version=version["version"]).get_fragments():
            used |= {file.path for file in fragment.data_files()}
    assert {name for name in data if name.endswith(".lance")} == used
    assert not list(Path(linked.path).parent.glob("*.relinking*"))


def test_relink_refuses_tables_without_links(table_path: str) -> None:
    with pytest.raises(ArgumentError, match=r"no column of .* is linked"):
        relink(table_path, "/a", "/b")


# ---- a remote store -------------------------------------------------------------------------


s3 = test_object_store.store  # a server of this module


@pytest.fixture
def remote(s3: dict[str, str], tmp_path: Path) -> Linked:
    """Make a table on disk, with credentials for an S3 server, where its files are."""
    linked = make(tmp_path)
    folder = Store(f"s3://bench/{tmp_path.name} é%20", s3)
    for file in linked.files:
        with folder.create(file.name) as sink:
            sink.write(file.read_bytes())
    shutil.rmtree(linked.folder)
    to = "s3://bench/" + quote(f"{tmp_path.name} é%20")
    relink(linked.path, linked.folder, to, storage_options=s3)
    return linked


def read_remote(linked: Linked, s3: dict[str, str], **options: Any) -> list[bytes | None]:
    table = open_table(linked.path, storage_options=s3)
    batch = Reader(table, ["image"], **options).read(np.arange(table.num_rows)).batch
    return batch.column(0).to_pylist()


def test_files_in_a_store_are_read_and_checked(
    remote: Linked, s3: dict[str, str], tmp_path: Path
) -> None:
    table = open_table(remote.path, storage_options=s3)
    reader = Reader(table, ["image"])
    every = np.arange(table.num_rows)
    assert reader.read(every).batch.column(0).to_pylist() == remote.values
    dataset = StreamingDataset(remote.path, storage_options=s3, shuffle=False, columns=["image"])
    assert [row["image"] for row in dataset] == remote.values
    folder = Store(f"s3://bench/{tmp_path.name} é%20", s3)
    name = remote.files[1].name
    with folder.create(name) as sink:
        sink.write(b"another")
    with pytest.raises(LinkError, match=r"shard%201.* has 7 bytes .* was linked with \d+ bytes"):
        read_remote(remote, s3)
    folder.remove(name)
    with pytest.raises(LinkError, match=r"there is no file s3://bench/.*shard%201"):
        read_remote(remote, s3)
    good = [
        value for i, value in zip(live(), remote.values, strict=True) if i % FILES != 1 or not value
    ]
    assert read_remote(remote, s3, tolerant=True) == good
    wrong = {**s3, "aws_secret_access_key": "wrong-secret"}
    with pytest.raises(LinkError, match="cannot look at s3://bench/") as caught:
        read_remote(remote, wrong)
    assert "wrong-secret" not in str(caught.value)
    with pytest.raises(LinkError, match="there is no file"):
        relink(remote.path, "s3://bench", "s3://bench/other", storage_options=s3)


def test_remote_files_are_looked_at_once(
    remote: Linked, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    stat = Store.stat

    def counted(self: Store, path: str = "") -> Any:
        asked.append(path)
        return stat(self, path)

    monkeypatch.setattr(Store, "stat", counted)
    reader = Reader(open_table(remote.path, storage_options=s3), ["image"])
    for first in range(0, 160, 40):
        reader.read(np.arange(first, first + 40))
    assert len(asked) == len(set(asked)) == FILES
