"""Finds a dataset's shards: by its index, by those of its parts, or by the shards themselves."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import replace

from destrier.errors import ArgumentError, SourceError
from destrier.files import File, Store, natural
from destrier.formats.listing import data_files, is_below, is_own
from destrier.formats.mds.index import (
    INDEX,
    Listing,
    Record,
    parse_config,
    parse_json,
    read_index,
)
from destrier.formats.mds.shard import read_header
from destrier.formats.mds.stored import COMPRESSIONS, Piece, open_piece
from destrier.formats.mds.text import META

__all__ = ["detect", "find_records", "root_of"]

_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "eval"}
_SHARD = re.compile(r".*\.mds|shard\.\d+\.(json|csv|tsv|xsv)\.meta")
_DEPTH = 3  # of folders that are looked into to tell the format


def detect(store: Store) -> bool:
    """Whether a store is an MDS dataset, an index of one, or a shard.

    Example:
        >>> detect(Store("datasets/c4"))  # doctest: +SKIP
        True
    """
    if store.stat() is not None:
        name = posixpath.basename(store.uri)
        root = root_of(store)
        return _is_shard(name) or (name.endswith(".json") and _is_index(root, name))
    return _holds_shards(store, "", _DEPTH)


def root_of(store: Store) -> Store:
    """The folder of a store that is a single file."""
    return Store(posixpath.dirname(store.uri), store.options)


def _is_shard(path: str) -> bool:
    """Whether it is called as a shard is; of a shard of text, as its file of offsets is."""
    return _SHARD.fullmatch(posixpath.basename(_inflated(path)[0])) is not None


def _is_index(store: Store, path: str) -> bool:
    try:
        value = parse_json(store.read(path), path)
    except SourceError:
        return False
    return isinstance(value, dict) and "version" in value and isinstance(value.get("shards"), list)


def _holds_shards(store: Store, folder: str, depth: int) -> bool:
    files = store.files(folder, recursive=False)
    if any(posixpath.basename(file.path) == INDEX for file in files):
        return _is_index(store, posixpath.join(folder, INDEX))
    if any(_is_shard(file.path) for file in files):
        return True
    # the parts of a dataset are alike
    inner = [name for name in store.folders(folder) if not is_own(name)][:1] if depth else []
    return any(_holds_shards(store, posixpath.join(folder, name), depth - 1) for name in inner)


def find_records(store: Store) -> list[Record]:
    """The shards of a dataset in order.

    The index of a folder speaks for all that lies below it. Folders without one are searched, in
    natural order; shards that no index covers are asked for what they hold.

    Raises:
        SourceError: If an index or a shard is damaged.
        ArgumentError: If nothing is there, or more than one split.
    """
    if store.stat() is not None:
        root, name = root_of(store), posixpath.basename(store.uri)
        if name.endswith(".json") and _is_index(root, name):
            return read_index(Listing(root), name)
        return _rebuild(root, root.files(recursive=False), only=name)
    if store.stat(INDEX) is not None:
        return read_index(Listing(store), INDEX)
    files = data_files(store)
    indexed = _outermost(
        posixpath.dirname(f.path) for f in files if posixpath.basename(f.path) == INDEX
    )
    bare = [f for f in files if _is_shard(f.path) and not is_below(f.path, indexed)]
    folders = {*indexed, *(posixpath.dirname(f.path) for f in bare)}
    splits = {folder.split("/")[0] for folder in folders} & _SPLITS
    if len(splits) > 1:
        raise ArgumentError(
            f"{store.shown} holds the splits {', '.join(sorted(splits))}; name one of them, such "
            f"as {store.show(min(splits))}, or their rows would be mixed"
        )
    records = []
    listing = Listing(store)
    for folder in sorted(folders, key=natural):
        if folder in indexed:
            records.extend(read_index(listing, posixpath.join(folder, INDEX)))
        else:
            here = [f for f in files if posixpath.dirname(f.path) == folder]
            records.extend(_rebuild(store, here))
    if not folders:
        raise ArgumentError(f"{store.shown} holds neither {INDEX} nor shards of MDS")
    return records


def _outermost(folders: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for folder in sorted(folders, key=len):
        if not is_below(f"{folder}/", found):
            found.add(folder)
    return found


def _inflated(path: str) -> tuple[str, str | None]:
    """The name of a file when inflated, and its compression."""
    base, _, ending = path.rpartition(".")
    return (base, ending) if base and ending in COMPRESSIONS else (path, None)


def _rebuild(store: Store, files: list[File], only: str | None = None) -> list[Record]:
    """The records of shards without an index, in natural order."""
    there: dict[str, Piece] = {}
    for file in files:
        raw, compression = _inflated(file.path)
        if raw not in there or compression is None:  # an inflated file is read with less work
            size = file.size if compression is None else None
            there[raw] = Piece(file.path, file.size, file.stamp, compression, size)
    wanted = None if only is None else _inflated(only)[0]
    records = []
    for raw in sorted(there, key=natural):
        if wanted is not None and raw not in (wanted, f"{wanted}{META}"):
            continue
        if raw.endswith(".mds"):
            records.append(_joint(store, there[raw]))
        elif _is_shard(raw):
            data = there.get(raw.removesuffix(META))
            if data is None:
                shown = store.show(raw.removesuffix(META))
                raise SourceError(
                    f"{shown} is not there, but {posixpath.basename(raw)} holds its offsets",
                    file=shown,
                )
            records.append(_split(store, data, there[raw]))
    if not records:
        raise ArgumentError(f"{store.shown} holds neither {INDEX} nor shards of MDS")
    return records


def _joint(store: Store, piece: Piece) -> Record:
    content = open_piece(store, piece, check_hashes=False)
    header = read_header(content, joint=True)
    config = content.slice(header.table_end, int(header.offsets[0]) - header.table_end)
    return Record(parse_config(config, content.name), header.samples, _sized(piece, content.size))


def _split(store: Store, data: Piece, piece: Piece) -> Record:
    content = open_piece(store, piece, check_hashes=False)
    header = read_header(content, joint=False)
    config = content.slice(header.table_end, content.size - header.table_end)
    shape = parse_config(config, content.name)
    return Record(shape, header.samples, data, _sized(piece, content.size))


def _sized(piece: Piece, size: int) -> Piece:
    return replace(piece, raw_bytes=size)
