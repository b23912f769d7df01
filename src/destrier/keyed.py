"""Keyed primitives: a mixer of words, keys, and a keyed permutation of the integers below n.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014). The permutation is a Feistel network on an a × b grid with cycle walking
(Black, Rogaway: "Ciphers with arbitrary finite domains", CT-RSA 2002). ``docs/order.md`` defines
both, with test vectors.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from destrier.arrays import divided
from destrier.check import integer

__all__ = [
    "BUCKET_KEY",
    "GROUP_KEY",
    "HASH_KEY",
    "MASK",
    "MEMBERSHIP_KEY",
    "MIXTURE_KEY",
    "PACKING_KEY",
    "ROW_SEED_KEY",
    "SAMPLE_KEY",
    "SUBSAMPLE_KEY",
    "Ints",
    "Words",
    "cut",
    "epoch_key",
    "hash_words",
    "mix",
    "permute",
    "permute_each",
    "permute_windows",
    "subkey",
    "unpermute",
]

# Keys 0 to 3 of an epoch are the order's own; these are for whatever else is drawn from the pair
# of seed and epoch, and no two uses share one.
MEMBERSHIP_KEY = 4
ROW_SEED_KEY = 5
MIXTURE_KEY = 6
PACKING_KEY = 7
BUCKET_KEY = 8
SUBSAMPLE_KEY = 16
SAMPLE_KEY = 17
GROUP_KEY = 18
HASH_KEY = 19

Ints: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_ROUNDS = 8
_SMALLEST_DOMAIN = 64  # below it the grid is biased: see docs/order.md
_BLOCK = 1 << 14  # words worked on at once: they stay in the processor's cache
_WINDOW_BLOCK = 1 << 16  # cells of windows: few operations are done on each


def mix(x: int) -> int:
    """Mix a word: a bijection of the unsigned 64-bit integers."""
    x = (x + _GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * _M1) & MASK
    x = ((x ^ (x >> 27)) * _M2) & MASK
    return x ^ (x >> 31)


def hash_words(x: Words) -> Words:
    """Mix an array of words, as `mix` does one."""
    x = x + np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_M2)
    x ^= x >> np.uint64(31)
    return x


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch; no two pairs of seed and epoch share one."""
    seed = integer("seed", seed, 0, 1 << 32)
    epoch = integer("epoch", epoch, 0, 1 << 32)
    return mix((seed << 32) + epoch)


def subkey(key: int, i: int) -> int:
    """Derive the i-th key of a key."""
    return mix(key ^ mix(i))


def cut(n: int, k: int, x: Ints) -> tuple[Ints, Ints, Ints]:
    """For each of the positions ``x`` of [0, n) cut into k pieces: piece, its start, its size."""
    q, r = divmod(n, k)
    head = r * (q + 1)
    piece = np.where(x < head, x // (q + 1), r + (x - head) // max(q, 1))
    return piece, piece * q + np.minimum(piece, r), q + (piece < r).astype(np.int64)


def _round_keys(key: int | Words) -> list[np.uint64] | list[Words]:
    steps = [((i + 1) * _GOLDEN) & MASK for i in range(_ROUNDS)]
    if isinstance(key, int):
        return [np.uint64(mix((key + step) & MASK)) for step in steps]
    return [hash_words(key + np.uint64(step)) for step in steps]


def _grid(n: int) -> tuple[int, int]:
    m = max(n, _SMALLEST_DOMAIN)
    a = math.isqrt(m - 1) + 1
    return a, -(-m // a)


def _walk(x: Words, n: int, keys: Any, backward: bool) -> Words:
    """Run the rounds over ``x`` in place until every value is below n."""
    a, b = (np.uint64(side) for side in _grid(n))
    half = np.uint64(32)
    rounds = range(_ROUNDS - 1, -1, -1) if backward else range(_ROUNDS)
    todo: Any = slice(None)
    values = x
    while True:
        left, right = divided(values, b)
        for i in rounds:
            key = keys[i] if isinstance(keys[i], np.uint64) else keys[i][todo]
            source, target, size = (right, left, a) if i % 2 == 0 else (left, right, b)
            shift = hash_words(source + key)
            shift >>= half
            shift *= size
            shift >>= half
            if backward:
                np.subtract(size, shift, out=shift)
            target += shift
            # target < 2·size: subtract size where that does not wrap below zero
            np.minimum(target, target - size, out=target)
        left *= b
        left += right
        x[todo] = left
        outside = np.flatnonzero(x >= np.uint64(n))
        if not outside.size:
            return x
        todo = outside
        values = x[todo]


def _apply(x: NDArray[Any], n: int, key: int | Words, backward: bool) -> Ints:
    out = np.array(x, dtype=np.uint64)
    if n == 1 or not out.size:
        return np.zeros(out.shape, np.int64)
    shared = _round_keys(key) if isinstance(key, int) else None
    for start in range(0, len(out), _BLOCK):
        piece = slice(start, start + _BLOCK)
        keys = shared if shared is not None else _round_keys(key[piece])  # type: ignore[index]
        _walk(out[piece], n, keys, backward)
    return out.view(np.int64)


def permute(x: NDArray[Any], n: int, key: int | Words) -> Ints:
    """Apply the keyed permutation of [0, n) to each value of ``x``.

    Args:
        x: Integers in [0, n), any shape of one dimension.
        n: Size of the domain, up to 2**62.
        key: One key, or one for each value.

    Returns:
        The images, int64.

    Example:
        >>> permute(np.arange(10), 10, 5).tolist()
        [6, 0, 3, 8, 1, 5, 4, 9, 2, 7]
    """
    return _apply(x, n, key, backward=False)


def unpermute(x: NDArray[Any], n: int, key: int | Words) -> Ints:
    """Apply the inverse of `permute`."""
    return _apply(x, n, key, backward=True)


def permute_each(x: Ints, sizes: Ints, keys: Words, backward: bool) -> Ints:
    """Permute each value in a domain of its own size; there are at most two sizes."""
    out = np.empty(len(x), np.int64)
    for n in np.unique(sizes).tolist():
        chosen = sizes == n
        out[chosen] = _apply(x[chosen], n, keys[chosen], backward)
    return out


def permute_windows(n: int, keys: Words) -> Ints:
    """Apply the permutation of [0, n) of each key to all of its domain.

    Returns:
        One row a key, int64: what `permute` gives of 0, 1, 2, ... n - 1.
    """
    if n <= 1:
        return np.zeros((len(keys), n), np.int64)
    out = np.empty((len(keys), n), np.int64)
    rows = max(1, _WINDOW_BLOCK // n)
    for start in range(0, len(keys), rows):
        piece = slice(start, start + rows)
        _walk_windows(out[piece], n, _round_keys(keys[piece]))
    return out


def _walk_windows(out: Ints, n: int, keys: Any) -> None:
    """The rounds over all of the domain, a key a row; then over what left the domain.

    What a round adds depends on one coordinate and the key. There are few coordinates: they are
    hashed once a row, and looked up for its cells.
    """
    a, b = _grid(n)
    half = np.uint64(32)
    cells = np.divmod(np.arange(n), b)
    left, right = (np.repeat(side[None], len(out), axis=0) for side in cells)
    for i in range(_ROUNDS):
        source, target, size, lines = (right, left, a, b) if i % 2 == 0 else (left, right, b, a)
        shifts = hash_words(np.arange(lines, dtype=np.uint64) + keys[i][:, None])
        shifts >>= half
        shifts *= np.uint64(size)
        shifts >>= half
        first = np.arange(0, shifts.size, lines)
        target += np.take(shifts.view(np.int64), source + first[:, None])
        # target < 2·size: subtract size where that does not wrap below zero
        words = target.view(np.uint64)
        np.minimum(words, words - np.uint64(size), out=words)
    np.multiply(left, b, out=out)
    out += right
    row, column = np.nonzero(out >= n)
    if row.size:
        again = out[row, column].view(np.uint64)
        out[row, column] = _walk(again, n, [key[row] for key in keys], backward=False).view(
            np.int64
        )
