"""Values of a column, or of an SQL expression, for the rows of a view: by one scan of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from destrier.errors import ArgumentError, ColumnError, ReadError
from destrier.keyed import Ints
from destrier.lists import scan
from destrier.membership import hashable
from destrier.rowlists import chunks
from destrier.selection import RangeRows
from destrier.table import Table
from destrier.view import View
from destrier.writing.layout import is_blob

__all__ = ["Classes", "classes", "evaluate", "numbers"]


@dataclass(frozen=True)
class Classes:
    """The distinct values of an expression.

    Attributes:
        codes: For each row of the view which value it has.
        values: The values; some may be of rows outside the view only.
    """

    codes: NDArray[np.int32]
    values: pa.Array

    def counts(self) -> Ints:
        """How many rows of the view have each value."""
        found: Ints = np.bincount(self.codes, minlength=len(self.values))
        return found


def evaluate(table: Table, expression: str, what: str) -> Iterator[pa.Array]:
    """Yield the values of all rows in table order, many at a time.

    Args:
        table: The table.
        expression: A column's name, or an expression of Lance's dialect of SQL.
        what: The argument that it was given as, for errors.

    Raises:
        ColumnError: If there is no such column and Lance cannot evaluate it.
    """
    if not isinstance(expression, str) or not expression:
        raise ArgumentError(f"{what} must be a column or an SQL expression, got {expression!r}")
    names = table.schema.names
    columns: list[str] | dict[str, str] = [expression] if expression in names else {"v": expression}
    if expression in names and is_blob(table.schema.field(expression)):
        raise ColumnError(f"{what}={expression!r} is a blob column, whose values are not compared")
    try:
        for batch in scan(table, columns, None, "Lance"):
            yield batch.column(0)
    except ReadError as error:
        raise ColumnError(
            f"cannot evaluate {what}={expression!r} on {table.name}: {error}; its columns are: "
            f"{', '.join(names)}"
        ) from error


def numbers(view: View, expression: str, what: str) -> NDArray[np.float64]:
    """The values of an expression as numbers, one for each row of the view.

    Raises:
        ArgumentError: If one is null; names its row.
        ColumnError: If they are no numbers.
    """
    everything = np.empty(view.table.num_rows)
    absent = np.zeros(len(everything), np.bool_)
    first = 0
    for values in evaluate(view.table, expression, what):
        kind = values.type
        if not any(t(kind) for t in (pa.types.is_integer, pa.types.is_floating, _is_exact)):
            raise ColumnError(f"{what}={expression!r} is {kind}, but must be a number")
        some = slice(first, first + len(values))
        first += len(values)
        absent[some] = values.is_null().to_numpy(zero_copy_only=False)
        exact = values.cast(pa.uint8()) if pa.types.is_boolean(kind) else values
        floats = exact.cast(pa.float64(), safe=False).fill_null(0.0)
        everything[some] = floats.to_numpy(zero_copy_only=False)
    _check_present(view, absent, expression, what)
    return _of_view(view, everything)


def _of_view(view: View, everything: NDArray[Any]) -> NDArray[Any]:
    """Values of the view's rows, from those of all rows."""
    if isinstance(view.rows, RangeRows):
        return everything[view.rows.start : view.rows.start + len(view)]
    out = np.empty(len(view), everything.dtype)
    first = 0
    for piece in chunks(view.rows):
        out[first : first + len(piece)] = everything[piece]
        first += len(piece)
    return out


def _is_exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_decimal(kind))


def classes(view: View, expression: str, what: str) -> Classes:
    """The distinct values of an expression, and which one each row of the view has.

    Raises:
        ArgumentError: If one is null; names its row.
        ColumnError: If they are of a type whose values are not told apart.
    """
    coded: list[pa.Array] = []
    for values in evaluate(view.table, expression, what):
        if not hashable(values.type) or pa.types.is_null(values.type):
            raise ColumnError(
                f"{what}={expression!r} is {values.type}, but must be of numbers, texts, bytes, "
                "dates or times"
            )
        plain = values.storage if isinstance(values, pa.ExtensionArray) else values
        coded.append(plain if pa.types.is_dictionary(plain.type) else plain.dictionary_encode())
    if not coded:
        return Classes(np.empty(0, np.int32), pa.nulls(0))
    joined = pa.chunked_array(coded).unify_dictionaries()
    coded.clear()
    codes = np.empty(view.table.num_rows, np.int32)
    first = 0
    for chunk in joined.chunks:
        indices = pc.fill_null(chunk.indices.cast(pa.int32()), -1)
        codes[first : first + len(chunk)] = indices.to_numpy()
        first += len(chunk)
    _check_present(view, codes < 0, expression, what)
    return Classes(_of_view(view, codes), joined.chunk(0).dictionary)


def _check_present(view: View, absent: NDArray[np.bool_], expression: str, what: str) -> None:
    for piece in chunks(view.rows) if absent.any() else ():
        bad: Any = piece[absent[piece]]
        if len(bad):
            raise ArgumentError(
                f"{what}={expression!r} is null for row {bad[0]} of {view.table.name}: leave such "
                f'rows out, with subset(source, "{expression} IS NOT NULL")'
            )
