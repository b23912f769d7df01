"""Quotas: which slots of a mixture each source has, against a second implementation in lists."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from destrier.errors import ArgumentError
from destrier.mixing.quotas import LARGEST_WINDOW, Quotas, default_window, exact_shares
from slow_mixture import slow_counts, slow_shares, slow_window

many = settings(max_examples=150, deadline=None, derandomize=True)
WORDS = st.integers(0, 2**64 - 1)


@st.composite
def weightings(draw: st.DrawFn, most: int = 6) -> list[float]:
    """Weights that a window of some hundred slots can hold: integers, floats, some of them 0."""
    kind = draw(
        st.sampled_from([st.integers(1, 30), st.floats(0.05, 1), st.sampled_from([0.1, 0.2, 0.7])])
    )
    weights = draw(st.lists(st.one_of(kind, kind, st.just(0)), min_size=1, max_size=most))
    scale = draw(st.sampled_from([1, 1, 1e-300, 2.0**900]))
    weights = [weight * scale for weight in weights]
    return weights if any(weights) else [*weights, 1]


def least_window(weights: list[float]) -> int:
    return math.ceil(1 / min(share for share in slow_shares(weights) if share))


def quotas(weights: list[float], window: int, key: int = 5, end: int | None = None) -> Quotas:
    names = tuple(f"s{i}" for i in range(len(weights)))
    return Quotas(names, tuple(weights), window, key, end)


# ---- against the second implementation ------------------------------------------------------


@given(weightings(), st.integers(0, 90), WORDS, st.data())
@example([0.5, 0.1, 0.4], 0, 0, None)
@many
def test_slots_are_their_definition(
    weights: list[float], wider: int, key: int, data: st.DataObject | None
) -> None:
    window = least_window(weights) + wider
    made = quotas(weights, window, key)
    slow = [s for v in range(4) for s in slow_window(slow_shares(weights), window, v, key)]
    source, index = made.slots(np.arange(4 * window))
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == slow
    if data is None:
        return
    some = data.draw(st.lists(st.integers(0, 4 * window - 1), max_size=9))
    source, index = made.slots(np.array(some, np.int64))
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == [slow[slot] for slot in some]
    slot = data.draw(st.integers(0, 4 * window))
    drawn = Counter(source for source, _ in slow[:slot])
    assert made.counts_before(slot) == [drawn[i] for i in range(len(weights))]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 90), WORDS)
@many
def test_the_last_window_is_cut_at_the_end(sizes: list[int], window: int, key: int) -> None:
    end = sum(sizes)
    window = max(window, least_window(sizes))
    made = quotas(sizes, window, key, end)
    shares = slow_shares(sizes)
    slow = [s for v in range(-(-end // window)) for s in slow_window(shares, window, v, key, end)]
    source, index = made.slots(np.arange(end))
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == slow
    assert made.counts_before(end) == sizes
    source, index = made.slots(np.arange(end)[::-3])  # the cut window alone, and beside whole ones
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == slow[::-3]


@given(weightings(), st.integers(0, 40), st.data())
@many
def test_lengths_are_those_of_walking(
    weights: list[float], wider: int, data: st.DataObject
) -> None:
    window = least_window(weights) + wider
    made, shares = quotas(weights, window), slow_shares(weights)
    drawn = [i for i, share in enumerate(shares) if share]
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=len(weights), max_size=len(weights)))
    within = covering = 0
    while all(slow_counts(shares, (within + 1) * window)[i] <= sizes[i] for i in drawn):
        within += 1
    while any(slow_counts(shares, covering * window)[i] < sizes[i] for i in drawn):
        covering += 1
    assert made.windows_within(sizes) == within
    assert made.windows_covering(sizes) == covering


# ---- what a mixture promises ----------------------------------------------------------------


@given(weightings(), st.integers(0, 10**12), WORDS)
@many
def test_windows_hold_their_quotas_for_ever(weights: list[float], v: int, key: int) -> None:
    window = least_window(weights) + 3
    made = quotas(weights, window, key)
    before, after = (made.counts(w * window) for w in (v, v + 1))
    source, index = made.slots(np.arange(v * window, (v + 1) * window))
    for i, share in enumerate(slow_shares(weights)):
        # Never off by one sample, after any number of windows.
        assert abs(before[i] - v * window * share) < 1
        mine = index[source == i]
        assert mine.tolist() == list(range(before[i], after[i]))
        assert bool(len(mine)) == bool(share)


def test_weights_are_exact_fractions() -> None:
    assert exact_shares([0.1, 0.2, 0.7]) == slow_shares([0.1, 0.2, 0.7])
    assert exact_shares([0.1, 0.9])[0] != Fraction(1, 10), "a float is what it is"
    assert sum(exact_shares([0.1, 0.2, 0.3])) == 1
    # 10**23 windows on, where a float knows no single slot any longer.
    v = 10**23
    made = quotas([1, 2], 1000)
    assert made.counts(v * 1000) == [(v * 1000) // 3, v * 1000 - (v * 1000) // 3]


def test_a_source_of_all_weight() -> None:
    source, index = quotas([0, 4, 0], 1).slots(np.arange(50))
    assert set(source.tolist()) == {1}
    assert index.tolist() == list(range(50))


@pytest.mark.parametrize("count", [255, 256, 257, 400])
def test_many_sources(count: int) -> None:
    weights = [1 + i % 3 for i in range(count)]
    window = 2 * sum(weights)
    source, index = quotas(weights, window, 9).slots(np.arange(2 * window))
    slow = [s for v in range(2) for s in slow_window(slow_shares(weights), window, v, 9)]
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == slow


def test_blocks_of_many_windows_are_alike() -> None:
    made = quotas([3, 1, 4], 64, 11)
    whole = made.slots(np.arange(40_000 * 64 // 8))
    order = np.random.default_rng(0).permutation(len(whole[0]))
    mixed = made.slots(order)
    assert (mixed[0] == whole[0][order]).all()
    assert (mixed[1] == whole[1][order]).all()


def test_no_slots() -> None:
    assert [found.tolist() for found in quotas([1, 2], 8).slots(np.empty(0, np.int64))] == [[], []]


def test_epochs_differ_and_positions_are_even() -> None:
    # Each slot is of the rarer source in its share of keys: nothing is tied to a place.
    hits = np.zeros(16)
    for key in range(1500):
        hits += quotas([3, 1], 16, key * 0x9E3779B97F4A7C15 % 2**64).slots(np.arange(16))[0]
    assert abs(hits / 1500 - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 1500)


# ---- windows --------------------------------------------------------------------------------


@given(weightings(), st.integers(1, 400))
@many
def test_a_window_that_cannot_hold_a_quota_is_named(weights: list[float], window: int) -> None:
    least = least_window(weights)
    if window >= least:
        quotas(weights, window)
        return
    with pytest.raises(ArgumentError, match=rf"window of {window}.* window of at least") as caught:
        quotas(weights, window)
    named = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert window < named <= least
    first = next(i for i, s in enumerate(slow_shares(weights)) if s and s * window < 1)
    assert f"'s{first}'" in str(caught.value)


def test_a_quota_of_just_one_slot_is_enough() -> None:
    assert quotas([1, 9], 10).counts(10) == [1, 9]
    with pytest.raises(ArgumentError, match=r"'s0' has 0\.1 .* window of 9; .* at least 10"):
        quotas([1, 9], 9)


@pytest.mark.parametrize("weights", [[1, 1e-9], [1e308, 1e-308], [1, 5e-324], [2**200, 1]])
def test_weights_too_far_apart_are_refused(weights: list[float]) -> None:
    window = default_window(exact_shares(weights), [1 << 20] * len(weights))
    with pytest.raises(ArgumentError, match=f"at most {LARGEST_WINDOW} .* weight is too small"):
        quotas(weights, window)


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1, 1e300, 2**2000])
def test_only_the_proportion_of_weights_counts(scale: Any) -> None:
    weights = [3 * scale, 1 * scale]
    assert default_window(exact_shares(weights), [1 << 20] * len(weights)) == 1024
    one, other = quotas(weights, 64).slots(np.arange(256)), quotas([3, 1], 64).slots(np.arange(256))
    assert (one[0] == other[0]).all()
    assert (one[1] == other[1]).all()


@given(weightings())
@many
def test_the_default_window_holds_every_quota(weights: list[float]) -> None:
    for slots in (1 << 20, 1000, 1):
        window = default_window(exact_shares(weights), [slots] * len(weights))
        assert window >= (1024 if slots == 1 << 20 else 1)
        assert window & (window - 1) == 0
        quotas(weights, window)


def test_small_sources_have_windows_of_which_an_epoch_holds_many() -> None:
    shares = exact_shares([1, 1])
    assert default_window(shares, [560, 300]) == 8  # of 600 samples, 9 windows of 64 would be few
    assert default_window(exact_shares([1, 999]), [10, 10]) == 1024  # one slot at least


def test_vectors() -> None:
    """The order of a mixture is part of the format: a change of it is a new order version."""
    source, index = quotas([3, 1], 8, 0x0123456789ABCDEF).slots(np.arange(16))
    assert source.tolist() == [0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert index.tolist() == [0, 0, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9, 10, 11]
