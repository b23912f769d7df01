"""Rows whose lengths are counted beside their lists: a wrong count would exceed the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import ReadError

if TYPE_CHECKING:
    from destrier.keyed import Ints
    from destrier.read import Reader, Rows

__all__ = ["CountedReader"]


class CountedReader:
    """Reads rows whose lists have as many elements as is counted beside them.

    Args:
        reader: Reads the columns, the lists and the counts.
        columns: Names of the columns to deliver.
        lists: The column of lists.
        numbers: The column of their lengths.
    """

    def __init__(self, reader: Reader, columns: list[str], *, lists: str, numbers: str) -> None:
        self._reader = reader
        self._lists = lists
        self._numbers = numbers
        self.columns = columns
        self.schema = pa.schema([reader.schema.field(name) for name in columns])
        self.counts = reader.counts

    def row_bytes(self) -> float:
        """Bytes of a row in memory, about."""
        return self._reader.row_bytes()

    def read(self, offsets: Ints) -> Rows:
        """Read rows, each once.

        Raises:
            ReadError: If one cannot be read, or a list has another length than is counted.
        """
        rows = self._reader.read(offsets)
        lengths, numbers = (
            pc.fill_null(values, 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
            for values in (
                pc.list_value_length(rows.batch.column(self._lists)),
                rows.batch.column(self._numbers),
            )
        )
        for place in np.flatnonzero(lengths != numbers)[:1].tolist():
            asked = place if rows.index is None else np.flatnonzero(rows.index == place)[0]
            offset, table = int(offsets[asked]), self._reader.table.name
            raise ReadError(
                f"column {self._lists!r} of row {offset} of {table} has {lengths[place]} elements, "
                f"but {self._numbers!r} says {numbers[place]}; write the counts anew",
                offset=offset,
                column=self._lists,
            )
        rows.batch = rows.batch.select(self.columns)
        return rows
