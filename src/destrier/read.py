"""Coalesced reads: from row offsets to Arrow rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.columns import empty_array
from destrier.counters import Counts
from destrier.errors import ReadError, RowError
from destrier.keyed import Ints
from destrier.table import Table, lance_call

__all__ = ["Reader", "Rows"]

_HOPELESS = 64  # rows in a row that fail before the fault is taken to be not theirs
_GONE = re.compile(r"not found|no such file", re.IGNORECASE)


@dataclass
class Rows:
    """Rows that were read, each once.

    Attributes:
        batch: The rows, in the order of their offsets.
        index: For each requested offset its row in the batch, or -1 if it could not be read; None
            if the batch has just the requested rows in their order.
        errors: For each such request (by its place) what happened.
    """

    batch: pa.RecordBatch
    index: Ints | None
    errors: dict[int, RowError] = field(default_factory=dict)


class _Bad(dict[int, ReadError]):
    """The rows of a block that could not be read, by offset, and whether any other could."""

    some_good = False


class Reader:
    """Reads chosen columns of rows by offset: sorted, each row once, in few large requests.

    Safe to call from several threads. Blob columns are read through Lance's blob calls, all others
    through takes.

    Args:
        table: The pinned table.
        columns: Names of the columns to read.
        tolerant: Whether a row that cannot be read is reported (else it is raised).
        counts: Where bytes and seconds are added up.
    """

    def __init__(
        self,
        table: Table,
        columns: list[str],
        *,
        tolerant: bool = False,
        counts: Counts | None = None,
    ) -> None:
        self.table = table
        self.columns = columns
        self.tolerant = tolerant
        self.counts = Counts() if counts is None else counts
        self._lost = 0  # rows that failed, over blocks, since one could be read
        schema = table.schema
        self._blobs = [name for name in columns if _is_blob(schema.field(name))]
        self._plain = [name for name in columns if name not in self._blobs]
        self.schema = pa.schema([_read_field(schema.field(name)) for name in columns])

    def read(self, offsets: Ints) -> Rows:
        """Read rows.

        Args:
            offsets: Live-row offsets in any order; repeats are read once.

        Raises:
            ReadError: If a row cannot be read and the reader is not tolerant, or if a file of the
                table is gone.
        """
        began = time.perf_counter()
        unique, index = _sorted_unique(offsets)
        bad = _Bad()
        batch = self._read_good(unique, bad)
        rows = Rows(batch, index)
        if bad:
            good = np.array([offset not in bad for offset in unique.tolist()])
            packed = np.where(good, np.cumsum(good) - 1, -1)
            rows.index = packed if index is None else packed[index]
            broken = np.flatnonzero(rows.index < 0).tolist()
            rows.errors = {i: bad[int(offsets[i])] for i in broken}
        self.counts.add("bytes_loaded", batch.nbytes)
        self.counts.add("fetch_time", time.perf_counter() - began)
        return rows

    def _read_good(self, offsets: Ints, bad: _Bad) -> pa.RecordBatch:
        """Read the rows; where that fails, halve until the rows at fault are found."""
        if not len(offsets):
            return _empty(self.schema)
        try:
            batch = self._take(offsets, self._plain, self._blobs)
        except ReadError as error:
            if _GONE.search(str(error)) and ".lance" in str(error):
                raise ReadError(
                    f"a file of {self.table.name} is gone, so the version was removed or its files "
                    f"were deleted while it was read (pin= keeps a version): {error}"
                ) from error
            if len(offsets) == 1:
                offset = int(offsets[0])
                named = self._name_column(offset, error)
                if not self.tolerant:
                    raise named from error
                bad[offset] = named
                if not bad.some_good:
                    self._lost += 1
                if self._lost >= _HOPELESS:
                    raise ReadError(
                        f"none of {self._lost} rows of {self.table.name} could be read, so it is "
                        f"not the rows: {named}"
                    ) from error
                return _empty(self.schema)
        else:
            bad.some_good = True
            self._lost = 0
            return batch
        middle = len(offsets) // 2
        halves = [self._read_good(part, bad) for part in (offsets[:middle], offsets[middle:])]
        return pa.concat_batches(halves)

    def _name_column(self, offset: int, error: ReadError) -> ReadError:
        culprit, said = None, str(error)
        for name in self.columns:
            plain, blobs = ([], [name]) if name in self._blobs else ([name], [])
            try:
                self._take(np.array([offset]), plain, blobs)
            except ReadError as again:
                culprit, said = name, str(again)
                break
        where = f"column {culprit!r} of row {offset}" if culprit else f"row {offset}"
        return ReadError(
            f"cannot read {where} of {self.table.name}: {said}", offset=offset, column=culprit
        )

    def _take(self, offsets: Ints, plain: list[str], blobs: list[str]) -> pa.RecordBatch:
        dataset = self.table.dataset
        found: dict[str, pa.Array] = {}
        if plain:
            taken = self._call(lambda: dataset.take(pa.array(offsets), columns=plain))
            if taken.num_rows != len(offsets):
                raise ReadError(
                    f"Lance returned {taken.num_rows} rows of {self.table.name} "
                    f"for {len(offsets)} offsets"
                )
            for name in plain:
                column = taken.column(name)
                chunks = column.chunks
                found[name] = chunks[0] if len(chunks) == 1 else _combine(column)
        for name in blobs:
            found[name] = self._take_blobs(name, offsets)
        names = [name for name in self.columns if name in found]
        fields = [self.schema.field(name) for name in names]
        return pa.RecordBatch.from_arrays([found[name] for name in names], schema=pa.schema(fields))

    def _take_blobs(self, name: str, offsets: Ints) -> pa.Array:
        pairs = self._call(
            lambda: self.table.dataset.read_blobs(
                name, indices=offsets.tolist(), preserve_order=True
            )
        )
        if len(pairs) != len(offsets):
            raise ReadError(
                f"Lance returned {len(pairs)} blobs of {self.table.name} for {len(offsets)} offsets"
            )
        return pa.array([value for _, value in pairs], pa.large_binary())

    def _call(self, function: Callable[[], Any]) -> Any:
        return lance_call(f"reading {self.table.name}", function, self.table.secrets)


def _sorted_unique(offsets: Ints) -> tuple[Ints, Ints | None]:
    if (offsets[1:] > offsets[:-1]).all():
        return offsets, None
    unique, index = np.unique(offsets, return_inverse=True)
    return unique, index


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([empty_array(f.type) for f in schema], schema=schema)


def _combine(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def _is_blob(field: pa.Field) -> bool:
    metadata = field.metadata or {}
    if metadata.get(b"lance-encoding:blob", b"").lower() == b"true":
        return True
    kind = field.type
    name = (
        getattr(kind, "extension_name", "") or metadata.get(b"ARROW:extension:name", b"").decode()
    )
    return name.startswith("lance.blob")


def _read_field(field: pa.Field) -> pa.Field:
    """The field as it is read: blobs arrive as their bytes."""
    return pa.field(field.name, pa.large_binary()) if _is_blob(field) else field
