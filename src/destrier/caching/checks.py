"""Checksums of pages of bytes, made so that reading a page costs little more than copying it.

The sum of a page is the sum of its 64-bit words, each times an odd number of its own, modulo 2⁶⁴:
a changed word changes it always, and other damage goes unseen once in 2⁶⁴ or so. Each page of a
file begins from another number, so that one page is not taken for another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from destrier.keyed import Words, hash_words

__all__ = ["PAGE_BYTES", "page_begins", "page_sums"]

PAGE_BYTES = 8 << 10  # a larger one is read in vain around small values, a smaller one costs calls

_WORDS = PAGE_BYTES // 8
_FACTORS: Words = hash_words(np.arange(_WORDS, dtype=np.uint64)) | np.uint64(1)


def page_begins(count: int) -> Words:
    """What the sum of each page of a file begins from."""
    begins: Words = hash_words(np.arange(count, dtype=np.uint64))
    return begins


def page_sums(data: NDArray[np.uint8]) -> Words:
    """The sum of each page, without what it begins from.

    Args:
        data: Whole pages, one after another.
    """
    sums: Words = np.einsum("ij,j->i", data.view("<u8").reshape(-1, _WORDS), _FACTORS)
    return sums
