"""Datasets of samples, which are trees of leaves or rows of Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, SchemaError
from destrier.formats.gather import fixed
from destrier.formats.litdata.cells import Cells, Codec
from destrier.formats.litdata.chunk import Classic, Items, Rows, Window
from destrier.formats.litdata.index import Chunk
from destrier.formats.litdata.leaves import leaf_codec
from destrier.formats.litdata.places import Place
from destrier.formats.litdata.reading import Dataset, Reading, chosen, column_field
from destrier.formats.litdata.rows import Merged, read_rows, rows_schema
from destrier.formats.litdata.spec import Node, load_spec
from destrier.formats.media import link_array, link_uri
from destrier.writing.source import LINK, SOURCE_KEY

__all__ = ["Samples"]

_THREADS = 16
_MOST_HELD = 128 << 20  # of chunks that are held as a whole while their schemas are read
_LINKED = ("", "s3", "s3a", "gs", "gcs", "az", "abfs")


class Samples(Reading):
    """Chunks of PyTreeLoader."""

    def __init__(self, dataset: Dataset, *, promote: bool) -> None:
        super().__init__(dataset)
        self.promote = promote
        config, file = dataset.index.config, dataset.index.file
        self.root = load_spec(config.data_spec, len(config.data_format), file)

    def schema(self) -> pa.Schema:
        """Of the leaves, or of the Arrow rows of all chunks together."""
        dataset = self.dataset
        first = dataset.index.chunks[0]
        body = dataset.body(first)
        if dataset.link:
            self._check_link(body)
        if not isinstance(body, Rows):
            assert isinstance(body, Items)
            return self._leaf_schema(first, body)
        merged = Merged(promote=self.promote, columns=dataset.columns)
        merged.add(rows_schema(body, dataset.place(first)), dataset.place(first).file)
        others = dataset.index.chunks[1:]
        with ThreadPoolExecutor(self._threads) as pool:
            for chunk, schema in zip(others, pool.map(self._chunk_schema, others), strict=True):
                merged.add(schema, dataset.place(chunk).file)
        whole = merged.schema
        names = chosen(merged.names, dataset.columns, dataset.store.shown)
        fields = [whole.field(name) for name in names]
        return pa.schema(fields, metadata=_source_metadata({"rows": "arrow"}))

    @property
    def _threads(self) -> int:
        """How many chunks are opened at once: fewer where each is held as a whole."""
        index = self.dataset.index
        if not index.config.whole_file and index.config.encryption is None:
            return _THREADS
        largest = max(max(chunk.nbytes, chunk.file.size, 1) for chunk in index.chunks)
        return min(_THREADS, max(_MOST_HELD // largest, 1))

    def _chunk_schema(self, chunk: Chunk) -> pa.Schema:
        body = self.dataset.body(chunk)
        if isinstance(body, Rows):
            return rows_schema(body, self.dataset.place(chunk))
        assert isinstance(body, Items)
        return self._leaf_schema(chunk, body)

    def _check_link(self, body: Any) -> None:
        config, shown = self.dataset.index.config, self.dataset.store.shown
        why = None
        if config.compression is not None:
            why = f"its chunks are compressed ({config.compression})"
        elif config.encryption is not None:
            why = "its chunks are encrypted"
        elif isinstance(body, Rows):
            why = "its chunks hold rows of Arrow"
        elif not isinstance(body, Classic) or not body.in_file:
            why = "its chunks are compressed in frames"
        elif self.dataset.store.scheme not in _LINKED:
            why = f"Lance reads no ranges of {self.dataset.store.scheme}:// files"
        if why is not None:
            raise ArgumentError(f"{shown} cannot be linked, for {why}: use destrier.convert")

    def _nodes(self) -> dict[str, Node]:
        there = self.root.columns
        names = chosen(list(there), self.dataset.columns, self.dataset.store.shown)
        return {name: there[name] for name in names}

    def _codecs(self, nodes: Mapping[str, Node]) -> dict[int, tuple[str, Codec]]:
        config, file = self.dataset.index.config, self.dataset.index.file
        types = config.types if isinstance(config.types, dict) else {}
        return {
            leaf: (path, leaf_codec(config.data_format[leaf], path, kind, self._options, file))
            for name, node in nodes.items()
            for leaf, path, kind in _paths(node, name, types.get(name))
        }

    @property
    def _options(self) -> Any:
        return self.dataset.options

    def _leaf_schema(self, chunk: Chunk, body: Items) -> pa.Schema:
        nodes = self._nodes()
        codecs = self._codecs(nodes)
        place = self.dataset.place(chunk)
        open_types = [(path, codec) for path, codec in codecs.values() if codec.type is None]
        for window in body.windows():
            cells = self._cells(window, place)
            for leaf, (path, codec) in codecs.items():
                codec.observe(cells(leaf, path))
            if not open_types:
                break  # one is enough to find a wrong password
        fields = [_field(name, node, codecs) for name, node in nodes.items()]
        if self.dataset.link:
            fields = [_link_field(field, nodes[field.name], codecs) for field in fields]
            if not any(field.type.equals(LINK) for field in fields):
                raise ArgumentError(
                    f"{self.dataset.store.shown} has no column of bytes or media that could be "
                    "linked: use destrier.convert"
                )
        return pa.schema(fields, metadata=_source_metadata(self._origin()))

    def _origin(self) -> dict[str, Any]:
        config = self.dataset.index.config
        return {
            "loader": config.loader,
            "data_format": config.data_format,
            "data_spec": config.data_spec,
        }

    def _cells(self, window: Window, place: Place) -> Any:
        """A function that gives the values of a leaf in a window."""
        count = len(self.dataset.index.config.data_format)
        rows = Place(place.file, window.first)
        starts = window.bounds[:-1]
        lengths = window.bounds[1:] - starts
        if (short := np.flatnonzero(lengths < 4 * count)).size:
            row = int(short[0])
            raise rows.damaged(
                f"a sample of {lengths[row]:,} bytes is too short for the sizes of {count} values",
                row,
            )
        table = fixed(window.data, starts, 4 * count).view("<u4").reshape(-1, count)
        sizes = [table[:, leaf].astype(np.int64) for leaf in range(count)]
        ends = [sizes[0] + 4 * count]
        for size in sizes[1:]:
            ends.append(ends[-1] + size)
        if (odd := np.flatnonzero(ends[-1] != lengths)).size:
            row = int(odd[0])
            raise rows.damaged(
                f"a sample has {lengths[row]:,} bytes, but its {count} values {ends[-1][row]:,}",
                row,
            )

        def cells(leaf: int, path: str) -> Cells:
            size = sizes[leaf]
            return Cells(window.data, starts + ends[leaf] - size, size, rows.at(path))

        return cells

    def batches(self, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read a chunk."""
        body, place = self.dataset.body(chunk), self.dataset.place(chunk)
        if isinstance(body, Rows):
            self._check_rows(body, schema, place)
            yield from read_rows(body, schema, place)
            return
        assert isinstance(body, Items)
        if self.dataset.link and not (isinstance(body, Classic) and body.in_file):
            raise place.damaged("is no classic chunk, which alone can be linked")
        there = self.root.columns
        nodes = {field.name: there[field.name] for field in schema if field.name in there}
        codecs = self._codecs(nodes)
        for window in body.windows():
            cells = self._cells(window, place)
            arrays = [
                self._column(chunk, field, nodes.get(field.name), codecs, cells, window)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _check_rows(self, body: Rows, schema: pa.Schema, place: Place) -> None:
        """Rows of Arrow among classic chunks must have no other columns, and the same types."""
        merged = Merged(promote=self.promote)
        merged.add(schema, self.dataset.index.file)
        found = rows_schema(body, place)
        merged.add(found, place.file)
        if self.dataset.columns is None and len(merged.schema.names) != len(schema.names):
            extra = [name for name in found.names if name not in schema.names]
            raise SchemaError(
                f"{place.file} has columns that the first chunk lacks: {', '.join(extra)}",
                file=place.file,
            )

    def _column(
        self,
        chunk: Chunk,
        field: pa.Field,
        node: Node | None,
        codecs: Mapping[int, tuple[str, Codec]],
        cells: Any,
        window: Window,
    ) -> pa.Array:
        count = len(window.bounds) - 1
        if node is None:  # of another chunk's rows
            return pa.nulls(count, field.type)
        if field.type.equals(LINK):
            assert node.leaf is not None
            assert window.position is not None
            values = cells(node.leaf, field.name)
            return link_array(
                link_uri(self.dataset.store, chunk.file.path),
                values.starts + window.position,
                values.sizes,
                chunk.file.size,
                chunk.file.stamp,
            )
        return _array(node, field.type, codecs, cells, count)


def _paths(node: Node, path: str, types: Any) -> Iterable[tuple[int, str, Any]]:
    if node.leaf is not None:
        yield node.leaf, path, types
        return
    fields = types.get("fields") if isinstance(types, dict) else None
    for name, child in zip(node.names, node.children, strict=True):
        kind = fields.get(name) if isinstance(fields, dict) else None
        yield from _paths(child, f"{path}.{name}", kind)


def _field(name: str, node: Node, codecs: Mapping[int, tuple[str, Codec]]) -> pa.Field:
    if node.leaf is None:
        children = zip(node.names, node.children, strict=True)
        return pa.field(name, pa.struct([_field(n, child, codecs) for n, child in children]))
    _, codec = codecs[node.leaf]
    kind = codec.type
    return column_field(name, kind, codec.encoding, codec.content_type)


def _link_field(field: pa.Field, node: Node, codecs: Mapping[int, tuple[str, Codec]]) -> pa.Field:
    linked = node.leaf is not None and codecs[node.leaf][1].linkable
    return field.with_type(LINK) if linked else field


def _array(
    node: Node,
    kind: pa.DataType,
    codecs: Mapping[int, tuple[str, Codec]],
    cells: Any,
    count: int,
) -> pa.Array:
    if node.leaf is not None:
        path, codec = codecs[node.leaf]
        values = cells(node.leaf, path)
        if codec.type is not None and codec.type != kind and not pa.types.is_nested(kind):
            raise values.place.other_type(f"is {codec.type}, the column is {kind}", 0)
        return codec.decode(values, kind)
    children = [
        _array(child, kind.field(number).type, codecs, cells, count)
        for number, child in enumerate(node.children)
    ]
    if not children:
        return pa.Array.from_buffers(kind, count, [None])
    return pa.StructArray.from_arrays(children, fields=list(kind))


def _source_metadata(origin: Mapping[str, Any]) -> dict[bytes, bytes]:
    return {SOURCE_KEY: json.dumps({"format": "litdata", **origin}).encode()}
