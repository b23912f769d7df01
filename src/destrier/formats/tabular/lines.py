"""Whole lines of text files: ranges of bytes that end at line ends, and compressed streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from destrier.errors import SourceError
from destrier.files import Store

__all__ = ["RANGE_BYTES", "LongLineError", "open_file", "open_text", "range_blocks"]

RANGE_BYTES = 64 << 20
"""What a unit of a text file holds, about."""

_MAX_LINE = 256 << 20  # longer is none: a file without line ends must not fill the memory
_BLOCK = 4 << 20


class LongLineError(ValueError):
    """The line after those of the last block is too long."""


def open_file(store: Store, path: str) -> pa.NativeFile:
    """A file for reads anywhere in it, not mapped: what is read does not stay in memory.

    Raises:
        SourceError: If it is not there.
    """
    if not store.local:
        return store.open(path)
    try:
        return pa.OSFile(store.address(path))
    except FileNotFoundError:
        raise SourceError(f"there is no file {store.show(path)}") from None
    except OSError as error:
        raise SourceError(f"{store.show(path)}: {error}") from None


def open_text(store: Store, path: str, compression: str | None) -> pa.NativeFile:
    """A file as its text, decompressed."""
    file = open_file(store, path)
    return pa.CompressedInputStream(file, compression) if compression else file


def range_blocks(  # noqa: C901 - a line may begin and end anywhere in what is read
    read: Callable[[int], bytes], start: int, end: int | None, blank: bytes = b""
) -> Iterator[bytes]:
    """Blocks of whole lines, those that begin in a range of bytes.

    Args:
        read: Reads so many bytes, none at the end; it stands at ``start``, or one byte before it
            unless that is 0, so that a line that begins right there is seen to begin.
        start: Where the range begins in the file.
        end: Where it ends; None is the end of the file.
        blank: Characters that say nothing at the beginning of a line, so that a long run of them
            need not be held.

    Raises:
        LongLineError: If a line is longer than 256 MB.
    """
    position = max(start - 1, 0)
    held: list[bytes] = []  # a line that has not ended
    length = 0
    skipping = start > 0
    while True:
        data = read(_BLOCK)
        if not data:
            break
        begin = position
        position += len(data)
        if skipping:
            found = data.find(b"\n")
            if end is not None and begin + (found if found >= 0 else len(data)) + 1 >= end:
                return
            if found < 0:
                continue
            data, skipping, begin = data[found + 1 :], False, begin + found + 1
        if end is not None and position >= end:
            # the last line is the one that begins before the end
            last = data.find(b"\n", max(end - 1 - begin, 0))
            if last >= 0:
                yield b"".join([*held, data[: last + 1]])
                return
        cut = data.rfind(b"\n") + 1
        if cut and (end is None or position < end):
            yield b"".join([*held, data[:cut]])
            held = [data[cut:].lstrip(blank)]
            length = len(held[0])
        else:
            held.append(data if length else data.lstrip(blank))
            length += len(held[-1])
        if length > _MAX_LINE:
            raise LongLineError(f"the line is longer than {_MAX_LINE:,} bytes")
    rest = b"".join(held)
    if rest:
        yield rest
