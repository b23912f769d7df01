"""Which tars a source consists of: one, those of a folder, or those that a pattern names."""

from __future__ import annotations

import re

from destrier.errors import SourceError
from destrier.files import File, Store
from destrier.formats.listing import data_files, matching

__all__ = ["detect", "tars"]

_TAR = re.compile(r"\.(tar(\.(gz|zst|bz2|xz))?|tgz|tbz2|txz)$", re.IGNORECASE)


def detect(store: Store) -> bool:
    """Whether there are tars: one, a pattern that names some, or most bytes of a folder."""
    if _TAR.search(store.uri):
        return not store.is_folder()
    if not store.is_folder():
        return False
    files = data_files(store)
    held = sum(file.size for file in files if _TAR.search(file.path))
    return 2 * held > sum(file.size for file in files)


def tars(store: Store) -> tuple[Store, list[File]]:
    """Find the tars of a source, and the store that their paths are relative to.

    Raises:
        SourceError: If there are none, or one that is named is not there.
        ArgumentError: If a pattern cannot be read, or names a tar twice.
    """
    if (file := store.stat()) is not None:
        parent, _, name = store.uri.rpartition("/")
        return Store(parent or "/", store.options), [File(name, file.size, file.stamp)]
    if (named := matching(store)) is not None:
        return named
    found = [file for file in data_files(store) if _TAR.search(file.path)]
    if not found:
        what = "holds no tars" if store.is_folder() else "is not there"
        raise SourceError(f"{store.shown} {what}", file=store.shown)
    return store, found
