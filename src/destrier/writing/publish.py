"""Makes what a journal has finished visible, in one commit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lance
import pyarrow as pa

from destrier.errors import DestrierError, TableError, WriteError
from destrier.files import Store
from destrier.table import Table, lance_call, open_table
from destrier.writing.journal import Journal

__all__ = ["discard", "move_files", "publish", "published_version", "stage_clone"]

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

    Returns:
        The new version.

    Raises:
        WriteError: If it cannot be committed; nothing is visible then.
    """
    metadata = [lance.FragmentMetadata.from_json(text) for text in fragments]
    names = [file.path for each in metadata for file in each.files]
    read_version = 0 if base is None else base.version
    journal.write("publish.json", {"version": read_version, "names": names})
    table = Store(uri, storage_options)
    moved = move_files(journal.store, table, names)
    operation = (
        lance.LanceOperation.Overwrite(schema, metadata)
        if overwrite
        else lance.LanceOperation.Append(metadata)
    )
    try:
        dataset = lance_call(
            f"committing to {table.shown}",
            lambda: lance.LanceDataset.commit(
                uri,
                operation,
                read_version=read_version or None,
                storage_options=dict(storage_options or {}) or None,
            ),
            tuple((storage_options or {}).values()),
        )
    except DestrierError as error:
        for path in moved:
            table.move(path, journal.store, path)
        raise WriteError(f"{error}; what was written is kept in {journal.shown}") from error
    return int(dataset.version)


def published_version(
    journal: Journal, uri: str, storage_options: Mapping[str, str] | None
) -> int | None:
    """The version by which the journal's files became visible, if they did."""
    entry = journal.read("publish.json")
    if entry is None:
        return None
    try:
        table = open_table(uri, storage_options=storage_options)
    except TableError:
        return None
    for version in range(int(entry["version"]) + 1, table.version + 1):
        try:
            dataset = table.at(version).dataset
        except TableError:
            continue
        held = _names(dataset)
        if held.issuperset(entry["names"]) and (entry["names"] or not dataset.count_rows()):
            return version
    return None


def discard(journal: Journal, uri: str, storage_options: Mapping[str, str] | None) -> None:
    """Drop a journal, and files that it moved to the table without a commit."""
    entry = journal.read("publish.json")
    if entry is not None and published_version(journal, uri, storage_options) is None:
        table = Store(uri, storage_options)
        for path in _paths(table, set(entry["names"]) - _held(uri, storage_options)):
            table.remove(path)
        if table.local and not table.files():
            table.remove()
    journal.clear()


def _held(uri: str, storage_options: Mapping[str, str] | None) -> set[str]:
    """The files of the latest version; its own version may have been cleaned up since."""
    try:
        return _names(open_table(uri, storage_options=storage_options).dataset)
    except TableError:
        return set()


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
