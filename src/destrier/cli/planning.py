"""The command that shows which rank reads what: plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from destrier.cli.arguments import (
    add,
    add_choice,
    add_json,
    add_mixture,
    add_order,
    add_packing,
    add_table,
    count,
    order_from,
    packed_from,
    whole,
)
from destrier.cli.printing import print_facts, print_plan
from destrier.show import number, size

if TYPE_CHECKING:
    from destrier.bucketing.report import BucketReport
    from destrier.caching.advice import CachedColumn
    from destrier.packing.documents import PackingReport
    from destrier.report import PlanReport

__all__ = ["add_commands"]

_SHOWN_ROWS = 8


_HELD = {
    "all": "all rows, {} in each rank: read once, in the order of the table",
    "windows": "the open rows, {} in each rank",
    "shares": "the rows of the next steps",
}


def add_commands(commands: Any) -> None:
    """Add the command to a parser."""
    command = add(commands, "plan", "print which rows each rank reads in a step, and what it costs")
    add_table(command, several=True)
    _add_plan(command)
    add_choice(command)
    add_json(command)
    command.set_defaults(run=_plan)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--global-batch",
        type=count,
        metavar="N",
        help="rows of a step over all ranks (256)",
    )
    command.add_argument(
        "--bucket-by", metavar="NAME", help="the column by whose lengths batches are formed"
    )
    command.add_argument(
        "--bucket-window", type=count, metavar="N", help="batches that are sorted together (64)"
    )
    command.add_argument(
        "--global-batch-tokens",
        type=count,
        metavar="N",
        help="tokens of a step over all ranks at most, with pads",
    )
    command.add_argument(
        "--batch-multiple",
        type=count,
        metavar="N",
        help="what the rows of a step are then a multiple of (the number of ranks)",
    )
    command.add_argument(
        "--world-size", type=count, metavar="N", default=1, help="number of ranks (1)"
    )
    command.add_argument(
        "--step", type=whole, metavar="N", default=0, help="the step to look at (0)"
    )
    command.add_argument("--epoch", type=whole, metavar="N", default=0, help="its epoch (0)")
    add_order(command)
    add_packing(command)
    add_mixture(command)


def _plan(options: argparse.Namespace) -> int:
    from destrier.cli.mixing import is_mixture, plan_mixture

    if options.global_batch is None and options.global_batch_tokens is None:
        options.global_batch = 256
    if is_mixture(options):
        return plan_mixture(options)
    (options.uri,) = options.uris
    from destrier.dataset import StreamingDataset
    from destrier.report import report_plan

    dataset = StreamingDataset(
        packed_from(options),
        filter=options.filter,
        **order_from(options),
        epoch=options.epoch,
        global_batch_size=options.global_batch,
        global_batch_tokens=options.global_batch_tokens,
        batch_multiple=options.batch_multiple,
        bucket_by=options.bucket_by,
        bucket_window=options.bucket_window,
        rank=0,
        world_size=options.world_size,
    )
    step = dataset.global_batch
    assert step is not None
    return print_plan(options, dataset.stream(), report_plan, _print_plan, global_batch=step)


def _print_plan(report: PlanReport) -> None:
    sample, read = ("row", "rows") if report.packing is None else ("block", "documents")
    print_facts(
        {
            "table": report.table,
            ("rows" if report.packing is None else "documents"): _rows(report)
            + (f" of {report.table_rows:,}, where {report.filter}" if report.filter else ""),
            **({} if report.packing is None else {"blocks": _packing(report.packing)}),
            "order": _order(report),
            "epoch": f"{report.steps:,} steps of {_step(report)}, "
            f"{report.surplus_rows:,} rows over",
            **({} if report.buckets is None else {"batches": _batches(report.buckets)}),
            "reads a step": "where not all rows are held, "
            * (report.held == "all")
            + f"about {number(report.requests_a_step)} requests of "
            f"{size(report.bytes_a_step)} in all (estimated, for the middle of an epoch: one for "
            f"each run of neighbouring {read} in each of {len(report.read_columns)} columns, "
            f"{read} of average size on disk; Lance joins requests that lie close)",
            f"requests a {sample}": f"about {report.requests_a_row:.3g} in each column",
            "open rows": f"{report.open_rows:,}, about {size(report.open_bytes)} over all ranks"
            if report.open_rows
            else "none: rows are read shortly before their step",
            "held": _HELD[report.held].format(size(report.held_bytes))
            + " (by a loader of columns with the default prefetch_bytes)",
            "deff": _effects(report),
            "with cache_dir=": "; ".join(map(_kept, report.cache))
            or "unknown: rows cannot be read",
        }
    )
    places = "row offsets" if report.packing is None else "addresses of blocks"
    print(f"\nstep {report.step} of epoch {report.epoch}, {places} of each rank:")
    for share in report.shares:
        rows = ", ".join(map(str, share.rows[:_SHOWN_ROWS]))
        more = f", ... {len(share.rows)} rows" if len(share.rows) > _SHOWN_ROWS else ""
        print(f"  rank {share.rank}: {rows}{more}")
    for note in report.notes:
        print(f"\nnote: {note}")


def _rows(report: PlanReport) -> str:
    return f"{report.rows if report.packing is None else report.packing.documents:,}"


def _step(report: PlanReport) -> str:
    buckets = report.buckets
    if buckets is None or buckets.tokens is None:
        return f"{report.global_batch:,} rows"
    return (
        f"{buckets.rows_a_step:,.1f} rows on average, a multiple of {buckets.multiple:,} within "
        f"{buckets.tokens:,} tokens (other epochs have a few more or less)"
    )


def _batches(buckets: BucketReport) -> str:
    return (
        f"of like length by {buckets.by}, about {buckets.window:,} sorted together; "
        f"{buckets.waste:.1%} pads, if each is padded to its longest row"
    )


def _packing(packing: PackingReport) -> str:
    left = f", {packing.unreached:,} left out of each epoch" if packing.unreached else ""
    return (
        f"{packing.blocks:,} of {packing.block_size:,} tokens, {packing.how}, from "
        f"{packing.tokens:,} tokens{left}; {packing.waste:.2%} pads, {packing.cut:.1%} of pieces "
        "end inside their document. What follows counts blocks as rows"
    )


def _kept(column: CachedColumn) -> str:
    blocks = f"{column.name} in blocks of {column.block_rows:,} rows"
    if column.kept_blocks == column.blocks:
        return f"{blocks}, all kept"
    kept = f"{column.kept_blocks:,} of {column.blocks:,}" if column.kept_blocks else "none"
    least = round(1 / column.least_density)
    return f"{blocks}, {kept} kept: fewer than 1 in {least} rows of the others are selected"


def _order(report: PlanReport) -> str:
    splits = f"{report.num_splits} splits"
    if not report.shuffle:
        return f"the table's, {splits}"
    if report.clump_size == 1:
        return f"shuffled row by row, {splits}, seed {report.seed}"
    return (
        f"shuffled in clumps of {report.clump_size} rows and windows of {report.window} clumps, "
        f"{splits}, seed {report.seed}"
    )


def _effects(report: PlanReport) -> str:
    if report.deff is None or report.deff_successive is None:
        return "without meaning: nothing is shuffled"
    packing = report.packing
    rows, more = "rows", ""
    if packing is not None:
        rows = "documents"
        more = f"; a block has {packing.documents_a_block:.3g} documents, which are neighbours"
    return (
        f"{report.deff:.2f} for a batch, {report.deff_successive:.2f} for 16 successive ones "
        f"(at most, for {rows} that are sorted: variance of the mean over that of a uniform order"
        f"{more})"
    )
