"""What all kinds of LitData datasets share: how their chunks become batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from destrier.errors import ColumnError
from destrier.files import Store
from destrier.formats.litdata.chunk import Body, Classic, open_body
from destrier.formats.litdata.encryption import Cipher
from destrier.formats.litdata.index import Chunk, Index
from destrier.formats.litdata.leaves import PREFIX, Options
from destrier.formats.litdata.places import Place
from destrier.formats.media import CONTENT_TYPE_KEY
from destrier.writing.source import ENCODING_KEY

__all__ = ["Dataset", "Reading", "chosen", "column_field"]


@dataclass(frozen=True)
class Dataset:
    """A dataset that was opened.

    Attributes:
        store: Where it lies.
        index: Its index.
        cipher: Of an encrypted one.
        columns: Those to read, None for all.
        link: Whether large values come as links.
        options: About columns.
    """

    store: Store
    index: Index
    cipher: Cipher | None = None
    columns: tuple[str, ...] | None = None
    link: bool = False
    options: Options = field(default_factory=Options)

    def place(self, chunk: Chunk) -> Place:
        """The chunk's file, for messages."""
        return Place(self.store.show(chunk.file.path))

    def body(self, chunk: Chunk) -> Body:
        """Open a chunk."""
        return open_body(self.store, chunk, self.index.config, self.cipher)

    def classic(self, chunk: Chunk) -> Classic:
        """Open a chunk of arrays, which lie one after another.

        Raises:
            SourceError: If it is of another kind.
        """
        body = self.body(chunk)
        if not isinstance(body, Classic):
            raise self.place(chunk).damaged("is not the chunk of arrays that the index says")
        return body


class Reading(ABC):
    """How the chunks of a dataset become batches. Picklable."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of all batches; reads chunks where it depends on them."""

    @abstractmethod
    def batches(self, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read a chunk.

        Raises:
            SourceError: If it is damaged.
            SchemaError: If a row is of another type.
        """

    def check_empty(self) -> None:
        """Look into the chunks that give no rows: those of a wrong number would be lost unseen.

        Raises:
            SourceError: If one holds some.
        """
        for chunk in self.dataset.index.empty:
            self.check_rows(chunk)

    def check_rows(self, chunk: Chunk) -> None:
        """Raise if a chunk does not hold as many samples as the index says."""
        if chunk.file.size:
            self.dataset.body(chunk)

    def rows(self, chunk: Chunk) -> int:
        """Number of rows that a chunk gives."""
        return chunk.rows


def chosen(there: Sequence[str], columns: Sequence[str] | None, shown: str) -> list[str]:
    """The columns to read.

    Raises:
        ColumnError: If one is not there.
    """
    if columns is None:
        return list(there)
    for name in columns:
        if name not in there:
            raise ColumnError(f"{shown} has no column {name!r}; it has: {', '.join(there)}")
    return list(columns)


def column_field(
    name: str, kind: pa.DataType, encoding: str | None, content_type: str | None = None
) -> pa.Field:
    """A field with what an export and a decoder need to know."""
    metadata = {}
    if encoding is not None:
        metadata[ENCODING_KEY] = f"{PREFIX}{encoding}".encode()
    if content_type is not None:
        metadata[CONTENT_TYPE_KEY] = content_type.encode()
    return pa.field(name, kind, metadata=metadata or None)
