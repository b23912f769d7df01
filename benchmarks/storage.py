"""How to store images: plain binary columns and blobs, in formats 2.0 and 2.2.

JPEGs of about 25 kB and of about 200 kB, read through the loader without being decoded, from local
disk in a warm page cache, in the default order and with clumps of one row. Each run is a process of
its own, and every round runs all of them.

    python benchmarks/storage.py [quick]
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from common import DATA, fresh, report, save, spread
from pictures import batches, jpegs

ROUNDS, QUICK_ROUNDS = 7, 5
SIZES = {"25 kB": (256, 85, 16_000), "200 kB": (768, 83, 3_000)}  # side, quality, rows
QUICK_PART = 2
LAYOUTS = ("binary 2.0", "binary 2.2", "blob v1", "blob v2")
ORDERS = ("defaults", "clump 1")
BATCH = 128


def field_of(layout: str) -> Any:
    import lance
    import pyarrow as pa

    if layout == "blob v2":
        return lance.blob_field("image")
    metadata = {"lance-encoding:blob": "true"} if layout == "blob v1" else None
    return pa.field("image", pa.large_binary(), metadata=metadata)


def made(layout: str, size: str, part: int) -> Path:
    """The table, written on the first call."""
    side, quality, rows = SIZES[size]
    path = DATA / f"stored-{layout}-{size}-{rows // part}.lance".replace(" ", "-")
    if not path.exists():
        import lance

        reader = batches(jpegs(side, quality, 500), rows // part, field_of(layout))
        batch = next(reader)
        version = "2.2" if layout in ("binary 2.2", "blob v2") else "2.0"
        writing = path.with_suffix(".part")
        shutil.rmtree(writing, ignore_errors=True)

        def every() -> Any:
            yield batch
            yield from reader

        lance.write_dataset(
            every(), str(writing), schema=batch.schema, data_storage_version=version
        )
        writing.rename(path)
    return path


def measure(path: str, order: str) -> None:
    from destrier import StreamingDataLoader, StreamingDataset

    clump = 1 if order == "clump 1" else None

    def epoch() -> tuple[int, int]:
        dataset = StreamingDataset(path, columns=["image"], shuffle_clump_size=clump)
        rows = size = 0
        with StreamingDataLoader(dataset, batch_size=BATCH, decode={}) as loader:
            for batch in loader:
                rows += len(batch["image"])
                size += sum(map(len, batch["image"]))
        return rows, size

    _measured(epoch)


def _measured(epoch: Callable[[], tuple[int, int]]) -> None:
    epoch()  # the page cache, and what is loaded once
    began, cpu = time.perf_counter(), time.process_time()
    rows, size = epoch()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    report(
        {"samples_per_s": rows / took, "cpu_us": cpu / rows * 1e6, "mb_per_s": size / took / 1e6}
    )


def main(*, quick: bool) -> None:
    part = QUICK_PART if quick else 1
    paths = {key: str(made(*key, part)) for key in product(LAYOUTS, SIZES)}
    runs: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for size, order, layout in product(SIZES, ORDERS, LAYOUTS):
            result = fresh(Path(__file__), paths[layout, size], order)
            runs.setdefault((size, order, layout), []).append(result)
    out: dict[str, Any] = {}
    for (size, order, layout), found in runs.items():
        numbers = {key: spread([run[key] for run in found]) for key in found[0]}
        base = runs[size, order, "binary 2.2"]
        ratios = [
            mine["samples_per_s"] / one["samples_per_s"]
            for mine, one in zip(found, base, strict=True)
        ]
        out[f"{size}, {order}, {layout}"] = {**numbers, "to_binary_2.2": spread(ratios)}
    save("storage", out)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(*sys.argv[1:])
    else:
        main(quick="quick" in sys.argv)
