"""The types of JSON values, found or checked value by value."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pyarrow as pa

from destrier.formats.tabular.text import RowFault

__all__ = ["Shape", "check_value", "parse_line", "parsed_kind", "settled"]

_LOW, _HIGH = -(1 << 63), (1 << 63) - 1
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a fraction or exponent",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_KINDS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_LINE_SHOWN = 60


class _TwiceError(ValueError):
    """A key is there twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _TwiceError(f"the key {twice!r} is there twice in an object")
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_object)


def parse_line(line: str, row: int) -> dict[str, Any]:
    """The object of a line.

    Raises:
        RowFault: If it is none.
    """
    try:
        value = _decoder.decode(line)
    except _TwiceError as error:
        raise RowFault(row, str(error)) from None
    except RecursionError:
        raise RowFault(row, "the JSON is nested too deeply") from None
    except ValueError as error:
        shown = line if len(line) <= _LINE_SHOWN else f"{line[:_LINE_SHOWN]}..."
        raise RowFault(row, f"not JSON: {error}: {shown!r}") from None
    if "\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RowFault(row, "half of a surrogate pair, which is no character") from None
    if not isinstance(value, dict):
        more = "; a JSON array of objects must be written as one object a line"
        what = _NAMES[type(value)] + (more if isinstance(value, list) else "")
        raise RowFault(row, f"a line holds one object, this one holds {what}")
    return value


class Shape:
    """What a value was seen to be: null as long as it was nothing else."""

    __slots__ = ("fields", "item", "kind")

    def __init__(self) -> None:
        self.kind: type | None = None
        self.item: Shape | None = None
        self.fields: dict[str, Shape] = {}

    def see(self, value: Any, column: str, row: int) -> None:  # noqa: C901 - a table of kinds
        """Take a value into account.

        Raises:
            RowFault: If it is of another kind than those before it.
        """
        if value is None:
            return
        kind = type(value)
        if self.kind is None:
            self.kind = kind
        elif self.kind is not kind:
            raise RowFault(row, _mixed(column, self.kind, kind), column=column, schema=True)
        if kind is int:
            if not _LOW <= value <= _HIGH:
                raise RowFault(row, _too_large(column, value), column=column, schema=True)
        elif kind is list:
            if self.item is None:
                self.item = Shape()
            for item in value:
                self.item.see(item, column, row)
        elif kind is dict:
            for key, item in value.items():
                if key not in self.fields:
                    self.fields[key] = Shape()
                self.fields[key].see(item, column, row)

    def arrow(self) -> pa.DataType:
        """The Arrow type of what was seen."""
        if self.kind is None:
            return pa.null()
        if self.kind is list:
            return pa.list_(self.item.arrow() if self.item is not None else pa.null())
        if self.kind is dict:
            return pa.struct([(name, shape.arrow()) for name, shape in self.fields.items()])
        return _KINDS[self.kind]


def _mixed(column: str, one: type, other: type) -> str:
    way = "give the rows one type, or declare one with schema="
    if {one, other} == {int, float}:
        way = f"to have all as floats, declare that with schema=pa.schema([({column!r}, ...)])"
    return f"{_NAMES[other]}, where rows before have {_NAMES[one]}; {way}"


def _too_large(column: str, value: int) -> str:
    way = f"declare the column's type: schema=pa.schema([({column!r}, pa.uint64())])"
    return f"{value} is not in the range of 64-bit integers; {way}, a decimal or float64"


def check_value(  # noqa: C901, PLR0912 - a table of types
    value: Any, field: pa.Field, column: str, row: int, *, declared: bool
) -> None:
    """Raise if a JSON value is not exactly one of an Arrow type.

    Args:
        value: As Python reads it.
        field: Of the column, or in it.
        column: For messages.
        row: Likewise.
        declared: Whether the user says the type, so that whole numbers may be floats.

    Raises:
        RowFault: Naming both.
    """
    kind = field.type
    if value is None:
        if not field.nullable:
            reason = "no value, but it is declared to have no nulls"
            raise RowFault(row, reason, column=column, schema=True)
        return
    mine = type(value)
    types = pa.types
    inside = "" if field.name == column else f" (in {field.name!r})"
    fault = RowFault(
        row,
        f"{_NAMES[mine]}{inside}, but the column is {kind}: the type that the beginning of the "
        f"source has, or schema= declares; declare another with schema=pa.schema([({column!r}, "
        "...)])",
        column=column,
        schema=True,
    )
    if types.is_struct(kind):
        if mine is not dict:
            raise fault
        for key, item in value.items():
            index = kind.get_field_index(key)
            if index < 0:
                reason = (
                    f"the key {key!r}, which no row at the beginning has; declare the type of "
                    f"{column!r} with schema=pa.schema([({column!r}, ...)])"
                )
                raise RowFault(row, reason, column=column, schema=True)
            check_value(item, kind.field(index), column, row, declared=declared)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if mine is not list:
            raise fault
        if types.is_fixed_size_list(kind) and len(value) != kind.list_size:
            reason = f"a list of {len(value)}, but the column is {kind}"
            raise RowFault(row, reason, column=column, schema=True)
        for item in value:
            check_value(item, kind.value_field, column, row, declared=declared)
    elif types.is_floating(kind) and mine is int:
        if not declared:
            reason = (
                f"{value}{inside} is a whole number, where the rows at the beginning have "
                f"fractions; to have all as floats, declare that with "
                f"schema=pa.schema([({column!r}, ...)])"
            )
            raise RowFault(row, reason, column=column, schema=True)
        if kind.bit_width < 64 and value != pa.scalar(value, pa.float64()).cast(kind).as_py():
            raise RowFault(row, f"{value} is not exactly a {kind}", column=column, schema=True)
        if not -(1 << 1000) < value < 1 << 1000 or int(float(value)) != value:
            raise RowFault(row, f"{value} is not exactly a {kind}", column=column, schema=True)
    elif types.is_integer(kind):
        if mine is not int:
            raise fault
        low, high = _bounds(kind)
        if not low <= value <= high:
            reason = f"{value} is not in the range of {kind}"
            raise RowFault(row, reason, column=column, schema=True)
    elif (
        (types.is_floating(kind) and mine is not float)
        or (types.is_boolean(kind) and mine is not bool)
        or ((types.is_string(kind) or types.is_large_string(kind)) and mine is not str)
        or types.is_null(kind)
    ):
        raise fault


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    bits = kind.bit_width
    if pa.types.is_signed_integer(kind):
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1


def parsed_kind(kind: pa.DataType) -> pa.DataType:
    """The type in which pyarrow's parser reads values that are then cast to a declared one."""
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_parsed_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_parsed_field(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_parsed_field(field) for field in kind])
    return kind


def _parsed_field(field: pa.Field) -> pa.Field:
    kind = parsed_kind(field.type)
    if pa.types.is_null(kind):
        kind = pa.bool_()  # pyarrow's parser builds nulls within values of a wrong length
    return pa.field(field.name, kind, field.nullable)


def settled(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """What pyarrow's parser read as `parsed_kind`, as values of a type.

    Raises:
        pa.ArrowException: If they are not of this type.
    """
    if not _holds_null(kind):
        return array.cast(kind)
    return _nulled(array.cast(_stand_in(kind)), kind)


def _holds_null(kind: pa.DataType) -> bool:
    inside = range(kind.num_fields) if pa.types.is_nested(kind) else ()
    return bool(pa.types.is_null(kind)) or any(_holds_null(kind.field(i).type) for i in inside)


def _stand_in(kind: pa.DataType) -> pa.DataType:
    """The same with booleans in place of nulls, for a cast makes invalid arrays of those, too."""
    if not pa.types.is_nested(kind):
        return pa.bool_() if pa.types.is_null(kind) else kind
    inside = [kind.field(i) for i in range(kind.num_fields)]
    fields = [pa.field(field.name, _stand_in(field.type), field.nullable) for field in inside]
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    return pa.large_list(fields[0]) if pa.types.is_large_list(kind) else pa.list_(fields[0])


def _nulled(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """What `_stand_in` made of a type, of the type itself."""
    if pa.types.is_null(kind):
        if array.null_count < len(array):
            raise pa.ArrowInvalid("a value where the type has only nulls")
        return pa.nulls(len(array))
    if not _holds_null(kind):
        return array
    if pa.types.is_struct(kind):
        own = 1
        inside = [array.field(i) for i in range(kind.num_fields)]
    else:
        own = 1 if pa.types.is_fixed_size_list(kind) else 2
        inside = [array.values]
    children = [_nulled(child, kind.field(i).type) for i, child in enumerate(inside)]
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:own], children=children)
