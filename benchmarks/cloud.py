"""Whole first epochs from an object store, against the peers.

SeaweedFS on this machine, behind a proxy that lets each request wait for 0 and 15 ms (50 ms too in
full mode) and counts them. Every loader starts with an empty cache; its rate is that of the whole
epoch, from before the loader is made to the last batch, or to the time limit. Each peer counts
with the better of 0 and 2 workers. Every run is a process of its own, in interleaved rounds.

    python benchmarks/cloud.py [--quick] [NAME ...]

What the store can give at all, to eight threads that read ranges of 8 MB, is measured beside them.
The names are those of workloads and loaders, which are all run by default. LitData is read by
boto3: with obstore installed, it accepts no address without TLS.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from common import fresh, report, save
from formats import SCRATCH, made, peer_setup, peers_python, scratch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the server and the proxy

HERE = Path(__file__)
BLOCK = 2_049
PIECE = 5_000
RANGE = 8 << 20
FORMATS = {"litdata": "litdata", "mosaic": "mds", "webdataset": "tars"}  # all others: lance
OURS = ("defaults", "clump 1")


@dataclass(frozen=True)
class Workload:
    """Rows of one kind.

    Attributes:
        rows: How many, in full and quick mode.
        batch: Rows in a batch.
        row_bytes: Of a row, about.
    """

    rows: tuple[int, int]
    batch: int
    row_bytes: int


WORKLOADS = {
    "small": Workload((2_000_000, 200_000), 1024, 40),
    "tokens": Workload((60_000, 5_000), 128, 4 * BLOCK),
    "jpeg": Workload((20_000, 4_000), 128, 25_000),
}


@dataclass(frozen=True)
class Mode:
    """How much is run.

    Attributes:
        delays: Milliseconds that each request waits.
        seconds: After which an epoch is left.
        rounds: Of all runs.
    """

    delays: tuple[int, ...]
    seconds: float
    rounds: int


FULL = Mode((0, 15, 50), 8.0, 2)
QUICK = Mode((0, 15), 3.0, 1)


# ---- data -------------------------------------------------------------------------------------


def samples(workload: str, rows: int) -> Iterator[dict[str, Any]]:
    """Pieces of rows from a seed; what stands for JPEGs does not compress either."""
    for start in range(0, rows, PIECE):
        count = min(PIECE, rows - start)
        rng = np.random.default_rng([0, start])
        labels = rng.integers(0, 100, count)
        if workload == "small":
            yield {"value": rng.random((count, 8), np.float32), "label": labels}
        elif workload == "tokens":
            yield {"value": rng.integers(0, 50_000, (count, BLOCK), np.int32)}
        else:
            sizes = rng.integers(20_000, 30_000, count).tolist()
            yield {"value": [rng.bytes(size) for size in sizes], "label": labels}


def each(workload: str, rows: int) -> Iterator[dict[str, Any]]:
    """The rows, one at a time."""
    for piece in samples(workload, rows):
        labels = piece.get("label")
        for i, value in enumerate(piece["value"]):
            yield {"value": value} if labels is None else {"value": value, "label": int(labels[i])}


def chunk_bytes(workload: str, rows: int) -> int:
    """64 MB, or so much that there are eight chunks to choose from."""
    return max(2_000_000, min(64_000_000, rows * WORKLOADS[workload].row_bytes // 8))


def write_lance(workload: str, rows: int, folder: str) -> None:
    import lance
    import pyarrow as pa

    def table(piece: dict[str, Any]) -> pa.Table:
        value = piece["value"]
        if workload == "tokens":
            flat = pa.array(value.reshape(-1))
            return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, BLOCK)})
        if workload == "jpeg":
            return pa.table({"image": pa.array(value, pa.binary()), "label": piece["label"]})
        return pa.table({**{f"f{i}": value[:, i] for i in range(8)}, "label": piece["label"]})

    pieces = map(table, samples(workload, rows))
    first = next(pieces)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from first.to_batches()
        for piece in pieces:
            yield from piece.to_batches()

    lance.write_dataset(pa.RecordBatchReader.from_batches(first.schema, batches()), folder)


def write_litdata(workload: str, rows: int, folder: str) -> None:
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    size = chunk_bytes(workload, rows)
    if workload == "tokens":
        per_chunk = size // (4 * BLOCK) * BLOCK
        writer = BinaryWriter(folder, chunk_size=per_chunk, item_loader=TokensLoader())
        items: Iterable[Any] = (torch.from_numpy(row["value"]) for row in each(workload, rows))
    else:
        writer = BinaryWriter(folder, chunk_bytes=size)
        items = each(workload, rows)
        if workload == "small":  # rows of plain numbers are kept as Arrow, which it reads faster
            items = (
                {**{f"f{i}": float(v) for i, v in enumerate(row["value"])}, "label": row["label"]}
                for row in items
            )
    for number, item in enumerate(items):
        writer[number] = item
    writer.done()
    writer._merge_no_wait()  # noqa: SLF001 - what optimize does at its end


def write_mds(workload: str, rows: int, folder: str) -> None:
    from streaming import MDSWriter

    kinds = {"small": "ndarray:float32:8", "tokens": f"ndarray:int32:{BLOCK}", "jpeg": "bytes"}
    columns = {"value": kinds[workload], **({} if workload == "tokens" else {"label": "int"})}
    with MDSWriter(out=folder, columns=columns, size_limit=chunk_bytes(workload, rows)) as writer:
        for row in each(workload, rows):
            writer.write(row)


def write_tars(workload: str, rows: int, folder: str) -> None:
    ending = "bin" if workload == "tokens" else "jpg"
    per_tar = max(1, chunk_bytes(workload, rows) // WORKLOADS[workload].row_bytes)
    tar = None
    for number, row in enumerate(each(workload, rows)):
        if number % per_tar == 0:
            if tar is not None:
                tar.close()
            tar = tarfile.open(Path(folder) / f"{number // per_tar:05}.tar", "w")  # noqa: SIM115
        assert tar is not None
        members = {ending: bytes(row["value"])}
        if "label" in row:
            members["cls"] = b"%d" % row["label"]
        for name, content in members.items():
            info = tarfile.TarInfo(f"{number:08}.{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    if tar is not None:
        tar.close()


WRITERS = {
    "lance": write_lance,
    "litdata": write_litdata,
    "mds": write_mds,
    "tars": write_tars,
}


def data(workload: str, format: str, rows: int) -> Path:
    """The rows in a format, on disk; written by the first call."""
    python = peers_python() if format in ("litdata", "mds") else sys.executable

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        fresh(HERE, "--write", workload, format, str(rows), str(folder), python=python)

    return made(f"cloud-{workload}-{format}-{rows}", write)


def upload(paths: dict[str, Path], port: int) -> None:
    """Copy folders into the bucket."""
    import pyarrow.fs as pafs

    from seaweed import BUCKET, file_system

    store = file_system(port)
    for name, path in paths.items():
        pafs.copy_files(str(path), f"{BUCKET}/{name}", destination_filesystem=store)


# ---- loaders ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a loader is made for.

    Attributes:
        workload: The name of the workload.
        setting: Of ours the clump, of a peer its number of workers.
        uri: Of the data.
        endpoint: The server's address.
        cache: An empty folder.
    """

    workload: str
    setting: str
    uri: str
    endpoint: str
    cache: Path

    @property
    def batch(self) -> int:
        """Rows in a batch."""
        return WORKLOADS[self.workload].batch

    @property
    def workers(self) -> int:
        """Worker processes of a peer."""
        return int(self.setting)

    def lance_options(self) -> dict[str, str]:
        """How Lance finds the server; who it is stands in the environment."""
        return {"aws_endpoint": self.endpoint, "allow_http": "true", "aws_region": "us-east-1"}


def destrier(job: Job) -> Iterable[Any]:
    from destrier import StreamingDataLoader, StreamingDataset

    clump = 1 if job.setting == "clump 1" else None
    dataset = StreamingDataset(
        job.uri, storage_options=job.lance_options(), shuffle_clump_size=clump
    )
    return StreamingDataLoader(dataset, batch_size=job.batch, decode={}, remainder="keep")


class Rows:
    """From a RecordBatch to rows, for LanceDB."""

    def __init__(self, workload: str) -> None:
        self.workload = workload

    def __call__(self, batch: Any) -> list[Any]:
        """The rows as dicts."""
        if self.workload != "tokens":
            rows: list[Any] = batch.to_pylist()
            return rows
        import torch

        values = batch.column(0).flatten().to_numpy().reshape(-1, BLOCK)
        return [{"tokens": row} for row in torch.from_numpy(values.copy())]


def lancedb(job: Job) -> Iterable[Any]:
    """Reads of 1,024 small rows and of 64 others: its default is 64."""
    import lancedb as db
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    folder, name = job.uri.rsplit("/", 1)
    table = db.connect(folder, storage_options=job.lance_options()).open_table(
        name.removesuffix(".lance")
    )
    dataset = StreamingDataset(
        table,
        num_splits=64,
        read_batch_size=1024 if job.workload == "small" else 64,
        transform=Rows(job.workload),
    )
    return StreamingDataLoader(
        dataset,
        batch_size=job.batch,
        num_workers=job.workers,
        multiprocessing_context="spawn" if job.workers else None,
    )


def litdata(job: Job) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        job.uri,
        cache_dir=str(job.cache),
        shuffle=True,
        item_loader=TokensLoader(block_size=BLOCK) if job.workload == "tokens" else None,
        storage_options={"endpoint_url": job.endpoint},
    )
    return StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers)


def mosaic(job: Job) -> Iterable[Any]:
    os.environ["S3_ENDPOINT_URL"] = job.endpoint
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(
        remote=job.uri, local=str(job.cache), batch_size=job.batch, shuffle=True
    )
    return StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers)


def webdataset(job: Job) -> Iterable[Any]:
    """Tars in shuffled order through curl, and 1,000 samples shuffled in memory."""
    import boto3
    import webdataset as wds

    client = boto3.client("s3", endpoint_url=job.endpoint, region_name="us-east-1")
    bucket, prefix = job.uri.removeprefix("s3://").split("/", 1)
    urls = [
        client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": found["Key"]})
        for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix + "/")["Contents"]
    ]
    pipes = [f"pipe:curl -s -f '{url}'" for url in urls]
    stream = wds.WebDataset(pipes, shardshuffle=len(pipes), empty_check=False).shuffle(1000)
    if job.workload == "tokens":
        rows = stream.to_tuple("bin").map_tuple(_tokens)
        batches = rows.batched(job.batch)
    else:
        batches = stream.to_tuple("jpg", "cls").batched(job.batch, collation_fn=None)
    return wds.WebLoader(batches, batch_size=None, num_workers=job.workers)  # type: ignore[no-any-return]


def _tokens(content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), np.int32)


class Ranges:
    """The files of the table in ranges of 8 MB by eight threads: what the store gives at most."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __iter__(self) -> Iterator[dict[str, list[bytes]]]:
        """Ranges in parts of the bytes of a row."""
        from concurrent.futures import ThreadPoolExecutor

        import pyarrow.fs as pafs

        address = self.job.endpoint.removeprefix("http://")
        store = pafs.S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1")
        folder = self.job.uri.removeprefix("s3://") + "/data"
        ranges = [
            (info.path, start, min(RANGE, info.size - start))
            for info in store.get_file_info(pafs.FileSelector(folder))
            for start in range(0, info.size, RANGE)
        ]

        def read(part: tuple[str, int, int]) -> dict[str, list[bytes]]:
            path, start, size = part
            with store.open_input_file(path) as file:
                data = file.read_at(size, start)
            width = WORKLOADS[self.job.workload].row_bytes
            return {"value": [data[at : at + width] for at in range(0, size, width)]}

        with ThreadPoolExecutor(8) as pool:
            yield from pool.map(read, ranges)


LOADERS: dict[str, Callable[[Job], Iterable[Any]]] = {
    "ranges": Ranges,
    "destrier": destrier,
    "lancedb": lancedb,
    "litdata": litdata,
    "mosaic": mosaic,
    "webdataset": webdataset,
}


# Imported before the clock starts.
MODULES = {
    "ranges": ("pyarrow.fs",),
    "destrier": ("torch", "destrier.loader", "lance"),
    "lancedb": ("torch", "lancedb.streaming"),
    "litdata": ("torch", "boto3", "litdata"),
    "mosaic": ("torch", "boto3", "streaming"),
    "webdataset": ("torch", "boto3", "webdataset"),
}


# ---- measuring --------------------------------------------------------------------------------


def count(batch: Any, workload: str) -> int:
    """Rows of a batch, a byte of each page of which is read: a mapping is no delivery."""
    if isinstance(batch, list | tuple) and workload == "jpeg":
        batch = [row[0] for row in batch]  # rows of WebDataset
    values = batch
    if isinstance(batch, dict):
        names = ("value", "image", "tokens", "f0")
        values = next(batch[name] for name in names if name in batch)
    elif isinstance(batch, list | tuple) and not isinstance(batch[0], bytes):
        values = batch[0]
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, bytes):
            np.frombuffer(value, np.uint8)[::4096].sum()
        elif hasattr(value, "numpy"):
            value.numpy().reshape(-1).view(np.uint8)[::4096].sum()
    return len(values)


def measure(
    loader: str, workload: str, setting: str, uri: str, seconds: float, ports: list[int]
) -> None:
    """Read an epoch by each way to the server; one that shows nothing in time ends it all."""
    if loader in FORMATS:
        peer_setup()
    for module in MODULES[loader]:
        import_module(module)
    found: list[dict[str, float]] = []
    progress = {"rows": 0, "began": 0.0, "first": 0.0}

    def so_far() -> dict[str, float]:
        took = time.perf_counter() - progress["began"]
        return {"rows": progress["rows"], "seconds": took, "first": progress["first"] or took}

    def end() -> None:
        report({"runs": found})
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)  # threads that read ahead are not waited for

    def give_up() -> None:
        found.append(so_far())
        end()

    for port in ports:
        with scratch(f"cloud-{port}") as cache:
            cache.mkdir()
            progress.update(rows=0, began=time.perf_counter(), first=0.0)
            timer = threading.Timer(1.5 * seconds, give_up)
            timer.start()
            job = Job(workload, setting, uri, f"http://127.0.0.1:{port}", cache)
            for batch in LOADERS[loader](job):
                progress["first"] = progress["first"] or time.perf_counter() - progress["began"]
                progress["rows"] += count(batch, workload)
                if time.perf_counter() - progress["began"] > seconds:
                    break
            timer.cancel()
            found.append(so_far())
    end()


def settings(loader: str) -> tuple[str, ...]:
    """What a loader is run with."""
    return {"destrier": OURS, "ranges": ("plain",)}.get(loader, ("0", "2"))


def main(mode: Mode, chosen: list[str]) -> None:
    from proxy import Proxy
    from seaweed import BUCKET, SECRET, USER, seaweed

    quick = mode is QUICK
    workloads = [name for name in WORKLOADS if name in chosen] or list(WORKLOADS)
    loaders = [name for name in LOADERS if name in chosen] or list(LOADERS)
    os.environ.update(AWS_ACCESS_KEY_ID=USER, AWS_SECRET_ACCESS_KEY=SECRET)
    runs = [
        (workload, loader, setting)
        for workload in workloads
        for loader in loaders
        if not (loader == "webdataset" and workload == "small")
        for setting in settings(loader)
    ]
    paths, names = {}, {}
    for workload, loader, _ in runs:
        format = FORMATS.get(loader, "lance")
        name = f"cloud/{workload}-{format}" + (".lance" if format == "lance" else "")
        names[workload, loader] = name
        paths[name] = data(workload, format, WORKLOADS[workload].rows[quick])
    results: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SCRATCH.parent)))
        server = stack.enter_context(seaweed(folder / "weed"))
        upload(paths, server)
        proxies = [stack.enter_context(Proxy(server, delay=delay / 1e3)) for delay in mode.delays]
        for number in range(mode.rounds):
            for workload, loader, setting in runs:
                before = [len(proxy.gets) for proxy in proxies]
                found = fresh(
                    HERE,
                    *("--measure", loader, workload, setting),
                    f"s3://{BUCKET}/{names[workload, loader]}",
                    str(mode.seconds),
                    *(str(proxy.port) for proxy in proxies),
                    python=peers_python() if loader in FORMATS else sys.executable,
                )["runs"]
                for delay, proxy, old, run in zip(mode.delays, proxies, before, found):  # noqa: B905
                    run["rate"] = run["rows"] / run["seconds"]
                    run["gets_per_row"] = (len(proxy.gets) - old) / max(1, run["rows"])
                    key = f"{workload}, +{delay} ms, {loader}, {setting}"
                    results.setdefault(key, []).append(run)
                    shown = {name: round(value, 4) for name, value in run.items()}
                    print(f"round {number}: {key}: {shown}", file=sys.stderr, flush=True)
    save("cloud-quick" if quick else "cloud", summary(results))


def summary(results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and ours to the best peer and to plain reads of ranges."""
    medians = {
        key: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for key, runs in results.items()
    }
    ratios, shares = {}, {}
    for key in medians:
        where, loader, setting = key.rsplit(", ", 2)
        if loader == "destrier":
            peers = [
                value["rate"]
                for other, value in medians.items()
                if other.startswith(where + ", ")
                and ", destrier, " not in other
                and ", ranges, " not in other
            ]
            limit = medians.get(f"{where}, ranges, plain")
            if limit:
                shares[f"{where}, {setting}"] = medians[key]["rate"] / limit["rate"]
            if peers:
                ratios[f"{where}, {setting}"] = medians[key]["rate"] / max(peers)
    return {"runs": medians, "to_best_peer": ratios, "of_plain_ranges": shares}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads and loaders")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", nargs=4, metavar=("WORKLOAD", "FORMAT", "ROWS", "FOLDER"))
    parser.add_argument("--measure", nargs="+", metavar="VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.write:
        workload, format, rows, folder = options.write
        if format in ("litdata", "mds"):
            peer_setup()
        WRITERS[format](workload, int(rows), folder)
        report({})
    elif options.measure:
        loader, workload, setting, uri, seconds, *ports = options.measure
        measure(loader, workload, setting, uri, float(seconds), list(map(int, ports)))
    else:
        main(QUICK if options.quick else FULL, options.names)
