"""The columns that the members of tars make: found in the first tar, filled from all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa

from destrier.errors import ColumnError, SchemaError, SourceError
from destrier.files import File
from destrier.formats.media import link_array
from destrier.formats.webdataset.members import (
    Arrays,
    Cells,
    decode,
    default_kind,
    is_array,
    make_field,
)
from destrier.formats.webdataset.npy import header_of
from destrier.formats.webdataset.samples import Batch, fetch, split_name
from destrier.formats.webdataset.tar import Tar
from destrier.writing.source import ENCODING_KEY, LINK, SOURCE_KEY

__all__ = ["Filler", "Options", "Survey", "column_name"]


@dataclass(frozen=True)
class Options:
    """What `open_source` was told of the columns; see there."""

    columns: tuple[str, ...] | None
    link: bool
    extensions: dict[str, str | None]
    key_column: str | None

    def kind(self, extension: str) -> str:
        """What members of an extension are read as."""
        return self.extensions.get(extension) or default_kind(extension)


def column_name(extension: str) -> str:
    """The column that members of an extension make."""
    return extension.replace(".", "_")


class Survey:
    """Finds the columns of a source in the members of its first tar.

    Args:
        options: Of the source.
        shown: The name of the tar, for messages.
    """

    def __init__(self, options: Options, shown: str) -> None:
        self.options = options
        self.shown = shown
        self.found: dict[str, Arrays] = {}
        for extension in options.extensions:
            self._add_extension(extension, f"extensions= names {extension!r}, which")

    def read(self, tar: Tar) -> None:
        """Take in the members of a tar.

        Raises:
            SchemaError: If one is not an array that a column can hold, or two extensions would be
                one column.
            SourceError: If the tar is damaged.
        """
        arrays: dict[str, Arrays | None] = {}  # None where the bytes say nothing of the type
        with tar.open(headers_only=True) as reader:
            for name, position, size in tar.members(reader):
                _, extension = split_name(name, self.shown)
                if extension not in arrays:
                    if extension not in self.found:
                        self._add_extension(extension, f"{self.shown}: member {name!r}")
                    needed = self._kept(extension) and is_array(self.options.kind(extension))
                    arrays[extension] = self.found[extension] if needed else None
                known = arrays[extension]
                if known is not None:
                    try:
                        known.add(header_of(fetch(reader, name, position, size, None)))
                    except ValueError as error:
                        if isinstance(error, SourceError):
                            raise
                        raise _fault(self.shown, name, None, extension, str(error)) from None

    def _kept(self, extension: str) -> bool:
        columns = self.options.columns
        return columns is None or column_name(extension) in columns

    def _add_extension(self, extension: str, whence: str) -> None:
        name = column_name(extension)
        twin = next((e for e in self.found if column_name(e) == name), None)
        if self._kept(extension) and (twin is not None or name == self.options.key_column):
            other = "the keys" if twin is None else f"extension {twin!r}"
            way_out = "leave one of them out with skip="
            if twin is None:
                way_out = "name the column of keys otherwise with key_column="
            raise SchemaError(
                f"{whence} would be column {name!r}, which is that of {other}; {way_out}",
                file=self.shown,
                column=name,
            )
        self.found[extension] = Arrays()

    def schema(self, shown: str) -> pa.Schema:
        """The columns that were found, or those of them that were asked for.

        Args:
            shown: The name of the source, for messages.

        Raises:
            ColumnError: If a column that was asked for is not there.
            SchemaError: If the arrays of an extension have no type in common.
            SourceError: If there are no samples.
        """
        options = self.options
        if not self.found:
            raise SourceError(
                f"{self.shown} has no samples, so it does not show the columns; leave it out, or "
                "name them with extensions=",
                file=self.shown,
            )
        extensions = {column_name(extension): extension for extension in self.found}
        there = [*([] if options.key_column is None else [options.key_column]), *extensions]
        fields = []
        for name in there if options.columns is None else options.columns:
            if name == options.key_column:
                metadata = {ENCODING_KEY: b"webdataset:__key__"}
                fields.append(pa.field(name, pa.string(), metadata=metadata))
            elif name in extensions:
                fields.append(self._field(name, extensions[name]))
            else:
                raise ColumnError(
                    f"no column {name!r} in {shown}; the first tar has: {', '.join(there)}. If it "
                    "comes in a later one, name its extension with extensions="
                )
        return pa.schema(fields, metadata={SOURCE_KEY: json.dumps({"format": "webdataset"})})

    def _field(self, name: str, extension: str) -> pa.Field:
        kind = self.options.kind(extension)
        arrays = self.found[extension]
        try:
            return make_field(name, extension, kind, arrays, link=self.options.link)
        except ValueError as error:
            ways = [way for way in ("ragged", "bytes") if way != kind]
            shown = " or ".join(f"extensions={{{extension!r}: {way!r}}}" for way in ways)
            raise SchemaError(
                f"{self.shown}: column {name!r}: {error}; read it otherwise with {shown}",
                file=self.shown,
                column=name,
            ) from None


class Filler:
    """Brings the samples of a tar into batches of a schema.

    Args:
        options: Of the source.
        schema: Of the batches.
        file: The tar.
        shown: Its name, for messages.
        uri: Its URI, for links.
    """

    def __init__(
        self, options: Options, schema: pa.Schema, file: File, shown: str, uri: str
    ) -> None:
        self.options = options
        self.schema = schema
        self.file = file
        self.shown = shown
        self.uri = uri
        self._columns = {f.name: f.type for f in schema if f.name != options.key_column}
        self._extensions: dict[str, str] = {}  # by column
        for column in schema:
            encoding = (column.metadata or {}).get(ENCODING_KEY, b"").decode()
            if column.name in self._columns and encoding.startswith("webdataset:"):
                self._extensions[column.name] = encoding.removeprefix("webdataset:")

    def want(self, extension: str, member: str) -> tuple[bool, bool]:
        """Take in an extension of the tar.

        Raises:
            SchemaError: If there is no column for it.
        """
        name = column_name(extension)
        if name in self._columns:
            if self._extensions.setdefault(name, extension) == extension:
                linked = self._columns[name].equals(LINK)
                return not linked, linked
        elif self.options.columns is not None and name not in self.schema.names:
            return False, False
        raise SchemaError(
            f"{self.shown}: member {member!r} has an extension that the first tar has not, so "
            f"there is no column for it; name it with extensions=[{extension!r}], keep the others "
            f"only with columns=, or leave such members out with skip=['*.{extension}']",
            file=self.shown,
            column=name,
        )

    def fill(self, batch: Batch) -> pa.RecordBatch:
        """Bring a batch of samples into columns."""
        count = len(batch.keys)
        columns: list[pa.Array] = []
        for column in self.schema:
            extension = self._extensions.get(column.name, "")
            if column.name == self.options.key_column:
                columns.append(pa.array(batch.keys, pa.string()))
            elif extension in batch.cells:
                columns.append(self._column(batch, extension, column.type))
            else:
                columns.append(pa.nulls(count, column.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, batch: Batch, extension: str, kind: pa.DataType) -> pa.Array:
        count = len(batch.keys)
        cells = batch.cells[extension]
        if kind.equals(LINK):
            return self._links(cells, count)

        def fault(i: int, message: str) -> NoReturn:
            row = cells.rows[i]
            name = f"{batch.keys[row]}.{extension}"
            raise _fault(self.shown, name, batch.first + row, extension, message)

        return decode(cells, self.options.kind(extension), kind, count, fault)

    def _links(self, cells: Cells, count: int) -> pa.Array:
        positions, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)
        positions[cells.rows] = cells.positions
        sizes[cells.rows] = cells.sizes
        file = self.file
        return link_array(self.uri, positions, sizes, file.size, file.stamp, cells.valid(count))


def _fault(shown: str, name: str, row: int | None, extension: str, message: str) -> SchemaError:
    sample = "" if row is None else f" of sample {row}"
    return SchemaError(
        f"{shown}: member {name!r}{sample}: {message}; to keep such members as they are, pass "
        f"extensions={{{extension!r}: 'bytes'}}",
        file=shown,
        row=row,
        column=column_name(extension),
    )
