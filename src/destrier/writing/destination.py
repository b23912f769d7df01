"""What is where a table is to be written."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeAlias, get_args

from destrier.errors import ArgumentError, TableError, WriteError
from destrier.files import Store
from destrier.table import Table, open_table

__all__ = ["Mode", "check_destination", "field_ids", "table_there"]

Mode: TypeAlias = Literal["create", "append", "overwrite"]


def check_destination(store: Store, mode: str) -> None:
    """Raise unless a table could be written there in that mode.

    Raises:
        ArgumentError: If the mode is not known.
        WriteError: If it is no place for a table.
    """
    if mode not in get_args(Mode):
        raise ArgumentError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    for scheme in ("db", "memory"):
        if store.scheme == scheme:
            raise WriteError(f"a table cannot be written to {scheme}://: pass a path or a bucket")


def table_there(store: Store, mode: str, *, unfinished: bool) -> Table | None:
    """The table that is there already, or None.

    Args:
        store: The table's folder.
        mode: In which it is to be written.
        unfinished: Whether a killed run of this job has moved files there.

    Raises:
        WriteError: If something is there that must not be.
        TableError: If nothing is there that could be appended to.
    """
    table: Table | None = None
    if store.is_folder("_versions"):
        table = open_table(store.uri, storage_options=store.options)
    elif store.stat() is not None or (store.local and _dangling(store.uri)):
        raise WriteError(f"there is a file at {store.shown}: choose another place")
    elif not unfinished and store.holds_anything():
        raise WriteError(
            f"{store.shown} is a folder that holds something else than a table: choose another "
            "place"
        )
    if table is not None and mode == "create":
        raise WriteError(
            f"there is a table at {store.shown} already: choose another place, or pass "
            "mode='append' or mode='overwrite'"
        )
    if table is None and mode == "append":
        raise TableError(f"there is no table at {store.shown} to append to: pass mode='create'")
    return table


def _dangling(path: str) -> bool:
    return os.path.lexists(path) and not os.path.exists(path)


def field_ids(table: Table) -> list[Any]:
    """What Lance knows the columns by, as JSON: files written for others do not fit."""

    def known(field: Any) -> list[Any]:
        return [field.name(), field.id(), [known(child) for child in field.children()]]

    return [known(field) for field in table.dataset.lance_schema.fields()]
