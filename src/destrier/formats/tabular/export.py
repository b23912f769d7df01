"""Tables as Parquet files, one for each range of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from destrier.errors import ColumnError, WriteError
from destrier.files import Store
from destrier.formats.tabular.features import BYTES_ENCODING, PATH_ENCODING, is_media
from destrier.sink import Sink
from destrier.writing.source import ENCODING_KEY, SOURCE_KEY

__all__ = ["ParquetSink"]

_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 1 << 20


class ParquetSink(Sink):
    """Parquet: one file for each range of rows, the Arrow schema kept in it."""

    format: ClassVar[str] = "parquet"

    def check(self, schema: pa.Schema) -> None:
        """Raise unless Parquet can hold every column.

        Raises:
            ColumnError: Naming each column that it cannot hold.
        """
        bad = [reason for field in schema if (reason := _refused(field)) is not None]
        if bad:
            raise ColumnError(
                f"Parquet cannot hold {'; '.join(bad)}: leave them out with columns=[...]"
            )

    def write(self, store: Store, number: int, batches: Iterator[pa.RecordBatch]) -> Any:
        """Write ``part-00000.parquet`` and so on."""
        name = f"part-{number:05d}.parquet"
        rows = 0
        first = next(batches, None)
        if first is None:
            return {"name": name, "rows": 0}
        schema = _file_schema(first.schema)
        try:
            with (
                store.create(name) as file,
                pq.ParquetWriter(
                    file, schema, compression="zstd", write_page_checksum=True, version="2.6"
                ) as writer,
            ):
                for group in _groups(first, batches):
                    made = [_file_batch(batch, schema) for batch in group]
                    table = pa.Table.from_batches(made, schema)
                    writer.write_table(table, row_group_size=max(table.num_rows, 1))
                    rows += table.num_rows
        except (pa.ArrowException, OSError) as error:
            raise WriteError(f"{store.show(name)} cannot be written: {error}") from None
        return {"name": name, "rows": rows}

    def finish(self, store: Store, infos: list[Any]) -> None:
        """Nothing belongs to the whole: the names have the order."""


def _groups(
    first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]
) -> Iterator[list[pa.RecordBatch]]:
    """Batches that make a row group."""
    held, rows, nbytes = [first], first.num_rows, first.nbytes
    for batch in batches:
        if nbytes + batch.nbytes > _GROUP_BYTES or rows + batch.num_rows > _GROUP_ROWS:
            yield held
            held, rows, nbytes = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        nbytes += batch.nbytes
    yield held


def _file_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the file: as that of the table, media as Hugging Face has them."""
    metadata = dict(schema.metadata or {})
    pairs = _pairs(schema)
    fields = []
    for field in schema:
        if field.name in pairs:
            struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            fields.append(pa.field(field.name, struct))
        elif field.name not in pairs.values():
            fields.append(field)
    features = _features(metadata.get(SOURCE_KEY), pa.schema(fields))
    if features is not None:
        metadata[b"huggingface"] = features
    return pa.schema(fields, metadata=metadata or None)


def _pairs(schema: pa.Schema) -> dict[str, str]:
    """Columns of bytes and of paths that were one column of structs."""
    pairs = {}
    for field in schema:
        path = f"{field.name}_path"
        index = schema.get_field_index(path)
        if _encoding(field) != BYTES_ENCODING or index < 0:
            continue
        if _encoding(schema.field(index)) == PATH_ENCODING:
            pairs[field.name] = path
    return pairs


def _encoding(field: pa.Field) -> bytes | None:
    return (field.metadata or {}).get(ENCODING_KEY)


def _features(note: bytes | None, schema: pa.Schema) -> bytes | None:
    """The Hugging Face features that the table's source had, of the columns that are left."""
    try:
        found = json.loads(json.loads(note or b"{}")["huggingface"])
        features = found["info"]["features"]
        kept = {name: feature for name, feature in features.items() if name in schema.names}
        found["info"]["features"] = kept
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if set(kept) != set(schema.names):
        return None  # their library takes none or all
    for name, feature in kept.items():
        if is_media(feature) and not pa.types.is_struct(schema.field(name).type):
            return None
    return json.dumps(found).encode()


def _file_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    pairs = _pairs(batch.schema)
    columns = []
    for field in schema:
        column = batch[field.name]
        if field.name in pairs:
            path = batch[pairs[field.name]]
            neither = pa.compute.and_(column.is_null(), path.is_null())
            column = pa.StructArray.from_arrays(
                [column.cast(pa.binary()), path], ["bytes", "path"], mask=neither
            )
        columns.append(column)
    return pa.record_batch(columns, schema=schema)


def _refused(field: pa.Field) -> str | None:
    """Why Parquet cannot hold a column, found by writing none of its rows."""
    schema = pa.schema([field.remove_metadata()])
    try:
        file = pa.BufferOutputStream()
        pq.ParquetWriter(file, schema, version="2.6").close()
        back = pq.read_schema(pa.BufferReader(file.getvalue())).field(0).type
    except (pa.ArrowException, OSError) as error:
        return f"{field.name!r} ({field.type}: {error})"
    return None if back.equals(field.type) else f"{field.name!r} ({field.type}: it becomes {back})"
