"""Which shards a dataset has: `index.json` and its records, read with suspicion."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from destrier.errors import SourceError
from destrier.files import File, Store
from destrier.formats.mds.stored import COMPRESSIONS, LIMIT, Piece

__all__ = ["INDEX", "Listing", "Record", "Shape", "parse_config", "parse_json", "read_index"]

INDEX = "index.json"

_SEPARATORS = {"csv": ",", "tsv": "\t"}
_TEXT = ("json", "csv", "tsv", "xsv")
_LARGEST_INDEX = 4 << 30


@dataclass(frozen=True)
class Shape:
    """The columns of a shard and how its rows are written.

    Attributes:
        format: ``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``.
        names: Of the columns, in the order of the bytes.
        encodings: One a column.
        sizes: Bytes of a value of each column in MDS, None where it varies.
        newline: What ends a row of text.
        separator: What stands between values of text.
    """

    format: str
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    newline: str = ""
    separator: str = ""


@dataclass(frozen=True)
class Record:
    """A shard.

    Attributes:
        shape: Its columns.
        samples: Number of rows.
        data: The file with the rows.
        meta: The file with the offsets of a text shard.
    """

    shape: Shape
    samples: int
    data: Piece
    meta: Piece | None = None

    @property
    def nbytes(self) -> int:
        """Its size when inflated, or as it lies there if that is not known."""
        files = (self.data,) if self.meta is None else (self.data, self.meta)
        return sum(file.size if file.raw_bytes is None else file.raw_bytes for file in files)


class Listing:
    """The files of a store, listed folder by folder when one of them is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folders: dict[str, dict[str, File]] = {}

    def find(self, path: str) -> File | None:
        """A file, or None if it is not there."""
        folder = posixpath.dirname(path)
        if folder not in self._folders:
            files = self.store.files(folder, recursive=False)
            self._folders[folder] = {file.path: file for file in files}
        return self._folders[folder].get(path)


class _Reader:
    """Takes values out of JSON and names what is wrong with them."""

    def __init__(self, value: Any, name: str, where: str = "") -> None:
        self.name = name
        self.where = where
        if not isinstance(value, Mapping):
            raise self.fail(f"is no object but {_show(value)}")
        self.value = value

    def fail(self, problem: str) -> SourceError:
        return SourceError(f"{self.name}: {self.where or 'the index'} {problem}", file=self.name)

    def number(self, key: str, most: int) -> int:
        found = self.value.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < most:
            raise self.fail(f"has {key} = {_show(found)}, not a number from 0 to {most - 1:,}")
        return found

    def text(self, key: str) -> str:
        found = self.value.get(key)
        if not isinstance(found, str) or not found:
            raise self.fail(f"has {key} = {_show(found)}, not a text")
        return found

    def list(self, key: str) -> list[Any]:
        found = self.value.get(key)
        if not isinstance(found, list):
            raise self.fail(f"has {key} = {_show(found)}, not a list")
        return found

    def inner(self, key: str) -> _Reader:
        return _Reader(self.value.get(key), self.name, f"{self.where} {key}")


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_json(data: Any, name: str) -> Any:
    """Read JSON.

    Raises:
        SourceError: If it is none.
    """
    try:
        return json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is no JSON: {error}", file=name) from None


def read_index(listing: Listing, path: str) -> list[Record]:
    """Read an index.

    Args:
        listing: Of the store that holds it.
        path: Of the index.

    Raises:
        SourceError: If it is damaged, names files that are not there or have another size, or
            names one twice.
    """
    store = listing.store
    name = store.show(path)
    with store.open(path) as file:
        if file.size() > _LARGEST_INDEX:
            raise SourceError(f"{name} has {file.size():,} bytes: it is no index", file=name)
        value = parse_json(file.read_buffer(), name)
    top = _Reader(value, name)
    if top.value.get("version") != 2:
        raise top.fail(
            f"has version {_show(top.value.get('version'))}; only version 2 can be read: "
            "rewrite it with mosaicml-streaming"
        )
    folder = posixpath.dirname(path)
    shapes: dict[Shape, Shape] = {}  # one object for all shards that are alike
    records = []
    seen: dict[str, int] = {}
    for number, item in enumerate(top.list("shards")):
        record = _record(_Reader(item, name, f"shard {number}"), folder, listing, shapes)
        for piece in filter(None, (record.data, record.meta)):
            raw = _raw_path(piece)
            if raw in seen:
                raise top.fail(
                    f"lists {raw} twice, as shard {seen[raw]} and as shard {number}: remove one"
                )
            seen[raw] = number
        records.append(record)
    return records


def _raw_path(piece: Piece) -> str:
    if piece.compression is None:
        return piece.path
    return piece.path.removesuffix(f".{piece.compression}")


def _record(reader: _Reader, folder: str, listing: Listing, shapes: dict[Shape, Shape]) -> Record:
    if reader.value.get("version", 2) != 2:
        raise reader.fail(f"has version {_show(reader.value['version'])}; only 2 can be read")
    shape = _shape(reader)
    shape = shapes.setdefault(shape, shape)
    samples = reader.number("samples", LIMIT)
    data = _piece(reader, "data", folder, listing)
    meta = None if shape.format == "mds" else _piece(reader, "meta", folder, listing)
    return Record(shape, samples, data, meta)


def _shape(reader: _Reader) -> Shape:
    format = reader.text("format")
    if format == "mds":
        names, encodings = _names(reader), _texts(reader, "column_encodings")
        sizes = reader.list("column_sizes")
        for size in sizes:
            if size is not None and (type(size) is not int or not 0 < size < LIMIT):
                raise reader.fail(f"has {_show(size)} in column_sizes")
        if not len(names) == len(encodings) == len(sizes):
            raise reader.fail("has column_names, column_encodings and column_sizes of other length")
        return Shape(format, names, encodings, tuple(sizes))
    if format not in _TEXT:
        raise reader.fail(f"has format {_show(format)}, not mds, {', '.join(_TEXT)}")
    newline = reader.text("newline")
    if format == "json":
        columns = reader.inner("columns")
        names = tuple(sorted(columns.value))
        encodings = tuple(columns.text(name) for name in names)
        return Shape(format, names, encodings, newline=newline)
    names, encodings = _names(reader), _texts(reader, "column_encodings")
    if len(names) != len(encodings):
        raise reader.fail("has column_names and column_encodings of other length")
    separator = _SEPARATORS.get(format) or reader.text("separator")
    return Shape(format, names, encodings, newline=newline, separator=separator)


def _texts(reader: _Reader, key: str) -> tuple[str, ...]:
    found = reader.list(key)
    for item in found:
        if not isinstance(item, str):
            raise reader.fail(f"has {_show(item)} in {key}")
    return tuple(found)


def _names(reader: _Reader) -> tuple[str, ...]:
    names = _texts(reader, "column_names")
    for name in names:
        if names.count(name) > 1:
            raise reader.fail(f"has two columns {name!r}")
    return names


def _piece(reader: _Reader, what: str, folder: str, listing: Listing) -> Piece:
    """The file that is there: the inflated one if it is, else the compressed one."""
    raw = reader.inner(f"raw_{what}")
    compression = reader.value.get("compression")
    zipped = None
    if reader.value.get(f"zip_{what}") is not None:
        if not isinstance(compression, str) or compression.split(":")[0] not in COMPRESSIONS:
            raise reader.fail(
                f"has compression {_show(compression)}, not {', '.join(COMPRESSIONS)}"
            )
        zipped = reader.inner(f"zip_{what}")
    if isinstance(raw.value.get("bytes"), int) and raw.value["bytes"] >= LIMIT:
        raise raw.fail(
            f"has {raw.value['bytes']:,} bytes; offsets in a shard are numbers of 32 bits, so one "
            "of 4 GiB or more is damaged: write the data again in smaller shards"
        )
    size = raw.number("bytes", LIMIT)
    path = _path(raw, folder)
    if found := listing.find(path):
        if found.size != size:
            raise _other_size(raw, listing.store.show(path), found.size, size)
        return Piece(path, size, found.stamp, None, size, _hashes(raw))
    if zipped is None:
        raise SourceError(
            f"{listing.store.show(path)} is not there, but {reader.name} lists it as "
            f"{reader.where}",
            file=listing.store.show(path),
        )
    zip_size = zipped.number("bytes", 2 * LIMIT)
    zip_path = _path(zipped, folder)
    found = listing.find(zip_path)
    if found is None:
        raise SourceError(
            f"neither {listing.store.show(zip_path)} nor {path} inflated is there, but "
            f"{reader.name} lists it as {reader.where}",
            file=listing.store.show(zip_path),
        )
    if found.size != zip_size:
        raise _other_size(zipped, listing.store.show(zip_path), found.size, zip_size)
    assert isinstance(compression, str)
    kind = compression.split(":")[0]
    return Piece(zip_path, zip_size, found.stamp, kind, size, _hashes(zipped), _hashes(raw))


def _other_size(reader: _Reader, shown: str, found: int, said: int) -> SourceError:
    return SourceError(
        f"{shown} has {found:,} bytes, but {reader.name} says {said:,} for {reader.where}",
        file=shown,
    )


def _path(reader: _Reader, folder: str) -> str:
    name = reader.text("basename")
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise reader.fail(f"has basename {_show(name)}, which leads out of the dataset's folder")
    return posixpath.join(folder, name)


def _hashes(reader: _Reader) -> tuple[tuple[str, str], ...]:
    found = reader.value.get("hashes") or {}
    if not isinstance(found, Mapping) or not all(isinstance(v, str) for v in found.values()):
        raise reader.fail(f"has hashes = {_show(found)}")
    return tuple(sorted(found.items()))


def parse_config(data: Any, name: str) -> Shape:
    """The columns as a shard itself says.

    Raises:
        SourceError: If that is damaged.
    """
    value = parse_json(data, name)
    reader = _Reader(value, name, "what the shard says of itself")
    if reader.value.get("version") != 2:
        raise reader.fail(f"has version {_show(reader.value.get('version'))}; only 2 can be read")
    return _shape(reader)
