"""The results of throughput.py in words and tables: for the page, and in short for the README."""

from __future__ import annotations

import textwrap
from typing import Any

from loaders import LOADERS
from workloads import TABLES, WORKLOADS

SETTINGS = {
    "destrier": "defaults, in one process. Clump 1 permutes rows one by one, a uniform shuffle; "
    "the default moves clumps of neighbouring rows.",
    "LanceDB streaming": "64 splits and reads of 1,024 rows, faster than the default of 64 (64 of "
    "images and tokens; 16 of 16 where images are decoded); tokens and images made from columns by "
    "its transform. Its queues hold one read a split, where the default has no bound, and the "
    "warm-up uses up what they held when the first batch came: else the rate would be that of rows "
    "read while it planned. A uniform shuffle; on a million rows or more it is measured in the "
    "first round only, because the plan takes up to a minute.",
    "DataLoader over Lance": "torch's DataLoader over a map-style dataset whose `__getitems__` "
    "takes a whole batch with one sorted `take` and makes tensors from columns; RandomSampler, a "
    "uniform shuffle; workers are spawned and persistent.",
    "LitData": "its StreamingDataLoader, chunks of 64 MB mapped in place; small rows as plain "
    "numbers, which it keeps as Arrow and reads faster than arrays; tokens by its TokensLoader. It "
    "shuffles chunks, and blocks of 256 rows inside them.",
    "MosaicML Streaming": "its StreamingDataLoader, shards of 64 MB, no compression, "
    "`shuffle_algo='py1e'`, `predownload` of 8 batches. Its shuffle block is larger than the "
    "tables, so its shuffle is even.",
    "WebDataset": "tars of 50 MB in shuffled order, 1,000 samples shuffled in memory, batches made "
    "in the pipeline. Tars of rows of 40 bytes are nobody's way: it runs on tokens and images.",
}
LIMITS = {
    "lance_take": "Lance's take of sorted random rows",
    "lance_take_clumps": "Lance's take of sorted random clumps",
    "lance_scan": "Lance's scan",
    "decode": "decoding alone",
    "page_cache": "reading the file from the system's cache",
    "memcpy": "copying the rows in memory",
}
README_MARKS = ("<!-- benchmarks: begin -->", "<!-- benchmarks: end -->")


def shown(value: dict[str, float], digits: int = 2, scale: float = 1.0) -> str:
    """Median and range."""
    low, high = (f"{value[key] * scale:,.{digits}f}" for key in ("min", "max"))
    return f"{value['median'] * scale:,.{digits}f} ({low} to {high})"


def paragraph(text: str) -> list[str]:
    """Wrapped, with an empty line after it."""
    return [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]


def section(results: dict[str, Any]) -> list[str]:
    """The section of the page."""
    found = {name: results["workloads"][name] for name in WORKLOADS if name in results["workloads"]}
    first = next(iter(found.values()))
    lines = [
        "## Against other loaders",
        "",
        *paragraph(
            "`benchmarks/throughput.py`: every loader on the same rows, one machine, local disk, "
            f"files in the system's cache. Every run is a fresh process that reads for "
            f"{first['seconds']:g} s after a warm-up, over endless epochs; {first['rounds']} "
            "rounds are interleaved, because the machine's speed drifts. Ratios are taken round by "
            "round, and can be relied on more than rates. In the first round each loader runs with "
            "0 and 2 workers, in the others with the better of the two. A byte of every page of "
            "every value is read, by the same code for all."
        ),
        *paragraph(
            "A poor shuffle is cheap, so its quality stands beside each rate, from the labels that "
            "were delivered: tables are sorted by 100 classes, and deff is the variance of the "
            "mean class of a batch, or of 16 successive ones, over that of a uniform order (1 is "
            "uniform; a batch of one class has as many as it has rows). Classes are those met in "
            "64 rows; a uniform order has 47. PSS is memory with shared pages divided among "
            "those who share them, over all processes of a loader."
        ),
        *paragraph(
            "A run on decoded images delivers fewer rows than the windows of the default order "
            "hold, so that most of their reading lies before the measurement; what reading costs "
            "is in the figures of the JPEG bytes."
        ),
        "![Samples a second of each loader on each workload](images/benchmarks.svg)",
        "",
        *machine(first["machine"]),
    ]
    for name, text in SETTINGS.items():
        lines += textwrap.wrap(f"- **{name}**: {text}", 100, subsequent_indent="  ")
    lines.append("")
    for name, result in found.items():
        lines += workload(name, result)
    return lines


def machine(value: dict[str, Any]) -> list[str]:
    """What it was measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in value["versions"].items())
    peers = ", ".join(f"{name} {version}" for name, version in value["peers"].items())
    return paragraph(
        f"Measured on {value['date']}, {value['system']} with {value['cores']} cores and "
        f"{value['memory_gib']} GiB, Python {value['python']}, {versions}; the peers with formats "
        f"of their own in an environment with {peers}."
    )


def workload(name: str, result: dict[str, Any]) -> list[str]:
    """The tables of one workload."""
    load, summary = WORKLOADS[name], result["summary"]
    lines = [
        f"### {load.title[0].upper()}{load.title[1:]}",
        "",
        *paragraph(
            f"{result['rows']:,} rows of {TABLES[load.table].title}, batches of {load.batch:,}"
            + (f", `{load.filter}`; rates are of kept rows" if load.filter else "")
            + "."
        ),
        "| loader | samples/s | CPU µs | first batch, s | PSS, MB | deff, 1 | 16 | classes | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, row in summary["cases"].items():
        if "failed" in row:
            reason = row["failed"].strip().splitlines()[-1][:120]
            lines.append(f"| {case} | {reason} | | | | | | | |")
            continue
        even = row["quality"]
        cells = [
            case,
            shown(row["samples_per_second"], 0),
            shown(row["cpu_seconds_per_sample"], 2, 1e6),
            shown(row["first_batch"]),
            f"{row['pss_mb']['median']:,.0f}",
            *(_figure(even[key]) for key in ("deff_1", "deff_16", "classes")),
            str(row["rounds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rates = {
        key: [r["rates"][key] for r in result["limits"]] for key in result["limits"][0]["rates"]
    }
    lines += ["", "| limit, measured in the same rounds | samples/s |", "|---|---|"]
    for key, values in rates.items():
        middle = sorted(values)[len(values) // 2]
        lines.append(f"| {_limit(key, result)} | {middle:,.0f} |")
    lines += ["", f"| ratio of rates | {' | '.join(summary['ratios'])} |"]
    lines.append(f"|---|{'---|' * len(summary['ratios'])}")
    for other in dict.fromkeys(key for found in summary["ratios"].values() for key in found):
        against = f"to {other}"
        if other.startswith("limit "):
            against = f"to {_limit(other.removeprefix('limit '), result)}"
        cells = [shown(r[other]) if other in r else "" for r in summary["ratios"].values()]
        lines.append(f"| {against} | {' | '.join(cells)} |")
    return [*lines, ""]


def _limit(key: str, result: dict[str, Any]) -> str:
    setting = result["limits"][0]
    more = {
        "lance_take": f", {setting['rows_a_take']:,} at once",
        "lance_take_clumps": f" of {setting['clump']}",
        "decode": f", {setting['decoder']} on {setting['threads']} threads",
    }
    return LIMITS[key] + more.get(key, "")


def _figure(value: float | None) -> str:
    return "too few" if value is None else f"{value:,.3g}"


def readme_table(results: dict[str, Any]) -> list[str]:
    """A line for each workload: our rate, the best peer's, and the ratio."""
    lines = [
        "| samples/s | Destrier | clump 1 | best other | ratio | best even shuffle | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    found = results["workloads"]
    for name in (name for name in WORKLOADS if name in found):
        summary = found[name]["summary"]
        loaders = {n: c["loader"] for n, c in found[name]["cases"].items()}
        rate = {
            n: row["samples_per_second"]["median"]
            for n, row in summary["cases"].items()
            if "failed" not in row
        }
        ours = [n for n in rate if LOADERS[loaders[n]].ours]
        others = {n: value for n, value in rate.items() if n not in ours}
        if not ours or not others:
            continue
        best = max(others, key=lambda n: others[n])
        ratio = summary["ratios"][ours[0]]
        even = next((key for key in ratio if key.startswith("the best peer with")), None)
        cells = [
            WORKLOADS[name].title,
            f"{rate[ours[0]]:,.0f}",
            f"{rate[ours[1]]:,.0f}" if len(ours) > 1 else "",
            f"{LOADERS[loaders[best]].title}, {others[best]:,.0f}",
            f"{ratio['the best peer']['median']:.1f}",
            _even_peer(summary, others, loaders),
            "" if even is None else f"{ratio[even]['median']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _even_peer(summary: dict[str, Any], others: dict[str, float], loaders: dict[str, str]) -> str:
    even = [n for n in others if summary["cases"][n]["even"]]
    if not even:
        return ""
    best = max(even, key=lambda n: others[n])
    return f"{LOADERS[loaders[best]].title}, {others[best]:,.0f}"
