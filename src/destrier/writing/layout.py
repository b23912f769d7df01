"""From the batches of a source to the rows of a table: blobs, links, counts, provenance."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.blob import BlobType

from destrier.errors import ArgumentError, ColumnError, SchemaError
from destrier.links.crcs import CRC, crcs_of_links
from destrier.writing.kept import unkept, unnamed
from destrier.writing.source import LINK

__all__ = [
    "COUNT_KEY",
    "LINK_KEY",
    "Layout",
    "Origin",
    "count_name",
    "is_blob",
    "link_name",
    "packed_schema",
    "unpacked_schema",
]

Origin: TypeAlias = "tuple[pa.Array, pa.Array]"
"""Of each row the file, and its number in it."""

COUNT_KEY = b"destrier:count-of"
"""Field metadata of a count column: the list column whose lengths it holds."""

LINK_KEY = b"destrier:link"
"""Field metadata of a linked column: the column that holds its files' sizes and times."""

_BLOB_KEY = b"lance-encoding:blob"
# Values of this mean size are stored as blobs. Measured: streams read plain binary columns 1.3 to 3
# times faster at 4 to 64 kB and as fast at 200 kB; blobs keep pages of a sensible size beyond that.
_BLOB_BYTES = 256 << 10
_COMPRESSION = ("none", "lz4", "zstd", "fsst")
_ORIGIN = (
    pa.field("source_file", pa.string(), metadata={b"destrier:origin": b"file"}),
    pa.field("source_row", pa.int64(), metadata={b"destrier:origin": b"row"}),
)
_LINK_STORED = [pa.field("file_size", pa.uint64()), pa.field("file_stamp", pa.int64())]


def count_name(column: str) -> str:
    """The name of the column that holds the lengths of a list column."""
    return f"{column}_count"


def link_name(column: str) -> str:
    """The name of the column that holds sizes and times of a linked column's files."""
    return f"{column}_link"


def is_blob(field: pa.Field) -> bool:
    """Whether Lance stores a column apart, as blobs."""
    metadata = field.metadata or {}
    if metadata.get(_BLOB_KEY, b"").lower() == b"true":
        return True
    name = getattr(field.type, "extension_name", "")
    return (name or metadata.get(b"ARROW:extension:name", b"").decode()).startswith("lance.blob")


@dataclass(frozen=True)
class Layout:
    """How the batches of a source are stored.

    Attributes:
        source: Schema of the source's batches.
        kept: Of those columns of it that are kept.
        stored: Schema of the table.
        blobs: The columns stored as blobs.
        links: The columns stored as ranges of files that stay where they are.
        counts: The list columns that get a count column.
        provenance: Whether file and row of the source are stored.
        crc: Whether CRCs of linked values are stored.
        row_bytes: Mean bytes of a row as measured.
    """

    source: pa.Schema
    kept: pa.Schema
    stored: pa.Schema
    blobs: tuple[str, ...]
    links: tuple[str, ...]
    counts: tuple[str, ...]
    provenance: bool
    crc: bool
    row_bytes: float

    @classmethod
    def choose(
        cls,
        schema: pa.Schema,
        sample: Sequence[pa.RecordBatch],
        *,
        columns: Sequence[str] | None,
        compression: Mapping[str, str] | None,
        provenance: bool,
        crc: bool = False,
    ) -> Layout:
        """Choose how to store columns from their types and from some rows.

        Args:
            schema: Of the source's batches.
            sample: Its first rows.
            columns: Those to keep, in their order; None keeps all.
            compression: By column, in Lance's names.
            provenance: Store file and row of the source.
            crc: Store CRCs of linked values.

        Raises:
            ColumnError: If a name is not there, is there twice, or is needed for a column of ours,
                or a table cannot hold a name or a type.
        """
        kept = _select(schema, columns)
        _check_types(kept)
        links = tuple(field.name for field in kept if field.type.equals(LINK))
        blobs = tuple(
            field.name
            for field in kept
            if field.type == pa.large_binary() and _mean_size(sample, field.name) >= _BLOB_BYTES
        )
        counts = tuple(
            field.name
            for field in kept
            if _counted(field) and count_name(field.name) not in kept.names
        )
        fields: list[pa.Field] = []
        for field in kept:
            fields.extend(_stored_fields(field, blobs, links, counts, crc=crc))
        if provenance:
            fields.extend(_ORIGIN)
        stored = pa.schema(fields, metadata=schema.metadata)
        _check_names(stored)
        rows = sum(batch.num_rows for batch in sample)
        size = sum(batch.nbytes for batch in sample)
        return cls(
            schema,
            kept,
            _compressed(stored, compression or {}),
            blobs,
            links,
            counts,
            provenance,
            crc,
            max(1.0, size / max(rows, 1)),
        )

    def fit(self, table: pa.Schema, name: str) -> Layout:
        """The same as rows of a table that is there.

        Args:
            table: The table's schema.
            name: The table's, for errors.

        Raises:
            SchemaError: If columns or types differ.
        """
        blobs = tuple(
            field.name
            for field in self.kept
            if field.type == pa.large_binary()
            and field.name in table.names
            and is_blob(table.field(field.name))
        )
        written = [field.name for field in table if COUNT_KEY in (field.metadata or {})]
        counts = tuple(c for c in self.counts if count_name(c) in written)
        fields: list[pa.Field] = []
        for field in self.kept:
            fields.extend(_stored_fields(field, blobs, self.links, counts, crc=self.crc))
        if self.provenance:
            fields.extend(_ORIGIN)
        ours = {field.name: field for field in fields}
        for field in table:
            mine = ours.pop(field.name, None)
            if mine is None:
                raise SchemaError(
                    f"{name} has a column {field.name!r} ({field.type}), which the input lacks",
                    column=field.name,
                )
            if mine.type != field.type:
                raise SchemaError(
                    f"column {field.name!r} is {field.type} in {name} but {mine.type} in the "
                    "input; nothing is coerced",
                    column=field.name,
                )
        if ours:
            raise SchemaError(
                f"the input has columns that {name} lacks: {', '.join(ours)}",
                column=next(iter(ours)),
            )
        return Layout(
            self.source,
            self.kept,
            table,
            blobs,
            self.links,
            counts,
            self.provenance,
            self.crc,
            self.row_bytes,
        )

    def store(
        self,
        batch: pa.RecordBatch,
        file: str,
        origin: Origin | None,
        options: Mapping[str, str] | None,
    ) -> pa.RecordBatch:
        """A batch of the source as it is stored.

        Args:
            batch: Its rows.
            file: Where they came from.
            origin: File and number in it of each row, if they are stored.
            options: Of the store of linked files, which are read for CRCs.

        Raises:
            SchemaError: If a column has another type than the source's first rows.
        """
        self.check(batch.schema, file)
        made: dict[str, pa.Array] = {}
        for name in self.kept.names:
            array = batch.column(name)
            if name in self.blobs:
                made[name] = _inline(array)
            elif name in self.links:
                made[name] = _external(array)
                made[link_name(name)] = self._beside(array, options)
            else:
                made[name] = _whole(array)
            if name in self.counts:
                made[count_name(name)] = pc.list_value_length(array).cast(pa.int64())
        if self.provenance:
            assert origin is not None
            made["source_file"], made["source_row"] = origin
        arrays = [made[name] for name in self.stored.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self.stored)

    def _beside(self, links: pa.StructArray, options: Mapping[str, str] | None) -> pa.Array:
        values = [links.field(field.name) for field in _LINK_STORED]
        fields = list(_LINK_STORED)
        if self.crc:
            values.append(crcs_of_links(links, options))
            fields.append(CRC)
        mask = links.is_null() if links.null_count else None
        return pa.StructArray.from_arrays(values, fields=fields, mask=mask)

    def check(self, schema: pa.Schema, file: str) -> None:
        """Raise unless a batch of the source has its schema.

        Raises:
            SchemaError: Naming the column and both types.
        """
        if schema.names != self.source.names:
            raise SchemaError(
                f"{file} has the columns {', '.join(schema.names)}, but the first rows have "
                f"{', '.join(self.source.names)}",
                file=file,
            )
        for field, mine in zip(schema, self.source, strict=True):
            if field.type != mine.type:
                raise SchemaError(
                    f"column {field.name!r} is {field.type} in {file}, but {mine.type} in the "
                    "first rows; nothing is coerced: declare schema= or mend the source",
                    file=file,
                    column=field.name,
                )

    def to_json(self) -> dict[str, Any]:
        """For a journal."""
        return {
            "source": packed_schema(self.source),
            "kept": packed_schema(self.kept),
            "stored": packed_schema(self.stored),
            "blobs": list(self.blobs),
            "links": list(self.links),
            "counts": list(self.counts),
            "provenance": self.provenance,
            "crc": self.crc,
            "row_bytes": self.row_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """From a journal."""
        return cls(
            unpacked_schema(value["source"]),
            unpacked_schema(value["kept"]),
            unpacked_schema(value["stored"]),
            tuple(value["blobs"]),
            tuple(value["links"]),
            tuple(value["counts"]),
            value["provenance"],
            value["crc"],
            value["row_bytes"],
        )


def packed_schema(schema: pa.Schema) -> str:
    """A schema as text, for a journal."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def unpacked_schema(text: str) -> pa.Schema:
    """The schema of such a text."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _select(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    _check_names(schema)
    if columns is None:
        return schema
    for name in columns:
        if name not in schema.names:
            raise ColumnError(
                f"no column {name!r} in the source; its columns are: {', '.join(schema.names)}"
            )
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def _check_names(schema: pa.Schema) -> None:
    seen: set[str] = set()
    for name in schema.names:
        if name in seen:
            raise ColumnError(
                f"there would be two columns {name!r}; columns named NAME_link, "
                "source_file and source_row are written beside others: rename, or leave one out"
            )
        bad = unnamed(name)
        if bad is not None:
            raise ColumnError(
                f"a column cannot be named {name!r} in a Lance table, for {bad}: rename it in the "
                "source, or leave it out with columns="
            )
        seen.add(name)


def _check_types(schema: pa.Schema) -> None:
    for field in schema:
        lost = unkept(field.type)
        if lost is not None:
            raise ColumnError(
                f"column {field.name!r} cannot be kept, for a table cannot hold {lost}; or leave "
                "it out with columns="
            )


def _counted(field: pa.Field) -> bool:
    kind = field.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


def _stored_fields(
    field: pa.Field,
    blobs: Iterable[str],
    links: Iterable[str],
    counts: Iterable[str],
    *,
    crc: bool,
) -> Iterable[pa.Field]:
    if field.name in blobs:
        yield _blob_field(field, {})
    elif field.name in links:
        companion = link_name(field.name)
        yield _blob_field(field, {LINK_KEY: companion.encode()})
        yield pa.field(companion, pa.struct([*_LINK_STORED, CRC] if crc else _LINK_STORED))
    else:
        yield field
    if field.name in counts:
        yield pa.field(
            count_name(field.name), pa.int64(), metadata={COUNT_KEY: field.name.encode()}
        )


def _blob_field(field: pa.Field, more: Mapping[bytes, bytes]) -> pa.Field:
    made = lance.blob_field(field.name, nullable=field.nullable)
    return made.with_metadata({**(made.metadata or {}), **(field.metadata or {}), **more})


def _mean_size(sample: Sequence[pa.RecordBatch], name: str) -> float:
    size = values = 0
    for batch in sample:
        array = batch.column(name)
        size += pc.sum(pc.binary_length(array)).as_py() or 0
        values += len(array) - array.null_count
    return size / max(values, 1)


def _compressed(schema: pa.Schema, compression: Mapping[str, str]) -> pa.Schema:
    for name, codec in compression.items():
        if name not in schema.names:
            raise ColumnError(
                f"compression names {name!r}, but the columns are: {', '.join(schema.names)}"
            )
        plain, _, level = codec.partition(":")
        if plain not in _COMPRESSION or (level and not level.isdecimal()):
            raise ArgumentError(
                f"compression of {name!r} is {codec!r}, which is not one of "
                f"{', '.join(_COMPRESSION)}, with a level as in 'zstd:9'"
            )
        place = schema.get_field_index(name)
        field = schema.field(place)
        metadata = {**(field.metadata or {}), b"lance-encoding:compression": plain.encode()}
        if level:
            metadata[b"lance-encoding:compression-level"] = level.encode()
        schema = schema.set(place, field.with_metadata(metadata))
    return schema


def _whole(array: pa.Array) -> pa.Array:
    """Lance cannot write a slice of structs in structs or lists: it is copied."""
    return pa.concat_arrays([array]) if _holds_structs(array.type) else array


def _holds_structs(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_structs(kind.storage_type)
    if pa.types.is_struct(kind):
        return True
    return any(_holds_structs(kind.field(i).type) for i in range(kind.num_fields))


def _inline(array: pa.Array) -> pa.Array:
    """Bytes as Lance takes blobs, without a Python object a row (`lance.blob_array` makes one)."""
    rows = len(array)
    numbers = pa.nulls(rows, pa.uint64())
    return _blobs([array, pa.nulls(rows, pa.string()), numbers, numbers], array)


def _external(array: pa.StructArray) -> pa.Array:
    # Lance takes no range without bytes: it would be the whole file.
    empty = pc.fill_null(pc.equal(array.field(2), 0), fill_value=False)
    data = pc.if_else(empty, pa.scalar(b"", pa.large_binary()), pa.scalar(None, pa.large_binary()))
    ranges = (pc.if_else(empty, None, array.field(number)) for number in range(3))
    return _blobs([data, *ranges], array)


def _blobs(fields: list[pa.Array], array: pa.Array) -> pa.Array:
    mask = array.is_null() if array.null_count else None
    storage = pa.StructArray.from_arrays(fields, ["data", "uri", "position", "size"], mask=mask)
    return pa.ExtensionArray.from_storage(BlobType(), storage)
