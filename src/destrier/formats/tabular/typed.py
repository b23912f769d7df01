"""What Parquet and Arrow files have in common: files with a schema each, made one."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, ClassVar

import pyarrow as pa

from destrier.errors import SourceError
from destrier.files import File
from destrier.formats.batches import checked, split
from destrier.formats.tabular.discover import Found
from destrier.formats.tabular.drift import joined
from destrier.formats.tabular.features import Media, media_columns, split_media
from destrier.formats.tabular.kinds import convert
from destrier.writing.source import SOURCE_KEY, FileSource, Unit

__all__ = ["FileInfo", "TypedSource"]

_READERS = 16  # files that are looked at together, where each look is a request
FileInfo = tuple[pa.Schema, list[Unit]]
"""What a look at a file gives: its schema, and its units."""


class TypedSource(FileSource):
    """Files that say their types themselves.

    A subclass gives `look` and `batches`.

    Args:
        found: The files.
        columns: Those to read; None is all.
        missing: ``"null"``: a column that a file lacks is null there.
    """

    format: ClassVar[str]

    def __init__(
        self, found: Found, *, columns: Sequence[str] | None = None, missing: str = "error"
    ) -> None:
        self.store = found.store
        self.files = found.files
        self.columns = None if columns is None else list(columns)
        infos = self._look_all()
        for file, (schema, _) in zip(self.files, infos, strict=True):
            _check_text(schema, self.store.show(file.path))
        schemas = []
        media: dict[str, Media] = {}
        for file, (schema, _) in zip(self.files, infos, strict=True):
            shown = self.store.show(file.path)
            found_media = media_columns(schema)
            schemas.append((shown, split_media(schema, found_media)))
            media |= found_media
        self._media = media
        self._schema = _with_source(joined(schemas, self.columns, missing), self.format)
        self._units = [unit for _, units in infos for unit in units]

    def _look_all(self) -> list[FileInfo]:
        if self.store.local or len(self.files) == 1:
            return [self.look(file) for file in self.files]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self.look, self.files))

    @property
    def schema(self) -> pa.Schema:
        """The schema of all files."""
        return self._schema

    @property
    def shown(self) -> str:
        """The address without credentials."""
        return self.store.shown

    def units(self) -> list[Unit]:
        """The units of all files, in order."""
        return list(self._units)

    def identity(self) -> Iterable[Any]:
        """The files, and the columns with their types."""
        columns = [(field.name, str(field.type), field.nullable) for field in self._schema]
        return [[asdict(file) for file in self.files], columns]

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Read a unit; the schema is always the source's own."""
        shown = unit.name
        try:
            for row, batch in self.batches(unit):
                if batch.num_rows:
                    yield from split(self._kept(batch, unit.place.path, row))
        except SourceError:
            raise
        except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError) as error:
            raise SourceError(f"{shown}: {error}", file=self.store.show(unit.place.path)) from None

    def _kept(self, batch: pa.RecordBatch, path: str, row: int | None) -> pa.RecordBatch:
        """A file's batch in the source's types."""
        shown = self.store.show(path)
        batch = checked(batch, shown, row)
        columns: dict[str, pa.Array] = {}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if field.name in self._media:
                columns |= self._media[field.name].split(column, shown, row)
            else:
                columns[field.name] = column
        count = batch.num_rows
        made = []
        for field in self._schema:
            column = columns.get(field.name)
            made.append(
                pa.nulls(count, field.type) if column is None else convert(column, field.type)
            )
        return pa.record_batch(made, schema=self._schema)

    def names_in(self, schema: pa.Schema) -> list[str]:
        """Which of a file's columns are read."""
        wanted = set(self._schema.names)
        return [
            name
            for name in schema.names
            if name in wanted or (name in self._media and wanted & set(self._media[name].names))
        ]

    @abstractmethod
    def look(self, file: File) -> FileInfo:
        """The schema and the units of a file.

        Raises:
            SourceError: If it is damaged.
        """

    @abstractmethod
    def batches(self, unit: Unit) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """The batches of a unit with the columns `names_in` gives, each with its first row."""


def _check_text(schema: pa.Schema, shown: str) -> None:
    try:
        for field in schema:
            _names(field)
    except UnicodeDecodeError as error:
        raise SourceError(f"{shown}: a column's name is not UTF-8: {error}", file=shown) from None


def _names(field: pa.Field) -> list[str]:
    """The names of a field and those in it, which pyarrow decodes only when they are asked for."""
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_union(kind) or pa.types.is_nested(kind):
        inside = [_names(kind.field(i)) for i in range(kind.num_fields)]
        return [field.name, *(name for names in inside for name in names)]
    return [field.name]


def _with_source(schema: pa.Schema, format: str) -> pa.Schema:
    metadata = dict(schema.metadata or {})
    note: dict[str, Any] = {"format": format}
    features = metadata.pop(b"huggingface", None)
    if features is not None:
        note["huggingface"] = features.decode(errors="replace")
    metadata.setdefault(SOURCE_KEY, json.dumps(note).encode())  # of a format before, if exported
    return schema.with_metadata(metadata)
