"""Which rows: lists of row offsets, and the selection that a filter makes.

A row list is anything with a length and random access from position to row offset. The order
permutes positions; what lies behind them is decided here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
import time
import warnings
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import lance
import numpy as np

from destrier.errors import DestrierWarning, EmptyError, FilterError, ReadError
from destrier.lancecalls import lance_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from destrier.table import Table

__all__ = [
    "SPARSE",
    "BitmapRows",
    "OffsetRows",
    "RangeRows",
    "RowList",
    "alone",
    "cache_folder",
    "select_rows",
]

_SCAN_ROWS = 1 << 16
_SCAN_AHEAD = 4  # batches; Lance would read gigabytes ahead
_SCAN_BYTES = 32 << 20
_DIRECTORY_WORDS = 8  # words of bitmap per directory entry
SPARSE = 1 / 64  # below this density offsets are smaller than the bitmap
_MAGIC = b"destrier-rows-1\n"
_HEADER_BYTES = 4096  # at most
_FILTER_SHOWN = 200
# What such a function keeps depends on when it is asked: it is asked anew by each stream.
_VOLATILE = re.compile(r"\b(now|random|uuid|current_\w+|today)\b", re.IGNORECASE)
_LOCK_POLL = 0.05  # seconds, as the next two
_LOCK_WARN = 30
_LOCK_GIVE_UP = 600
_SELECT_BLOCK = 1 << 16  # positions worked on at once: each needs 64 bytes on the way
_LONG_RUN = 1 << 10


class RowList(Protocol):
    """Row offsets in some order, with random access."""

    def __len__(self) -> int:
        """How many rows are listed."""
        ...

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row offsets at the given positions."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the content: equal lists have equal digests."""
        ...


class RangeRows:
    """Successive rows of a table: all of them, or those from a first one on."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.count = count
        self.start = start

    def __len__(self) -> int:
        return self.count

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions are offsets, but for the start."""
        return positions + self.start if self.start else positions

    @property
    def digest(self) -> str:
        """Which rows, so many."""
        return f"from-{self.start}-{self.count}" if self.start else f"all-{self.count}"


class OffsetRows:
    """An explicit list of row offsets: a sparse selection, or any list of a user's."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self.values = values
        self._digest: str | None = None

    @cached_property
    def ascending(self) -> bool:
        """Whether each row comes once, in table order."""
        return bool((self.values[1:] > self.values[:-1]).all())

    def __len__(self) -> int:
        return len(self.values)

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look the positions up."""
        return np.asarray(self.values[positions], np.int64)

    @property
    def digest(self) -> str:
        """Of the offsets in their order."""
        if self._digest is None:
            self._digest = _digest(b"offsets", self.values)
        return self._digest


class BitmapRows:
    """A selection in table order as a bitmap with rank and select.

    Costs 1.125 bits a row of the table. ``words`` holds one bit a row, least significant first;
    ``ranks[i]`` counts the set bits before word ``8·i``.
    """

    def __init__(self, words: NDArray[np.uint64], ranks: NDArray[np.int64] | None = None) -> None:
        self.words = words
        self.ranks = _directory(words) if ranks is None else ranks
        self._digest: str | None = None

    def __len__(self) -> int:
        return int(self.ranks[-1])

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Select: the offset of the p-th set bit, for each p.

        A binary search in the directory, then popcounts of eight words, then six halvings.
        """
        out = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), _SELECT_BLOCK):
            block = slice(start, start + _SELECT_BLOCK)
            some = positions[block]
            run = len(some) >= _LONG_RUN and some[-1] - some[0] == len(some) - 1
            run = run and (some[1:] - some[:-1] == 1).all()
            out[block] = self._run(int(some[0]), len(some)) if run else self._select(some)
        return out

    def _run(self, first: int, count: int) -> NDArray[np.int64]:
        """The offsets of successive positions: their words are unpacked, which costs a tenth."""
        a, b = np.searchsorted(self.ranks, [first, first + count - 1], side="right").tolist()
        words = self.words[(a - 1) * _DIRECTORY_WORDS : b * _DIRECTORY_WORDS]
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
        skipped = first - int(self.ranks[a - 1])
        run: NDArray[np.int64] = np.flatnonzero(bits)[skipped : skipped + count]
        run += (a - 1) * _DIRECTORY_WORDS * 64
        return run

    def _select(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        entry = np.searchsorted(self.ranks, positions, side="right") - 1
        rest = positions - self.ranks[entry]
        start = entry * _DIRECTORY_WORDS
        index = start[:, None] + np.arange(_DIRECTORY_WORDS)
        counts = _popcount(self.words[np.minimum(index, len(self.words) - 1)])
        sums = np.cumsum(counts, axis=1)
        inner = (sums <= rest[:, None]).sum(axis=1)
        before = np.where(inner > 0, np.take_along_axis(sums, inner[:, None] - 1, 1)[:, 0], 0)
        rest = rest - before
        word = self.words[start + inner]
        place: NDArray[np.int64] = (start + inner) * 64 + _select_in_word(word, rest)
        return place

    @property
    def digest(self) -> str:
        """Of the bits."""
        if self._digest is None:
            self._digest = _digest(b"bitmap", self.words)
        return self._digest


def _digest(kind: bytes, values: NDArray[Any]) -> str:
    digest = hashlib.blake2b(kind, digest_size=16)
    for i in range(0, len(values), 1 << 20):
        digest.update(np.ascontiguousarray(values[i : i + (1 << 20)]).data)
    return digest.hexdigest()


def _popcount(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words).astype(np.int64)
    x = words - ((words >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    counts: NDArray[np.int64] = ((x * np.uint64(0x0101010101010101)) >> np.uint64(56)).astype(
        np.int64
    )
    return counts


def _directory(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    if not len(words):
        return np.zeros(1, np.int64)
    counts = np.add.reduceat(_popcount(words), np.arange(0, len(words), _DIRECTORY_WORDS))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _select_in_word(word: NDArray[np.uint64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of the rank-th set bit of each word."""
    place = np.zeros(len(word), np.int64)
    word = word.copy()
    rank = rank.copy()
    for width in (32, 16, 8, 4, 2, 1):
        low = _popcount(word & np.uint64((1 << width) - 1))
        high = rank >= low
        rank -= np.where(high, low, 0)
        place += np.where(high, width, 0)
        word = np.where(high, word >> np.uint64(width), word)
    return place


# ---- the selection of a filter --------------------------------------------------------------


def select_rows(table: Table, filter: str | None) -> RowList:
    """Return the rows that a filter keeps, in table order.

    The filter is run once per table identity and text on a machine: the result is kept in a file
    in the cache folder, which processes map into memory together. Where the folder cannot be
    written, the result stays in memory, with a warning.

    Args:
        table: The pinned table.
        filter: An SQL expression of Lance's dialect, or None for all rows.

    Raises:
        FilterError: If Lance cannot run the filter.
        EmptyError: If no row is left.
    """
    if filter is None:
        rows: RowList = RangeRows(table.num_rows)
        if not len(rows):
            raise EmptyError(f"{table.name} has no rows")
        return rows
    columns = ",".join(f"{field.name} {field.type}" for field in table.schema)
    text = f"{lance.__version__}|{table.identity}|{table.version}|{columns}|{filter}"
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest() + ".rows"
    path = cache_folder() / name
    if _VOLATILE.search(filter):
        return _some(_scan(table, filter), table, filter)
    cached = _load(path)
    if cached is None:
        with alone(path):
            cached = _load(path)
            if cached is None:
                built = _scan(table, filter)
                cached = _save(path, built)
    return _some(cached, table, filter)


def _some(rows: RowList, table: Table, filter: str) -> RowList:
    if not len(rows):
        raise EmptyError(
            f"the filter {_shown(filter)} keeps none of the {table.num_rows} rows of {table.name}"
        )
    return rows


def _shown(filter: str) -> str:
    return repr(filter if len(filter) <= _FILTER_SHOWN else filter[:_FILTER_SHOWN] + " ...")


def _scan(table: Table, filter: str) -> BitmapRows | OffsetRows:
    """Run the filter: one scan of its columns, through scalar indices where there are any."""
    total = table.num_rows
    bits = np.zeros(-(-total // 64) * 8, np.uint8)

    def run() -> None:
        scanner = table.dataset.scanner(
            columns=["_rowoffset"],
            filter=filter,
            batch_size=_SCAN_ROWS,
            batch_readahead=_SCAN_AHEAD,
            io_buffer_size=_SCAN_BYTES,
            scan_in_order=True,
        )
        for batch in scanner.to_batches():
            offsets = batch.column(0).to_numpy()
            if not len(offsets):
                continue
            first = int(offsets.min()) & ~7
            mask = np.zeros(int(offsets.max()) + 1 - first, np.bool_)
            mask[offsets - first] = True
            packed = np.packbits(mask, bitorder="little")
            bits[first // 8 : first // 8 + len(packed)] |= packed

    try:
        lance_call("the filter failed", run, table.secrets)
    except ReadError as error:
        raise FilterError(
            f"cannot run the filter {_shown(filter)} on {table.name}: {error}; "
            f"its columns are: {', '.join(table.schema.names)}"
        ) from error
    rows = BitmapRows(bits.view(np.uint64))
    if len(rows) < total * SPARSE:
        return OffsetRows(rows.offsets(np.arange(len(rows))))
    return rows


# ---- the file shared by the processes of a machine ------------------------------------------


def cache_folder() -> Path:
    """The folder for selections: ``$DESTRIER_CACHE``, else ``destrier`` in the user's cache."""
    chosen = os.environ.get("DESTRIER_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "destrier"


def _load(path: Path) -> BitmapRows | OffsetRows | None:
    """Map a stored selection; None if there is none or it is damaged."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            (size,) = struct.unpack("<q", file.read(8))
            if not 0 < size <= _HEADER_BYTES:
                return None
            header = json.loads(file.read(size))
            start = file.tell()
        kind, length = header["kind"], header["length"]
        if path.stat().st_size != start + 8 * length + 8 * header["ranks"]:
            return None
        dtype = np.uint64 if kind == "bitmap" else np.int64
        values = _map(path, start, length, dtype)
        rows: BitmapRows | OffsetRows
        if kind == "bitmap":
            ranks = _map(path, start + 8 * length, header["ranks"], np.int64)
            if not np.array_equal(ranks, _directory(values)):
                return None
            rows = BitmapRows(values, ranks)
        else:
            rows = OffsetRows(values)
    except (OSError, ValueError, KeyError, struct.error, TypeError):
        return None
    return rows if rows.digest == header["digest"] else None


def _map(path: Path, start: int, length: int, dtype: Any) -> NDArray[Any]:
    if not length:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", start, (length,))


def _save(path: Path, rows: BitmapRows | OffsetRows) -> BitmapRows | OffsetRows:
    """Write the selection by rename and return it mapped; in memory where that fails."""
    bitmap = isinstance(rows, BitmapRows)
    values: NDArray[Any] = rows.words if isinstance(rows, BitmapRows) else rows.values
    ranks = rows.ranks if isinstance(rows, BitmapRows) else np.empty(0, np.int64)
    header: dict[str, Any] = {
        "kind": "bitmap" if bitmap else "offsets",
        "length": len(values),
        "ranks": len(ranks),
        "digest": rows.digest,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(_MAGIC) + 8 + len(text)) % 8)  # so that the words are aligned
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + struct.pack("<q", len(text)) + text)
                file.write(values.data)
                file.write(ranks.data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(
            f"the selection stays in memory, because the cache folder {path.parent} cannot be "
            f"written ({error.strerror}); set DESTRIER_CACHE to one that can",
            DestrierWarning,
            stacklevel=4,
        )
        return rows
    return _load(path) or rows


def _wait_for(lock: IO[bytes], path: Path) -> None:
    """Take the lock; after some minutes go on without it, for its holder may be stuck."""
    import fcntl

    began = time.monotonic()
    warned = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
        else:
            return
        if waited > _LOCK_GIVE_UP:
            return
        if waited > _LOCK_WARN and not warned:
            warned = True
            warnings.warn(
                f"another process has been building {path} for {waited:.0f} s; "
                f"after {_LOCK_GIVE_UP} s it is built here too",
                DestrierWarning,
                stacklevel=6,
            )
        time.sleep(_LOCK_POLL)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process of a machine build a file while the others wait for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("wb")
    except OSError:
        yield  # two may build at once: they write the same file, each by rename
        return
    with lock:
        try:
            _wait_for(lock, path)
        except (ImportError, OSError):  # no such locks on this system, or on this file system
            yield
            return
        try:
            yield
        finally:
            path.with_suffix(".lock").unlink(missing_ok=True)
