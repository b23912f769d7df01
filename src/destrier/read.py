"""Coalesced reads: from row offsets to Arrow rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.caching.cached import CachedColumns
from destrier.caching.location import CacheFolder
from destrier.columns import dense_bytes, dense_type, empty_array
from destrier.counters import Counts
from destrier.errors import LinkError, ReadError, RowError
from destrier.keyed import Ints
from destrier.lancecalls import lance_call
from destrier.links.columns import companion
from destrier.links.reader import BrokenLinksError, LinkReader
from destrier.selection import RowList
from destrier.table import Table
from destrier.take import Takes
from destrier.writing.layout import LINK_KEY, is_blob

__all__ = ["Reader", "Rows"]

_HOPELESS = 64  # rows in a row that fail before the fault is taken to be not theirs
_OBJECT_BYTES = 80  # of a Python object beside its content
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


class _BrokenError(Exception):
    """Rows of a block whose links are broken, by place, and in which column."""

    def __init__(self, column: str, errors: dict[int, LinkError]) -> None:
        super().__init__(column)
        self.column = column
        self.errors = errors


class Reader:
    """Reads chosen columns of rows by offset: sorted, each row once, in few large requests.

    Safe to call from several threads. Linked columns are read from their files, other blob columns
    through Lance's blob calls, and all others through takes.

    Args:
        table: The pinned table.
        columns: Names of the columns to read.
        tolerant: Whether a row that cannot be read is reported (else it is raised).
        counts: Where bytes and seconds are added up.
        cache: A folder on local disk to read through.
        rows: The rows that will be read, for the cache; None is all.
    """

    def __init__(
        self,
        table: Table,
        columns: list[str],
        *,
        tolerant: bool = False,
        counts: Counts | None = None,
        cache: CacheFolder | None = None,
        rows: RowList | None = None,
    ) -> None:
        self.table = table
        self.columns = columns
        self.tolerant = tolerant
        self.counts = Counts() if counts is None else counts
        self._lost = 0  # rows that failed, over blocks, since one could be read
        schema = table.schema
        found = {name: companion(schema, name) for name in columns}
        self._companions = {name: beside for name, beside in found.items() if beside is not None}
        blobs = (name for name in columns if is_blob(schema.field(name)))
        self._blobs = {name for name in blobs if name not in self._companions}
        self._takes = Takes(table)
        self._links = LinkReader(table.storage_options)
        self.schema = pa.schema([_read_field(schema.field(name)) for name in columns])
        self._cached = None
        store = None if cache is None else cache.open()
        if store is not None:
            self._cached = CachedColumns(
                store, table, self.schema, rows=rows, fetch=self._missed, depends=self._companions
            )

    def row_bytes(self) -> float:
        """Bytes of a row in memory, about, by types and what the table's files take."""
        variable = sum(dense_type(field.type) is None for field in self.schema)
        fixed = sum(dense_bytes(field.type) for field in self.schema)
        if not variable:
            return max(float(fixed), 1.0)
        others = sum(dense_bytes(f.type) for f in self.table.schema if f.name not in self.columns)
        rest = max(0.0, self.table.row_bytes - fixed - others)
        return fixed + rest + _OBJECT_BYTES * variable

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
        self.counts.done("read", began, rows=len(unique), size=batch.nbytes)
        return rows

    def _read_good(self, offsets: Ints, bad: _Bad) -> pa.RecordBatch:
        """Read the rows; where that fails, halve until the rows at fault are found."""
        if not len(offsets):
            return _empty(self.schema)
        try:
            batch = self._take(offsets, self.columns)
        except _BrokenError as broken:
            return self._read_others(offsets, broken, bad)
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
                self._check_hope(named, 1, bad)
                return _empty(self.schema)
        else:
            bad.some_good = True
            self._lost = 0
            return batch
        middle = len(offsets) // 2
        halves = [self._read_good(part, bad) for part in (offsets[:middle], offsets[middle:])]
        return pa.concat_batches(halves)

    def _read_others(self, offsets: Ints, broken: _BrokenError, bad: _Bad) -> pa.RecordBatch:
        """Read the rows whose links are not broken."""
        named = {
            int(offsets[place]): self._named(int(offsets[place]), broken.column, error)
            for place, error in sorted(broken.errors.items())
        }
        first = next(iter(named.values()))
        if not self.tolerant:
            raise first from None
        bad.update(named)
        batch = self._read_good(np.delete(offsets, list(broken.errors)), bad)
        self._check_hope(first, len(named), bad)
        return batch

    def _check_hope(self, error: ReadError, lost: int, bad: _Bad) -> None:
        """Count rows that failed, and raise if too many did in a row."""
        if not bad.some_good:
            self._lost += lost
        if self._lost >= _HOPELESS:
            raise type(error)(
                f"none of {self._lost} rows of {self.table.name} could be read, so it is not the "
                f"rows: {error}"
            ) from error

    def _name_column(self, offset: int, error: ReadError) -> ReadError:
        culprit, cause = None, error
        for name in self.columns:
            try:
                self._take(np.array([offset]), [name])
            except ReadError as again:
                culprit, cause = name, again
                break
            except _BrokenError as broken:
                culprit, cause = name, broken.errors[0]
                break
        return self._named(offset, culprit, cause)

    def _named(self, offset: int, column: str | None, cause: ReadError) -> ReadError:
        where = f"row {offset}" if column is None else f"column {column!r} of row {offset}"
        return type(cause)(
            f"cannot read {where} of {self.table.name}: {cause}", offset=offset, column=column
        )

    def _take(self, offsets: Ints, columns: list[str]) -> pa.RecordBatch:
        fields = [self.schema.field(name) for name in columns]
        fetch = self._fetch if self._cached is None else self._cached.take
        found = fetch(offsets, columns)
        return pa.RecordBatch.from_arrays(
            [found[name] for name in columns], schema=pa.schema(fields)
        )

    def _missed(self, offsets: Ints, columns: list[str]) -> dict[str, pa.Array]:
        """What the cache does not have, which is counted by itself."""
        began = time.perf_counter()
        found = self._fetch(offsets, columns)
        size = sum(int(array.nbytes) for array in found.values())
        self.counts.done("fetch", began, rows=len(offsets), size=size)
        return found

    def _fetch(self, offsets: Ints, columns: list[str]) -> dict[str, pa.Array]:
        kept = [name for name in columns if name not in self._blobs]
        taken: dict[str, pa.Array] = {}
        if kept:
            beside = [self._companions[name] for name in kept if name in self._companions]
            taken = self._take_kept(offsets, list(dict.fromkeys(kept + beside)))
        found: dict[str, pa.Array] = {}
        for name in columns:
            if name in self._blobs:
                found[name] = _binary(self._read_blobs(name, offsets))
            elif name in self._companions:
                found[name] = self._read_linked(name, offsets, taken)
            else:
                found[name] = taken[name]
        return found

    def _take_kept(self, offsets: Ints, names: list[str]) -> dict[str, pa.Array]:
        """Take what the rows hold themselves: values, and descriptions of linked ones."""
        taken: dict[str, pa.Array] = self._call(lambda: self._takes.take(offsets, names))
        return taken

    def _read_linked(self, name: str, offsets: Ints, taken: dict[str, pa.Array]) -> pa.Array:
        try:
            return self._links.read(
                taken[name],
                taken[self._companions[name]],
                lambda places: self._read_blobs(name, offsets[places]),
            )
        except BrokenLinksError as broken:
            raise _BrokenError(name, broken.errors) from None

    def _read_blobs(self, name: str, offsets: Ints) -> list[bytes | None]:
        values: list[bytes | None] = self._call(lambda: self._takes.blobs(offsets, name))
        return values

    def _call(self, function: Callable[[], Any]) -> Any:
        return lance_call(
            f"reading {self.table.name}",
            function,
            self.table.secrets,
            patience=self.table.patience,
        )


def _sorted_unique(offsets: Ints) -> tuple[Ints, Ints | None]:
    if (offsets[1:] > offsets[:-1]).all():
        return offsets, None
    unique, index = np.unique(offsets, return_inverse=True)
    return unique, index


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([empty_array(f.type) for f in schema], schema=schema)


def _binary(values: list[bytes | None]) -> pa.Array:
    return pa.array(values, pa.large_binary())


def _read_field(field: pa.Field) -> pa.Field:
    """The field as it is read: blobs arrive as their bytes, and nothing says how they are kept."""
    if not is_blob(field):
        return field
    metadata = {
        key: value
        for key, value in (field.metadata or {}).items()
        if key != LINK_KEY and not key.startswith((b"lance-encoding:", b"ARROW:extension:"))
    }
    return pa.field(field.name, pa.large_binary(), metadata=metadata or None)
