"""Rows from files of tables: Parquet, Arrow IPC, CSV, JSON lines, Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.files import Store
from destrier.formats.listing import is_pattern
from destrier.formats.tabular.csv import CsvSource
from destrier.formats.tabular.discover import Found, find, format_of, listing, tabular_format
from destrier.formats.tabular.export import ParquetSink
from destrier.formats.tabular.huggingface import find_split, is_dataset
from destrier.formats.tabular.ipc import ArrowSource
from destrier.formats.tabular.jsonl import JsonSource
from destrier.formats.tabular.parquet import ParquetSource
from destrier.sink import Sink
from destrier.writing.source import Source

__all__ = ["FORMATS", "ParquetSink", "detect", "open_sink", "open_source"]

FORMATS = ("parquet", "arrow", "csv", "jsonl", "hf")
"""The names of the formats here."""

_CSV = ("schema", "missing", "delimiter", "null_values", "quote_char", "newlines_in_values")
_OPTIONS = {
    "parquet": ("missing",),
    "arrow": ("missing",),
    "csv": (*_CSV, "header", "column_names"),
    "jsonl": ("schema",),
}
_SOURCES: dict[str, Any] = {
    "parquet": ParquetSource,
    "arrow": ArrowSource,
    "csv": CsvSource,
    "jsonl": JsonSource,
}
_MAGICS = {b"PAR1": "parquet", b"PARE": "parquet", b"ARROW1": "arrow", b"FEA1": "arrow"}


def detect(store: Store) -> str | None:
    """The name of the format of a file, a folder or a pattern of files; None if it is none here.

    Raises:
        SourceError: If a folder holds files of several formats.
    """
    root, files = listing(store)
    if not files:
        return "hf" if store.scheme == "hf" else None
    if len(files) == 1 and not files[0].path:
        return _file_format(store)
    if root is store and is_dataset(store, [file.path for file in files]):
        return "hf"
    return tabular_format(root, files)


def _file_format(store: Store) -> str | None:
    """The format of one file, by its name or else its first bytes."""
    name, compression = format_of(store.uri)
    if name is not None or compression is not None:
        return name
    with store.open() as file:
        head = file.read(8)
    for magic, format in _MAGICS.items():
        if head.startswith(magic):
            return format
    is_json = (
        store.uri.lower().endswith(".json")
        and head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    )
    return "jsonl" if is_json else None


def open_source(
    store: Store,
    *,
    format: str,
    columns: Sequence[str] | None = None,
    link: bool = False,
    split: str | None = None,
    config: str | None = None,
    schema: pa.Schema | None = None,
    missing: str = "error",
    delimiter: str | None = None,
    null_values: Sequence[str] = ("",),
    quote_char: str | None = '"',
    newlines_in_values: bool = False,
    header: bool = True,
    column_names: Sequence[str] | None = None,
) -> Source:
    """Open files of a table.

    Args:
        store: A file, a folder (read with all folders below it, in natural order of the paths), or
            a pattern such as ``data/*.parquet``, see `destrier.formats.listing.matching`.
        format: One of `FORMATS`.
        columns: Those to read, in this order; None is all.
        link: Not possible here.
        split: Of a Hugging Face dataset, where there are several.
        config: Of a Hugging Face dataset, where its README names several.
        schema: CSV and JSON lines: types of some or all columns, instead of those found.
        missing: ``"null"``: a column that a file lacks is null there. ``"error"`` refuses it.
        delimiter: CSV: between values; None is a tab in ``.tsv`` files and a comma in others.
        null_values: CSV: unquoted texts that stand for a null.
        quote_char: CSV: around values that hold the delimiter; None if quotes are text.
        newlines_in_values: CSV: whether quoted values may hold line ends.
        header: CSV: whether the first row of each file has the names.
        column_names: CSV: the names, instead of those in the header.

    Raises:
        ArgumentError: If an option is none of the format's, or there are splits to choose from.
        ColumnError: If a column is not there or cannot be kept exactly.
        SourceError: If there are no files, or they are damaged.
        SchemaError: If files differ in their columns.
    """
    if link:
        raise ArgumentError(
            f"{format} cannot be linked: its values are encoded in pages, batches or text, and are "
            "no ranges of bytes; use destrier.convert"
        )
    if format == "hf":
        found = _found_in_hub(store, split, config)
    elif format not in _SOURCES:
        raise ArgumentError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    elif split is not None or config is not None:
        raise ArgumentError(f"split= and config= are of format='hf', not of format={format!r}")
    else:
        found = find(store, format)
    if missing not in ("error", "null"):
        raise ArgumentError(f"missing is 'error' or 'null', not {missing!r}")
    given = {
        name: value
        for name, value, default in (
            ("schema", schema, None),
            ("missing", missing, "error"),
            ("delimiter", delimiter, None),
            ("null_values", null_values, ("",)),
            ("quote_char", quote_char, '"'),
            ("newlines_in_values", newlines_in_values, False),
            ("header", header, True),
            ("column_names", column_names, None),
        )
        if value != default
    }
    known = _OPTIONS[found.format]
    for name in given:
        if name not in known:
            raise ArgumentError(
                f"{name}= is no option of {found.format} files; there are: {', '.join(known)}"
            )
    if columns is not None:
        _check_columns(columns)
    source: Source = _SOURCES[found.format](found, columns=columns, **given)
    return source


def open_sink() -> Sink:
    """Make what writes a table as Parquet files."""
    return ParquetSink()


def _found_in_hub(store: Store, split: str | None, config: str | None) -> Found:
    if store.stat() is not None or is_pattern(store):
        format = detect(store)
        if format is None or format == "hf":
            raise SourceError(f"{store.shown}: there are no files there that are read as rows")
        return find(store, format)
    return find_split(store, split, config)


def _check_columns(columns: Sequence[str]) -> None:
    if isinstance(columns, str):
        raise ArgumentError(f"columns is a list of names, not the text {columns!r}")
    if not columns:
        raise ArgumentError("columns is empty: a table has a column at least")
    twice = next((name for i, name in enumerate(columns) if name in columns[:i]), None)
    if twice is not None:
        raise ArgumentError(f"columns names {twice!r} twice")
