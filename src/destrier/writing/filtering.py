"""Lance's SQL filters on rows that are not in a table yet."""

from __future__ import annotations

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.errors import FilterError, ReadError
from destrier.lancecalls import lance_call

__all__ = ["RowFilter"]


class RowFilter:
    """Finds the rows of batches for which a filter is true. Picklable.

    Args:
        sql: As Lance takes filters; binary columns cannot be named in it.
    """

    def __init__(self, sql: str) -> None:
        self.sql = sql

    def rows(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The places in the batch of the rows for which the filter is true.

        Raises:
            FilterError: If Lance cannot run it, naming the columns.
        """
        names = [field.name for field in batch.schema if not _is_bytes(field.type)]
        small = batch.select(names)
        if not names:  # which Lance takes for no rows
            small = pa.record_batch({"_": pa.nulls(batch.num_rows, pa.bool_())})

        def run() -> pa.ChunkedArray:
            # a table in memory: the filter means just what it means on the table written
            dataset = lance.write_dataset(pa.Table.from_batches([small]), "memory://filter")
            scanner = dataset.scanner(columns=["_rowoffset"], filter=self.sql)
            return scanner.to_table().column("_rowoffset")

        try:
            kept = lance_call("Lance", run)
        except ReadError as error:
            raise FilterError(
                f"filter {self.sql!r} cannot be run: {error}; the columns that it can name are: "
                f"{', '.join(names)}"
            ) from None
        return kept.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
