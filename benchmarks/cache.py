"""The second epoch from the cache beside one from the table on the same disk, in turns.

    python benchmarks/cache.py [--rounds N]

From the cache nothing is asked of the table's store, so its rate is that for any store.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from common import DATA, save, spread, timed
from data import dataset

from destrier import StreamingDataLoader, StreamingDataset

CACHE = DATA / "cache"


def _table(name: str, make: Any) -> str:
    path = DATA / f"{name}.lance"
    if not path.exists():
        lance.write_dataset(make(np.random.default_rng(0)), str(path))
    return str(path)


def _tokens(rng: Any) -> pa.Table:
    values = pa.array(rng.integers(0, 50_000, 20_000 * 2049).astype(np.int32))
    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, 2049)})


def _images(rng: Any) -> pa.Table:
    sizes = rng.integers(20_000, 30_000, 10_000)
    return pa.table({"image": pa.array([rng.bytes(int(size)) for size in sizes], pa.binary())})


def _epoch(uri: str, size: int, folder: Path | None, options: dict[str, Any]) -> float:
    """Rows a second, of a loader whose reading ahead ends with its epoch."""
    dataset = StreamingDataset(uri, cache_dir=folder, **options)
    with StreamingDataLoader(dataset, batch_size=size, decode={}) as loader:
        seconds, rows = timed(lambda: sum(_rows(batch) for batch in loader))
    return float(rows / seconds)


def _rows(batch: Any) -> int:
    return len(next(iter(batch.values())))


def main() -> None:
    """Measure every workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    small = str(dataset("small", "lance", 2_000_000))
    jpeg = str(dataset("jpeg", "lance", 20_000))
    tokens, images = _table("cache-tokens", _tokens), _table("cache-images", _images)
    workloads: dict[str, tuple[str, int, dict[str, Any]]] = {
        "small rows, clump 1": (small, 1024, {"shuffle_clump_size": 1}),
        "small rows": (small, 1024, {}),
        "tokens, clump 1": (tokens, 64, {"shuffle_clump_size": 1}),
        "tokens": (tokens, 64, {}),
        "images, clump 1": (images, 64, {"shuffle_clump_size": 1}),
        "images": (images, 64, {}),
        "JPEG bytes": (jpeg, 256, {}),
    }
    results = {}
    for name, (uri, batch, options) in workloads.items():
        shutil.rmtree(CACHE, ignore_errors=True)
        folders = {"table": None, "cache": CACHE}
        first: dict[str, float] = {}
        rates: dict[str, list[float]] = {kind: [] for kind in folders}
        for kind, folder in folders.items():
            first[kind] = _epoch(uri, batch, folder, options)
        for _ in range(rounds):
            for kind, folder in folders.items():
                rates[kind].append(_epoch(uri, batch, folder, options))
        ratios = [c / t for c, t in zip(rates["cache"], rates["table"], strict=True)]
        results[name] = {
            "rows_per_second": {kind: spread(values) for kind, values in rates.items()},
            "cache_to_table": spread(ratios),
            "first_epoch": first,
        }
    shutil.rmtree(CACHE, ignore_errors=True)
    save("cache", {"rounds": rounds, "workloads": results})


if __name__ == "__main__":
    main()
