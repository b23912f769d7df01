"""What the files of a folder make: rows with a file each, or those of a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa

from destrier.encoding.frozen import freeze
from destrier.encoding.misfit import Misfit
from destrier.encoding.values import encode
from destrier.errors import ArgumentError, EmptyError, SchemaError, SourceError
from destrier.files import File, Store
from destrier.formats.advice import with_way_out
from destrier.formats.folder.metadata import Told, is_metadata, read_metadata
from destrier.formats.media import CONTENT_TYPE_KEY, content_type, extension_of, media_kind

__all__ = ["Group", "Rows", "file_field", "file_rows", "grouped_rows"]

Group = Callable[[list[File]], Iterable[Mapping[str, Any]]]
"""A function from the files of a folder to rows; a value that is one of the files is its bytes."""

_FILE = "file"
_CAPTION = "txt"
_SHOWN = 8  # extensions in a message
_WITHOUT = "or take only the files, with metadata=False and pattern=['*.jpg'] or the like"


@dataclass
class Rows:
    """The columns of a folder's table.

    Attributes:
        count: Number of rows.
        files: Columns of files, whose values are their bytes.
        texts: Columns of files, whose values are their text.
        values: All others.
        names: Of all columns, in order.
    """

    count: int
    files: dict[str, list[File | None]] = field(default_factory=dict)
    texts: dict[str, list[File | None]] = field(default_factory=dict)
    values: dict[str, pa.Array] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def file_rows(
    store: Store,
    files: list[File],
    *,
    labels: str | None,
    captions: bool,
    metadata: bool,
    pattern: Sequence[str],
    column: str | None,
) -> Rows:
    """One row for each file.

    Raises:
        ArgumentError: If the files are of several kinds, or two columns have one name.
        EmptyError: If there are none.
    """
    tables = [f for f in files if metadata and is_metadata(f.path)]
    rest = [f for f in files if not (metadata and is_metadata(f.path))]
    chosen = [f for f in rest if _matches(f.path, pattern)]
    texts: dict[str, File] = {}
    if captions:
        stems = {_stem(f.path) for f in chosen if extension_of(f.path) != _CAPTION}
        for file in rest:
            if extension_of(file.path) == _CAPTION and _stem(file.path) in stems:
                texts[_stem(file.path)] = file
        beside = {file.path for file in texts.values()}
        chosen = [f for f in chosen if f.path not in beside]
    if not chosen:
        found = f"none of its {len(files)} files is" if files else "holds no files"
        what = f"{found} one to make a row of" if files else found
        raise EmptyError(f"{store.shown}: {what}{_of_pattern(pattern)}")
    name = _kind(store, chosen) if column is None else column
    made = Rows(len(chosen), files={name: list(chosen)}, names=[name])
    if texts:
        made.texts["caption"] = [texts.get(_stem(f.path)) for f in chosen]
        made.names.append("caption")
    values: dict[str, pa.Array] = {}
    if labels == "folder" and any("/" in f.path for f in chosen):
        folders = [f.path.rpartition("/")[0].rpartition("/")[2] or None for f in chosen]
        values["label"] = pa.array(folders, pa.string())
    values["path"] = pa.array([f.path for f in chosen], pa.string())
    told, places = read_metadata(store, tables, [f.path for f in rest], [f.path for f in chosen])
    for key, column_values in told.items():
        if key in values or key in made.names:
            more = "; pass labels=None to keep that of the metadata" if key == "label" else ""
            raise ArgumentError(
                f"{store.show(tables[0].path)} has a column {key!r}, which the files give too{more}"
            )
        values[key] = _encode(key, column_values, places)
    made.values = values
    made.names += values
    return made


def grouped_rows(store: Store, files: list[File], group: Group) -> Rows:
    """The rows that a function makes of the files.

    Raises:
        ArgumentError: If it returns what is not a row, or a file of another folder.
        EmptyError: If it makes no rows.
    """
    if not files:
        raise EmptyError(f"{store.shown}: holds no files")
    rows = list(group(list(files)))
    if not rows:
        raise EmptyError(f"{store.shown}: group= made no rows of its {len(files)} files")
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) and key for key in row):
            raise ArgumentError(
                f"row {number} that group= made is {type(row).__name__}, not a dict of columns"
            )
        names |= dict.fromkeys(row)
    known = set(files)
    made = Rows(len(rows), names=list(names))
    for name in names:
        values = [row.get(name) for row in rows]
        are_files = [isinstance(value, File) for value in values]
        if not any(are_files):
            made.values[name] = _encode(name, values)
            continue
        for number, value in enumerate(values):
            if value is not None and value not in known:
                what = "a file that is not in the list" if are_files[number] else "not a file"
                raise ArgumentError(
                    f"column {name!r} of row {number} that group= made is {value!r}: {what}; "
                    "others of the column are files of the list"
                )
        made.files[name] = values
    return made


def file_field(name: str, files: Iterable[File | None], kind: pa.DataType) -> pa.Field:
    """The column of files, with their content type if all have the same."""
    types = {content_type(extension_of(file.path)) for file in files if file is not None}
    only = types.pop() if len(types) == 1 else None
    return pa.field(name, kind, metadata={CONTENT_TYPE_KEY: only.encode()} if only else None)


def _kind(store: Store, files: list[File]) -> str:
    """Name the column of files after their kind."""
    kinds = {media_kind(extension_of(file.path)) or _FILE for file in files}
    if len(kinds) == 1:
        return kinds.pop()
    counts = Counter(extension_of(file.path) or "without extension" for file in files)
    common = counts.most_common(_SHOWN)
    shown = ", ".join(f"{count} {name}" for name, count in common)
    more = f" and {len(counts) - len(common)} other extensions" if len(counts) > _SHOWN else ""
    raise ArgumentError(
        f"{store.shown} holds files of several kinds ({shown}{more}); choose some with "
        f"pattern=['*.{common[0][0]}'], or take all of them as bytes with column='file'"
    )


def _encode(name: str, values: list[Any], places: Sequence[Told | None] = ()) -> pa.Array:
    """A column of values, with errors that name where in the metadata they are, if they are."""
    frozen = []
    try:
        for number, value in enumerate(values):
            try:
                frozen.append(freeze(value)[0])
            except Misfit as misfit:
                raise misfit.at(number) from misfit
        return encode(frozen, None, declared=False)
    except Misfit as misfit:
        kind = SourceError if misfit.refused else SchemaError
        place = places[misfit.index] if places else None
        shown, row = (None, misfit.index) if place is None else place
        where = f"row {row}, column {name!r}{misfit.path}"
        way_out = "or change group=" if shown is None else _WITHOUT
        raise kind(
            f"{where if shown is None else f'{shown}, {where}'}: "
            f"{with_way_out(misfit.text, way_out)}",
            file=shown,
            row=row,
            column=name,
        ) from None


def _stem(path: str) -> str:
    return path[: -len(extension_of(path)) - 1] if extension_of(path) else path


def _matches(path: str, pattern: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return not pattern or any(fnmatchcase(path, p) or fnmatchcase(name, p) for p in pattern)


def _of_pattern(pattern: Sequence[str]) -> str:
    return f" that matches pattern={list(pattern)!r}" if pattern else ""
