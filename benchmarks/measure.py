"""One measurement in a process of its own: a loader on a workload, for some seconds.

Prints JSON: samples a second after a warm-up, CPU seconds a sample, the time to the first batch,
memory, and what the shuffle is made of. Processes that the loader starts are counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import report
from loaders import LOADERS, Case, build, touch
from quality import counts
from workloads import WORKLOADS

_TICK = os.sysconf("SC_CLK_TCK")
_WARM_UP = 0.25  # of the seconds


def tree() -> list[int]:
    """This process and all below it."""
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            left += map(int, _read(task).split())
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def cpu_seconds(pids: list[int]) -> float:
    """What the processes, and their children that have ended, have used."""
    ticks = 0
    for pid in pids:
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICK


def _kilobytes(pid: int, file: str, key: str) -> int:
    for line in _read(Path(f"/proc/{pid}/{file}")).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def memory(pids: list[int]) -> dict[str, float]:
    """Shares of pages now (PSS), and the sum of each process's most resident pages, in MB."""
    return {
        "pss_mb": sum(_kilobytes(pid, "smaps_rollup", "Pss") for pid in pids) / 1e3,
        "peak_rss_mb": sum(_kilobytes(pid, "status", "VmHWM") for pid in pids) / 1e3,
    }


def measure(workload: str, case: Case, path: str, rows: int, seconds: float, seed: int) -> None:
    """Measure, and print what was found."""
    load = WORKLOADS[workload]
    make = build(workload, case, path, seed)
    before = sum(_kilobytes(pid, "smaps_rollup", "Pss") for pid in tree()) / 1e3
    began = time.perf_counter()
    batches = make()
    delivered: list[np.ndarray] = []
    _take(batches, delivered)
    first = time.perf_counter() - began
    ahead = min(LOADERS[case.loader].ahead(load), rows // 2)
    _run(batches, delivered, seconds * _WARM_UP, least=ahead)
    pids = tree()
    early = memory(pids)["pss_mb"]
    cpu, began, done = cpu_seconds(pids), time.perf_counter(), len(delivered)
    _run(batches, delivered, seconds)
    took = time.perf_counter() - began
    pids = tree()
    cpu = cpu_seconds(pids) - cpu
    late = memory(pids)
    samples = sum(map(len, delivered[done:]))
    if not samples:
        raise SystemExit(f"the epoch of {rows:,} rows ended before the measurement began")
    labels = np.concatenate(delivered).astype(np.int64)
    report(
        {
            "samples_per_second": samples / took,
            "cpu_seconds_per_sample": cpu / samples,
            "first_batch": first,
            "pss_mb": max(early, late["pss_mb"]),
            "pss_beyond_imports_mb": max(early, late["pss_mb"]) - before,
            "peak_rss_mb": late["peak_rss_mb"],
            "samples": samples,
            "quality": counts(labels, load.batch, rows),
        }
    )


def _take(batches: Iterator[tuple[np.ndarray, object]], delivered: list[np.ndarray]) -> bool:
    """Take a batch, read it, and note its labels; False if there is none."""
    item = next(batches, None)
    if item is None:
        return False
    labels, payload = item
    touch(payload)
    delivered.append(np.array(labels))
    return True


def _run(
    batches: Iterator[tuple[np.ndarray, object]],
    delivered: list[np.ndarray],
    seconds: float,
    least: int = 0,
) -> None:
    """Take batches for some seconds, and at least so many rows."""
    until, before = time.perf_counter() + seconds, len(delivered)
    while _take(batches, delivered) and (
        time.perf_counter() < until or sum(map(len, delivered[before:])) < least
    ):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--loader", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--rows", type=int, required=True, help="of the table")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--decoder", default="ours")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    case = Case(options.loader, options.workers, options.decoder)
    measure(options.workload, case, options.path, options.rows, options.seconds, options.seed)
    sys.stdout.flush()
    for pid in tree()[1:]:  # workers in the middle of an epoch, who would disturb the next case
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
