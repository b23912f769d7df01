"""What commands print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from destrier.show import side_by_side

__all__ = ["print_facts", "print_json", "print_plan", "print_table"]


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_facts(facts: dict[str, str]) -> None:
    """Print names and values, one a line."""
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        print(f"{name + ':':<{width}}{value}")


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns side by side, cut at the width of a terminal."""
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in side_by_side(heads, rows):
        print(line[:limit])


def print_plan(
    options: argparse.Namespace,
    stream: Any,
    describe: Callable[..., Any],
    words: Callable[[Any], None],
    *,
    global_batch: Any,
) -> int:
    """Print the plan of a stream, as JSON if that is asked for; returns the exit status.

    Args:
        options: Of the command ``plan``.
        stream: The resolved stream.
        describe: Makes the report, a dataclass.
        words: Prints it for people.
        global_batch: What is in a step.
    """
    report = describe(
        stream,
        global_batch=global_batch,
        world_size=options.world_size,
        step=options.step,
        epoch=options.epoch,
        columns=options.columns,
    )
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        words(report)
    return 0
