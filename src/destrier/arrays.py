"""Operations on arrays of numbers that numpy has in a slower form, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from destrier.keyed import Ints

Number = TypeVar("Number", bound=np.integer[Any])

__all__ = ["distinct", "divided", "grown", "stable_order"]


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """Where each distinct value is first, in that order, and for each value its number among them.

    Arrow counts by hashes, several times as fast as `numpy.unique`, which sorts.
    """
    numbers = pa.array(values).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    first = np.empty(int(numbers.max(initial=-1)) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(values) - 1, -1, -1)
    return first, numbers


def divided(values: NDArray[Number], by: Any) -> tuple[NDArray[Number], NDArray[Number]]:
    """The quotients and the remainders, in some 0.6 of the time of `numpy.divmod`."""
    quotients: NDArray[Number] = values // by
    rest: NDArray[Number] = values - quotients * by
    return quotients, rest


def stable_order(values: Ints) -> Ints:
    """The order of numbers from 0 on along the last axis, those that are equal as they stand.

    Numbers of 16 bits are sorted in a fraction of the time.
    """
    narrow = int(values.max(initial=0)) < 1 << 16
    return np.argsort(values.astype(np.uint16 if narrow else np.int64), axis=-1, kind="stable")


def grown(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    """A copy with room for so many rows."""
    larger = np.empty((capacity, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
