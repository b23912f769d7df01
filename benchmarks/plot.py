"""Draws ``docs/images/benchmarks.svg`` and ``.png`` from the results of throughput.py.

One panel for each workload; a bar for each loader at its best setting, with its rate and, because
a poor shuffle is cheap, the deff of its batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import HERE, OUT
from loaders import LOADERS
from workloads import WORKLOADS

FOLDER = HERE.parent / "docs" / "images"
_OURS, _EVEN, _UNEVEN, _INK = "#1f5fa8", "#8a97a6", "#d9a441", "#222222"
_EVEN_DEFF = 1.5
_COLUMNS = 2


def bars(result: dict[str, Any]) -> list[tuple[str, float, float | None, bool]]:
    """Of each loader its best setting: name, median rate, deff and whether it is ours."""
    best: dict[str, tuple[str, float, float | None, bool]] = {}
    for name, row in result["summary"]["cases"].items():
        if "failed" in row:
            continue
        loader = result["cases"][name]["loader"]
        rate = row["samples_per_second"]["median"]
        if loader not in best or rate > best[loader][1]:
            known = LOADERS[loader]
            best[loader] = (known.title, rate, row["quality"]["deff_1"], known.ours)
    return sorted(best.values(), key=lambda bar: bar[1])


def draw(results: dict[str, Any]) -> Any:
    """The figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "destrier"
    import matplotlib.pyplot as plt

    names = [name for name in WORKLOADS if name in results]
    lines = -(-len(names) // _COLUMNS)
    figure, axes = plt.subplots(lines, _COLUMNS, figsize=(11, 2.6 * lines), squeeze=False)
    flat = list(axes.flat)
    for axis, name in zip(flat, names, strict=False):
        panel(axis, name, results[name])
    for axis in flat[len(names) :]:
        axis.axis("off")
    figure.text(
        0.01,
        0.005,
        "samples a second, medians; blue: destrier; grey: others with an even shuffle; amber: "
        "others whose batches are more than 1.5 times as uneven (deff) as a uniform shuffle's",
        fontsize=8,
        color=_INK,
    )
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


def panel(axis: Any, name: str, result: dict[str, Any]) -> None:
    """One workload."""
    found = bars(result)
    rates = [bar[1] for bar in found]
    colours = [
        _OURS if ours else _EVEN if deff is None or deff <= _EVEN_DEFF else _UNEVEN
        for _, _, deff, ours in found
    ]
    axis.barh([bar[0] for bar in found], rates, color=colours, height=0.7)
    for place, (_, rate, deff, _) in enumerate(found):
        shown = "deff not measured" if deff is None else f"deff {deff:,.3g}"
        axis.text(rate, place, f"  {rate:,.0f}/s, {shown}", va="center", fontsize=8, color=_INK)
    axis.set_title(WORKLOADS[name].title, fontsize=10, loc="left", color=_INK)
    axis.set_xlim(0, max(rates, default=1.0) * 1.55)
    axis.set_xticks([])
    axis.tick_params(axis="y", labelsize=8, length=0)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """Takes the path of a result and the folder to write to, or uses the usual ones."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT / "throughput.json"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(json.loads(source.read_text())["workloads"])
    for ending in ("svg", "png"):
        path = folder / f"benchmarks.{ending}"
        figure.savefig(path, dpi=120, metadata={"Date": None} if ending == "svg" else {})
        print(path)


if __name__ == "__main__":
    main()
