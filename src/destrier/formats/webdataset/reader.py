"""Forward reads of a tar: from a map of a file, by ranges of a remote one, or from a stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from destrier.errors import SourceError
from destrier.files import File, Store
from destrier.lancecalls import redact

__all__ = ["Reader", "compression", "open_reader"]

_CHUNK = 4 << 20
_AHEAD = 1 << 20  # about what latency costs: 15 ms at 70 MB/s
_HEADERS = 64 << 10  # where members are larger than that, more is read in vain

_COMPRESSIONS = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
)
_EXTENSIONS = {
    ".tgz": "gzip",
    ".gz": "gzip",
    ".zst": "zstd",
    ".bz2": "bz2",
    ".tbz2": "bz2",
    ".xz": "xz",
    ".txz": "xz",
}


class Reader(Protocol):
    """Gives bytes of a tar at places that never go back by more than it gave last.

    Attributes:
        shown: Name of the tar, for messages.
        size: Bytes of the tar, None if it is compressed: then that is known only at its end.
    """

    shown: str
    size: int | None

    def view(self, position: int, size: int) -> memoryview:
        """The bytes from a position; fewer only where the tar ends."""


def compression(path: str) -> str | None:
    """The compression that a name stands for, None for a plain tar."""
    for ending, name in _EXTENSIONS.items():
        if path.lower().endswith(ending):
            return name
    return None


@contextlib.contextmanager
def open_reader(store: Store, file: File, *, headers_only: bool) -> Iterator[Reader]:
    """Open a tar for one pass.

    Args:
        store: That it lies in.
        file: The tar, as it was listed.
        headers_only: Whether most of what the members hold is passed over.

    Raises:
        SourceError: If it is not as it was listed, or in a compression that is not supported.
    """
    shown = store.show(file.path)
    with store.open(file.path) as opened:
        found = opened.size()
        if found != file.size:
            raise SourceError(
                f"{shown} has {found:,} bytes, but {file.size:,} when it was listed: it is being "
                "written; start again when it is complete",
                file=shown,
            )
        head = opened.read_at(8, 0)
        codec = next((name for magic, name in _COMPRESSIONS if head.startswith(magic)), None)
        if codec is None and store.local:
            opened.seek(0)
            yield _Mapped(shown, opened.read_buffer())
            return
        if codec is None and headers_only:
            yield _Ranged(shown, opened)
            return
    if codec == "xz":
        raise SourceError(
            f"{shown} is compressed by xz, which is not supported: unpack it with xz -d first",
            file=shown,
        )
    with store.stream(file.path) as stream:
        if codec is None:
            yield _Streamed(shown, stream, file.size)
            return
        with pa.CompressedInputStream(stream, codec) as plain:
            yield _Streamed(shown, plain, None)


class _Mapped:
    def __init__(self, shown: str, buffer: pa.Buffer) -> None:
        self.shown = shown
        self.size: int | None = buffer.size
        self._view = memoryview(buffer)

    def view(self, position: int, size: int) -> memoryview:
        return self._view[position : position + size]


class _Ranged:
    """Reads a window at a time, a small one after a jump beyond it."""

    def __init__(self, shown: str, file: pa.NativeFile) -> None:
        self.shown = shown
        self.size: int | None = file.size()
        self._file = file
        self._start = 0
        self._window = memoryview(b"")

    def view(self, position: int, size: int) -> memoryview:
        start = position - self._start
        if start < 0 or start + size > len(self._window):
            jumped = start > len(self._window) + _AHEAD
            window = max(size, _HEADERS if jumped else _AHEAD)
            assert self.size is not None
            window = max(0, min(window, self.size - position))
            self._window = memoryview(_read(self.shown, self._file, window, position))
            self._start, start = position, 0
        return self._window[start : start + size]


class _Streamed:
    """Holds one window of a stream; what was given out of an older one stays valid."""

    def __init__(self, shown: str, stream: pa.NativeFile, size: int | None) -> None:
        self.shown = shown
        self.size = size
        self._stream = stream
        self._start = 0
        self._window = memoryview(b"")

    def view(self, position: int, size: int) -> memoryview:
        start = position - self._start
        if start + size > len(self._window):
            self._advance(position, size)
            start = position - self._start
        return self._window[start : start + size]

    def _advance(self, position: int, size: int) -> None:
        """Make a window that begins at the position and, but at the end, holds the size."""
        while (end := self._start + len(self._window)) < position:
            chunk = _read(self.shown, self._stream, min(_CHUNK, position - end))
            if not chunk:
                break
            self._start, self._window = end, memoryview(chunk)
        parts = [bytes(self._window[position - self._start :])]
        held = len(parts[0])
        while held < size or len(parts) == 1:
            chunk = _read(self.shown, self._stream, _CHUNK)
            if not chunk:
                break
            parts.append(chunk)
            held += len(chunk)
        self._start, self._window = position, memoryview(b"".join(parts))


def _read(shown: str, file: pa.NativeFile, size: int, position: int | None = None) -> bytes:
    try:
        return bytes(file.read(size) if position is None else file.read_at(size, position))
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{shown}: {redact(str(error))}", file=shown) from None
