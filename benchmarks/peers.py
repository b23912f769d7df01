"""Small rows against the peers: time to the first sample, and rows a second.

2 million rows of 8 float32 and a label, batches of 1,024, one process, local disk, warm. Every
peer runs in a fresh process, in interleaved rounds; LitData in an environment of its own, made on
demand. Settings: LanceDB with num_splits=64 and read_batch_size=1024, which is faster than its
default of 64; LitData with chunks of 64 MB, shuffled, batches by its own loader; each peer with 0
and 2 workers, of which the better counts. Three rounds, because LanceDB plans for a minute.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from common import DATA, PEERS, fresh, report, save, small_rows, spread

ROUNDS = 3
ROWS = 2_000_000
BATCH = 1024
SECONDS = 8.0
LITDATA = ["litdata==0.2.76"]
LITDATA_NEEDS = ["numpy", "filelock", "requests", "boto3", "fsspec", "lightning-utilities",
                 "packaging", "pyarrow", "polars", "tifffile"]  # fmt: skip


def measure(make):  # type: ignore[no-untyped-def]
    """Time to the first batch, then rows a second for some seconds or one epoch."""
    began = time.perf_counter()
    iterator = iter(make())
    next(iterator)
    first = time.perf_counter() - began
    began, rows = time.perf_counter(), 0
    for _ in iterator:
        rows += BATCH
        if time.perf_counter() - began > SECONDS:
            break
    report({"first": first, "rows_per_second": rows / (time.perf_counter() - began)})


def destrier_case(path: str, variant: str) -> None:
    from destrier import StreamingDataLoader, StreamingDataset

    clump = 1 if variant == "clump1" else None
    measure(
        lambda: StreamingDataLoader(
            StreamingDataset(path, shuffle_clump_size=clump), batch_size=BATCH
        )
    )


def destrier_first(path: str) -> None:
    """The first sample in row mode with 64 splits, as LanceDB's loader is asked for it."""
    from destrier.dataset import StreamingDataset

    began = time.perf_counter()
    next(iter(StreamingDataset(path, num_splits=64)))
    report({"first": time.perf_counter() - began})


def lancedb_case(path: str, variant: str) -> None:
    import lancedb
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    table = lancedb.connect(str(Path(path).parent)).open_table(Path(path).stem)
    workers = int(variant)

    def make():  # type: ignore[no-untyped-def]
        dataset = StreamingDataset(table, num_splits=64, read_batch_size=1024)
        return StreamingDataLoader(
            dataset,
            batch_size=BATCH,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
        )

    measure(make)


def lancedb_first(path: str) -> None:
    import lancedb
    from lancedb.streaming import StreamingDataset

    table = lancedb.connect(str(Path(path).parent)).open_table(Path(path).stem)
    began = time.perf_counter()
    next(iter(StreamingDataset(table, num_splits=64)))
    report({"first": time.perf_counter() - began})


def litdata_write(_: str, out: str) -> None:
    """Write the same rows as LitData chunks (runs in the peers' environment)."""
    import numpy as np
    from litdata.streaming import Cache

    rng = np.random.default_rng(0)
    columns = [rng.random(ROWS, dtype=np.float32) for _ in range(8)]
    labels = rng.integers(0, 100, ROWS).tolist()
    values = np.stack(columns, axis=1)
    cache = Cache(out, chunk_bytes="64MB")
    for i in range(ROWS):
        cache[i] = {"values": values[i], "label": labels[i]}
    cache.done()
    cache.merge()
    report({})


def litdata_case(path: str, variant: str) -> None:
    from litdata import StreamingDataLoader, StreamingDataset

    measure(
        lambda: StreamingDataLoader(
            StreamingDataset(path, shuffle=True, drop_last=True),
            batch_size=BATCH,
            num_workers=int(variant),
        )
    )


def peers_python() -> str:
    """The interpreter of the peers' environment, made if it is not there."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    if subprocess.run([str(python), "-c", "import litdata"], check=False).returncode:
        constraints = str(Path(__file__).parent.parent / "constraints.txt")
        subprocess.run([*pip, "-c", constraints, "torch", *LITDATA_NEEDS], check=True)
        subprocess.run([*pip, "--no-deps", *LITDATA], check=True)
    return str(python)


def main() -> None:
    script = Path(__file__)
    path = str(small_rows(ROWS))
    peers = peers_python()
    chunks = DATA / f"small-{ROWS}-litdata"
    if not (chunks / "index.json").exists():
        fresh(script, "litdata-write", path, str(chunks), python=peers)
    runs = {
        "destrier": ("destrier", path, "defaults", sys.executable),
        "destrier, clump 1": ("destrier", path, "clump1", sys.executable),
        "lancedb, 0 workers": ("lancedb", path, "0", sys.executable),
        "lancedb, 2 workers": ("lancedb", path, "2", sys.executable),
        "litdata, 0 workers": ("litdata", str(chunks), "0", peers),
        "litdata, 2 workers": ("litdata", str(chunks), "2", peers),
        "first sample, destrier": ("destrier-first", path, "", sys.executable),
        "first sample, lancedb": ("lancedb-first", path, "", sys.executable),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (kind, data, variant, python) in runs.items():
            rounds[name].append(fresh(script, kind, data, variant, python=python))

    def best(prefix: str, i: int) -> float:
        return max(r[i]["rows_per_second"] for n, r in rounds.items() if n.startswith(prefix))

    ratios = {
        f"destrier to {peer}": spread([best("destrier", i) / best(peer, i) for i in range(ROUNDS)])
        for peer in ("lancedb", "litdata")
    }
    first = [
        b["first"] / a["first"]
        for a, b in zip(
            rounds["first sample, destrier"], rounds["first sample, lancedb"], strict=True
        )
    ]
    out = {
        n: {key: spread([r[key] for r in runs]) for key in runs[0]} for n, runs in rounds.items()
    }
    save(
        "peers", {"runs": out, "ratios": ratios, "first_sample_lancedb_to_destrier": spread(first)}
    )


CASES = {
    "destrier": destrier_case,
    "destrier-first": lambda path, _: destrier_first(path),
    "lancedb": lancedb_case,
    "lancedb-first": lambda path, _: lancedb_first(path),
    "litdata": litdata_case,
    "litdata-write": litdata_write,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        CASES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
