"""Chunks that hold rows as Arrow, whose types may differ from chunk to chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import pyarrow as pa

from destrier.errors import SchemaError, SourceError
from destrier.formats.batches import checked, gathered, split
from destrier.formats.litdata.chunk import Rows
from destrier.formats.litdata.ipc import decode_names, open_stream, stream_schema
from destrier.formats.litdata.places import Place
from destrier.formats.litdata.reading import column_field

__all__ = ["Merged", "read_rows", "rows_schema"]

_HEAD_BYTES = 64 << 10  # which hold most schemas
_FAILURES = (pa.ArrowException, OSError, MemoryError, ValueError, TypeError, KeyError)


class Merged:
    """The columns of all chunks, merged: what is null in one takes the other's type.

    Args:
        promote: Whether integers and floats together are floats.
        columns: Those to merge; None merges all.
    """

    def __init__(self, *, promote: bool, columns: Collection[str] | None = None) -> None:
        self.promote = promote
        self.names: list[str] = []
        self._columns = columns
        self._types: dict[str, tuple[pa.DataType, str]] = {}

    def add(self, schema: pa.Schema, file: str) -> None:
        """Merge the columns of a chunk.

        Raises:
            SchemaError: If a column has another type than in a chunk before; it names both.
        """
        self.names += [name for name in schema.names if name not in self.names]
        for column in schema:
            if self._columns is not None and column.name not in self._columns:
                continue
            kind = _kept(column.type, column.name, file)
            known = self._types.get(column.name)
            if known is None:
                self._types[column.name] = (kind, file)
                continue
            merged = self._merge(known[0], kind, column.name, (known[1], file))
            origin = known[1] if merged == known[0] else file
            self._types[column.name] = (merged, origin)

    def _merge(
        self, left: pa.DataType, right: pa.DataType, name: str, files: tuple[str, str]
    ) -> pa.DataType:
        if left == right or pa.types.is_null(right):
            return left
        if pa.types.is_null(left):
            return right
        if pa.types.is_list(left) and pa.types.is_list(right):
            inner = self._merge(left.value_type, right.value_type, f"{name}[]", files)
            return pa.list_(inner)
        if pa.types.is_struct(left) and pa.types.is_struct(right):
            fields = {field.name: field.type for field in left}
            for field in right:
                known = fields.get(field.name, pa.null())
                fields[field.name] = self._merge(known, field.type, f"{name}.{field.name}", files)
            return pa.struct(list(fields.items()))
        numbers = pa.types.is_integer(left) and pa.types.is_floating(right)
        numbers = numbers or (pa.types.is_floating(left) and pa.types.is_integer(right))
        if numbers and self.promote:
            return pa.float64()
        way = "pass promote=True to read both as float64, or leave" if numbers else "leave"
        raise SchemaError(
            f"column {name!r} is {left} in {files[0]} and {right} in {files[1]}: {way} the column "
            "out with columns=",
            file=files[1],
            column=name,
        )

    @property
    def schema(self) -> pa.Schema:
        """The columns, in the order in which they first came."""
        return pa.schema(
            [
                column_field(name, kind, "json" if pa.types.is_nested(kind) else None)
                for name, (kind, _) in self._types.items()
            ]
        )


def _kept(kind: pa.DataType, name: str, file: str) -> pa.DataType:
    types = pa.types
    if types.is_binary(kind):
        return pa.large_binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_kept(kind.value_type, f"{name}[]", file))
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise SourceError(f"{file}: column {name!r} has a field twice", file=file, column=name)
        return pa.struct([(f.name, _kept(f.type, f"{name}.{f.name}", file)) for f in kind])
    if (
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
    ):
        return kind
    raise SourceError(
        f"{file}: column {name!r} is {kind}, which LitData's rows cannot have", file=file
    )


def _open(rows: Rows, place: Place) -> pa.RecordBatchReader:
    try:
        reader = open_stream(rows.read())
        decode_names(reader.schema)
        return reader
    except _FAILURES as error:
        raise place.damaged(f"its Arrow rows are damaged: {error}") from None


def _read_schema(rows: Rows, place: Place) -> pa.Schema:
    head = rows.read(_HEAD_BYTES)
    with contextlib.suppress(*_FAILURES):  # it may be longer
        return stream_schema(head)
    return _open(rows, place).schema


def rows_schema(rows: Rows, place: Place) -> pa.Schema:
    """The columns of a chunk.

    Raises:
        SourceError: If it is damaged.
    """
    schema = _read_schema(rows, place)
    if len(set(schema.names)) < len(schema.names):
        raise place.damaged(f"has a column twice: {', '.join(schema.names)}")
    return schema


def _raw(rows: Rows, place: Place) -> Iterator[pa.RecordBatch]:
    reader = _open(rows, place)
    seen = 0
    try:
        for batch in reader:
            yield checked(batch, place.file, seen)
            seen += batch.num_rows
    except _FAILURES as error:
        if isinstance(error, SourceError):
            raise
        raise place.damaged(f"its Arrow rows are damaged: {error}", seen) from None
    if seen != rows.rows:
        raise place.damaged(f"has {rows.rows:,} samples, but {seen:,} Arrow rows")


def read_rows(rows: Rows, schema: pa.Schema, place: Place) -> Iterator[pa.RecordBatch]:
    """Read a chunk into the columns of all chunks.

    Raises:
        SourceError: If it is damaged.
        SchemaError: If a value does not fit the column's type.
    """
    seen = 0
    for batch in gathered(_raw(rows, place)):
        arrays = [_column(batch, field, place, seen) for field in schema]
        seen += batch.num_rows
        yield from split(pa.RecordBatch.from_arrays(arrays, schema=schema))


def _column(batch: pa.RecordBatch, field: pa.Field, place: Place, first: int) -> pa.Array:
    number = batch.schema.get_field_index(field.name)
    if number < 0:
        return pa.nulls(batch.num_rows, field.type)
    try:
        return _fitted(batch.column(number), field.type)
    except pa.ArrowInvalid as error:
        raise Place(place.file, first, field.name).other_type(
            f"does not fit {field.type}: {error}", 0
        ) from None


def _fitted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if not pa.types.is_nested(kind):
        return array.cast(kind)
    whole = pa.concat_arrays([array])  # without an offset
    if pa.types.is_struct(kind) and pa.types.is_struct(array.type):
        children = []
        for field in kind:
            number = whole.type.get_field_index(field.name)
            child = pa.nulls(len(whole)) if number < 0 else whole.field(number)
            children.append(_fitted(child, field.type))
        return pa.Array.from_buffers(kind, len(whole), whole.buffers()[:1], children=children)
    if pa.types.is_list(kind) and pa.types.is_list(array.type):
        child = _fitted(whole.values, kind.value_type)
        return pa.Array.from_buffers(kind, len(whole), whole.buffers()[:2], children=[child])
    return array.cast(kind)
