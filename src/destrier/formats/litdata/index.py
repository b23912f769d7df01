"""The index of a dataset: which chunks, and how they are encoded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from destrier.errors import SourceError
from destrier.files import File, Store, natural

__all__ = ["Chunk", "Config", "Index", "has_index", "read_index"]

INDEX = "index.json"
_PARTIAL = re.compile(r"\d+[.-]index\.json")
_MOST_INDEX_BYTES = 1 << 30
_MOST = 1 << 62
LEVELS = ("batch", "sample")


@dataclass(frozen=True)
class Chunk:
    """A chunk as the index lists it.

    Attributes:
        number: Its place in the index.
        file: Its file, with the size that it really has.
        rows: Number of samples; for tokens, of documents.
        nbytes: The length that the index gives it, in one of several senses.
        dim: Number of tokens, or None.
        frames: Of each temporal record, or None.
    """

    number: int
    file: File
    rows: int
    nbytes: int
    dim: int | None = None
    frames: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Config:
    """How the samples of all chunks are encoded.

    Attributes:
        compression: Of whole files or inside them, or None.
        level: ``"batch"`` or ``"sample"`` for compression inside the file, None for whole files.
        encryption: Algorithm and level, or None.
        loader: Name of the item loader.
        data_format: Serializer of each leaf.
        data_spec: JSON text of the tree of the samples, or None.
        types: The types that LitData fused, or None.
        temporal: The schema of temporal arrays, or None.
    """

    compression: str | None
    level: str | None
    encryption: tuple[str, str] | None
    loader: str
    data_format: tuple[str, ...]
    data_spec: str | None
    types: Any
    temporal: Any

    @property
    def whole_file(self) -> bool:
        """Whether each file is compressed as a whole."""
        return self.compression is not None and self.level is None


@dataclass(frozen=True)
class Index:
    """Chunks in the order of their rows, and their encoding.

    Attributes:
        file: The index file's address, for messages.
        chunks: All that hold rows.
        config: Of all of them.
        keys: Number of shards of the key sidecar, 0 without one, None if the index says nothing.
        empty: Those of which the index says that they hold no rows.
    """

    file: str
    chunks: tuple[Chunk, ...]
    config: Config
    keys: int | None = None
    empty: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        """Number of samples of all chunks."""
        return sum(chunk.rows for chunk in self.chunks)


def has_index(store: Store) -> bool:
    """Whether a folder holds a LitData index, or the partial ones of an unfinished dataset."""
    entry = store.stat(INDEX)
    if entry is not None:
        if entry.size > _MOST_INDEX_BYTES:
            return False
        try:
            found = json.loads(store.read(INDEX).to_pybytes())
        except (ValueError, RecursionError, SourceError):
            return False
        return isinstance(found, dict) and "chunks" in found and "shards" not in found
    return bool(store.is_folder() and _partial(store))


def _partial(store: Store) -> list[str]:
    names = [file.path for file in store.files(recursive=False)]
    return sorted((name for name in names if _PARTIAL.fullmatch(name)), key=natural)


def read_index(store: Store) -> Index:
    """Read and check the index, or merge the partial ones of an unfinished dataset.

    Raises:
        SourceError: If it is damaged, disagrees with itself, or names files that are not there.
    """
    if store.stat(INDEX) is not None:
        names = [INDEX]
    else:
        names = _partial(store)
        if not names:
            raise SourceError(f"{store.shown} has no {INDEX}: it is not a LitData dataset")
    whole = [_load(store, name) for name in names]
    shown = store.show(names[0])
    raw_config = whole[0]["config"]
    for name, other in zip(names[1:], whole[1:], strict=True):
        if _body(other["config"]) != _body(raw_config):
            raise SourceError(
                f"{store.show(name)} describes samples of another kind than {shown}",
                file=store.show(name),
            )
        if other["config"].get("types") != raw_config.get("types"):
            raw_config = {**raw_config, "types": None}  # what each part alone saw says nothing
    config = _config(raw_config, shown)
    listed = [entry for part in whole for entry in part["chunks"]]
    all_chunks = _chunks(store, listed, config, shown)
    chunks = tuple(chunk for chunk in all_chunks if chunk.rows)
    if not chunks:
        raise SourceError(f"{shown} lists no samples", file=shown)
    empty = tuple(chunk for chunk in all_chunks if not chunk.rows)
    return Index(shown, chunks, config, _keys(whole[0], shown), empty)


def _load(store: Store, name: str) -> dict[str, Any]:
    shown = store.show(name)
    entry = store.stat(name)
    if entry is not None and entry.size > _MOST_INDEX_BYTES:
        raise SourceError(f"{shown} has {entry.size:,} bytes, which cannot be", file=shown)
    try:
        found = json.loads(store.read(name).to_pybytes())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{shown} is not JSON: {error}", file=shown) from None
    if isinstance(found, dict) and "shards" in found:
        raise SourceError(f"{shown} is the index of an MDS dataset: use format='mds'", file=shown)
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("chunks"), list)
        or not isinstance(found.get("config"), dict)
    ):
        raise SourceError(f"{shown} lacks the lists of chunks and their config", file=shown)
    return found


def _body(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "types"}


def _keys(found: Mapping[str, Any], shown: str) -> int | None:
    keys = found.get("keys")
    if keys is None:
        return None
    shards = keys.get("num_shards") if isinstance(keys, dict) else None
    if isinstance(shards, int) and _whole(shards):
        return shards
    raise SourceError(f"{shown} has a list of keys without a number of shards", file=shown)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _config(raw: Mapping[str, Any], shown: str) -> Config:
    def bad(name: str) -> SourceError:
        return SourceError(f"{shown} has {name} {raw.get(name)!r}", file=shown)

    compression = raw.get("compression")
    if compression is not None and (
        not isinstance(compression, str) or compression.split(":")[0] != "zstd"
    ):
        raise bad("compression")
    level = raw.get("compression_level")
    if level not in (None, "", "chunk", *LEVELS):
        raise bad("compression_level")
    encryption = raw.get("encryption")
    if encryption is not None and not (
        isinstance(encryption, dict)
        and isinstance(encryption.get("algorithm"), str)
        and isinstance(encryption.get("level"), str)
    ):
        raise bad("encryption")
    formats = raw.get("data_format")
    if not isinstance(formats, list) or not all(isinstance(name, str) for name in formats):
        raise bad("data_format")
    if not formats:
        raise SourceError(f"{shown} describes samples without a value", file=shown)
    spec = raw.get("data_spec")
    if spec is not None and not isinstance(spec, str):
        raise bad("data_spec")
    loader = raw.get("item_loader")
    if loader is None:  # written before the index named it
        tokens = len(formats) == 1 and formats[0].startswith("no_header_tensor")
        loader = "TokensLoader" if tokens else "PyTreeLoader"
    if not isinstance(loader, str):
        raise bad("item_loader")
    return Config(
        compression,
        level if level in LEVELS else None,
        (encryption["algorithm"], encryption["level"]) if encryption else None,
        loader,
        tuple(formats),
        spec,
        raw.get("types"),
        raw.get("temporal_schema"),
    )


def _chunks(store: Store, listed: list[Any], config: Config, shown: str) -> tuple[Chunk, ...]:
    entries = [_entry(entry, number, shown) for number, entry in enumerate(listed)]
    names = [entry["filename"] for entry in entries]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SourceError(f"{shown} lists {name!r} twice", file=shown)
        seen.add(name)
    deep = any("/" in name for name in names)
    there = {file.path: file for file in store.files(recursive=deep)}
    chunks = []
    for number, entry in enumerate(entries):
        file = there.get(entry["filename"])
        if file is None:
            raise SourceError(
                f"{shown} lists {entry['filename']!r}, but there is no such file"
                + _inflated(entry["filename"], config, there),
                file=store.show(entry["filename"]),
            )
        frames = entry.get("temporal_frames")
        chunks.append(
            Chunk(
                number,
                file,
                entry["chunk_size"],
                entry["chunk_bytes"],
                entry.get("dim"),
                None if frames is None else tuple(frames),
            )
        )
    return tuple(chunks)


def _inflated(name: str, config: Config, there: Mapping[str, File]) -> str:
    plain = name.replace(f".{config.compression}", "")
    if not config.whole_file or plain == name or plain not in there:
        return ""
    return (
        f"; {plain!r} is there: litdata inflated the files when it read them. Take out "
        f"'compression' and '.{config.compression}' in the index, or restore the files"
    )


def _entry(entry: Any, number: int, shown: str) -> dict[str, Any]:
    def bad(what: str) -> SourceError:
        return SourceError(f"{shown}, chunk {number}: {what}", file=shown)

    if not isinstance(entry, dict):
        raise bad(f"is {entry!r}, not an object")
    name = entry.get("filename")
    if not isinstance(name, str) or not _inside(name):
        raise bad(f"its filename {name!r} is not a name below the dataset's folder")
    for key in ("chunk_size", "chunk_bytes"):
        if not _whole(entry.get(key)):
            raise bad(f"its {key} is {entry.get(key)!r}")
    if entry.get("dim") is not None and not _whole(entry["dim"]):
        raise bad(f"its dim is {entry['dim']!r}")
    frames = entry.get("temporal_frames")
    if frames is not None and not (isinstance(frames, list) and all(map(_whole, frames))):
        raise bad("its temporal_frames are not a list of numbers")
    return entry


def _inside(name: str) -> bool:
    parts = name.split("/")
    return (
        "\\" not in name
        and "\0" not in name
        and not any(part in ("", ".", "..") for part in parts)
        and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", name)
    )
