"""The bodies of chunks: items one after another, in whichever way they are wrapped."""

from __future__ import annotations

import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.files import Store
from destrier.formats.gather import Bytes, Ints, as_bytes, list_offsets
from destrier.formats.litdata.encryption import Cipher
from destrier.formats.litdata.index import Chunk, Config
from destrier.formats.litdata.places import Place
from destrier.formats.litdata.zstd import content_sizes, inflate, inflate_frames
from destrier.writing.source import BATCH_BYTES

__all__ = ["Body", "Classic", "Items", "Rows", "Window", "open_body"]

ARROW_MAGIC = b"LDARW01\0"
FRAMED_MAGIC = b"LDFZ01\0\0"
_FOOTER = struct.Struct("<I8s")
_FRAMED = struct.Struct("<8sHHIII")
_FRAME = np.dtype(
    [("first", "<u4"), ("rows", "<u4"), ("at", "<u8"), ("packed", "<u4"), ("plain", "<u4")]
)
_MOST_BYTES = (1 << 32) + (1 << 20)  # offsets are 32 bits wide


@dataclass(frozen=True)
class Window:
    """Consecutive items of a chunk, one after another in one buffer.

    Attributes:
        first: The row in the chunk of the first item.
        data: The buffer.
        bounds: Where the items begin in it, and where the last one ends.
        position: Of the buffer in the chunk's file, or None if the file holds them otherwise.
    """

    first: int
    data: Bytes
    bounds: Ints
    position: int | None = None


class Raw(ABC):
    """The bytes of a chunk, after what wraps the file as a whole."""

    size: int

    @abstractmethod
    def read(self, start: int, size: int) -> pa.Buffer:
        """Read a range that lies within the size."""


class _FileRaw(Raw):
    def __init__(self, file: pa.NativeFile, size: int) -> None:
        self.file = file
        self.size = size

    def read(self, start: int, size: int) -> pa.Buffer:
        self.file.seek(start)
        return self.file.read_buffer(size)


class _BufferRaw(Raw):
    def __init__(self, buffer: pa.Buffer) -> None:
        self.buffer = buffer
        self.size = buffer.size

    def read(self, start: int, size: int) -> pa.Buffer:
        return self.buffer.slice(start, size)


class Body(ABC):
    """What a chunk holds."""

    rows: int


@dataclass
class Rows(Body):
    """The rows of a chunk as an Arrow file or stream, in a range of the chunk."""

    rows: int
    raw: Raw
    start: int
    size: int

    def read(self, most: int | None = None) -> pa.Buffer:
        """All of its bytes, or the first ones."""
        return self.raw.read(self.start, self.size if most is None else min(most, self.size))


class Items(Body):
    """The items of a chunk."""

    rows: int

    @abstractmethod
    def windows(self) -> Iterator[Window]:
        """The items in windows of at most `BATCH_BYTES` or one item."""


@dataclass
class Classic(Items):
    """Items that lie in the file as they are.

    Attributes:
        raw: The chunk.
        offsets: Of the items in it.
        in_file: Whether `raw` is the file itself.
    """

    rows: int
    raw: Raw
    offsets: Ints
    in_file: bool

    def windows(self) -> Iterator[Window]:
        """The items, cut at `BATCH_BYTES`."""
        for start, stop in runs(self.offsets):
            begin, end = int(self.offsets[start]), int(self.offsets[stop])
            data = as_bytes(self.raw.read(begin, end - begin))
            bounds = self.offsets[start : stop + 1] - begin
            yield Window(start, data, bounds, begin if self.in_file else None)


@dataclass
class _Framed(Items):
    rows: int
    raw: Raw
    offsets: Ints
    frames: Any
    place: Place

    def windows(self) -> Iterator[Window]:
        frames = self.frames
        borders = np.append(frames["first"], self.rows).astype(np.int64)
        for one, other in runs(self.offsets[borders]):
            first, last = int(borders[one]), int(borders[other])
            offsets = self.offsets[first : last + 1] - self.offsets[first]
            data = self._inflate(frames[one:other], first)
            for start, stop in runs(offsets):  # a frame alone may be large
                begin, end = int(offsets[start]), int(offsets[stop])
                bounds = offsets[start : stop + 1] - begin
                yield Window(first + start, data[begin:end], bounds)

    def _inflate(self, frames: Any, first: int) -> Bytes:
        """Several frames at once, which costs little more than one."""
        parts = [self.raw.read(int(at), int(n)) for at, n in frames[["at", "packed"]]]
        packed = as_bytes(b"".join(parts))
        bounds = list_offsets(frames["packed"].astype(np.int64))
        sizes = content_sizes(packed, bounds)
        if sizes is not None and (sizes == frames["plain"]).all():
            with contextlib.suppress(ValueError):
                return as_bytes(inflate_frames(packed, int(sizes.sum())))
        whole = []
        for part, frame in zip(parts, frames, strict=True):
            try:
                whole.append(inflate(part, size=int(frame["plain"]), most=_MOST_BYTES))
            except ValueError as error:
                row = int(frame["first"]) - first
                raise Place(self.place.file, first).damaged(str(error), row) from None
        return as_bytes(b"".join(whole))


@dataclass
class _Squeezed(Items):
    """Items that are compressed one by one."""

    rows: int
    inner: Classic
    place: Place

    def windows(self) -> Iterator[Window]:
        for window in self.inner.windows():
            sizes = content_sizes(window.data, window.bounds)
            if sizes is None:
                yield from _unwrapped(window, self._one, self.place)
                continue
            offsets = list_offsets(sizes)
            for start, stop in runs(offsets):
                bounds = window.bounds[start : stop + 1]
                data = window.data[bounds[0] : bounds[-1]]
                plain = offsets[start : stop + 1] - offsets[start]
                try:
                    inflated = as_bytes(inflate_frames(data, int(plain[-1])))
                except ValueError:  # find the one that is damaged
                    part = Window(window.first + start, data, bounds - bounds[0])
                    yield from _unwrapped(part, self._one, self.place)
                    continue
                yield Window(window.first + start, inflated, plain)

    @staticmethod
    def _one(item: Bytes) -> Any:
        return memoryview(inflate(pa.py_buffer(item), most=_MOST_BYTES))


@dataclass
class _Sealed(Items):
    """Items that are encrypted one by one."""

    rows: int
    inner: Classic
    cipher: Cipher
    place: Place

    def windows(self) -> Iterator[Window]:
        for window in self.inner.windows():
            yield from _unwrapped(window, self._one, self.place)

    def _one(self, item: Bytes) -> Any:
        return self.cipher.decrypt(item.tobytes())


def _unwrapped(window: Window, unwrap: Callable[[Bytes], Any], place: Place) -> Iterator[Window]:
    parts: list[Any] = []
    held, first = 0, window.first
    for number in range(len(window.bounds) - 1):
        begin, end = int(window.bounds[number]), int(window.bounds[number + 1])
        try:
            part = unwrap(window.data[begin:end])
        except ValueError as error:
            raise place.damaged(str(error), window.first + number) from None
        if parts and held + len(part) > BATCH_BYTES:
            yield _joined(first, parts)
            parts, held, first = [], 0, window.first + number
        parts.append(part)
        held += len(part)
    if parts:
        yield _joined(first, parts)


def _joined(first: int, parts: list[Any]) -> Window:
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    data = as_bytes(b"".join(parts)) if len(parts) > 1 else as_bytes(parts[0])
    return Window(first, data, list_offsets(sizes))


def runs(offsets: Ints) -> Iterator[tuple[int, int]]:
    """Cut items into runs of at most `BATCH_BYTES` or one item."""
    count = len(offsets) - 1
    start = 0
    while start < count:
        limit = offsets[start] + BATCH_BYTES
        stop = int(np.searchsorted(offsets, limit, "right")) - 1
        stop = min(max(stop, start + 1), count)
        yield start, stop
        start = stop


def open_body(store: Store, chunk: Chunk, config: Config, cipher: Cipher | None) -> Body:
    """Open a chunk and check its header against the index.

    Raises:
        SourceError: If it is damaged or disagrees with the index.
    """
    place = Place(store.show(chunk.file.path))
    raw, in_file = _unwrap_file(store, chunk, config, cipher, place)
    head = raw.read(0, min(raw.size, _FRAMED.size)).to_pybytes()
    if head[:8] == FRAMED_MAGIC:
        return _framed(raw, head, chunk, place)
    if len(head) < 4:
        raise place.damaged(f"has {raw.size:,} bytes, too few for a chunk")
    rows = int.from_bytes(head[:4], "little")
    if config.level == "batch" and not _is_arrow(raw):
        raise place.damaged("does not begin as a chunk compressed in frames does")
    if rows != chunk.rows:
        raise place.damaged(f"holds {rows:,} samples, but the index lists {chunk.rows:,}")
    header = 4 + 4 * (rows + 1)
    if header > raw.size:
        raise place.damaged(
            f"has {raw.size:,} bytes, too few for the offsets of {rows:,} samples: it is cut off"
        )
    if _is_arrow(raw):
        return _arrow_rows(rows, raw, place)
    offsets = np.frombuffer(raw.read(4, header - 4), "<u4").astype(np.int64)
    _check_offsets(offsets, header, raw.size, place)
    classic = Classic(rows, raw, offsets, in_file)
    if config.encryption is not None and config.encryption[1] == "sample":
        assert cipher is not None
        return _Sealed(rows, classic, cipher, place)
    if config.level == "sample":
        return _Squeezed(rows, classic, place)
    return classic


def _unwrap_file(
    store: Store, chunk: Chunk, config: Config, cipher: Cipher | None, place: Place
) -> tuple[Raw, bool]:
    file = store.open(chunk.file.path)
    size = int(file.size())
    encrypted = config.encryption is not None and config.encryption[1] == "chunk"
    if not config.whole_file and not encrypted:
        _check_length(chunk, (size,), place)
        return _FileRaw(file, size), True
    with file:
        file.seek(0)
        buffer = file.read_buffer(size)
    sizes = [] if config.whole_file else [size]
    try:
        if config.whole_file:
            most = max(chunk.nbytes, 1) + 4 * (chunk.rows + 2)
            buffer = inflate(buffer, most=min(most, 2 * _MOST_BYTES))
            sizes.append(buffer.size)
        if encrypted:
            assert cipher is not None
            buffer = pa.py_buffer(cipher.decrypt(buffer.to_pybytes()))
            sizes.append(buffer.size)
    except ValueError as error:
        raise place.damaged(str(error)) from None
    _check_length(chunk, tuple(sizes), place)
    return _BufferRaw(buffer), False


def _check_length(chunk: Chunk, sizes: tuple[int, ...], place: Place) -> None:
    header = 4 * (chunk.rows + 2)  # which old versions left out of the length
    if not any(chunk.nbytes in (size, size - header) for size in sizes):
        shown = " or ".join(f"{size:,}" for size in sizes)
        raise place.damaged(
            f"has {shown} bytes, but the index lists {chunk.nbytes:,}: the file is cut off, or of "
            "another version of the dataset"
        )


def _check_offsets(offsets: Ints, header: int, size: int, place: Place) -> None:
    if offsets[0] != header:
        raise place.damaged(f"its first sample begins at {offsets[0]:,} instead of {header:,}")
    if (falling := np.flatnonzero(offsets[1:] < offsets[:-1])).size:
        row = int(falling[0])
        raise place.damaged(
            f"its offsets are out of order: {offsets[row]:,} before {offsets[row + 1]:,}", row
        )
    if offsets[-1] != size:
        row = int(min(np.searchsorted(offsets, size, "right") - 1, len(offsets) - 2))
        raise place.damaged(
            f"its samples end at {offsets[-1]:,}, but the chunk at {size:,} bytes", row
        )


def _is_arrow(raw: Raw) -> bool:
    if raw.size < _FOOTER.size:
        return False
    return bool(raw.read(raw.size - 8, 8).to_pybytes() == ARROW_MAGIC)


def _arrow_rows(rows: int, raw: Raw, place: Place) -> Rows:
    tail = raw.read(raw.size - _FOOTER.size, _FOOTER.size).to_pybytes()
    size, _ = _FOOTER.unpack(tail)
    start = raw.size - _FOOTER.size - size
    if start < 0 or size == 0:
        raise place.damaged(f"its Arrow rows claim {size:,} bytes of {raw.size:,}")
    return Rows(rows, raw, start, size)


def _framed(raw: Raw, head: bytes, chunk: Chunk, place: Place) -> Items:
    if len(head) < _FRAMED.size:
        raise place.damaged(f"has {raw.size:,} bytes, too few for a chunk")
    _, version, flags, rows, _, count = _FRAMED.unpack(head)
    if version != 1 or flags != 0:
        raise place.damaged(f"is of version {version} with flags {flags}; known is 1 with 0")
    if rows != chunk.rows:
        raise place.damaged(f"holds {rows:,} samples, but the index lists {chunk.rows:,}")
    table = _FRAMED.size + 4 * (rows + 1)
    header = table + _FRAME.itemsize * count
    if header > raw.size:
        raise place.damaged(
            f"has {raw.size:,} bytes, too few for the offsets of {rows:,} samples in {count:,} "
            "frames: it is cut off"
        )
    offsets = np.frombuffer(raw.read(_FRAMED.size, 4 * (rows + 1)), "<u4").astype(np.int64)
    frames = np.frombuffer(raw.read(table, _FRAME.itemsize * count), _FRAME)
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise place.damaged("its offsets are out of order")
    firsts = frames["first"].astype(np.int64)
    ends = firsts + frames["rows"]
    whole = count and firsts[0] == 0 and ends[-1] == rows and (firsts[1:] == ends[:-1]).all()
    if not whole and (rows or count):
        raise place.damaged("its frames do not hold every sample once")
    if (frames["plain"] != offsets[ends] - offsets[firsts]).any():
        raise place.damaged("its frames and its offsets disagree")
    at = frames["at"]
    if (at < header).any() or (at > raw.size).any():
        raise place.damaged("a frame lies outside of it: it is cut off")
    if (at.astype(np.int64) + frames["packed"] > raw.size).any():
        raise place.damaged("a frame ends beyond it: it is cut off")
    return _Framed(rows, raw, offsets, frames, place)
