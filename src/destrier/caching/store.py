"""The files of a cache: a folder for each column, a file for each block, and one limit for all.

What holds, for any number of processes and jobs on one folder:

- The files take no more than the limit at any moment: room is made, and taken on the disk, before
  a byte is written, under a lock on one file. The file's content is the sum of what is taken; it
  may be too large after a crash, never too small, and is counted anew where it matters.
- Columns that no process uses are removed to make room, those first that were used longest ago.
  A process marks a column as used by a shared lock on a file in its folder. Where all columns are
  in use, nothing is removed, and what does not fit is not kept.
- All locks are `flock`s, which end with their process.
- A file that is being written is locked by its writer: one that is not is a leftover of a process
  that died, and is removed by the next that opens the folder or makes room.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from destrier.caching.entry import UnopenedError
from destrier.errors import DestrierWarning

__all__ = ["Folder", "Store", "warn_once"]

_COLUMN = re.compile(r"([0-9a-f]{32})-(\d+)")
_ENTRY = re.compile(r"\d+\.arrow")
_UNFINISHED = re.compile(r"\d+\.\d+\.part")
_LOCK, _USED = "lock", "used"
_DISK_BLOCK = 4096
_NAME_BYTES = 256  # that a file may add to its folder, about
_FOLDER_BYTES = 3 * _DISK_BLOCK
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 5.0
_BUSY_SECONDS = 60.0  # for which a process does not wait for the lock after it did in vain
_FULL_SECONDS = 10.0  # for which a process does not look for room after there was none
_FULL_LOOKS = 100  # and so many times as long as looking took
_SLACK = 32  # one part in so many is freed beyond what is needed, so that it is seldom done


@dataclass(frozen=True)
class Folder:
    """A column's folder, in use as long as the object is there.

    Attributes:
        key: Of the column.
        block_rows: Rows of a block.
        path: Where its files are.
    """

    key: str
    block_rows: int
    path: Path
    _use: _Descriptor

    def has(self, block: int) -> bool:
        """Whether there is a file of a block."""
        return os.path.exists(f"{self.path}/{block}.arrow")

    def open(self, block: int) -> int | None:
        """A descriptor of a block's file, or None if there is none.

        Raises:
            UnopenedError: If there may be one, but it could not be opened.
        """
        try:
            return os.open(f"{self.path}/{block}.arrow", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnopenedError from error


class _Descriptor:
    """A file descriptor that is closed, and its locks with it, when it is dropped."""

    def __init__(self, path: Path, flags: int) -> None:
        self.number = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Store:
    """A folder of blocks. Safe to use from several threads.

    Args:
        root: The folder; it is made if it is not there.
        limit: Bytes that its files may take.

    Raises:
        OSError: If the folder cannot be written, or takes no locks.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._mutex = threading.Lock()
        self._writable = True
        self._full_until = 0.0
        self._busy_until = 0.0
        self._parts = 0
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _Descriptor(root / _LOCK, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(TimeoutError), self._alone():
            self._make_room(0)

    def column(self, key: str) -> Folder | None:
        """The folder of a column, or None if there is none yet."""
        with self._alone():
            try:
                found = [_COLUMN.fullmatch(name) for name in os.listdir(self.root)]
            except OSError:
                return None
            rows = [int(match[2]) for match in found if match and match[1] == key]
            return self._use(key, min(rows)) if rows else None

    def make_column(self, key: str, block_rows: int) -> Folder | None:
        """Make the folder of a column; None if there is no room for it."""
        with self._alone():
            if not self._take(_FOLDER_BYTES):
                return None
            (self.root / f"{key}-{block_rows}").mkdir(exist_ok=True)
            return self._use(key, block_rows)

    def _use(self, key: str, block_rows: int) -> Folder:
        path = self.root / f"{key}-{block_rows}"
        use = _Descriptor(path / _USED, os.O_RDWR | os.O_CREAT)
        _share(use.number)
        os.utime(use.number)
        return Folder(key, block_rows, path, use)

    @property
    def has_room(self) -> bool:
        """Whether blocks could be kept now, by what is known."""
        return self._writable and time.monotonic() >= self._full_until

    def save(self, folder: Folder, blocks: Mapping[int, bytes]) -> None:
        """Keep blocks, as far as there is room. Where it fails, a warning is given, once."""
        if not self.has_room:
            return
        try:
            self._save(folder, blocks)
        except TimeoutError:
            return  # others are busy; the next process or epoch may keep them
        except OSError as error:
            self._give_up(error)

    def remove(self, folder: Folder, block: int) -> bool:
        """Remove a file that is damaged; whether it is gone."""
        try:
            with self._alone():
                path = folder.path / f"{block}.arrow"
                size = _rounded(path.stat().st_size)
                path.unlink()
                self._add(-size)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    # ---- writing --------------------------------------------------------------------------------

    def _save(self, folder: Folder, blocks: Mapping[int, bytes]) -> None:
        begun: list[tuple[Path, int, _Descriptor]] = []
        try:
            with self._alone():
                for block, content in blocks.items():
                    if (folder.path / f"{block}.arrow").exists():
                        continue
                    if not self._take(_rounded(len(content))):
                        break
                    begun.append(self._begin(folder, block, len(content)))
            for _, block, file in begun:
                _write(file.number, blocks[block])
            with self._alone():
                while begun:
                    part, block, _ = begun[-1]
                    target = folder.path / f"{block}.arrow"
                    if not target.exists():  # else another process was as quick
                        os.rename(part, target)
                        begun.pop()
                        continue
                    part.unlink()
                    self._add(-_rounded(len(blocks[block])))
                    begun.pop()
        finally:
            for part, _, _ in begun:
                part.unlink(missing_ok=True)

    def _begin(self, folder: Folder, block: int, size: int) -> tuple[Path, int, _Descriptor]:
        """Make a file and take its bytes on the disk."""
        self._parts += 1
        path = folder.path / f"{block}.{os.getpid()}{self._parts:06d}.part"
        file = _Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _lock(file.number)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.number, 0, size)
        except BaseException:
            path.unlink()
            raise
        return path, block, file

    def _give_up(self, error: OSError) -> None:
        if self._writable:
            self._writable = False
            warn_once(self.root, error)

    # ---- the limit ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the folder.

        Raises:
            TimeoutError: If others hold it for seconds, as one does that was stopped.
        """
        with self._mutex:
            until = now = time.monotonic()
            if now >= self._busy_until:
                until += _PATIENCE_SECONDS
            while True:
                try:
                    _lock(self._lock.number)
                except BlockingIOError:
                    now = time.monotonic()
                    if now >= until:
                        self._busy_until = now + _BUSY_SECONDS
                        raise TimeoutError(f"{self.root / _LOCK} is held by others") from None
                    time.sleep(_POLL_SECONDS)
                    continue
                if self._is_there():
                    break
                # The folder was emptied meanwhile; two locks would know nothing of each other.
                self._lock = _Descriptor(self.root / _LOCK, os.O_RDWR | os.O_CREAT)
            self._busy_until = 0.0
            try:
                yield
            finally:
                _unlock(self._lock.number)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock.number), os.stat(self.root / _LOCK))
        except OSError:
            return False

    def _take(self, size: int) -> bool:
        """Count bytes that are about to be taken; False if they do not fit."""
        total, began = self._sum(), time.monotonic()
        if (total is None or total + size > self.limit) and not self._make_room(size):
            now = time.monotonic()
            self._full_until = now + max(_FULL_SECONDS, _FULL_LOOKS * (now - began))
            return False
        self._add(size)
        return True

    def _sum(self) -> int | None:
        """Bytes that are taken; None if it is not known."""
        text = os.pread(self._lock.number, 64, 0).decode(errors="replace").split()
        if len(text) != 2 or not all(word.isdecimal() for word in text):
            return None
        return int(text[0]) if int(text[1]) == ~int(text[0]) & 0xFFFF_FFFF else None

    def _set(self, total: int) -> None:
        text = f"{total:020d} {~total & 0xFFFF_FFFF:010d}\n"
        os.pwrite(self._lock.number, text.encode(), 0)

    def _add(self, size: int) -> None:
        total = self._sum()
        if total is not None:
            self._set(max(0, total + size))

    def _make_room(self, size: int) -> bool:
        """Count all files, drop leftovers, and remove columns in no use until there is room."""
        total = _DISK_BLOCK * 2
        columns: list[tuple[float, Path]] = []
        for each in os.scandir(self.root):
            if _COLUMN.fullmatch(each.name) and each.is_dir(follow_symlinks=False):
                total += _count(Path(each.path))
                with contextlib.suppress(OSError):
                    used = os.stat(os.path.join(each.path, _USED)).st_mtime
                    columns.append((used, Path(each.path)))
        if total + size > self.limit:
            least = self.limit - size - self.limit // _SLACK
            for _, path in sorted(columns):
                if total <= least:
                    break
                total = _evict(path, total, least)
        self._set(total)
        return total + size <= self.limit


def _count(folder: Path) -> int:
    """Bytes that a column takes; leftovers are removed."""
    total = _FOLDER_BYTES
    for each in os.scandir(folder):
        if _UNFINISHED.fullmatch(each.name) and _is_left(each.path):
            os.unlink(each.path)
        else:
            with contextlib.suppress(FileNotFoundError):
                total += _taken(each.stat(follow_symlinks=False))
    return total


def _is_left(path: str) -> bool:
    """Whether nobody writes an unfinished file."""
    try:
        file = _Descriptor(Path(path), os.O_RDWR)
        _lock(file.number)
    except OSError:
        return False
    return True


def _evict(folder: Path, total: int, least: int) -> int:
    """Remove files of a column, unless it is in use, until so little is left; what is left."""
    try:
        use = _Descriptor(folder / _USED, os.O_RDWR)
        _lock(use.number)
    except OSError:
        return total
    for each in [each for each in os.scandir(folder) if _ENTRY.fullmatch(each.name)]:
        if total <= least:
            return total
        size = _taken(each.stat(follow_symlinks=False))
        os.unlink(each.path)
        total -= size
    with contextlib.suppress(OSError):
        (folder / _USED).unlink()
        folder.rmdir()
        total -= _FOLDER_BYTES
    return total


def _lock(file: int) -> None:
    """Lock a file alone, or raise BlockingIOError."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _share(file: int) -> None:
    """Lock a file as others may at the same time."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_SH)


def _unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def _taken(status: os.stat_result) -> int:
    return max(512 * status.st_blocks, _rounded(status.st_size)) if status.st_size else 0


def _rounded(size: int) -> int:
    return -(-size // _DISK_BLOCK) * _DISK_BLOCK + _NAME_BYTES


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


_warned: set[Path] = set()


def warn_once(root: Path, error: OSError) -> None:
    """Say once in a process that a folder is of no use."""
    if root in _warned:
        return
    _warned.add(root)
    warnings.warn(
        f"the cache folder {root} cannot be written ({error.strerror or error}); reading goes on "
        "without keeping more there: free some of the disk, or give another cache_dir",
        DestrierWarning,
        stacklevel=2,
    )
