"""Makers of small tables."""

from __future__ import annotations

import os
from typing import Any

import lance
import numpy as np
import pyarrow as pa

ROWS = 1003  # live rows of the table that `varied_table` makes
CLASSES = 10


def columns(count: int, first: int = 0) -> pa.Table:
    """Make ``count`` rows of every kind of column, each value a function of ``id``."""
    ids = np.arange(first, first + count)
    vectors = (ids[:, None] + np.arange(4) / 4).astype(np.float32)
    lengths = ids % 5
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.repeat(ids, lengths) + np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "label": pa.array(ids % CLASSES, pa.int32()),
            "value": pa.array(ids / 8, pa.float32()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 4),
            "name": pa.array([f"row {i}" for i in ids.tolist()], pa.string()),
            "blob": pa.array([blob(i) for i in ids.tolist()], pa.binary()),
            "tokens": pa.ListArray.from_arrays(
                pa.array(ends, pa.int32()), pa.array(tokens, pa.int32())
            ),
            "maybe": pa.array(ids, pa.int64(), mask=ids % 7 == 0),
        }
    )


def blob(i: int) -> bytes:
    """Make the bytes of the row with this id, of a length of its own."""
    return i.to_bytes(4, "little") * (1 + i % 9)


def varied_table(path: str | os.PathLike[str], live: int = ROWS) -> np.ndarray[Any, Any]:
    """Write a table of every kind of column in several fragments, with deleted rows.

    Every 13th row is deleted and one fragment is emptied; so ids and row offsets differ.

    Returns:
        The ids of the live rows in table order: row offset → id.
    """
    uri = os.fspath(path)
    emptied = 50
    written = live + emptied
    while written - emptied - _deleted(written, emptied) < live:
        written += 1
    lance.write_dataset(columns(emptied), uri, max_rows_per_file=emptied)
    dataset = lance.write_dataset(
        columns(written - emptied, emptied),
        uri,
        mode="append",
        max_rows_per_file=max(1, (written - emptied) // 4 + 1),
    )
    dataset.delete(f"id % 13 = 5 OR id < {emptied}")
    ids = np.arange(emptied, written)
    ids = ids[ids % 13 != 5]
    assert len(ids) == live == lance.dataset(uri).count_rows()
    return ids


def _deleted(written: int, emptied: int) -> int:
    return int((np.arange(emptied, written) % 13 == 5).sum())


def plain_table(
    path: str | os.PathLike[str], rows: int, *, rows_per_fragment: int | None = None
) -> lance.LanceDataset:
    """Write a table of id, label and value, of any size, quickly."""
    ids = np.arange(rows)
    table = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "label": pa.array(ids % CLASSES, pa.int32()),
            "value": pa.array(ids / 8, pa.float32()),
        }
    )
    return lance.write_dataset(
        table, os.fspath(path), max_rows_per_file=rows_per_fragment or max(rows, 1)
    )


def appended_table(
    path: str | os.PathLike[str], fragments: int, rows_each: int = 1
) -> lance.LanceDataset:
    """Write a table of many small fragments, as many appends would leave it."""
    return plain_table(path, fragments * rows_each, rows_per_fragment=rows_each)
