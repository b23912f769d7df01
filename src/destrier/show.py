"""Values as text: for people in tables, for scripts as JSON."""

from __future__ import annotations

import datetime as dt
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Blob", "cell", "number", "plain", "side_by_side", "size", "spoken"]

_SHOWN_BYTES = 8
_SHOWN_ITEMS = 4
_CELL_WIDTH = 40
_OPTIONS = (  # what the library says, and how the command line says it
    (r"; or pass uneven=True for shares that differ by one", ""),
    (r"lower the batch size or pass remainder='keep' or 'pad'", "give a smaller --global-batch"),
    (r"; pin= keeps the version of a run from being cleaned up", ""),
    (r"\bpass mode='append' or mode='overwrite'", "pass --mode append or --mode overwrite"),
    (r"verify\(dataset, table\)", "destrier verify DATASET TABLE"),
    (r"\bpass mode='create'", "leave out --mode append"),
    (r"\bwith overwrite=True\b", "with --overwrite"),
    (r"\bglobal_batch_size (?=\d)", "--global-batch "),
    (r"lower it or pass remainder='keep' or 'pad'", "give a smaller --batch-multiple"),
    (r"\bglobal_batch_tokens=(?=\d)", "--global-batch-tokens "),
    (r"\bbatch_multiple (?=\d)", "--batch-multiple "),
    (r"\bbatch_multiple=(?=\d)", "--batch-multiple "),
    (r"\bneeds bucket_by\b", "needs --bucket-by"),
    (r"\bworld_size (?=\d)", "--world-size "),
    (r"\bnum_splits is (?=\d)", "--num-splits is "),
    (r"\bclump_size (\d+) times window (?=\d)", r"--clump-size \1 times --window "),
    (r"^(?:shuffle_)?seed (?=must)", "--seed "),
    (r"^epoch (?=must)", "--epoch "),
    (r"^the (ratios|counts) ", r"the sizes of --parts "),
)


@dataclass(frozen=True)
class Blob:
    """A value that a scan does not read, only describes."""

    size: int


def plain(value: Any) -> Any:
    """Return a value as JSON can say it; bytes are shortened, what JSON lacks is text.

    Example:
        >>> plain({"image": b"0123456789", "loss": float("nan")})
        {'image': {'bytes': 10, 'hex': '3031323334353637'}, 'loss': 'nan'}
    """
    result: Any = str(value)  # text itself, and decimals, durations and the like
    if isinstance(value, bytes):
        result = {"bytes": len(value), "hex": value[:_SHOWN_BYTES].hex()}
    elif isinstance(value, Blob):
        result = {"bytes": value.size}
    elif isinstance(value, dict):
        result = {str(key): plain(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        result = [plain(item) for item in value]
    elif isinstance(value, dt.date | dt.time):
        result = value.isoformat()
    elif value is None or isinstance(value, int) or (_number(value) and math.isfinite(value)):
        result = value
    return result


def cell(value: Any) -> str:
    """Return a value as a person wants to see it in a table.

    Example:
        >>> cell([1.0, 2.5, b"0123456789", None, "five"])
        '[1, 2.5, 10 B: 3031323334353637..., null, ... 5 items]'
    """
    text = "null" if value is None else str(plain(value))
    if isinstance(value, Blob):
        text = f"{size(value.size)} blob"
    elif isinstance(value, bytes):
        more = "..." if len(value) > _SHOWN_BYTES else ""
        text = f"{size(len(value))}: {value[:_SHOWN_BYTES].hex()}{more}"
    elif isinstance(value, list | tuple):
        inside = ", ".join(cell(item) for item in value[:_SHOWN_ITEMS])
        more = f", ... {len(value)} items" if len(value) > _SHOWN_ITEMS else ""
        text = f"[{inside}{more}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {cell(item)}" for key, item in value.items()) + "}"
    elif _number(value):
        text = f"{value:.6g}"
    elif isinstance(value, str):
        text = " ".join(value.split())
        text = text if len(text) <= _CELL_WIDTH else text[: _CELL_WIDTH - 3] + "..."
    return text


def _number(value: Any) -> bool:
    return isinstance(value, float)


def side_by_side(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *rows)
    ]


def size(count: float) -> str:
    """Return a number of bytes, in decimal units.

    Example:
        >>> size(1_360_000)
        '1.4 MB'
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def spoken(text: str, command: str = "") -> str:
    """Return a message of the library in the words of the command line.

    Example:
        >>> spoken("there is one already: replace it with overwrite=True")
        'there is one already: replace it with --overwrite'
    """
    for said, better in _OPTIONS:
        text = re.sub(said, better, text)
    return text.replace("--global-batch", "--batch-size") if command == "bench" else text


def number(value: float) -> str:
    """Return a number that may be a fraction, with two digits if it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
