"""Tables beside the files of a folder, which tell more of them, as Hugging Face's folders have."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from destrier.errors import SourceError
from destrier.files import File, Store
from destrier.formats.tabular.shapes import parse_line
from destrier.formats.tabular.text import RowFault

__all__ = ["Told", "is_metadata", "read_metadata"]

_NAMES = ("metadata.jsonl", "metadata.csv")
_FILE_NAME = "file_name"

Told = tuple[str, int]
"""A table as messages show it, and a row of it."""


def is_metadata(path: str) -> bool:
    """Whether it is a table about the files of its folder, by its name."""
    return path.rpartition("/")[2] in _NAMES


def read_metadata(
    store: Store, tables: Sequence[File], known: Sequence[str], chosen: Sequence[str]
) -> tuple[dict[str, list[Any]], list[Told | None]]:
    """Read what the tables tell of the files.

    Args:
        store: The folder.
        tables: The tables.
        known: All files that a table may name.
        chosen: The files that are rows.

    Returns:
        For each column its values in the order of the files, None where nothing is told, and
        for each file where it is told.

    Raises:
        SourceError: If a table is damaged, or names a file that is not there, or one twice.
    """
    there = set(known)
    told: dict[str, dict[str, Any]] = {}
    places: dict[str, Told] = {}
    names: dict[str, None] = {}
    for table in tables:
        shown = store.show(table.path)
        folder = table.path.rpartition("/")[0]
        for number, row in _rows(store, table):
            name = row.pop(_FILE_NAME, None)
            path = f"{folder}/{name}" if folder else name
            fault = None
            if not isinstance(name, str):
                fault = f"has no {_FILE_NAME}"
            elif path not in there:
                fault = f"names {name!r}, which is not there"
            elif path in told:
                fault = f"names {name!r}, as another row does"
            if fault is not None:
                raise SourceError(f"{shown}: row {number} {fault}", file=shown, row=number)
            told[str(path)] = row
            places[str(path)] = shown, number
            names |= dict.fromkeys(row)
    columns = {name: [told.get(path, {}).get(name) for path in chosen] for name in names}
    return columns, [places.get(path) for path in chosen]


def _rows(store: Store, table: File) -> Iterator[tuple[int, dict[str, Any]]]:
    shown = store.show(table.path)
    try:
        text = store.read(table.path).to_pybytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{shown} is not UTF-8 text: {error}", file=shown) from None
    return _lines(text, shown) if table.path.endswith(".jsonl") else _cells(text, shown)


def _lines(text: str, shown: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            yield number, parse_line(line, number)
        except RowFault as fault:
            raise SourceError(f"{shown}, row {number}: {fault}", file=shown, row=number) from None


def _cells(text: str, shown: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        names = reader.fieldnames or []
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SourceError(
                f"{shown} has two columns named {twice!r}; name one of them otherwise", file=shown
            )
        for number, cells in enumerate(reader):
            if None in cells or None in cells.values():
                raise SourceError(
                    f"{shown}: row {number} has another number of cells than the first line",
                    file=shown,
                    row=number,
                )
            yield number, dict(cells)
    except csv.Error as error:
        raise SourceError(f"{shown}: {error}", file=shown) from None
