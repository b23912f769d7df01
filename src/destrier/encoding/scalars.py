"""Scalars of Python and NumPy as Arrow: numbers, text, bytes, dates, times and decimals."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.encoding.images import Picture
from destrier.encoding.misfit import Misfit, shown

__all__ = [
    "SCALARS",
    "datetimes",
    "decimals",
    "items_to_arrow",
    "native",
    "numpy_times",
    "scalars",
    "times",
]

_DAYS = np.iinfo(np.int32)

SCALARS: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    np.str_: pa.string(),
    bytes: pa.large_binary(),
    np.bytes_: pa.large_binary(),
    Picture: pa.large_binary(),
    dt.date: pa.date32(),
    dt.timedelta: pa.duration("us"),
}
"""Types whose values all have one Arrow type."""


def _make(
    values: Sequence[Any], kind: pa.DataType, why: Callable[[Any, Exception], str]
) -> pa.Array:
    """`pa.array`, whose errors name the value at fault."""
    try:
        array = pa.array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        for i, value in enumerate(values):
            try:
                pa.array([value], kind)
            except (pa.ArrowException, OverflowError, ValueError, TypeError) as own:
                raise Misfit(i, why(value, own)) from None
        raise Misfit(0, str(error)) from None
    if isinstance(array, pa.ChunkedArray):
        raise Misfit(0, f"more than 2 GiB of text or bytes do not fit into {kind}")
    return array


def scalars(
    values: Sequence[Any],
    kinds: set[type],
    natural: pa.DataType,
    want: pa.DataType | None,
    *,
    declared: bool,
) -> pa.Array:
    """Values of types that are all of one natural Arrow type.

    Args:
        values: None for null.
        kinds: Their Python types.
        natural: Their Arrow type.
        want: The column's type, if it is known.
        declared: Whether that was declared.

    Raises:
        Misfit: If a value is beyond the type.
    """
    kind = natural
    rounded = False
    if declared and want is not None:
        # a number is made in the declared width at once: it may not fit its natural one
        rounded = kinds == {float} and want in (pa.float32(), pa.float16())
        if rounded or (kinds == {int} and pa.types.is_integer(want)):
            kind = want

    def why(value: Any, error: Exception) -> str:
        if pa.types.is_integer(kind):
            hint = "" if declared else ": declare schema= with uint64, or pass a float or a str"
            return f"{shown(value)} is beyond {kind}{hint}"
        if isinstance(error, UnicodeError):
            return f"{shown(value)} is not valid Unicode text ({error.reason}): pass bytes"  # type: ignore[attr-defined]
        return f"{shown(value)} cannot be kept as {kind}: {error}"

    array = _make(values, kind, why)
    if rounded:  # to the nearest, which is what declaring a narrow float means; infinity is not
        exact = np.array([0.0 if value is None else value for value in values])
        narrow = array.fill_null(0).to_numpy(zero_copy_only=False)
        if (lost := np.flatnonzero(np.isinf(narrow) & np.isfinite(exact))).size:
            at = int(lost[0])
            raise Misfit(at, f"{shown(values[at])} is beyond {want}")
    return array


def datetimes(values: Sequence[Any], want: pa.DataType | None, *, declared: bool) -> pa.Array:
    """Instants in microseconds, all in one time zone or none."""
    zones: list[str | None] = []
    known: dict[Any, str] = {}
    for i, value in enumerate(values):
        zone = None if value is None else value.tzinfo
        if zone is not None and zone not in known:
            try:
                known[zone] = pa.lib.tzinfo_to_string(zone)
            except (ValueError, TypeError, pa.ArrowException) as error:
                raise Misfit(i, f"{shown(value)} has a time zone without a name: {error}") from None
        if zone is not None and (offset := value.utcoffset()) and offset.microseconds:
            raise Misfit(
                i,
                f"{shown(value)} has an offset that is not of whole seconds, which Arrow's time "
                "zones have not: pass .astimezone(datetime.timezone.utc) of it",
                refused=True,
            )
        zones.append(None if zone is None else known[zone])
    first = next(i for i, value in enumerate(values) if value is not None)
    zone = zones[first]
    if declared and want is not None and pa.types.is_timestamp(want) and want.tz and zone:
        zone = want.tz
    for i, value in enumerate(values):
        other = (zones[i] is None) != (zone is None) if declared else zones[i] != zone
        if value is not None and other:
            raise Misfit(
                i,
                f"got {shown(value)} after {shown(values[first])}: a column has one time zone or "
                "none",
            )
    kind = pa.timestamp("us", zone)
    return _make(values, kind, lambda v, e: f"{shown(v)} cannot be kept as {kind}: {e}")


def times(values: Sequence[Any]) -> pa.Array:
    """Times of day in microseconds."""
    for i, value in enumerate(values):
        if value is not None and value.tzinfo is not None:
            raise Misfit(i, f"{shown(value)} has a time zone, which Arrow's times have not")
    return pa.array(values, pa.time64("us"))


def decimals(values: Sequence[Any], want: pa.DataType | None) -> pa.Array:
    """Decimals with as many digits after the point as any of them has, or as the column has."""
    scale = 0
    for i, value in enumerate(values):
        if value is not None:
            exponent = value.as_tuple().exponent
            if not isinstance(exponent, int):
                raise Misfit(i, f"{value} has no decimal type: pass a float or None")
            if not value and value.is_signed():
                raise Misfit(
                    i,
                    f"{value} has a sign that a zero of Arrow's decimals has not: pass abs() of "
                    "it, or a float",
                    refused=True,
                )
            scale = max(scale, -exponent)
    kind = want if want is not None and pa.types.is_decimal(want) else None
    if kind is None:
        if scale > 38:
            at = next(i for i, v in enumerate(values) if v is not None)
            raise Misfit(at, f"{scale} digits after the point: declare schema= with decimal256")
        kind = pa.decimal128(38, scale)
    return _make(
        values,
        kind,
        lambda v, _: f"{v} does not fit {kind} exactly: declare schema= with another decimal type",
    )


def numpy_times(values: Sequence[Any]) -> pa.Array:
    """Dates, instants and durations of NumPy in one unit; NaT is null, as in Arrow."""
    at = next(i for i, value in enumerate(values) if value is not None)
    dtype = values[at].dtype
    if native(dtype) is None:
        raise Misfit(
            at, f"{dtype} has no Arrow type of its own: cast it to s, ms, us or ns", refused=True
        )
    missing = np.array("NaT", dtype)[()]
    return items_to_arrow(np.array([missing if v is None else v for v in values], dtype))


def items_to_arrow(items: NDArray[Any]) -> pa.Array:
    """A NumPy array of one dimension as Arrow has it, exactly.

    Raises:
        Misfit: If a day is beyond Arrow's.
    """
    if items.dtype == "M8[D]":  # Arrow's days have 32 bits, and its conversion does not look
        days = items.astype(np.int64)
        far = ~np.isnat(items) & ((days < _DAYS.min) | (days > _DAYS.max))
        if far.any():
            at = int(np.argmax(far))
            raise Misfit(at, f"day {days[at]} since 1970 is beyond date32: cast it to s")
    return pa.array(items)


@functools.lru_cache(maxsize=256)
def native(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The type in this machine's byte order, or None if Arrow has none like it."""
    good = dtype.kind in "biuf" and dtype.itemsize <= 8
    if dtype.kind in "Mm":
        unit, count = np.datetime_data(dtype)
        good = count == 1 and unit in ("s", "ms", "us", "ns", *("D" if dtype.kind == "M" else ()))
    return dtype.newbyteorder("=") if good else None
