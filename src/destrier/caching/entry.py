"""One block of a column in one file.

::

    an Arrow stream of one batch    what it is (JSON)    sums of pages    tail of fixed size

``pyarrow.ipc.open_stream`` reads the batch. Ranges of rows are read without the rest, and every
page that is read is compared with its sum, each time. Files are not mapped: one that is cut while
it is mapped would end the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.caching.checks import PAGE_BYTES, page_begins, page_sums
from destrier.caching.values import NARROW_BYTES, layout_of
from destrier.keyed import Ints, Words
from destrier.memory import fresh

__all__ = ["DamagedError", "FileValues", "pack"]

_MAGIC = b"destrier"
_TAIL = struct.Struct("<8sQQ16s")  # magic, bytes of the JSON, number of sums, digest of both
_DIGEST_BYTES = 16


class DamagedError(Exception):
    """A file does not hold what was written.

    Attributes:
        block: The number of its block.
    """

    def __init__(self, message: str, block: int) -> None:
        super().__init__(message)
        self.block = block


class UnopenedError(Exception):
    """A file is there, perhaps, but could not be opened this time."""


def pack(array: pa.Array, *, column: str, block: int) -> bytes:
    """The content of a file.

    Args:
        array: The block; not of an extension type.
        column: The key of the column, which an entry repeats so that none is taken for another.
        block: The block's number.
    """
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([array], names=["values"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    body = np.frombuffer(stream, np.uint8)
    head: dict[str, Any] = {"column": column, "block": block, "rows": len(array)}
    written = _batch(stream)
    layout = layout_of(written)
    if layout is not None and layout.bounds is not None and _narrow(layout.bounds):
        layout = None
    if layout is not None:
        head["width"] = layout.width
        head["data"] = _place(layout.data, body)
        if layout.bounds is not None:
            head["bounds"] = True
        if layout.valid is not None:
            head["valid"] = True
    pages = -(-len(body) // PAGE_BYTES)
    padded = np.zeros(pages * PAGE_BYTES, np.uint8)
    padded[: len(body)] = body
    sums = (page_begins(pages) + page_sums(padded)).tobytes()
    side = b""
    if layout is not None and layout.bounds is not None:
        side += layout.bounds.tobytes()
    if layout is not None and layout.valid is not None:
        side += np.packbits(layout.valid, bitorder="little").tobytes()
    text = json.dumps({**head, "body": len(body)}).encode()
    tail = _TAIL.pack(_MAGIC, len(text), pages, _digest(text, sums, side))
    return b"".join([stream, side, text, sums, tail])


def _narrow(bounds: Ints) -> bool:
    """Whether values are so small that bounds of each would take as much as they do."""
    return bool(bounds[-1] - bounds[0] < NARROW_BYTES * (len(bounds) - 1))


def _batch(stream: pa.Buffer) -> pa.Array:
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_next_batch().column(0)


def _place(data: NDArray[np.uint8], body: NDArray[np.uint8]) -> tuple[int, int]:
    """Where a part of the body begins, and its bytes."""
    return (int(data.ctypes.data - body.ctypes.data) if len(data) else 0), len(data)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


class FileValues:
    """The values in a file, which is open while it is read only. Safe to use from threads.

    So what was learned of thousands of files can stay in memory, where few could stay open.

    Args:
        open_file: Returns a descriptor, or None if the file is gone.
        column: The key of the column that must be in it.
        block: And the number of the block.
        rows: And how many rows.

    Raises:
        DamagedError: If the file holds anything else.
    """

    def __init__(
        self, open_file: Callable[[], int | None], *, column: str, block: int, rows: int
    ) -> None:
        self._open = open_file
        self._block = block
        try:
            with self._opened() as file:
                self._load(file, column, rows)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise self._damaged(str(error)) from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        file = self._open()
        if file is None:
            raise self._damaged("the file is gone")
        try:
            yield file
        finally:
            os.close(file)

    def _load(self, file: int, column: str, rows: int) -> None:
        size = os.fstat(file).st_size
        if size < _TAIL.size:
            raise self._damaged("the file is cut")
        tail = self._read(file, size - _TAIL.size, _TAIL.size)
        magic, length, pages, digest = _TAIL.unpack(tail)
        start = size - _TAIL.size - length - 8 * pages
        if magic != _MAGIC or start < 0:
            raise self._damaged("the tail is not one")
        rest = self._read(file, start, length + 8 * pages)
        text, sums = rest[:length], rest[length:]
        # The digest covers all of it, but where the sides begin is known only from the text.
        head = json.loads(text)
        body = int(head["body"])
        if not 0 <= body <= start or -(-body // PAGE_BYTES) != pages:
            raise self._damaged("the parts do not fit")
        side = self._read(file, body, start - body)
        if _digest(text, sums, side) != digest:
            raise self._damaged("the sums are not those that were written")
        if (head["column"], head["block"], head["rows"]) != (column, self._block, rows):
            raise self._damaged("it is another block")
        self._size = body
        self._sums: Words = np.frombuffer(sums, np.uint64) - page_begins(pages)
        self.ranged = "data" in head
        self.width: int | None = head.get("width")
        self.bounds: Ints | None = None
        self.valid: NDArray[np.bool_] | None = None
        self._start = head["data"][0] if self.ranged else 0
        used = 0
        if "bounds" in head:
            used = 8 * (rows + 1)
            self.bounds = np.frombuffer(side[:used], np.int64)
        if "valid" in head:
            bits = np.frombuffer(side[used:], np.uint8)
            self.valid = np.unpackbits(bits, count=rows, bitorder="little").astype(np.bool_)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it takes, about."""
        held = (self._sums, self.bounds, self.valid)
        return sum(each.nbytes for each in held if each is not None)

    def _damaged(self, what: str) -> DamagedError:
        return DamagedError(what, self._block)

    def _read(self, file: int, start: int, size: int) -> bytes:
        found = os.pread(file, size, start)
        if len(found) != size:
            raise self._damaged("the file is cut")
        return found

    def data(
        self, start: int, stop: int, scratch: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """A range of bytes of the values.

        Args:
            start: The first.
            stop: One more than the last.
            scratch: Memory to read into where it is large enough, until it is used again.

        Raises:
            DamagedError: If a page of it is not what was written.
        """
        return self._pages(self._start + start, self._start + stop, scratch)

    def array(self) -> pa.Array:
        """All of them.

        Raises:
            DamagedError: If a page is not what was written.
        """
        return _batch(pa.py_buffer(self._pages(0, self._size)))

    def _pages(
        self, start: int, stop: int, scratch: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        first, last = start // PAGE_BYTES, -(-stop // PAGE_BYTES)
        size = (last - first) * PAGE_BYTES
        fits = scratch is not None and size <= len(scratch)
        data = scratch[:size] if scratch is not None and fits else fresh((size,), np.uint8)
        wanted = min(last * PAGE_BYTES, self._size) - first * PAGE_BYTES
        try:
            with self._opened() as file:
                found = os.preadv(file, [data[:wanted].data], first * PAGE_BYTES)
        except OSError as error:
            raise self._damaged(str(error)) from error
        if found != wanted:
            raise self._damaged("the file is cut")
        data[wanted:] = 0
        if (page_sums(data) != self._sums[first:last]).any():
            raise self._damaged(f"pages {first} to {last} are not what was written")
        return data[start - first * PAGE_BYTES : stop - first * PAGE_BYTES]
