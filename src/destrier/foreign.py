"""Lists of rows that others made, as permutations.

Three kinds of table are understood: a saved `Permutation`; a table of LanceDB's own permutation
builder (``row_id``, ``split_id``); and any other table with a column of row offsets, such as a
curriculum that a user worked out.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import lance
import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError, EmptyError, StateError
from destrier.lancecalls import lance_call
from destrier.lists import SavedRows, scan
from destrier.permutation import METADATA_KEY, Part, Permutation, describe
from destrier.selection import OffsetRows
from destrier.table import Table, open_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from destrier.table import TableLike

    PermutationLike: TypeAlias = (
        "Permutation | TableLike | pa.Table | pa.RecordBatch | pa.RecordBatchReader | Any"
    )

__all__ = ["as_permutation"]

_PIECE = 1 << 18
_MOST_LANES = 1 << 20
_KEPT_ROWS = 1 << 20  # longer lists in a Lance table stay there


def as_permutation(
    source: PermutationLike,
    table: Table,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> tuple[Permutation, Table]:
    """Return any list of rows as a permutation, and the table that it is to be read from.

    A source is one of:

    - A `Permutation`, or the path or URI of a saved one. It must be one of this table's rows.
    - A table of LanceDB's own builder. Its rows are those of the table at its ``base_version``,
      which is the version returned. Splits with names are parts: choose one by name. Splits
      without names are lanes: sample g is row g // S of lane g % S, where S is the number of
      lanes; the lanes of the permutation are these. Rows of a lane beyond the length of the
      shortest are left out, as LanceDB's stream does.
    - A pyarrow Table, RecordBatch or reader, a polars frame, a Lance dataset, its path or URI,
      or a LanceDB table, with an integer column ``row_offset``, or with exactly one integer
      column. Repeats are allowed. A column ``part`` of strings makes parts; their rows keep
      their order.

    Args:
        source: The list.
        table: The table, pinned, that the rows are of.
        storage_options: Passed to Lance untouched, to open a source by its URI.

    Returns:
        The permutation, and the table: at another version only for LanceDB's, where rows changed.

    Raises:
        ArgumentError: If the source is of no known kind, or an offset or row id is null or is
            not in the table; the message names the first one and its place.
        ColumnError: If there is no column of row offsets.
        EmptyError: If no rows are listed.
        StateError: If a permutation was made for another table, or for other rows of it.

    Example:
        >>> import tempfile
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(10)}), uri)
        >>> hard_ones = pa.table({"row_offset": [3, 1, 3]})
        >>> permutation, _ = as_permutation(hard_ones, open_table(uri))
        >>> permutation.rows.offsets(np.arange(3)).tolist()
        [3, 1, 3]
    """
    if isinstance(source, Permutation):
        source.check_table(table)
        return source, table
    if isinstance(source, str | os.PathLike | lance.LanceDataset | Table):
        return _from_stored(open_table(source, storage_options=storage_options), table)
    if any(kind.__module__.startswith("lancedb") for kind in type(source).__mro__):
        if str(getattr(source, "uri", "")).startswith("memory://"):
            return _from_arrow(source.to_arrow(), table)  # where LanceDB's builder leaves them
        return _from_stored(open_table(source, storage_options=storage_options), table)
    if isinstance(source, pa.RecordBatch):
        return _from_arrow(pa.Table.from_batches([source]), table)
    if isinstance(source, pa.Table) or hasattr(source, "__arrow_c_stream__"):
        try:
            data = pa.table(source)
        except pa.ArrowInvalid:  # a column, such as a polars series
            data = None
        if data is not None:
            return _from_arrow(data, table)
    raise ArgumentError(
        "a permutation is a Permutation, the path or URI of one, a table of LanceDB's permutation "
        "builder, or an Arrow, polars or Lance table with a column row_offset, "
        f"got {type(source).__name__}; put rows that are no table into one: "
        'pa.table({"row_offset": rows}), after import pyarrow as pa'
    )


def _from_stored(stored: Table, table: Table) -> tuple[Permutation, Table]:
    schema = stored.schema
    if METADATA_KEY in (schema.metadata or {}):
        permutation = Permutation.open(stored)
        permutation.check_table(table)
        return permutation, table
    if _is_lancedb(schema) or "part" in schema.names:
        what = f"cannot read the permutation {stored.name}"
        return _from_arrow(lance_call(what, stored.dataset.to_table), table)
    return _from_column(stored, table), table


def _from_arrow(data: pa.Table, table: Table) -> tuple[Permutation, Table]:
    if _is_lancedb(data.schema):
        return _from_lancedb(data, table)
    name = _offset_column(data.schema)
    if not data.num_rows:
        raise EmptyError("the permutation lists no rows")
    offsets = _offsets(data.column(name), 0, table)
    header = describe(table)
    if METADATA_KEY in (data.schema.metadata or {}):
        header = _kept_header(data, header, table)
    if name == "row_offset" and "part" in data.schema.names:
        return Permutation(_parts(offsets, data.column("part")), header), table
    return Permutation([Part(None, OffsetRows(offsets))], header), table


def _kept_header(data: pa.Table, header: dict[str, Any], table: Table) -> dict[str, Any]:
    """The header of a table that `Permutation.to_arrow` made, whose rows may have been changed.

    What it says of the table is checked, and the lanes hold if no row is missing. What it says
    of the order need not be true any more.
    """
    try:
        identity = json.loads(data.schema.metadata[METADATA_KEY])
        lanes = identity["num_splits"] if identity["count"] == data.num_rows else 1
        checked = Permutation([], {k: identity[k] for k in ("table_identity", "table_version")})
    except (ValueError, KeyError, TypeError) as error:
        raise StateError("the identity in the metadata of the permutation is damaged") from error
    checked.check_table(table)
    return {**header, "num_splits": lanes, "filter": identity.get("filter")}


def _parts(offsets: NDArray[np.int64], names: pa.ChunkedArray) -> list[Part]:
    """Named lists, in the order in which their names first appear."""
    if names.null_count:
        raise ArgumentError(f"part is null at row {_first_null(names)} of the permutation")
    coded = names.cast(pa.string()).combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy()
    return [
        Part(name, OffsetRows(offsets[codes == code]))
        for code, name in enumerate(coded.dictionary.to_pylist())
    ]


# ---- columns of row offsets -----------------------------------------------------------------


def _offset_column(schema: pa.Schema) -> str:
    def integer(field: pa.Field) -> bool:
        return bool(pa.types.is_integer(field.type))

    if "row_offset" in schema.names:
        field = schema.field("row_offset")
        if not integer(field):
            raise ColumnError(f"the column row_offset must hold integers, it is {field.type}")
        return "row_offset"
    found = [field.name for field in schema if integer(field)]
    if len(found) != 1:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
        raise ColumnError(
            "a permutation needs a column row_offset, or exactly one integer column; "
            f"this one has the columns: {columns}"
        )
    return str(found[0])


def _first_null(column: pa.ChunkedArray | pa.Array) -> int:
    return int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])


def _offsets(column: pa.ChunkedArray | pa.Array, first: int, table: Table) -> NDArray[np.int64]:
    """The column as row offsets; the first bad one is an error that names it and its place."""
    n = table.num_rows
    if column.null_count:
        place = first + _first_null(column)
        raise ArgumentError(
            f"the row offset at row {place} of the permutation is null; {table.name} has {n} rows"
        )
    values = column.to_numpy()
    bad = np.flatnonzero((values < 0) | (values >= n))
    if len(bad):
        raise ArgumentError(
            f"the row offset {values[bad[0]]} at row {first + bad[0]} of the permutation is out "
            f"of range: {table.name} has {n} rows"
        )
    return np.ascontiguousarray(values, np.int64)


def _from_column(stored: Table, table: Table) -> Permutation:
    """Check the column of a Lance table by one scan; a long list then stays where it is."""
    name = _offset_column(stored.schema)
    count = stored.num_rows
    if not count:
        raise EmptyError(f"the permutation {stored.name} lists no rows")
    digest = hashlib.blake2b(b"offsets", digest_size=16)  # as OffsetRows has it
    kept: list[NDArray[np.int64]] = []
    first = 0
    what = f"cannot read the permutation {stored.name}"
    for batch in scan(stored, [name], None, what):
        offsets = _offsets(batch.column(0), first, table)
        digest.update(offsets.data)
        first += len(offsets)
        if count <= _KEPT_ROWS:
            kept.append(offsets)
    if kept:
        rows: OffsetRows | SavedRows = OffsetRows(np.concatenate(kept))
    else:
        rows = SavedRows(stored, 0, count, digest.hexdigest(), column=name)
    return Permutation([Part(None, rows)], describe(table))


# ---- LanceDB's own builder ------------------------------------------------------------------


def _is_lancedb(schema: pa.Schema) -> bool:
    return {"row_id", "split_id"} <= set(schema.names)


def _from_lancedb(data: pa.Table, table: Table) -> tuple[Permutation, Table]:
    if not data.num_rows:
        raise EmptyError("the permutation lists no rows")
    metadata = data.schema.metadata or {}
    pinned = _base(metadata, table)
    for name in ("row_id", "split_id"):
        if data.column(name).null_count:
            place = _first_null(data.column(name))
            raise ArgumentError(f"{name} is null at row {place} of the permutation")
    lanes = data.column("split_id").to_numpy()
    bad = np.flatnonzero((lanes < 0) | (lanes >= _MOST_LANES))
    if len(bad):
        raise ArgumentError(f"split_id is {lanes[bad[0]]} at row {bad[0]} of the permutation")
    lanes = lanes.astype(np.int64)
    offsets = _translate(data.column("row_id").to_numpy().astype(np.uint64), pinned)
    grouped = np.argsort(lanes, kind="stable")
    sizes = np.bincount(lanes)
    lists = np.split(offsets[grouped], np.cumsum(sizes)[:-1])
    names = json.loads(metadata.get(b"split_names", b"[]"))
    if names:
        called = [*names, *map(str, range(len(names), len(lists)))]
        lists += [offsets[:0]] * (len(called) - len(lists))
        parts = [Part(name, OffsetRows(rows)) for name, rows in zip(called, lists, strict=True)]
        permutation = Permutation(parts, describe(pinned))
    else:
        shortest = int(sizes.min())
        if not shortest:
            raise EmptyError(
                f"split_id {int(sizes.argmin())} of the permutation has no rows, so no sample "
                f"can be dealt to the {len(lists)} lanes in turn"
            )
        dealt = np.stack([rows[:shortest] for rows in lists], axis=1).ravel()
        header = describe(pinned, num_splits=len(lists))
        permutation = Permutation([Part(None, OffsetRows(dealt))], header)
    return permutation, table if pinned.same_rows(table) else pinned


def _base(metadata: Mapping[bytes, bytes], table: Table) -> Table:
    """The table at the version that LanceDB's builder saw."""
    branch = metadata.get(b"base_branch", b"").decode() or "main"
    shown = table.uri.rpartition("/tree/")[2] if "/tree/" in table.uri else "main"
    if branch != shown:
        raise StateError(
            f"the permutation was made for the branch {branch!r} of a table, but {table.name} "
            f"is on the branch {shown!r}"
        )
    version = metadata.get(b"base_version")
    return table if version is None or int(version) == table.version else table.at(int(version))


def _translate(ids: NDArray[np.uint64], table: Table) -> NDArray[np.int64]:
    """Row ids as row offsets, by one scan of both."""
    known = np.empty(table.num_rows, np.uint64)
    offsets = np.empty(table.num_rows, np.int64)
    if not len(known):
        raise EmptyError(f"{table.name} has no rows")
    first = 0
    what = f"cannot read the row ids of {table.name}"
    for batch in scan(table, ["_rowid", "_rowoffset"], None, what):
        piece = slice(first, first + batch.num_rows)
        known[piece] = batch.column("_rowid").to_numpy()
        offsets[piece] = batch.column("_rowoffset").to_numpy()
        first += batch.num_rows
    if (known[1:] < known[:-1]).any():
        ascending = np.argsort(known)
        known, offsets = known[ascending], offsets[ascending]
    out = np.empty(len(ids), np.int64)
    for i in range(0, len(ids), _PIECE):
        wanted = ids[i : i + _PIECE]
        found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        unknown = np.flatnonzero(known[found] != wanted)
        if len(unknown):
            raise ArgumentError(
                f"row id {wanted[unknown[0]]} at row {i + unknown[0]} of the permutation is not "
                f"in {table.name}, which has {len(known)} rows"
            )
        out[i : i + _PIECE] = offsets[found]
    return out
