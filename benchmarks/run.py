"""Runs the benchmarks and leaves their results in ``benchmarks/out``.

``--quick`` runs every script that compares with others on little data, once, to see that they work;
little can be told from its figures. Without it all of them run in full, which takes an hour, and
the page and the plots in ``docs`` are written from what they found.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
QUICK = (("throughput", "--quick"), ("links", "--quick"), ("ingest", "--quick"))
FULL = tuple(
    (name,)
    for name in (
        "data",
        "throughput",
        "scale",
        "steady",
        "links",
        "views",
        "mixture",
        "packing",
        "decode",
        "storage",
        "cache",
        "ingest",
    )
)


def main() -> None:
    quick = "--quick" in sys.argv
    for name, *options in QUICK if quick else FULL:
        subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], check=True)
    if quick:
        print("quick: tables of a tenth and one round; little can be told from these figures")
        return
    for name in ("plot", "page"):
        subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True)


if __name__ == "__main__":
    main()
