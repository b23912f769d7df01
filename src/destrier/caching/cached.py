"""Reads columns of rows through blocks that are kept on local disk."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from destrier.caching.blocks import (
    Density,
    block_row_bytes,
    block_rows,
    column_key,
    least_density,
)
from destrier.caching.entry import DamagedError, FileValues, UnopenedError, pack
from destrier.caching.store import Folder, Store, warn_once
from destrier.caching.values import ArrayValues, Values, assembled
from destrier.errors import ReadError, StorageError
from destrier.keyed import Ints
from destrier.selection import RowList
from destrier.table import Table

__all__ = ["CachedColumns", "Fetch"]

# A read of few rows from many blocks fetches some of the blocks, so that it takes little longer
# than without a cache, and the others are fetched by the reads that follow.
_FETCHED_TIMES = 8
_FETCHED_BYTES = 16 << 20
_SAMPLE_PARTS = 4
_KNOWN_BYTES = 64 << 20  # of what is known of files

Fetch: TypeAlias = "Callable[[Ints, list[str]], dict[str, pa.Array]]"
"""Reads columns of rows, by ascending offsets, from the table."""


@dataclass
class _Part:
    """The rows of a read that lie in one block of a column, and their values once found.

    Attributes:
        folder: Where blocks of the column are kept; None if it has none.
        start: The first place among the rows of the read.
        stop: And one more than the last.
        rows: Which rows of the values are wanted, ascending.
    """

    name: str
    folder: Folder | None
    block: int
    start: int
    stop: int
    rows: Ints
    values: Values | None = None

    @property
    def id(self) -> tuple[str, int]:
        return self.name, self.block


class _FetchError(Exception):
    """Reading from the table failed."""


class CachedColumns:
    """Reads rows of a table's columns, from files where they are kept, else from the table.

    Safe to call from several threads: a block that two of them want is fetched by one.

    Args:
        store: Where blocks are kept.
        table: The pinned table.
        schema: The columns as they are read.
        rows: The rows that will be read; None is all.
        fetch: Reads from the table.
        depends: For a column, another that decides its values too.
    """

    def __init__(
        self,
        store: Store,
        table: Table,
        schema: pa.Schema,
        *,
        rows: RowList | None,
        fetch: Fetch,
        depends: Mapping[str, str],
    ) -> None:
        self._store = store
        self._table = table
        self._schema = schema
        self._from_table = fetch
        self._depends = depends
        self._density = Density(rows, table.num_rows)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._keys: dict[str, str] = {}
        self._block_rows: dict[str, int] = {}
        self._folders: dict[str, Folder | None] = {}
        self._files: OrderedDict[tuple[str, int], FileValues] = OrderedDict()
        self._files_bytes = 0
        self._fetching: dict[tuple[str, int], threading.Event] = {}
        self._spoiled: set[tuple[str, int]] = set()
        self._damaged: set[tuple[str, int]] = set()

    def take(self, offsets: Ints, columns: list[str]) -> dict[str, pa.Array]:
        """Read rows.

        Args:
            offsets: Ascending, each once.
            columns: Names of columns of the schema.

        Raises:
            StorageError: If the object store goes on failing.
            ReadError: What reading the table raises for these rows.
        """
        try:
            found = self._take(offsets, columns)
            while found is None:
                found = self._take(offsets, columns)
        except (_FetchError, UnopenedError):
            # Other rows of a block may have caused it; what is raised now is for these rows.
            return self._from_table(offsets, columns)
        return found

    def _take(self, offsets: Ints, columns: list[str]) -> dict[str, pa.Array] | None:
        """Read rows; None if damaged files were met, which are removed now."""
        parts = self._parts(offsets, columns)
        for part in _missing(parts):
            part.values = self._kept(part)
        self._fetch_blocks(parts, len(offsets))
        for part in _missing(parts):
            self._wait(part)
            part.values = self._kept(part)
        self._fetch_rest(parts, offsets)
        found = {}
        damaged = False
        for name in columns:
            kind = self._schema.field(name).type
            sources = [(p.values, p.rows) for p in parts[name] if p.values is not None]
            try:
                array = assembled(sources, _storage_type(kind))
            except DamagedError as error:
                damaged = True
                self._drop(parts[name][0], error.block)
                continue
            found[name] = kind.wrap_array(array) if _storage_type(kind) != kind else array
        return None if damaged else found

    def _parts(self, offsets: Ints, columns: list[str]) -> dict[str, list[_Part]]:
        """Cut a read at the borders of blocks."""
        cuts: dict[int, list[tuple[int, int, int, Ints]]] = {}
        parts: dict[str, list[_Part]] = {}
        for name in columns:
            folder = self._folder(name)
            size = self._table.num_rows if folder is None else folder.block_rows
            if size not in cuts:
                cuts[size] = list(_cut(offsets, size))
            parts[name] = [_Part(name, folder, *cut) for cut in cuts[size]]
        return parts

    def _folder(self, name: str) -> Folder | None:
        """The folder of a column, made when there is room for it; None if it has none."""
        with self._making:
            if name in self._folders:
                return self._folders[name]
            if name in self._keys and not self._store.has_room:
                return None
            try:
                folder = self._make_folder(name)
                if folder is None:
                    return None  # there may be room later
            except StorageError:
                raise
            except TimeoutError:
                return None  # others are busy
            except (_FetchError, ReadError):
                folder = None
            except OSError as error:
                folder = None
                warn_once(self._store.root, error)
            self._folders[name] = folder
            return folder

    def _make_folder(self, name: str) -> Folder | None:
        kind = self._schema.field(name).type
        if name not in self._keys:
            names = [name, *([self._depends[name]] if name in self._depends else [])]
            self._keys[name] = column_key(self._table, names, kind)
        folder = self._store.column(self._keys[name])
        if folder is not None:
            return folder
        if name not in self._block_rows:
            self._block_rows[name] = block_rows(
                kind, self._table.num_rows, lambda places: self._sample(name, places)
            )
        return self._store.make_column(self._keys[name], self._block_rows[name])

    def _sample(self, name: str, places: Ints) -> pa.Array:
        """Rows that tell how wide values are: others, or fewer, where one cannot be read."""
        others = np.unique((places + len(places)) % self._table.num_rows)
        parts = np.array_split(places, min(_SAMPLE_PARTS, len(places)))
        for rows in (places, others, *parts):
            with contextlib.suppress(_FetchError):
                return self._fetch(rows, [name])[name]
        raise _FetchError

    # ---- files ----------------------------------------------------------------------------------

    def _kept(self, part: _Part) -> Values | None:
        """The values of a block that is kept."""
        if part.folder is None:
            return None
        with self._lock:
            if part.id in self._damaged:
                return None
            known = self._files.get(part.id)
            if known is not None:
                self._files.move_to_end(part.id)
                return known
        folder = part.folder
        if not folder.has(part.block):
            return None
        rows = self._rows_of(part)
        open_file = partial(folder.open, part.block)
        try:
            values = FileValues(open_file, column=folder.key, block=part.block, rows=rows)
        except DamagedError:
            self._drop(part, part.block)
            return None
        with self._lock:
            if part.id not in self._files:
                self._files[part.id] = values
                self._files_bytes += values.held_bytes
            while self._files_bytes > _KNOWN_BYTES:
                _, oldest = self._files.popitem(last=False)
                self._files_bytes -= oldest.held_bytes
        return values

    def _drop(self, part: _Part, block: int) -> None:
        """Remove a file that is damaged, or pass it over from now on if it cannot be removed."""
        if part.folder is None:
            return
        with self._lock:
            values = self._files.pop((part.name, block), None)
            if values is not None:
                self._files_bytes -= values.held_bytes
        if not self._store.remove(part.folder, block):
            self._damaged.add((part.name, block))

    def _rows_of(self, part: _Part) -> int:
        """Rows of the block of a part: the last one of a table may have less than the others."""
        assert part.folder is not None
        size = part.folder.block_rows
        return min(size, self._table.num_rows - part.block * size)

    # ---- the table ------------------------------------------------------------------------------

    def _fetch(self, offsets: Ints, columns: list[str]) -> dict[str, pa.Array]:
        try:
            fetched = self._from_table(offsets, columns)
        except StorageError:
            raise  # no row is at fault, and it was waited for
        except Exception as error:
            raise _FetchError from error
        return {name: _storage(array) for name, array in fetched.items()}

    def _fetch_blocks(self, parts: dict[str, list[_Part]], rows: int) -> None:
        """Fetch blocks that are missing and worth keeping, and keep them."""
        if not self._store.has_room:
            return
        groups: dict[tuple[int, ...], list[list[_Part]]] = {}
        claimed: list[_Part] = []
        try:
            for mine in self._worth_fetching(parts, rows):
                with self._lock:
                    free = [part for part in mine if part.id not in self._fetching]
                    self._fetching.update({part.id: threading.Event() for part in free})
                claimed.extend(free)
                # One that was kept by another thread since it was looked for is not fetched again.
                for part in free:
                    part.values = self._kept(part)
                new = [part for part in free if part.values is None]
                if new:
                    assert new[0].folder is not None
                    key = (new[0].folder.block_rows, *(part.block for part in new))
                    groups.setdefault(key, []).append(new)
            for columns in groups.values():
                self._fetch_group(columns)
        except _FetchError:
            self._spoiled.update(part.id for part in claimed)
            raise
        finally:
            with self._lock:
                events = [self._fetching.pop(part.id) for part in claimed]
            for event in events:
                event.set()

    def _worth_fetching(self, parts: dict[str, list[_Part]], rows: int) -> list[list[_Part]]:
        """The missing blocks to fetch now, by column: those first that more rows are wanted of."""
        found: list[tuple[float, int, _Part]] = []
        wanted = 0.0
        for mine in parts.values():
            folder = mine[0].folder
            if folder is None:
                continue
            wanted += rows * block_row_bytes(folder.block_rows)
            missing = [
                part
                for part in mine
                if part.values is None
                and part.id not in self._spoiled
                and part.id not in self._damaged
            ]
            blocks = np.array([part.block for part in missing], np.int64)
            dense = self._density.of(folder.block_rows, blocks)
            least = least_density(folder.block_rows)
            for part, density in zip(missing, dense.tolist(), strict=True):
                if density >= least:
                    size = self._rows_of(part)
                    found.append((len(part.rows) / size, size, part))
        left = max(_FETCHED_TIMES * wanted, _FETCHED_BYTES)
        found.sort(key=lambda each: -each[0])
        chosen: dict[str, list[_Part]] = {}
        for _, size, part in found:
            assert part.folder is not None
            left -= size * block_row_bytes(part.folder.block_rows)
            if left < 0 and chosen:
                break
            chosen.setdefault(part.name, []).append(part)
        return [sorted(mine, key=lambda part: part.block) for mine in chosen.values()]

    def _fetch_group(self, columns: list[list[_Part]]) -> None:
        """Fetch the same blocks of several columns by one request."""
        blocks = columns[0]
        assert blocks[0].folder is not None
        size = blocks[0].folder.block_rows
        ranges = [np.arange(self._rows_of(part)) + part.block * size for part in blocks]
        ends = np.cumsum([len(each) for each in ranges]).tolist()
        fetched = self._fetch(np.concatenate(ranges), [mine[0].name for mine in columns])
        for mine in columns:
            array = fetched[mine[0].name]
            content: dict[int, bytes] = {}
            for part, end, each in zip(mine, ends, ranges, strict=True):
                assert part.folder is not None
                block = array.slice(end - len(each), len(each))
                part.values = ArrayValues(block)
                content[part.block] = pack(block, column=part.folder.key, block=part.block)
            assert mine[0].folder is not None
            self._store.save(mine[0].folder, content)

    def _wait(self, part: _Part) -> None:
        """Wait until no other thread fetches a block."""
        with self._lock:
            event = self._fetching.get(part.id)
        if event is not None:
            event.wait()

    def _fetch_rest(self, parts: dict[str, list[_Part]], offsets: Ints) -> None:
        """Fetch just the rows of what is still missing, equal rows of columns by one request."""
        groups: dict[tuple[tuple[int, int], ...], list[list[_Part]]] = {}
        for mine in parts.values():
            missing = [part for part in mine if part.values is None]
            if missing:
                key = tuple((part.start, part.stop) for part in missing)
                groups.setdefault(key, []).append(missing)
        for places, columns in groups.items():
            rows = np.concatenate([offsets[start:stop] for start, stop in places])
            fetched = self._fetch(rows, [missing[0].name for missing in columns])
            for missing in columns:
                values = ArrayValues(fetched[missing[0].name])
                start = 0
                for part in missing:
                    part.values = values
                    part.rows = np.arange(start, start + len(part.rows))
                    start += len(part.rows)


def _missing(parts: dict[str, list[_Part]]) -> list[_Part]:
    return [part for mine in parts.values() for part in mine if part.values is None]


def _cut(offsets: Ints, size: int) -> Iterator[tuple[int, int, int, Ints]]:
    """The blocks of ascending offsets: number, first and last place, and rows in the block."""
    blocks = offsets // size
    cuts = np.flatnonzero(np.diff(blocks)) + 1
    bounds = [0, *cuts.tolist(), len(offsets)]
    rows = offsets - blocks * size
    for start, stop in itertools.pairwise(bounds):
        yield int(blocks[start]), start, stop, rows[start:stop]


def _storage_type(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array
