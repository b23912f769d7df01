"""Datasets of tokens: documents, or blocks of one length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.formats.gather import MOST_OFFSETS, as_bytes, primitive
from destrier.formats.litdata.arrays import NUMPY_TYPES, TORCH_TYPES, value_type
from destrier.formats.litdata.index import Chunk
from destrier.formats.litdata.places import Place
from destrier.formats.litdata.reading import Dataset, Reading, chosen, column_field
from destrier.writing.source import BATCH_BYTES, SOURCE_KEY

__all__ = ["COLUMN", "Tokens"]

COLUMN = "tokens"


class Tokens(Reading):
    """Chunks of TokensLoader.

    Args:
        dataset: The dataset.
        block_size: Number of tokens of a block; None gives the documents.
    """

    def __init__(self, dataset: Dataset, block_size: int | None) -> None:
        super().__init__(dataset)
        if dataset.link:
            raise ArgumentError(
                f"{dataset.store.shown} cannot be linked, for it holds tokens: use destrier.convert"
            )
        if block_size is not None and (type(block_size) is not int or block_size < 1):
            raise ArgumentError(f"block_size must be a positive integer, got {block_size!r}")
        self.block_size = block_size
        chosen([COLUMN], dataset.columns, dataset.store.shown)
        self.encoding = dataset.index.config.data_format[0]
        self.dtype = self._find_dtype()

    def _find_dtype(self) -> np.dtype[Any]:
        file = self.dataset.index.file
        formats = self.dataset.index.config.data_format
        name, _, number = formats[0].partition(":")
        types = {"no_header_numpy": NUMPY_TYPES, "no_header_tensor": TORCH_TYPES}.get(name)
        if types is None or not number.isdecimal() or len(formats) != 1:
            raise SourceError(f"{file}: tokens cannot be {', '.join(formats)}", file=file)
        kind = types[int(number)] if int(number) < len(types) else "unknown"
        if kind == "unknown" or kind.startswith(("bfloat", "complex")):
            raise SourceError(
                f"{file}: tokens of dtype {number} ({kind}) cannot be kept", file=file
            )
        return np.dtype(kind)

    def rows(self, chunk: Chunk) -> int:
        """Documents, or blocks."""
        return chunk.rows if self.block_size is None else (chunk.dim or 0) // self.block_size

    def check_empty(self) -> None:
        """Also those that hold less than a block."""
        super().check_empty()
        for chunk in self.dataset.index.chunks:
            if self.rows(chunk) == 0:
                for _ in self.batches(chunk, self.schema()):
                    pass

    def schema(self) -> pa.Schema:
        """One column of lists."""
        values = value_type(self.dtype)
        kind = pa.list_(values) if self.block_size is None else pa.list_(values, self.block_size)
        origin = {"format": "litdata", "loader": "TokensLoader"}
        return pa.schema(
            [column_field(COLUMN, kind, self.encoding)],
            metadata={SOURCE_KEY: json.dumps(origin).encode()},
        )

    def batches(self, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read a chunk."""
        place = self.dataset.place(chunk).at(COLUMN)
        body = self.dataset.classic(chunk)
        begin = int(body.offsets[0])
        count, rest = divmod(body.raw.size - begin, self.dtype.itemsize)
        if rest or (chunk.dim is not None and count != chunk.dim):
            raise place.damaged(
                f"has {body.raw.size - begin:,} bytes of {self.dtype}, but the index lists "
                f"{chunk.dim} tokens"
            )
        if self.block_size is None:
            for window in body.windows():
                yield self._documents(window.data, window.bounds, schema, window.first, place)
            return
        if chunk.dim is None:
            raise place.damaged("the index does not list its tokens, so it has no blocks")
        size = self.block_size * self.dtype.itemsize
        blocks = count // self.block_size
        step = max(1, BATCH_BYTES // size)
        for first in range(0, blocks, step):
            number = min(step, blocks - first)
            data = as_bytes(body.raw.read(begin + first * size, number * size))
            values = primitive(data.copy().view(self.dtype), schema.field(0).type.value_type)
            array = pa.FixedSizeListArray.from_arrays(values, type=schema.field(0).type)
            yield pa.RecordBatch.from_arrays([array], schema=schema)

    def _documents(
        self, data: Any, bounds: Any, schema: pa.Schema, first: int, place: Place
    ) -> pa.RecordBatch:
        rows = Place(place.file, first, COLUMN)
        offsets, rest = np.divmod(bounds, self.dtype.itemsize)
        if (odd := np.flatnonzero(rest)).size:
            row = int(odd[0]) - 1
            size = bounds[row + 1] - bounds[row]
            raise rows.damaged(f"{size:,} bytes are no array of {self.dtype}", row)
        if offsets[-1] > MOST_OFFSETS:
            raise rows.damaged(f"has {offsets[-1]:,} tokens, more than a list holds", 0)
        values = primitive(data.copy().view(self.dtype), schema.field(0).type.value_type)
        lists = pa.Array.from_buffers(
            schema.field(0).type,
            len(bounds) - 1,
            [None, pa.py_buffer(offsets.astype(np.int32))],
            children=[values],
        )
        return pa.RecordBatch.from_arrays([lists], schema=schema)
