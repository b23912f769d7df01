"""Datasets of temporal arrays: records whose fields share their first dimension, time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.formats.gather import as_bytes, binary, fixed, list_offsets, packed
from destrier.formats.litdata.arrays import (
    NUMPY_TYPES,
    TORCH_TYPES,
    ArrayCells,
    Shapes,
    decode_arrays,
)
from destrier.formats.litdata.chunk import Window
from destrier.formats.litdata.index import Chunk
from destrier.formats.litdata.places import Place
from destrier.formats.litdata.reading import Dataset, Reading, chosen, column_field
from destrier.writing.source import SOURCE_KEY

__all__ = ["Temporal"]

_MOST_FRAME_BYTES = 1 << 31


class Temporal(Reading):
    """Chunks of TemporalArrayLoader."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        if dataset.link:
            raise ArgumentError(
                f"{dataset.store.shown} cannot be linked, for it holds arrays: use destrier.convert"
            )
        self.fields, self.groups = _read_schema(dataset.index.config.temporal, dataset.index.file)
        self.names = chosen(list(self.fields), dataset.columns, dataset.store.shown)

    def schema(self) -> pa.Schema:
        """A column for each field, its type by the records of the first chunk."""
        shapes = {name: Shapes(self.dataset.options.is_ragged(name)) for name in self.names}
        for cells, place in self._windows(self.dataset.index.chunks[0]):
            for name in self.names:
                shapes[name].observe(cells[name], place.at(name))
        origin = {"format": "litdata", "loader": "TemporalArrayLoader"}
        return pa.schema(
            [column_field(n, shapes[n].type, self._encoding(n, shapes[n])) for n in self.names],
            metadata={SOURCE_KEY: json.dumps(origin).encode()},
        )

    def _encoding(self, name: str, shapes: Shapes) -> str:
        """How the whole array is written where each is a leaf of its own."""
        kind = "tensor" if self.fields[name][1] else "numpy"
        dtype = str(shapes.dtype)
        if shapes.rank != 1:
            return f"{kind}:{dtype}" if dtype.startswith("complex") else kind
        types = TORCH_TYPES if kind == "tensor" else NUMPY_TYPES
        last = len(types) - 1 - types[::-1].index(dtype)
        return f"no_header_{kind}:{last}"

    def batches(self, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read a chunk."""
        for cells, place in self._windows(chunk):
            arrays = [
                decode_arrays(cells[field.name], field.type, place.at(field.name))
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _windows(self, chunk: Chunk) -> Iterator[tuple[dict[str, ArrayCells], Place]]:
        file = self.dataset.place(chunk).file
        for window in self.dataset.classic(chunk).windows():
            place = Place(file, window.first)
            yield self._cells(window, chunk, place), place

    def _cells(self, window: Window, chunk: Chunk, place: Place) -> dict[str, ArrayCells]:
        starts = window.bounds[:-1]
        lengths = window.bounds[1:] - starts
        if (short := np.flatnonzero(lengths < 4)).size:
            row = int(short[0])
            raise place.damaged(f"a record of {lengths[row]:,} bytes has no frame count", row)
        frames = fixed(window.data, starts, 4).view("<u4").astype(np.int64)
        size = sum(group.itemsize for group in self.groups)
        if (odd := np.flatnonzero(4 + frames * size != lengths)).size:
            row = int(odd[0])
            raise place.damaged(
                f"a record of {lengths[row]:,} bytes does not hold {frames[row]:,} frames of "
                f"{size:,}",
                row,
            )
        if chunk.frames is not None:
            listed = np.array(chunk.frames[window.first : window.first + len(frames)])
            if len(listed) != len(frames) or (listed != frames).any():
                raise place.damaged("its numbers of frames are not those that the index lists")
        found: dict[str, ArrayCells] = {}
        before = 0
        for group in self.groups:
            assert group.names is not None
            if wanted := [name for name in group.names if name in self.names]:
                begins = starts + 4 + frames * before
                data = packed(binary(window.data, begins, frames * group.itemsize)).view(group)
                for name in wanted:
                    found[name] = _field_cells(data[name], frames)
            before += group.itemsize
        return found


def _field_cells(values: Any, frames: Any) -> ArrayCells:
    dtype = values.dtype.newbyteorder("<")
    flat = np.ascontiguousarray(values.astype(dtype, copy=False))
    inner = values.shape[1:]
    size = math.prod(inner) * dtype.itemsize
    dims = np.column_stack([frames, *(np.full(len(frames), n, np.int64) for n in inner)])
    return ArrayCells(
        np.dtype(dtype.newbyteorder("=")),
        as_bytes(flat),
        list_offsets(frames)[:-1] * size,
        frames * size,
        np.full(len(frames), 1 + len(inner), np.int64),
        dims.reshape(-1),
    )


def _read_schema(
    raw: Any, file: str
) -> tuple[dict[str, tuple[np.dtype[Any], bool]], list[np.dtype[Any]]]:
    """The fields with dtype and whether they were tensors; the rows of each group."""
    try:
        if raw["version"] != 1:
            raise ValueError(f"version {raw['version']!r} is not known")
        names, listed = raw["field_order"], raw["groups"]
        fields = {name: _read_field(name, raw["fields"][name]) for name in names}
        grouped = [name for group in listed for name in group]
        if sorted(grouped) != sorted(names) or len(set(names)) != len(names) or not names:
            raise ValueError("its groups do not hold each field once")
        groups = [
            np.dtype([(name, *fields[name][:2]) for name in group], align=True) for group in listed
        ]
        if not all(0 < group.itemsize < _MOST_FRAME_BYTES for group in groups):
            raise ValueError("its frames are too large")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise SourceError(f"{file}: temporal_schema is damaged: {error}", file=file) from None
    return {name: (dtype, tensor) for name, (dtype, _, tensor) in fields.items()}, groups


def _read_field(name: Any, raw: Any) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    dtype, shape = raw["dtype"], raw["shape"]
    if not isinstance(name, str) or not name or not isinstance(dtype, str):
        raise ValueError(f"field {name!r} is of dtype {dtype!r}")
    found = np.dtype(dtype)
    if str(found.newbyteorder("=")) not in NUMPY_TYPES:
        raise ValueError(f"field {name!r} is of dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"field {name!r} is of shape {shape!r}")
    return found, tuple(shape), bool(raw["tensor"])
