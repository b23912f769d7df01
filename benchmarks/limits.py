"""Lance's own reads of a workload's rows, and the machine's limits, in the same run.

Reads go to numpy, four at a time as our pipeline has them, through the files as Lance opens them
by default, and every page is touched as it is for loaders. Prints JSON: samples a second for each
limit.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from common import report
from images import crop, decode, own_decoder, planes
from loaders import touch
from workloads import WORKLOADS, Workload

READ_BYTES = 8 << 20  # that are taken at once
MOST_ROWS = 1 << 18
IN_FLIGHT = 4
_COPIED = 64 << 20


def rate(function: Callable[[], int], seconds: float, threads: int = 1) -> float:
    """Samples a second of a function that returns how many it made, run on threads."""
    function()
    began, done = time.perf_counter(), 0
    with ThreadPoolExecutor(threads) as pool:
        running = {pool.submit(function) for _ in range(threads)}
        while True:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            done += sum(future.result() for future in ended)
            took = time.perf_counter() - began
            if took >= seconds:
                return done / took
            running |= {pool.submit(function) for _ in ended}


def arrays(batch: Any) -> list[np.ndarray]:
    """The buffers of values of an Arrow table or batch, as numpy arrays without copies."""
    found = []
    for column in batch.columns:
        for chunk in getattr(column, "chunks", [column]):
            # The last buffer holds the values of all types that are measured.
            inner = chunk.flatten() if hasattr(chunk.type, "list_size") else chunk
            found.append(np.frombuffer(inner.buffers()[-1], np.uint8))
    return found


class Takes:
    """Takes of random rows in runs, sorted, each of about `READ_BYTES`."""

    def __init__(self, path: str, load: Workload, run: int, seed: int) -> None:
        import lance

        self.dataset = lance.dataset(path)
        self.columns = list(load.columns) if load.columns else self.dataset.schema.names
        self.rows = np.arange(self.dataset.count_rows())
        if load.filter is not None:
            kept = self.dataset.to_table(filter=load.filter, columns=["_rowoffset"])
            self.rows = kept["_rowoffset"].to_numpy()
        sample = self.dataset.take(self.rows[:64].tolist(), columns=self.columns)
        self.row_bytes = max(1.0, sum(a.nbytes for a in arrays(sample)) / 64)
        self.run = max(1, run)
        self.count = max(1, min(MOST_ROWS, int(READ_BYTES / self.row_bytes)) // self.run)
        self.starts = np.random.default_rng(seed).permutation(len(self.rows) // self.run)
        self.at = 0

    def __call__(self) -> int:
        """Take, and return how many rows."""
        chosen = self.starts[self.at : self.at + self.count]
        self.at = 0 if self.at + self.count >= len(self.starts) else self.at + self.count
        places = np.sort(chosen)[:, None] * self.run + np.arange(self.run)
        taken = self.dataset.take(self.rows[places.reshape(-1)], columns=self.columns)
        touch(arrays(taken))
        return int(taken.num_rows)


def scan(path: str, load: Workload) -> Callable[[], int]:
    """A scan in order, again and again."""
    import lance

    columns = list(load.columns) if load.columns else None

    def batches() -> Iterator[Any]:
        while True:
            yield from lance.dataset(path).to_batches(columns=columns, filter=load.filter)

    iterator = batches()

    def step() -> int:
        batch = next(iterator)
        touch(arrays(batch))
        return int(batch.num_rows)

    return step


def copied(row_bytes: float) -> Callable[[], int]:
    """Copies from memory to memory."""
    source = np.ones(_COPIED, np.uint8)
    target = np.empty_like(source)

    def step() -> int:
        np.copyto(target, source)
        return int(_COPIED / row_bytes)

    return step


def cached(path: str, stored_row_bytes: float) -> Callable[[], int]:
    """Reads of the table's largest file, which the system has in its cache."""
    file = max(Path(path, "data").iterdir(), key=lambda p: p.stat().st_size)
    buffer = memoryview(bytearray(READ_BYTES))
    position = 0

    def step() -> int:
        nonlocal position
        with file.open("rb", buffering=0) as source:
            source.seek(position)
            read = source.readinto(buffer) or 0
        position = position + read if read else 0
        return int(read / stored_row_bytes)

    return step


def decoded(path: str, load: Workload, seed: int) -> Callable[[], int]:
    """Decodes, and crops if asked for, of files in memory."""
    import lance

    files = lance.dataset(path).take(list(range(64)), columns=["image"])["image"].to_pylist()
    decoder, rng = own_decoder(), np.random.default_rng(seed)

    def step() -> int:
        for data in files:
            pixels = decode(data, decoder)
            touch(crop(pixels, rng) if load.images == "crop" else planes(pixels))
        return len(files)

    return step


def clump_size(path: str, load: Workload) -> int:
    """Rows that our order keeps together by default."""
    from destrier import StreamingDataset

    columns = list(load.columns) if load.columns else None
    dataset = StreamingDataset(path, columns=columns, filter=load.filter)
    return int(dataset.stream(load.batch).identity.clump_size)


def limits(path: str, load: Workload, seconds: float, seed: int) -> dict[str, Any]:
    """Samples a second of each limit, and the settings they were measured with."""
    single, clump = Takes(path, load, 1, seed), clump_size(path, load)
    stored = sum(p.stat().st_size for p in Path(path, "data").iterdir())
    share = single.row_bytes / max(single.row_bytes, stored / single.dataset.count_rows())
    stored_row = stored / single.dataset.count_rows() * (share if load.columns else 1.0)
    threads = len(os.sched_getaffinity(0))
    found = {"lance_take": rate(single, seconds, IN_FLIGHT)}
    if clump > 1:
        found["lance_take_clumps"] = rate(Takes(path, load, clump, seed), seconds, IN_FLIGHT)
    found["lance_scan"] = rate(scan(path, load), seconds)
    found["memcpy"] = rate(copied(single.row_bytes), seconds / 2)
    found["page_cache"] = rate(cached(path, stored_row), seconds / 2)
    if load.decodes:
        found["decode"] = rate(decoded(path, load, seed), seconds, threads)
    return {
        "rates": found,
        "row_bytes": single.row_bytes,
        "clump": clump,
        "rows_a_take": single.count,
        "decoder": own_decoder(),
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report(limits(options.path, WORKLOADS[options.workload], options.seconds, options.seed))


if __name__ == "__main__":
    main()
