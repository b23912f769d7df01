"""A table in an S3 store: a real server, on this machine."""

from __future__ import annotations

import json
import os
import pickle
import time
import traceback
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import destrier
from destrier import (
    ArgumentError,
    PermutationBuilder,
    ReadError,
    SourceError,
    StorageError,
    StreamingDataLoader,
    StreamingDataset,
    TableError,
    VersionError,
    WorkerError,
    WriteError,
)
from destrier.files import Store
from destrier.writing.write import write_table
from proxy import Fault, Proxy
from seaweed import SECRET, USER, seaweed
from sources import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = 1003


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as s3:
        yield {
            "aws_endpoint": f"http://127.0.0.1:{s3}",
            "allow_http": "true",
            "aws_access_key_id": USER,
            "aws_secret_access_key": SECRET,
            "aws_region": "us-east-1",
            "aws_virtual_hosted_style_request": "false",
        }


def write(uri: str, options: dict[str, str], rows: int) -> None:
    data = pa.table({"id": np.arange(rows), "label": np.arange(rows) % 10})
    lance.write_dataset(data, uri, storage_options=options, mode="overwrite", max_rows_per_file=400)


@pytest.fixture(scope="module")
def uri(store: dict[str, str]) -> str:
    write("s3://bench/numbers.lance", store, ROWS)
    return "s3://bench/numbers.lance"


def test_an_epoch_and_a_resume(uri: str, store: dict[str, str]) -> None:
    dataset = StreamingDataset(uri, storage_options=store, filter="label < 7")
    with StreamingDataLoader(dataset, batch_size=50, remainder="keep") as loader:
        batches = []
        for batch in loader:
            batches.append(batch["id"].tolist())
            if len(batches) == 5:
                state = loader.state_dict()
    assert sorted(chain.from_iterable(batches)) == [i for i in range(ROWS) if i % 10 < 7]
    again = StreamingDataset(uri, storage_options=store)
    with StreamingDataLoader(again, batch_size=50, remainder="keep") as loader:
        loader.load_state_dict(state)
        assert [batch["id"].tolist() for batch in loader] == batches[5:]


def test_clumps_are_larger_than_on_a_disk(uri: str, store: dict[str, str]) -> None:
    assert StreamingDataset(uri, storage_options=store).table.remote


def test_a_lancedb_table_brings_its_options(store: dict[str, str]) -> None:
    database = lancedb.connect("s3://bench/database", storage_options=store)
    table = database.create_table("t", [{"id": i} for i in range(100)], mode="overwrite")
    dataset = StreamingDataset(table, shuffle=False)
    assert [row["id"] for row in dataset] == list(range(100))
    copy = pickle.loads(pickle.dumps(dataset))
    assert [row["id"] for row in copy] == list(range(100))


def test_a_permutation_is_saved_beside_the_table(uri: str, store: dict[str, str]) -> None:
    builder = PermutationBuilder(uri, storage_options=store)
    parts = builder.split_random(ratios=[0.8, 0.2], names=["train", "val"]).execute()
    saved = parts.save("s3://bench/parts.lance", storage_options=store)
    from destrier import Permutation

    opened = Permutation.open(saved, storage_options=store)
    dataset = StreamingDataset(uri, storage_options=store, permutation=opened["val"])
    assert len(list(dataset)) == len(opened["val"]) == ROWS - int(ROWS * 0.8)


def test_no_credentials_in_state_repr_and_errors(uri: str, store: dict[str, str]) -> None:
    dataset = StreamingDataset(uri, storage_options=store)
    texts = [repr(dataset), str(dataset.state_dict())]
    with pytest.raises(VersionError) as gone:
        StreamingDataset(uri, storage_options=store, version=77)
    texts.append(str(gone.value))
    wrong = {**store, "aws_secret_access_key": SECRET + "-wrong"}
    with pytest.raises(TableError) as refused:
        StreamingDataset(uri, storage_options=wrong)
    texts.append(str(refused.value))
    assert not any(SECRET in text for text in texts)


def test_a_table_that_is_not_there(store: dict[str, str]) -> None:
    with pytest.raises(TableError, match="nothing-here"):
        StreamingDataset("s3://bench/nothing-here.lance", storage_options=store)


# ---- a store that fails -----------------------------------------------------------------------

WIDE = "s3://bench/wide.lance"
CLUMP = 8


@pytest.fixture(scope="module")
def wide(store: dict[str, str]) -> str:
    rows = 1024
    values = np.random.default_rng(0).integers(0, 256, (rows, 20_000), np.uint8)
    data = pa.table({"image": pa.array([v.tobytes() for v in values]), "id": np.arange(rows)})
    lance.write_dataset(data, WIDE, storage_options=store)
    return WIDE


def through(proxy: Proxy, store: dict[str, str], **options: str) -> dict[str, str]:
    return {**store, "aws_endpoint": f"http://127.0.0.1:{proxy.port}", **options}


def port(store: dict[str, str]) -> int:
    return int(store["aws_endpoint"].rsplit(":", 1)[1])


FEW = {"client_max_retries": "1", "lance_aimd_max_retries": "0"}  # so that it ends sooner


def is_data(head: str) -> bool:
    return "/data/" in head.split("\r\n", maxsplit=1)[0]


def epoch(uri: str, options: dict[str, str]) -> list[list[int]]:
    dataset = StreamingDataset(uri, storage_options=options, num_splits=8, shuffle_clump_size=CLUMP)
    with StreamingDataLoader(dataset, batch_size=32) as loader:
        return [batch["id"].tolist() for batch in loader]


def often(kind: Fault) -> Callable[[int, str], Fault | None]:
    """Fails every 13th request for data."""
    seen = iter(range(1 << 30))
    return lambda _, head: kind if is_data(head) and next(seen) % 13 == 6 else None


def always(kind: Fault, armed: list[bool]) -> Callable[[int, str], Fault | None]:
    return lambda _, head: kind if armed and is_data(head) else None


@pytest.mark.parametrize("kind", ["503", "reset", "cut", "stall"])
def test_passing_faults_change_nothing(wide: str, store: dict[str, str], kind: Fault) -> None:
    expected = epoch(wide, store)
    with Proxy(port(store), fault=often(kind)) as proxy:
        options = through(proxy, store, read_timeout="200ms")
        assert epoch(wide, options) == expected
        assert len([path for path, _ in proxy.gets if "/data/" in path]) > 14


@pytest.mark.parametrize("kind", ["503", "reset", "cut", "stall"])
def test_a_fault_that_stays_is_an_error(wide: str, store: dict[str, str], kind: Fault) -> None:
    armed: list[bool] = []
    with Proxy(port(store), fault=always(kind, armed)) as proxy:
        options = through(proxy, store, read_timeout="200ms", client_retry_timeout="1", **FEW)
        with StreamingDataLoader(
            StreamingDataset(wide, storage_options=options), batch_size=32, on_error="skip"
        ) as loader:
            armed.append(True)
            began = time.monotonic()
            with pytest.raises(StorageError, match=r"wide\.lance.*failed \d+ times") as failed:
                list(loader)
        assert time.monotonic() - began < 60  # a hang is minutes
    text = "".join(traceback.format_exception(failed.value))
    assert "client_retry_timeout" in str(failed.value)
    assert SECRET not in text


def test_a_refusal_is_not_retried(wide: str, store: dict[str, str]) -> None:
    armed: list[bool] = []
    with Proxy(port(store), fault=always("403", armed)) as proxy:
        dataset = StreamingDataset(wide, storage_options=through(proxy, store))
        with StreamingDataLoader(dataset, batch_size=32) as loader:
            armed.append(True)
            with pytest.raises(ReadError, match="403"):
                next(iter(loader))


def requests_of(wide: str, options: dict[str, str], prefetch_bytes: int) -> tuple[int, int]:
    dataset = StreamingDataset(
        wide,
        storage_options=options,
        columns=["image"],
        num_splits=8,
        shuffle_clump_size=CLUMP,
        shuffle_window=2,
    )
    before, _ = dataset.table.io()
    with StreamingDataLoader(dataset, batch_size=8, prefetch_bytes=prefetch_bytes) as loader:
        assert sum(len(batch["image"]) for batch in loader) == 1024
    return dataset.table.io()[0] - before, dataset.table.io()[1]


def test_requests_of_an_epoch(wide: str, store: dict[str, str]) -> None:
    with Proxy(port(store)) as proxy:
        requests, size = requests_of(wide, through(proxy, store), 24 << 20)
        # Rows of the first batch are read one by one. Each split ends in its first window, which
        # is read again, and has a part of a clump at both ends.
        clumps = 1024 / CLUMP + 8 * (2 + 2)
        assert 1024 / CLUMP < requests <= 1.1 * clumps + 8 + 8
        assert size >= 1024 * 20_000
        gets = len([path for path, _ in proxy.gets if "/data/" in path])
        assert gets == pytest.approx(requests, abs=16)


def test_a_table_that_fits_is_read_in_large_requests(wide: str, store: dict[str, str]) -> None:
    requests, size = requests_of(wide, store, 768 << 20)
    assert requests <= 8 + 24  # the first batch by itself, and 2.5 blocks of 4 requests
    assert size >= 1024 * 20_000


def test_credentials_of_a_namespace_are_fetched_again(wide: str, store: dict[str, str]) -> None:
    from lance_namespace import DescribeTableResponse, LanceNamespace

    class Expiring(LanceNamespace):
        fetched = 0

        def namespace_id(self) -> str:
            return "expiring"

        def describe_table(self, request: object) -> DescribeTableResponse:
            del request
            self.fetched += 1
            ends = int(1000 * (time.time() + 1.0))
            dated = {"expires_at_millis": str(ends), "refresh_offset_millis": "500"}
            return DescribeTableResponse(location=wide, storage_options={**store, **dated})

    namespace = Expiring()
    opened = lance.dataset(namespace_client=namespace, table_id=["wide"])
    dataset = StreamingDataset(opened, num_splits=8)
    # so little memory that rows are read again in each epoch
    with StreamingDataLoader(dataset, batch_size=128, prefetch_bytes=24 << 20) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 1024
        before = namespace.fetched
        time.sleep(1.0)
        assert sum(len(batch["id"]) for batch in loader) == 1024
    assert namespace.fetched > before


class Provider:
    """Gives options from a file, for a second, and notes each call and its process."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        self.folder = folder
        (folder / "options").write_text(json.dumps(options))

    def __call__(self) -> dict[str, str]:
        with (self.folder / "calls").open("a") as calls:
            calls.write(f"{os.getpid()}\n")
        ends = str(int(1000 * (time.time() + 1.0)))
        given: dict[str, str] = json.loads((self.folder / "options").read_text())
        return {**given, "expires_at_millis": ends, "refresh_offset_millis": "500"}

    @property
    def calls(self) -> list[int]:
        return [int(line) for line in (self.folder / "calls").read_text().split()]


def test_options_of_a_function_are_fetched_again(
    wide: str, store: dict[str, str], tmp_path: Path
) -> None:
    provider = Provider(tmp_path, store)
    dataset = StreamingDataset(wide, storage_options=provider, num_splits=8)
    loader = StreamingDataLoader(dataset, batch_size=128, prefetch_bytes=24 << 20)
    with loader:
        assert sum(len(batch["id"]) for batch in loader) == 1024
        before = len(provider.calls)
        time.sleep(1.0)
        assert sum(len(batch["id"]) for batch in loader) == 1024
        assert before < len(provider.calls) < before + 10
        (tmp_path / "options").write_text(
            json.dumps({**store, "aws_secret_access_key": SECRET + "-wrong"})
        )
        time.sleep(1.0)
        next(iter(loader))  # what is read ahead is delivered
        with pytest.raises(ReadError, match="403") as refused:
            list(chain(loader, loader))
    texts = [repr(dataset), repr(dataset.table.storage_options), str(dataset.state_dict())]
    texts += traceback.format_exception(refused.value)
    assert not any(SECRET in text for text in texts)


def test_a_function_gives_options_in_workers(
    uri: str, store: dict[str, str], tmp_path: Path
) -> None:
    provider = Provider(tmp_path, store)
    dataset = StreamingDataset(uri, storage_options=provider, num_splits=8)
    assert SECRET.encode() not in pickle.dumps(dataset)
    rows = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert len({int(row["id"]) for row in rows}) == ROWS // 8 * 8
    assert {os.getpid()} < set(provider.calls)


def test_a_function_that_gives_no_options(uri: str) -> None:
    with pytest.raises(ArgumentError, match=r"must return a mapping.*got str"):
        StreamingDataset(uri, storage_options=lambda: SECRET)  # type: ignore[arg-type,return-value]


# ---- writing ----------------------------------------------------------------------------------


def listed(uri: str, store: dict[str, str]) -> list[str]:
    return [file.path for file in Store(uri, store).files()]


def test_write_append_and_leave_nothing_else(store: dict[str, str]) -> None:
    uri = "s3://bench/writing/t.lance"
    write_table(Numbers(units_=3), uri, num_workers=1, storage_options=store)
    write_table(Numbers(units_=2), uri, num_workers=0, mode="append", storage_options=store)
    dataset = lance.dataset(uri, storage_options=store)
    ids = dataset.to_table(columns=["id"])["id"].to_pylist()
    assert ids == [*range(150), *range(100)]
    data = [path for path in listed("s3://bench/writing", store) if "/data/" in path]
    assert len(data) == len(dataset.get_fragments()) == 5
    assert all(path.startswith("t.lance/") for path in listed("s3://bench/writing", store))
    with pytest.raises(WriteError, match="mode='append'"):
        write_table(Numbers(units_=3), uri, num_workers=0, storage_options=store)


def test_blobs_are_moved_with_their_files(store: dict[str, str]) -> None:
    uri = "s3://bench/blobs/t.lance"
    source = Numbers(units_=2, length=4, payload=300_000)
    write_table(source, uri, num_workers=0, storage_options=store)
    dataset = StreamingDataset(uri, storage_options=store, columns=["id", "data"], shuffle=False)
    assert [len(row["data"]) for row in dataset] == [300_000] * 8


def test_a_killed_worker_and_going_on(store: dict[str, str], tmp_path: Path) -> None:
    uri = "s3://bench/killed/t.lance"
    armed, log = tmp_path / "armed", tmp_path / "log"
    armed.touch()
    log.mkdir()
    source = Numbers(units_=6, die=4, armed=str(armed), log=str(log))
    with pytest.raises(WorkerError):
        write_table(source, uri, num_workers=1, storage_options=store)
    with pytest.raises(TableError):
        StreamingDataset(uri, storage_options=store)
    armed.unlink()
    for path in log.iterdir():
        path.unlink()
    write_table(source, uri, num_workers=1, storage_options=store)
    assert {int(path.name.split("-")[0]) for path in log.iterdir()} == {4, 5}
    dataset = lance.dataset(uri, storage_options=store)
    assert dataset.to_table(columns=["id"])["id"].to_pylist() == list(range(300))
    assert all(path.startswith("t.lance/") for path in listed("s3://bench/killed", store))


def test_a_bad_source_leaves_nothing_in_the_store(store: dict[str, str]) -> None:
    with pytest.raises(SourceError, match="unit 3 is damaged"):
        write_table(Numbers(fail=3), "s3://bench/bad/t.lance", num_workers=0, storage_options=store)
    assert listed("s3://bench/bad", store) == []


# ---- other formats ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table on disk, whose binary values are large enough to be linked."""
    uri = str(tmp_path_factory.mktemp("numbers") / "t.lance")
    write_table(Numbers(units_=3, payload=2000), uri, num_workers=0)
    return uri


@pytest.mark.parametrize("format", ["mds", "webdataset", "litdata", "parquet"])
def test_there_and_back_through_the_store(
    numbers: str, store: dict[str, str], format: str, tmp_path: Path
) -> None:
    place = f"s3://bench/formats/{format} é"
    columns = ["id", "data"] if format != "webdataset" else ["data"]
    destrier.export(
        numbers, place, format=format, columns=columns, destination_options=store, num_workers=0
    )
    local = tmp_path / "t.lance"
    written = destrier.convert(place, local, source_options=store, num_workers=0)
    assert written.rows == 150
    found = destrier.verify(place, local, source_options=store, num_workers=0)
    assert (found.equal, found.rows) == (True, 150)
    data = next(name for name in lance.dataset(str(local)).schema.names if "data" in name)
    values = lance.dataset(str(local)).to_table(columns=[data])[data].to_pylist()
    assert values == lance.dataset(numbers).to_table(columns=["data"])["data"].to_pylist()
    if format in ("mds", "webdataset"):
        linked = f"s3://bench/linked/{format}.lance"
        destrier.link(
            place, linked, storage_options=store, source_options=store, num_workers=1, crc=True
        )
        dataset = StreamingDataset(linked, storage_options=store, columns=[data], shuffle=False)
        assert [row[data] for row in dataset] == values


def test_add_columns_in_the_store(store: dict[str, str]) -> None:
    uri = "s3://bench/adding/t.lance"
    write_table(Numbers(units_=3), uri, num_workers=0, storage_options=store)
    destrier.add_columns(
        uri,
        lambda batch: {"double": [2 * i for i in batch["id"].to_pylist()]},
        columns=["id"],
        storage_options=store,
        num_workers=0,
    )
    found = lance.dataset(uri, storage_options=store).to_table(columns=["double"])
    assert found["double"].to_pylist() == [2 * i for i in range(150)]
    assert all(path.startswith("t.lance/") for path in listed("s3://bench/adding", store))
