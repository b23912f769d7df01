"""Which tars a source consists of: one, those of a folder, or those that a pattern names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from destrier.errors import ArgumentError, SourceError
from destrier.files import File, Store, natural

__all__ = ["detect", "tars"]

_TAR = re.compile(r"\.(tar(\.(gz|zst|bz2|xz))?|tgz|tbz2|txz)$", re.IGNORECASE)
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_GLOB = re.compile(r"\*\*|\[[^\]]+\]|.", re.DOTALL)
_SPECIAL = re.compile(r"[{*?\[]")
_MOST = 1_000_000  # names that braces may stand for


def detect(store: Store) -> bool:
    """Whether there are tars: one, a pattern that names some, or most bytes of a folder."""
    if _TAR.search(store.uri):
        return not store.is_folder()
    if not store.is_folder():
        return False
    files = [file for file in store.files() if not _hidden(file.path)]
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
    if _SPECIAL.search(store.uri):
        return _matching(store)
    found = [f for f in store.files() if _TAR.search(f.path) and not _hidden(f.path)]
    if not found:
        what = "holds no tars" if store.is_folder() else "is not there"
        raise SourceError(f"{store.shown} {what}", file=store.shown)
    return store, found


def _matching(store: Store) -> tuple[Store, list[File]]:
    special = _SPECIAL.search(store.uri)
    assert special is not None
    root, _, pattern = store.uri[: special.start()].rpartition("/")
    pattern += store.uri[special.start() :]
    base = Store(root or "/", store.options)
    listings: dict[str, dict[str, File]] = {}
    found: list[File] = []
    for number, path in enumerate(_expand(pattern, store.shown)):
        if number >= _MOST:
            raise ArgumentError(f"{store.shown} stands for more than {_MOST:,} names")
        if re.search(r"[*?\[]", path):
            matches = re.compile(_glob(path)).fullmatch
            recursive = "/" in path
            if "" not in listings or recursive:
                listings[""] = {f.path: f for f in base.files("", recursive=recursive)}
            some = [f for name, f in listings[""].items() if matches(name)]
            found += sorted(some, key=lambda f: natural(f.path))
            if not some:
                raise SourceError(f"no file matches {base.show(path)}", file=base.show(path))
            continue
        folder = path.rpartition("/")[0]
        if folder not in listings:
            listings[folder] = {f.path: f for f in base.files(folder, recursive=False)}
        if path not in listings[folder]:
            raise SourceError(
                f"there is no {base.show(path)}, which {store.shown} names", file=base.show(path)
            )
        found.append(listings[folder][path])
    seen: set[str] = set()
    for file in found:
        if file.path in seen:
            raise ArgumentError(f"{store.shown} names {base.show(file.path)} twice")
        seen.add(file.path)
    return base, found


def _glob(path: str) -> str:
    """A pattern as the shell reads it: an asterisk does not match a slash, two do."""
    return _GLOB.sub(_translate, path)


def _translate(found: re.Match[str]) -> str:
    text = found[0]
    if text.startswith("["):
        return "[^" + text[2:] if text[1] == "!" else text
    return {"**": ".*", "*": "[^/]*", "?": "[^/]"}.get(text) or re.escape(text)


def _expand(pattern: str, shown: str) -> Iterator[str]:
    """What braces stand for, in order: ``{000..123}`` or ``{a,b}``; they may be nested."""
    start = pattern.find("{")
    if start < 0:
        yield pattern
        return
    depth, cuts = 0, [start]
    for place in range(start, len(pattern)):
        char = pattern[place]
        depth += (char == "{") - (char == "}")
        if depth == 0 or (depth == 1 and char == ","):
            cuts.append(place)
        if depth == 0:
            break
    else:
        raise ArgumentError(f"{shown}: a brace is open")
    inner = [pattern[a + 1 : b] for a, b in pairwise(cuts)]
    choices = inner if len(inner) > 1 else _numbers(inner[0], shown)
    for choice in choices:
        for text in _expand(choice, shown) if "{" in choice else [choice]:
            for rest in _expand(pattern[cuts[-1] + 1 :], shown):
                yield pattern[:start] + text + rest


def _numbers(inner: str, shown: str) -> list[str]:
    ends = _RANGE.fullmatch(inner)
    if ends is None:
        raise ArgumentError(f"{shown}: write {{{inner}}} as {{000..123}} or {{a,b}}")
    first, last = int(ends[1]), int(ends[2])
    if abs(last - first) >= _MOST:
        raise ArgumentError(f"{shown} stands for more than {_MOST:,} names")
    padded = "0" in (ends[1][0], ends[2][0])
    width = max(len(ends[1]), len(ends[2])) if padded else 0
    step = 1 if last >= first else -1
    return [str(number).zfill(width) for number in range(first, last + step, step)]


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))
