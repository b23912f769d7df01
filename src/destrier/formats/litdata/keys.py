"""The keys that LitData keeps beside a dataset, as a column."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from destrier.errors import SourceError
from destrier.files import Store
from destrier.formats.litdata.index import Index

__all__ = ["has_keys", "read_keys"]

_FOLDER, _SINGLE = "keys", "keys.parquet"
_PARTIAL = re.compile(r"\d+\.keys\.parquet")  # of an unfinished dataset, each from row 0
_FAILURES = (pa.ArrowException, OSError, MemoryError, ValueError)


def _files(store: Store) -> list[str]:
    shards = [
        file.path
        for file in store.files(_FOLDER, recursive=False)
        if file.path.startswith(f"{_FOLDER}/shard-") and file.path.endswith(".parquet")
    ]
    if shards:
        return shards
    if store.stat(_SINGLE) is not None:
        return [_SINGLE]
    names = [file.path for file in store.files(recursive=False)]
    return [name for name in names if _PARTIAL.fullmatch(name)]


def has_keys(store: Store, index: Index) -> bool:
    """Whether there are keys.

    Raises:
        SourceError: If the index lists keys that are not there.
    """
    found = len(_files(store))
    if index.keys and found != index.keys:
        raise SourceError(
            f"{index.file} lists {index.keys} files of keys, but there are {found} in "
            f"{store.show(_FOLDER)}; pass key_column=None to leave the keys out",
            file=index.file,
        )
    return found > 0


def read_keys(store: Store, index: Index) -> pa.Array:
    """The keys in the order of the samples.

    Raises:
        SourceError: If a key is there twice, or they do not fit the samples one to one.
    """
    tables: list[Any] = []
    names = _files(store)
    for name in names:
        before = sum(table.num_rows for table in tables) if _PARTIAL.fullmatch(names[0]) else 0
        tables.append(_read(store, name, before))
    shown = store.show(_FOLDER)
    kinds = {table.schema.field("key").type for table in tables if table.num_rows}
    if len(kinds) > 1:
        raise SourceError(f"{shown} has keys of the types {', '.join(map(str, kinds))}", file=shown)
    table = pa.concat_tables([table for table in tables if table.num_rows] or tables[:1])
    places = table.column("index").to_numpy()
    if table.num_rows != index.rows or not (np.sort(places) == np.arange(index.rows)).all():
        raise SourceError(
            f"{shown} has {table.num_rows:,} keys that do not belong one to one to the "
            f"{index.rows:,} samples; pass key_column=None to leave them out",
            file=shown,
        )
    keys = table.column("key").combine_chunks()
    if len(pc.unique(keys)) != len(keys):
        counts = pc.value_counts(keys)
        twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")[0].as_py()
        raise SourceError(f"{shown} has the key {twice!r} twice", file=shown)
    _check_chunks(table, places, index, shown)
    return keys.take(pa.array(np.argsort(places)))


def _read(store: Store, name: str, before: int) -> Any:
    shown = store.show(name)
    try:
        table = pq.ParquetFile(store.open(name)).read()
        table.validate(full=True)
    except _FAILURES as error:
        raise SourceError(f"{shown} cannot be read: {error}", file=shown) from None
    if not {"key", "index"} <= set(table.schema.names):
        raise SourceError(f"{shown} lacks the columns key and index", file=shown)
    kind = table.schema.field("key").type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        number = table.schema.get_field_index("key")
        table = table.set_column(number, "key", table.column("key").cast(pa.string()))
        kind = pa.string()
    if kind not in (pa.string(), pa.int64()) or table.schema.field("index").type != pa.int64():
        raise SourceError(f"{shown} has keys of type {kind}, which LitData does not", file=shown)
    names = [name for name in ("key", "index", "chunk_index") if name in table.schema.names]
    if any(table.column(name).null_count for name in names):
        raise SourceError(f"{shown} has a null among its keys", file=shown)
    if before:
        number = table.schema.get_field_index("index")
        table = table.set_column(number, "index", pc.add(table.column("index"), before))
    return table.select(names)


def _check_chunks(table: Any, places: Any, index: Index, shown: str) -> None:
    if "chunk_index" not in table.schema.names:
        return
    ends = np.cumsum([chunk.rows for chunk in index.chunks])
    numbers = np.array([chunk.number for chunk in index.chunks])
    wanted = numbers[np.searchsorted(ends, places, "right")]
    if (table.column("chunk_index").to_numpy() != wanted).any():
        raise SourceError(
            f"{shown} places its keys in other chunks than the index lists; pass key_column=None "
            "to leave them out",
            file=shown,
        )
