"""Writes ``docs/benchmarks.md`` from the results in ``benchmarks/out``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common import HERE, OUT
from comparison import README_MARKS, paragraph, readme_table, shown
from comparison import section as throughput_section
from sections import cache_section, decode_section
from shaped import cloud_section, mixture_section, packing_section, views_section

CASES = {
    "plain": "no filter",
    "rows-10": "no filter, a table of 10,000,000 rows",
    "rows-100": "no filter, a table of 1,000,000 rows",
    "rows-1000": "no filter, a table of 100,000 rows",
    "filter-built": "a filter that keeps half, run for the first time",
    "filter-cached": "the same filter, its selection in the cache folder",
    "resume-0.01": "resumed at 1 % of the epoch",
    "resume-0.5": "resumed at 50 % of the epoch",
    "resume-0.99": "resumed at 99 % of the epoch",
}


def machine(result: dict[str, Any]) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    return (
        f"Measured on {m['date']}, {m['system']} with {m['cores']} cores and "
        f"{m['memory_gib']} GiB, Python {m['python']}, {versions}."
    )


def scale_section(result: dict[str, Any]) -> list[str]:
    rows = result["rows"]
    written = result["permutation"]
    lines = [
        "## Start, memory and resume",
        "",
        f"A table of {rows:,} rows (an int64 id, an int32 label), batches of 256, one process. The",
        "time covers opening the table, the plan and the first batch; the memory is what the",
        "process has beyond its imports at that moment. `benchmarks/scale.py`, medians of five",
        "rounds in fresh processes, with the range.",
        "",
        machine(result),
        "",
        "| case | first batch, s | memory, MB | state, bytes |",
        "|---|---|---|---|",
    ]
    for name, case in result["cases"].items():
        lines.append(
            f"| {CASES[name]} | {shown(case['seconds'])} | {shown(case['memory_mb'], 0)} "
            f"| {case['state_bytes']['median']:,.0f} |"
        )
    lines += [
        "",
        "First batch after a resume at 99 % of the epoch against one at 1 %, round by round:",
        f"{shown(result['resume_99_to_1'])} times.",
        "",
        f"An epoch's order of {rows:,} rows written down as a table: {written['seconds']:,.0f} s,",
        f"with {written['memory_mb']:,.0f} MB beyond the imports at most.",
        "",
    ]
    return lines


def steady_section(result: dict[str, Any]) -> list[str]:
    memory, sleeper, gap = result["memory"], result["sleeper"], result["gap"]
    after = f"{memory['first_mb']['median']:,.0f} and {memory['last_mb']['median']:,.0f}"
    budget = f"prefetch_bytes is {sleeper['budget_mb']['median']:,.0f} MB"
    sleep = f"{shown(sleeper['soon_mb'], 0)} and {shown(sleeper['later_mb'], 0)}"
    rows = (
        ("resident memory after 2,000 and after 10,000 batches of 1,024, MB", after),
        (
            f"memory beyond the imports before and after a consumer sleeps for 5 s, MB; {budget}",
            sleep,
        ),
        (
            "longest wait for an epoch's first batch, in median batches of 2 ms of work each",
            shown(gap["gap_to_batch"]),
        ),
    )
    return [
        "## Memory over time, and between epochs",
        "",
        "2 million rows of 8 float32 and a label. `benchmarks/steady.py`, in fresh processes.",
        "",
        machine(result),
        "",
        "| figure | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
    ]


def links_section(result: dict[str, Any]) -> list[str]:
    size = result["sample_bytes"] // 1000
    lines = [
        "## Links",
        "",
        *paragraph(
            f"{result['members']:,} members of plain tars, images of about 2 kB and their classes, "
            "linked. The time is all that `destrier.link` takes, with the start of the workers; "
            "tars this small are one piece of work, so a second worker has nothing to do. "
            "`benchmarks/links.py`, medians in fresh processes, with the range."
        ),
        machine(result),
        "",
        "| | members/s | s |",
        "|---|---|---|",
    ]
    for name, run in result["link"].items():
        members = shown(run["members_per_second"], 0)
        lines.append(f"| {name} | {members} | {shown(run['seconds'])} |")
    lines += [
        "",
        *paragraph(
            f"{result['samples']:,} images of about {size} kB, as they are on disk, in shuffled "
            "batches of 256. webdataset shuffles the order of the tars and 1,000 samples in "
            "memory; the others shuffle all samples. The rates are those of endless reading, after "
            "a warm-up. The files are in the system's cache."
        ),
        "| reader | images/s | MB/s | first batch, s |",
        "|---|---|---|---|",
    ]
    for name, run in result["streams"].items():
        rate = run["rows_per_second"]
        megabytes = shown(rate, 0, result["sample_bytes"] / 1e6)
        lines.append(f"| {name} | {shown(rate, 0)} | {megabytes} | {shown(run['first'])} |")
    lines += ["", "| rates, each at its best setting | median (range) |", "|---|---|"]
    lines += [f"| {name} | {shown(ratio)} |" for name, ratio in result["ratios"].items()]
    return [*lines, ""]


def rates(part: dict[str, Any], row_bytes: int = 0) -> list[str]:
    """Rows of a table: rows a second, megabytes a second if rows have a size, seconds."""
    lines = []
    for name, run in part["runs"].items():
        rate = run["rows_per_second"]
        cells = [name, shown(rate, 0)]
        if row_bytes:
            cells.append(shown(rate, 0, row_bytes / 1e6))
        lines.append(f"| {' | '.join([*cells, shown(run['seconds'])])} |")
    return lines


def ingest_section(result: dict[str, Any]) -> list[str]:
    images, small, optimized = result["images"], result["small"], result["optimize"]
    image = result["image_bytes"]
    lines = [
        "## Convert and optimize",
        "",
        *paragraph(
            f"{result['image_rows']:,} images of about {image // 1000} kB, in tars and in MDS "
            "shards, converted by 2 workers, whose start is in the time; beside them pylance "
            "writes the same rows from memory in one process. `benchmarks/ingest.py`, medians of "
            "three rounds in fresh processes, with the range."
        ),
        machine(result),
        "",
        "| | rows/s | MB/s | s |",
        "|---|---|---|---|",
        *rates(images, image),
        "",
        "| rate of convert to that of pylance from memory | median (range) |",
        "|---|---|",
        *(f"| {name} | {shown(ratio)} |" for name, ratio in images["ratios"].items()),
        "",
        *paragraph(
            f"{result['small_rows']:,} rows of an integer, a float, and 8 float32 (classic "
            "LitData) or a short text, converted in one process; beside them litdata's "
            "StreamingDataset and streaming's LocalDataset are iterated in one process."
        ),
        "| | rows/s | s |",
        "|---|---|---|",
        *rates(small),
        "",
        "| rate of convert to that of the format's own reader | median (range) |",
        "|---|---|",
        *(f"| {name} | {shown(ratio, 1)} |" for name, ratio in small["ratios"].items()),
        "",
        *paragraph(
            f"A function that makes two integers, run over {result['small_rows']:,} inputs by "
            "`optimize` of both libraries, with 2 workers, whose start is in the time. Destrier's "
            f"rate is {shown(optimized['ratio'], 1)} times litdata's."
        ),
        "| | rows/s | s |",
        "|---|---|---|",
        *rates(optimized),
        "",
        *paragraph(
            "Memory at most, sampled, while 2 workers convert "
            f"{result['memory_rows'] * image / 1e9:,.1f} GB of such images, one run. Resident is "
            "all that is mapped, with the pages of files that are read and of libraries, which the "
            "system takes back when it needs them; own is what is the process's alone."
        ),
        "| | worker, resident, MB | worker, own, MB | parent, resident, MB | parent, own, MB |",
        "|---|---|---|---|---|",
    ]
    for name, run in result["memory"].items():
        cells = [
            f"{run[f'{process}_{kind}_mb']['median']:,.0f}"
            for process in ("worker", "parent")
            for kind in ("resident", "own")
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return [*lines, ""]


def main() -> None:
    lines = [
        "# Benchmarks",
        "",
        "What was measured, with which script. `make bench-full` runs them all again, in about an",
        "hour, and writes this page; `make bench` tries the scripts on little data.",
        "",
    ]
    sections = (
        ("throughput", throughput_section),
        ("scale", scale_section),
        ("steady", steady_section),
        ("links", links_section),
        ("decode", lambda result: decode_section(result, machine(result))),
        ("cache", lambda result: cache_section(result, machine(result))),
        ("cloud", lambda result: cloud_section(result, machine(result))),
        ("views", lambda result: views_section(result, machine(result))),
        ("mixture", lambda result: mixture_section(result, machine(result))),
        ("packing", lambda result: packing_section(result, machine(result))),
        ("ingest", ingest_section),
    )
    page = HERE.parent / "docs" / "benchmarks.md"
    before = kept(page.read_text())
    for name, section in sections:
        path = OUT / f"{name}.json"
        if path.exists():
            lines += section(json.loads(path.read_text()))
        elif f"benchmarks/{name}.py" in before:
            lines += before[f"benchmarks/{name}.py"]
    page.write_text("\n".join(lines).rstrip() + "\n")
    readme(HERE.parent / "README.md", OUT / "throughput.json")


def readme(path: Path, result: Path) -> None:
    """Print the short table, and put it between the marks in the README if they are there."""
    if not result.exists():
        return
    table = readme_table(json.loads(result.read_text()))
    print("\n".join(table))
    begin, end = README_MARKS
    text = path.read_text()
    if begin in text and end in text:
        before, after = text.split(begin)[0], text.split(end)[1]
        path.write_text("\n".join([before + begin, "", *table, "", end]) + after)


def kept(page: str) -> dict[str, list[str]]:
    """The sections of a page by the script that they name: what was not measured again stays."""
    found = {}
    for text in re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]:
        script = re.search(r"benchmarks/\w+\.py", text)
        if script is not None:
            found[script[0]] = [*text.rstrip().splitlines(), ""]
    return found


if __name__ == "__main__":
    main()
