"""Rows by key."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from destrier.columns import from_arrow
from destrier.editing.changes import latest
from destrier.editing.keys import check_key
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    MissingKeyError,
    ReadError,
    WriteError,
)
from destrier.lancecalls import lance_call
from destrier.table import Table, open_table

if TYPE_CHECKING:
    from destrier.keyed import Ints
    from destrier.read import Reader
    from destrier.table import TableLike

__all__ = ["find", "get", "index", "is_key", "read_rows"]

_EXACT = ("BTreeIndexDetails", "BitmapIndexDetails")  # indices that know which rows hold a value
_USUAL = ("key", "id")  # names of key columns, where no index tells
_KEYS_AT_ONCE = 10_000  # in one query
_SHOWN = 3
_warned: set[tuple[str, str]] = set()


def index(
    table: TableLike, column: str, *, storage_options: Mapping[str, str] | None = None
) -> int:
    """Make an index of a key column (Lance's BTREE), by which `get` finds rows without a scan.

    Args:
        table: The table.
        column: Of integers, text or bytes.
        storage_options: Passed to Lance untouched.

    Returns:
        The version with the index. Rows appended later are scanned until the index is made anew
        or ``dataset.optimize.optimize_indices()`` has taken them in.

    Raises:
        ColumnError: If the column cannot be a key.
        WriteError: If Lance cannot make the index.

    Example:
        >>> index("digits.lance", "id")  # doctest: +SKIP
        2
    """
    opened = latest(table, storage_options)
    check_key(opened, column)
    try:
        lance_call(
            f"indexing {opened.name}",
            lambda: opened.dataset.create_scalar_index(column, "BTREE"),
            opened.secrets,
        )
    except ReadError as error:
        raise WriteError(str(error)) from error
    return int(opened.dataset.version)


@overload
def get(  # type: ignore[overload-overlap]  # a str is a sequence of them, for a type checker
    table: TableLike,
    key: int | str | bytes,
    *,
    on: str | None = None,
    columns: Sequence[str] | None = None,
    version: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, Any]: ...


@overload
def get(
    table: TableLike,
    key: Sequence[int | str | bytes] | np.ndarray[Any, Any] | pa.Array,
    *,
    on: str | None = None,
    columns: Sequence[str] | None = None,
    version: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]: ...


def get(
    table: TableLike,
    key: Any,
    *,
    on: str | None = None,
    columns: Sequence[str] | None = None,
    version: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, Any] | list[dict[str, Any]]:
    """Read the row of a key, or the rows of several in their order.

    Blob and linked columns come as bytes, tensors as numpy arrays, all others as Python values.
    Without an index the key column is scanned.

    Args:
        table: The table.
        key: An int, str or bytes, as the key column's type is; or a list or array of them.
        on: The key column; None is the one that has an index, else ``key`` or ``id``.
        columns: Those to read; None reads all.
        version: A version or tag; None is the latest of a URI, or the one an open table is at.
        storage_options: Passed to Lance untouched.

    Raises:
        MissingKeyError: If no row has the key; it is a KeyError too.
        ArgumentError: If the key is not of the column's type, or several rows have it.
        ColumnError: If the column cannot be a key.

    Example:
        >>> get("digits.lance", 7, columns=["label"])  # doctest: +SKIP
        {'label': 0}
    """
    opened = open_table(table, version=version, storage_options=storage_options)
    names = opened.schema.names if columns is None else list(columns)
    opened.check_columns(names)
    _, offsets = find(opened, key, on)
    rows = _read(opened, names, offsets)
    return rows[0] if is_key(key) else rows


def is_key(key: Any) -> bool:
    """Whether it is one key, not several."""
    return isinstance(key, int | str | bytes | np.integer)


def find(table: Table, key: Any, on: str | None) -> tuple[list[int | str | bytes], list[int]]:
    """Find the rows of keys.

    Args:
        table: The table.
        key: One key or several, as `get` takes them.
        on: The key column; None as for `get`.

    Returns:
        The keys, and the row offset of each.
    """
    indexed = _indexed(table)
    column = _key_column(table, indexed) if on is None else on
    kind = check_key(table, column).type
    keys = [_checked(value, kind, column) for value in ([key] if is_key(key) else _listed(key))]
    if column not in indexed and (table.uri, column) not in _warned:
        _warned.add((table.uri, column))
        warnings.warn(
            f"{table.name} has no index of column {column!r}, so the column is scanned each time; "
            f"destrier.index(table, {column!r}) makes one",
            DestrierWarning,
            stacklevel=3,
        )
    return keys, _offsets(table, column, keys)


def _indexed(table: Table) -> list[str]:
    """The columns that have a scalar index of their own."""
    described = lance_call(
        f"listing the indices of {table.name}", table.dataset.describe_indices, table.secrets
    )
    return sorted(
        {
            each.field_names[0]
            for each in described
            if len(each.field_names) == 1 and each.type_url.rsplit(".", 1)[-1] in _EXACT
        }
    )


def _key_column(table: Table, indexed: list[str]) -> str:
    if len(indexed) == 1:
        return indexed[0]
    usual = [name for name in _USUAL if name in (indexed or table.schema.names)]
    if usual:
        return usual[0]
    which = f"indices of {', '.join(indexed)}" if indexed else "no index, and no column key or id"
    raise ColumnError(f"{table.name} has {which}: name the key column with on=")


def _listed(keys: Any) -> list[Any]:
    if isinstance(keys, pa.Array | pa.ChunkedArray):
        return list(keys.to_pylist())
    if isinstance(keys, Sequence | np.ndarray):
        return list(keys)
    raise ArgumentError(
        f"a key is an int, str or bytes, or a list of them, got {type(keys).__name__}"
    )


def _checked(key: Any, kind: pa.DataType, column: str) -> int | str | bytes:
    value = int(key) if isinstance(key, np.integer) else key
    wanted: type = bytes
    if pa.types.is_integer(kind):
        wanted = int
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        wanted = str
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ArgumentError(
            f"key {key!r} is {type(key).__name__}, but column {column!r} is {kind}: give "
            f"{wanted.__name__}"
        )
    assert isinstance(value, int | str | bytes)
    return value


def _offsets(table: Table, column: str, keys: list[int | str | bytes]) -> list[int]:
    from lancedb.util import value_to_sql

    kind = table.schema.field(column).type
    possible = list(dict.fromkeys(key for key in keys if _fits(key, kind)))
    found: dict[Any, int] = {}
    for start in range(0, len(possible), _KEYS_AT_ONCE):
        listed = ", ".join(value_to_sql(key) for key in possible[start : start + _KEYS_AT_ONCE])
        scanner = table.dataset.scanner(
            columns=["_rowoffset", column], filter=f"`{column}` IN ({listed})"
        )
        rows = lance_call(f"looking up keys in {table.name}", scanner.to_table, table.secrets)
        held, offsets = (rows.column(name).to_pylist() for name in (column, "_rowoffset"))
        for key, offset in zip(held, offsets, strict=True):
            if key in found:
                raise ArgumentError(
                    f"two rows of {table.name} have the key {key!r} (column {column!r}): "
                    f"{found[key]} and {offset}"
                )
            found[key] = offset
    missing = [key for key in keys if key not in found]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MissingKeyError(
            f"no row of {table.name} has the key {', '.join(map(repr, missing[:_SHOWN]))}{more} "
            f"(column {column!r})"
        )
    return [found[key] for key in keys]


def _fits(key: int | str | bytes, kind: pa.DataType) -> bool:
    """Whether the column could hold the key: Lance takes no number beyond its type."""
    try:
        pa.scalar(key, kind)
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


def _read(table: Table, names: list[str], offsets: list[int]) -> list[dict[str, Any]]:
    if not names or not offsets:
        return [{} for _ in offsets]
    from destrier.read import Reader  # which imports torch

    return read_rows(Reader(table, names), np.array(offsets, np.int64))


def read_rows(reader: Reader, offsets: Ints) -> list[dict[str, Any]]:
    """Read rows as dicts, in one request for all of them."""
    rows = reader.read(offsets)
    values = [_values(rows.batch.column(name)) for name in reader.columns]
    places = range(len(offsets)) if rows.index is None else rows.index.tolist()
    return [dict(zip(reader.columns, (each[i] for each in values), strict=True)) for i in places]


def _values(array: pa.Array) -> list[Any]:
    if not isinstance(array.type, pa.FixedShapeTensorType):
        return list(array.to_pylist())
    valid = array.is_valid().to_pylist()
    tensors = list(from_arrow(array).values)
    return [tensor if there else None for tensor, there in zip(tensors, valid, strict=True)]
