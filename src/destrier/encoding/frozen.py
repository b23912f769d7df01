"""Values as they are when a row arrives, for a function may change them before they are written.

Rows are held until there are enough for a batch. A buffer that is filled anew for each row must
not be held, but copied.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from destrier.encoding.copies import copied_array, repeated
from destrier.encoding.images import Picture, picture
from destrier.encoding.misfit import Misfit, shown
from destrier.encoding.scalars import native

__all__ = ["FIXED", "freeze"]

_Frozen: TypeAlias = "tuple[Any, int]"

FIXED: frozenset[type] = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        dt.date,
        dt.datetime,
        dt.time,
        dt.timedelta,
        decimal.Decimal,
        uuid.UUID,
        *(np.dtype(code).type for code in "?bhilqBHILQefdMm"),
    }
)
"""Types of values that do not change and take few bytes."""

_SIZED = frozenset({str, bytes, np.str_, np.bytes_, Picture})
_ITEM_BYTES = 8


def freeze(value: Any) -> _Frozen:
    """A value that nobody else can change, and roughly the bytes that it takes in a column.

    Arrays and tensors are copied to NumPy arrays, those of no dimension to scalars; PIL images
    become the bytes of image files.

    Raises:
        Misfit: If it is a tensor or image that cannot be kept exactly.
    """
    kind = type(value)
    if kind in FIXED:
        return value, _ITEM_BYTES
    if kind in _SIZED:
        return value, len(value)
    return _freezer(kind)(value)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _freezer(kind: type) -> Callable[[Any], _Frozen]:
    plain: tuple[tuple[type | tuple[type, ...], Callable[[Any], _Frozen]], ...] = (
        ((list, tuple), _list),
        (np.ndarray, _array),
        (pa.Scalar, _arrow_scalar),  # of which those of structs and maps are Mappings too
        (Mapping, _dict),
        ((bytearray, memoryview), _bytes),
        ((pa.Array, pa.ChunkedArray), _arrow_array),
    )
    for parents, freezer in plain:
        if issubclass(kind, parents):
            return freezer
    # the packages are not imported here: a value of theirs means that they have been
    for module, name, freezer in (("torch", "Tensor", _tensor), ("PIL.Image", "Image", _image)):
        package = sys.modules.get(module)
        if package is not None and issubclass(kind, getattr(package, name)):
            return freezer
    return lambda value: (value, _ITEM_BYTES)  # refused when its column is encoded


def _list(value: Any) -> _Frozen:
    kinds = set(map(type, value))
    if hasattr(value, "_fields"):
        return value, _ITEM_BYTES  # a namedtuple, which is refused
    if kinds <= FIXED:
        return list(value), len(value) * _ITEM_BYTES
    if kinds <= _SIZED:
        return list(value), sum(map(len, value)) + len(value) * _ITEM_BYTES
    return _items(value)


def _items(value: Any) -> _Frozen:
    size = 0
    items = []
    for i, item in enumerate(value):
        try:
            frozen, taken = freeze(item)
        except Misfit as misfit:
            raise misfit.at(misfit.index, f"[{i}]") from None
        items.append(frozen)
        size += taken
    return items, size + _ITEM_BYTES


def _dict(value: Mapping[Any, Any]) -> _Frozen:
    size = 0
    items = {}
    for name, item in value.items():
        try:
            items[name], taken = freeze(item)
        except Misfit as misfit:
            raise misfit.at(misfit.index, f".{name}") from None
        size += taken
    return items, size


def _bytes(value: bytearray | memoryview) -> _Frozen:
    if isinstance(value, memoryview) and value.format not in ("B", "b", "c"):
        raise Misfit(
            0, f"a memoryview of format {value.format!r}: pass a NumPy array", refused=True
        )
    data = bytes(value)
    return data, len(data)


def _arrow_scalar(value: pa.Scalar) -> _Frozen:
    if isinstance(value, pa.NullScalar) or not value.is_valid:
        return None, _ITEM_BYTES
    if pa.types.is_primitive(value.type):
        return value, _ITEM_BYTES
    array = copied_array(repeated(value))
    return array[0], array.nbytes


def _arrow_array(value: pa.Array | pa.ChunkedArray) -> _Frozen:
    array = copied_array(value)
    return array, array.nbytes


def _array(value: Any) -> _Frozen:
    dtype = native(value.dtype)
    masked = isinstance(value, np.ma.MaskedArray)
    if dtype is None or masked:
        what = "a masked array" if masked else shown(value)
        hint = ": pass .tolist() of it" if value.dtype.kind in "OSU" else ""
        raise Misfit(0, f"{what} of {value.dtype} has no Arrow type of its own{hint}", refused=True)
    if not value.ndim:
        return value.astype(dtype)[()], _ITEM_BYTES
    array = np.array(value, dtype, order="C")
    return array, array.nbytes


def _tensor(value: Any) -> _Frozen:
    if value.device.type != "cpu":
        raise Misfit(0, f"a tensor lies on {value.device}: pass .cpu() of it", refused=True)
    try:
        array = value.detach().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError):
        text = f"a tensor of {value.dtype} ({value.layout}) has no Arrow type of its own"
        hint = "pass .float() or .view(torch.int16) of it" if "float" in str(value.dtype) else ""
        raise Misfit(0, f"{text}: {hint or 'pass a dense one'}", refused=True) from None
    return _array(array)


def _image(value: Any) -> _Frozen:
    data = picture(value)
    return data, len(data)
