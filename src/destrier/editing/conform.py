"""Rows of a user made batches of a table's schema: nothing is coerced, blobs become blobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa
from lance.blob import BlobType

from destrier.errors import ArgumentError, SchemaError
from destrier.writing.layout import is_blob

__all__ = ["blob_array", "conform", "one_kind", "plain_schema"]

_SAME = {  # layouts of the same values: a cast between them changes no value
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}


def one_kind(kind: pa.DataType) -> pa.DataType:
    """The type with the layout of its text, bytes and lists made one: ``large_string`` a string."""
    if kind in _SAME:
        return _SAME[kind]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(one_kind(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(one_kind(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, one_kind(field.type)) for field in kind])
    return kind


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A table's schema with its blob columns as bytes, as a user has them."""
    fields = [pa.field(f.name, pa.large_binary()) if is_blob(f) else f for f in schema]
    return pa.schema(fields)


def blob_array(
    data: pa.Array,
    uri: pa.Array | None = None,
    position: pa.Array | None = None,
    size: pa.Array | None = None,
) -> pa.Array:
    """Blobs from bytes, or where those are null from ranges of other files.

    Args:
        data: Large binary.
        uri: Strings, or None if no value is a range.
        position: Unsigned 64-bit.
        size: Unsigned 64-bit; null with its position for a whole file.
    """
    rows = len(data)
    numbers = pa.nulls(rows, pa.uint64())
    parts = [
        data,
        pa.nulls(rows, pa.string()) if uri is None else uri,
        numbers if position is None else position,
        numbers if size is None else size,
    ]
    missing = data.is_null() if uri is None else pa.compute.and_(data.is_null(), uri.is_null())
    storage = pa.StructArray.from_arrays(
        parts, ["data", "uri", "position", "size"], mask=missing if len(missing) else None
    )
    return pa.ExtensionArray.from_storage(BlobType(), storage)


def conform(data: Any, schema: pa.Schema, name: str) -> Iterator[pa.RecordBatch]:
    """Batches of a table's schema from what a user gave.

    Columns are matched by name. Their types must be equal; only the layout of text and bytes
    (``large_string``, ``string_view``) is made the table's.

    Args:
        data: A table, batch or reader of Arrow, a polars frame, dict rows, or an iterable of
            batches or dict rows.
        schema: The table's.
        name: The table's, for errors.

    Raises:
        ArgumentError: If the data is of no known kind.
        SchemaError: If a column is missing, is not the table's, or is of another type.
    """
    row = 0
    for batch in _batches(data, schema):
        _check_names(batch.schema.names, schema, name, row)
        arrays = [_column(batch.column(field.name), field, name, row) for field in schema]
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        row += batch.num_rows


def _batches(data: Any, schema: pa.Schema) -> Iterable[pa.RecordBatch]:
    kind = type(data)
    if kind.__module__.startswith("polars") and hasattr(data, "to_arrow"):
        data = data.to_arrow()
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        # a table without rows has a schema to check too
        return list(data.to_batches() or [_nothing(data.schema)])
    if isinstance(data, pa.RecordBatchReader):
        data = iter(data)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        items = iter(data)
        first = next(items, None)
        if first is None:
            return []
        if isinstance(first, pa.RecordBatch):
            return _only(pa.RecordBatch, chain([first], items))
        if isinstance(first, Mapping):
            return _encoded(_only(Mapping, chain([first], items)), schema)
        kind = type(first)
    hint = "; take pyarrow.Table.from_pandas(frame)" if kind.__module__.startswith("pandas") else ""
    raise ArgumentError(
        "data is a table, batch or reader of Arrow, a polars DataFrame, a list of dicts, or an "
        f"iterable of batches or dicts; got {kind.__name__}{hint}"
    )


def _only(kind: type, items: Iterable[Any]) -> Iterator[Any]:
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            raise ArgumentError(
                f"item {number} of the data is {type(item).__name__}, the first ones are "
                f"{'batches' if kind is pa.RecordBatch else 'dicts'}"
            )
        yield item


def _encoded(rows: Iterator[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    from destrier.encoding.encoder import RowEncoder

    yield from RowEncoder(plain_schema(schema), declared=True).batches(rows)


def _nothing(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


def _check_names(given: list[str], schema: pa.Schema, name: str, row: int) -> None:
    for column in given:
        if column not in schema.names or given.count(column) > 1:
            what = "is there twice" if given.count(column) > 1 else f"is not in {name}"
            raise SchemaError(
                f"column {column!r} of the data {what}; the table's columns are: "
                f"{', '.join(schema.names)}",
                row=row,
                column=column,
            )
    for column in schema.names:
        if column not in given:
            raise SchemaError(
                f"the data lacks column {column!r} of {name}; give it, with nulls where there is "
                "no value",
                row=row,
                column=column,
            )


def _column(array: pa.Array, field: pa.Field, name: str, row: int) -> pa.Array:
    if array.null_count and not field.nullable:
        first = row + array.is_null().index(True).as_py()
        raise SchemaError(
            f"row {first} of the data is null in column {field.name!r}, which {name} does not "
            "allow",
            row=first,
            column=field.name,
        )
    if array.type == field.type:
        return array
    wanted = pa.large_binary() if is_blob(field) else field.type
    if one_kind(array.type) != one_kind(wanted):
        raise SchemaError(
            f"column {field.name!r} is {wanted} in {name} but {array.type} in the data; nothing "
            "is coerced: cast it yourself",
            row=row,
            column=field.name,
        )
    try:
        array = array.cast(wanted)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"column {field.name!r}: {error}", row=row, column=field.name) from None
    return blob_array(array) if is_blob(field) and field.type != wanted else array
