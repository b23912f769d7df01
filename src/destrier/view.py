"""A view: some rows of a pinned table, which goes wherever a table goes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from torch.utils.data import Dataset

from destrier.editing.lookup import find, is_key, read_rows
from destrier.errors import ArgumentError, MissingKeyError, MissingRowError
from destrier.links.columns import delivered_columns
from destrier.permutation import Part, Permutation, describe
from destrier.read import Reader
from destrier.rowlists import contains, sliced
from destrier.selection import RangeRows, RowList
from destrier.table import open_table

if TYPE_CHECKING:
    from destrier.refreshing import StorageOptions
    from destrier.table import Table, TableLike

__all__ = ["View", "as_view", "view_of"]

_ITERATED_ROWS = 256


class View(Dataset[dict[str, Any]]):
    """Some rows of a table at one version, in an order of their own, perhaps with repeats.

    Made by `split`, `subset`, `subsample`, `concat` and `sample`, which take tables and views, so
    that they can be combined; made of a table it has all rows. A view goes where a table goes:
    ``StreamingDataset(view)``, ``StreamingDataLoader(view, batch_size=64)``. It is also a dataset
    of torch's map style, for its samplers: ``view[3]`` is a row as a dict, a list of rows is read
    in one request, and it can be sent to workers, which open the table themselves.

    Blob and linked columns come as bytes, tensors as numpy arrays, all others as Python values.

    Args:
        source: A URI or path of a Lance dataset, a `lance.LanceDataset`, a LanceDB table, or a
            view, whose rows are taken over.
        columns: Names of the columns to read; None reads all, or those of the view.
        version: Version number or tag of a table. None is the latest, or the one that is open.
        storage_options: As `open_table` takes them, to open a table.

    Attributes:
        table: The pinned table.
        rows: The row offsets, with random access.
        columns: Those to read, or None.

    Raises:
        ArgumentError: If an argument cannot be used.
        TableError: If the table cannot be opened.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(10)}), uri)
        >>> view = View(uri)
        >>> view[-1], view[2:5][0], len(view[2:5])
        ({'id': 9}, {'id': 2}, 3)
    """

    def __init__(
        self,
        source: TableLike | View,
        *,
        columns: Sequence[str] | None = None,
        version: int | str | None = None,
        storage_options: StorageOptions | None = None,
    ) -> None:
        self.table: Table
        self.rows: RowList
        if isinstance(source, View):
            if version is not None or storage_options is not None:
                what = f"version={version!r}" if version is not None else "storage_options"
                raise ArgumentError(
                    f"{what} cannot be given with a view, whose table is open at version "
                    f"{source.table.version}: make the view of the table that you want"
                )
            self.table, self.rows = source.table, source.rows
            columns = source.columns if columns is None else columns
        else:
            self.table = open_table(source, version=version, storage_options=storage_options)
            self.rows = RangeRows(self.table.num_rows)
        self.columns: list[str] | None = None if columns is None else _checked(columns)
        if self.columns is not None:
            self.table.check_columns(self.columns)
        self._reader: Reader | None = None

    def __repr__(self) -> str:
        return f"View({len(self)} rows of {self.table!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    # ---- rows -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> View: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | View:
        """Return the row at a place, as a dict, or a view of the rows at several.

        Raises:
            MissingRowError: If there is no such row; it is an IndexError too.
        """
        if isinstance(index, slice):
            places = range(len(self))[index]
            return view_of(self, sliced(self.rows, places, self.table.num_rows))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Read the rows at several places in one request, in their order; torch's loader calls it.

        Raises:
            MissingRowError: If there is no such row; it is an IndexError too.
        """
        places = np.array([self._place(index) for index in indices], np.int64)
        return self._read(self.rows.offsets(places)) if len(places) else []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), _ITERATED_ROWS):
            yield from self.__getitems__(range(start, min(start + _ITERATED_ROWS, len(self))))

    def get(self, key: Any, *, on: str | None = None) -> dict[str, Any] | list[dict[str, Any]]:
        """Read the row of a key, or the rows of several in their order, as `destrier.get` does.

        Args:
            key: An int, str or bytes, as the key column's type is; or a list or array of them.
            on: The key column; None is the one that has an index, else ``key`` or ``id``.

        Raises:
            MissingKeyError: If no row of the view has the key; it is a KeyError too.
            ArgumentError: If the key is not of the column's type, or several rows of the table
                have it.
            ColumnError: If the column cannot be a key.
        """
        keys, found = find(self.table, key, on)
        offsets = np.array(found, np.int64)
        outside = np.flatnonzero(~contains(self.rows, offsets))
        if len(outside):
            place = int(outside[0])
            raise MissingKeyError(
                f"the row with the key {keys[place]!r} is in {self.table.name}, at offset "
                f"{offsets[place]}, but not among the {len(self)} rows of the view"
            )
        rows = self._read(offsets) if keys else []
        return rows[0] if is_key(key) else rows

    def permutation(self) -> Permutation:
        """The list of rows as a `Permutation`, which can be saved and shown as a table."""
        return Permutation([Part(None, self.rows)], describe(self.table))

    def _place(self, index: Any) -> int:
        try:
            if isinstance(index, bool):
                raise TypeError
            place = operator.index(index)
        except TypeError:
            raise ArgumentError(
                f"a row of a view is chosen by an integer or a slice, got {index!r}"
            ) from None
        count = len(self)
        if not -count <= place < count:
            raise MissingRowError(f"no row {place} in a view of {count} rows")
        return place % count

    def _read(self, offsets: Any) -> list[dict[str, Any]]:
        if self._reader is None:
            columns = self.columns
            if columns is None:
                columns = delivered_columns(self.table.schema)
            self._reader = Reader(self.table, columns)
        return read_rows(self._reader, offsets)


def as_view(source: TableLike | View) -> View:
    """Return a view as it is, and any table as a view of all its rows."""
    return source if isinstance(source, View) else View(source)


def view_of(view: View, rows: RowList) -> View:
    """Return a view of other rows of the same table."""
    other = View(view)
    other.rows = rows
    return other


def _checked(columns: Sequence[str]) -> list[str]:
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise ArgumentError(f"columns must be a list of at least one name, got {columns!r}")
    return list(columns)
