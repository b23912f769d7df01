"""Random generators for one row, from its seed."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Generators", "generators"]


class Generators(NamedTuple):
    """Generators of three libraries.

    Attributes:
        random: Of Python.
        numpy: Of numpy.
        torch: Of PyTorch, on the CPU.
    """

    random: random.Random
    numpy: np.random.Generator
    torch: torch.Generator


def generators(seed: int) -> Generators:
    """Return generators for one row: what they draw depends on seed, epoch and sample alone.

    A transform with two parameters receives the batch and a seed for each row, which depend on the
    stream's seed, the epoch and the sample's index. So results are the same for any number of
    ranks and workers, any batch size, and after a resume. Global generators are not touched.

    Args:
        seed: Of a row, from 0 to 2**63 - 1; PyTorch's generator uses the low 32 bits.

    Example:
        >>> def noisy(batch, seeds):
        ...     rows = [generators(seed) for seed in seeds.tolist()]
        ...     return [row.random.random() for row in rows]
        >>> noisy({}, np.array([5])) == noisy({}, np.array([5]))
        True
    """
    seed = int(seed)
    python = random.Random(seed)  # noqa: S311 - it is for augmentation
    return Generators(python, np.random.default_rng(seed), torch.Generator().manual_seed(seed))
