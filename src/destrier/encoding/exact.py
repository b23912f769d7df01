"""Casts of arrays that keep every value as it is, or name the one that they cannot keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.encoding.misfit import Misfit, shown

__all__ = ["cast_exactly"]

_Cast: TypeAlias = "Callable[[pa.Array, pa.DataType], pa.Array]"
_F16_EXACT = 2048  # float16 holds all integers up to here


def cast_exactly(
    array: pa.Array,
    want: pa.DataType | None,
    values: Sequence[Any] | NDArray[Any],
    *,
    declared: bool,
) -> pa.Array:
    """The array in the wanted type.

    Args:
        array: Of the values' natural type.
        want: None takes it as it is.
        values: From which it was made, for the message.
        declared: Whether a cast is allowed.

    Raises:
        Misfit: If the types differ, and no cast keeps the values, or none is allowed.
    """
    if want is None or array.type == want:
        return array
    cast = _cast(array.type, want) if declared else None
    if cast is None:
        at = next(i for i, value in enumerate(values) if value is not None)
        raise Misfit(at, f"got {shown(values[at])}, which is {array.type}, but {_wanted(want)}")
    try:
        return cast(array, want)
    except (pa.ArrowException, OverflowError, ValueError):
        pass
    for i in range(len(array)):
        try:
            cast(array.slice(i, 1), want)
        except (pa.ArrowException, OverflowError, ValueError):
            value = values[i] if len(values) == len(array) else array[i]
            raise Misfit(i, f"{shown(value)} cannot be kept exactly as {want}") from None
    raise AssertionError("a cast failed, but not that of any value")


def _wanted(want: pa.DataType) -> str:
    return f"the column is {want}; nothing is coerced: convert it, or declare schema="


def _cast(have: pa.DataType, want: pa.DataType) -> _Cast | None:
    is_ = pa.types
    pairs: tuple[tuple[bool, _Cast], ...] = (
        (is_.is_integer(have) and is_.is_integer(want), _plain),
        (is_.is_integer(have) and is_.is_floating(want), _to_float),
        (is_.is_floating(have) and is_.is_floating(want), _float),
        (is_.is_string(have) and is_.is_large_string(want), _plain),
        (is_.is_large_binary(have) and is_.is_binary(want), _plain),
        (is_.is_large_binary(have) and is_.is_fixed_size_binary(want), _plain),
        (is_.is_date32(have) and is_.is_date64(want), _plain),
        (is_.is_time(have) and is_.is_time(want), _plain),
        (is_.is_duration(have) and is_.is_duration(want), _plain),
        (_instants(have, want), _plain),
        (have == pa.uuid() and want == pa.binary(16), lambda array, _: array.storage),
    )
    return next((cast for fits, cast in pairs if fits), None)


def _instants(have: pa.DataType, want: pa.DataType) -> bool:
    both = pa.types.is_timestamp(have) and pa.types.is_timestamp(want)
    return both and (have.tz is None) == (want.tz is None)


def _plain(array: pa.Array, want: pa.DataType) -> pa.Array:
    return array.cast(want)  # which is checked


def _to_float(array: pa.Array, want: pa.DataType) -> pa.Array:
    if want == pa.float16():  # Arrow does not check this one
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        if np.any((values > _F16_EXACT) | (values < -min(_F16_EXACT, np.iinfo(values.dtype).max))):
            raise ValueError("beyond the integers of float16")
    return array.cast(want)


def _float(array: pa.Array, want: pa.DataType) -> pa.Array:
    cast = array.cast(want)
    if want.bit_width < array.type.bit_width:
        before = array.fill_null(0).to_numpy(zero_copy_only=False)
        after = cast.fill_null(0).to_numpy(zero_copy_only=False)
        if np.any((after.astype(before.dtype) != before) & ~np.isnan(before)):
            raise ValueError("rounded")
    return cast
