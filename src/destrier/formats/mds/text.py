"""Rows of text: JSON lines, and values between separators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import SchemaError, SourceError
from destrier.formats.gather import text
from destrier.formats.mds.cells import TEXT_AS_BYTES, Cells
from destrier.formats.mds.index import Shape
from destrier.formats.mds.numbers import parse
from destrier.formats.mds.shard import Offsets, read_rows
from destrier.formats.mds.stored import Content

__all__ = ["META", "TEXT_KINDS", "check_header", "read_json", "read_separated", "text_cells"]

META = ".meta"

TEXT_KINDS: dict[str, pa.DataType] = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
}
"""The encodings of text shards."""

_JSON = json.JSONDecoder(object_pairs_hook=tuple)  # so that a key that stands twice shows
_PYTHON = {"str": str, "int": int, "float": float}


def check_header(content: Content, first: int, shape: Shape) -> None:
    """Check what stands before the first row: the names of columns, or nothing in JSON.

    Raises:
        SourceError: If something else stands there.
    """
    expected = b""
    if shape.format != "json":
        expected = (shape.separator.join(shape.names) + shape.newline).encode()
    if first > content.size or content.slice(0, first).to_pybytes() != expected:
        raise SourceError(
            f"{content.name} does not begin with the {len(expected)} bytes {expected!r} before "
            f"its first row at byte {first:,}: it is damaged",
            file=content.name,
        )


def text_cells(content: Content, offsets: Offsets, first: int, last: int, shape: Shape) -> Cells:
    """A run of rows without what ends each.

    Raises:
        SourceError: If a row does not end as it should.
    """
    cells = read_rows(content, offsets, first, last)
    lengths = cells.lengths
    ending = shape.newline.encode()
    short = lengths < len(ending)
    if not short.any():
        found = cells.fixed(f"V{len(ending)}", lengths - len(ending))
        short = found != np.frombuffer(ending, found.dtype)[0]
    if short.any():
        row = int(cells.rows[np.argmax(short)])
        raise SourceError(
            f"row {row} of {content.name} does not end with {shape.newline!r}: it is damaged",
            file=content.name,
            row=row,
        )
    return cells.within(cells.starts, lengths - len(ending))


def _fail(cells: Cells, index: int, column: str, problem: str, way_out: str = "") -> SourceError:
    row = int(cells.rows[index])
    text = f"column {column!r} of row {row} of {cells.file} {problem}"
    return SchemaError(
        f"{text}; {way_out}" if way_out else text, file=cells.file, row=row, column=column
    )


def _row(cells: Cells, index: int, problem: str) -> SourceError:
    row = int(cells.rows[index])
    return SourceError(f"row {row} of {cells.file} {problem}", file=cells.file, row=row)


def read_json(
    cells: Cells, shape: Shape, wanted: Sequence[tuple[str, pa.DataType]]
) -> list[pa.Array]:
    """Read rows of JSON.

    Args:
        cells: The rows.
        shape: The columns.
        wanted: Those to read, and their types.

    Raises:
        SourceError: If a row is no object with just these columns, or a value is of another type.
    """
    values: list[Any] = []  # flat, since the collector would walk through a tuple a row
    for row in _rows(cells, shape.names):
        values.extend(row)
    arrays = []
    for column, kind in wanted:
        place = shape.names.index(column)
        encoding = shape.encodings[place]
        own = values[place :: len(shape.names)]
        if set(map(type, own)) != {_PYTHON[encoding]}:
            index = next(i for i, v in enumerate(own) if type(v) is not _PYTHON[encoding])
            raise _fail(cells, index, column, f"is {own[index]!r:.60}, not of type {encoding}")
        arrays.append(_column(cells, column, own, kind))
    return arrays


def _rows(cells: Cells, names: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """The values of each row in the order of the names."""
    for index, data in enumerate(cells.bytes().to_pylist()):
        try:
            pairs = _JSON.decode(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _row(cells, index, f"is no JSON: {error}") from None
        keys, values = zip(*pairs, strict=True) if type(pairs) is tuple and pairs else ((), ())
        if keys == names:  # their writer sorts them
            yield values
        elif len(keys) == len(names) and set(keys) == set(names):
            yield tuple(value for _, value in sorted(pairs, key=itemgetter(0)))
        elif len(set(keys)) < len(keys):
            raise _row(cells, index, f"names a key twice: {', '.join(keys)}")
        else:
            shown = ", ".join(sorted(keys)) or data[:40]
            raise _row(cells, index, f"has {shown!r:.200}, not the columns {', '.join(names)}")


def _column(cells: Cells, column: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        try:
            return pa.array(values, kind)
        except (pa.ArrowInvalid, OverflowError):
            pass  # the text of the number names the row
    try:
        texts = pa.array([str(value) for value in values], pa.string())
    except UnicodeEncodeError:
        raise _surrogate(cells, column, values) from None
    if pa.types.is_large_binary(kind):
        return texts.cast(kind)
    return parse(texts, kind, lambda i, problem, way: _fail(cells, i, column, problem, way))


def _surrogate(cells: Cells, column: str, values: Sequence[str]) -> SourceError:
    for index, value in enumerate(values):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return _fail(cells, index, column, f"is no text that UTF-8 can hold: {error}")
    raise AssertionError


def read_separated(
    cells: Cells, shape: Shape, wanted: Sequence[tuple[str, pa.DataType]]
) -> list[pa.Array]:
    """Read rows of values between separators.

    Args:
        cells: The rows.
        shape: The columns.
        wanted: Those to read, and their types.

    Raises:
        SourceError: If a row has another number of values, or one is no number of its type.
    """
    width = len(shape.names)
    parts = pc.split_pattern(cells.bytes(), shape.separator)
    counts = pc.list_value_length(parts).to_numpy(zero_copy_only=False)
    if (counts != width).any():
        index = int(np.argmax(counts != width))
        raise _row(cells, index, f"has {counts[index]} values, not {width}: it is damaged")
    flat = parts.flatten()
    places = np.arange(len(cells), dtype=np.int64) * width
    arrays = []
    for column, kind in wanted:
        values = flat.take(pa.array(places + shape.names.index(column)))
        arrays.append(_typed(cells, column, values, kind))
    return arrays


def _typed(cells: Cells, column: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_large_binary(kind):
        return values.cast(kind)

    def fail(index: int, problem: str, way_out: str) -> SourceError:
        return _fail(cells, index, column, problem, way_out)

    texts = text(values, lambda index, problem: fail(index, problem, TEXT_AS_BYTES))
    return parse(texts, kind, fail)
