"""Pickled values, which run code of whoever wrote them: only with permission."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from destrier.encoding.encoder import RowEncoder
from destrier.errors import SchemaError, SourceError
from destrier.formats.advice import with_way_out
from destrier.formats.mds.cells import Cells
from destrier.formats.mds.encodings import Encoding, Fail

__all__ = ["Pickle"]


@dataclass(frozen=True)
class Pickle(Encoding):
    """Python objects.

    Attributes:
        name: Always ``pkl``.
        kind: The type in Arrow of the first objects, None until they are seen.
    """

    name: str = "pkl"
    kind: pa.DataType | None = None

    @property
    def type(self) -> pa.DataType:
        """What the objects are in Arrow."""
        assert self.kind is not None
        return self.kind

    def resolved(self, cells: Cells | None) -> Pickle:
        """The same with the type of the first values; null if there are none."""
        if cells is None:
            return Pickle(kind=pa.null())
        return Pickle(kind=next(_batches(cells, None)).schema.field(0).type)

    def decode(self, cells: Cells) -> pa.Array:
        """Unpickle, and convert as the values of a job are."""
        schema = pa.schema([(cells.column, self.type)])
        return pa.concat_arrays([batch.column(0) for batch in _batches(cells, schema)])

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        """Not written: a column that was pickled is exported by its type."""
        raise NotImplementedError


def _batches(cells: Cells, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
    try:
        yield from RowEncoder(schema).batches(
            _rows(cells), int(cells.rows[0]), name=lambda row: f"row {row} of {cells.file}"
        )
    except SourceError as error:
        kind = SchemaError if isinstance(error, SchemaError) else SourceError
        text = with_way_out(str(error), "or leave the column out with columns=")
        raise kind(text, file=cells.file, row=error.row, column=cells.column) from error


def _rows(cells: Cells) -> Iterator[dict[str, Any]]:
    for index, value in enumerate(cells.bytes()):
        try:
            made = pickle.loads(value.as_py())  # noqa: S301 - the user permitted it
        except Exception as error:
            raise cells.fail(index, f"cannot be unpickled: {error}") from error
        yield {cells.column: made}
