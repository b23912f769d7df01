"""Sections of the page for streams that are shaped: mixtures, views, packed tokens, and S3."""

from __future__ import annotations

from typing import Any

from comparison import paragraph, shown

__all__ = ["cloud_section", "mixture_section", "packing_section", "views_section"]


def mixture_section(result: dict[str, Any], measured: str) -> list[str]:
    """Mixtures and zips against their sources alone, and how they start."""
    lines = [
        "## Mixtures",
        "",
        *paragraph(
            "Four tables with weights 4, 3, 2, 1, as one mixture, and side by side as a zip, "
            "against the same tables read one after another, each for its share, in shuffled batches "
            "of 256. `benchmarks/mixture.py`, in fresh processes, ratios round by round."
        ),
        measured,
        "",
        "| rows | mixture, rows/s | to its sources alone | zip, rows/s | to its sources alone |",
        "|---|---|---|---|---|",
    ]
    for name, case in result["streams"].items():
        rates, ratios = case["rows_per_second"], case["to sources alone"]
        cells = [
            name,
            shown(rates["mixture"], 0),
            shown(ratios["mixture"]),
            shown(rates["zip"], 0),
            shown(ratios["zip"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Starts of a mixture of four tables of {result['long_rows']:,} rows:",
        "",
        "| | first batch, s | state, bytes |",
        "|---|---|---|",
    ]
    for name, case in result["starts"].items():
        lines.append(f"| {name} | {shown(case['seconds'])} | {shown(case['state_bytes'], 0)} |")
    return [*lines, ""]


def views_section(result: dict[str, Any], measured: str) -> list[str]:
    """Scattered rows against whole tables."""
    lines = [
        "## Views",
        "",
        *paragraph(
            "A scattered fifth of the rows, and two and a half times the rows, against the whole "
            "table, at clump 1: with the default budget, where all rows are held once they are "
            "read, and with 32 MB, where each is read when its batch is. `benchmarks/views.py`, in "
            "fresh processes, medians with the range."
        ),
        measured,
        "",
        "| table, budget, rows | first epoch, rows/s | second epoch, rows/s |",
        "|---|---|---|",
    ]
    for name, case in result.items():
        if "first_epoch" in case:
            cells = [name, shown(case["first_epoch"], 0), shown(case["second_epoch"], 0)]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def packing_section(result: dict[str, Any], measured: str) -> list[str]:
    """Packed documents against documents, and plans of many of them."""
    lines = [
        "## Packed tokens",
        "",
        *paragraph(
            f"{result['documents']:,} documents of lognormal length (median 400 tokens) in blocks "
            "of 2,048, against the same documents unpacked, and fixed blocks against LitData's "
            "TokensLoader at its better number of workers. `benchmarks/packing.py`, in fresh "
            "processes, ratios round by round."
        ),
        measured,
        "",
        "| stream | tokens/s |",
        "|---|---|",
    ]
    lines += [f"| {n} | {shown(rate, 0)} |" for n, rate in result["tokens_per_second"].items()]
    lines += ["", "| ratio | median (range) |", "|---|---|"]
    lines += [f"| {name} | {shown(ratio)} |" for name, ratio in result["ratios"].items()]
    fit = ", ".join(
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in result["best_fit"].items()
    )
    return [*lines, "", f"Best fit: {fit}.", ""]


def cloud_section(result: dict[str, Any], measured: str) -> list[str]:
    """Whole epochs from an object store."""
    lines = [
        "## Object storage",
        "",
        *paragraph(
            "Whole first epochs, with empty caches, from SeaweedFS on the same machine, through a "
            "proxy that lets each request wait. The last column is the share of what eight threads "
            "get that read the files in ranges of 8 MB. `benchmarks/cloud.py`, in fresh processes, "
            "medians."
        ),
        measured,
        "",
        "| rows, delay, clump | rows/s | requests a row | to the best other | of plain ranges |",
        "|---|---|---|---|---|",
    ]
    for name, run in result["runs"].items():
        where, loader, setting = name.rsplit(", ", 2)
        if loader != "destrier":
            continue
        key = f"{where}, {setting}"
        ratio, share = result["to_best_peer"].get(key), result["of_plain_ranges"].get(key)
        cells = [
            key,
            f"{run['rate']:,.0f}",
            f"{run['gets_per_row']:.3f}",
            "" if ratio is None else f"{ratio:.2f}",
            "" if share is None else f"{share:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
