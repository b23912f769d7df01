"""The order as a table: an order, or a list of rows, written down.

A permutation is one list of row offsets, or several named ones: its parts. Nothing is computed
until rows are asked for, so a permutation of a billion rows costs what describes it. `save` writes
it as a Lance table in bounded memory::

    row_offset   int64    the row of sample 0, 1, 2, ... of the part
    part         string   where there are named parts; a part's rows lie together

The identity of the permutation (which table, which rows, which order) is JSON under the key
``destrier`` of the schema's metadata.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.errors import (
    ArgumentError,
    EmptyError,
    ReadError,
    StateError,
    TableError,
    VersionError,
)
from destrier.lancecalls import lance_call
from destrier.lists import OrderedRows, SavedRows, digest_of
from destrier.order import ORDER_VERSION, Order
from destrier.saving import Place, find_place, on_one_thread
from destrier.table import Table, open_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import polars as pl

    from destrier.foreign import PermutationLike
    from destrier.selection import RowList
    from destrier.table import TableLike

__all__ = ["METADATA_KEY", "Part", "Permutation", "describe"]

METADATA_KEY = b"destrier"
_FORMAT = 1
_COMPUTED_ROWS = 1 << 18  # an order has a cost for each window that it opens
_BATCH_ROWS = 1 << 16  # Lance holds several batches while it writes
_SHOWN_PARTS = 4


@dataclass(frozen=True)
class Part:
    """A list of rows and its name; the name is None where there is only one list."""

    name: str | None
    rows: RowList


def describe(
    table: Table,
    *,
    filter: str | None = None,
    order: Order | None = None,
    num_splits: int = 1,
) -> dict[str, Any]:
    """Return what a permutation's identity says besides its parts.

    Args:
        table: The table whose rows are listed.
        filter: The filter that chose the rows.
        order: The order that they are in; None for table order, or one of a user's.
        num_splits: Lanes of the list, where no order says so.
    """
    shuffled = order if order is not None and order.shuffle else None
    return {
        "format": _FORMAT,
        "order_version": ORDER_VERSION,
        "table_identity": table.identity,
        "table_version": table.version,
        "filter": filter,
        "shuffle": shuffled is not None,
        "seed": shuffled and shuffled.seed,
        "epoch": shuffled and shuffled.epoch,
        "num_splits": order.num_splits if order is not None else num_splits,
        "clump_size": shuffled and shuffled.clump_size,
        "window": shuffled and (shuffled.window if shuffled.windowed else 1),
    }


class Permutation:
    """Rows of a table in a chosen order, in one list or in several named parts.

    Made by `PermutationBuilder.execute`, `Permutation.of_order` and `Permutation.open`; a
    stream takes it as ``permutation=``. A stream reads one list, so of several parts one is
    chosen: ``permutation["train"]``.

    Args:
        parts: The lists; a single one may be without a name.
        header: The identity apart from the parts, as `describe` returns it.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(10)}), uri)
        >>> from destrier.builder import PermutationBuilder
        >>> builder = PermutationBuilder(uri).shuffle(seed=5)
        >>> builder = builder.split_sequential(counts=[8, 2], names=["train", "val"])
        >>> permutation = builder.execute()
        >>> permutation
        Permutation(10 rows, parts: train 8, val 2)
        >>> path = permutation.save(uri.replace("numbers", "permutation"))
        >>> Permutation.open(path)["val"].to_arrow()["row_offset"].to_pylist()
        [8, 9]
    """

    def __init__(self, parts: Sequence[Part], header: Mapping[str, Any]) -> None:
        self._parts = list(parts)
        self._header = dict(header)

    @classmethod
    def of_order(
        cls, table: Table, rows: RowList, order: Order, *, filter: str | None = None
    ) -> Permutation:
        """Write an epoch's order down.

        Args:
            table: The table that the rows are of.
            rows: The selection, or any other list of rows.
            order: The order of its positions.
            filter: The filter that made the selection, for the identity.

        Returns:
            One list without a name. Its sample g is the order's, and so are its lanes.
        """
        plain = not order.shuffle and order.num_splits == 1
        listed = rows if plain else OrderedRows(rows, order)
        return cls([Part(None, listed)], describe(table, filter=filter, order=order))

    @classmethod
    def of(
        cls,
        source: PermutationLike,
        table: TableLike,
        *,
        version: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> Permutation:
        """Read any list of a table's rows: LanceDB's permutation tables, or a column of offsets.

        Args:
            source: A permutation table of LanceDB's builder (named splits become parts, unnamed
                ones lanes), or a pyarrow table, polars frame or Lance table with an integer column
                ``row_offset``, or just one integer column. Repeats are allowed.
            table: The table whose rows are listed.
            version: A version of it; LanceDB's tables bring theirs.
            storage_options: Passed to Lance untouched.

        Raises:
            ArgumentError: If an offset is null or out of range, or a row id unknown; names it.

        Example:
            >>> permutation = Permutation.of(pa.table({"row_offset": [2, 0, 2]}), "numbers.lance")
            ... # doctest: +SKIP
        """
        from destrier.foreign import as_permutation

        base = open_table(table, version=version, storage_options=storage_options)
        return as_permutation(source, base, storage_options=storage_options)[0]

    @classmethod
    def open(
        cls, source: TableLike, *, storage_options: Mapping[str, str] | None = None
    ) -> Permutation:
        """Open a saved permutation. Its rows are read when they are asked for.

        Args:
            source: A URI or path, a Lance dataset, or a LanceDB table.
            storage_options: Passed to Lance untouched.

        Raises:
            ArgumentError: If the table there is no saved permutation.
            StateError: If it was changed after it was saved, or is of a later format.
            TableError: If there is no table.
        """
        table = open_table(source, storage_options=storage_options)
        identity = _identity_of(table)
        header = {k: v for k, v in identity.items() if k not in ("parts", "count", "digest")}
        parts = [
            Part(part["name"], SavedRows(table, part["start"], part["count"], part["digest"]))
            for part in identity["parts"]
        ]
        return cls(parts, header)

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self._parts)

    def __repr__(self) -> str:
        text = f"Permutation({len(self)} rows"
        if self.parts:
            shown = [f"{part.name} {len(part.rows)}" for part in self._parts[:_SHOWN_PARTS]]
            more = len(self._parts) - len(shown)
            text += f", parts: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}"
        return text + (f", num_splits={self.num_splits})" if self.num_splits > 1 else ")")

    def __getitem__(self, name: str) -> Permutation:
        """Return the permutation of one part.

        Raises:
            ArgumentError: If there is no part of that name; the message lists the parts.
        """
        for part in self._parts:
            if part.name is not None and part.name == name:
                return Permutation([part], self._header)
        if not self.parts:
            raise ArgumentError(f"no part {name!r}: this permutation is one list without parts")
        raise ArgumentError(f"no part {name!r}; the parts are: {_listed(self.parts)}")

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in order; empty for a list without a name."""
        return [part.name for part in self._parts if part.name is not None]

    @property
    def rows(self) -> RowList:
        """The list of rows: its length, random access to its row offsets, and its digest.

        Raises:
            ArgumentError: If there are several parts, of which none was chosen.
            EmptyError: If the list is empty.
        """
        if len(self._parts) > 1:
            example = self.parts[0]
            raise ArgumentError(
                f"the permutation has the parts {_listed(self.parts)}: choose one, "
                f"for example permutation[{example!r}]"
            )
        part = self._parts[0]
        if not len(part.rows):
            what = "the permutation" if part.name is None else f"part {part.name!r}"
            raise EmptyError(f"{what} lists no rows")
        return part.rows

    @property
    def num_splits(self) -> int:
        """Lanes that the samples are dealt to, round robin."""
        return int(self._header["num_splits"])

    @property
    def version(self) -> int:
        """The version of the table that the rows are of."""
        return int(self._header["table_version"])

    @property
    def filter(self) -> str | None:
        """The filter that chose the rows, if there was one."""
        text: str | None = self._header["filter"]
        return text

    @property
    def identity(self) -> dict[str, Any]:
        """What is listed, in which order, as JSON values. It names no place and no credentials."""
        start = 0
        parts: list[dict[str, Any]] = []
        for part in self._parts:
            count = len(part.rows)
            found = {"name": part.name, "start": start, "count": count, "digest": part.rows.digest}
            parts.append(found)
            start += count
        if len(parts) == 1:
            digest = parts[0]["digest"]
        else:
            digest = digest_of([f"{p['name']}|{p['count']}|{p['digest']}" for p in parts])
        return {**self._header, "parts": parts, "count": start, "digest": digest}

    def check_table(self, table: Table) -> None:
        """Raise unless the permutation is one of this table's rows.

        Another version is fine if its rows are the same, so that at most columns were changed.

        Raises:
            StateError: If it was made for another table, or for other rows of it.
        """
        identity, version = self._header["table_identity"], self.version
        if table.identity == identity:
            return
        try:
            made_for = table.at(version)
        except VersionError:
            made_for = None
        known = made_for is not None and made_for.identity == identity
        if known and made_for is not None and made_for.same_rows(table):
            return
        advice = f"open the table with version={version}, or " if known else ""
        raise StateError(
            f"the permutation was made for table {identity} at version {version}, but "
            f"{table.name} is table {table.identity}: {advice}make the permutation again"
        )

    # ---- as a table -------------------------------------------------------------------------

    @property
    def schema(self) -> pa.Schema:
        """The schema of the table, with the identity in its metadata."""
        fields = [pa.field("row_offset", pa.int64(), nullable=False)]
        if self.parts:
            fields.append(pa.field("part", pa.string(), nullable=False))
        return pa.schema(fields, metadata={METADATA_KEY: json.dumps(self.identity).encode()})

    def to_batches(self, batch_size: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Yield the table in batches of at most so many rows; part after part."""
        schema = self.schema
        for part in self._parts:
            count = len(part.rows)
            for start in range(0, count, _COMPUTED_ROWS):
                positions = np.arange(start, min(start + _COMPUTED_ROWS, count))
                offsets = part.rows.offsets(positions)
                for i in range(0, len(offsets), batch_size):
                    # a copy, so that a batch that is kept does not keep its neighbours
                    columns = [pa.array(offsets[i : i + batch_size].copy())]
                    if part.name is not None:
                        name = pa.scalar(part.name, pa.string())
                        columns.append(pa.repeat(name, len(columns[0])))
                    yield pa.record_batch(columns, schema=schema)

    def to_arrow(self) -> pa.Table:
        """Return the whole table, in memory."""
        return pa.Table.from_batches(self.to_batches(), schema=self.schema)

    def to_polars(self) -> pl.DataFrame:
        """Return the whole table, in memory, as a polars frame. The identity is lost."""
        import polars as pl

        frame = pl.from_arrow(self.to_arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame

    def save(
        self,
        target: Any,
        name: str = "permutation",
        *,
        storage_options: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> str:
        """Write the permutation as a Lance table, in bounded memory.

        Args:
            target: The URI or path of the new dataset, or a LanceDB connection.
            name: Name of the table in the LanceDB connection; without meaning for a URI.
            storage_options: Passed to Lance untouched.
            overwrite: Replace a saved permutation that is already there, with a new version of it.
                Any other table stays.

        Returns:
            The URI, for `Permutation.open`.

        Raises:
            ArgumentError: If the target is of no known kind, or a table is there that may not be
                replaced.
            TableError: If it cannot be written.
        """
        place = find_place(target, name, storage_options)
        if place.table is not None:
            self._check_replaced(place.table, place, overwrite=overwrite)
        failed: list[Exception] = []

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                yield from on_one_thread(self.to_batches())
            except Exception as error:
                failed.append(error)
                raise

        mode = "create" if place.table is None else "overwrite"
        reader = pa.RecordBatchReader.from_batches(self.schema, batches())
        try:
            return str(lance_call("Lance", lambda: place.write(reader, mode)))
        except ReadError as error:
            if failed:
                raise failed[0] from None
            raise TableError(f"cannot save the permutation at {place.shown}: {error}") from error

    def _check_replaced(self, there: Table, place: Place, *, overwrite: bool) -> None:
        """Raise unless the table at a place is a saved permutation that is to be replaced."""
        rows = f"table {self._header['table_identity']} at version {self.version}"
        if self._lists(there):
            raise ArgumentError(
                f"{place.shown} is the table whose rows the permutation lists ({rows}), and is "
                "never replaced: choose another place"
            )
        names = there.schema.names
        saved = METADATA_KEY in (there.schema.metadata or {})
        if not saved or not {"row_offset"} <= set(names) <= {"row_offset", "part"}:
            raise ArgumentError(
                f"the table at {place.shown}, with the columns {', '.join(names)}, is no saved "
                f"permutation, and is not replaced by the permutation of {rows}: choose another "
                "place"
            )
        if not overwrite:
            raise ArgumentError(
                f"there is a permutation at {place.shown} already: choose another place, or "
                "replace it with overwrite=True"
            )

    def _lists(self, table: Table) -> bool:
        """Whether the rows that are listed are those of a version of the table."""
        identity = self._header["table_identity"]
        if table.identity == identity:
            return True
        try:
            return bool(table.at(self.version).identity == identity)
        except VersionError:
            return False


def _identity_of(table: Table) -> dict[str, Any]:
    text = (table.schema.metadata or {}).get(METADATA_KEY)
    if text is None or "row_offset" not in table.schema.names:
        raise ArgumentError(f"{table.name} is no saved permutation: its schema has no identity")
    try:
        identity: dict[str, Any] = json.loads(text)
        found, count = identity["format"], identity["count"]
        listed = sum(part["count"] for part in identity["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"the identity of the permutation {table.name} is damaged") from error
    if found != _FORMAT:
        raise StateError(
            f"the permutation {table.name} is of format {found}, this Destrier reads format "
            f"{_FORMAT}"
        )
    if not count == listed == table.num_rows:
        raise StateError(
            f"the permutation {table.name} was changed after it was saved: it was saved with "
            f"{count} rows and has {table.num_rows}"
        )
    return identity


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:20]]
    return ", ".join(shown) + (" ..." if len(names) > len(shown) else "")
