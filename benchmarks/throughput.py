"""Runs every loader on every workload, in interleaved rounds of fresh processes.

    python benchmarks/throughput.py [--quick] [--workload W ...] [--loader L ...]

In the first round each loader runs at every setting (0 and 2 workers, its decoder and ours); in the
others at its better number of workers, with either decoder. What plans for a minute
(LanceDB on a million rows) runs in the first round only. Ratios are taken round by round: the speed
of a machine drifts, and every process of a round meets it alike. Results of earlier runs for other
workloads stay in ``out/throughput.json``, so that one workload can be measured by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from common import HERE, OUT, fresh, machine, spread
from data import dataset
from formats import peers_python
from loaders import LOADERS, Case, cases
from quality import quality
from workloads import TABLES, WORKLOADS, Workload

ROUNDS = 5
SECONDS = 2.0
LIMIT = 180.0
EVEN = 1.1  # the deff up to which a shuffle counts as even
_PLANS_LONG = 1_000_000
_PEERS = ("litdata", "mosaicml-streaming", "webdataset", "torch", "numpy", "pillow", "simplejpeg")


def compared(
    load: Workload, names: list[str], rounds: int, seconds: float, *, quick: bool
) -> dict[str, Any]:
    """All results of a workload."""
    table = TABLES[load.table]
    rows = table.quick if quick else table.rows
    chosen = [case for case in cases(load) if case.loader in names]
    formats = {LOADERS[case.loader].format for case in chosen} | {"lance"}
    paths = {format: str(dataset(load.table, format, rows)) for format in sorted(formats)}
    python = {True: peers_python() if formats - {"lance"} else "", False: sys.executable}
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in chosen}
    bounds: list[dict[str, Any]] = []
    for number in range(rounds):
        bounds.append(limit_run(load, paths["lance"], seconds, number))
        show(number, load, "limits", bounds[-1]["rates"])
        for case in chosen:
            if number and not goes_on(case, load, runs, rows):
                continue
            result = run(
                load, case, paths[LOADERS[case.loader].format], rows, seconds, number, python
            )
            result["round"] = number
            runs[case].append(result)
            show(number, load, case.shown(load), result)
    return {
        "rows": rows,
        "rounds": rounds,
        "seconds": seconds,
        "limits": bounds,
        "cases": {
            case.shown(load): {"loader": case.loader, "workers": case.workers, "runs": found}
            for case, found in runs.items()
        },
    }


def run(
    load: Workload,
    case: Case,
    path: str,
    rows: int,
    seconds: float,
    seed: int,
    python: dict[bool, str],
) -> dict[str, Any]:
    """One measurement; one that fails or takes too long says so in its result."""
    options = {
        "--workload": load.name,
        "--loader": case.loader,
        "--path": path,
        "--rows": rows,
        "--workers": case.workers,
        "--decoder": case.decoder,
        "--seconds": seconds,
        "--seed": seed,
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    peer = LOADERS[case.loader].peer
    try:
        return fresh(HERE / "measure.py", *arguments, python=python[peer], limit=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result in {LIMIT:.0f} s"}
    except SystemExit as error:
        return {"failed": str(error)[-2000:]}


def limit_run(load: Workload, path: str, seconds: float, seed: int) -> dict[str, Any]:
    arguments = ("--workload", load.name, "--path", path, "--seconds", str(seconds / 2))
    return fresh(HERE / "limits.py", *arguments, "--seed", str(seed), limit=LIMIT)


def goes_on(case: Case, load: Workload, runs: dict[Case, list[dict[str, Any]]], rows: int) -> bool:
    """Whether a case is measured after the first round."""
    first = runs[case][0]
    if "failed" in first or (case.loader == "lancedb" and rows >= _PLANS_LONG):
        return False
    if case.decoder == "pillow" and load.images == "crop":
        return False  # decoding decides it, and is measured in both ways by another workload
    others = [
        found[0].get("samples_per_second", 0.0)
        for other, found in runs.items()
        if (other.loader, other.decoder) == (case.loader, case.decoder) and found
    ]
    return bool(first["samples_per_second"] >= max(others))


def show(number: int, load: Workload, name: str, result: dict[str, Any]) -> None:
    values = {k: f"{v:,.3g}" for k, v in result.items() if isinstance(v, float)}
    text = result.get("failed", " ".join(f"{k}={v}" for k, v in values.items()))
    print(f"round {number}: {load.name}: {name}: {text}", file=sys.stderr, flush=True)


# ---- what it comes to -------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Medians, spread and shuffle quality of each case, and ratios taken round by round."""
    table = {}
    for name, case in result["cases"].items():
        good = [run for run in case["runs"] if "failed" not in run]
        if not good:
            table[name] = {"failed": case["runs"][0]["failed"] if case["runs"] else "not run"}
            continue
        figures = ("samples_per_second", "cpu_seconds_per_sample", "first_batch", "pss_mb")
        table[name] = {
            **{key: spread([run[key] for run in good]) for key in figures},
            "quality": quality([run["quality"] for run in good]),
            "rounds": len(good),
        }
        table[name]["even"] = _is_even(table[name]["quality"])
    return {"cases": table, "ratios": ratios(result, table)}


def ratios(result: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Our rate to the best peer's, to Lance's reads and to the machine's limits."""
    ours = {n: c for n, c in result["cases"].items() if LOADERS[c["loader"]].ours}
    peers = {n: c for n, c in result["cases"].items() if n not in ours}
    even = {n: c for n, c in peers.items() if table[n].get("even")}
    found: dict[str, Any] = {}
    for name, case in ours.items():
        against: dict[str, list[float]] = {}
        for run in case["runs"]:
            if "failed" in run:
                continue
            rate, number = run["samples_per_second"], run["round"]
            best = {
                "the best peer": _best(peers, number),
                f"the best peer with deff up to {EVEN}": _best(even, number),
                **{
                    f"the best of {LOADERS[loader].title}": _best(
                        {n: c for n, c in peers.items() if c["loader"] == loader}, number
                    )
                    for loader in dict.fromkeys(c["loader"] for c in peers.values())
                },
                **{f"limit {key}": v for key, v in result["limits"][number]["rates"].items()},
            }
            for other, value in best.items():
                if value:
                    against.setdefault(other, []).append(rate / value)
        found[name] = {other: spread(values) for other, values in against.items()}
    return found


def _is_even(measured: dict[str, Any]) -> bool:
    """Whether a shuffle is; few batches say so only roughly: allow what chance does."""
    deff, count = measured["deff_1"], measured["deff_1_count"]
    return deff is not None and deff <= EVEN + 2 * (2 / count) ** 0.5


def _best(found: dict[str, Any], number: int) -> float:
    """The best rate of a round. Of a loader that ran in the first round only, that one counts."""
    loaders: dict[str, list[dict[str, Any]]] = {}
    for case in found.values():
        good = [run for run in case["runs"] if "failed" not in run]
        loaders.setdefault(case["loader"], []).extend(good)
    best = 0.0
    for runs in loaders.values():
        rates = [r["samples_per_second"] for r in runs if r["round"] == number]
        if {r["round"] for r in runs} == {0}:
            rates = [r["samples_per_second"] for r in runs]
        best = max(best, *rates, 0.0)
    return best


def peer_versions() -> dict[str, str]:
    """What the peers' environment has."""
    code = (
        "import json\nfrom importlib import metadata\nout = {}\n"
        f"for name in {_PEERS!r}:\n"
        "    try:\n        out[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError:\n        pass\n"
        "print(json.dumps(out))"
    )
    result = subprocess.run([peers_python(), "-c", code], capture_output=True, check=True)
    versions: dict[str, str] = json.loads(result.stdout)
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--loader", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, quick: 1")
    parser.add_argument("--seconds", type=float, help=f"of each run; default: {SECONDS}, quick: 1")
    parser.add_argument("--quick", action="store_true", help="little: little can be told from it")
    parser.add_argument("--out", type=Path, help="the result, as JSON")
    options = parser.parse_args()
    quick = options.quick
    path = options.out or OUT / f"throughput{'-quick' if quick else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text())["workloads"] if path.exists() else {}
    for name in options.workload:
        began = time.perf_counter()
        result = compared(
            WORKLOADS[name],
            options.loader,
            options.rounds or (1 if quick else ROUNDS),
            options.seconds or (1.0 if quick else SECONDS),
            quick=quick,
        )
        found[name] = {
            "machine": described(),
            **result,
            "summary": summary(result),
            "took": time.perf_counter() - began,
        }
        # Written after each workload: a run that is stopped keeps what it has.
        path.write_text(json.dumps({"quick": quick, "workloads": found}, indent=1) + "\n")
    print(path)


def described() -> dict[str, Any]:
    """The machine with the versions of both environments."""
    value = machine()
    for name in ("pillow", "simplejpeg"):
        try:
            value["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            value["versions"][name] = "none"
    return {**value, "peers": peer_versions()}


if __name__ == "__main__":
    main()
