"""One schema from those of several files: what differs is named, never cast."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from destrier.errors import ColumnError, SchemaError
from destrier.formats.tabular.kinds import check_names, kept_field

__all__ = ["joined"]

_SHOWN = 20


def joined(
    schemas: Sequence[tuple[str, pa.Schema]], columns: Sequence[str] | None, missing: str
) -> pa.Schema:
    """The schema of a table of several files.

    A column has one type in all files, but for files where it is all null and has no type, and may
    hold nulls if it may in one of them.

    Args:
        schemas: The files as messages show them, and their schemas.
        columns: Those to read, in this order; None is all, in the first file's order.
        missing: ``"null"``: a column that a file lacks is null there. ``"error"``: it is refused.

    Raises:
        SchemaError: Naming two files, the column and both types.
        ColumnError: If a column is not there, or of a type that cannot be kept.
    """
    first, schema = schemas[0]
    known = dict.fromkeys(schema.names)
    if missing == "null":
        known = dict.fromkeys(name for _, other in schemas for name in other.names)
    for shown, other in schemas:
        twice = next((n for i, n in enumerate(other.names) if n in other.names[:i]), None)
        if twice is not None:
            raise SchemaError(f"{shown}: a column is named {twice!r} twice", file=shown)
    for name in columns if columns is not None else ():
        if name not in known:
            shown_names = ", ".join(list(known)[:_SHOWN])
            raise ColumnError(f"{first} has no column {name!r}; there are: {shown_names}")
    wanted = list(known) if columns is None else list(columns)
    check_names(wanted, first)
    if missing != "null":
        _check_present(schemas, wanted, every=columns is None)
    fields = [_field(name, schemas) for name in wanted]
    return pa.schema(fields, metadata=schema.metadata)


def _check_present(
    schemas: Sequence[tuple[str, pa.Schema]], wanted: Sequence[str], *, every: bool
) -> None:
    first = schemas[0][0]
    for shown, schema in schemas:
        names = set(schema.names)
        for name in wanted:
            if name not in names:
                raise SchemaError(
                    f"{shown} lacks the column {name!r}, which {first} has; with missing='null' it "
                    "is null there",
                    file=shown,
                    column=name,
                )
        more = [name for name in schema.names if name not in wanted] if every else []
        if more:
            raise SchemaError(
                f"{shown} has the column {more[0]!r}, which {first} lacks; with missing='null' it "
                "is null there, or say which to read with columns=[...]",
                file=shown,
                column=more[0],
            )


def _field(name: str, schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Field:
    found: tuple[str, pa.Field] | None = None
    nullable = False
    for shown, schema in schemas:
        index = schema.get_field_index(name)
        if index < 0:
            nullable = True
            continue
        field = kept_field(schema.field(index), shown)
        nullable = nullable or field.nullable
        if found is None or pa.types.is_null(found[1].type):
            found = shown, field
        elif not pa.types.is_null(field.type):
            kind = _either(found[1].type, field.type)
            if kind is None:
                raise SchemaError(
                    f"column {name!r} is {found[1].type} in {found[0]} and {field.type} in "
                    f"{shown}; nothing is cast: write one type, or convert them one by one",
                    file=shown,
                    column=name,
                )
            found = found[0], found[1].with_type(kind)
    assert found is not None
    return found[1].with_nullable(nullable)


def _either(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds values of both: they may differ in whether there are nulls."""
    if one.equals(other):
        return one
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        if [field.name for field in one] != [field.name for field in other]:
            return None
        children = [_child(a, b) for a, b in zip(one, other, strict=True)]
        return None if None in children else pa.struct(children)
    for test, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if test(one) and test(other):
            child = _child(one.value_field, other.value_field)
            return None if child is None else make(child)
    if pa.types.is_null(one) or pa.types.is_null(other):
        return other if pa.types.is_null(one) else one
    return None


def _child(one: pa.Field, other: pa.Field) -> pa.Field | None:
    kind = _either(one.type, other.type)
    return None if kind is None else pa.field(one.name, kind, one.nullable or other.nullable)
