"""Tables as LitData datasets: classic chunks, which every version of litdata reads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError, SourceError, WriteError
from destrier.files import Store
from destrier.formats.gather import as_bytes, list_offsets, packed
from destrier.formats.litdata.arrays import NUMPY_TYPES, TORCH_TYPES
from destrier.formats.litdata.arraywriter import LeafError, Written, numbers_of
from destrier.formats.litdata.index import INDEX
from destrier.formats.litdata.leaves import PREFIX
from destrier.formats.litdata.spec import Node, dump_spec, load_spec
from destrier.formats.litdata.tokens import COLUMN
from destrier.formats.litdata.written import choose
from destrier.sink import Back, Sink
from destrier.writing.source import ENCODING_KEY, SOURCE_KEY

__all__ = ["LitDataSink", "open_sink"]

_CHUNK_BYTES = 64_000_000
_MOST_BYTES = (1 << 32) - 1
_NULL = (
    "is null, which LitData keeps only in JSON leaves: name the column in json=[...] (read by "
    "litdata 0.2.72 and later), leave such rows out with filter=, or the column with columns="
)


@dataclass(frozen=True)
class _Leaf:
    column: str
    fields: tuple[int, ...]
    written: Written


@dataclass(frozen=True)
class _Plan:
    """How the rows of a schema become items."""

    spec: str
    leaves: tuple[_Leaf, ...]
    loader: str = "PyTreeLoader"

    @property
    def data_format(self) -> list[str]:
        return [leaf.written.encoding for leaf in self.leaves]


class LitDataSink(Sink):
    """Writes chunks and their index.

    Args:
        tokens: The column whose lists of integers become a dataset for ``TokensLoader``. A table
            that came from one becomes one again.
        json: The columns that become JSON leaves, which hold nulls, and lists as lists.
        chunk_bytes: Of a chunk, at most, but for a single larger row.

    Example:
        >>> sink = LitDataSink(tokens="input_ids")  # doctest: +SKIP
    """

    format: ClassVar[str] = "litdata"

    def __init__(
        self,
        *,
        tokens: str | None = None,
        json: Sequence[str] = (),
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        if isinstance(json, str):
            raise ArgumentError(f"json is a list of columns: pass [{json!r}]")
        if type(chunk_bytes) is not int or not 1 <= chunk_bytes < _MOST_BYTES:
            raise ArgumentError(f"chunk_bytes must be below 4 GiB, got {chunk_bytes!r}")
        self.tokens = tokens
        self.json = tuple(json)
        self.chunk_bytes = chunk_bytes

    def check(self, schema: pa.Schema) -> None:
        """Raise unless LitData can hold every column."""
        self._plan(schema)

    def back(self, schema: pa.Schema) -> Back:
        """How an export of these columns is read again."""
        plan = self._plan(schema)
        ragged = [field.name for field in schema if _has_lists(field.type)]
        if plan.loader == "TokensLoader":
            return Back({plan.leaves[0].column: COLUMN})
        return Back({name: name for name in schema.names}, {"ragged": ragged})

    def write(self, store: Store, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        """Write a range of rows as one chunk or more."""
        chunks: _Chunks | None = None
        plan: _Plan | None = None
        rows = 0
        for batch in batches:
            if plan is None or chunks is None:
                plan = self._plan(batch.schema)
                chunks = _Chunks(store, number, self.chunk_bytes, plan.loader == "TokensLoader")
            chunks.add(*_items(plan, batch, rows))
            rows += batch.num_rows
        if plan is None or chunks is None:
            return {"chunks": [], "config": None}
        return {"chunks": chunks.close(), "config": self._config(plan)}

    def finish(self, store: Store, infos: list[Any]) -> None:
        """Write the index, at once and last."""
        configs = [info["config"] for info in infos if info["config"] is not None]
        if not configs:
            raise WriteError("LitData has no datasets without samples")
        index = {
            "chunks": [chunk for info in infos for chunk in info["chunks"]],
            "config": configs[0],
            "updated_at": str(time.time()),
        }
        draft = f"{INDEX}.tmp" if store.local else INDEX  # objects appear at once anyway
        with store.create(draft) as out:
            out.write(json.dumps(index, sort_keys=True).encode())
        if draft != INDEX:
            store.move(draft, store, INDEX)

    def _config(self, plan: _Plan) -> dict[str, Any]:
        return {
            "chunk_bytes": self.chunk_bytes,
            "chunk_size": None,
            "compression": None,
            "compression_batch_size": None,
            "compression_level": None,
            "data_format": plan.data_format,
            "data_spec": plan.spec,
            "encryption": None,
            "ipc_compression": None,
            "item_loader": plan.loader,
            "types": None,
        }

    def _plan(self, schema: pa.Schema) -> _Plan:
        origin = _origin(schema)
        tokens = self.tokens
        if tokens is None and origin.get("loader") == "TokensLoader" and schema.names == [COLUMN]:
            tokens = COLUMN
        if tokens is not None:
            return _token_plan(schema, tokens)
        _check_names(self.json, schema)
        refused: list[str] = []
        found: dict[str, tuple[Node, list[_Leaf]]] = {}
        roots = _root(origin, schema)
        for field in schema:
            known = None if roots is None else roots.columns[field.name]
            try:
                found[field.name] = self._column(field, known)
            except ValueError as error:
                refused.append(f"{field.name!r} ({field.type}): {error}")
        if refused:
            raise ColumnError("LitData cannot hold " + "; ".join(refused))
        names = list(schema.names if roots is None else roots.columns)
        leaves = tuple(leaf for name in names for leaf in found[name][1])
        if not leaves:
            raise ColumnError("LitData has no samples without a value: the columns hold none")
        nodes = tuple(found[name][0] for name in names)
        if roots is None:
            root = _dict(names, nodes)
        elif roots.leaf is not None:
            root = nodes[0]
        else:
            root = Node(roots.kind, roots.context, roots.names, nodes)
        return _Plan(dump_spec(root), leaves)

    def _column(self, field: pa.Field, known: Node | None) -> tuple[Node, list[_Leaf]]:
        leaves: list[_Leaf] = []
        as_json = field.name in self.json

        def visit(each: pa.Field, place: tuple[int, ...], node: Node | None) -> Node:
            written = choose(each, as_json=as_json)
            if written is not None:
                leaves.append(_Leaf(field.name, place, written))
                return Node(None, None, leaf=len(leaves))
            inner = list(each.type)
            if len({child.name for child in inner}) < len(inner):
                raise ValueError("it is a struct in which a field is named twice")
            same = node is not None and node.names == tuple(child.name for child in inner)
            children = node.children if node is not None and same else (None,) * len(inner)
            nodes = tuple(
                visit(child, (*place, number), children[number])
                for number, child in enumerate(inner)
            )
            if node is not None and same:
                return Node(node.kind, node.context, node.names, nodes)
            return _dict([child.name for child in inner], nodes)

        return visit(field, (), known), leaves


def open_sink(
    *, tokens: str | None = None, json: Sequence[str] = (), chunk_bytes: int = _CHUNK_BYTES
) -> LitDataSink:
    """Make what writes a LitData export; the arguments are those of `LitDataSink`."""
    return LitDataSink(tokens=tokens, json=json, chunk_bytes=chunk_bytes)


def _origin(schema: pa.Schema) -> dict[str, Any]:
    try:
        origin = json.loads((schema.metadata or {}).get(SOURCE_KEY, b"{}"))
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) and origin.get("format") == "litdata" else {}


def _root(origin: dict[str, Any], schema: pa.Schema) -> Node | None:
    """The tree of the samples that the table came from, if it has the same columns."""
    formats = origin.get("data_format")
    if not isinstance(formats, list):
        return None
    try:
        root = load_spec(origin.get("data_spec"), len(formats), "the table's metadata")
    except SourceError:
        return None
    return root if sorted(root.columns) == sorted(schema.names) else None


def _has_lists(kind: pa.DataType) -> bool:
    """Whether there are lists of any length somewhere in the type."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return True
    return pa.types.is_struct(kind) and any(_has_lists(field.type) for field in kind)


def _check_names(names: Sequence[str], schema: pa.Schema) -> None:
    for name in names:
        if name not in schema.names:
            raise ColumnError(
                f"json names {name!r}, but the columns are: {', '.join(schema.names)}"
            )


def _dict(names: Sequence[str], nodes: tuple[Node, ...]) -> Node:
    return Node("builtins.dict", json.dumps(list(names)), tuple(names), nodes)


def _token_plan(schema: pa.Schema, name: str) -> _Plan:
    if name not in schema.names:
        raise ColumnError(
            f"tokens={name!r} is not a column; the columns are: {', '.join(schema.names)}"
        )
    others = [other for other in schema.names if other != name]
    if others:
        raise ColumnError(
            f"a LitData dataset of tokens holds nothing else, but the table has also "
            f"{', '.join(map(repr, others))}: pass columns=[{name!r}]"
        )
    field = schema.field(name)
    kind = field.type
    one = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    one = one or pa.types.is_fixed_size_list(kind)
    one = one or (isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 1)
    dtype = str(np.dtype(kind.value_type.to_pandas_dtype())) if one else ""
    if dtype not in NUMPY_TYPES:
        raise ColumnError(f"tokens={name!r} is {kind}, not a column of lists of numbers")
    known = (field.metadata or {}).get(ENCODING_KEY, b"").decode(errors="replace")
    numpy = known.startswith(f"{PREFIX}no_header_numpy") or dtype not in TORCH_TYPES
    types = NUMPY_TYPES if numpy else TORCH_TYPES
    number = len(types) - 1 - types[::-1].index(dtype)
    encoding = f"no_header_{'numpy' if numpy else 'tensor'}:{number}"
    written = Written(encoding, _token_bytes)
    return _Plan(dump_spec(Node(None, None, leaf=0)), (_Leaf(name, (), written),), "TokensLoader")


def _token_bytes(array: pa.Array) -> pa.LargeBinaryArray:
    numbers = numbers_of(array)
    values = np.ascontiguousarray(numbers.values)
    offsets = numbers.offsets * values.itemsize
    return pa.Array.from_buffers(
        pa.large_binary(), len(array), [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    )


def _items(plan: _Plan, batch: pa.RecordBatch, rows: int) -> tuple[pa.LargeBinaryArray, Any]:
    """The items of a batch, and for tokens how many each has."""

    def fault(leaf: _Leaf, row: int, what: str) -> SourceError:
        return SourceError(f"column {leaf.column!r} {what}", row=rows + row, column=leaf.column)

    parts = []
    for leaf in plan.leaves:
        array = batch.column(leaf.column)
        try:
            for place in leaf.fields:
                _no_nulls(array)
                array = pa.concat_arrays([array]).field(place)
            if leaf.written.encoding != "json":
                _no_nulls(array)
            part = leaf.written.encode(array)
        except LeafError as error:
            raise fault(leaf, error.row, str(error)) from None
        sizes = np.diff(np.frombuffer(part.buffers()[1], np.int64)[part.offset :][: len(part) + 1])
        if (large := np.flatnonzero(sizes > _MOST_BYTES)).size:
            raise fault(leaf, int(large[0]), "has more than 4 GiB, which LitData cannot hold")
        parts.append((part, sizes))
    if plan.loader == "TokensLoader":
        part, sizes = parts[0]
        width = np.dtype(batch.column(0).type.value_type.to_pandas_dtype()).itemsize
        return part, sizes // width
    heads = np.column_stack([sizes for _, sizes in parts]).astype("<u4")
    ends = np.arange(batch.num_rows + 1, dtype=np.int64) * (4 * len(parts))
    head = pa.Array.from_buffers(
        pa.large_binary(), batch.num_rows, [None, pa.py_buffer(ends), pa.py_buffer(heads)]
    )
    empty = pa.scalar(b"", pa.large_binary())
    columns = [part for part, _ in parts]
    return pa.compute.binary_join_element_wise(head, *columns, empty), None


def _no_nulls(array: pa.Array) -> None:
    if array.null_count:
        raise LeafError(_NULL, array.is_null().index(True).as_py())


class _Chunks:
    """Collects items, and writes a chunk whenever the next item would make it too large."""

    def __init__(self, store: Store, number: int, most: int, tokens: bool) -> None:
        self.store, self.number, self.most, self.tokens = store, number, most, tokens
        self.entries: list[dict[str, Any]] = []
        self._parts: list[Any] = []
        self._sizes: list[Any] = []
        self._held = 0
        self._dim = 0

    def add(self, items: pa.LargeBinaryArray, dims: Any) -> None:
        data = packed(items)
        offsets = np.frombuffer(items.buffers()[1], np.int64)[items.offset :][: len(items) + 1]
        offsets = offsets - offsets[0]
        start = 0
        while start < len(items):
            limit = offsets[start] + self.most - self._held
            stop = int(np.searchsorted(offsets, limit, "right")) - 1
            if stop <= start and self._held:
                self._flush()
                continue
            stop = min(max(stop, start + 1), len(items))
            self._parts.append(data[offsets[start] : offsets[stop]])
            self._sizes.append(np.diff(offsets[start : stop + 1]))
            self._held += int(offsets[stop] - offsets[start])
            self._dim += 0 if dims is None else int(dims[start:stop].sum())
            start = stop

    def _flush(self) -> None:
        sizes = np.concatenate(self._sizes)
        header = 4 + 4 * (len(sizes) + 1)
        offsets = list_offsets(sizes) + header
        name = f"chunk-{self.number}-{len(self.entries)}.bin"
        if offsets[-1] > _MOST_BYTES:
            raise SourceError(
                f"{name} would have {offsets[-1]:,} bytes, LitData's chunks have less than 4 GiB: "
                "pass a smaller chunk_bytes, or leave the large column out with columns="
            )
        with self.store.create(name) as out:
            out.write(np.uint32(len(sizes)).tobytes())
            out.write(as_bytes(offsets.astype("<u4")))
            for part in self._parts:
                out.write(part)
        self.entries.append(
            {
                "chunk_bytes": int(offsets[-1]),
                "chunk_size": len(sizes),
                "dim": self._dim if self.tokens else None,
                "filename": name,
            }
        )
        self._parts, self._sizes, self._held, self._dim = [], [], 0, 0

    def close(self) -> list[dict[str, Any]]:
        """Write what is left, and return the entries of all chunks."""
        if self._sizes:
            self._flush()
        return self.entries
