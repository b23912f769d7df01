"""Python values as Arrow arrays of their natural types, a column at a time.

Nothing is coerced: a value of another type than its column is a `Misfit`. Only where a type was
declared by the user are values converted to it, and only exactly.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.encoding.arrays import arrays_to_arrow, list_array, mask_of
from destrier.encoding.copies import repeated
from destrier.encoding.exact import cast_exactly
from destrier.encoding.misfit import Misfit, shown
from destrier.encoding.scalars import SCALARS, datetimes, decimals, numpy_times, scalars, times

__all__ = ["encode"]

Family: TypeAlias = "pa.DataType | str | None"
"""The Arrow type of a kind of scalars, the name of another family, or None if it is refused."""

_OTHERS: dict[type, str] = {
    dt.datetime: "datetime",
    dt.time: "time",
    decimal.Decimal: "decimal",
    uuid.UUID: "uuid",
    np.datetime64: "numpy time",
    np.timedelta64: "numpy time",
    np.ndarray: "array",
    pa.ChunkedArray: "arrow array",
}
_PARENTS: tuple[tuple[Any, str], ...] = (
    ((list, tuple), "list"),
    (pa.Scalar, "arrow scalar"),  # of which those of structs and maps are Mappings too
    (Mapping, "dict"),
    (pa.Array, "arrow array"),
)
_TYPED: dict[Any, str] = {
    "array": "dtype",
    "arrow array": "type",
    "arrow scalar": "type",
    "numpy time": "dtype",
}
"""Families whose values have a type of their own, and what it is called."""
_NUMBERS = "biuf"


def encode(values: Sequence[Any], want: pa.DataType | None, *, declared: bool) -> pa.Array:
    """Make an Arrow array of a column's values.

    Args:
        values: As `destrier.encoding.frozen.freeze` leaves them, None for null.
        want: The column's type, or None to find it.
        declared: Whether the type was declared, so that values are converted to it exactly.

    Raises:
        Misfit: Naming the first value that does not fit.
    """
    array = _encode(values, want, declared=declared)
    if len(array) != len(values):
        raise AssertionError(f"{len(values)} values became {len(array)}")
    return array


def _encode(values: Sequence[Any], want: pa.DataType | None, *, declared: bool) -> pa.Array:
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if not kinds:
        return pa.nulls(len(values), pa.null() if want is None else want)
    if want is not None and pa.types.is_null(want):
        at = _first(values)
        raise Misfit(
            at,
            f"got {shown(values[at])}, but it was null or empty in all the first rows, so its type "
            "is not known: declare schema=",
        )
    families = {kind: _family(kind) for kind in kinds}
    if None in families.values():
        at, value = next((i, v) for i, v in enumerate(values) if families.get(type(v), "") is None)
        raise _refused(at, value)
    if len(set(families.values())) > 1:
        if want is None and set(families.values()) == {"list", "array"}:
            values = [list(v) if isinstance(v, np.ndarray) else v for v in values]
            return _lists(values, None, declared)
        keys = [None if v is None else families[type(v)] for v in values]
        return _mixed(values, keys, want, declared=declared)
    family = next(iter(families.values()))
    if isinstance(family, pa.DataType):
        array = scalars(values, kinds, family, want, declared=declared)
    else:
        if family in _TYPED:
            types = [None if v is None else getattr(v, _TYPED[family]) for v in values]
            if len(set(types) - {None}) > 1:
                return _mixed(values, types, want, declared=declared)
        array = _ENCODERS[family](values, want, declared)
    return cast_exactly(array, want, values, declared=declared)


@functools.lru_cache(maxsize=1024)
def _family(kind: type) -> Family:
    """Which family a type of values belongs to; subclasses of plain types may mean more."""
    exact = SCALARS.get(kind, _OTHERS.get(kind))
    if exact is not None:
        return exact
    if issubclass(kind, enum.Enum) or hasattr(kind, "_fields"):
        return None
    if issubclass(kind, np.generic):
        dtype = np.dtype(kind)
        good = dtype.kind in _NUMBERS and dtype.itemsize <= 8
        return pa.from_numpy_dtype(dtype) if good else None
    return next((name for parents, name in _PARENTS if issubclass(kind, parents)), None)


_HINTS: tuple[tuple[str, str], ...] = (
    ("enum", "pass its name or its value"),
    ("namedtuple", "pass ._asdict() of it"),
    ("dataclass", "pass dataclasses.asdict() of it"),
    ("path", "pass str() of it, or the bytes of the file"),
    ("set", "pass a sorted list of it"),
    ("pandas", "pass .to_dict('records'), .tolist() or .to_datetime64() of it"),
    ("long", "pass a numpy.float64 or a str"),
    ("complex", "pass its real and imaginary parts"),
)


def _refused(at: int, value: Any) -> Misfit:
    kind = type(value)
    traits = {
        "enum": isinstance(value, enum.Enum),
        "namedtuple": isinstance(value, tuple),
        "dataclass": hasattr(kind, "__dataclass_fields__"),
        "path": hasattr(value, "__fspath__"),
        "set": isinstance(value, set | frozenset),
        "pandas": kind.__module__.startswith("pandas"),
        "long": isinstance(value, np.floating),
        "complex": isinstance(value, complex | np.complexfloating),
    }
    hint = next((text for name, text in _HINTS if traits[name]), "")
    if not hint:
        base = next((b.__name__ for b in (str, bytes, int, float) if isinstance(value, b)), None)
        hint = "return what a column can hold" if base is None else f"pass {base}() of it"
    name = f"{kind.__module__}.{kind.__qualname__}"
    return Misfit(at, f"a {name} has no Arrow type of its own: {hint}", refused=True)


def _first(values: Sequence[Any]) -> int:
    return next(i for i, value in enumerate(values) if value is not None)


def _mixed(
    values: Sequence[Any],
    keys: Sequence[Any],
    want: pa.DataType | None,
    *,
    declared: bool,
) -> pa.Array:
    """Values of several types, named by the keys: each must fit the column's type on its own."""
    # grouped as a dict does it, not by ==: NumPy's float64 equals None
    groups: dict[Any, list[int]] = {}
    nulls: list[int] = []
    for i, (value, key) in enumerate(zip(values, keys, strict=True)):
        (nulls if value is None else groups.setdefault(key, [])).append(i)
    if want is None:
        first, at = (places[0] for places in itertools.islice(groups.values(), 2))
        raise Misfit(
            at,
            f"got {shown(values[at])} ({keys[at]}) after {shown(values[first])} ({keys[first]}): "
            "a column has one type; convert one of them, or declare schema=",
        )
    parts: list[pa.Array] = []
    order: list[int] = []
    for places in (nulls, *groups.values()):
        try:
            parts.append(encode([values[i] for i in places], want, declared=declared))
        except Misfit as misfit:
            raise misfit.at(places[misfit.index]) from None
        order.extend(places)
    return pa.concat_arrays(parts).take(pa.array(np.argsort(order)))


def _arrays(values: Sequence[Any], want: pa.DataType | None, declared: bool) -> pa.Array:
    if want is not None and _is_list(want) and any(v is not None and v.ndim > 1 for v in values):
        return _lists([None if v is None else list(v) for v in values], want, declared)
    return arrays_to_arrow(values, want, declared=declared)


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _lists(values: Sequence[Any], want: pa.DataType | None, declared: bool) -> pa.Array:
    if want is not None and not _is_list(want):
        at = _first(values)
        hint = ""
        if isinstance(want, pa.FixedShapeTensorType):
            hint = "; pass a NumPy array of that type and shape"
        raise Misfit(at, f"got {shown(values[at])}, but the column is {want}{hint}")
    lengths = np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    items = list(itertools.chain.from_iterable(v for v in values if v is not None))
    try:
        child = encode(items, None if want is None else want.value_type, declared=declared)
    except Misfit as misfit:
        raise _inside(misfit, offsets) from None
    field = pa.field("item", child.type) if want is None else want.value_field
    if not field.nullable and child.null_count:
        null = Misfit(_null(child), "is null, which the type does not allow")
        raise _inside(null, offsets)
    return list_array(values, child, pa.list_(field) if want is None else want)


def _inside(misfit: Misfit, offsets: NDArray[np.int64]) -> Misfit:
    row = int(np.searchsorted(offsets, misfit.index, "right")) - 1
    return misfit.at(row, f"[{misfit.index - int(offsets[row])}]")


def _null(array: pa.Array) -> int:
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])


def _dicts(values: Sequence[Any], want: pa.DataType | None, declared: bool) -> pa.Array:
    first = _first(values)
    if want is not None and not pa.types.is_struct(want):
        raise Misfit(first, f"got {shown(values[first])}, but the column is {want}")
    names = list(values[first]) if want is None else [field.name for field in want]
    _check_keys(values, names)
    arrays, fields = [], []
    present = None
    for number, name in enumerate(names):
        field = None if want is None else want.field(number)
        column = [None if value is None else value[name] for value in values]
        try:
            array = encode(column, None if field is None else field.type, declared=declared)
        except Misfit as misfit:
            raise misfit.at(misfit.index, f".{name}") from None
        if field is not None and not field.nullable and array.null_count:
            present = present or [value is not None for value in values]
            for i, item in enumerate(column):
                if item is None and present[i]:
                    raise Misfit(i, "is null, which the type does not allow", path=f".{name}")
        arrays.append(array)
        fields.append(pa.field(name, array.type) if field is None else field)
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask_of(values))


def _check_keys(values: Sequence[Any], names: list[str]) -> None:
    wanted = dict.fromkeys(names).keys()
    for i, value in enumerate(values):
        if value is None or value.keys() == wanted:
            if value is not None and not names:
                raise Misfit(i, "an empty dict has no Arrow type that can be stored", refused=True)
            continue
        for name in value:
            if name not in wanted:
                raise Misfit(i, f"has a field {name!r}, which the values before lack")
        lacking = next(name for name in names if name not in value)
        raise Misfit(i, f"lacks the field {lacking!r}: give it as None if it is null")
    for name in names:
        if not isinstance(name, str):
            raise Misfit(_first(values), f"has a key {name!r}; the keys of a dict are its fields")


def _arrow_scalars(values: Sequence[Any]) -> pa.Array:
    kind = values[_first(values)].type
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError):  # as of maps, which it takes for Python's
        return pa.concat_arrays([pa.nulls(1, kind) if v is None else repeated(v) for v in values])


def _arrow_arrays(values: Sequence[Any]) -> pa.Array:
    """Arrow arrays as the lists of a column."""
    parts = [value for value in values if value is not None]
    chunks = [c for part in parts for c in getattr(part, "chunks", None) or [part] if len(c)]
    child = pa.concat_arrays(chunks) if chunks else pa.nulls(0, parts[0].type)
    return list_array(values, child, pa.list_(child.type))


_ENCODERS: dict[Any, Callable[[Sequence[Any], pa.DataType | None, bool], pa.Array]] = {
    "array": _arrays,
    "arrow array": lambda values, _, __: _arrow_arrays(values),
    "arrow scalar": lambda values, _, __: _arrow_scalars(values),
    "datetime": lambda values, want, declared: datetimes(values, want, declared=declared),
    "decimal": lambda values, want, _: decimals(values, want),
    "dict": _dicts,
    "list": _lists,
    "numpy time": lambda values, _, __: numpy_times(values),
    "time": lambda values, _, __: times(values),
    "uuid": lambda values, _, __: pa.array(values, pa.uuid()),
}
