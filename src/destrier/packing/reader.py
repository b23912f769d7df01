"""Blocks as rows: a reader whose offsets are addresses of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.columns import dense_bytes, dense_type
from destrier.counters import Counts
from destrier.errors import RowError
from destrier.keyed import Ints
from destrier.memory import fresh
from destrier.packing.copying import copy_runs
from destrier.packing.held import HeldDocuments
from destrier.packing.packing import Packing
from destrier.packing.pieces import Blocks, Pieces
from destrier.packing.source import Documents, empty_between, read_documents
from destrier.read import Reader, Rows
from destrier.selection import RowList

__all__ = ["PackedReader"]

_RAGGED = 160  # bytes of a small array of its own


class PackedReader:
    """Reads blocks: finds the documents that they consist of, reads each once, and cuts them.

    It stands where a `Reader` does. Safe to call from several threads.

    Args:
        reader: Reads the rows of the documents: the columns in `Packing.read_columns`.
        packing: How documents become blocks.
        blocks: The blocks.
        rows: The documents: rows of the table.
        columns: Names of the columns of blocks.
    """

    def __init__(
        self,
        reader: Reader,
        packing: Packing,
        blocks: Blocks,
        rows: RowList,
        columns: list[str],
    ) -> None:
        self._reader = reader
        self._packing = packing
        self._blocks = blocks
        self._rows = rows
        self.table = reader.table
        self.columns = columns
        self.counts: Counts = reader.counts
        schema = packing.schema(reader.table)
        self.schema = pa.schema([schema.field(name) for name in columns])
        self._documents = self._read_documents

    def keep(self) -> None:
        """Keep all documents in memory once they are read."""
        width = self._packing.token_bytes(self.table, self._reader.columns)
        lengths = self._blocks.lengths
        self._documents = HeldDocuments(self._read_documents, lengths, token_bytes=width).documents

    def row_bytes(self) -> float:
        """Bytes of a block in memory, about."""
        ragged = sum(dense_type(field.type) is None for field in self.schema)
        return float(sum(dense_bytes(field.type) for field in self.schema) + ragged * _RAGGED)

    def read(self, offsets: Ints) -> Rows:
        """Read blocks.

        Args:
            offsets: Addresses in any order.

        Raises:
            ReadError: If a row cannot be read, or holds what is no token, and the reader is not
                tolerant.
        """
        pieces = self._blocks.pieces(offsets, ahead=1 if "labels" in self.columns else 0)
        places, document = np.unique(pieces.document, return_inverse=True)
        documents = self._documents(places)
        cut = _Cut(self._packing, pieces, document, documents, len(offsets))
        batch = pa.RecordBatch.from_arrays(
            [cut.column(field) for field in self.schema], schema=self.schema
        )
        rows = Rows(batch, None)
        if documents.errors:
            failed = _failed(pieces, document, documents.errors)
            rows.errors = failed
            rows.index = np.arange(len(offsets))
            rows.index[list(failed)] = -1
        return rows

    def _read_documents(self, places: Ints) -> Documents:
        lengths, rows = self._blocks.lengths, self._rows
        every = np.union1d(places, empty_between(places, lengths, rows))
        read = read_documents(self._reader, self._packing, lengths, every, rows.offsets(every))
        if len(every) == len(places):
            return read
        at = np.searchsorted(every, places)
        return Documents(
            read.values,
            {name: starts[at] for name, starts in read.starts.items()},
            read.sizes[at],
            {i: read.errors[j] for i, j in enumerate(at.tolist()) if j in read.errors},
        )


def _failed(pieces: Pieces, document: Ints, errors: dict[int, RowError]) -> dict[int, RowError]:
    """The blocks that have a piece of a document that cannot be used."""
    bad = np.flatnonzero(np.isin(document, list(errors)))
    found: dict[int, RowError] = {}
    for i in bad.tolist():
        found.setdefault(int(pieces.block[i]), errors[int(document[i])])
    return found


@dataclass
class _Cut:
    """Pieces of documents, put together to the columns of blocks."""

    packing: Packing
    pieces: Pieces
    document: Ints
    documents: Documents
    count: int

    def __post_init__(self) -> None:
        size = self.packing.block_size
        pieces = self.pieces
        # What lies after its block is wanted for labels only.
        inside = pieces.at < size
        self._length = np.minimum(pieces.length, size - pieces.at)[inside]
        self._block, self._at = pieces.block[inside], pieces.at[inside]
        self._begin, self._document = pieces.begin[inside], self.document[inside]
        self._after = ~inside
        used = np.zeros(self.count, np.int64)
        used[self._block] = self._at + self._length  # of each block the last piece counts
        self._used = used
        self._made: NDArray[Any] | None = None

    def column(self, field: pa.Field) -> pa.Array:
        """Make one column."""
        if field.name == "input_ids":
            return _lists(self._ids(field), field)
        if field.name == "labels":
            return _lists(self._labels(field), field)
        if field.name == "position_ids":
            return _lists(self._positions(field), field)
        if field.name == "document_ids":
            return _lists(self._document_ids(), field)
        if field.name == "cu_seqlens":
            return self._bounds()
        return _lists(self._values(field.name, field, 0, 0), field)

    def _ids(self, field: pa.Field) -> NDArray[Any]:
        if self._made is None:
            packing = self.packing
            pad = 0 if packing.pad_id is None else packing.pad_id
            self._made = self._values(packing.column, field, pad, packing.eos_id or 0)
        return self._made

    def _values(self, name: str, field: pa.Field, pad: int, eos: int) -> NDArray[Any]:
        """The values of a column of documents, cut alike."""
        size = self.packing.block_size
        out = fresh((self.count, size), field.type.value_type.to_pandas_dtype())
        for block in np.flatnonzero(self._used < size).tolist():
            out[block, self._used[block] :] = pad
        flat = out.reshape(-1)
        target = self._block * size + self._at
        left = self.documents.sizes[self._document] - self._begin
        length = np.minimum(self._length, left)
        ended = self._length > left
        flat[(target + left)[ended]] = eos
        source = self.documents.starts[name][self._document] + self._begin
        if self.documents.errors:  # their blocks are not delivered
            good = ~np.isin(self._document, list(self.documents.errors))
            source, target, length = source[good], target[good], length[good]
        copy_runs(self.documents.values[name], source, flat, target, length)
        return out

    def _labels(self, field: pa.Field) -> NDArray[Any]:
        """For each token the one that follows it."""
        packing, size = self.packing, self.packing.block_size
        ids = self._ids(field)
        out = fresh(ids.shape, ids.dtype)
        out[:, :-1] = ids[:, 1:]
        out[:, -1] = packing.ignore_index
        for block in np.flatnonzero(self._used < size).tolist():
            out[block, max(0, self._used[block] - 1) :] = packing.ignore_index
        end = self._begin + self._length
        whole = self.documents.sizes[self._document] + packing.extra
        last = self._at + self._length - 1
        goes_on = end < whole
        self._set(out, self._block[goes_on], last[goes_on], self._document[goes_on], end[goes_on])
        if packing.mask_borders:
            out[self._block[~goes_on], last[~goes_on]] = packing.ignore_index
            return out
        after = self._after  # the first token of the next document, after a block that ended one
        block = self.pieces.block[after]
        fresh_one = self.pieces.begin[after] == 0
        self._set(
            out,
            block[fresh_one],
            np.full(int(fresh_one.sum()), size - 1),
            self.document[after][fresh_one],
            np.zeros(int(fresh_one.sum()), np.int64),
        )
        self._end_of_line(out)
        return out

    def _set(self, out: NDArray[Any], block: Ints, place: Ints, document: Ints, at: Ints) -> None:
        """Set labels to single tokens of documents."""
        documents, name = self.documents, self.packing.column
        if documents.errors:
            good = ~np.isin(document, list(documents.errors))
            block, place, document, at = block[good], place[good], document[good], at[good]
        known = at < documents.sizes[document]
        value = np.full(len(at), self.packing.eos_id or 0, out.dtype)
        source = (documents.starts[name][document] + at)[known]
        value[known] = documents.values[name][source]
        out[block, place] = value

    def _end_of_line(self, out: NDArray[Any]) -> None:
        """Nothing follows the last document of all; where the line is a circle, the first does."""
        pieces = self.pieces
        back = pieces.document[1:] <= pieces.document[:-1]
        wrapped = back & (pieces.block[1:] == pieces.block[:-1]) & (pieces.begin[1:] == 0)
        place = pieces.at[1:][wrapped] - 1
        out[pieces.block[1:][wrapped], place] = self.packing.ignore_index

    def _positions(self, field: pa.Field) -> NDArray[Any]:
        """The place of each token in its piece; 0, 1, 2, ... in pads too."""
        out = self._spread(self._at, self._used)
        return np.subtract(
            np.arange(self.packing.block_size), out, dtype=field.type.value_type.to_pandas_dtype()
        )

    def _document_ids(self) -> NDArray[Any]:
        """The number of each token's piece in its block; -1 in pads."""
        first = np.searchsorted(self._block, np.arange(self.count))
        number = np.arange(len(self._block)) - first[self._block]
        return self._spread(number, np.full(self.count, -1)).astype(np.int32)

    def _spread(self, of_pieces: Ints, of_pads: Ints) -> Ints:
        """One value for all tokens of a piece, and one for the pads of a block."""
        pads = np.flatnonzero(self._used < self.packing.block_size)
        value = np.concatenate([of_pieces, of_pads[pads]])
        length = np.concatenate([self._length, self.packing.block_size - self._used[pads]])
        order = np.argsort(np.concatenate([self._block, pads]), kind="stable")
        shape = (self.count, self.packing.block_size)
        return np.repeat(value[order], length[order]).reshape(shape)

    def _bounds(self) -> pa.Array:
        """Where pieces begin in each block, and where the last one ends."""
        value = np.concatenate([self._at, self._used])
        order = np.argsort(np.concatenate([self._block, np.arange(self.count)]), kind="stable")
        counts = np.bincount(self._block, minlength=self.count) + 1
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), pa.array(value[order].astype(np.int32))
        )


def _lists(values: NDArray[Any], field: pa.Field) -> pa.Array:
    flat = values.reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, field.type.value_type), type=field.type)
