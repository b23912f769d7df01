"""Which Arrow types a table keeps exactly, and what the others become."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import ColumnError

__all__ = ["check_names", "convert", "kept_field"]

_LANCE_PREFIXES = (b"lance", b"PARQUET:")  # the writer's own business, and the file's
_EXTENSION = b"ARROW:extension:name"
_RESERVED = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version")


class _UnkeptError(Exception):
    """A type that cannot be kept, and why."""


def check_names(names: Iterable[str], shown: str) -> None:
    """Raise if a column's name is there twice, or is none that a table can have.

    Args:
        names: Of the columns.
        shown: The file they are from, for messages.

    Raises:
        ColumnError: Naming the column and the way out.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ColumnError(f"{shown}: a column is named {name!r} twice")
        seen.add(name)
        bad = [mark for mark in (".", "`", "\0") if mark in name]
        if not name or bad or name in _RESERVED:
            reason = f"contains {bad[0]!r}" if bad else ("is reserved" if name else "is empty")
            raise ColumnError(
                f"{shown}: a table cannot have a column named {name!r}, for the name {reason}; "
                "leave it out with columns=[...], or rename it at the source"
            )


def kept_field(field: pa.Field, shown: str) -> pa.Field:
    """The column that a field becomes: of the same type, or of the one that keeps its values.

    Args:
        field: Of the source.
        shown: The file it is from, for messages.

    Raises:
        ColumnError: If no type keeps its values exactly.
    """
    name = (field.metadata or {}).get(_EXTENSION, b"")
    try:
        if name.startswith(b"lance."):
            raise _UnkeptError(f"it is of Lance's own type {name.decode(errors='replace')}")
        kind = _kept_type(field.type)
    except _UnkeptError as error:
        raise ColumnError(
            f"{shown}: column {field.name!r} cannot be kept exactly: {error}; leave it out with "
            "columns=[...], or cast it at the source"
        ) from None
    return pa.field(field.name, kind, field.nullable, _metadata(field))


def _metadata(field: pa.Field) -> dict[bytes, bytes] | None:
    known = field.metadata or {}
    return {k: v for k, v in known.items() if not k.startswith(_LANCE_PREFIXES)} or None


def _child(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _kept_type(field.type), field.nullable, _metadata(field))


def _kept_type(kind: pa.DataType) -> pa.DataType:  # noqa: C901, PLR0911, PLR0912 - a table of types
    """The type that keeps all values of a type; most are kept as they are."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _kept_extension(kind)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _kept_type(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_decimal(kind) and kind.bit_width < 128:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_map(kind):
        return pa.map_(_child(kind.key_field), _child(kind.item_field))
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_child(kind.value_field))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(_child(kind.value_field))
    if types.is_fixed_size_list(kind):
        child = _child(kind.value_field)
        fixed = kind.list_size and _is_fixed(child.type)
        return pa.list_(child, kind.list_size) if fixed else pa.list_(child)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if not names:
            raise _UnkeptError("it holds structs without fields")
        if len(set(names)) < len(names):
            raise _UnkeptError("it holds structs in which a field is named twice")
        return pa.struct([_child(field) for field in kind])
    if types.is_union(kind) or types.is_interval(kind):
        raise _UnkeptError(f"Lance has no type {kind}")
    return kind


def _kept_extension(kind: pa.BaseExtensionType) -> pa.DataType:
    if kind.extension_name == "arrow.json":  # Lance would rewrite the text
        return _kept_type(kind.storage_type)
    if kind.extension_name.startswith("lance."):
        raise _UnkeptError(f"it is of Lance's own type {kind.extension_name}")
    if not _kept_type(kind.storage_type).equals(kind.storage_type):
        raise _UnkeptError(f"Lance has no type {kind.storage_type}, in which {kind} is stored")
    return kind


def _is_fixed(kind: pa.DataType) -> bool:
    """Whether Lance keeps fixed-size lists of this type."""
    if pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    return bool(
        pa.types.is_primitive(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def convert(array: pa.Array, kind: pa.DataType) -> pa.Array:  # noqa: PLR0911 - a table of types
    """The same values in the type that `kept_field` gave for the array's.

    Raises:
        pa.ArrowException: If a value does not fit, as text of more than 2 GB in one batch.
    """
    types = pa.types
    mine = array.type
    if mine.equals(kind) and not (types.is_map(mine) and mine.keys_sorted != kind.keys_sorted):
        return array
    if types.is_null(mine):
        return pa.nulls(len(array), kind)
    if isinstance(mine, pa.BaseExtensionType):
        return convert(array.storage, kind)
    if types.is_dictionary(mine):
        return convert(pc.take(_whole(array.dictionary), array.indices), kind)
    if types.is_run_end_encoded(mine):
        return convert(pc.run_end_decode(array), kind)
    if types.is_list_view(mine) or types.is_large_list_view(mine):
        return convert(_unviewed(array), kind)
    if types.is_fixed_size_list(mine) and types.is_list(kind):
        return convert(array.cast(pa.list_(mine.value_field)), kind)
    if types.is_nested(mine):
        return _rebuild(pa.concat_arrays([array]), kind, convert)
    return array.cast(kind)


def _unviewed(array: pa.Array) -> pa.Array:
    """A list view as a list; pyarrow's own cast gives invalid arrays where there are nulls."""
    large = pa.types.is_large_list_view(array.type)
    plain = (pa.large_list if large else pa.list_)(array.type.value_field)
    sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64 if large else np.int32)
    np.cumsum(sizes, out=offsets[1:])
    valid = array.is_valid().buffers()[1] if array.null_count else None
    buffers = [valid, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(plain, len(array), buffers, children=[array.flatten()])


def _whole(array: pa.Array) -> pa.Array:
    """Views have no take."""
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return array.cast(views[array.type]) if array.type in views else array


def _rebuild(
    array: pa.Array, kind: pa.DataType, change: Callable[[pa.Array, pa.DataType], pa.Array]
) -> pa.Array:
    """A nested array without an offset, its children changed."""
    count = len(array)
    buffers: list[Any] = array.buffers()
    if pa.types.is_struct(kind):
        children = [change(array.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, count, buffers[:1], children=children)
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays(
            [change(array.keys, kind.key_type), change(array.items, kind.item_type)],
            fields=[kind.key_field, kind.item_field],
        )
        return pa.Array.from_buffers(kind, count, buffers[:2], children=[entries])
    head = 1 if pa.types.is_fixed_size_list(kind) else 2
    child = change(array.values, kind.value_type)
    return pa.Array.from_buffers(kind, count, buffers[:head], children=[child])
