"""Which files an address names: those of a folder that are data, or those of a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from destrier.errors import ArgumentError, SourceError
from destrier.files import File, Store

__all__ = [
    "TABLE_MARK",
    "data_files",
    "is_below",
    "is_hidden",
    "is_own",
    "is_pattern",
    "matching",
    "translate",
]

TABLE_MARK = "_versions"
"""The folder that every Lance table has."""

# Lance's tables and files, and beside them the journals and locks of jobs that are not finished
_OWN = re.compile(r".\.(lance|((writing|exporting|merging|adding|relinking)(\.lock)?))$")
_WILD = re.compile(r"[*?\[]")
_SPECIAL = re.compile(r"[{*?\[]")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_CLASS = re.compile(r"\[([!^]?)(\]?[^\]/]*)\]")
_MOST = 1_000_000  # names that braces may stand for


def is_hidden(path: str, marks: str = ".") -> bool:
    """Whether a file, or a folder that it is in, begins with one of these characters."""
    return any(part.startswith(tuple(marks)) for part in path.split("/"))


def is_own(name: str) -> bool:
    """Whether a file or folder is, by its name, a table or what a job keeps beside one.

    Example:
        >>> is_own("train.lance"), is_own("train.writing"), is_own("train.csv")
        (True, True, False)
    """
    return _OWN.search(name) is not None


def data_files(store: Store, marks: str = ".", *, recursive: bool = True) -> list[File]:
    """The files below a folder, in natural order, without hidden ones and without tables.

    A table in the folder is no data of it: not what lies in a folder that has ``_versions`` in it,
    nor what `is_own` tells.

    Args:
        store: The folder.
        marks: What the names of hidden files and folders begin with.
        recursive: Whether those in the folders below it are listed, too.
    """
    mark = f"/{TABLE_MARK}/"
    files = store.files(recursive=recursive)
    tables = {file.path.partition(mark)[0] for file in files if mark in file.path}
    return [
        file
        for file in files
        if not is_hidden(file.path, marks)
        and not any(map(is_own, file.path.split("/")))
        and not (tables and is_below(file.path, tables))
    ]


def is_below(path: str, folders: set[str]) -> bool:
    """Whether a file lies in one of the folders, or in one below it."""
    parts = path.split("/")[:-1]
    return any("/".join(parts[:n]) in folders for n in range(len(parts) + 1))


def matching(store: Store, marks: str = ".") -> tuple[Store, list[File]] | None:
    """The files that a pattern names.

    ``*`` and ``?`` stay within a folder, ``**`` stands for any number of folders, also none,
    ``[...]`` is one of some characters, and braces are choices: ``{000..123}`` or ``{a,b}``.

    Args:
        store: Of the pattern's address.
        marks: What the names of hidden files and folders begin with; ``*`` does not stand for them.

    Returns:
        The folder that the paths start from, and the files in the order of the choices, in natural
        order where there are none; None if the address is no pattern.

    Raises:
        ArgumentError: If the pattern cannot be read, or names a file twice.
        SourceError: If no file matches, or one that is named is not there.
    """
    if not is_pattern(store):
        return None
    base, pattern = _cut(store)
    listings: dict[str, dict[str, File]] = {}
    found: dict[str, File] = {}
    for number, path in enumerate(_expand(pattern, store.shown)):
        if number >= _MOST:
            raise ArgumentError(f"{store.shown} stands for more than {_MOST:,} names")
        for file in _named(base, path, marks, listings):
            if file.path in found:
                raise ArgumentError(f"{store.shown} names {base.show(file.path)} twice")
            found[file.path] = file
    return base, list(found.values())


def _named(base: Store, path: str, marks: str, listings: dict[str, dict[str, File]]) -> list[File]:
    """The files of one choice; ``listings`` keeps what was listed for others."""
    shown = base.show(path)
    if not _is_wild(base, path):
        folder = path.rpartition("/")[0]
        if folder not in listings:
            listings[folder] = {file.path: file for file in base.files(folder, recursive=False)}
        if path not in listings[folder]:
            raise SourceError(f"there is no {shown}, which the pattern names", file=shown)
        return [listings[folder][path]]
    key = "**" if "/" in path or "**" in path else "*"
    if key not in listings:
        files = data_files(base, marks, recursive=key == "**")
        listings[key] = {file.path: file for file in files}
    try:
        matches = re.compile(translate(path)).fullmatch
    except re.error as error:
        raise ArgumentError(f"the pattern {shown} cannot be read: {error}") from None
    some = [file for name, file in listings[key].items() if matches(name)]
    if not some:
        raise SourceError(f"no file matches {shown}", file=shown)
    return some


def is_pattern(store: Store) -> bool:
    """Whether an address stands for several files; what is there by that name is no pattern."""
    special = "{" in store.uri or _is_wild(store, store.uri)
    return special and store.stat() is None and not store.is_folder()


def _is_wild(store: Store, path: str) -> bool:
    return _WILD.search(path) is not None and not store.scheme.startswith("http")


def _cut(store: Store) -> tuple[Store, str]:
    """The folder above the first part of an address that is a pattern, and the rest."""
    special = _SPECIAL.search(store.uri)
    assert special is not None
    root, _, pattern = store.uri[: special.start()].rpartition("/")
    return Store(root or "/", store.options), pattern + store.uri[special.start() :]


def translate(pattern: str) -> str:
    """A pattern without braces as a regular expression."""
    text = ""
    rest = pattern
    while rest:
        if rest.startswith("**/"):
            text, rest = text + "(?:.*/)?", rest[3:]
        elif rest.startswith("**"):
            text, rest = text + ".*", rest[2:]
        elif rest[0] == "*":
            text, rest = text + "[^/]*", rest[1:]
        elif rest[0] == "?":
            text, rest = text + "[^/]", rest[1:]
        elif (found := _CLASS.match(rest)) is not None:
            inside = found[2].replace("\\", "\\\\").replace("[", "\\[")
            text, rest = f"{text}[{'^' if found[1] else ''}{inside}]", rest[found.end() :]
        else:
            text, rest = text + re.escape(rest[0]), rest[1:]
    return text


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
