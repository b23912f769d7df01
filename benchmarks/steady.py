"""Memory over 10,000 batches, memory while the consumer sleeps, and the gap between epochs.

2 million rows of 8 float32 and a label, batches of 1,024 (64 for the gap), one process.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from common import fresh, report, resident, save, spread
from data import dataset

ROUNDS = 5
BATCHES = 10_000
SLEEP = 5.0


def memory(path: str) -> None:
    from destrier import StreamingDataLoader

    done = 0
    marks = []
    with StreamingDataLoader(path, batch_size=1024) as loader:
        while done < BATCHES:
            for _ in loader:
                done += 1
                if done % 1000 == 0:
                    marks.append(resident() / 1e6)
                if done == BATCHES:
                    break
    report({"first_mb": marks[1], "last_mb": marks[-1], "most_mb": max(marks[1:])})


def sleeper(path: str) -> None:
    from destrier import StreamingDataLoader

    budget = 64 << 20
    before = resident()
    with StreamingDataLoader(path, batch_size=1024, prefetch_bytes=budget) as loader:
        iterator = iter(loader)
        for _ in range(50):
            next(iterator)
        soon = resident() - before
        time.sleep(SLEEP)
        later = resident() - before
    report({"budget_mb": budget / 1e6, "soon_mb": soon / 1e6, "later_mb": later / 1e6})


def gap(path: str) -> None:
    """Gaps and batch times of a consumer that works 2 ms on each batch."""
    from destrier import StreamingDataLoader, StreamingDataset

    gaps, times = [], []
    dataset = StreamingDataset(path, filter="f0 < 0.02")
    with StreamingDataLoader(dataset, batch_size=64) as loader:
        for epoch in range(4):
            began = time.perf_counter()
            for i, _ in enumerate(loader):
                took = time.perf_counter() - began
                if i == 0 and epoch:
                    gaps.append(took)
                elif i:
                    times.append(took)
                time.sleep(0.002)
                if i:
                    times[-1] += 0.002
                began = time.perf_counter()
    report({"gap_to_batch": max(gaps) / statistics.median(times), "gap_ms": max(gaps) * 1e3})


CASES = {"memory": memory, "sleeper": sleeper, "gap": gap}


def main() -> None:
    path = str(dataset("small", "lance", 2_000_000))
    runs = {
        name: [fresh(Path(__file__), name, path) for _ in range(1 if name == "memory" else ROUNDS)]
        for name in CASES
    }
    save(
        "steady",
        {n: {key: spread([r[key] for r in rs]) for key in rs[0]} for n, rs in runs.items()},
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        CASES[sys.argv[1]](sys.argv[2])
    else:
        main()
