"""Views: how fast scattered rows are iterated, and what it takes to choose them.

Of 2 million rows of 8 float32 and a label, and of 40,000 blocks of 2,049 tokens, two epochs are
read at clump 1, in batches of 256: of the whole table, of a scattered fifth of its rows, and of two
and a half times its rows. Each with the default budget, in which all rows are read once and held
(but for two and a half times the tokens), and with 32 MB, in which the rows of the next steps are
read each time. Rates are rows a second, of each epoch, but for the first batch. Then a table of 100
million rows, of which only numbers are made, is split, subsampled and sampled from, with the
seconds it takes and the memory it needs at most. Every run is a fresh process; rounds are
interleaved. Files are in the system's cache.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

from common import fresh, long_table, report, save, spread
from data import dataset

ROUNDS = 5
BATCH = 256
BUDGETS = {"held": 768 << 20, "read": 32 << 20}
SOURCES = ("table", "fifth", "repeated")
TABLES = {"small": 2_000_000, "tokens": 40_000}
CHOICES = ("split", "subsample", "sample")


def epoch_case(path: str, what: str, budget: str) -> None:
    """Two epochs of a table, or of some rows of it."""
    from destrier import StreamingDataLoader, StreamingDataset, subsample

    sources: dict[str, Any] = {"fifth": 0.2, "repeated": 2.5}
    source = subsample(path, sources[what]) if what in sources else path
    stream = StreamingDataset(source, shuffle_clump_size=1)
    rates, firsts = [], []
    with StreamingDataLoader(stream, batch_size=BATCH, prefetch_bytes=BUDGETS[budget]) as loader:
        for _ in range(2):
            began = time.perf_counter()
            iterator = iter(loader)
            next(iterator)
            firsts.append(time.perf_counter() - began)
            for _ in iterator:
                pass
            seconds = time.perf_counter() - began - firsts[-1]
            rates.append((len(loader) - 1) * BATCH / seconds)
    report({"first_epoch": rates[0], "second_epoch": rates[1], "first_batch_s": firsts[0]})


def choice_case(path: str, what: str, _: str) -> None:
    """Rows of a long table, chosen."""
    from destrier import sample, split, subsample

    choices: dict[str, Any] = {
        "split": lambda: split(path, [0.8, 0.1, 0.1]),
        "subsample": lambda: subsample(path, 0.2),
        "sample": lambda: sample(path, 10_000_000, balance="label"),
    }
    began = time.perf_counter()
    choices[what]()
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report({"seconds": seconds, "most_mb": most})


CASES = {"epoch": epoch_case, "choice": choice_case}


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, part = (1, 10) if quick else (ROUNDS, 1)
    runs: dict[str, tuple[str, ...]] = {}
    for table, rows in TABLES.items():
        path = str(dataset(table, "lance", rows // part))
        for budget in BUDGETS:
            for what in SOURCES:
                runs[f"{table} {budget} {what}"] = ("epoch", path, what, budget)
    path = str(long_table(100_000_000 // part))
    runs |= {what: ("choice", path, what, "") for what in CHOICES}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, arguments in runs.items():
            found[name].append(fresh(Path(__file__), *arguments))
            print(f"round {number}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    result = {n: {key: spread([r[key] for r in rs]) for key in rs[0]} for n, rs in found.items()}
    save("views-quick" if quick else "views", result)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CASES:
        CASES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
