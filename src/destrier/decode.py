"""From gathered rows to what the user asked for: tensors, arrays, Arrow, rows, images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from destrier.columns import Column, Columns
from destrier.errors import ColumnError, DecodeError
from destrier.images import Image, decode_images
from destrier.keyed import Ints

__all__ = [
    "FORMATS",
    "Decode",
    "Format",
    "decode_columns",
    "decode_rows",
    "decoded_names",
    "to_format",
]

Format: TypeAlias = Literal["torch", "numpy", "arrow", "rows"]
FORMATS = ("torch", "numpy", "arrow", "rows")
Decode: TypeAlias = Mapping[str, str | Image]
_CONTENT_TYPE_KEYS = (b"content_type", b"content-type", b"mime_type", b"destrier:content-type")


def decode_columns(schema: pa.Schema, decode: Decode | None) -> dict[str, Image]:
    """Return which columns are images, and how they are decoded.

    Args:
        schema: Of the columns that are read.
        decode: From column to `Image`, or its mode. None decodes the binary columns whose field
            metadata name an image content type, to ``"rgb"``.

    Raises:
        ColumnError: If a column is not there or not binary.
        ArgumentError: If a mode is unknown.
    """
    if decode is None:
        return {f.name: Image() for f in schema if _is_binary(f.type) and _is_image(f)}
    images: dict[str, Image] = {}
    for name, wanted in decode.items():
        if name not in schema.names:
            raise ColumnError(
                f"decode names {name!r}, but the columns read are: {', '.join(schema.names)}"
            )
        if not _is_binary(schema.field(name).type):
            raise ColumnError(
                f"decode names {name!r}, which is {schema.field(name).type}, not binary"
            )
        images[name] = wanted if isinstance(wanted, Image) else Image(wanted)
    return images


def decoded_names(schema: pa.Schema, decode: Decode | None) -> frozenset[str]:
    """The columns of a table that `decode_columns` finds, if nothing is wrong."""
    binary = (field for field in schema if _is_binary(field.type))
    return frozenset(
        f.name for f in binary if (_is_image(f) if decode is None else f.name in decode)
    )


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def _is_image(field: pa.Field) -> bool:
    metadata = field.metadata or {}
    return any(metadata.get(key, b"").startswith(b"image/") for key in _CONTENT_TYPE_KEYS)


def decode_rows(
    columns: Mapping[str, Column],
    images: Mapping[str, Image],
    offsets: Ints,
    table: Callable[[int], str],
) -> tuple[Columns, dict[int, DecodeError]]:
    """Decode image columns and find the rows that cannot be delivered, by position.

    Args:
        columns: The rows.
        images: Which columns are images, and how they are decoded.
        offsets: Row offset of each row.
        table: From a position to the name of the table that its row is of.
    """
    errors: dict[int, DecodeError] = {}
    out: Columns = {}
    for name, column in columns.items():
        if column.valid is not None:
            for i in np.flatnonzero(~column.valid).tolist():
                errors.setdefault(i, _null(name, column, int(offsets[i]), table(i)))
        if name not in images:
            out[name] = column
            continue
        values, broken = decode_images(column.values, images[name])
        for i, error in broken.items():
            failed = DecodeError(
                f"cannot decode column {name!r} of row {offsets[i]} of {table(i)} as an "
                f"image: {error}",
                offset=int(offsets[i]),
                column=name,
            )
            errors.setdefault(i, failed)
        out[name] = Column(values)
    return out, errors


def _null(name: str, column: Column, offset: int, table: str) -> DecodeError:
    what, way_out = "is null", f'leave such rows out with filter="{name} IS NOT NULL"'
    if not column.dense:
        what, way_out = "has a null in its list", "write the table without such nulls"
    elif column.values.ndim > 1:
        what, way_out = "is null or has a null in its list", f"{way_out}, if it is null as a whole"
    return DecodeError(
        f"column {name!r} of row {offset} of {table} {what}, which its type has no tensor value "
        f"for; {way_out}, or pass format='arrow' or 'rows'",
        offset=offset,
        column=name,
    )


def to_format(columns: Columns, format: Format, images: Mapping[str, Image]) -> dict[str, Any]:
    """Bring numpy columns into a batch of torch or numpy values.

    Dense columns become one tensor or array. Images of one size do too; otherwise, and for all
    other columns, a list with one item a row.
    """
    wrap = torch.from_numpy if format == "torch" else _same
    batch: dict[str, Any] = {}
    for name, column in columns.items():
        values = column.values
        if name in images:
            batch[name] = _pictures(column, wrap)
        elif column.dense:
            batch[name] = wrap(values)
        else:
            batch[name] = [
                wrap(value.copy()) if isinstance(value, np.ndarray) else _own(value)
                for value in values
            ]
    return batch


def _own(value: Any) -> Any:
    """A value of its own: the rows that are held must not change with what users do to batches."""
    if isinstance(value, pa.Buffer):
        return value.to_pybytes()
    if isinstance(value, list):
        return [_own(item) for item in value]
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    return tuple(map(_own, value)) if isinstance(value, tuple) else value


def _same(values: NDArray[Any]) -> NDArray[Any]:
    return values


def _pictures(column: Column, wrap: Any) -> Any:
    """Views of images with their channels first, which stay last in memory."""
    values = column.values
    if not len(values):
        return []
    if not column.dense:
        shapes = {None if value is None else value.shape for value in values}
        if len(shapes) > 1 or None in shapes:
            own = _once_each(values)
            return [None if value is None else wrap(value.transpose(2, 0, 1)) for value in own]
        values = np.stack(list(values))
    return wrap(values.transpose(0, 3, 1, 2))


def _once_each(values: NDArray[Any]) -> Iterator[Any]:
    """The values, copied where one comes again, as one does that fills the place of another."""
    seen: set[int] = set()
    for value in values:
        yield value.copy() if id(value) in seen else value
        if value is not None:
            seen.add(id(value))
