"""The command that shows a whole run: demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from destrier.cli.arguments import add

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the command to a parser."""
    command = add(commands, "demo", "train on real digits, kill the run, and resume it exactly")
    command.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("demo-out"),
        help="folder to write (demo-out)",
    )
    command.add_argument("--quick", action="store_true", help="use fewer digits")
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from destrier.demo import FULL, QUICK, run_demo

    def say(line: str) -> None:
        print(line, flush=True)

    fine = run_demo(options.out, scale=QUICK if options.quick else FULL, say=say)
    return 0 if fine else 1
