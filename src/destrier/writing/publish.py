"""Makes what a journal has finished visible, in one commit."""

from __future__ import annotations

import errno
import json
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lance
import pyarrow as pa

from destrier.errors import (
    ArgumentError,
    DestrierError,
    ReadError,
    RowError,
    SourceError,
    VersionError,
    WriteError,
)
from destrier.files import Store
from destrier.lancecalls import lance_call
from destrier.table import Table, open_table
from destrier.writing.journal import Journal

__all__ = ["commit_files", "discard", "leave", "publish", "published_version", "stage_clone"]

_MOVERS = 8  # files moved at a time; on object stores a move is a copy by the server


def publish(
    journal: Journal,
    uri: str,
    schema: pa.Schema,
    fragments: list[str],
    *,
    overwrite: bool,
    base: Table | None,
    storage_options: Mapping[str, str] | None,
    summary: Any = None,
) -> int:
    """Move the finished files to the table and commit them.

    Args:
        journal: Where they are.
        uri: Of the table.
        schema: Of the rows.
        fragments: Their metadata, in the order of the rows.
        overwrite: Replace what is there (also to create), else append.
        base: The table that is there, if any.
        storage_options: Of the table.
        summary: As for `commit_files`.

    Returns:
        The new version.

    Raises:
        WriteError: If Lance refuses the commit, a table was made there meanwhile, or it is not
            known whether the commit was taken.
    """
    metadata = [lance.FragmentMetadata.from_json(text) for text in fragments]
    operation = (
        lance.LanceOperation.Overwrite(schema, metadata)
        if overwrite
        else lance.LanceOperation.Append(metadata)
    )
    names = [file.path for each in metadata for file in each.files]
    target = Store(uri, storage_options)
    if base is None and _is_table(target):
        raise _made_meanwhile(target)
    try:
        version = commit_files(
            journal,
            target,
            [(journal.store, names)],
            operation,
            read_version=0 if base is None else base.version,
            summary=summary,
        )
    except ReadError as error:
        raise WriteError(f"{error}; nothing of it is visible") from error
    if base is None and version > 1:  # in the moment before; give it back
        lance_call(
            f"restoring {target.shown}",
            lambda: lance.dataset(
                uri, version=version - 1, storage_options=target.options or None
            ).restore(),  # type: ignore[no-untyped-call]
            tuple(target.options.values()),
        )
        raise _made_meanwhile(target)
    return version


def _made_meanwhile(target: Store) -> WriteError:
    return WriteError(
        f"a table was made at {target.shown} meanwhile: choose another place, or pass "
        "mode='append' or mode='overwrite'"
    )


def commit_files(
    journal: Journal,
    target: Store,
    parts: Sequence[tuple[Store, list[str]]],
    operation: Any,
    *,
    read_version: int,
    summary: Any = None,
) -> int:
    """Move finished files to a table and commit them.

    Args:
        journal: Of the job.
        target: The table's folder.
        parts: Folders, and the names of the files that are in each, or were moved from it before.
        operation: Lance's, over these files.
        read_version: The version that it was planned on, 0 for none.
        summary: What the call returns of it, as JSON, for one that finds it published.

    Returns:
        The new version.

    Raises:
        ReadError: If Lance refuses the operation; the files are back where they were.
        WriteError: If it is not known whether it was taken; the same job finds out.
    """
    names = [name for _, each in parts for name in each]
    journal.publish({"version": read_version, "names": names, "summary": summary})
    moved = [(store, move_files(store, target, each)) for store, each in parts]
    try:
        dataset = lance_call(
            f"committing to {target.shown}",
            lambda: lance.LanceDataset.commit(
                target.uri,
                operation,
                read_version=read_version or None,
                storage_options=target.options or None,
            ),
            tuple(target.options.values()),
        )
    except DestrierError as error:
        # a store can have taken the commit, and failed to say so
        try:
            version = published_version(journal, target.uri, target.options)
        except DestrierError:
            raise WriteError(
                f"{error}; it is not known whether the commit was taken: run the same again, which "
                "finds out"
            ) from error
        if version is not None:
            return version
        for store, paths in moved:
            for path in paths:
                target.move(path, store, path)
        raise
    return int(dataset.version)


def published_version(
    journal: Journal, uri: str, storage_options: Mapping[str, str] | None
) -> int | None:
    """The version by which the journal's files became visible, or None if they did not.

    Raises:
        TableError: If there is a table that cannot be read now, so that it is not known.
    """
    entry = journal.publishing()
    if entry is None or not _is_table(Store(uri, storage_options)):
        return None
    table = open_table(uri, storage_options=storage_options)
    for version in range(int(entry["version"]) + 1, table.version + 1):
        try:
            dataset = table.at(version).dataset
        except VersionError:  # cleaned up
            continue
        held = _names(dataset)
        if held.issuperset(entry["names"]) and (entry["names"] or not dataset.count_rows()):
            return version
    return None


def _is_table(store: Store) -> bool:
    return store.is_folder("_versions")


def discard(journal: Journal, uri: str, storage_options: Mapping[str, str] | None) -> None:
    """Drop a journal, and files that it moved to the table without a commit."""
    entry = journal.publishing()
    if entry is not None and published_version(journal, uri, storage_options) is None:
        table = Store(uri, storage_options)
        for path in _paths(table, set(entry["names"]) - _held(uri, storage_options)):
            table.remove(path)
        if table.local and not table.files():
            table.remove()
    journal.clear()


def leave(
    journal: Journal,
    uri: str,
    storage_options: Mapping[str, str] | None,
    error: BaseException,
    *,
    resumable: bool = True,
) -> bool:
    """After an error: keep what the same call can go on from, unless that would fail again.

    Returns:
        Whether something is kept.
    """
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    lost = isinstance(error, SourceError | ArgumentError | RowError | TypeError) or full
    try:
        if resumable and not lost and journal.done():
            return True
        discard(journal, uri, storage_options)
    except DestrierError:
        return True  # the error that came first matters more
    return False


def _held(uri: str, storage_options: Mapping[str, str] | None) -> set[str]:
    """The files of the latest version; its own version may have been cleaned up since."""
    if not _is_table(Store(uri, storage_options)):
        return set()
    return _names(open_table(uri, storage_options=storage_options).dataset)


def stage_clone(journal: Journal, table: Table) -> tuple[str, Table]:
    """A dataset of the same rows in a journal, to which Lance writes files of new columns.

    So whatever a killed process leaves lies there, and not among the files of the table.

    Returns:
        The name of its folder in the journal, and the dataset.
    """
    name = f"stage-{uuid.uuid4().hex}"
    uri = journal.store.address(name)
    options = dict(table.storage_options) or None
    lance_call(
        f"preparing {journal.shown}",
        lambda: table.dataset.shallow_clone(uri, table.version, storage_options=options),
        table.secrets,
    )
    return name, Table(uri, table.version, storage_options=table.storage_options)


def move_files(source: Store, target: Store, names: list[str]) -> list[str]:
    """Move data files and the blob files that belong to them; those moved before are passed."""
    paths = _paths(source, set(names))
    missing = set(names) - {path.removeprefix("data/") for path in paths}
    if missing:
        there = {file.path.removeprefix("data/") for file in target.files("data")}
        if missing - there:
            raise WriteError(
                f"{source.shown} lacks the files {', '.join(sorted(missing - there)[:3])}: "
                "pass restart=True"
            )
    with ThreadPoolExecutor(_MOVERS) as threads:
        list(threads.map(lambda path: source.move(path, target, path), paths))
    return paths


def _paths(store: Store, names: set[str]) -> list[str]:
    """The paths of data files, and of the blob files in folders of the same name."""
    stems = {name.removesuffix(".lance") for name in names}
    found = []
    for file in store.files("data"):
        first = file.path.removeprefix("data/").split("/", 1)[0]
        if first.removesuffix(".lance") in stems:
            found.append(file.path)
    # a data file goes last: where it is, its blobs are
    return sorted(found, key=lambda path: (path.count("/") < 2, path))


def _names(dataset: Any) -> set[str]:
    fragments = json.loads(json.dumps([f.metadata.to_json() for f in dataset.get_fragments()]))
    return {file["path"] for each in fragments for file in each["files"]}
