"""Edits of a table: append, delete, update, upsert, tag. All are Lance's; here they are checked.

Every edit is made on the latest version of the table, whichever version was opened, and makes one
new version: readers see all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import lance
import pyarrow as pa

from destrier.editing.conform import conform, plain_schema
from destrier.editing.keys import check_key, check_keys
from destrier.errors import ArgumentError, ColumnError, FilterError, ReadError, WriteError
from destrier.lancecalls import lance_call
from destrier.saving import on_one_thread
from destrier.table import Table, open_table
from destrier.writing.layout import is_blob

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = [
    "Changes",
    "append",
    "delete",
    "latest",
    "tag",
    "update",
    "upsert",
    "write_through",
]

_T = TypeVar("_T")
_VALUE = "_value"  # the name of an expression that is only planned


@dataclass(frozen=True)
class Changes:
    """What an edit did.

    Attributes:
        version: The table's version after it.
        inserted: Number of rows that are new.
        updated: Number of rows that were changed.
        deleted: Number of rows that are gone.
    """

    version: int
    inserted: int = 0
    updated: int = 0
    deleted: int = 0


def latest(table: TableLike, storage_options: Mapping[str, str] | None = None) -> Table:
    """The latest version of a table, whichever version is opened."""
    opened = open_table(table, storage_options=storage_options)
    return open_table(opened.uri, storage_options=opened.storage_options)


def append(table: TableLike, data: Any, *, storage_options: Mapping[str, str] | None = None) -> int:
    """Append rows in one commit.

    Args:
        table: The table.
        data: A table, batch or reader of Arrow, a polars frame, a list of dicts, or an iterable of
            batches or dicts. It must have the table's columns, in any order, and their types; blob
            columns come as bytes.
        storage_options: Passed to Lance untouched.

    Returns:
        The new version; the same one if there were no rows.

    Raises:
        SchemaError: If a column is missing, unknown, or of another type: nothing is coerced.
        WriteError: If it cannot be written. In all cases the table is then as it was.

    Example:
        >>> append("digits.lance", [{"id": 2000, "label": 3}])  # doctest: +SKIP
        2
    """
    opened = latest(table, storage_options)
    batches = conform(data, opened.schema, opened.name)
    first = next(batches, None)
    if first is None:
        return opened.version

    def rows() -> Iterator[pa.RecordBatch]:
        yield first
        yield from batches

    options = dict(opened.storage_options) or None
    written = write_through(
        rows(),
        opened.schema,
        lambda reader: lance.write_dataset(
            reader, opened.uri, mode="append", storage_options=options
        ),
        f"appending to {opened.name}",
        opened.secrets,
    )
    return int(written.version)


def write_through(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    write: Callable[[pa.RecordBatchReader], _T],
    doing: str,
    secrets: Iterable[str],
) -> _T:
    """Let Lance write batches; what raises in them surfaces as it is, not as Lance tells it.

    Args:
        batches: What is written; asked for on one thread.
        schema: Of the batches.
        write: The call of Lance.
        doing: What it does, for errors.
        secrets: What errors must not show.

    Raises:
        WriteError: If Lance cannot write.
    """
    raised: list[BaseException] = []

    def noted() -> Iterator[pa.RecordBatch]:
        try:
            yield from on_one_thread(batches)
        except BaseException as error:
            raised.append(error)
            raise

    reader = pa.RecordBatchReader.from_batches(schema, noted())
    try:
        written: _T = lance_call(doing, lambda: write(reader), secrets)
    except ReadError as error:
        if raised:
            raise raised[0] from None
        raise WriteError(str(error)) from error
    return written


def delete(
    table: TableLike, where: str, *, storage_options: Mapping[str, str] | None = None
) -> Changes:
    """Delete the rows for which a filter is true. Their files stay; later rows move up.

    Args:
        table: The table.
        where: In Lance's SQL, such as ``"quality < 0.1"``.
        storage_options: Passed to Lance untouched.

    Raises:
        FilterError: If Lance cannot run the filter.

    Example:
        >>> delete("digits.lance", "quality < 0.1").deleted  # doctest: +SKIP
        200
    """
    opened = latest(table, storage_options)
    _check_filter(opened, where)
    done = _edit(opened, "deleting", lambda: opened.dataset.delete(where))
    return Changes(opened.dataset.version, deleted=done["num_deleted_rows"])


def update(
    table: TableLike,
    where: str | None,
    values: Mapping[str, Any] | None = None,
    *,
    sql: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Changes:
    """Change columns of the rows for which a filter is true.

    The changed rows are written anew, behind all others: the order of the table's rows changes,
    and a stream that is to resume must have been saved with its version.

    Args:
        table: The table.
        where: In Lance's SQL; None changes all rows.
        values: By column the new value, of the column's type. A str is a value, not SQL.
        sql: By column an expression in Lance's SQL, such as ``"label + 1"``.
        storage_options: Passed to Lance untouched.

    Raises:
        FilterError: If Lance cannot run the filter or an expression.
        ColumnError: If a column is not there, or has values that SQL cannot say.
        SchemaError: If a value is not of the column's type; nothing is coerced.

    Example:
        >>> update("digits.lance", "id = 7", {"author": "O'Hara"}).updated  # doctest: +SKIP
        1
    """
    opened = latest(table, storage_options)
    values, sql = values or {}, sql or {}
    if not values and not sql:
        raise ArgumentError("update changes nothing: give values= or sql=")
    twice = sorted(set(values) & set(sql))
    if twice:
        raise ArgumentError(f"both a value and an expression are given for {', '.join(twice)}")
    opened.check_columns([*values, *sql])
    if where is not None:
        _check_filter(opened, where)
    for column, expression in sql.items():
        _check_expression(opened, column, expression)
    updates = {**_literals(opened, values), **sql}
    done = _edit(opened, "updating", lambda: opened.dataset.update(updates, where))
    return Changes(opened.dataset.version, updated=done["num_rows_updated"])


def upsert(
    table: TableLike,
    data: Any,
    on: str,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> Changes:
    """Replace the rows that have the keys of the data, and append those with new keys.

    The data is held in memory. Replaced rows are written anew, behind all others, as by `update`.

    Args:
        table: The table.
        data: Whole rows, as `append` takes them.
        on: The key column, of integers, text or bytes.
        storage_options: Passed to Lance untouched.

    Raises:
        ColumnError: If the column cannot be a key.
        ArgumentError: If a key is null or comes twice in the data.
        SchemaError: If the data is not of the table's columns and types.

    Example:
        >>> upsert("digits.lance", rows, on="id")  # doctest: +SKIP
        Changes(version=3, inserted=10, updated=2, deleted=0)
    """
    opened = latest(table, storage_options)
    check_key(opened, on)
    rows = pa.Table.from_batches(conform(data, opened.schema, opened.name), schema=opened.schema)
    check_keys(rows.column(on).combine_chunks(), on)
    if not rows.num_rows:
        return Changes(opened.version)

    def run() -> Any:
        builder = opened.dataset.merge_insert(on)
        builder = builder.when_matched_update_all().when_not_matched_insert_all()
        return builder.execute(rows)

    done = _edit(opened, "upserting", run)
    return Changes(
        latest(opened).version, inserted=done["num_inserted_rows"], updated=done["num_updated_rows"]
    )


def tag(
    table: TableLike,
    name: str,
    *,
    version: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> int:
    """Tag a version, so that it can be opened by name and no cleanup removes it.

    Args:
        table: The table.
        name: Of the tag.
        version: None is the latest of a URI, or the one that an open table is at.
        storage_options: Passed to Lance untouched.

    Returns:
        The tagged version.

    Raises:
        VersionError: If the version is not there, or the name is another version's.

    Example:
        >>> tag("digits.lance", "run-1")  # doctest: +SKIP
        1
    """
    return open_table(table, version=version, storage_options=storage_options, pin=name).version


def _edit(table: Table, doing: str, function: Callable[[], _T]) -> _T:
    try:
        done: _T = lance_call(f"{doing} rows of {table.name}", function, table.secrets)
    except ReadError as error:
        raise WriteError(f"{error}; the table is as it was") from error
    return done


def _check_filter(table: Table, where: str) -> None:
    """Let Lance plan the filter, which tells its faults from those of the edit."""
    if not isinstance(where, str):
        raise FilterError(f"where is a filter in Lance's SQL, got {type(where).__name__}")
    _plan(table, f"the filter {where!r}", lambda: table.dataset.scanner(filter=where, limit=1))


def _check_expression(table: Table, column: str, expression: str) -> None:
    """Raise if Lance would cast what the expression gives with loss, as it does in silence."""
    what = f"the expression {expression!r} for column {column!r}"
    planned = plan_expression(table, what, expression, column)
    given, wanted = planned.field(_VALUE).type, table.schema.field(column).type
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    numeric = any(kind(wanted) for kind in kinds)
    lossy = pa.types.is_integer(wanted) and (
        pa.types.is_floating(given) or pa.types.is_decimal(given) or pa.types.is_string(given)
    )
    text = pa.types.is_string(wanted) or pa.types.is_large_string(wanted)
    if lossy or (text and any(kind(given) for kind in kinds)) or (numeric and _is_text(given)):
        raise FilterError(
            f"{what} of {table.name} gives {given}, but the column is {wanted}; nothing is "
            f"coerced: write CAST(... AS ...) or round(...) yourself"
        )


def plan_expression(table: Table, what: str, expression: str, beside: str) -> pa.Schema:
    """Let Lance plan an expression; it gives the type of the field `_VALUE`.

    Args:
        table: On whose rows it is to be run.
        what: It is, for the error.
        expression: In Lance's SQL.
        beside: Any column: of constants alone Lance makes no scan.

    Raises:
        FilterError: If Lance cannot run it, naming the columns.
    """
    if not isinstance(expression, str):
        raise FilterError(f"{what} is {type(expression).__name__}, not SQL")
    named = {_VALUE: expression, "_beside": f"`{beside}`"}
    return _plan(table, what, lambda: table.dataset.scanner(columns=named))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _plan(table: Table, what: str, function: Callable[[], Any]) -> pa.Schema:
    def run() -> pa.Schema:
        scanner = function()
        scanner.explain_plan()
        return scanner.projected_schema

    try:
        return lance_call("it failed", run, table.secrets)
    except ReadError as error:
        raise FilterError(
            f"cannot run {what} on {table.name}: {error}; its columns are: "
            f"{', '.join(table.schema.names)}"
        ) from error


def _literals(table: Table, values: Mapping[str, Any]) -> dict[str, str]:
    """Values as SQL, once they are found to be of the columns' types."""
    if not values:
        return {}
    from lancedb.util import value_to_sql

    schema = pa.schema([table.schema.field(name) for name in values])
    for field in schema:
        if is_blob(field):
            raise ColumnError(
                f"column {field.name!r} of {table.name} holds blobs, which SQL cannot set: use "
                "upsert"
            )
    batches = list(conform([dict(values)], plain_schema(schema), table.name))
    found = {}
    for name in values:
        value = batches[0].column(name)[0].as_py()
        try:
            found[name] = value_to_sql(value)
        except NotImplementedError:
            raise ColumnError(
                f"a {table.schema.field(name).type} cannot be said in SQL, which column {name!r} "
                f"of {table.name} would need: use upsert"
            ) from None
    return found
