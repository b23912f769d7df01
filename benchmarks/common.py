"""What the benchmark scripts share: data from a seed, runs in fresh processes, results as JSON."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"
OUT = HERE / "out"
PEERS = HERE.parent / ".venv-peers"


def machine() -> dict[str, Any]:
    """The machine's size and the versions that were measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("destrier", "pylance", "lancedb", "torch", "numpy", "pyarrow")
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in names},
    }


def fresh(
    script: Path, *arguments: str, python: str = sys.executable, limit: float | None = None
) -> dict[str, Any]:
    """Run a script in a fresh process; its last line is its result as JSON.

    Raises:
        SystemExit: If it fails.
        TimeoutExpired: If it takes more seconds than the limit; it and what it started is ended.
    """
    process = subprocess.Popen(
        [python, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        raise SystemExit(f"{script.name} {' '.join(arguments)} failed:\n{err[-3000:]}")
    value: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return value


def report(result: dict[str, Any]) -> None:
    """Print a result for `fresh`."""
    print(json.dumps(result))


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result with the machine it was measured on, and print it."""
    OUT.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), **result}, indent=2)
    (OUT / f"{name}.json").write_text(text + "\n")
    print(text)


def resident() -> int:
    """Bytes of memory that the process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(function: Any) -> tuple[float, Any]:
    """Seconds that a call takes, and its value."""
    began = time.perf_counter()
    value = function()
    return time.perf_counter() - began, value


def long_table(rows: int) -> Path:
    """A table of an id and a label, written in pieces."""
    path = DATA / f"long-{rows}.lance"
    if not path.exists():
        import lance
        import numpy as np
        import pyarrow as pa

        rng = np.random.default_rng(0)
        schema = pa.schema([("id", pa.int64()), ("label", pa.int32())])

        def batches() -> Any:
            for start in range(0, rows, 1 << 20):
                count = min(1 << 20, rows - start)
                ids = pa.array(np.arange(start, start + count))
                labels = pa.array(rng.integers(0, 100, count).astype(np.int32))
                yield pa.record_batch([ids, labels], schema=schema)

        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, batches()),
            str(path),
            max_rows_per_file=10_000_000,
        )
    return path
