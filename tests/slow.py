"""The keyed primitives in plain Python, one integer at a time, in the words of docs/order.md."""

from __future__ import annotations

import itertools
import math

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def slow_mix(x: int) -> int:
    x = (x + GOLDEN) % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def slow_sub(key: int, i: int) -> int:
    return slow_mix(key ^ slow_mix(i))


def slow_below(h: int, n: int) -> int:
    return (h >> 32) * n >> 32


def slow_permute(x: int, n: int, key: int) -> int:
    if n == 1:
        return 0
    m = max(n, 64)
    a = next(side for side in itertools.count(math.isqrt(m)) if side * side >= m)
    b = math.ceil(m / a)
    keys = [slow_mix((key + (i + 1) * GOLDEN) % WORD) for i in range(8)]
    while True:
        left, right = divmod(x, b)
        for i in range(8):
            if i % 2 == 0:
                left = (left + slow_below(slow_mix((right + keys[i]) % WORD), a)) % a
            else:
                right = (right + slow_below(slow_mix((left + keys[i]) % WORD), b)) % b
        x = left * b + right
        if x < n:
            return x


def slow_pieces(n: int, k: int) -> list[tuple[int, int]]:
    """The pieces of cut(n, k), each as (start, size)."""
    q, r = divmod(n, k)
    return [(i * q + min(i, r), q + (i < r)) for i in range(k)]
