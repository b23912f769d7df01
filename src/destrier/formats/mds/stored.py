"""The bytes of a shard's file: mapped, inflated, or read by ranges; checked against its hashes."""

from __future__ import annotations

import hashlib
import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from destrier.errors import MissingDependencyError, SourceError
from destrier.files import Store
from destrier.lancecalls import redact

__all__ = ["COMPRESSIONS", "LIMIT", "Content", "Piece", "open_piece"]

COMPRESSIONS = {"zstd": "zstd", "br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy"}
"""From the name of a compression, which is also the ending of its files, to Arrow's name."""

LIMIT = 1 << 32
"""What a shard cannot hold: its offsets are numbers of 32 bits."""

_CHUNK = 4 << 20
_SNAPPY_RATIO = 32  # three bytes stand for 64 at most


@dataclass(frozen=True)
class Piece:
    """A file of a shard.

    Attributes:
        path: In the store.
        size: In bytes, as it lies there.
        stamp: Time of its last change.
        compression: Its compression without the level, or None.
        raw_bytes: Its size when inflated, if the index says so.
        hashes: Algorithm and digest of the file as it lies there.
        raw_hashes: Of what is inflated, if it is compressed.
    """

    path: str
    size: int
    stamp: int
    compression: str | None
    raw_bytes: int | None
    hashes: tuple[tuple[str, str], ...] = ()
    raw_hashes: tuple[tuple[str, str], ...] = ()


class Content:
    """The inflated bytes of a file, read where they are needed."""

    def __init__(self, name: str, file: pa.NativeFile) -> None:
        self.name = name
        self.size = int(file.size())
        self._file = file

    def slice(self, start: int, size: int) -> pa.Buffer:
        """A range, which lies in the file; a view where it is in memory."""
        try:
            self._file.seek(start)
            buffer = self._file.read_buffer(size)
        except OSError as error:
            raise SourceError(
                f"cannot read {self.name}: {redact(str(error))}", file=self.name
            ) from None
        if buffer.size != size:
            raise SourceError(
                f"{self.name} ends before byte {start + size:,}: it is cut", file=self.name
            )
        return buffer


def open_piece(store: Store, piece: Piece, check_hashes: bool) -> Content:
    """Open a file of a shard.

    Args:
        store: Holds it.
        piece: Which one.
        check_hashes: Compare it with the hashes of the index.

    Raises:
        SourceError: If it is not there, is no stream of its compression, inflates to another
            size, or has another hash.
        MissingDependencyError: If its hashes need the package xxhash.
    """
    name = store.show(piece.path)
    file = store.open(piece.path)
    if file.size() != piece.size:
        raise SourceError(
            f"{name} has {file.size():,} bytes, but had {piece.size:,} when the source was opened",
            file=name,
        )
    if check_hashes:
        _check(name, file, piece.hashes)
    if piece.compression is not None:
        file = pa.BufferReader(_inflate(name, file, piece))
        if check_hashes:
            _check(f"{name}, inflated,", file, piece.raw_hashes)
    return Content(name, file)


def _inflate(name: str, file: pa.NativeFile, piece: Piece) -> pa.Buffer:
    most = LIMIT if piece.raw_bytes is None else piece.raw_bytes
    try:
        inflated = (
            _snappy(file.read_buffer(), most)
            if piece.compression == "snappy"
            else _stream(file, COMPRESSIONS[piece.compression or ""], most)
        )
    except (OSError, ValueError, EOFError, zlib.error, MemoryError, pa.ArrowException) as error:
        raise SourceError(
            f"cannot inflate {name} ({piece.compression}): {redact(str(error))}", file=name
        ) from None
    if piece.raw_bytes is not None and inflated.size != piece.raw_bytes:
        raise SourceError(
            f"{name} inflates to {_size(inflated.size, most)} bytes, but the index says "
            f"{piece.raw_bytes:,}",
            file=name,
        )
    return inflated


def _size(size: int, most: int) -> str:
    return f"more than {most:,}" if size > most else f"{size:,}"


def _stream(file: pa.NativeFile, codec: str, most: int) -> pa.Buffer:
    """Inflate a stream, at most a chunk more than is expected."""
    sink = pa.BufferOutputStream()
    with pa.CompressedInputStream(file, codec) as stream:
        while sink.tell() <= most:
            chunk = stream.read_buffer(min(_CHUNK, most + 1 - sink.tell()))
            if not chunk.size:
                break
            sink.write(chunk)
    return sink.getvalue()


def _snappy(data: pa.Buffer, most: int) -> pa.Buffer:
    """Inflate a block without frame, whose size stands before it."""
    size = shift = 0
    for byte in data.slice(0, 5).to_pybytes():
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if size > min(most, data.size * _SNAPPY_RATIO):
        raise ValueError(f"it claims to inflate to {size:,} bytes")
    return pa.Codec("snappy").decompress(data, decompressed_size=size)


def _check(name: str, file: pa.NativeFile, hashes: tuple[tuple[str, str], ...]) -> None:
    digests = [(algorithm, _hasher(algorithm, name), digest) for algorithm, digest in hashes]
    file.seek(0)
    while chunk := file.read_buffer(_CHUNK):
        for _, hasher, _ in digests:
            hasher.update(chunk)
    file.seek(0)
    for algorithm, hasher, digest in digests:
        if hasher.hexdigest() != digest.lower():
            raise SourceError(
                f"{name} has the {algorithm} {hasher.hexdigest()}, but the index says {digest}",
                file=name,
            )


def _hasher(algorithm: str, name: str) -> Any:
    if algorithm.startswith("xxh"):
        try:
            xxhash = importlib.import_module("xxhash")
        except ImportError:
            raise MissingDependencyError(
                f"the index has the {algorithm} of {name}, and check_hashes=True needs xxhash "
                "for it: pip install '.[mds]' in a clone"
            ) from None
        maker: Callable[[], Any] | None = getattr(xxhash, algorithm, None)
    elif algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_"):
        return hashlib.new(algorithm, usedforsecurity=False)
    else:
        maker = None
    if maker is None:
        raise SourceError(
            f"the index has a hash {algorithm!r} of {name}, which is unknown; leave out "
            "check_hashes=",
            file=name,
        )
    return maker()
