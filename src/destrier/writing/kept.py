"""Which names and types of columns a table keeps as they are."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["unkept", "unnamed"]

_MOST_LEVELS = 60  # Arrow hands no type of more than 64 from one library to another


def unnamed(name: str) -> str | None:
    """Why a table can have no column of this name, or None if it can."""
    if not name:
        return "it is empty"
    if "." in name:
        return "a dot leads into a struct"
    if name.startswith("_row"):
        return "_row... are Lance's own"
    if "`" in name:
        return "Lance cannot read a name with a backtick"
    return "it would end at its zero character" if "\0" in name else None


def unkept(kind: pa.DataType) -> str | None:
    """Why a table cannot hold a type as it is, or None if it can."""
    return _unkept(kind, 0)


def _unkept(kind: pa.DataType, level: int) -> str | None:
    if level > _MOST_LEVELS:
        return f"types nested more than {_MOST_LEVELS} levels deep: make it flatter, or store text"
    if isinstance(kind, pa.BaseExtensionType):
        return _unkept(kind.storage_type, level)
    is_ = pa.types
    refused = (
        is_.is_string_view,
        is_.is_binary_view,
        is_.is_interval,
        is_.is_union,
        is_.is_run_end_encoded,
        is_.is_list_view,
        is_.is_large_list_view,
    )
    if any(test(kind) for test in refused) or (is_.is_struct(kind) and not kind.num_fields):
        return f"{kind} as it is"
    if is_.is_fixed_size_list(kind) and not (kind.list_size and _is_flat(kind.value_type)):
        plain = pa.list_(kind.value_field)
        return f"lists of a fixed size as {kind}: make them {plain}"
    fields = [kind.field(number) for number in range(kind.num_fields)]
    for field in fields:
        if "\0" in field.name:
            return f"a field named {field.name!r}, which would end at its zero character"
    inside = (_unkept(field.type, level + 1) for field in fields)
    return next((found for found in inside if found is not None), None)


def _is_flat(kind: pa.DataType) -> bool:
    """Whether Lance keeps lists of a fixed size of this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_flat(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return bool(kind.list_size) and _is_flat(kind.value_type)
    plain = (
        pa.types.is_primitive,
        pa.types.is_null,
        pa.types.is_decimal,
        pa.types.is_fixed_size_binary,
    )
    return any(test(kind) for test in plain)
