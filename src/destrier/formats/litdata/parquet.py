"""Parquet files that LitData's ParquetLoader reads: the index lists them in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from destrier.errors import ArgumentError, DestrierError, SchemaError
from destrier.formats.batches import checked, split
from destrier.formats.litdata.index import Chunk
from destrier.formats.litdata.places import Place
from destrier.formats.litdata.reading import Dataset, Reading, chosen
from destrier.formats.tabular.kinds import convert, kept_field
from destrier.writing.source import BATCH_BYTES

__all__ = ["ParquetFiles"]

_MOST_ROWS = 65_536
_FAILURES = (pa.ArrowException, OSError, MemoryError, ValueError)


class ParquetFiles(Reading):
    """Chunks of ParquetLoader, which are Parquet files."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        if dataset.link:
            raise ArgumentError(
                f"{dataset.store.shown} cannot be linked, for it holds Parquet files: use "
                "destrier.convert"
            )

    def schema(self) -> pa.Schema:
        """That of the first file."""
        first = self.dataset.index.chunks[0]
        place = self.dataset.place(first)
        found = self._open(first, place).schema_arrow
        names = chosen(found.names, self.dataset.columns, self.dataset.store.shown)
        return pa.schema([_kept(found.field(name), place.file) for name in names])

    def batches(self, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read a file."""
        place = self.dataset.place(chunk)
        file = self._open(chunk, place)
        self._check(file, schema, place)
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        rows = max(1, min(_MOST_ROWS, BATCH_BYTES * chunk.rows // max(size, 1)))
        seen = 0
        try:
            for batch in file.iter_batches(batch_size=rows, columns=schema.names):
                sound = checked(batch, place.file, seen)
                arrays = [convert(sound.column(field.name), field.type) for field in schema]
                seen += batch.num_rows
                yield from split(pa.RecordBatch.from_arrays(arrays, schema=schema))
        except _FAILURES as error:
            if isinstance(error, DestrierError):
                raise
            raise place.damaged(f"cannot be read: {error}", seen) from None

    def check_rows(self, chunk: Chunk) -> None:
        """Raise if a file does not hold as many rows as the index says."""
        self._open(chunk, self.dataset.place(chunk))

    def _open(self, chunk: Chunk, place: Place) -> Any:
        try:
            file = pq.ParquetFile(self.dataset.store.open(chunk.file.path))
        except _FAILURES as error:
            raise place.damaged(f"is no Parquet file: {error}") from None
        if file.metadata.num_rows != chunk.rows:
            raise place.damaged(
                f"holds {file.metadata.num_rows:,} rows, but the index lists {chunk.rows:,}"
            )
        return file

    def _check(self, file: Any, schema: pa.Schema, place: Place) -> None:
        found = file.schema_arrow
        if self.dataset.columns is None and set(found.names) != set(schema.names):
            raise SchemaError(
                f"{place.file} has the columns {', '.join(found.names)}; the first file has "
                f"{', '.join(schema.names)}",
                file=place.file,
            )
        for field in schema:
            if field.name not in found.names:
                raise SchemaError(
                    f"{place.file} lacks the column {field.name!r}",
                    file=place.file,
                    column=field.name,
                )
            kind = _kept(found.field(field.name), place.file).type
            if kind != field.type:
                raise SchemaError(
                    f"column {field.name!r} is {kind} in {place.file}, but {field.type} in the "
                    "first file",
                    file=place.file,
                    column=field.name,
                )


def _kept(field: pa.Field, file: str) -> pa.Field:
    kept = kept_field(field, file)
    return kept.with_type(pa.large_binary()) if pa.types.is_binary(kept.type) else kept
