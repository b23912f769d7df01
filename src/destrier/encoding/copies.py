"""Copies of Arrow arrays, whose buffers may be NumPy arrays that are filled anew."""

from __future__ import annotations

import pyarrow as pa

from destrier.encoding.misfit import Misfit

__all__ = ["copied", "copied_array", "repeated"]


def copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in buffers of their own."""
    return pa.RecordBatch.from_arrays([_joined([c]) for c in batch.columns], schema=batch.schema)


def copied_array(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The same values in buffers of their own.

    Raises:
        Misfit: If they are too many for one array.
    """
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    try:
        return _joined(chunks) if chunks else pa.nulls(0, array.type)
    except pa.ArrowException as error:
        raise _uncopied(array.type, error) from None


def repeated(value: pa.Scalar) -> pa.Array:
    """A scalar as an array of one value.

    Raises:
        Misfit: If Arrow cannot make one.
    """
    try:
        return pa.repeat(value, 1)
    except pa.ArrowException as error:
        raise _uncopied(value.type, error) from None


def _joined(arrays: list[pa.Array]) -> pa.Array:
    # not through IPC, which aligns buffers to 8 bytes, where Lance needs 16 for decimals; one array
    # alone might be taken as it is
    return pa.concat_arrays([*arrays, arrays[0].slice(0, 0)])


def _uncopied(kind: pa.DataType, error: Exception) -> Misfit:
    return Misfit(0, f"values of {kind} cannot be kept: {error}", refused=True)
