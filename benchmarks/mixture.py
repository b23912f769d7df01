"""Mixtures and zips: four sources as one against the same sources alone, and how they start.

Rates are rows a second of endless reading in shuffled batches of 256, after a warm-up in which
every source was read once: of a mixture with weights 4, 3, 2, 1, of each source alone, and of a zip
of all four. The mixture is compared with what its sources would give one after another, each for
its share of the rows; a row of the zip is one of each, so it is compared with all four sources read
once. Small rows (8 float32 and a label) and blocks of 2,049 int32 tokens. Every run is a fresh
process; rounds are interleaved. Files are in the system's cache.

A start is the time from the first line to the first batch of a mixture of four long tables of one
column, at the beginning of an epoch and after a resume at 1, 50 and 99 %, in a process that has
imported the library; the state is counted as JSON. ``--quick`` measures little, and little can be
told from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DATA, report, resident, save, spread, timed
from data import dataset
from formats import interleaved, watch

BATCH = 256
WEIGHTS = (4, 3, 2, 1)


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        small: Rows of numbers in each source.
        tokens: Blocks of tokens in each source.
        long: Rows of each of the long tables.
        seconds: That a reader is watched.
        rounds: Of all cases, interleaved.
    """

    small: tuple[int, ...] = (2_000_000, 1_500_000, 1_000_000, 500_000)
    tokens: tuple[int, ...] = (80_000, 70_000, 60_000, 50_000)
    long: int = 25_000_000
    seconds: float = 5.0
    rounds: int = 5


QUICK = Sizes((200_000, 150_000, 100_000, 50_000), (8_000, 7_000, 6_000, 5_000), 1_000_000, 1.5, 1)


def read_case(kind: str, seconds: str, warm_rows: str, *paths: str) -> None:
    """Watch one table, or several as a mixture or a zip, once so many rows were read."""
    from destrier import Mixture, StreamingDataLoader, StreamingDataset, Zip

    sources = {f"source{i}": StreamingDataset(path) for i, path in enumerate(paths)}
    stream: Any = sources["source0"]
    if kind == "mixture":
        weights = dict(zip(sources, WEIGHTS, strict=True))
        stream = Mixture(sources, weights=weights, stop="all_exhausted")
    elif kind == "zip":
        stream = Zip(sources, stop="longest")
    loader = StreamingDataLoader(stream, batch_size=BATCH)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    def rows(batch: Any) -> int:
        return len(next(iter(batch.values())))

    watch(batches(), rows, float(seconds), warm_rows=int(warm_rows))


def start_case(position: str, *paths: str) -> None:
    from destrier import Mixture, StreamingDataLoader

    before = resident()
    names = [f"source{i}" for i in range(len(paths))]

    def loader() -> StreamingDataLoader:
        weights = dict(zip(names, WEIGHTS, strict=True))
        mixture = Mixture(
            dict(zip(names, paths, strict=True)), weights=weights, stop="all_exhausted"
        )
        return StreamingDataLoader(mixture, batch_size=BATCH)

    state = None
    if float(position):
        with loader() as saved:
            saved.skip(int(float(position) * len(saved)))
            state = saved.state_dict()

    def first() -> tuple[StreamingDataLoader, int]:
        made = loader()
        if state is not None:
            made.load_state_dict(state)
        return made, len(next(iter(made)))

    seconds, (made, _) = timed(first)
    grown, size = resident() - before, len(json.dumps(made.state_dict()))
    made.close()
    report({"seconds": seconds, "memory_mb": grown / 1e6, "state_bytes": size})


def long_tables(rows: int) -> list[str]:
    """Four tables of one column, each with numbers of its own."""
    import lance
    import numpy as np
    import pyarrow as pa

    schema = pa.schema([("id", pa.int64())])
    paths = []
    for i in range(len(WEIGHTS)):
        path = DATA / f"mixture-{i}-{rows}.lance"
        paths.append(str(path))
        if path.exists():
            continue
        pieces = range(i * rows, (i + 1) * rows, 1 << 20)
        batches = (
            pa.record_batch([np.arange(at, min(at + (1 << 20), (i + 1) * rows))], schema=schema)
            for at in pieces
        )
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        lance.write_dataset(reader, str(path), max_rows_per_file=10_000_000)
    return paths


def one_after_another(rates: list[float], weights: tuple[int, ...]) -> float:
    """Rows a second of sources that are read in turn, each for its share of the rows."""
    return sum(weights) / sum(w / rate for w, rate in zip(weights, rates, strict=True))


def rates(script: Path, table: str, sizes: tuple[int, ...], size: Sizes) -> dict[str, Any]:
    """Rates of a table's sources, alone and together, and their ratios by round."""
    paths = [str(dataset(table, "lance", rows)) for rows in sizes]
    seconds = str(size.seconds)
    once = {"zip": max(sizes)}
    once["mixture"] = max(n * sum(WEIGHTS) // w for n, w in zip(sizes, WEIGHTS, strict=True))
    alone = {
        f"source {i}": ("alone", seconds, str(rows), path)
        for i, (rows, path) in enumerate(zip(sizes, paths, strict=True))
    }
    both = {kind: (kind, seconds, str(once[kind]), *paths) for kind in ("mixture", "zip")}
    runs = {name: (sys.executable, "read", *run) for name, run in {**both, **alone}.items()}
    results = interleaved(script, runs, size.rounds)
    found = {name: [r["rows_per_second"] for r in rs] for name, rs in results.items()}
    ratios: dict[str, list[float]] = {"mixture": [], "zip": []}
    for i in range(size.rounds):
        each = [found[name][i] for name in alone]
        ratios["mixture"].append(found["mixture"][i] / one_after_another(each, WEIGHTS))
        # A row of the zip takes one of each, so it is as slow as all of them.
        ratios["zip"].append(found["zip"][i] * sum(1 / rate for rate in each))
    return {
        "rows": sizes,
        "rows_per_second": {name: spread(values) for name, values in found.items()},
        "to sources alone": {name: spread(values) for name, values in ratios.items()},
    }


def main() -> None:
    size, ending = (QUICK, "-quick") if "--quick" in sys.argv else (Sizes(), "")
    script = Path(__file__)
    streams = {
        table: rates(script, table, sizes, size)
        for table, sizes in (("small", size.small), ("tokens", size.tokens))
    }
    paths = long_tables(size.long)
    names = {"first batch": "0", **{f"resume at {p} %": str(p / 100) for p in (1, 50, 99)}}
    runs = {name: (sys.executable, "start", at, *paths) for name, at in names.items()}
    starts = interleaved(script, runs, size.rounds)
    late = zip(starts["resume at 1 %"], starts["resume at 99 %"], strict=True)
    save(
        f"mixture{ending}",
        {
            "weights": WEIGHTS,
            "streams": streams,
            "long_rows": size.long,
            "starts": {
                name: {key: spread([r[key] for r in rs]) for key in rs[0]}
                for name, rs in starts.items()
            },
            "resume_99_to_1": spread([b["seconds"] / a["seconds"] for a, b in late]),
        },
    )


CASES = {"read": read_case, "start": start_case}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        CASES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
