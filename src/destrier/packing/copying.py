"""Copies of runs of values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from destrier.keyed import Ints

__all__ = ["copy_runs"]

_SHORT = 64  # values: runs that are shorter in the mean are copied value by value


def copy_runs(
    source: NDArray[Any], begin: Ints, out: NDArray[Any], target: Ints, length: Ints
) -> None:
    """Copy runs of values; runs that go on in both are copied as one."""
    if not len(begin):
        return
    new = np.ones(len(begin), np.bool_)
    new[1:] = (begin[1:] != begin[:-1] + length[:-1]) | (target[1:] != target[:-1] + length[:-1])
    first = np.flatnonzero(new)
    begin, target = begin[first], target[first]
    length = np.add.reduceat(length, first)
    total = int(length.sum())
    if total < _SHORT * len(begin):
        shift = np.cumsum(length) - length
        each = np.arange(total)
        out[each + np.repeat(target - shift, length)] = source[
            each + np.repeat(begin - shift, length)
        ]
        return
    for i, j, n in zip(begin.tolist(), target.tolist(), length.tolist(), strict=True):
        out[j : j + n] = source[i : i + n]
