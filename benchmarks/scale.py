"""Start, memory, state and resume against the number of rows; and a permutation written down.

Run without arguments. Each case runs in a fresh process, several rounds, cases interleaved.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from common import DATA, fresh, long_table, report, resident, save, spread, timed

ROUNDS = 5
LIMIT = 100_000_000


def case(path: str, name: str) -> None:
    import destrier

    before = resident()
    filter = "label < 50" if name.startswith("filter") else None

    def first(position: float = 0.0):  # type: ignore[no-untyped-def]
        dataset = destrier.StreamingDataset(path, filter=filter)
        loader = destrier.StreamingDataLoader(dataset, batch_size=256)
        if position:
            loader.skip(int(position * len(loader)))
        return loader, next(iter(loader))

    if name.startswith("resume"):
        warm, _ = first()
        warm.close()
        seconds, (loader, _) = timed(lambda: first(float(name.split("-")[1])))
    else:
        seconds, (loader, _) = timed(first)
    grown = resident() - before
    state = len(json.dumps(loader.state_dict()))
    loader.close()
    report({"seconds": seconds, "memory_mb": grown / 1e6, "state_bytes": state})


def permutation(path: str) -> None:
    import destrier

    before = resident()
    folder = tempfile.mkdtemp(dir=DATA)
    dataset = destrier.StreamingDataset(path)
    seconds, _ = timed(lambda: dataset.permutation(0).save(os.path.join(folder, "order.lance")))
    shutil.rmtree(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report({"seconds": seconds, "memory_mb": (peak - before) / 1e6})


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else LIMIT
    path = str(long_table(rows))
    shorter = {f"rows-{part}": str(long_table(rows // part)) for part in (1000, 100, 10)}
    filters, resumes = (
        ["filter-built", "filter-cached"],
        ["resume-0.01", "resume-0.5", "resume-0.99"],
    )
    cases = [*shorter, "plain", *filters, *resumes]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    script = Path(__file__)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DESTRIER_CACHE"] = cache
        for _ in range(ROUNDS):
            shutil.rmtree(cache)
            os.mkdir(cache)
            for name in cases:
                results[name].append(fresh(script, "case", shorter.get(name, path), name))
    out = {
        name: {key: spread([r[key] for r in runs]) for key in runs[0]}
        for name, runs in results.items()
    }
    ratios = [
        b["seconds"] / a["seconds"]
        for a, b in zip(results["resume-0.01"], results["resume-0.99"], strict=True)
    ]
    written = fresh(script, "permutation", path)
    save(
        "scale",
        {"rows": rows, "cases": out, "resume_99_to_1": spread(ratios), "permutation": written},
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(sys.argv[2], sys.argv[3])
    elif sys.argv[1:2] == ["permutation"]:
        permutation(sys.argv[2])
    else:
        main()
