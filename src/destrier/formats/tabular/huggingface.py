"""Hugging Face dataset folders: those that `save_to_disk` writes, and those of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from destrier.errors import ArgumentError, MissingDependencyError, SourceError
from destrier.files import File, Store, natural
from destrier.formats.listing import data_files, translate
from destrier.formats.tabular.discover import EXTENSIONS, HIDDEN, Found, format_of

__all__ = ["find_split", "is_dataset"]

_STATE = "state.json"
_DICT = "dataset_dict.json"
_README = "README.md"
_SHARD = re.compile(r"(?:^|.*/)([A-Za-z_][\w.]*?)-\d{4,6}-of-\d{4,6}(?:-[0-9a-f]+)?\.[^/]+$")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_MOST = 1 << 24  # bytes of a README or state: more is none


def is_dataset(store: Store, paths: Sequence[str]) -> bool:
    """Whether the files are of a dataset that Hugging Face's libraries wrote or host."""
    if store.scheme == "hf" or _DICT in paths or _STATE in paths:
        return True
    if any(_SHARD.match(path) and format_of(path)[0] for path in paths):
        return True
    return _README in paths and bool(_front_matter(store, quiet=True))


def find_split(store: Store, split: str | None, config: str | None) -> Found:
    """The files of one split of a dataset.

    Args:
        store: Its folder.
        split: Which, such as ``"train"``; None if there is only one.
        config: Which configuration, if its README names several.

    Raises:
        ArgumentError: If there are several to choose from, naming them.
        SourceError: If there are no data files.
    """
    if store.stat(_DICT) is not None:
        names = _json(store, _DICT).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SourceError(f"{store.show(_DICT)} names no splits")
        folders = {name: [name] for name in names}
        chosen = _choose(folders, split, store, "split")
        if chosen in ("", ".", "..") or "/" in chosen:
            raise SourceError(f"{store.show(_DICT)} names a split {chosen!r}, which is no folder")
        return _saved(store.at(chosen))
    if store.stat(_STATE) is not None:
        if split is not None:
            raise ArgumentError(
                f"{store.shown} is a dataset without splits, so split={split!r} is none of it"
            )
        return _saved(store)
    files = data_files(store, HIDDEN)
    by_split = _configured(store, files, config)
    if by_split is None:
        if config is not None:
            raise ArgumentError(
                f"{store.shown} names no configurations, so config={config!r} is none of it"
            )
        by_split = _by_name(store, files)
    if not by_split:
        raise SourceError(f"{store.shown}: no data files among {len(files)} files")
    chosen = _choose(by_split, split, store, "split")
    return _one_format(store, by_split[chosen], chosen)


def _choose(found: dict[str, Any], wanted: str | None, store: Store, what: str) -> str:
    names = ", ".join(found)
    if wanted is None:
        if len(found) == 1:
            return next(iter(found))
        raise ArgumentError(f"{store.shown} has several {what}s: {names}; choose one with {what}=")
    if wanted not in found:
        raise ArgumentError(f"{store.shown} has no {what} {wanted!r}; there are: {names}")
    return wanted


def _saved(store: Store) -> Found:
    """The files of one dataset that `save_to_disk` wrote."""
    state = _json(store, _STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise SourceError(
            f"{store.shown} is a selection of the rows in its files; save it with "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise SourceError(f"{store.show(_STATE)} names no data files")
    files = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
            raise SourceError(
                f"{store.show(_STATE)} names a file {name!r}, which is none of its folder"
            )
        file = store.stat(name)
        if file is None:
            raise SourceError(f"{store.show(_STATE)} names {name}, which is not there")
        files.append(file)
    return Found(store, tuple(files), "arrow")


def _json(store: Store, path: str) -> dict[str, Any]:
    try:
        value = json.loads(_text(store, path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{store.show(path)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{store.show(path)} holds no JSON object")
    return value


def _text(store: Store, path: str) -> str:
    with store.open(path) as file:
        if file.size() > _MOST:
            raise SourceError(f"{store.show(path)} has {file.size()} bytes, more than {_MOST}")
        try:
            return str(file.read().decode())
        except UnicodeDecodeError as error:
            raise SourceError(f"{store.show(path)} is not UTF-8: {error}") from None


def _front_matter(store: Store, *, quiet: bool = False) -> str:
    """The YAML at the beginning of a README that describes a dataset, or nothing."""
    try:
        text = _text(store, _README)
    except SourceError:
        if quiet:
            return ""
        raise
    parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3 or parts[0].strip():
        return ""
    return parts[1] if re.search(r"^(configs|dataset_info):", parts[1], re.MULTILINE) else ""


def _configured(
    store: Store, files: Sequence[File], config: str | None
) -> dict[str, list[File]] | None:
    """The files of each split, if the README says which they are."""
    if not any(file.path == _README for file in files):
        return None
    text = _front_matter(store)
    if not re.search(r"^configs:", text, re.MULTILINE):
        return None
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingDependencyError(
            f"{store.show(_README)} describes its files in YAML, which needs pyyaml: "
            "pip install '.[hf]' in a clone"
        ) from None
    try:
        configs = yaml.safe_load(text)["configs"]
        patterns = {
            str(entry.get("config_name", "default")): entry
            for entry in configs
            if entry.get("data_files") is not None
        }
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{store.show(_README)}: its YAML cannot be read: {error}") from None
    if not patterns:
        return None
    default = next((n for n, e in patterns.items() if e.get("default") is True), None)
    chosen = _choose(patterns, config if config is not None else default, store, "config")
    return _matched(store, files, patterns[chosen])


def _matched(store: Store, files: Sequence[File], entry: Any) -> dict[str, list[File]]:
    """The files that the patterns of a configuration take."""
    given = entry["data_files"]
    folder = entry.get("data_dir")
    if isinstance(given, str) or (given and all(isinstance(item, str) for item in given)):
        given = [{"split": "train", "path": given}]
    found: dict[str, list[File]] = {}
    for item in given:
        if not isinstance(item, dict) or "path" not in item:
            raise SourceError(f"{store.show(_README)}: data_files holds {item!r}")
        paths = item["path"] if isinstance(item["path"], list) else [item["path"]]
        tests = []
        for path in paths:
            full = f"{folder.strip('/')}/{path}" if isinstance(folder, str) else str(path)
            tests.append(re.compile(translate(full.removeprefix("./"))).fullmatch)
        taken = [file for file in files if any(test(file.path) for test in tests)]
        if not taken:
            raise SourceError(f"{store.show(_README)} names files {paths}, of which none is there")
        found.setdefault(str(item.get("split", "train")), []).extend(taken)
    return found


def _by_name(store: Store, files: Sequence[File]) -> dict[str, list[File]]:
    """The files of each split, as their names say; all are one split if none does."""
    data = [file for file in files if _format(file.path)]
    shards: dict[str, list[File]] = {}
    for file in data:
        found = _SHARD.match(file.path)
        if found is not None:
            shards.setdefault(found[1], []).append(file)
    if shards:
        other = next((file for file in data if not _SHARD.match(file.path)), None)
        if other is not None:
            first = next(iter(shards.values()))[0]
            raise SourceError(
                f"{store.shown} holds {first.path}, and {other.path}, whose name says no split; "
                "give a pattern of the files to read"
            )
        return shards
    words: dict[str, list[File]] = {}
    for file in data:
        split = _split_word(file.path)
        words.setdefault(split or "train", []).append(file)
    return words


def _split_word(path: str) -> str | None:
    """The split that a file's name, or a folder above it, says."""
    for part in reversed(path.lower().split("/")):
        tokens = set(re.split(r"[^a-z0-9]+", part))
        for split, words in _WORDS.items():
            if tokens & set(words):
                return split
    return None


def _format(path: str) -> str | None:
    name = format_of(path)[0]
    if name is None and path.endswith(".json") and path.rpartition("/")[2] not in _BESIDE:
        return "jsonl"
    return name


_BESIDE = ("dataset_info.json", "dataset_infos.json", _DICT, _STATE, "index.json")


def _one_format(store: Store, files: Sequence[File], split: str) -> Found:
    groups: dict[str, list[File]] = {}
    for file in files:
        name = _format(file.path)
        if name is None:
            known = ", ".join(f".{e}" for extensions in EXTENSIONS.values() for e in extensions)
            raise SourceError(
                f"{store.show(file.path)}, of split {split!r}, is none of the files that are read "
                f"as rows ({known})"
            )
        groups.setdefault(name, []).append(file)
    if len(groups) > 1:
        (one, some), (other, more) = list(groups.items())[:2]
        raise SourceError(
            f"split {split!r} of {store.shown} has files of several formats: {one} "
            f"({some[0].path}) and {other} ({more[0].path})"
        )
    ((name, taken),) = groups.items()
    ordered = sorted({file.path: file for file in taken}.values(), key=lambda f: natural(f.path))
    return Found(store, tuple(ordered), name)
