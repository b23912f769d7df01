"""Sections of the page for single parts of the library: decoding, the cache, object storage."""

from __future__ import annotations

from typing import Any

from comparison import shown

__all__ = ["cache_section", "decode_section"]


def decode_section(result: dict[str, Any], measured: str) -> list[str]:
    """Decoding through the loader against decoding alone."""
    lines = [
        "## Decoding images",
        "",
        "JPEGs of 256 x 256 pixels and about 25 kB, from a table to batches of 256 as tensors,",
        "against the same decoder on as many threads over the same files in memory.",
        "`benchmarks/decode.py`, in fresh processes, ratios round by round.",
        "",
        measured,
        "",
        "| decoder, cores | images/s | to decoding alone | CPU an image, µs | to decoding alone |",
        "|---|---|---|---|---|",
    ]
    for name, case in result.items():
        if name.endswith(", loader"):
            cells = [
                name.removesuffix(", loader"),
                shown(case["samples_per_s"], 0),
                shown(case["samples_per_s_to_alone"]),
                shown(case["cpu_us"], 0),
                shown(case["cpu_us_to_alone"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def cache_section(result: dict[str, Any], measured: str) -> list[str]:
    """Epochs from the cache against epochs from the table on the same disk."""
    lines = [
        "## The cache",
        "",
        "A second epoch from `cache_dir=` against one from the table, both on local disk, warm.",
        "`benchmarks/cache.py`, epochs in turn, ratios round by round.",
        "",
        measured,
        "",
        "| what is streamed | table, rows/s | cache, rows/s | cache to table |",
        "|---|---|---|---|",
    ]
    for name, case in result["workloads"].items():
        rates = case["rows_per_second"]
        cells = [name, shown(rates["table"], 0), shown(rates["cache"], 0)]
        lines.append(f"| {' | '.join([*cells, shown(case['cache_to_table'])])} |")
    return [*lines, ""]
