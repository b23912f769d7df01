"""The folder of a cache as a user names it."""

from __future__ import annotations

import importlib.util
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from destrier.caching.store import Store, warn_once
from destrier.check import integer
from destrier.errors import ArgumentError

__all__ = ["DEFAULT_CACHE_BYTES", "CacheFolder"]

DEFAULT_CACHE_BYTES = 32 << 30


@dataclass(frozen=True)
class CacheFolder:
    """Where blocks are kept, and how much may be. Pickles to that.

    Attributes:
        path: The folder.
        limit: Bytes that its files may take.
    """

    path: Path
    limit: int

    @classmethod
    def of(cls, cache_dir: str | os.PathLike[str] | None, limit: int | None) -> CacheFolder | None:
        """Check the arguments of a user.

        Raises:
            ArgumentError: If one cannot be used.
        """
        if cache_dir is None:
            if limit is not None:
                raise ArgumentError(f"cache_bytes={limit!r} has no meaning without cache_dir=")
            return None
        if importlib.util.find_spec("fcntl") is None:
            raise ArgumentError(
                f"cache_dir={cache_dir!r} needs file locks (flock), which this system has not: "
                "leave it out, or stream from a copy of the table on a local disk"
            )
        if not isinstance(cache_dir, str | os.PathLike) or not os.fspath(cache_dir):
            raise ArgumentError(f"cache_dir must be the path of a folder, got {cache_dir!r}")
        path = os.fspath(cache_dir)
        if isinstance(path, bytes) or "://" in path:
            raise ArgumentError(f"cache_dir must be a folder of this machine, got {cache_dir!r}")
        limit = DEFAULT_CACHE_BYTES if limit is None else integer("cache_bytes", limit, 1)
        return cls(Path(os.path.abspath(os.path.expanduser(path))), limit)

    def open(self) -> Store | None:
        """The open folder, one in a process; None, with a warning, if it cannot be used."""
        with _opening:
            store = _stores.get(self)
            if store is None:
                try:
                    store = _stores[self] = Store(self.path, self.limit)
                except OSError as error:
                    warn_once(self.path, error)
        return store


_opening = threading.Lock()
_stores: weakref.WeakValueDictionary[CacheFolder, Store] = weakref.WeakValueDictionary()
