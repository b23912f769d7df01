"""Rows held in memory, from which shares are gathered.

Two kinds with the same calls: one of numpy columns, from which a share is one `numpy.take` a
column, and one of Arrow rows for those who want Arrow or dicts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.arrays import grown
from destrier.columns import Column, Columns, empty_array, from_arrow, take
from destrier.keyed import Ints
from destrier.memory import gather
from destrier.read import Rows
from destrier.wide import gather_wide, is_wide

__all__ = ["ArrowPool", "ColumnPool", "Gathered", "HeldArrow", "HeldColumns", "Pool"]

_NARROW_BYTES = 64  # what the processor fetches at once

Gathered: TypeAlias = "Columns | pa.RecordBatch"


class Pool(Protocol):
    """Rows at numbered places."""

    @property
    def frees(self) -> bool:
        """Whether it lets go of anything before it is written over."""
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for places below ``capacity``."""
        ...

    def put(self, targets: Ints, rows: Rows) -> None:
        """Put the i-th requested row at place ``targets[i]``."""
        ...

    def free(self, start: int, stop: int) -> None:
        """Forget the rows at places ``[start, stop)``."""
        ...

    def take(self, places: Ints) -> Gathered:
        """Gather the rows at the places."""
        ...


class HeldColumns:
    """The rows of one block as numpy columns.

    Args:
        rows: What was read.
        views: Columns whose bytes may be views of Arrow's memory.
    """

    def __init__(self, rows: Rows, views: Collection[str] = ()) -> None:
        self._columns = {
            name: from_arrow(rows.batch.column(i), views=name in views)
            for i, name in enumerate(rows.batch.schema.names)
        }
        self._index = rows.index

    def take(self, places: Ints) -> Columns:
        """Gather the requested rows at the places."""
        index = places if self._index is None else self._index[places]
        return {name: take(column, index) for name, column in self._columns.items()}


class HeldArrow:
    """The rows of one block as Arrow."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def take(self, places: Ints) -> pa.RecordBatch:
        """Gather the requested rows at the places."""
        index = self._rows.index
        return self._rows.batch.take(pa.array(places if index is None else index[places]))


class ColumnPool:
    """Rows as numpy columns; narrow ones lie side by side, row by row.

    Rows are gathered in a random order: each then costs one access to memory instead of one for
    each column.

    Args:
        schema: Of the rows.
        views: Columns whose bytes may be views of Arrow's memory. What was read together then
            stays until none of its rows is needed.
    """

    def __init__(self, schema: pa.Schema, views: Collection[str] = ()) -> None:
        self.capacity = 0
        self._views = views
        empty = {field.name: from_arrow(empty_array(field.type)) for field in schema}
        narrow = {name: c.values for name, c in empty.items() if _is_narrow(c)}
        # In this order nothing lies between two of them.
        packed = sorted(narrow, key=lambda name: narrow[name].dtype.alignment, reverse=True)
        # numpy has no field of the name "", which a column may have.
        self._fields = {n: f"f{i}" for i, n in enumerate(packed)} if len(packed) > 1 else {}
        self._values = {n: c.values for n, c in empty.items() if n not in self._fields}
        fields = [(f, narrow[n].dtype, narrow[n].shape[1:]) for n, f in self._fields.items()]
        self._packed = np.empty(0, np.dtype(fields, align=True))
        self._names = schema.names
        self._valid: dict[str, NDArray[np.bool_]] = {}

    @property
    def frees(self) -> bool:
        """Whether it has Python objects."""
        return any(values.dtype == np.object_ for values in self._values.values())

    def reserve(self, capacity: int) -> None:
        """Grow by copying, to twice the size at least: memory is touched only where used."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, 2 * self.capacity)
        self._values = {name: grown(a, capacity) for name, a in self._values.items()}
        self._packed = grown(self._packed, capacity)
        self._valid = {name: grown(a, capacity) for name, a in self._valid.items()}
        self.capacity = capacity

    def put(self, targets: Ints, rows: Rows) -> None:
        """Scatter the rows to their places."""
        index = rows.index
        if index is not None and rows.errors:
            targets, index = targets[index >= 0], index[index >= 0]
        if not len(targets):
            return
        where = _places(targets)
        packed = self._packed[where] if isinstance(where, slice) else None
        if packed is None:
            packed = np.empty(len(targets), self._packed.dtype)
        for i, name in enumerate(self._names):
            column = from_arrow(rows.batch.column(i), views=name in self._views)
            if index is not None:
                column = take(column, index)
            if name in self._fields:
                packed[self._fields[name]] = column.values
            else:
                self._values[name][where] = column.values
            valid = self._valid.get(name)
            if column.valid is not None and valid is None:
                valid = self._valid[name] = np.ones(self.capacity, np.bool_)
            if valid is not None:
                valid[where] = True if column.valid is None else column.valid
        if self._fields and not isinstance(where, slice):
            self._packed[where] = packed

    def free(self, start: int, stop: int) -> None:
        """Let go of Python objects; numbers are overwritten by the next window."""
        for pool in self._values.values():
            if pool.dtype == np.object_:
                pool[start:stop] = None

    def take(self, places: Ints) -> Columns:
        """One `numpy.take` a wide column, and one for all narrow ones."""
        packed = np.take(self._packed, places) if self._fields else self._packed
        columns: Columns = {}
        for name in self._names:
            if name in self._fields:
                values = np.ascontiguousarray(packed[self._fields[name]])
            else:
                values = gather(self._values[name], places)
            valid = self._valid.get(name)
            columns[name] = Column(values, None if valid is None else valid[places])
        return columns


def _is_narrow(column: Column) -> bool:
    values = column.values
    return column.dense and values.itemsize * math.prod(values.shape[1:]) <= _NARROW_BYTES


def _places(targets: Ints) -> slice | Ints:
    """Successive places as a slice, which is filled by one copy."""
    first, last = int(targets[0]), int(targets[-1])
    if last - first + 1 == len(targets) and (targets[1:] > targets[:-1]).all():
        return slice(first, last + 1)
    return targets


class ArrowPool:
    """Rows as the record batches in which they were read, until none of their rows is needed."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._groups: dict[int, pa.RecordBatch] = {}
        self._left: dict[int, int] = {}
        self._group = np.empty(0, np.int64)
        self._row = np.empty(0, np.int64)
        self._next = 0
        self.frees = True

    def reserve(self, capacity: int) -> None:
        """Make room in the tables of places."""
        known = len(self._group)
        if capacity > known:
            self._group = np.concatenate([self._group, np.full(capacity - known, -1)])
            self._row = np.concatenate([self._row, np.full(capacity - known, -1)])

    def put(self, targets: Ints, rows: Rows) -> None:
        """Keep the batch and note where its rows lie."""
        if not len(targets):
            return
        self._group[targets] = self._next
        self._row[targets] = np.arange(len(targets)) if rows.index is None else rows.index
        self._groups[self._next] = rows.batch
        self._left[self._next] = len(targets)
        self._next += 1

    def free(self, start: int, stop: int) -> None:
        """Forget the places; a batch goes with the last of its rows."""
        groups, counts = np.unique(self._group[start:stop], return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            if group < 0:
                continue
            self._left[group] -= count
            if not self._left[group]:
                del self._groups[group], self._left[group]
        self._group[start:stop] = -1

    def take(self, places: Ints) -> pa.RecordBatch:
        """The rows at places: large values copied one by one, all else as Arrow does it."""
        if not len(places):
            return pa.RecordBatch.from_arrays(
                [empty_array(field.type) for field in self._schema], schema=self._schema
            )
        numbers, sources = np.unique(self._group[places], return_inverse=True)
        rows = self._row[places]
        held = [self._groups[number] for number in numbers.tolist()]
        wide = {
            name: gather_wide(arrays, sources, rows)
            for i, name in enumerate(self._schema.names)
            if is_wide(arrays := [batch.column(i) for batch in held])
        }
        if not wide:
            return _ordered(held, sources, rows)
        others = [name for name in self._schema.names if name not in wide]
        found = dict(wide)
        if others:
            joined = _ordered([batch.select(others) for batch in held], sources, rows)
            found.update(zip(others, joined.columns, strict=True))
        return pa.RecordBatch.from_arrays(
            [found[name] for name in self._schema.names], schema=held[0].schema
        )


def _ordered(held: list[pa.RecordBatch], sources: Ints, rows: Ints) -> pa.RecordBatch:
    """Gather from each batch what is wanted of it, then bring it into order."""
    by_source = np.argsort(sources, kind="stable")
    cuts = np.flatnonzero(np.diff(sources[by_source])) + 1
    parts = [
        held[int(sources[part[0]])].take(pa.array(rows[part])) for part in np.split(by_source, cuts)
    ]
    joined = pa.concat_batches(parts)
    back = np.empty(len(rows), np.int64)
    back[by_source] = np.arange(len(rows))
    return joined.take(pa.array(back))
