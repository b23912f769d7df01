"""How far a long job is, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from destrier.writing.crew import Note

__all__ = ["progress"]


@contextmanager
def progress(what: str, total: int | None, unit: str = "rows") -> Iterator[Note]:
    """Show a bar with rate and time left; nothing where standard error is not a terminal.

    Args:
        what: Shown before the bar.
        total: How many there are, or None if that is not known.
        unit: Of what.

    Yields:
        Called with the number of those that are newly done.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(desc=what, total=total, unit=f" {unit}", unit_scale=True, leave=False) as bar:
        yield bar.update
