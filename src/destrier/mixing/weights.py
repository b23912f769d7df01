"""The weights of a mixture: as given, or from lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from destrier.errors import ArgumentError

__all__ = ["check_weights", "tempered"]

_STEPS = 1 << 20  # weights from lengths are rounded, so that all machines have the same


def check_weights(weights: Any, names: Sequence[str]) -> tuple[float, ...]:
    """Return the weight of each source.

    Raises:
        ArgumentError: If a source has none, one is of no source, negative or not finite, or all
            are 0.
    """
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"weights must be a dict with a number for each source ({', '.join(names)}), "
            f"got {weights!r}"
        )
    missing = [name for name in names if name not in weights]
    unknown = [str(name) for name in weights if name not in names]
    if missing or unknown:
        raise ArgumentError(
            f"the sources are {', '.join(names)}, and weights are given for "
            f"{', '.join(map(str, weights)) or 'none'}; 0 leaves a source out"
        )
    numbers = tuple(_number(name, weights[name]) for name in names)
    if not any(numbers):
        raise ArgumentError(f"all weights are 0 ({', '.join(names)}): nothing would be read")
    return numbers


def _number(name: str, weight: Any) -> float:
    if isinstance(weight, bool):
        raise ArgumentError(f"the weight of {name!r} must be a number, got {weight!r}")
    if hasattr(weight, "item"):  # numpy's, torch's
        with suppress(RuntimeError, ValueError):  # it has several
            weight = weight.item()
    if not isinstance(weight, int | float):
        raise ArgumentError(f"the weight of {name!r} must be an int or a float, got {weight!r}")
    if not -math.inf < weight < math.inf or weight < 0:
        raise ArgumentError(
            f"the weight of {name!r} must be finite and not negative, got {weight!r}"
        )
    return weight


def tempered(sizes: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return weights by length: size to the power of 1/temperature.

    1 is proportional to length; the larger the temperature, the more alike they are (Arivazhagan
    et al., "Massively multilingual neural machine translation in the wild", 2019).

    Raises:
        ArgumentError: If the temperature is not above 0.
    """
    bad = isinstance(temperature, bool) or not isinstance(temperature, int | float)
    if bad or not math.isfinite(temperature) or temperature <= 0:
        raise ArgumentError(f"temperature must be a number above 0, got {temperature!r}")
    logs = [math.log(size) for size in sizes]
    most = max(logs)  # subtracted first: a quotient may be infinite
    return tuple(max(1, round(math.exp((log - most) / temperature) * _STEPS)) for log in logs)
