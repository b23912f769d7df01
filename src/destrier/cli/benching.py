"""The command that measures how fast a table streams: bench."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from destrier.cli.arguments import (
    add,
    add_choice,
    add_json,
    add_order,
    add_table,
    count,
    open_from,
    order_from,
    whole,
)
from destrier.cli.printing import print_facts, print_json
from destrier.errors import ArgumentError
from destrier.show import number, size

if TYPE_CHECKING:
    from destrier.benching import BenchReport

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the command to a parser."""
    command = add(commands, "bench", "measure how fast a table streams here, and what limits it")
    add_table(command)
    command.add_argument(
        "--batch-size",
        "--global-batch",
        type=count,
        metavar="N",
        default=256,
        help="rows of a batch (256)",
    )
    command.add_argument(
        "--seconds", type=_seconds, metavar="S", default=10.0, help="how long, about (10)"
    )
    command.add_argument(
        "--decode",
        type=_decode,
        action="append",
        metavar="COLUMN=MODE",
        help="rgb, rgba or gray; may be repeated (columns that say they are images, as rgb)",
    )
    command.add_argument(
        "--transform", metavar="MODULE:FUNCTION", help="of yours, which is given each batch"
    )
    command.add_argument(
        "--num-workers", type=whole, metavar="N", default=0, help="processes for it (0: threads)"
    )
    command.add_argument(
        "--trace", metavar="FILE", help="write what each thread does, for Perfetto"
    )
    add_order(command)
    add_choice(command)
    add_json(command)
    command.set_defaults(run=_bench)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _decode(text: str) -> tuple[str, str]:
    name, separator, mode = text.rpartition("=")
    if not (separator and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form COLUMN=MODE")
    return name, mode


def _transform(text: str) -> Callable[..., Any]:
    """Import a function, from the folder that the command is run in too."""
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())  # for good: worker processes import it by the same path
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"--transform {text}: {error}; the form is MODULE:FUNCTION") from error
    if not callable(found):
        raise ArgumentError(f"--transform {text} is a {type(found).__name__}, not a function")
    called: Callable[..., Any] = found
    return called


def _bench(options: argparse.Namespace) -> int:
    from destrier.benching import SHARE, bench
    from destrier.dataset import StreamingDataset

    if options.num_workers and options.transform is None:
        raise ArgumentError(
            f"--num-workers {options.num_workers} are processes for a --transform, and none is "
            "given; reading and decoding are on threads always"
        )

    def make() -> StreamingDataset:
        return StreamingDataset(
            open_from(options),
            filter=options.filter,
            columns=options.columns,
            rank=0,
            world_size=1,
            **order_from(options),
        )

    transform = None if options.transform is None else _transform(options.transform)
    if sys.stderr.isatty():
        about = number(options.seconds * (1 + 2 * SHARE))
        print(f"measuring for about {about} s ...", file=sys.stderr)
    report = bench(
        make,
        batch_size=options.batch_size,
        seconds=options.seconds,
        decode=None if options.decode is None else dict(options.decode),
        transform=transform,
        num_workers=options.num_workers,
        trace=options.trace,
    )
    if options.json:
        stats = dataclasses.asdict(report.stats)
        stats |= {name: getattr(report.stats, name) for name in ("waited", "bound", "verdict")}
        print_json({**dataclasses.asdict(report), "stats": stats})
    else:
        _print(report)
    return 0


def _print(report: BenchReport) -> None:
    most = report.headroom
    print_facts(
        {
            "table": f"{report.table}, {report.rows:,} rows, {', '.join(report.columns)}",
            "opened": f"in {report.open_seconds:.2f} s; the first batch came "
            f"{report.first_batch_seconds:.2f} s later",
            "delivered": f"{number(report.rows_per_second)} rows/s, "
            f"{size(report.bytes_per_second)}/s in batches of {report.batch_size:,} rows",
            "CPU": f"{number(report.cpu_seconds_per_row * 1e6)} µs a row",
            "read": f"{number(most.storage_rows_per_second)} rows/s, "
            f"{size(most.storage_bytes_per_second)}/s, in the order of the table",
            "one batch again and again": f"{number(most.repeated_rows_per_second)} rows/s: no "
            "trainer can get more here",
        }
    )
    if report.held_in_memory:
        print("\nrows are held in memory after the first pass, and are read no more")
    print(f"\n{report.stats}")
