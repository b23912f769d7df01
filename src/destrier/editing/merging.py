"""Several tables into one, batch by batch."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.blob import BlobType
from lance.fragment import write_fragments

from destrier.editing.changes import write_through
from destrier.editing.conform import blob_array
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    ReadError,
    SchemaError,
)
from destrier.files import Store
from destrier.lancecalls import lance_call
from destrier.table import Table, open_table
from destrier.writing.destination import check_destination, table_there
from destrier.writing.journal import Journal
from destrier.writing.layout import is_blob
from destrier.writing.publish import discard, publish, published_version
from destrier.writing.source import BATCH_BYTES

if TYPE_CHECKING:
    from destrier.table import TableLike

__all__ = ["merge"]

_FORMAT = "2.2"
_FRAGMENT_BYTES = 256 << 20
_BATCH_ROWS = 8192
_EXTERNAL = 3  # kind of a blob that is a range of another file
_STORAGE_KEYS = (b"lance-encoding:", b"ARROW:extension:")  # how values lie, not what they are


def merge(
    tables: Sequence[TableLike],
    uri: str | os.PathLike[str],
    *,
    mode: str = "create",
    storage_options: Mapping[str, str] | None = None,
) -> int:
    """Write the rows of several tables as one, table after table, in one commit.

    Blob columns stay blob columns, and values that are linked to other files stay links. Tables
    are read at the versions they are opened at, and batch by batch.

    Args:
        tables: Two or more (or one) with the same columns, in any order, of the same types and
            metadata.
        uri: Where the new table is to lie.
        mode: ``"create"``, ``"append"`` to a table of the same columns, or ``"overwrite"``.
        storage_options: Of the new table, and of those given by URI in a bucket.

    Returns:
        The new table's version.

    Raises:
        SchemaError: If columns differ in name, type or metadata.
        WriteError: If something is there already, or it cannot be written. Nothing is left then.

    Example:
        >>> merge(["monday.lance", "tuesday.lance"], "week.lance")  # doctest: +SKIP
        1
    """
    if isinstance(tables, str | os.PathLike) or not isinstance(tables, Sequence) or not tables:
        raise ArgumentError(f"tables is a list of one table or more, got {tables!r}")
    opened = [_open(table, storage_options) for table in tables]
    target = Store(uri, storage_options)
    check_destination(target, mode)
    job = {"job": "merge", "mode": mode, "tables": [table.identity for table in opened]}
    with Journal(target.uri, target.options, kind="merging").held() as journal:
        version = published_version(journal, target.uri, target.options)
        done = version is not None and journal.matches(job)
        discard(journal, target.uri, target.options)  # a merge that was killed begins anew
        if version is not None and done:
            return version
        there = table_there(target, mode, unfinished=False)
        journal.start(job, keep=False)
        try:
            version = _write(opened, target, there if mode == "append" else None, journal, there)
        except BaseException:
            discard(journal, target.uri, target.options)
            raise
        journal.clear()
        return version


def _write(
    tables: list[Table], target: Store, appended: Table | None, journal: Journal, base: Table | None
) -> int:
    if appended is None:
        schema = _one_schema(tables)
        schema = pa.schema(map(_written, schema), metadata=schema.metadata)
        version = _FORMAT
    else:
        _one_schema([appended, *tables])
        schema = appended.schema
        version = appended.dataset.data_storage_version
    row_bytes = max(table.row_bytes for table in tables)
    fragments = write_through(
        _all_rows(tables, schema),
        schema,
        lambda reader: write_fragments(
            reader,
            journal.store.uri,
            schema=schema,
            mode="create",
            max_rows_per_file=min(max(int(_FRAGMENT_BYTES / row_bytes), 1), 1 << 20),
            data_storage_version=version,
            storage_options=target.options or None,
            allow_external_blob_outside_bases=True,
        ),
        f"writing {target.shown}",
        target.options.values(),
    )
    return publish(
        journal,
        target.uri,
        schema,
        [json.dumps(each.to_json()) for each in fragments if each.physical_rows],
        overwrite=appended is None,
        base=base,
        storage_options=target.options,
    )


def _open(table: TableLike, storage_options: Mapping[str, str] | None) -> Table:
    if isinstance(table, str) and "://" in table:
        return open_table(table, storage_options=storage_options)
    return open_table(table)


def _one_schema(tables: list[Table]) -> pa.Schema:
    """The schema of the first table, after a check that the others have the same."""
    first = tables[0]
    for other in tables[1:]:
        _compare(first, other)
    fields = []
    for field in first.schema:
        nullable = any(table.schema.field(field.name).nullable for table in tables)
        fields.append(field.with_nullable(nullable))
    return pa.schema(fields, metadata=_shared_metadata(tables))


def _compare(first: Table, other: Table) -> None:
    ours, theirs = set(first.schema.names), set(other.schema.names)
    if ours != theirs:
        raise SchemaError(
            f"{first.name} and {other.name} have not the same columns: only one of them has "
            f"{', '.join(sorted(ours ^ theirs))}"
        )
    for field in first.schema:
        twin = other.schema.field(field.name)
        kinds = ["blob" if is_blob(f) else f.type for f in (field, twin)]
        if kinds[0] != kinds[1]:
            raise SchemaError(
                f"column {field.name!r} is {kinds[0]} in {first.name} but {kinds[1]} in "
                f"{other.name}; nothing is coerced",
                column=field.name,
            )
        meant = _meaning(field), _meaning(twin)
        if meant[0] != meant[1]:
            raise SchemaError(
                f"the metadata of column {field.name!r} is {meant[0]} in {first.name} but "
                f"{meant[1]} in {other.name}: the rows would be read differently; set it alike "
                "with lance.dataset(uri).replace_field_metadata(...)",
                column=field.name,
            )


def _meaning(field: pa.Field) -> dict[str, str]:
    """What of a field's metadata says what the values are."""
    return {
        key.decode(): value.decode(errors="replace")
        for key, value in sorted((field.metadata or {}).items())
        if not key.startswith(_STORAGE_KEYS)
    }


def _written(field: pa.Field) -> pa.Field:
    """The field to write; blob columns of older formats become blobs of today's."""
    if not is_blob(field) or isinstance(field.type, BlobType):
        return field
    made = lance.blob_field(field.name, nullable=field.nullable)
    kept = {k: v for k, v in (field.metadata or {}).items() if not k.startswith(_STORAGE_KEYS)}
    return made.with_metadata({**(made.metadata or {}), **kept})


def _shared_metadata(tables: list[Table]) -> dict[bytes, bytes] | None:
    each = [table.schema.metadata or {} for table in tables]
    shared = {k: v for k, v in each[0].items() if all(other.get(k) == v for other in each)}
    lost = sorted(
        {key.decode() for metadata in each for key in metadata} - {key.decode() for key in shared}
    )
    if lost:
        warnings.warn(
            f"the tables differ in the schema's metadata {', '.join(lost)}, which the merged "
            "table will not have",
            DestrierWarning,
            stacklevel=4,
        )
    return shared or None


def _all_rows(tables: list[Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for table in tables:
        count = 0
        for batch in _rows(table, schema):
            count += batch.num_rows
            yield batch
        if count != table.num_rows:
            raise ReadError(f"{table.name} has {table.num_rows} rows, but {count} were read")


def _rows(table: Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    blobs = [field.name for field in table.schema if is_blob(field)]
    size = max(1, min(_BATCH_ROWS, int(BATCH_BYTES / table.row_bytes)))
    scanner = table.dataset.scanner(
        columns=schema.names, batch_size=size, batch_readahead=2, io_buffer_size=4 * BATCH_BYTES
    )
    batches = lance_call(f"reading {table.name}", lambda: iter(scanner.to_batches()), table.secrets)
    offset = 0
    while True:
        batch = lance_call(f"reading {table.name}", lambda: next(batches, None), table.secrets)
        if batch is None:
            return
        for start, stop in _runs(batch, blobs):
            part = batch.slice(start, stop - start)
            arrays = [
                _blobs(table, part.column(name), schema.field(name), offset + start)
                if name in blobs
                else part.column(name)
                for name in schema.names
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        offset += batch.num_rows


def _runs(batch: pa.RecordBatch, blobs: list[str]) -> Iterator[tuple[int, int]]:
    """Cut a batch so that the bytes of its blobs fit into memory."""
    if not blobs:
        yield 0, batch.num_rows
        return
    sizes = np.zeros(batch.num_rows, np.int64)
    for name in blobs:
        stored = pc.if_else(_external(batch.column(name)), 0, _field(batch.column(name), "size"))
        sizes += pc.fill_null(stored, 0).cast(pa.int64()).to_numpy()
    start, held = 0, 0
    for row, size in enumerate(sizes.tolist()):
        if row > start and held + size > BATCH_BYTES:
            yield start, row
            start, held = row, 0
        held += size
    yield start, batch.num_rows


def _field(described: pa.StructArray, name: str) -> pa.Array:
    """A part of blob descriptors, null where the blob is."""
    return pc.struct_field(described, name)


def _external(described: pa.StructArray) -> pa.Array:
    if described.type.get_field_index("kind") < 0:  # the older format has no links
        return pa.array(np.zeros(len(described), np.bool_))
    return pc.fill_null(pc.equal(_field(described, "kind"), _EXTERNAL), fill_value=False)


def _blobs(table: Table, described: pa.StructArray, field: pa.Field, offset: int) -> pa.Array:
    name = field.name
    external = _external(described)
    linked = external.to_numpy(zero_copy_only=False)
    stored = np.flatnonzero(~linked)
    values = np.full(len(described), None, np.object_)
    if len(stored):
        pairs = lance_call(
            f"reading column {name!r} of {table.name}",
            lambda: table.dataset.read_blobs(
                name, indices=(stored + offset).tolist(), preserve_order=True
            ),
            table.secrets,
        )
        values[stored] = [value for _, value in pairs]
    data = pa.array(values, pa.large_binary())
    if not isinstance(field.type, BlobType):  # the older format
        if linked.any():
            raise ColumnError(
                f"column {name!r} of {table.name} has links, which a table of Lance's format "
                "before 2.2 cannot hold"
            )
        return data
    if not linked.any():
        return blob_array(data)
    return blob_array(data, *_links(table, described, external, name))


def _links(
    table: Table, described: pa.StructArray, external: pa.Array, name: str
) -> tuple[pa.Array, pa.Array, pa.Array]:
    uris = pc.if_else(external, _field(described, "blob_uri"), None)
    relative = [uri for uri in pc.unique(uris).to_pylist() if uri and "://" not in uri]
    if relative:
        raise ColumnError(
            f"column {name!r} of {table.name} is linked to {relative[0]!r}, below a base path that "
            "only this table knows: convert the table, so that the bytes are in it"
        )
    size = pc.if_else(external, _field(described, "size"), None)
    whole = pc.equal(size, 0)  # a link to a whole file
    nothing: Any = pa.scalar(None, pa.uint64())
    position = pc.if_else(external, _field(described, "position"), None)
    return (
        uris,
        pc.if_else(whole, nothing, position),
        pc.if_else(whole, nothing, size),
    )
