"""Batches as the writer takes them: of a bounded size, and valid."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from destrier.errors import SourceError
from destrier.writing.source import BATCH_BYTES

__all__ = ["checked", "gathered", "split"]

_ROWS = 65536
_GATHER_BYTES = 4 << 20


def split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of at most `BATCH_BYTES`, or one row."""
    if batch.num_rows <= 1 or batch.nbytes <= BATCH_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from split(batch.slice(0, half))
    yield from split(batch.slice(half))


def gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches, so that what comes after pays per batch only now and then."""
    held: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        size = batch.nbytes
        if held and (nbytes + size > BATCH_BYTES or rows + batch.num_rows > _ROWS):
            yield pa.concat_batches(held)
            held, rows, nbytes = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        nbytes += size
        if nbytes >= _GATHER_BYTES:
            yield pa.concat_batches(held)
            held, rows, nbytes = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def checked(batch: pa.RecordBatch, shown: str, first_row: int | None) -> pa.RecordBatch:
    """Raise unless all values of a batch are what their types say; returns it as Lance takes it.

    Args:
        batch: As a reader gave it.
        shown: The file, for messages.
        first_row: The row in the file that is the batch's first, None where it is not known.

    Raises:
        SourceError: Naming row and column: text that is no UTF-8, offsets that lead nowhere, a
            null in a column that is declared to have none.
    """
    made = batch
    for number, (field, column) in enumerate(zip(batch.schema, batch.columns, strict=True)):
        try:
            column.validate(full=True)
        except pa.ArrowException as error:
            row, reason = _locate(column, str(error))
            raise _fault(shown, first_row, row, field.name, reason) from None
        at = _null_row(field, column)
        if at is not None:
            reason = f"a null in a column that is declared to have none ({field})"
            raise _fault(shown, first_row, at, field.name, reason)
        if _hides_bytes(column):
            try:
                cleaned = column.take(pa.array(range(len(column))))
                made = made.set_column(number, field, cleaned)
            except pa.ArrowException:
                reason = "bytes that are no UTF-8 lie where a null is; write the file anew"
                raise _fault(shown, first_row, 0, field.name, reason) from None
    return made


def _fault(shown: str, first_row: int | None, row: int, column: str, reason: str) -> SourceError:
    number = None if first_row is None else first_row + row
    where = f"row {row} of a batch" if number is None else f"row {number}"
    return SourceError(
        f"{shown}, {where}, column {column!r}: {reason}", file=shown, row=number, column=column
    )


def _locate(column: pa.Array, reason: str) -> tuple[int, str]:
    """The first row that is not valid, and why: in its children, else by halving."""
    for child, row_of in _children(column):
        try:
            child.validate(full=True)
        except pa.ArrowException as error:
            place, reason = _locate(child, str(error))
            return min(max(row_of(place), 0), len(column) - 1), reason
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).validate(full=True)
            low = middle
        except pa.ArrowException as error:
            reason = str(error)
            high = middle
    return low, reason


def _children(column: pa.Array) -> Iterator[tuple[pa.Array, Callable[[int], int]]]:
    """The arrays that a column is made of, and which row a place in them belongs to.

    A slice of a column does not slice the values of its lists, so halving does not find them.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        yield column.storage, int
    elif pa.types.is_struct(kind):
        yield from ((column.field(i), int) for i in range(kind.num_fields))
    elif pa.types.is_fixed_size_list(kind) and kind.list_size:
        yield column.values, lambda place: place // kind.list_size - column.offset
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        starts = column.offsets.to_numpy()
        children = (column.keys, column.items) if pa.types.is_map(kind) else (column.values,)
        for child in children:
            yield child, lambda place: int(np.searchsorted(starts, place, "right")) - 1


def _hides_bytes(column: pa.Array) -> bool:  # noqa: PLR0911 - a table of types
    """Whether bytes that are no UTF-8 lie where nulls are, which Arrow allows, but not Lance."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _hides_bytes(column.storage)
    if pa.types.is_struct(kind):
        return any(_hides_bytes(column.field(i)) for i in range(kind.num_fields))
    if pa.types.is_map(kind):
        return _hides_bytes(column.keys) or _hides_bytes(column.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _hides_bytes(column.values)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) or not column.null_count:
        return False
    _, offsets, data = column.buffers()
    bare = pa.Array.from_buffers(kind, len(column), [None, offsets, data], 0, column.offset)
    try:
        bare.validate(full=True)
    except pa.ArrowException:
        return True
    return False


def _null_row(field: pa.Field, column: pa.Array) -> int | None:
    """The first row with a null where the field, or one in it, says that there is none."""
    if not field.nullable and column.null_count:
        return int(column.is_null().index(pa.scalar(value=True)).as_py())
    if not _declares(field.type):
        return None
    for row in range(len(column)) if _has_null(field.type, column) else ():
        if _has_null(field.type, column.slice(row, 1)):
            return row
    return None


def _declares(kind: pa.DataType) -> bool:
    """Whether a nested type has a field without nulls."""
    if pa.types.is_map(kind):
        return _declares(kind.key_type) or _declares(kind.item_type) or not kind.item_field.nullable
    children = [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    return any(not child.nullable or _declares(child.type) for child in children)


def _has_null(kind: pa.DataType, column: pa.Array) -> bool:
    if isinstance(kind, pa.BaseExtensionType) or not _declares(kind):
        return False
    if pa.types.is_struct(kind):
        there = column.is_valid() if column.null_count else None
        parts = [
            (kind.field(i), column.field(i) if there is None else column.field(i).filter(there))
            for i in range(kind.num_fields)
        ]
    elif pa.types.is_map(kind):
        flat = column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))).flatten()
        parts = [(kind.key_field, flat.field(0)), (kind.item_field, flat.field(1))]
    else:
        parts = [(kind.value_field, column.flatten())]
    return any(
        (not field.nullable and part.null_count > 0) or _has_null(field.type, part)
        for field, part in parts
    )
