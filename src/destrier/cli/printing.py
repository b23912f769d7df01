"""What commands print."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from destrier.show import side_by_side

__all__ = ["print_facts", "print_json", "print_table"]


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
