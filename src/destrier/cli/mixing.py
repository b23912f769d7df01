"""The plan of several tables as one mixture."""

from __future__ import annotations

import argparse
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from destrier.cli.arguments import order_from, packed_from
from destrier.cli.printing import print_facts, print_plan, print_table
from destrier.errors import ArgumentError
from destrier.show import size

if TYPE_CHECKING:
    from destrier.mixing.report import MixtureReport, SourceReport

__all__ = ["is_mixture", "plan_mixture"]

_NAMED = re.compile(r"([A-Za-z_][\w-]*)=(.+)", re.DOTALL)
_OPTIONS = ("weights", "temperature", "stop", "length", "batching")
_STOPS = {
    "every_row_once": "every row of every source once",
    "first_exhausted": "ends before a source would come again",
    "all_exhausted": "ends when every source came in full",
    "length": "of a fixed length, the next one goes on where it stopped",
    "never": "without end",
}
_HELD = {"all": "all rows", "windows": "open rows", "shares": "the next rows"}


def is_mixture(options: argparse.Namespace) -> bool:
    """Whether the arguments describe a mixture: several tables, or an option that is for one."""
    return len(options.uris) > 1 or any(getattr(options, name) is not None for name in _OPTIONS)


def plan_mixture(options: argparse.Namespace) -> int:
    """Print the plan of a mixture."""
    from destrier.dataset import StreamingDataset
    from destrier.mixing.report import report_mixture
    from destrier.mixture import Mixture
    from destrier.plan import check_batch

    for name in ("bucket_by", "bucket_window", "global_batch_tokens", "batch_multiple"):
        if getattr(options, name) is not None:
            raise ArgumentError(f"--{name.replace('_', '-')} is for a plan of one table")
    check_batch(options.global_batch, options.world_size, uneven=False)
    uris = _named(options.uris)
    if options.table_version is not None and len(uris) > 1:
        raise ArgumentError("--table-version is for a plan of one table")
    if options.weights is not None and len(options.weights) != len(uris):
        raise ArgumentError(
            f"there are {len(options.weights)} --weights for {len(uris)} tables: {', '.join(uris)}"
        )
    sources = {
        name: StreamingDataset(
            packed_from(argparse.Namespace(**{**vars(options), "uri": uri})),
            filter=options.filter,
            columns=options.columns,
            **order_from(options),
        )
        for name, uri in uris.items()
    }
    weights = options.weights
    mixture = Mixture(
        sources,
        weights=None if weights is None else dict(zip(uris, weights, strict=True)),
        temperature=options.temperature,
        seed=options.seed,
        stop=options.stop,
        length=options.length,
        batching=options.batching or "mixed",
        epoch=options.epoch,
        global_batch_size=options.global_batch,
        rank=0,
        world_size=options.world_size,
    )
    batch = options.global_batch
    return print_plan(options, mixture.stream(), report_mixture, _print, global_batch=batch)


def _named(uris: list[str]) -> dict[str, str]:
    """The tables by name: the given one, or that of the table."""
    named: dict[str, str] = {}
    for text in uris:
        match = _NAMED.fullmatch(text)
        name, uri = match.groups() if match else (PurePosixPath(text.rstrip("/")).stem, text)
        if name in named:
            raise ArgumentError(
                f"two tables are called {name!r}; give them names: a={named[name]} b={uri}"
            )
        named[name] = uri
    return named


def _print(report: MixtureReport) -> None:
    unit = f" of {report.unit:,} rows" if report.unit > 1 else ""
    epoch = f"of {report.global_batch:,} rows"
    if report.steps is not None:
        epoch = f"{report.steps:,} steps {epoch}, {report.surplus_rows:,} rows over"
    else:
        epoch = f"steps {epoch}"
    print_facts(
        {
            "mixture": f"{len(report.sources)} table{'s' * (len(report.sources) > 1)}, "
            f"{report.batching} batches, {report.num_splits} splits in row mode, "
            f"seed {report.seed}",
            "proportions": f"exact in every window of {report.slots:,} slots{unit}",
            "epoch": f"{epoch}: {_STOPS[report.stop]}",
            "a step": f"least and most rows in the first {report.looked_at_steps:,} steps",
            "held": "in each rank, by a loader of columns with the default prefetch_bytes",
        }
    )
    print()
    heads = ("source", "rows", "share", "an epoch", "times", "a step", "splits", "order", "held")
    print_table(heads, [_line(source) for source in report.sources])
    print(f"\nstep {report.step} of epoch {report.epoch}, rows of each source in each rank:")
    for rank, share in enumerate(report.shares):
        print(f"  rank {rank}: " + ", ".join(f"{name} {rows:,}" for name, rows in share.items()))


def _line(source: SourceReport) -> tuple[str, ...]:
    return (
        source.name,
        f"{source.rows:,}" + (f" where {source.filter}" if source.filter else ""),
        f"{100 * source.share:.3g} %",
        "no end" if source.samples is None else f"{source.samples:,}",
        "no end" if source.times is None else f"{source.times:.3g}",
        f"{source.least_a_step:,}..{source.most_a_step:,}",
        f"{source.num_splits}",
        _order(source),
        _HELD[source.held] + (f", {size(source.held_bytes)}" if source.held_bytes else ""),
    )


def _order(source: SourceReport) -> str:
    if not source.shuffle:
        return "the table's"
    if source.clump_size == 1:
        return "row by row"
    return f"{source.window} clumps of {source.clump_size}"
