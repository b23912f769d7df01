"""A shard: its table of offsets, and the columns of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from destrier.errors import SourceError
from destrier.formats.gather import Ints
from destrier.formats.mds.cells import Cells
from destrier.formats.mds.index import Record, Shape, parse_config
from destrier.formats.mds.stored import Content

__all__ = [
    "Header",
    "Offsets",
    "check_config",
    "check_end",
    "read_cells",
    "read_header",
    "read_rows",
    "spans",
]

Offsets: TypeAlias = NDArray[np.uint32]


@dataclass(frozen=True)
class Header:
    """The beginning of a shard, or of the offsets file of a text shard.

    Attributes:
        samples: Number of rows.
        offsets: Where each row begins, and where the last one ends; as they are in the file.
        table_end: Where the table of offsets ends and what the shard says of itself begins.
    """

    samples: int
    offsets: Offsets
    table_end: int


def read_header(content: Content, *, joint: bool) -> Header:
    """Read the table of offsets.

    Args:
        content: Of the file that holds it.
        joint: Whether the same file holds the rows.

    Raises:
        SourceError: If it is cut, or offsets are out of order or beyond the file.
    """
    name = content.name
    if content.size < 8:
        raise SourceError(
            f"{name} has {content.size} bytes, too few for a shard: it is cut", file=name
        )
    samples = int(np.frombuffer(content.slice(0, 4), "<u4")[0])
    table_end = 4 + 4 * (samples + 1)
    if table_end > content.size:
        raise SourceError(
            f"{name} says that it has {samples:,} rows, but its {content.size:,} bytes do not hold "
            "so many offsets: it is cut or damaged",
            file=name,
        )
    offsets = np.frombuffer(content.slice(4, table_end - 4), "<u4")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        row = int(falls[0])
        raise SourceError(
            f"row {row} of {name} begins at byte {offsets[row]:,} and ends at {offsets[row + 1]:,}:"
            " the offsets are out of order (damaged, or written beyond 4 GiB)",
            file=name,
            row=row,
        )
    if joint:
        if offsets[0] < table_end:
            raise SourceError(
                f"{name} says that its rows begin at byte {offsets[0]:,}, inside the table of "
                f"offsets that ends at {table_end:,}: it is damaged",
                file=name,
            )
        check_end(name, offsets, content.size)
    return Header(samples, offsets, table_end)


def check_end(name: str, offsets: Offsets, size: int) -> None:
    """Raise unless the last row ends where its file ends."""
    if offsets[-1] != size:
        raise SourceError(
            f"the last row of {name} ends at byte {offsets[-1]:,}, but the file at {size:,}: it is "
            "cut or damaged",
            file=name,
        )


def check_config(content: Content, header: Header, end: int, record: Record) -> None:
    """Compare a shard with its record in the index.

    Args:
        content: Of the file with the table of offsets.
        header: That table.
        end: Where what the shard says of itself ends.
        record: From the index.

    Raises:
        SourceError: Naming both values, if they differ.
    """
    name = content.name
    if header.samples != record.samples:
        raise SourceError(
            f"{name} has {header.samples:,} rows, but the index says {record.samples:,}", file=name
        )
    if end == header.table_end:
        return  # an early writer left nothing there
    own = parse_config(content.slice(header.table_end, end - header.table_end), name)
    if own != record.shape:
        raise SourceError(f"{name} {_difference(own, record.shape)}", file=name)


def _difference(own: Shape, index: Shape) -> str:
    for what in ("format", "names", "encodings", "sizes", "newline", "separator"):
        mine, other = getattr(own, what), getattr(index, what)
        if mine != other:
            shown = [list(v) if isinstance(v, tuple) else v for v in (mine, other)]
            return f"says that its {what} are {shown[0]!r}, but the index says {shown[1]!r}"
    raise AssertionError


def spans(offsets: Offsets, most: int, row_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """Runs of rows of at most so many bytes, or of one row.

    Args:
        offsets: Where rows begin, and where the last one ends.
        most: Bytes of a run.
        row_bytes: What a row takes besides its own bytes.
    """
    rows = most // max(row_bytes, 1) + 1  # more do not fit in a run
    first = 0
    while first < len(offsets) - 1:
        window = offsets[first : first + rows + 1].astype(np.int64)
        ends = window - window[0] + np.arange(len(window)) * row_bytes
        last = first + max(int(np.searchsorted(ends, most, "right")) - 1, 1)
        yield first, last
        first = last


def read_rows(content: Content, offsets: Offsets, first: int, last: int) -> Cells:
    """The bytes of a run of rows."""
    bounds = offsets[first : last + 1].astype(np.int64)
    base = int(bounds[0])
    buffer = content.slice(base, int(bounds[-1]) - base)
    rows = np.arange(first, last)
    return Cells(buffer, bounds[:-1] - base, np.diff(bounds), rows, content.name, "", base)


def read_cells(
    content: Content, offsets: Offsets, first: int, last: int, shape: Shape
) -> dict[str, Cells]:
    """Find the values of all columns in a run of rows.

    Args:
        content: Of the shard.
        offsets: Its table.
        first: The first row.
        last: The row after the last one.
        shape: The columns.

    Raises:
        SourceError: If lengths do not add up to the length of a row.
    """
    row = read_rows(content, offsets, first, last)
    buffer, begins, lengths, base = row.buffer, row.starts, row.lengths, row.base
    varying = sum(width is None for width in shape.sizes)
    least = 4 * varying + sum(width or 0 for width in shape.sizes)
    short = lengths < least
    if short.any():
        raise _damaged(row, int(np.argmax(short)), f"too few for its columns ({least:,})")
    places: list[tuple[Ints, Ints]] = []
    at, seen = begins + 4 * varying, 0
    for width in shape.sizes:
        if width is None:
            widths = row.fixed("<u4", 4 * seen).astype(np.int64)
            seen += 1
        else:
            widths = np.full(len(row), width, np.int64)
        places.append((at, widths))
        at = at + widths
    wrong = at != begins + lengths
    if wrong.any():
        index = int(np.argmax(wrong))
        total = int(at[index] - begins[index])
        raise _damaged(row, index, f"but the lengths of its columns add up to {total:,}")
    return {
        column: Cells(buffer, starts, widths, row.rows, content.name, column, base)
        for column, (starts, widths) in zip(shape.names, places, strict=True)
    }


def _damaged(row: Cells, index: int, problem: str) -> SourceError:
    number = int(row.rows[index])
    return SourceError(
        f"row {number} of {row.file} has {row.lengths[index]:,} bytes, {problem}: the shard is "
        "damaged",
        file=row.file,
        row=number,
    )
