"""The file of lengths that the processes of a machine share.

::

    header     4,096 bytes: what follows, as JSON
    lengths    uint32, one a document; 2**32 - 1 for a list that is missing
    sums       int64: tokens, and documents with any, before each group of 1,024 documents

It is written once by rename and mapped into memory. What a start must look at are the sums: the
lengths of 100 million documents are 400 MB, of which each read touches a few pages. The folder is
kept within bounds: a file that is written takes the place of those that were not used for longest.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from destrier.errors import DestrierWarning
from destrier.keyed import Ints
from destrier.selection import alone, cache_folder

__all__ = ["GROUP", "MISSING", "Stored", "Sums", "stored_lengths"]

GROUP = 1024  # documents whose lengths are summed
MISSING = (1 << 32) - 1  # the length of a list that is null

_MAGIC = "destrier-lengths-1"
_HEADER_BYTES = 4096
_MOST_FILES = 1024
_MOST_BYTES = 8 << 30  # of all files


@dataclass(frozen=True)
class Sums:
    """What lies before each group of documents, and in all of them at the end.

    Attributes:
        tokens: Tokens.
        some: Documents that have any.
    """

    tokens: Ints
    some: Ints


@dataclass(frozen=True)
class Stored:
    """Lengths as they are kept.

    Attributes:
        missing: The place of the first list that is null, if there is one.
    """

    values: NDArray[np.uint32]
    sums: Sums
    digest: str
    missing: int | None


def stored_lengths(key: str, find: Callable[[], Iterable[NDArray[np.uint32]]]) -> Stored:
    """Return the lengths kept under a key; they are found where there are none yet.

    Args:
        key: What the lengths depend on.
        find: Yields them, piece by piece.
    """
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".lengths"
    path = cache_folder() / name
    found = _load(path)
    if found is None:
        with alone(path):
            found = _load(path) or _keep(path, find)
    with suppress(OSError):
        os.utime(path)  # when it was used last
    return found


class _Builder:
    """Adds lengths up as they come."""

    def __init__(self) -> None:
        self.count = 0
        self.missing: int | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self._rest = np.empty(0, np.uint32)
        self._tokens: list[Ints] = [np.zeros(1, np.int64)]
        self._some: list[Ints] = [np.zeros(1, np.int64)]

    def add(self, piece: NDArray[np.uint32]) -> None:
        if self.missing is None and len(piece) and piece.max() == MISSING:
            self.missing = self.count + int(np.argmax(piece))
        self.count += len(piece)
        self._digest.update(np.ascontiguousarray(piece, "<u4").data)
        self._rest = np.concatenate([self._rest, piece])
        whole = len(self._rest) // GROUP * GROUP
        self._sum(self._rest[:whole].reshape(-1, GROUP))
        self._rest = self._rest[whole:]

    def _sum(self, groups: NDArray[np.uint32]) -> None:
        self._tokens.append(groups.sum(axis=1, dtype=np.int64))
        self._some.append((groups > 0).sum(axis=1, dtype=np.int64))

    def result(self) -> tuple[Sums, str]:
        if len(self._rest):
            self._sum(self._rest[None])
            self._rest = self._rest[:0]
        tokens, some = (np.cumsum(np.concatenate(a)) for a in (self._tokens, self._some))
        return Sums(tokens, some), self._digest.hexdigest()


class _UnwritableError(Exception):
    """The cache folder takes no file."""


def _keep(path: Path, find: Callable[[], Iterable[NDArray[np.uint32]]]) -> Stored:
    """Write the lengths by rename and return them mapped; in memory where that fails."""
    try:
        _write(path, find())
        kept = _load(path)
        _clean(path)
    except _UnwritableError as error:
        warnings.warn(
            f"the lengths of documents stay in memory, because the cache folder {path.parent} "
            f"cannot be written ({error}); set DESTRIER_CACHE to one that can",
            DestrierWarning,
            stacklevel=2,
        )
        kept = None
    return _in_memory(find()) if kept is None else kept


def _clean(written: Path) -> None:
    """Remove the files that were not used for longest, beyond what the folder may have.

    Who has mapped one goes on reading it: on Linux a file that is removed stays until it is let go,
    and where it does not, it cannot be removed.
    """
    files: list[tuple[float, int, Path]] = []
    for path in written.parent.glob("*.lengths"):
        with suppress(OSError):  # another process removed it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    files.sort(key=lambda file: (file[2] == written, file[0]))
    count, size = len(files), sum(size for _, size, _ in files)
    for _, own, path in files:
        if path == written or (count <= _MOST_FILES and size <= _MOST_BYTES):
            return
        with suppress(OSError):
            path.unlink()
        count, size = count - 1, size - own


def _in_memory(pieces: Iterable[NDArray[np.uint32]]) -> Stored:
    builder, kept = _Builder(), [np.empty(0, np.uint32)]
    for piece in pieces:
        builder.add(piece)
        kept.append(piece)
    sums, digest = builder.result()
    return Stored(np.concatenate(kept), sums, digest, builder.missing)


def _write(path: Path, pieces: Iterable[NDArray[np.uint32]]) -> None:
    with _disk():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            _fill(file, pieces)
        with _disk():
            os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _fill(file: IO[bytes], pieces: Iterable[NDArray[np.uint32]]) -> None:
    builder = _Builder()
    with _disk():
        file.write(b" " * _HEADER_BYTES)
    for piece in pieces:
        builder.add(piece)
        with _disk():
            file.write(np.ascontiguousarray(piece, "<u4").data)
    sums, digest = builder.result()
    header = {
        "magic": _MAGIC,
        "count": builder.count,
        "digest": digest,
        "missing": builder.missing,
        "sums": _digest(sums),
    }
    with _disk():
        file.write(bytes(-file.tell() % 8))  # so that the sums are aligned
        file.write(sums.tokens.astype("<i8").data)
        file.write(sums.some.astype("<i8").data)
        file.seek(0)
        file.write(json.dumps(header).encode())


@contextmanager
def _disk() -> Iterator[None]:
    """Tell what the disk refuses from what the table does: both raise OSError."""
    try:
        yield
    except OSError as error:
        raise _UnwritableError(error.strerror) from error


def _digest(sums: Sums) -> str:
    both = np.concatenate([sums.tokens, sums.some]).astype("<i8")
    return hashlib.blake2b(both.data, digest_size=16).hexdigest()


def _load(path: Path) -> Stored | None:
    """Map stored lengths; None if there are none or the file is cut or of another kind."""
    try:
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(_HEADER_BYTES))
        if header["magic"] != _MAGIC:
            return None
        count = int(header["count"])
        sums_at = _HEADER_BYTES + -(-4 * count // 8) * 8
        groups = -(-count // GROUP) + 1
        if path.stat().st_size != sums_at + 16 * groups:
            return None
        pair = np.fromfile(path, "<i8", 2 * groups, offset=sums_at).reshape(2, groups)
        sums = Sums(pair[0], pair[1])
        if _digest(sums) != header["sums"]:
            return None
        values: NDArray[np.uint32] = np.empty(0, np.uint32)
        if count:
            values = np.memmap(path, "<u4", "r", _HEADER_BYTES, (count,))
        return Stored(values, sums, header["digest"], header["missing"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
