"""Rows of Python values as Arrow batches of one schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from destrier.encoding.copies import copied
from destrier.encoding.frozen import FIXED, freeze
from destrier.encoding.images import IMAGE_TYPE, Picture
from destrier.encoding.misfit import Misfit, shown
from destrier.encoding.values import encode
from destrier.errors import SchemaError, SourceError
from destrier.writing.kept import unkept
from destrier.writing.source import BATCH_BYTES

__all__ = ["Row", "RowEncoder"]

Row: TypeAlias = "Mapping[str, Any] | pa.RecordBatch | pa.Table"
"""A row, or several of them as a batch."""

_MOST_ROWS = 4096  # in a batch
_MOST_CELLS = 1 << 18
_SHOWN = 200  # characters of a type


class RowEncoder:
    """Makes batches of rows: Python, NumPy, torch and PIL values get their natural Arrow types.

    Without a schema the rows of the first batch fix it. It is enforced: a row that lacks a column,
    has one more, or has a value of another type is an error.

    Args:
        schema: Of all batches, or None to find it.
        declared: The schema was declared by the user: values are converted to its types, exactly
            or not at all. Otherwise a value must have its column's type.

    Example:
        >>> encoder = RowEncoder()
        >>> [batch.num_rows for batch in encoder.batches([{"a": 1}, {"a": 2}])]
        [2]
        >>> encoder.schema
        a: int64
    """

    def __init__(self, schema: pa.Schema | None = None, *, declared: bool = False) -> None:
        if schema is not None:
            _check_schema(schema)
        self.schema = schema
        self.declared = declared and schema is not None

    def batches(
        self,
        rows: Iterable[Row],
        first_row: int = 0,
        *,
        name: Callable[[int], str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Encode rows to batches of at most `BATCH_BYTES` or one row.

        Args:
            rows: Dicts of values by column, or batches of rows. They are held until there are
                enough for a batch; values that may change are copied as they come.
            first_row: Number of the first row, for errors.
            name: From a row's number to what errors call it.

        Raises:
            SchemaError: If a row has other columns or types than those before it.
            SourceError: If a value has no Arrow type that keeps it exactly.
        """
        held = _Held(self, first_row, name or (lambda row: f"row {row}"))
        for row in rows:
            yield from held.add(row)
        yield from held.flush()


class _Held:
    """The rows of the next batch."""

    def __init__(self, encoder: RowEncoder, row: int, name: Callable[[int], str]) -> None:
        self.encoder = encoder
        self.row = row  # of the first one held
        self.name = name
        self.rows: list[tuple[Any, ...]] = []
        self.nbytes = 0
        self.names: list[str] | None = None
        if encoder.schema is not None:
            self._take(encoder.schema.names)

    def _take(self, names: list[str]) -> None:
        if not names:
            raise SourceError(f"{self.name(self.row)} has no columns", row=self.row)
        self.names = names
        self.cells = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)
        self.most = max(1, min(_MOST_ROWS, _MOST_CELLS // len(names)))

    def add(self, row: Row) -> Iterable[pa.RecordBatch]:
        """Take a row; the batches that are full by then."""
        if type(row) is not dict:
            if isinstance(row, pa.RecordBatch | pa.Table):
                return self._whole(row)
            if not isinstance(row, Mapping):
                at = self.row + len(self.rows)
                raise SourceError(
                    f"{self.name(at)} is {shown(row)}: a row is a dict, such as {{'name': value}}",
                    row=at,
                )
        if self.names is None:
            self._first(row)
        assert self.names is not None
        try:
            cells = self.cells(row)
        except KeyError:
            raise self._other_columns(row) from None
        if len(row) != len(self.names):
            raise self._other_columns(row)
        if FIXED.issuperset(map(type, cells)):
            self.rows.append(cells)
            return self.flush() if len(self.rows) >= self.most else ()
        frozen, nbytes = self._freeze(cells)
        full: Sequence[pa.RecordBatch] = ()
        if self.rows and (self.nbytes + nbytes > BATCH_BYTES or len(self.rows) >= self.most):
            full = self.flush()
        self.rows.append(frozen)
        self.nbytes += nbytes
        return full

    def _first(self, row: Mapping[str, Any]) -> None:
        for key in row:
            if not isinstance(key, str) or not key:
                raise SourceError(
                    f"{self.name(self.row)} has a key {key!r}: the keys of a row are the names of "
                    "its columns",
                    row=self.row,
                )
        self._take(list(row))

    def _other_columns(self, row: Mapping[str, Any]) -> SchemaError:
        names = self.names or []
        lacking = [name for name in names if name not in row]
        more = [str(name) for name in row if name not in names]
        at = self.row + len(self.rows)
        text = f"{self.name(at)} "
        if lacking:
            text += f"lacks the column {lacking[0]!r}: give it as None if it is null"
        else:
            since = "the schema" if self.encoder.declared else "the rows before it"
            text += f"has a column {more[0]!r} that {since} lack{'s' * self.encoder.declared}"
        return SchemaError(
            f"{text}; its columns: {', '.join(map(str, row))}; those of the others: "
            f"{', '.join(names)}",
            row=at,
            column=lacking[0] if lacking else more[0],
        )

    def _freeze(self, cells: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
        frozen, nbytes = [], 0
        for number, value in enumerate(cells):
            try:
                kept, taken = freeze(value)
            except RecursionError:
                deep = Misfit(
                    len(self.rows), "it is nested too deeply, or holds itself", refused=True
                )
                raise self._error(deep, self._name(number)) from None
            except Misfit as misfit:
                raise self._error(misfit.at(len(self.rows)), self._name(number)) from misfit
            frozen.append(kept)
            nbytes += taken
        return tuple(frozen), nbytes

    def _name(self, number: int) -> str:
        assert self.names is not None
        return self.names[number]

    def _error(self, misfit: Misfit, column: str) -> SourceError:
        at = self.row + misfit.index
        kind = SourceError if misfit.refused else SchemaError
        return kind(
            f"{self.name(at)}, column {column!r}{misfit.path}: {misfit.text}", row=at, column=column
        )

    def flush(self) -> Sequence[pa.RecordBatch]:
        """The batches of the rows that are held."""
        if not self.rows:
            return ()
        assert self.names is not None
        columns = list(zip(*self.rows, strict=True))
        schema = self.encoder.schema
        arrays = []
        for number, (name, values) in enumerate(zip(self.names, columns, strict=True)):
            field = None if schema is None else schema.field(number)
            want = None if field is None else field.type
            try:
                array = encode(values, want, declared=self.encoder.declared)
                if field is not None and not field.nullable and array.null_count:
                    raise Misfit(values.index(None), "is null, which the schema does not allow")
            except Misfit as misfit:
                raise self._error(misfit, name) from None
            arrays.append(array)
        if schema is None:
            schema = _schema(self.names, arrays, columns)
            _check_schema(schema)
            self.encoder.schema = schema
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        self.row += len(self.rows)
        self.rows = []
        self.nbytes = 0
        return _pieces(batch)

    def _whole(self, table: pa.RecordBatch | pa.Table) -> Iterator[pa.RecordBatch]:
        """Take a batch of rows as it is; copied, for its buffers may be filled anew."""
        yield from self.flush()
        if not table.num_rows:
            return
        schema = self.encoder.schema
        if schema is None:
            schema = pa.schema(list(table.schema))
            if not schema.names:
                raise SourceError(f"{self.name(self.row)} has no columns", row=self.row)
            _check_schema(schema)
            self.encoder.schema = schema
            self._take(schema.names)
        names = schema.names
        if sorted(table.schema.names) != sorted(names):
            raise SchemaError(
                f"a batch at {self.name(self.row)} has the columns "
                f"{', '.join(table.schema.names)}, but the rows before it have {', '.join(names)}",
                row=self.row,
            )
        if table.schema.names != names:
            table = table.select(names)
        for field in schema:
            self._check_column(table, field)
        for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
            columns = [
                pa.nulls(batch.num_rows, field.type) if column.type != field.type else column
                for column, field in zip(batch.columns, schema, strict=True)
            ]
            for piece in _pieces(pa.RecordBatch.from_arrays(columns, schema=schema)):
                yield copied(piece)
        self.row += table.num_rows

    def _check_column(self, table: pa.RecordBatch | pa.Table, field: pa.Field) -> None:
        have = table.schema.field(field.name).type
        column = table.column(field.name)
        if have != field.type and column.null_count < len(column):
            raise SchemaError(
                f"column {field.name!r} of a batch at {self.name(self.row)} is {have}, but that of "
                f"the rows before it is {field.type}; nothing is coerced: cast it"
                + (", or declare schema=" * (not self.encoder.declared)),
                row=self.row,
                column=field.name,
            )
        if not field.nullable and column.null_count:
            raise SchemaError(
                f"column {field.name!r} of a batch at {self.name(self.row)} has nulls, which the "
                "schema does not allow",
                row=self.row,
                column=field.name,
            )


def _schema(
    names: Sequence[str], arrays: Sequence[pa.Array], columns: Sequence[Sequence[Any]]
) -> pa.Schema:
    fields = []
    for name, array, values in zip(names, arrays, columns, strict=True):
        pictures = {type(value) for value in values} - {type(None)} == {Picture}
        metadata = {b"content_type": IMAGE_TYPE} if pictures else None
        fields.append(pa.field(name, array.type, metadata=metadata))
    return pa.schema(fields)


def _pieces(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The batch in parts of at most `BATCH_BYTES` or one row."""
    if not batch.num_rows:
        return []
    if batch.nbytes <= BATCH_BYTES or batch.num_rows == 1:
        return [batch]
    half = batch.num_rows // 2
    return [*_pieces(batch.slice(0, half)), *_pieces(batch.slice(half))]


def _check_schema(schema: pa.Schema) -> None:
    for i, field in enumerate(schema):
        if field.name in schema.names[:i]:
            raise SchemaError(f"there are two columns {field.name!r}", column=field.name)
        lost = unkept(field.type)
        if lost is not None:
            raise SchemaError(
                f"column {field.name!r} is {_short(field.type)}, and a table cannot hold {lost}",
                column=field.name,
            )


def _short(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
