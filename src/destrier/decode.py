"""From gathered rows to what the user asked for: tensors, arrays, Arrow, rows, images."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from destrier.columns import Column, Columns
from destrier.errors import ArgumentError, ColumnError, DecodeError
from destrier.keyed import Ints

__all__ = ["FORMATS", "Decode", "Format", "decode_columns", "decode_image", "to_format"]

Format: TypeAlias = Literal["torch", "numpy", "arrow", "rows"]
FORMATS = ("torch", "numpy", "arrow", "rows")
Decode: TypeAlias = Mapping[str, str]
_BUFFER = re.compile(r" ?<_io\.BytesIO[^>]*>")  # Pillow names what it reads from
_SHOWN_BYTES = 8
_MODES = {"rgb": "RGB", "rgba": "RGBA", "gray": "L"}
_CONTENT_TYPE_KEYS = (b"content_type", b"content-type", b"mime_type", b"destrier:content-type")


def decode_columns(schema: pa.Schema, decode: Decode | None) -> dict[str, str]:
    """Return which columns are images, and in which mode they are decoded.

    Args:
        schema: Of the columns that are read.
        decode: From column to ``"rgb"``, ``"rgba"`` or ``"gray"``. None decodes the binary
            columns whose field metadata name an image content type, to ``"rgb"``.

    Raises:
        ColumnError: If a column is not there or not binary.
        ArgumentError: If a mode is unknown.
    """
    if decode is None:
        return {f.name: "rgb" for f in schema if _is_binary(f.type) and _is_image(f)}
    for name, mode in decode.items():
        if name not in schema.names:
            raise ColumnError(
                f"decode names {name!r}, but the columns read are: {', '.join(schema.names)}"
            )
        if not _is_binary(schema.field(name).type):
            raise ColumnError(
                f"decode names {name!r}, which is {schema.field(name).type}, not binary"
            )
        if mode not in _MODES:
            raise ArgumentError(f"decode mode {mode!r} is not one of {', '.join(_MODES)}")
    return dict(decode)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def _is_image(field: pa.Field) -> bool:
    metadata = field.metadata or {}
    return any(metadata.get(key, b"").startswith(b"image/") for key in _CONTENT_TYPE_KEYS)


def decode_image(data: bytes, mode: str) -> NDArray[np.uint8]:
    """Decode an image file to uint8 of shape (channels, height, width).

    Raises:
        ValueError: If the bytes are not an image that Pillow can read.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert(_MODES[mode]))
    except Exception as error:
        text = _BUFFER.sub("", str(error)) or type(error).__name__
        begins = f" that begin with {data[:_SHOWN_BYTES].hex(' ')}" if data else ""
        raise ValueError(f"{text} ({len(data):,} bytes{begins})") from error
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def decode_rows(
    columns: Columns, images: Mapping[str, str], offsets: Ints, table: str
) -> tuple[Columns, dict[int, DecodeError]]:
    """Decode image columns and find the rows that cannot be delivered, by position."""
    errors: dict[int, DecodeError] = {}
    out: Columns = {}
    for name, column in columns.items():
        if column.valid is not None:
            for i in np.flatnonzero(~column.valid).tolist():
                errors.setdefault(i, _null(name, column, int(offsets[i]), table))
        if name not in images:
            out[name] = column
            continue
        values = np.empty(len(column.values), np.object_)
        for i, data in enumerate(column.values):
            if data is None:
                continue
            try:
                values[i] = decode_image(data, images[name])
            except ValueError as error:
                errors.setdefault(
                    i,
                    DecodeError(
                        f"cannot decode column {name!r} of row {offsets[i]} of {table} as an "
                        f"image: {error}",
                        offset=int(offsets[i]),
                        column=name,
                    ),
                )
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


def to_format(columns: Columns, format: Format, images: Mapping[str, str]) -> dict[str, Any]:
    """Bring numpy columns into a batch of torch or numpy values.

    Dense columns become one tensor or array. Images of one size do too; otherwise, and for all
    other columns, a list with one item a row.
    """
    wrap = torch.from_numpy if format == "torch" else _same
    batch: dict[str, Any] = {}
    for name, column in columns.items():
        values = column.values
        if column.dense:
            batch[name] = wrap(values)
        elif name in images:
            batch[name] = _stack(values, wrap)
        else:
            batch[name] = [
                wrap(value.copy()) if isinstance(value, np.ndarray) else value for value in values
            ]
    return batch


def _same(values: NDArray[Any]) -> NDArray[Any]:
    return values


def _stack(values: NDArray[Any], wrap: Any) -> Any:
    shapes = {None if value is None else value.shape for value in values}
    if len(shapes) == 1 and None not in shapes:
        return wrap(np.stack(list(values)))
    return [None if value is None else wrap(value) for value in values]
