"""Files of sources and exports, in any store that pyarrow or fsspec opens."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from destrier.errors import ArgumentError, DestrierError, MissingDependencyError, SourceError
from destrier.lancecalls import redact

__all__ = ["File", "Store", "natural"]

# Lance's names of storage options, as pyarrow's S3 file system takes them
_S3_NAMES = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "region": "region",
    "endpoint": "endpoint_override",
    "endpoint_url": "endpoint_override",
}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_S3 = ("s3", "s3a")
_EXTRAS = {
    "hf": "'.[hf]' in a clone",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which ``x2`` comes before ``x10``."""
    parts = re.split(r"(\d+)", text)
    return [(1, int(p), p) if p.isdecimal() else (0, 0, p) for p in parts if p]


@dataclass(frozen=True)
class File:
    """A file of a store.

    Attributes:
        path: Relative to the store's root, with slashes.
        size: In bytes.
        stamp: Time of the last change in nanoseconds, 0 where the store has none.
    """

    path: str
    size: int
    stamp: int = 0


class Store:
    """A folder, or one file, in a local or remote store. Picklable, opened when used.

    Args:
        uri: A path, or a URI that pyarrow or fsspec opens.
        storage_options: For ``s3://`` in Lance's names; for others as fsspec takes them.
    """

    def __init__(
        self, uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
    ) -> None:
        text = os.fspath(uri)
        if text.startswith("file:"):
            text = _path(text)
        found = _SCHEME.match(text)
        self.scheme = found[1].lower() if found else ""
        if not self.scheme:
            text = os.path.abspath(os.path.expanduser(text))
        self.uri = text.rstrip("/") or text
        self.options = dict(storage_options or {})

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.uri, self.options)

    def __repr__(self) -> str:
        return f"Store({self.shown!r})"

    @property
    def local(self) -> bool:
        """Whether the files lie on this machine's file systems."""
        return not self.scheme

    @property
    def shown(self) -> str:
        """The address without credentials, for messages."""
        return redact(self.uri)

    def at(self, path: str) -> Store:
        """The store whose root is a path below this one."""
        return Store(self.address(path), self.options)

    def address(self, path: str) -> str:
        """The URI, or local path, of a path in this store."""
        return f"{self.uri.rstrip('/')}/{path}" if path else self.uri

    def show(self, path: str) -> str:
        """The address of a path without credentials, for messages."""
        return redact(self.address(path))

    @cached_property
    def _opened(self) -> tuple[pafs.FileSystem, str]:
        if self.local:
            return pafs.LocalFileSystem(), self.uri
        try:
            if self.scheme in _S3:
                place = self.uri.split("://", 1)[1]
                if "@" in place.split("/", 1)[0]:
                    raise ArgumentError(
                        f"{self.shown} has credentials in its address: pass them as storage options"
                    )
                return _s3(self.options), place
            return _fsspec(self.uri, self.options)
        except ArgumentError:
            raise
        except (OSError, ValueError, TypeError) as error:
            raise SourceError(f"cannot open {self.shown}: {redact(str(error))}") from None

    def _full(self, path: str) -> str:
        root = self._opened[1]
        return f"{root.rstrip('/')}/{path}" if path else root

    def stat(self, path: str = "") -> File | None:
        """A file's size and time, or None if there is no file of that name."""
        info = self._call(path, lambda fs, full: fs.get_file_info(full))
        return _file(info, path) if info.type == pafs.FileType.File else None

    def is_folder(self, path: str = "") -> bool:
        """Whether there is a folder, or any object below the path."""
        info = self._call(path, lambda fs, full: fs.get_file_info(full))
        return bool(info.type == pafs.FileType.Directory)

    def files(self, path: str = "", *, recursive: bool = True) -> list[File]:
        """The files below a path, in natural order of their paths. No folder is an empty list."""
        selector = pafs.FileSelector(self._full(path), recursive=recursive, allow_not_found=True)
        infos = self._call(path, lambda fs, _: fs.get_file_info(selector))
        root = self._full("").rstrip("/") + "/"
        files = [
            _file(info, info.path[len(root) :]) for info in infos if info.type == pafs.FileType.File
        ]
        return sorted(files, key=lambda file: natural(file.path))

    def holds_anything(self) -> bool:
        """Whether there is a file, or a folder that is not empty. Only its top is looked at."""
        if self.local:
            path = self.uri
            return os.path.lexists(path) and (
                os.path.islink(path) or not os.path.isdir(path) or bool(os.listdir(path))
            )
        return self.stat() is not None or bool(self.files(recursive=False) or self.folders())

    def folders(self, path: str = "") -> list[str]:
        """The names of the folders right below a path, in natural order."""
        selector = pafs.FileSelector(self._full(path), recursive=False, allow_not_found=True)
        infos = self._call(path, lambda fs, _: fs.get_file_info(selector))
        names = [info.base_name for info in infos if info.type == pafs.FileType.Directory]
        return sorted(names, key=natural)

    def open(self, path: str = "") -> pa.NativeFile:
        """Open a file for reads anywhere in it; local files are mapped into memory.

        Raises:
            SourceError: If it is not there.
        """
        if self.local:
            return self._call(path, lambda _, full: _map(full))
        return self._call(path, lambda fs, full: fs.open_input_file(full))

    def stream(self, path: str = "") -> pa.NativeFile:
        """Open a file for reads from its beginning to its end, decompressed by nothing."""
        return self._call(path, lambda fs, full: fs.open_input_stream(full, compression=None))

    def read(self, path: str = "") -> pa.Buffer:
        """The bytes of a whole file; those of a local file are a map of it.

        Raises:
            SourceError: If it is not there.
        """
        with self.open(path) as file:
            return file.read_buffer()

    def create(self, path: str = "") -> pa.NativeFile:
        """Open a new file for writing; folders above it are made."""
        if self.local:
            os.makedirs(os.path.dirname(self._full(path)), exist_ok=True)
        return self._call(path, lambda fs, full: fs.open_output_stream(full, compression=None))

    def move(self, path: str, to: Store, target: str) -> None:
        """Move a file to a path in another store of the same kind."""
        if to.local:
            os.makedirs(os.path.dirname(to._full(target)), exist_ok=True)
        self._call(path, lambda fs, full: fs.move(full, to._full(target)))

    def remove(self, path: str = "") -> None:
        """Remove a folder and all below it, or a file, if it is there."""

        def run(fs: pafs.FileSystem, full: str) -> None:
            kind = fs.get_file_info(full).type
            with contextlib.suppress(FileNotFoundError):  # an object store's folder may be no more
                if kind == pafs.FileType.Directory:
                    fs.delete_dir(full)
                elif kind == pafs.FileType.File:
                    fs.delete_file(full)

        self._call(path, run)

    def _call(self, path: str, function: Any) -> Any:
        fs, _ = self._opened
        try:
            return function(fs, self._full(path))
        except FileNotFoundError:
            raise SourceError(f"there is no file {self.show(path)}") from None
        except (OSError, ValueError) as error:
            if isinstance(error, DestrierError):
                raise
            raise SourceError(f"{self.show(path)}: {redact(str(error))}") from None


def _path(uri: str) -> str:
    """The path of a file URI."""
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise ArgumentError(f"{uri} names a file on another machine; pass a path")
    return os.fsdecode(unquote_to_bytes(parts.path))


def _map(full: str) -> pa.NativeFile:
    if os.path.getsize(full) == 0:  # an empty file cannot be mapped
        return pa.BufferReader(b"")
    return pa.memory_map(full)


def _file(info: pafs.FileInfo, path: str) -> File:
    return File(path, info.size or 0, info.mtime_ns or 0)


def _s3(options: Mapping[str, str]) -> pafs.FileSystem:
    known: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.lower().removeprefix("aws_")
        if plain in _S3_NAMES:
            known[_S3_NAMES[plain]] = value
        elif plain == "allow_http" and value.lower() == "true":
            known.setdefault("scheme", "http")
        elif plain == "virtual_hosted_style_request":
            known["force_virtual_addressing"] = value.lower() == "true"
        elif plain == "skip_signature":
            known["anonymous"] = value.lower() == "true"
    if known.get("endpoint_override", "").startswith("https://"):
        known["scheme"] = "https"
    return pafs.S3FileSystem(**known)


def _fsspec(uri: str, options: Mapping[str, str]) -> tuple[pafs.FileSystem, str]:
    import fsspec

    scheme = uri.split("://", 1)[0]
    try:
        fs, root = fsspec.core.url_to_fs(uri, **options)
    except ImportError:
        more = f": pip install {_EXTRAS[scheme]}" if scheme in _EXTRAS else ""
        raise MissingDependencyError(
            f"{scheme}:// is opened through fsspec, which needs a package of its own for it{more}"
        ) from None
    except ValueError as error:
        raise ArgumentError(f"cannot open {redact(uri)}: {error}") from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), root
