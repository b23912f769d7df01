"""Streams of Arrow, checked before they are read: a buffer tells its size, which is allocated."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from destrier.formats.litdata.zstd import content_size

__all__ = ["decode_names", "open_stream", "stream_schema"]

_MAGIC = b"ARROW1\0\0"
_ALIGNMENT = 64
_LZ4 = b"\x04\x22\x4d\x18"
_LZ4_RATIO = 256
_SIZE = struct.Struct("<q")
_HEADER, _BUFFERS, _COMPRESSION = 2, 2, 3  # places in the tables Message and RecordBatch


def open_stream(ipc: pa.Buffer) -> pa.RecordBatchReader:
    """Read an Arrow file or stream from its beginning.

    Raises:
        ValueError: If a compressed buffer claims a size that it cannot have.
        pa.ArrowException: If it is damaged otherwise.
    """
    ipc = _stream(ipc)
    if ipc.address % _ALIGNMENT:
        ipc = pa.py_buffer(bytearray(ipc))  # what is not compressed inside would stay misaligned
    for message in pa.ipc.MessageReader.open_stream(ipc):
        if message.type == "record batch":
            _check(message)
    return pa.ipc.open_stream(ipc)


def stream_schema(head: pa.Buffer) -> pa.Schema:
    """The schema with which an Arrow file or stream begins, checked to be text.

    Raises:
        pa.ArrowException: If it is damaged, or longer than what is given.
        UnicodeDecodeError: If a name is not UTF-8.
    """
    schema = pa.ipc.read_schema(_stream(head))
    decode_names(schema)
    return schema


def decode_names(fields: Iterable[pa.Field]) -> None:
    """Raise UnicodeDecodeError if a name is not UTF-8."""
    for field in fields:
        _ = field.name
        if pa.types.is_nested(field.type):
            decode_names(field.type.field(i) for i in range(field.type.num_fields))


def _stream(ipc: pa.Buffer) -> pa.Buffer:
    """The stream in a file, which has an index behind it."""
    return ipc.slice(len(_MAGIC)) if ipc.slice(0, len(_MAGIC)).to_pybytes() == _MAGIC else ipc


def _check(message: Any) -> None:
    try:
        sizes = _compressed(memoryview(message.metadata))
    except (struct.error, IndexError) as error:
        raise ValueError(f"a batch has a damaged header ({error})") from None
    if not sizes:
        return
    body = memoryview(message.body)
    for start, length in sizes:
        part = body[start : start + length]
        if len(part) < _SIZE.size:
            continue  # of no value
        size = _SIZE.unpack_from(part)[0]
        if size < 0:
            continue  # not compressed
        frame = part[_SIZE.size :]
        if bytes(frame[:4]) == _LZ4:
            fits = size <= len(frame) * _LZ4_RATIO
        else:
            fits = size == 0 or content_size(frame) == size
        if not fits:
            raise ValueError(f"a buffer of {len(part):,} bytes claims to be {size:,}")


def _compressed(metadata: memoryview) -> list[tuple[int, int]]:
    """Where the buffers of a record batch lie, if they are compressed."""
    (root,) = struct.unpack_from("<I", metadata)
    batch = _table(metadata, root, _HEADER)
    if batch is None or _field(metadata, batch, _COMPRESSION) is None:
        return []
    at = _table(metadata, batch, _BUFFERS)
    if at is None:
        return []
    (count,) = struct.unpack_from("<I", metadata, at)
    if at + 4 + 16 * count > len(metadata):
        raise IndexError(f"{count} buffers")
    return [struct.unpack_from("<qq", metadata, at + 4 + 16 * i) for i in range(count)]


def _field(metadata: memoryview, table: int, number: int) -> int | None:
    """Where a field of a flatbuffers table lies."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if vtable < 0:
        raise IndexError("a table before the header")
    (size,) = struct.unpack_from("<H", metadata, vtable)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)
    return table + offset if offset else None


def _table(metadata: memoryview, table: int, number: int) -> int | None:
    field = _field(metadata, table, number)
    if field is None:
        return None
    return field + int(struct.unpack_from("<I", metadata, field)[0])
