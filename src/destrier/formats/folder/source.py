"""A folder of files as a source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError, SourceError
from destrier.files import File, Store
from destrier.formats.folder.listing import list_files
from destrier.formats.folder.rows import Group, Rows, file_field, file_rows, grouped_rows
from destrier.formats.media import link_array, link_uri
from destrier.writing.source import BATCH_BYTES, LINK, SOURCE_KEY, FileSource, Unit

__all__ = ["FolderSource", "open_source"]

_UNIT_BYTES = 32 << 20
_UNIT_ROWS = 4096
_ROW_BYTES = 128  # roughly, what a row has besides its files
_REQUESTS = 16  # at once, to a remote store
_LABELS = ("folder", None)


def open_source(
    store: Store,
    *,
    columns: Sequence[str] | None = None,
    link: bool = False,
    labels: str | None = "folder",
    captions: bool = True,
    metadata: bool = True,
    pattern: str | Sequence[str] | None = None,
    column: str | None = None,
    group: Group | None = None,
) -> FolderSource:
    """Open a folder of files as a source.

    Args:
        store: The folder.
        columns: The columns to keep.
        link: Keep the files where they are, and store where that is.
        labels: ``"folder"`` makes a column ``label`` of the names of the folders that files lie
            in; None makes none.
        captions: Whether ``x.txt`` beside ``x.jpg`` is its caption.
        metadata: Whether ``metadata.jsonl`` and ``metadata.csv`` tell of the files beside them.
        pattern: Which files are rows, such as ``"*.jpg"``; None is all.
        column: Name of the column of files; None is ``image``, ``audio``, ``video`` or ``file``
            after their kind.
        group: A function from the list of files to rows, instead of a row for each file. A value
            of a row that is one of the files is its bytes.

    Raises:
        ArgumentError: If the files are of several kinds, or an option cannot be used.
        EmptyError: If there are no files.
        SourceError: If there is no such folder, or something in it cannot be read.

    Example:
        >>> source = open_source(Store("data/photos"), labels=None)  # doctest: +SKIP
    """
    if labels not in _LABELS:
        raise ArgumentError(f"labels is {labels!r}, not 'folder' or None")
    patterns = [pattern] if isinstance(pattern, str) else list(pattern or ())
    files = list_files(store)
    if group is None:
        rows = file_rows(
            store,
            files,
            labels=labels,
            captions=captions,
            metadata=metadata,
            pattern=patterns,
            column=column,
        )
    else:
        if patterns or column is not None:
            raise ArgumentError("group= makes the rows, so pattern= and column= say nothing")
        rows = grouped_rows(store, files, group)
    names = rows.names if columns is None else list(columns)
    for number, name in enumerate(names):
        if name not in rows.names:
            raise ColumnError(
                f"no column {name!r} in {store.shown}; its columns are: {', '.join(rows.names)}"
            )
        if name in names[:number]:
            raise ColumnError(f"column {name!r} is named twice")
    return FolderSource(store, rows, names, link=link)


@dataclass(frozen=True)
class _Run:
    """Consecutive rows: the files they need, what is known already, and where they come from."""

    first: int
    count: int
    files: dict[str, list[File | None]]
    texts: dict[str, list[File | None]]
    values: bytes
    origins: list[File | None]


class FolderSource(FileSource):
    """A folder of files; made by `open_source`."""

    format: ClassVar[str] = "folder"

    def __init__(self, store: Store, rows: Rows, names: Sequence[str], *, link: bool) -> None:
        self.store = store
        self.link = link
        kind = LINK if link else pa.large_binary()
        fields = []
        for name in names:
            if name in rows.files:
                fields.append(file_field(name, rows.files[name], kind))
            elif name in rows.texts:
                fields.append(pa.field(name, pa.string()))
            else:
                fields.append(pa.field(name, rows.values[name].type))
        self._schema = pa.schema(fields, metadata={SOURCE_KEY: json.dumps({"format": self.format})})
        self._units: list[Unit] = list(self._cut(rows))

    def __getstate__(self) -> dict[str, Any]:
        # a worker is given the units that it reads
        return {**self.__dict__, "_units": []}

    @property
    def schema(self) -> pa.Schema:
        """The schema, known from the list of files."""
        return self._schema

    @property
    def shown(self) -> str:
        """Its address without credentials, for messages."""
        return self.store.shown

    def units(self) -> list[Unit]:
        """Runs of rows of about 32 MB."""
        return self._units

    def identity(self) -> Iterable[Any]:
        """The files with size and time, what else is in the rows, and whether they are linked."""
        yield [self.store.uri, self.link, str(self._schema)]
        for unit in self._units:
            run: _Run = unit.place
            yield hashlib.blake2b(run.values, digest_size=16).hexdigest()
            for name, files in (*run.files.items(), *run.texts.items()):
                yield [name, [None if file is None else asdict(file) for file in files]]

    def _cut(self, rows: Rows) -> Iterator[Unit]:
        names = self._schema.names
        files = {name: column for name, column in rows.files.items() if name in names}
        texts = {name: column for name, column in rows.texts.items() if name in names}
        values = {name: rows.values[name] for name in names if name in rows.values}
        read = texts if self.link else {**files, **texts}
        sizes = np.full(rows.count, _ROW_BYTES, np.int64)
        for column in read.values():
            sizes += np.array([0 if file is None else file.size for file in column])
        whole = pa.RecordBatch.from_pydict(values) if values else None
        origins = _origins(rows)
        for first, stop in _runs(sizes.tolist(), _UNIT_BYTES, _UNIT_ROWS):
            count = stop - first
            part = b"" if whole is None else whole.slice(first, count).serialize().to_pybytes()
            run = _Run(
                first,
                count,
                {name: column[first:stop] for name, column in files.items()},
                {name: column[first:stop] for name, column in texts.items()},
                part,
                origins[first:stop],
            )
            name = f"{self.shown}, rows {first} to {stop - 1}"
            yield Unit(name, count, int(sizes[first:stop].sum()), run)

    def origins(self, unit: Unit, start: int, count: int) -> tuple[pa.Array, pa.Array]:
        """See `Source.origins`: a file is a row, or several are one, of which it is the first."""
        files = unit.place.origins[start : start + count]
        shown = [None if file is None else self.store.show(file.path) for file in files]
        rows = [None if file is None else 0 for file in files]
        return pa.array(shown, pa.string()), pa.array(rows, pa.int64())

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
        """Read the files of a run of rows; see `destrier.writing.source.Source.read`."""
        run: _Run = unit.place
        schema = schema or self._schema
        told = [f for f in self._schema if f.name not in run.files and f.name not in run.texts]
        values: dict[str, pa.Array] = {}
        if told:
            batch = pa.ipc.read_record_batch(pa.py_buffer(run.values), pa.schema(told))
            values = dict(zip(batch.schema.names, batch.columns, strict=True))
        read = [*run.texts.values()] if self.link else [*run.files.values(), *run.texts.values()]
        sizes = [
            sum(file.size for file in row if file is not None) + _ROW_BYTES
            for row in (zip(*read, strict=True) if read else [()] * run.count)
        ]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for first, stop in _runs(sizes, BATCH_BYTES, _UNIT_ROWS):
                columns = []
                for name in schema.names:
                    row = run.first + first
                    if name in run.texts:
                        data = self._load(run.texts[name][first:stop], pool)
                        columns.append(self._texts(data, run.texts[name][first:stop], name, row))
                    elif name not in run.files:
                        columns.append(values[name].slice(first, stop - first))
                    elif self.link:
                        columns.append(self._links(run.files[name][first:stop]))
                    else:
                        data = self._load(run.files[name][first:stop], pool)
                        columns.append(pa.array(data, pa.large_binary()))
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _load(self, files: Sequence[File | None], pool: ThreadPoolExecutor) -> list[bytes | None]:
        if self.store.local:
            return [self._read(file) for file in files]
        return list(pool.map(self._read, files))

    def _read(self, file: File | None) -> bytes | None:
        if file is None:
            return None
        shown = self.store.show(file.path)
        if self.store.local:
            try:
                with open(self.store.address(file.path), "rb") as opened:
                    data = opened.read(file.size + 1)  # one more tells whether it grew
            except OSError as error:
                raise SourceError(f"{shown}: {error.strerror}", file=shown) from None
        else:
            data = self.store.read(file.path).to_pybytes()
        if len(data) != file.size:
            raise SourceError(
                f"{shown} had {file.size:,} bytes when it was listed, but has another size now; "
                "start again when nothing writes to the folder",
                file=shown,
            )
        return data

    def _texts(
        self,
        data: Sequence[bytes | None],
        files: Sequence[File | None],
        name: str,
        first: int,
    ) -> pa.Array:
        texts: list[str | None] = []
        for row, (item, file) in enumerate(zip(data, files, strict=True)):
            if item is None or file is None:
                texts.append(None)
                continue
            try:
                texts.append(item.decode())
            except UnicodeDecodeError as error:
                shown = self.store.show(file.path)
                raise SourceError(
                    f"{shown}, the {name} of row {first + row}, is not UTF-8 text: {error.reason} "
                    f"at byte {error.start}; write it as UTF-8, or pass captions=False",
                    file=shown,
                    row=first + row,
                    column=name,
                ) from None
        return pa.array(texts, pa.string())

    def _links(self, files: Sequence[File | None]) -> pa.Array:
        valid = np.array([file is not None for file in files], bool)
        known = [file or File("", 0) for file in files]
        uris = [link_uri(self.store, file.path) for file in known]
        sizes = [file.size for file in known]
        stamps = [file.stamp for file in known]
        return link_array(
            pa.array(uris, pa.string()), [0] * len(known), sizes, sizes, stamps, valid
        )


def _origins(rows: Rows) -> list[File | None]:
    """The first file of each row, whether its column is kept or not."""
    columns = [*rows.files.values(), *rows.texts.values()]
    return [
        next((column[row] for column in columns if column[row] is not None), None)
        for row in range(rows.count)
    ]


def _runs(sizes: Sequence[int], most_bytes: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of at most so many bytes and rows; a row that is larger stands alone."""
    first = held = 0
    for row, size in enumerate(sizes):
        if row > first and (held + size > most_bytes or row - first >= most_rows):
            yield first, row
            first, held = row, 0
        held += size
    if first < len(sizes):
        yield first, len(sizes)
