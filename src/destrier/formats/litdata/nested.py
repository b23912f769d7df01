"""LitData's compact form of lists and dicts, the ``json`` leaf."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = [
    "BOOL_LIST",
    "FLOAT_LIST",
    "INT_LIST",
    "TEXT_LIST",
    "decode_nested",
    "encode_nested",
    "json_text",
    "matches",
    "natural_type",
]

_JSON, _STRS, _INTS, _FLOATS, _BOOLS, _DICT, _RECORDS = range(7)
TEXT_LIST, INT_LIST, FLOAT_LIST, BOOL_LIST = _STRS, _INTS, _FLOATS, _BOOLS
_STR, _INT, _FLOAT, _BOOL, _NONE = range(7, 12)
_RECORD_NONE, _RECORD_STR, _RECORD_INT, _RECORD_FLOAT, _RECORD_BOOL = range(0x10, 0x15)
_LEGACY = 0x20  # plain JSON text begins with a greater byte
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_HEAD = struct.Struct("<BI")
_MOST_DEPTH = 200
_SCALARS = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


def decode_nested(data: bytes) -> Any:
    """Read a leaf.

    Raises:
        ValueError: If it is damaged; `struct.error` and `UnicodeDecodeError` are not let out.
    """
    try:
        if not data or data[0] > _LEGACY:
            return json.loads(data)
        value, end = _read(data, 0, 0)
    except (struct.error, RecursionError, IndexError) as error:
        raise ValueError(f"is no JSON leaf ({error})") from None
    if end != len(data):
        raise ValueError(f"its JSON leaf ends at {end} of {len(data)} bytes")
    return value


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise ValueError(f"its JSON leaf of {len(data)} bytes claims {at + size}")
    return data[at : at + size], at + size


def _text(data: bytes, at: int) -> tuple[str, int]:
    raw, at = _take(data, at + 4, _U32.unpack_from(data, at)[0])
    return raw.decode("utf-8"), at


def _read(  # noqa: C901, PLR0911, PLR0912 - a table of tags
    data: bytes, at: int, depth: int
) -> tuple[Any, int]:
    if depth > _MOST_DEPTH:
        raise ValueError("its JSON leaf is nested too deeply")
    tag = data[at]
    at += 1
    if tag == _STR:
        return _text(data, at)
    if tag == _INT:
        return _I64.unpack_from(data, at)[0], at + 8
    if tag == _FLOAT:
        return _F64.unpack_from(data, at)[0], at + 8
    if tag == _BOOL:
        return bool(data[at]), at + 1
    if tag == _NONE:
        return None, at
    if tag > _NONE:
        raise ValueError(f"its JSON leaf has the unknown tag {tag}")
    count = _U32.unpack_from(data, at)[0]
    at += 4
    if tag == _JSON:
        raw, at = _take(data, at, count)
        return json.loads(raw), at
    if tag in (_INTS, _FLOATS):
        raw, at = _take(data, at, 8 * count)
        return np.frombuffer(raw, "<i8" if tag == _INTS else "<f8").tolist(), at
    if tag == _BOOLS:
        raw, at = _take(data, at, count)
        return [byte != 0 for byte in raw], at
    if tag == _STRS:
        texts = []
        for _ in range(count):
            text, at = _text(data, at)
            texts.append(text)
        return texts, at
    if tag == _RECORDS:
        return _records(data, at, count)
    found: dict[str, Any] = {}
    for _ in range(count):
        key, at = _text(data, at)
        found[key], at = _read(data, at, depth + 1)
    return found, at


def _records(data: bytes, at: int, count: int) -> tuple[list[dict[str, Any]], int]:
    keys = []
    number = _U32.unpack_from(data, at)[0]
    at += 4
    for _ in range(number):
        key, at = _text(data, at)
        keys.append(key)
    if number == 0 and count:
        raise ValueError("its JSON leaf has records without keys")
    rows = []
    for _ in range(count):
        row: dict[str, Any] = {}
        for key in keys:
            row[key], at = _record_value(data, at)
        rows.append(row)
    return rows, at


def _record_value(data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    at += 1
    if kind == _RECORD_NONE:
        return None, at
    if kind == _RECORD_STR:
        return _text(data, at)
    if kind == _RECORD_INT:
        return _I64.unpack_from(data, at)[0], at + 8
    if kind == _RECORD_FLOAT:
        return _F64.unpack_from(data, at)[0], at + 8
    if kind == _RECORD_BOOL:
        return data[at] != 0, at + 1
    raise ValueError(f"its JSON leaf has the unknown record tag {kind}")


def encode_nested(value: Any) -> bytes:  # noqa: PLR0911 - a table of types
    """Write a leaf: lists of one type as arrays, dicts key by key, the rest as JSON text.

    Raises:
        ValueError: If JSON text would hold a number that JSON does not know.
    """
    if value is None:
        return bytes([_NONE])
    if isinstance(value, bool):
        return bytes([_BOOL, value])
    if isinstance(value, str):
        return bytes([_STR]) + _sized(value)
    if isinstance(value, int):
        return bytes([_INT]) + _I64.pack(value)
    if isinstance(value, float):
        return bytes([_FLOAT]) + _F64.pack(value)
    if isinstance(value, dict):
        head = _HEAD.pack(_DICT, len(value))
        return head + b"".join(_sized(key) + encode_nested(item) for key, item in value.items())
    return _encode_list(value)


def _encode_list(value: list[Any]) -> bytes:
    kinds = {type(item) for item in value}
    if kinds <= {str}:  # the empty list, too
        return _HEAD.pack(_STRS, len(value)) + b"".join(map(_sized, value))
    if kinds == {bool}:
        return _HEAD.pack(_BOOLS, len(value)) + bytes(value)
    if kinds == {int}:
        return _HEAD.pack(_INTS, len(value)) + np.array(value, "<i8").tobytes()
    if kinds == {float}:
        return _HEAD.pack(_FLOATS, len(value)) + np.array(value, "<f8").tobytes()
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return _HEAD.pack(_JSON, len(text)) + text


def _sized(text: str) -> bytes:
    raw = text.encode()
    return _U32.pack(len(raw)) + raw


def json_text(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def natural_type(types: Any) -> pa.DataType | None:  # noqa: PLR0911 - a table of types
    """The Arrow type that LitData's fused type stands for, or None if it is not one type."""
    if isinstance(types, str):
        return _SCALARS.get(types)
    if not isinstance(types, dict):
        return None
    kind = types.get("type")
    if kind == "list":
        inner = natural_type(types.get("value"))
        return None if inner is None else pa.list_(inner)
    if kind == "struct":
        fields = types.get("fields")
        if not isinstance(fields, dict) or not fields:
            return None
        if any(isinstance(field, dict) and field.get("optional") for field in fields.values()):
            return None  # a key that is missing is not one whose value is None
        inner_types = {name: natural_type(field) for name, field in fields.items()}
        if None in inner_types.values():
            return None
        return pa.struct(list(inner_types.items()))
    return _SCALARS.get(kind) if isinstance(kind, str) else None


def matches(value: Any, kind: pa.DataType) -> bool:  # noqa: PLR0911 - a table of types
    """Whether a value is of an Arrow type, without any cast, so that all of it is kept."""
    if value is None:
        return True
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(matches(item, kind.value_type) for item in value)
    if pa.types.is_struct(kind):
        return (
            isinstance(value, dict)
            and len(value) == kind.num_fields  # a key that is missing would come back as None
            and all(
                field.name in value and matches(value[field.name], field.type) for field in kind
            )
        )
    if pa.types.is_int64(kind):
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if pa.types.is_float64(kind):
        return type(value) is float
    if pa.types.is_boolean(kind):
        return type(value) is bool
    return type(value) is str
