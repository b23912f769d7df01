"""Converting, and tables from a function: rates beside the original libraries', and memory.

Images: tars, and MDS shards that are not compressed, of images of about 50 kB, converted by
2 workers, whose start is in the time; beside them pylance writes the same rows from memory. Small
rows: classic and Arrow-row LitData chunks, and MDS shards, converted in one process; beside them
litdata's StreamingDataset and streaming's LocalDataset are iterated in one process. A function that
only makes two numbers, run over a range by optimize of both libraries with 2 workers, whose start
is in the time. Memory: of each process while 2 workers convert 2 GB, sampled; what is resident
counts pages of mapped files too, which the system takes back when it needs them, so what is the
process's own is given apart. Every run is a fresh process; rounds are interleaved. Files are in
the system's cache. ``--quick`` measures little, and little can be told from it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import DATA, fresh, report, save, spread, timed
from formats import (
    Sizes,
    interleaved,
    peer_made,
    peer_setup,
    peers_python,
    scratch,
    sizes,
    tars,
)

IMAGE = 50_000
WORKERS = 2


def convert_case(source: str, workers: str) -> None:
    """Convert; reports rows and bytes of values a second."""
    import destrier.formats.litdata
    import destrier.formats.mds
    import destrier.formats.webdataset  # noqa: F401 - loaded before the clock starts
    from destrier import convert

    with scratch("convert.lance") as path:
        seconds, written = timed(lambda: convert(source, path, num_workers=int(workers)))
    report({"seconds": seconds, "rows_per_second": written.rows / seconds})


def table_case(source: str, path: str) -> None:
    """Make the table whose rows pylance writes."""
    from destrier import convert

    convert(source, path, num_workers=0, mode="overwrite")
    report({})


def pylance_case(table: str) -> None:
    """Write a table's rows from memory, in batches of 16 MB."""
    import lance
    import pyarrow as pa

    whole = lance.dataset(table)
    rows = max(1, int(whole.count_rows() * (16 << 20) // whole.to_table().nbytes))
    batches = whole.to_table().combine_chunks().to_batches(max_chunksize=rows)
    count = sum(batch.num_rows for batch in batches)
    reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
    with scratch("pylance.lance") as path:
        seconds, _ = timed(
            lambda: lance.write_dataset(reader, str(path), data_storage_version="2.2")
        )
    report({"seconds": seconds, "rows_per_second": count / seconds})


def iterate(rows: Any, most: float) -> None:
    """Rows a second of a peer's reader, for some seconds or all rows."""
    count = 0
    began = time.perf_counter()
    for _ in rows:
        count += 1
        if count % 1000 == 0 and time.perf_counter() - began > most:
            break
    seconds = time.perf_counter() - began
    report({"seconds": seconds, "rows_per_second": count / seconds})


def litdata_case(folder: str, most: str) -> None:
    peer_setup()
    from litdata import StreamingDataset

    iterate(StreamingDataset(folder), float(most))


def streaming_case(folder: str, most: str) -> None:
    peer_setup()
    from streaming import LocalDataset

    dataset = LocalDataset(folder)
    iterate((dataset[number] for number in range(len(dataset))), float(most))


def square(number: int) -> dict[str, int]:
    return {"index": number, "value": number * number}


def optimize_case(count: str) -> None:
    from destrier import optimize

    with scratch("optimize.lance") as path:
        seconds, written = timed(
            lambda: optimize(square, range(int(count)), path, num_workers=WORKERS)
        )
    assert written.rows == int(count)
    report({"seconds": seconds, "rows_per_second": int(count) / seconds})


def litdata_optimize_case(count: str) -> None:
    peer_setup()
    from litdata import optimize

    inputs = list(range(int(count)))
    with scratch("optimize-litdata") as path:
        seconds, _ = timed(
            lambda: optimize(
                square,
                inputs,
                str(path),
                chunk_bytes="64MB",
                num_workers=WORKERS,
                verbose=False,
            )
        )
    report({"seconds": seconds, "rows_per_second": int(count) / seconds})


@contextmanager
def watched_memory() -> Iterator[dict[str, dict[int, int]]]:
    """The most that this process and its children take, by process, in bytes."""
    import psutil

    most: dict[str, dict[int, int]] = {"resident": {}, "own": {}}
    done = threading.Event()
    parent = psutil.Process()

    def look() -> None:
        while not done.wait(0.02):
            for process in (parent, *parent.children()):
                try:
                    memory = process.memory_info()
                except psutil.NoSuchProcess:
                    continue
                for name, value in (
                    ("resident", memory.rss),
                    ("own", memory.rss - memory.shared),
                ):
                    most[name][process.pid] = max(most[name].get(process.pid, 0), value)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def memory_case(source: str) -> None:
    import os

    from destrier import convert

    with scratch("memory.lance") as path, watched_memory() as most:
        seconds, _ = timed(lambda: convert(source, path, num_workers=WORKERS))
    result = {"seconds": seconds}
    for name, values in most.items():
        parent = values.pop(os.getpid())
        result[f"parent_{name}_mb"] = parent / 1e6
        result[f"worker_{name}_mb"] = max(values.values()) / 1e6
    report(result)


def best(results: dict[str, list[dict[str, float]]], one: str, other: str) -> dict[str, float]:
    """The ratio of two rates, round by round."""
    pairs = zip(results[one], results[other], strict=True)
    return spread([a["rows_per_second"] / b["rows_per_second"] for a, b in pairs])


def medians(results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    return {n: {key: spread([r[key] for r in rs]) for key in rs[0]} for n, rs in results.items()}


def images(size: Sizes, peers: str) -> dict[str, Any]:
    ours, script = sys.executable, Path(__file__)
    runs: dict[str, tuple[str, ...]] = {}
    for name, source in (
        ("tars", tars(size.images, IMAGE, 1_000)),
        ("MDS", peer_made("mds-images", size.images, peers)),
    ):
        table = DATA / f"images-{name.lower()}-{size.images}.lance"
        if not table.exists():
            fresh(script, "table", str(source), str(table))
        runs[f"{name}, destrier"] = (ours, "convert", str(source), str(WORKERS))
        runs[f"{name}, pylance from memory"] = (ours, "pylance", str(table))
    results = interleaved(script, runs, size.rounds)
    return {
        "runs": medians(results),
        "ratios": {
            name: best(results, f"{name}, destrier", f"{name}, pylance from memory")
            for name in ("tars", "MDS")
        },
    }


def small_rows(size: Sizes, peers: str) -> dict[str, Any]:
    ours = sys.executable
    runs: dict[str, tuple[str, ...]] = {}
    names = {"LitData, classic": "litdata-arrays", "LitData, Arrow rows": "litdata-rows",
             "MDS": "mds-small"}  # fmt: skip
    for name, kind in names.items():
        source = str(peer_made(kind, size.small, peers))
        reader = kind.partition("-")[0].replace("mds", "streaming")
        runs[f"{name}, destrier"] = (ours, "convert", source, "0")
        runs[f"{name}, {reader} iterates"] = (peers, reader, source, str(size.seconds))
    results = interleaved(Path(__file__), runs, size.rounds)
    ordered = list(runs)
    pairs = zip(names, ordered[::2], ordered[1::2], strict=True)
    return {
        "runs": medians(results),
        "ratios": {name: best(results, one, other) for name, one, other in pairs},
    }


def optimizing(size: Sizes, peers: str) -> dict[str, Any]:
    ours = sys.executable
    runs = {
        "destrier": (ours, "optimize", str(size.small)),
        "litdata": (peers, "litdata-optimize", str(size.small)),
        f"destrier, {size.many:,} rows": (ours, "optimize", str(size.many)),
    }
    results = interleaved(Path(__file__), runs, size.rounds)
    return {"runs": medians(results), "ratio": best(results, "destrier", "litdata")}


def memory(size: Sizes, peers: str) -> dict[str, Any]:
    sources = {
        "tars": tars(size.large, IMAGE, 1_000),
        "MDS": peer_made("mds-images", size.large, peers),
    }
    runs = {name: (sys.executable, "memory", str(source)) for name, source in sources.items()}
    return medians(interleaved(Path(__file__), runs, 1))


def main() -> None:
    size, ending = sizes()
    peers = peers_python()
    save(
        f"ingest{ending}",
        {
            "image_bytes": IMAGE,
            "image_rows": size.images,
            "small_rows": size.small,
            "memory_rows": size.large,
            "images": images(size, peers),
            "small": small_rows(size, peers),
            "optimize": optimizing(size, peers),
            "memory": memory(size, peers),
        },
    )


CASES = {
    "convert": convert_case,
    "table": table_case,
    "pylance": pylance_case,
    "litdata": litdata_case,
    "streaming": streaming_case,
    "optimize": optimize_case,
    "litdata-optimize": litdata_optimize_case,
    "memory": memory_case,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        CASES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
