"""Checks of arguments that many places share."""

from __future__ import annotations

import operator
from typing import Any

from destrier.errors import ArgumentError

__all__ = ["MOST_SIZE", "check_positive", "integer"]

MOST_SIZE = 1 << 48  # below it are numbers of samples or tokens, so that products fit 64 bits


def integer(name: str, value: Any, least: int = 0, below: int | None = None) -> int:
    """Return an integer of any kind (numpy's too) as Python's.

    Args:
        name: The argument's name, for the error.
        value: What was given.
        least: The smallest value allowed.
        below: One more than the largest value allowed; None is no bound.

    Raises:
        ArgumentError: If it is no integer, or out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(
            f"{name} must be an integer of at least {least}, got {value!r}"
        ) from None
    if below is not None and not least <= number < below:
        bits = below.bit_length() - 1
        most = f"2**{bits} - 1" if bits >= 32 and below == 1 << bits else below - 1
        raise ArgumentError(f"{name} must be from {least} to {most}, got {number}")
    if number < least:
        raise ArgumentError(f"{name} must be at least {least}, got {number}")
    return number


def check_positive(**sizes: int | None) -> None:
    """Raise unless every argument that was given is an integer above 0.

    Raises:
        ArgumentError: Naming the argument.
    """
    for name, size in sizes.items():
        if size is not None and integer(name, size, -(1 << 62)) <= 0:
            raise ArgumentError(f"{name} must be greater than 0, got {size}")
