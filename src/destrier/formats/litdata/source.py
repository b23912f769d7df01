"""A LitData dataset as a source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.files import Store
from destrier.formats.litdata.encryption import open_cipher
from destrier.formats.litdata.index import Chunk, Index, read_index
from destrier.formats.litdata.keys import has_keys, read_keys
from destrier.formats.litdata.leaves import Options
from destrier.formats.litdata.parquet import ParquetFiles
from destrier.formats.litdata.reading import Dataset, Reading
from destrier.formats.litdata.samples import Samples
from destrier.formats.litdata.temporal import Temporal
from destrier.formats.litdata.tokens import Tokens
from destrier.formats.tabular.kinds import check_names
from destrier.writing.source import FileSource, Unit

__all__ = ["LitDataSource", "open_source"]


@dataclass(frozen=True)
class _Part:
    """The place of a unit: a chunk, and the keys of its rows."""

    chunk: Chunk
    keys: pa.Array | None


class LitDataSource(FileSource):
    """The chunks of a dataset, one unit each.

    Args:
        reading: How the chunks become batches.
        key_column: The column for the keys, None to leave them out.
        identity: The options, as JSON values.
    """

    format: ClassVar[str] = "litdata"

    def __init__(self, reading: Reading, key_column: str | None, identity: Sequence[Any]) -> None:
        self._reading = reading
        self._key_column = key_column
        self._identity = list(identity)

    @property
    def _index(self) -> Index:
        return self._reading.dataset.index

    @property
    def shown(self) -> str:
        """Its address without credentials, for messages."""
        return self._reading.dataset.store.shown

    @cached_property
    def _own(self) -> pa.Schema:
        schema = self._reading.schema()
        check_names(schema.names, self.shown)
        return schema

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the samples, and the keys if there are any."""
        if self._key_column is None:
            return self._own
        if self._key_column in self._own.names:
            raise ArgumentError(
                f"{self.shown} has a column {self._key_column!r} and keys beside its samples: "
                "pass key_column= with another name for the keys, or None to leave them out"
            )
        return self._own.append(pa.field(self._key_column, self._units[0].place.keys.type))

    @cached_property
    def _units(self) -> list[Unit]:
        store = self._reading.dataset.store
        keys = None if self._key_column is None else read_keys(store, self._index)
        units = []
        first = 0
        for chunk in self._index.chunks:
            rows = self._reading.rows(chunk)
            # a copy, so that a worker is given no keys of other chunks
            own = None if keys is None else keys.take(pa.array(range(first, first + rows)))
            shown = store.show(chunk.file.path)
            units.append(Unit(shown, rows, chunk.file.size, _Part(chunk, own), file=shown))
            first += rows
        return units

    def __getstate__(self) -> dict[str, Any]:
        # a worker is given the units that it reads
        return {name: value for name, value in self.__dict__.items() if name != "_units"}

    def units(self) -> list[Unit]:
        """One for each chunk."""
        return list(self._units)

    def identity(self) -> Iterable[Any]:
        """Files with size and time, and the options."""
        files = [chunk.file for chunk in self._index.chunks]
        return [[file.path, file.size, file.stamp] for file in files] + self._identity

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
        """Read a chunk."""
        schema = self.schema if schema is None else schema
        part: _Part = unit.place
        if self._key_column is None or part.keys is None:
            yield from self._counted(part.chunk, schema)
            return
        number = schema.get_field_index(self._key_column)
        first = 0
        for batch in self._counted(part.chunk, schema.remove(number)):
            arrays = list(batch.columns)
            arrays.insert(number, part.keys.slice(first, batch.num_rows))
            first += batch.num_rows
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _counted(self, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in self._reading.batches(chunk, schema):
            rows += batch.num_rows
            yield batch
        if rows != self._reading.rows(chunk):
            raise self._reading.dataset.place(chunk).damaged(
                f"gave {rows:,} rows, but the index lists {self._reading.rows(chunk):,}"
            )


def open_source(
    store: Store,
    *,
    columns: Sequence[str] | None = None,
    link: bool = False,
    password: str | None = None,
    key_file: str | None = None,
    block_size: int | None = None,
    ragged: bool | Sequence[str] = False,
    json: str = "typed",
    promote: bool = False,
    allow_pickle: bool = False,
    key_column: str | None = "key",
) -> LitDataSource:
    """Open a LitData dataset.

    Args:
        store: Its folder.
        columns: The columns to read; None reads all.
        link: Give bytes and media as links into the chunks, which must be classic ones.
        password: Of an encrypted dataset.
        key_file: What litdata's ``encryption.save()`` wrote.
        block_size: Of a dataset of tokens: give blocks of so many, as ``TokensLoader`` would,
            instead of documents.
        ragged: The columns whose arrays have different shapes, if those of the first chunk do not
            show it; True for all.
        json: ``"typed"`` gives lists and dicts Arrow types where the index declares one;
            ``"text"`` gives JSON text.
        promote: Read a column that holds integers in one chunk and floats in another as floats;
            an integer that a float cannot hold is an error.
        allow_pickle: Unpickle leaves. This runs code that the dataset brings.
        key_column: The column for the keys that LitData keeps beside a dataset; None leaves them
            out.

    Raises:
        ArgumentError: If an option does not fit the dataset.
        ColumnError: If a column is not there.
        SourceError: If it is damaged, or cannot be kept exactly.
    """
    if json not in ("typed", "text"):
        raise ArgumentError(f"json must be 'typed' or 'text', got {json!r}")
    if isinstance(ragged, str):
        raise ArgumentError(f"ragged is True or a list of columns: pass [{ragged!r}]")
    index = read_index(store)
    cipher = None
    if index.config.encryption is not None:
        cipher = open_cipher(*index.config.encryption, password, key_file, store.shown)
    options = Options(
        ragged if isinstance(ragged, bool) else tuple(ragged), json == "text", allow_pickle
    )
    wanted = None if columns is None else tuple(columns)
    keyed = key_column is not None and block_size is None and has_keys(store, index)
    if keyed and wanted is not None:
        keyed = key_column in wanted
        wanted = tuple(name for name in wanted if name != key_column)
    dataset = Dataset(store, index, cipher, wanted, link, options)
    reading = _reading(dataset, block_size, promote)
    identity = [
        *(None if columns is None else list(columns), link, block_size, json, promote),
        *(ragged if isinstance(ragged, bool) else sorted(ragged), key_column if keyed else None),
    ]
    source = LitDataSource(reading, key_column if keyed else None, identity)
    _ = source.schema  # what is wrong with the first chunk shows now
    reading.check_empty()
    return source


def _reading(dataset: Dataset, block_size: int | None, promote: bool) -> Reading:
    loader = dataset.index.config.loader
    if block_size is not None and loader != "TokensLoader":
        raise ArgumentError(
            f"block_size is for datasets of tokens, {dataset.store.shown} is read with {loader}"
        )
    if loader == "PyTreeLoader":
        return Samples(dataset, promote=promote)
    if loader == "TokensLoader":
        return Tokens(dataset, block_size)
    if loader == "TemporalArrayLoader":
        return Temporal(dataset)
    if loader == "ParquetLoader":
        return ParquetFiles(dataset)
    raise SourceError(
        f"{dataset.index.file}: the item loader {loader!r} is not one of LitData's",
        file=dataset.index.file,
    )
