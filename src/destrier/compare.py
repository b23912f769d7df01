"""Where two columns differ, bit for bit: NaN is equal to the same NaN, 0.0 is not -0.0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = ["differing"]

_BITS = {16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}


def differing(one: pa.Array, other: pa.Array) -> NDArray[np.bool_]:
    """For each row, whether two arrays of one type and length differ there."""
    # equality is false where there is a NaN, though it be the same, and takes 0.0 for -0.0
    if not _has_floats(one.type) and one.equals(other):
        return np.zeros(len(one), np.bool_)
    kind = one.type
    if isinstance(kind, pa.BaseExtensionType):
        return differing(one.storage, other.storage)
    if pa.types.is_dictionary(kind):
        return differing(one.dictionary_decode(), other.dictionary_decode())
    here, there = _valid(one), _valid(other)
    different = here != there
    inner = _inner(one, other)
    return np.asarray(different | (inner & here & there), np.bool_)


def _has_floats(kind: pa.DataType) -> bool:
    """Whether there are floats somewhere in the type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_floats(kind.storage_type)
    if pa.types.is_floating(kind):
        return True
    return any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)


def _inner(one: pa.Array, other: pa.Array) -> NDArray[np.bool_]:
    """Where the values differ; what it says of nulls means nothing."""
    kind = one.type
    if pa.types.is_floating(kind):
        bits = _BITS[kind.bit_width]
        return _unequal(one.view(bits), other.view(bits))
    if pa.types.is_struct(kind):
        found = np.zeros(len(one), np.bool_)
        for i in range(kind.num_fields):
            found |= differing(one.field(i), other.field(i))
        return found
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = [a.values.slice(a.offset * size, len(a) * size) for a in (one, other)]
        return np.asarray(differing(*values).reshape(len(one), size).any(axis=1), np.bool_)
    if pa.types.is_map(kind):
        return _by_python(one, other)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(one, other)
    return _unequal(one, other)


def _lists(one: pa.Array, other: pa.Array) -> NDArray[np.bool_]:
    lengths = [
        pc.fill_null(pc.list_value_length(a), 0).to_numpy().astype(np.int64) for a in (one, other)
    ]
    found = lengths[0] != lengths[1]
    if found.any():
        alike = pa.array(~found)
        found[~found] = _lists(one.filter(alike), other.filter(alike))
        return np.asarray(found, np.bool_)
    values = differing(one.flatten(), other.flatten())
    rows = np.repeat(np.arange(len(one)), lengths[0])
    found[rows[values]] = True
    return np.asarray(found, np.bool_)


def _unequal(one: pa.Array, other: pa.Array) -> NDArray[np.bool_]:
    try:
        unequal = pc.fill_null(pc.not_equal(one, other), False)
    except pa.ArrowNotImplementedError:
        return _by_python(one, other)
    return np.asarray(unequal.to_numpy(zero_copy_only=False), np.bool_)


def _by_python(one: pa.Array, other: pa.Array) -> NDArray[np.bool_]:
    pairs: Any = zip(one.to_pylist(), other.to_pylist(), strict=True)
    return np.fromiter((repr(a) != repr(b) for a, b in pairs), np.bool_, len(one))
