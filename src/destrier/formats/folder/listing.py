"""The files below a folder, in natural order."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from destrier.errors import SourceError
from destrier.files import File, Store, natural
from destrier.formats.listing import TABLE_MARK, data_files, is_hidden, is_own
from destrier.formats.media import extension_of, media_kind

__all__ = ["detect", "list_files"]

_INDEX = "index.json.zstd"  # of LitData's StreamingRawDataset
_LOOKED_AT = 2000  # files, to find out whether there are media


def detect(store: Store) -> bool:
    """Whether it is a folder with media files in it."""
    if not store.is_folder():
        return False
    files = _walk(store) if store.local else iter(data_files(store))
    for number, file in enumerate(files):
        if number >= _LOOKED_AT:
            return False
        if media_kind(extension_of(file.path)):
            return True
    return False


def list_files(store: Store) -> list[File]:
    """List the files below a folder that are data.

    Hidden files, tables and what jobs keep beside them are none, nor is the index that LitData's
    `StreamingRawDataset` leaves; see `destrier.formats.listing.data_files`.

    Raises:
        SourceError: If it is no folder, or has what cannot be read.
    """
    if not store.is_folder():
        what = "is a file, not a folder" if store.stat() else "is not there"
        raise SourceError(f"{store.shown} {what}", file=store.shown)
    if not store.local:
        return [file for file in data_files(store) if file.path.rpartition("/")[2] != _INDEX]
    return sorted(_walk(store), key=lambda file: natural(file.path))


def _walk(store: Store) -> Iterator[File]:
    """Files of a local folder. Links are followed, but not back into a folder above them."""
    root = store.address("")
    pending = [("", root, frozenset([_identity(os.stat(root))]))]
    while pending:
        prefix, folder, above = pending.pop()
        try:
            with os.scandir(folder) as entries:
                there = {entry.name: entry for entry in entries}
            if prefix and TABLE_MARK in there and there[TABLE_MARK].is_dir():
                continue  # a table
            found = [(name, entry.stat()) for name, entry in there.items() if not _is_none(name)]
        except OSError as error:
            raise SourceError(
                f"{error.filename or folder}: {error.strerror}", file=folder
            ) from None
        for name, info in found:
            path = prefix + name
            if stat.S_ISDIR(info.st_mode):
                if (identity := _identity(info)) not in above:
                    pending.append((f"{path}/", os.path.join(folder, name), above | {identity}))
            elif stat.S_ISREG(info.st_mode):
                _check_name(path, store)
                yield File(path, info.st_size, info.st_mtime_ns)
            else:
                raise SourceError(
                    f"{store.show(path)} is neither a file nor a folder; remove it, or hide it "
                    "with a name that begins with a dot",
                    file=store.show(path),
                )


def _is_none(name: str) -> bool:
    """Whether a file or folder is no data, by its name."""
    return is_hidden(name) or is_own(name) or name == _INDEX


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _check_name(path: str, store: Store) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise SourceError(
            f"{store.shown}: the name {os.fsencode(path)!r} is not UTF-8, so it cannot be kept as "
            "text; rename the file",
            file=store.shown,
        ) from None
