"""The order against its vectors, and against a second implementation in plain Python."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from destrier.errors import ArgumentError, EmptyError
from destrier.keyed import epoch_key, hash_words, mix, permute, subkey, unpermute
from destrier.order import ORDER_VERSION, Order
from slow import slow_mix, slow_permute, slow_pieces, slow_sub

# ---- the second implementation: one sample at a time, in the words of docs/order.md ----------


class Case(NamedTuple):
    n: int
    seed: int = 0
    epoch: int = 0
    num_splits: int = 1
    clump_size: int = 1
    window: int = 1
    shuffle: bool = True


class SlowOrder:
    def __init__(self, case):
        self.case = case
        key = slow_mix(case.seed * 2**32 + case.epoch)
        self.kc, self.kr, self.kw, self.ko = (slow_sub(key, i) for i in range(4))
        self.full = case.n // case.clump_size
        self.o = self.ko * case.n >> 64
        self.J = case.window if case.clump_size > 1 and self.full >= 64 * case.window else 1

    def row(self, g):
        n, c = self.case.n, self.case.clump_size
        W = self.case.window * c
        t, s = divmod(g, self.case.num_splits)
        start, size = slow_pieces(n, self.case.num_splits)[s]
        if not self.case.shuffle:
            return start + t
        if c == 1:
            return self.line_row(start + t)
        f = (s * 0x9E3779B9 % 2**32) * W >> 32
        x = start + (t + (f - start) % W % size) % size
        edge = x // W * W
        lo, hi = max(start, edge), min(start + size, edge + W)
        window = sorted(range(lo, hi), key=lambda y: slow_mix(y ^ self.kw))
        return self.line_row(window[x - lo])

    def line_row(self, y):
        n, c = self.case.n, self.case.clump_size
        if y >= self.full * c:
            return (self.o + y) % n
        first = min(self.full, math.ceil((n - self.o) / c))
        k = (self.clump(y // c) + first) % self.full
        return (self.o + k * c + y % c) % n

    def clump(self, slot):
        if self.J == 1:
            return slow_permute(slot, self.full, slow_sub(self.kc, 0))
        m, i = divmod(slot, self.J)
        present = self.full % self.J if m == self.full // self.J else self.J
        strata = sorted(range(present), key=lambda j: slow_mix((m * self.J + j) ^ self.kr))
        j = strata[i]
        start, size = slow_pieces(self.full, self.J)[j]
        return start + slow_permute(m, size, slow_sub(self.kc, j))


# ---- cases -----------------------------------------------------------------------------------

words32 = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**31, 2**32 - 1]))


@st.composite
def cases(draw, largest=700):
    n = draw(st.one_of(st.integers(1, 8), st.integers(1, largest)))
    num_splits = draw(st.one_of(st.integers(1, n), st.just(n), st.integers(1, min(n, 9))))
    clump_size = draw(st.one_of(st.integers(1, 9), st.integers(1, 2 * n)))
    window = draw(st.one_of(st.integers(1, 5), st.integers(1, 80)))
    return Case(
        n, draw(words32), draw(words32), num_splits, clump_size, window, draw(st.booleans())
    )


many = settings(max_examples=300, deadline=None)


# ---- vectors ---------------------------------------------------------------------------------


def test_version():
    assert ORDER_VERSION == "destrier-1"


def test_vectors_of_the_mixer():
    expected = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0x975835DE1C9756CE]
    assert [mix(x) for x in range(3)] == expected
    assert hash_words(np.arange(3, dtype=np.uint64)).tolist() == expected


def test_vectors_of_the_keys():
    key = epoch_key(7, 3)
    assert key == 0xFD323448A4497C68
    assert [subkey(key, i) for i in range(4)] == [
        0x9896C0DD51301E1C,
        0x18BF4C8B26A943D2,
        0x107A3CF3FD9B835D,
        0xCE5C7360DB60B0FF,
    ]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (10, [6, 0, 3, 8, 1, 5, 4, 9, 2, 7]),
        (1003, [402, 658, 1, 163, 142]),
        (10**9, [968151637, 532070133, 704026845]),
    ],
)
def test_vectors_of_the_permutation(n, expected):
    x = np.arange(len(expected))
    assert permute(x, n, 5).tolist() == expected
    assert unpermute(np.array(expected), n, 5).tolist() == x.tolist()


@pytest.mark.parametrize(
    ("case", "strata", "expected"),
    [
        (Case(1003, 7, 3, 1, 1, 1), 1, [754, 156, 408, 797, 643, 333, 292, 304]),
        (
            Case(1003, 7, 3, 8, 3, 4),
            4,
            [665, 138, 650, 3, 520, 693, 258, 860, 851, 721, 495, 340],
        ),
        (
            Case(1003, 7, 3, 8, 16, 4),
            1,
            [502, 733, 608, 183, 660, 189, 384, 554, 283, 601, 854, 180],
        ),
    ],
)
def test_vectors_of_the_order(case, strata, expected):
    order = Order(*case)
    assert order.rows(np.arange(len(expected))).tolist() == expected
    assert order._strata == strata == SlowOrder(case).J
    assert order._rotation[0] == SlowOrder(case).o == 808
    assert [SlowOrder(case).row(g) for g in range(len(expected))] == expected


def test_vectors_of_the_steps():
    order = Order(1003, 7, 3, 8, 3, 4)
    assert order._full_clumps == 334
    assert order._rotation == (808, 65)
    first = np.arange(8)
    assert order.samples(first).tolist() == [430, 470, 486, 3, 979, 995, 521, 577]
    assert order._clumps(np.arange(12)).tolist() == [
        *(149, 221, 283, 24, 212, 88, 19, 263, 4, 304, 204, 163)
    ]
    assert order._line_rows(first).tolist() == [447, 448, 449, 663, 664, 665, 850, 851]
    lo, hi, place = order.locate(first)
    assert lo.tolist() == [0, 126, 252, 378, 504, 636, 756, 878]
    assert hi.tolist() == [12, 132, 264, 384, 516, 648, 768, 888]
    assert place.tolist() == [0, 1, 2, 4, 5, 1, 8, 1]
    rows, window, place = order.window_reads(lo[:1], hi[:1])
    content = [665, 851, 850, 664, 852, 73, 448, 72, 447, 449, 74, 663]
    assert rows.tolist() == sorted(content)
    assert window.tolist() == [0] * 12
    assert [content[p] for p in place] == rows.tolist()


def test_vectors_stand_in_the_documentation():
    text = (Path(__file__).parent.parent / "docs" / "order.md").read_text(encoding="utf-8")
    for values in (
        Order(1003, 7, 3).rows(np.arange(8)),
        Order(1003, 7, 3, 8, 3, 4).rows(np.arange(12)),
        Order(1003, 7, 3, 8, 16, 4).rows(np.arange(12)),
        Order(1003, 7, 3, 8, 3, 4).samples(np.arange(8)),
        Order(11, num_splits=4, shuffle=False).rows(np.arange(11)),
        permute(np.arange(10), 10, 5),
        permute(np.arange(5), 1003, 5),
        permute(np.arange(3), 10**9, 5),
    ):
        assert " ".join(map(str, values.tolist())) in text
    for i in range(4):
        assert f"{subkey(epoch_key(7, 3), i):#x}" in text


# ---- equal to the second implementation ------------------------------------------------------


@many
@given(cases(), st.data())
def test_equals_the_second_implementation(case, data):
    order, slow = Order(*case), SlowOrder(case)
    samples = data.draw(st.lists(st.integers(0, case.n - 1), min_size=1, max_size=40))
    rows = order.rows(np.array(samples))
    assert rows.tolist() == [slow.row(g) for g in samples]
    assert rows.dtype == np.int64


@settings(max_examples=40, deadline=None)
@given(cases(largest=4000), st.data())
def test_equals_the_second_implementation_with_strata(case, data):
    case = case._replace(
        n=case.n + 2000,
        clump_size=data.draw(st.integers(2, 4)),
        window=data.draw(st.integers(2, 7)),
    )
    order, slow = Order(*case), SlowOrder(case)
    assert order._strata == slow.J or not case.shuffle
    samples = data.draw(st.lists(st.integers(0, case.n - 1), min_size=1, max_size=20))
    assert order.rows(np.array(samples)).tolist() == [slow.row(g) for g in samples]


@many
@given(cases())
@example(Case(1, 0, 0, 1, 9, 3))
@example(Case(7, 1, 1, 7, 100, 80))
@example(Case(64, 1, 1, 64, 1, 1))
@example(Case(1003, 1, 1, 1003, 3, 4))
def test_bijection_and_inverse(case):
    order = Order(*case)
    g = np.arange(case.n)
    rows = order.rows(g)
    assert np.array_equal(np.sort(rows), g)
    assert np.array_equal(order.samples(rows), g)
    back = np.random.default_rng(0).permutation(case.n)
    assert np.array_equal(order.rows(order.samples(back)), back)


@many
@given(cases())
def test_windows_agree_with_rows(case):
    order = Order(*case._replace(shuffle=True))
    g = np.arange(case.n)
    lo, hi, place = order.locate(g)
    starts, first = np.unique(lo, return_index=True)
    rows, window, where = order.window_reads(starts, hi[first])
    if order.windowed:
        assert np.array_equal(rows, g)  # ascending, each once
        content = np.full((len(starts), int((hi - lo).max())), -1)
        content[window, where] = rows
        assert np.array_equal(content[np.searchsorted(starts, lo), place], order.rows(g))
    for split in range(min(case.num_splits, 3)):
        mine = slice(split, None, case.num_splits)
        step = np.diff(place[mine])
        same = np.diff(lo[mine]) == 0
        assert ((step[same] == 1) | (step[same] < 0)).all()


def test_single_samples_of_wide_windows():
    order = Order(50_003, 5, 6, num_splits=4, clump_size=512, window=16)
    together = order.rows(np.arange(50_003))
    assert np.array_equal(np.sort(together), np.arange(50_003))
    lo, hi, place = order.locate(np.arange(50_003))
    ends = np.flatnonzero((place < 3) | (place >= hi - lo - 3))
    for g in [*ends.tolist(), *range(0, 50_003, 311)]:
        assert order.rows(np.array([g]))[0] == together[g]
        assert order.samples(together[g : g + 1])[0] == g


@many
@given(st.integers(1, 5000), words32, words32)
def test_permutation_with_a_key_for_each_value(n, key, other):
    x = np.arange(min(n, 200))
    keys = np.where(x % 2 == 0, key, other).astype(np.uint64)
    image = permute(x, n, keys)
    assert image.tolist() == [slow_permute(int(v), n, int(k)) for v, k in zip(x, keys, strict=True)]
    assert np.array_equal(unpermute(image, n, keys), x)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 4095, 4096, 4097, 16385])
def test_permutation_is_a_bijection(n):
    image = permute(np.arange(n), n, 2**63 + n)
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(unpermute(image, n, 2**63 + n), np.arange(n))


def test_permutation_of_the_largest_domain():
    x = np.array([0, 1, 2**61, 2**62 - 1])
    image = permute(x, 2**62, 5)
    assert image.tolist() == [slow_permute(v, 2**62, 5) for v in x.tolist()]
    assert np.array_equal(unpermute(image, 2**62, 5), x)


# ---- without shuffle -------------------------------------------------------------------------


def test_table_order():
    order = Order(1003, seed=9, epoch=4, clump_size=32, window=8, shuffle=False)
    assert np.array_equal(order.rows(np.arange(1003)), np.arange(1003))


def test_contiguous_ranges():
    order = Order(11, num_splits=4, shuffle=False)
    assert order.rows(np.arange(11)).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8]


# ---- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2**32, 2**64])
@pytest.mark.parametrize("name", ["seed", "epoch"])
def test_seed_and_epoch_out_of_bounds(name, value):
    with pytest.raises(ArgumentError, match=rf"{name} must be from 0 to 2\*\*32 - 1, got {value}"):
        Order(10, **{name: value})


def test_largest_seed_and_epoch():
    case = Case(100, 2**32 - 1, 2**32 - 1)
    assert Order(*case).rows(np.arange(5)).tolist() == [SlowOrder(case).row(g) for g in range(5)]


def test_orders_are_distinct():
    pairs = [(seed, epoch) for seed in range(40) for epoch in range(20)]
    pairs += [(2**k, 0) for k in range(6, 32)] + [(0, 2**k) for k in range(6, 32)]
    for setting in ({}, {"num_splits": 8, "clump_size": 4, "window": 3}):
        orders = {
            Order(50, seed, epoch, **setting).rows(np.arange(50)).tobytes() for seed, epoch in pairs
        }
        assert len(orders) == len(pairs)


def test_integers_of_numpy_are_integers():
    case = Case(1003, 2**31 + 5, 3, 8, 3, 4)
    order = Order(*(np.int64(value) for value in case[:6]))
    assert np.array_equal(order.rows(np.arange(50)), Order(*case).rows(np.arange(50)))


# ---- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_splits", "clump_size", "window"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(name, value):
    with pytest.raises(ArgumentError, match=f"{name} must be at least 1, got {value}"):
        Order(10, **{name: value})


def test_more_splits_than_rows():
    with pytest.raises(
        ArgumentError, match=r"num_splits is 11, .* only 10 rows.*at least 1 row per"
    ):
        Order(10, num_splits=11)


def test_no_rows():
    with pytest.raises(EmptyError, match="at least one row"):
        Order(0)


def test_window_too_large_for_its_arithmetic():
    with pytest.raises(ArgumentError, match="clump_size 1000000 times window 100000 is too large"):
        Order(10, clump_size=10**6, window=10**5)
    largest = Case(10, 1, 2, 3, 2**31 - 1, 1)
    assert Order(*largest).rows(np.arange(10)).tolist() == [
        SlowOrder(largest).row(g) for g in range(10)
    ]


def test_no_samples():
    order = Order(1003, num_splits=8, clump_size=3, window=4)
    nothing = np.empty(0, np.int64)
    assert len(order.rows(nothing)) == len(order.samples(nothing)) == 0


# ---- a billion rows --------------------------------------------------------------------------


@pytest.mark.parametrize(("clump_size", "window"), [(1, 1), (32, 8), (512, 8)])
def test_random_access_to_a_billion_rows(clump_size, window):
    n = 10**9
    g = np.concatenate(
        [np.arange(512) + where for where in (0, n // 2, n - 512)]
        + [np.random.default_rng(1).integers(0, n, 512)]
    )
    case = Case(n, 7, 3, 256, clump_size, window)
    tracemalloc.start()
    order = Order(*case)
    rows = order.rows(g)
    back = order.samples(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(back, g)
    assert len(np.unique(rows)) == len(np.unique(g))
    assert peak < 16e6
    slow = SlowOrder(case)
    for i in (0, 700, 1535, 2000):
        assert rows[i] == slow.row(int(g[i]))


@given(
    st.integers(1, 90),
    words32,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 89)), max_size=12),
)
@many
def test_samples_of_several_epochs(n, seed, shuffle, samples):
    orders = Order(n, seed=seed, num_splits=min(n, 5), shuffle=shuffle)
    epochs = np.array([epoch for epoch, _ in samples], np.int64)
    g = np.array([g % n for _, g in samples], np.int64)
    single = [
        replace(orders, epoch=int(epoch)).rows(g[i : i + 1])[0] for i, epoch in enumerate(epochs)
    ]
    assert orders.rows_of(epochs, g).tolist() == single
    with pytest.raises(ArgumentError, match="windows"):
        Order(100, clump_size=2).rows_of(epochs, g)
