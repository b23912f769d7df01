"""MDS as a source of tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.files import Store
from destrier.formats.mds.arrays import Ragged
from destrier.formats.mds.cells import Cells
from destrier.formats.mds.columns import Column, Options, choose_columns, is_open
from destrier.formats.mds.discover import find_records, root_of
from destrier.formats.mds.encodings import Binary, Encoding
from destrier.formats.mds.images import Items, Pil
from destrier.formats.mds.index import Record
from destrier.formats.mds.shard import (
    Offsets,
    check_config,
    check_end,
    read_cells,
    read_header,
    spans,
)
from destrier.formats.mds.stored import Content, Piece, open_piece
from destrier.formats.mds.text import check_header, read_json, read_separated, text_cells
from destrier.formats.media import link_array, link_uri
from destrier.writing.source import BATCH_BYTES, SOURCE_KEY, FileSource, Unit

__all__ = ["MdsSource"]

_LINKED_BYTES = 1024  # in the mean, from which columns of bytes are left where they are
_COLUMN_BYTES = 16  # what Arrow takes for a value besides its bytes
_ITEM_RATIO = 4  # what a list of items takes of Arrow, to the bytes in the shard


class MdsSource(FileSource):
    """A dataset of MosaicML Streaming.

    Args:
        store: Its root, its index or one of its shards.
        columns: Those to read, in this order; None reads all.
        options: The user's.

    Raises:
        SourceError: If the index or a shard is damaged, shards have other columns than each other,
            or an encoding is unknown.
        ArgumentError: If it cannot be read as asked.
    """

    format: ClassVar[str] = "mds"

    def __init__(self, store: Store, columns: Sequence[str] | None, options: Options) -> None:
        self.options = options
        records = find_records(store)
        self._shown = store.shown
        self.store = root_of(store) if store.stat() is not None else store
        self._records = records
        if not records:
            raise SourceError(f"{self._shown} lists no shards, so it has no columns and no rows")
        chosen = self._choose(columns)
        if options.check_hashes:
            _check_hashed(self.store, records)
        if options.link:
            _check_linkable(self._shown, records)
        self._columns = self._closed(chosen)
        self._schema = pa.schema(
            [column.field for column in self._columns],
            metadata={SOURCE_KEY: json.dumps({"format": "mds"}).encode()},
        )

    def _choose(self, columns: Sequence[str] | None) -> list[Column]:
        """How columns are read; raises unless all shards have them alike."""
        first = self._records[0]
        chosen = choose_columns(first.shape, columns, self.options, self._shown)
        known = {first.shape}
        for record in self._records:
            if record.shape in known:
                continue
            name = self.store.show(record.data.path)
            mine, other = _wanted(record, columns), _wanted(first, columns)
            if mine != other:
                raise SourceError(
                    f"{name} has the columns {_listed(mine)}, but "
                    f"{self.store.show(first.data.path)} has {_listed(other)}: convert them apart, "
                    "or read those that they share with columns=",
                    file=name,
                )
            choose_columns(record.shape, columns, self.options, name)
            known.add(record.shape)
        return chosen

    @property
    def schema(self) -> pa.Schema:
        """From the index, and where that does not say, from the first row."""
        return self._schema

    @property
    def shown(self) -> str:
        """The address without credentials."""
        return self._shown

    def units(self) -> list[Unit]:
        """One a shard."""
        return [
            Unit(shown, record.samples, record.nbytes, record, file=shown)
            for record in self._records
            for shown in [self.store.show(record.data.path)]
        ]

    def identity(self) -> Iterable[Any]:
        """The schema, the options, and the files with size and time."""
        yield self._schema.to_string()
        yield [column.linked for column in self._columns]
        yield repr(self.options)
        for record in self._records:
            for piece in filter(None, (record.data, record.meta)):
                yield [piece.path, piece.size, piece.stamp]
            yield record.samples

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Read a shard.

        Raises:
            SourceError: Naming file and row, if it is damaged or holds what does not fit.
        """
        record: Record = unit.place
        if record.meta is None:
            yield from self._read_joint(record)
        else:
            yield from self._read_text(record)

    def _read_joint(self, record: Record) -> Iterator[pa.RecordBatch]:
        content, offsets = self._open_joint(record)
        for first, last in spans(offsets, *_limits(self._columns)):
            cells = read_cells(content, offsets, first, last, record.shape)
            arrays = [
                self._link(record.data, cells[column.name])
                if column.linked
                else column.encoding.decode(cells[column.name])
                for column in self._columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _open_joint(self, record: Record) -> tuple[Content, Offsets]:
        content = open_piece(self.store, record.data, self.options.check_hashes)
        header = read_header(content, joint=True)
        check_config(content, header, int(header.offsets[0]), record)
        return content, header.offsets

    def _link(self, piece: Piece, cells: Cells) -> pa.Array:
        return link_array(
            link_uri(self.store, piece.path),
            cells.starts + cells.base,
            cells.lengths,
            piece.size,
            piece.stamp,
        )

    def _read_text(self, record: Record) -> Iterator[pa.RecordBatch]:
        assert record.meta is not None
        meta = open_piece(self.store, record.meta, self.options.check_hashes)
        header = read_header(meta, joint=False)
        check_config(meta, header, meta.size, record)
        content = open_piece(self.store, record.data, self.options.check_hashes)
        check_end(content.name, header.offsets, content.size)
        check_header(content, int(header.offsets[0]), record.shape)
        wanted = [(column.name, column.field.type) for column in self._columns]
        read = read_json if record.shape.format == "json" else read_separated
        for first, last in spans(header.offsets, BATCH_BYTES // _ITEM_RATIO, _COLUMN_BYTES):
            cells = text_cells(content, header.offsets, first, last, record.shape)
            arrays = read(cells, record.shape, wanted)
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _closed(self, columns: list[Column]) -> list[Column]:
        """Columns whose types are all known, by reading the first shard with rows if need be."""
        if not (self.options.link or any(is_open(column) for column in columns)):
            return columns
        record = next((record for record in self._records if record.samples), None)
        cells: dict[str, Cells] | None = None
        if record is not None:
            content, offsets = self._open_joint(record)
            _, last = next(spans(offsets, *_limits(columns)))
            cells = read_cells(content, offsets, 0, last, record.shape)
        closed = [
            self._close(column, None if cells is None else cells[column.name]) for column in columns
        ]
        if self.options.link and not any(column.linked for column in closed):
            raise ArgumentError(
                f"no column of {self._shown} can be linked: jpeg, png, and bytes of "
                f"{_LINKED_BYTES:,} or more can; use destrier.convert"
            )
        return closed

    def _close(self, column: Column, cells: Cells | None) -> Column:
        encoding = column.encoding
        if isinstance(encoding, Ragged):
            first = None if cells is None else _first(cells)
            form = self.options.array_form(column.name)
            return replace(column, encoding=encoding.resolved(first, form))
        if column.original == "pkl":
            from destrier.formats.mds.pickles import Pickle

            assert isinstance(encoding, Pickle)
            return replace(column, encoding=encoding.resolved(cells))
        linked = self.options.link and _is_linked(encoding, cells)
        return replace(column, linked=linked)


def _limits(columns: list[Column]) -> tuple[int, int]:
    """Bytes of a batch in the shard, and what is added for each row."""
    listed = any(isinstance(column.encoding, Items | Ragged | Pil) for column in columns)
    return BATCH_BYTES // _ITEM_RATIO if listed else BATCH_BYTES, _COLUMN_BYTES * len(columns)


def _first(cells: Cells) -> Cells:
    return Cells(
        cells.buffer,
        cells.starts[:1],
        cells.lengths[:1],
        cells.rows[:1],
        cells.file,
        cells.column,
        cells.base,
    )


def _is_linked(encoding: Encoding, cells: Cells | None) -> bool:
    if encoding.name in ("jpeg", "png"):
        return True
    large = cells is not None and float(cells.lengths.mean()) >= _LINKED_BYTES
    return isinstance(encoding, Binary) and large


def _wanted(record: Record, columns: Sequence[str] | None) -> dict[str, str]:
    shape = record.shape
    kinds = {"mds": "", "json": "text "}
    prefix = kinds.get(shape.format, "text ")
    pairs = zip(shape.names, shape.encodings, strict=True)
    return {n: f"{prefix}{e}" for n, e in pairs if columns is None or n in columns}


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{name!r} ({encoding})" for name, encoding in columns.items()) or "none"


def _check_hashed(store: Store, records: list[Record]) -> None:
    for record in records:
        for piece in filter(None, (record.data, record.meta)):
            if not piece.hashes:
                raise SourceError(
                    f"the index has no hash of {store.show(piece.path)}: leave out check_hashes=",
                    file=store.show(piece.path),
                )


def _check_linkable(shown: str, records: list[Record]) -> None:
    for record in records:
        if record.data.compression is not None:
            raise ArgumentError(
                f"{shown} cannot be linked: its shards are compressed ({record.data.compression}), "
                "so values have no place of their own in the files; use destrier.convert"
            )
        if record.meta is not None:
            raise ArgumentError(
                f"{shown} cannot be linked: its shards are text ({record.shape.format}); use "
                "destrier.convert"
            )
