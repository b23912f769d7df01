"""After linked files were moved: say where they are now."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata, write_fragments

from destrier.editing.changes import latest
from destrier.editing.conform import blob_array
from destrier.errors import ArgumentError, LinkError, ReadError, WriteError
from destrier.files import Store
from destrier.lancecalls import lance_call, redact
from destrier.links.columns import linked_columns
from destrier.links.files import join_uri, split_uri, stat_files
from destrier.links.reader import EXTERNAL
from destrier.table import Table
from destrier.writing.journal import Journal
from destrier.writing.publish import commit_files, discard, stage_clone

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = ["relink"]

_BATCH_ROWS = 8192
_NO_FIELD = -2  # Lance's mark of a column of a file that is no longer used
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


def relink(
    table: TableLike,
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    check: bool = True,
) -> int:
    """Point the links of a table at the new place of their files.

    All columns with links change in one new version; the rows, their order and all other columns
    stay, so that a running stream can resume on the new version. The bytes are not read: `verify`
    does that.

    Args:
        table: The table; its latest version is changed.
        old: A folder or file, as a path or a URI, at or below which linked files were.
        new: Where that is now. The same as ``old`` takes the files' new times.
        storage_options: Of the table and of the files.
        check: Look at each file at its new place: its size must be that of the file that was
            linked, and its time is stored. False believes it, and keeps the old times.

    Returns:
        The number of values whose address or time changed; with 0 no version is made.

    Raises:
        ArgumentError: If no column is linked, or no link begins with ``old``.
        LinkError: If a file is not at its new place or has another size; the table is as it was.
        WriteError: If the new version could not be written.

    Example:
        >>> import destrier
        >>> destrier.relink("photos.lance", "/data/tars", "s3://bucket/tars")  # doctest: +SKIP
        12000
    """
    opened = latest(table, storage_options)
    columns = linked_columns(opened.schema)
    if not columns:
        raise ArgumentError(f"no column of {opened.name} is linked to files")
    move = _Move(_split(old), _split(new), check, opened.storage_options)
    with Journal(opened.uri, opened.storage_options, kind="relinking").held() as journal:
        discard(journal, opened.uri, opened.storage_options)  # what a killed call has left
        journal.start({"job": "relink"}, keep=False)
        try:
            changed = _relink(opened, columns, move, journal)
        finally:
            discard(journal, opened.uri, opened.storage_options)
    if not move.matched:
        example = move.example
        one = f"; one is to {redact(example)}" if example else ""
        raise ArgumentError(f"no link of {opened.name} begins with {redact(os.fspath(old))}{one}")
    return changed


def _relink(table: Table, columns: Mapping[str, str], move: _Move, journal: Journal) -> int:
    stage, staged = "", None
    written: list[FragmentMetadata] = []
    changed = 0
    for fragment in table.dataset.get_fragments():
        links = _links(table, fragment, columns)
        files = move.files(links)
        count = sum(links[uri].differing(*files[uri]) for uri in files)
        if count:
            if staged is None:
                stage, staged = stage_clone(journal, table)
            written.append(_rewrite(table, staged, fragment, columns, files))
            changed += count
    if written:
        names = [_path(each) for each in written]
        _commit(table, journal, stage, written, names)
    return changed


def _split(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The store and the path of a folder, without a slash at the end."""
    text = os.fspath(place)
    if not text:
        raise ArgumentError("old and new must name a folder or a file")
    if _SCHEME.match(text):
        try:
            root, path = split_uri(text)
        except LinkError:
            raise ArgumentError(f"{redact(text)} names no folder or file") from None
    else:
        root, path = "", os.path.abspath(os.path.expanduser(text))
    return root, path.rstrip("/")


@dataclass
class _Links:
    """The links to one file: how many there are, by size and time of the file."""

    uri: str
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    def differing(self, target: str, stamp: int | None) -> int:
        """How many are not yet to this place and time."""
        return sum(
            count
            for (_, recorded), count in self.counts.items()
            if target != self.uri or stamp not in (None, recorded)
        )


@dataclass
class _Move:
    """Where files were and where they are.

    Attributes:
        matched: Whether any link begins with the old place.
        example: A link, for an error.
    """

    old: tuple[str, str]
    new: tuple[str, str]
    check: bool
    options: Mapping[str, str]
    matched: bool = False
    example: str | None = None

    def files(self, links: Mapping[str, _Links]) -> dict[str, tuple[str, int | None]]:
        """The new URI and time of those files that were at the old place.

        Raises:
            LinkError: If one is not there, or of another size.
        """
        self.example = self.example or next(iter(links), None)
        targets = {uri: target for uri in links if (target := self._target(uri)) is not None}
        self.matched = self.matched or bool(targets)
        if not self.check:
            return {uri: (target, None) for uri, target in targets.items()}
        found = stat_files(list(targets.values()), self.options)
        result: dict[str, tuple[str, int | None]] = {}
        for (uri, target), file in zip(targets.items(), found, strict=True):
            if file is None:
                raise LinkError(
                    f"there is no file {redact(target)}, where {redact(uri)} was to be now; the "
                    "table is as it was"
                )
            for size, _ in links[uri].counts:
                if size != file.size:
                    raise LinkError(
                        f"{redact(target)} has {file.size} bytes, but {redact(uri)} had {size} "
                        "when it was linked, so it is another file; the table is as it was"
                    )
            result[uri] = (target, file.stamp)
        return result

    def _target(self, uri: str) -> str | None:
        """The new URI of a file, or None if it was not at the old place."""
        root, path = split_uri(uri)
        was, folder = self.old
        if root != was or not (path == folder or not folder or path.startswith(f"{folder}/")):
            return None
        now, begin = self.new
        rest = path[len(folder) :].lstrip("/")
        moved = "/".join(part for part in (begin, rest) if part)
        return join_uri(now, moved if now or moved.startswith("/") else f"/{moved}")


def _links(
    table: Table, fragment: lance.LanceFragment, columns: Mapping[str, str]
) -> dict[str, _Links]:
    """The links of a fragment, by the URI of their file."""
    found: dict[str, _Links] = {}
    for batch in _scan(table, fragment, columns):
        for name, beside in columns.items():
            described, recorded = batch.column(name), batch.column(beside)
            parts = [_uris(described), recorded.field("file_size"), recorded.field("file_stamp")]
            files = pa.table(parts, ["uri", "size", "stamp"]).group_by(["uri", "size", "stamp"])
            for uri, *key, count in _rows(files.aggregate([([], "count_all")])):
                if uri is not None:
                    counts = found.setdefault(uri, _Links(uri)).counts
                    counts[key[0], key[1]] = counts.get((key[0], key[1]), 0) + count
    return found


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def _rewrite(
    table: Table,
    staged: Table,
    fragment: lance.LanceFragment,
    columns: Mapping[str, str],
    files: Mapping[str, tuple[str, int | None]],
) -> FragmentMetadata:
    """Write the linked columns of a fragment anew, and return it with them in another file.

    Deleted rows are written too: the rows of all files of a fragment are the same.
    """
    names = [*columns, *columns.values()]
    schema = pa.schema([table.schema.field(name) for name in names])
    rows = fragment.metadata.physical_rows

    def batches() -> Iterator[pa.RecordBatch]:
        first = fragment.fragment_id << 32  # addresses count the rows of a fragment from here
        for batch in _scan(table, fragment, columns, include_deleted_rows=True):
            arrays: dict[str, pa.Array] = {}
            for name, beside in columns.items():
                described = batch.column(name)
                deleted = batch.column("_rowid").is_null()
                moved, times = _moved(described, batch.column(beside), files)
                data = _stored(table, name, described, deleted, first)
                arrays[name] = blob_array(data, *moved)
                arrays[beside] = times
            first += batch.num_rows
            yield pa.RecordBatch.from_arrays([arrays[name] for name in names], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    made = _write(
        table,
        lambda: write_fragments(
            reader,
            staged.dataset,
            mode="append",
            max_rows_per_file=max(rows, 1),
            allow_external_blob_outside_bases=True,
            storage_options=dict(table.storage_options) or None,
        ),
    )
    if len(made) != 1 or made[0].physical_rows != rows or len(made[0].files) != 1:
        raise WriteError(f"Lance wrote {len(made)} files for the {rows} rows of a fragment")
    return _replaced(fragment.metadata, made[0])


def _replaced(fragment: FragmentMetadata, made: FragmentMetadata) -> FragmentMetadata:
    """A fragment with some columns in another file, which is its last."""
    whole, new = fragment.to_json(), made.to_json()["files"][0]
    if whole.get("overlays"):
        raise WriteError(
            "the table has overlays, which are not merged yet: compact it before relink"
        )
    files = []
    for file in whole["files"]:
        kept = [_NO_FIELD if field in new["fields"] else field for field in file["fields"]]
        if set(kept) != {_NO_FIELD}:
            files.append({**file, "fields": kept})
    return FragmentMetadata.from_json(json.dumps({**whole, "files": [*files, new]}))


def _scan(
    table: Table, fragment: lance.LanceFragment, columns: Mapping[str, str], **options: Any
) -> Iterator[pa.RecordBatch]:
    """What Lance keeps of the linked values of a fragment, and their row ids."""
    scanner = fragment.scanner(
        columns=[*columns, *columns.values()], batch_size=_BATCH_ROWS, with_row_id=True, **options
    )
    batches = iter(scanner.to_batches())
    what = f"reading {table.name}"
    while (batch := lance_call(what, lambda: next(batches, None), table.secrets)) is not None:
        yield batch


def _external(described: pa.StructArray) -> pa.Array:
    kinds = pc.struct_field(described, "kind")  # null where the value is
    return pc.fill_null(pc.equal(kinds, EXTERNAL), fill_value=False)


def _uris(described: pa.StructArray) -> pa.Array:
    """The URIs of external values, null for all others."""
    return pc.if_else(
        _external(described), described.field("blob_uri"), pa.scalar(None, pa.string())
    )


def _moved(
    described: pa.StructArray,
    recorded: pa.StructArray,
    files: Mapping[str, tuple[str, int | None]],
) -> tuple[tuple[pa.Array, pa.Array, pa.Array], pa.Array]:
    """Where values are now, and what was recorded of their files with the new times."""
    names = _uris(described).dictionary_encode()
    places = [files.get(uri, (uri, None)) for uri in names.dictionary.to_pylist()]
    uris = pa.array([uri for uri, _ in places], pa.string()).take(names.indices)
    stamps = pa.array([stamp for _, stamp in places], pa.int64()).take(names.indices)
    nothing = pa.scalar(None, pa.uint64())
    # A link to a whole file has neither position nor size.
    ranged = pc.and_(_external(described), pc.not_equal(described.field("size"), 0))
    position = pc.if_else(ranged, described.field("position"), nothing)
    size = pc.if_else(ranged, described.field("size"), nothing)
    children = {child.name: recorded.field(child.name) for child in recorded.type}
    children["file_stamp"] = pc.coalesce(stamps, children["file_stamp"])
    times = pa.StructArray.from_arrays(
        list(children.values()), fields=list(recorded.type), mask=recorded.is_null()
    )
    return (uris, position, size), times


def _stored(
    table: Table, name: str, described: pa.StructArray, deleted: pa.Array, first: int
) -> pa.Array:
    """The bytes of values that are in the table, such as empty ones, as they are no links."""
    here = pc.and_not(described.is_valid(), _external(described))
    full = pc.and_(here, pc.fill_null(pc.greater(described.field("size"), 0), fill_value=False))
    there = pc.and_not(full, deleted)
    values = np.full(len(described), None, np.object_)
    values[here.to_numpy(zero_copy_only=False)] = b""
    places = np.flatnonzero(there.to_numpy(zero_copy_only=False))
    if len(places):
        pairs = lance_call(
            f"reading {table.name}",
            lambda: table.dataset.read_blobs(
                name, addresses=(places + first).tolist(), preserve_order=True
            ),
            table.secrets,
        )
        values[places] = [value for _, value in pairs]
    return pa.array(values, pa.large_binary())


def _commit(
    table: Table,
    journal: Journal,
    stage: str,
    fragments: list[FragmentMetadata],
    names: list[str],
) -> None:
    fields = sorted({number for each in fragments for number in each.files[-1].fields})
    operation = lance.LanceOperation.Update(
        updated_fragments=fragments, fields_modified=fields, update_mode="rewrite_columns"
    )
    store = Store(table.uri, table.storage_options)
    parts = [(journal.store.at(stage), names)]
    try:
        commit_files(journal, store, parts, operation, read_version=table.version)
    except ReadError as error:
        raise WriteError(f"{error}; the table is as it was") from error


def _write(table: Table, function: Callable[[], Any]) -> Any:
    try:
        return lance_call(f"changing the links of {table.name}", function, table.secrets)
    except ReadError as error:
        raise WriteError(f"{error}; the table is as it was") from error


def _path(fragment: FragmentMetadata) -> str:
    """The file of a fragment that was written last."""
    path: str = fragment.files[-1].path
    return path
