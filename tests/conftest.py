"""What all tests share: a clean environment and small tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import tables

if TYPE_CHECKING:
    from pathlib import Path

    import lance
    import numpy as np


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name functions without their address: all processes must name tests alike."""
    return getattr(val, "__name__", None) if callable(val) else None


class Made(NamedTuple):
    """A table on disk and what is in it."""

    path: Path
    ids: np.ndarray[Any, Any]  # row offset → id


@pytest.fixture(autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Give every test an empty cache folder and no rank."""
    monkeypatch.setenv("DESTRIER_CACHE", str(tmp_path_factory.mktemp("cache")))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def shared_table(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make one table of every kind of column, 1 003 live rows in five fragments. Read only."""
    path = tmp_path_factory.mktemp("tables") / "varied.lance"
    return Made(path, tables.varied_table(path))


@pytest.fixture
def table_path(shared_table: Made) -> str:
    """Return the path of the shared table. Read only."""
    return str(shared_table.path)


@pytest.fixture
def table_ids(shared_table: Made) -> np.ndarray[Any, Any]:
    """Return the ids of the shared table: row offset → id."""
    return shared_table.ids


@pytest.fixture
def own_table(tmp_path: Path) -> Made:
    """Make such a table for one test, which may change it."""
    path = tmp_path / "own.lance"
    return Made(path, tables.varied_table(path))


@pytest.fixture
def plain(tmp_path: Path) -> lance.LanceDataset:
    """Make a table of id, label and value with 1 003 rows in three fragments."""
    return tables.plain_table(tmp_path / "plain.lance", tables.ROWS, rows_per_fragment=400)
