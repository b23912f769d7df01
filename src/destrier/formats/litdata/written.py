"""From columns to the bytes of leaves, for exports."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from destrier.formats.gather import Bytes, even, joined, list_offsets, packed, uneven
from destrier.formats.litdata.arraywriter import LeafError, Written, array_written, check_whole
from destrier.formats.litdata.leaves import PIL_TYPE, PREFIX
from destrier.formats.litdata.nested import encode_nested
from destrier.formats.media import CONTENT_TYPE_KEY
from destrier.writing.source import ENCODING_KEY

__all__ = ["choose"]

_CONTENT_TYPE_KEYS = (CONTENT_TYPE_KEY, b"content-type", b"mime_type")
_IMAGES = {
    "image/jpeg": "jpeg",
    "image/png": "image:png",
    "image/webp": "image:webp",
    "image/bmp": "image:bmp",
    "image/gif": "image:gif",
}
_SCALARS = ("int", "float", "bool", "str", "text")


def choose(field: pa.Field, *, as_json: bool) -> Written | None:
    """How a field is written: as it was, if it came from LitData, else by its type.

    Args:
        field: The column, or a field of a struct.
        as_json: Whether the user wants a JSON leaf.

    Returns:
        None for a struct whose fields are leaves of their own.

    Raises:
        ValueError: Saying why LitData cannot hold the type.
    """
    metadata = field.metadata or {}
    kind = field.type
    if as_json:
        return _json(kind)
    known = metadata.get(ENCODING_KEY, b"").decode(errors="replace")
    if known.startswith(PREFIX):
        restored = _restored(known[len(PREFIX) :], kind)
        if restored is not None:
            return restored
    content = next((metadata[key] for key in _CONTENT_TYPE_KEYS if key in metadata), b"")
    return _natural(kind, content.decode(errors="replace"))


def _restored(encoding: str, kind: pa.DataType) -> Written | None:  # noqa: PLR0911 - a table
    name, _, rest = encoding.partition(":")
    types = pa.types
    if name in _SCALARS:
        natural = _scalar(kind)
        same = natural is not None and natural.encoding == name.replace("text", "str")
        return Written(encoding, natural.encode) if natural is not None and same else None
    if name in ("numpy", "tensor", "no_header_numpy", "no_header_tensor"):
        return array_written(name, rest, kind)
    if name == "pil":
        return Written("pil", _pil) if kind.equals(PIL_TYPE) else None
    if name == "jpeg_array":
        images = types.is_list(kind) and _is_bytes(kind.value_type)
        return Written(encoding, _jpegs) if images else None
    if name == "json":
        return Written("json", _json_texts) if types.is_string(kind) else _json(kind)
    if name == "pickle":
        return None  # by its type: the value that was pickled
    return Written(encoding, _as_is) if _is_bytes(kind) else None


def _natural(kind: pa.DataType, content: str) -> Written | None:
    types = pa.types
    if (scalar := _scalar(kind)) is not None:
        return scalar
    if _is_bytes(kind):
        return Written(_IMAGES.get(content, "bytes"), _as_is)
    if types.is_null(kind):
        return _json(kind)
    if (array := array_written("numpy", "", kind)) is not None:
        return array
    if types.is_struct(kind):
        return None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _json(kind)
    raise ValueError(f"LitData has no leaf of type {kind}: cast it, or leave it out with columns=")


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def _scalar(kind: pa.DataType) -> Written | None:
    types = pa.types
    if types.is_integer(kind):
        return Written("int", _ints)
    if types.is_floating(kind):
        return Written("float", _floats)
    if types.is_boolean(kind):
        return Written("bool", _bools)
    if types.is_string(kind) or types.is_large_string(kind):
        return Written("str", _as_is)
    return None


# ---- values of one size, text, bytes ---------------------------------------------------------


def _ints(array: pa.Array) -> pa.LargeBinaryArray:
    try:
        values = array.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        large = pc.greater(array, pa.scalar((1 << 63) - 1, pa.uint64()))
        raise LeafError(
            "is beyond 64 signed bits, in which LitData keeps integers", large.index(True).as_py()
        ) from None
    return even(values.astype("<i8", copy=False), len(array), 8)


def _floats(array: pa.Array) -> pa.LargeBinaryArray:
    values = array.to_numpy(zero_copy_only=False).astype("<f8")
    return even(values, len(array), 8)


def _bools(array: pa.Array) -> pa.LargeBinaryArray:
    return even(array.to_numpy(zero_copy_only=False).astype(np.uint8), len(array), 1)


def _as_is(array: pa.Array) -> pa.LargeBinaryArray:
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.large_string())
    return array.cast(pa.large_binary())


# ---- images, JSON ----------------------------------------------------------------------------


def _pil(array: pa.Array) -> pa.LargeBinaryArray:
    width, height, mode, data = array.flatten()
    check_whole(width, height, mode, data)
    modes = mode.cast(pa.large_string()).cast(pa.large_binary())
    sizes = pc.binary_length(modes).to_numpy(zero_copy_only=False)
    columns = [width.to_numpy(zero_copy_only=False), height.to_numpy(zero_copy_only=False), sizes]
    heads = np.column_stack(columns).astype("<u4")
    return joined(even(heads, len(array), 12), modes, data)


def _jpegs(array: pa.Array) -> pa.LargeBinaryArray:
    offsets = array.offsets.to_numpy().astype(np.int64)
    images = array.flatten().cast(pa.large_binary())
    offsets = offsets - offsets[0]
    if images.null_count:
        place = images.is_null().index(True).as_py()
        raise LeafError(
            "has an image that is null", int(np.searchsorted(offsets, place, "right") - 1)
        )
    sizes = pc.binary_length(images).to_numpy(zero_copy_only=False).astype("<u4")
    counts = np.diff(offsets).astype("<u4")
    ends = list_offsets(sizes.astype(np.int64))
    data: Bytes = np.ascontiguousarray(packed(images))
    return joined(
        even(counts, len(array), 4), uneven(sizes, offsets * 4), uneven(data, ends[offsets])
    )


def _json(kind: pa.DataType) -> Written:
    if not _is_json(kind):
        raise ValueError(f"JSON cannot hold {kind}: leave it out with columns=, or change it")
    return Written("json", _json_values)


def _is_json(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    if types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_null(kind)
    )


def _json_values(array: pa.Array) -> pa.LargeBinaryArray:
    return _json_leaves(array.to_pylist())


def _json_texts(array: pa.Array) -> pa.LargeBinaryArray:
    values = []
    for row, text in enumerate(array.to_pylist()):
        try:
            values.append(json.loads(text))
        except ValueError as error:
            raise LeafError(f"is no JSON text ({error})", row) from None
    return _json_leaves(values)


def _json_leaves(values: list[Any]) -> pa.LargeBinaryArray:
    leaves = []
    for row, value in enumerate(values):
        try:
            leaves.append(encode_nested(value))
        except (ValueError, OverflowError, struct.error) as error:
            raise LeafError(f"cannot be a JSON leaf: {error}", row) from None
    return pa.array(leaves, pa.large_binary())
