"""The law of shuffle: how even the order is, on the order function alone.

deff, the design effect, is the variance of the mean of a batch over that of a uniform order. The
rows are sorted: the value of row i is i / N, so that rows near each other are alike.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from destrier.keyed import epoch_key, permute, subkey
from destrier.order import Order
from destrier.sizing import default_clump, default_num_splits

G = 256
ROWS = 20_480 * G + 77  # 2 048 batches in each decile
ROW_BYTES = [16, 44, 4096]


def epoch_rows(n, seed, epoch, num_splits, clump_size, window):
    """The rows of an epoch, computed split by split, in which every window is met once."""
    order = Order(n, seed, epoch, num_splits, clump_size, window)
    rows = np.empty(n, np.int32)
    for first in range(0, num_splits, 16):
        lanes = [np.arange(s, n, num_splits) for s in range(first, min(first + 16, num_splits))]
        g = np.concatenate(lanes)
        rows[g] = order.rows(g)
    return rows


def default_setting(row_bytes):
    """Splits, clump and window where nobody chose any."""
    num_splits = default_num_splits(ROWS, global_batch=G)
    sizes = default_clump(ROWS, num_splits=num_splits, row_bytes=row_bytes, remote=False)
    return (num_splits, *sizes)


SETTINGS = sorted({(256, 32, 8), *map(default_setting, ROW_BYTES)})


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
def epochs(request):
    """Two epochs of some 5.2 million rows, and the rows of a clump."""
    return [epoch_rows(ROWS, 1, epoch, *request.param) for epoch in (0, 1)], request.param[1]


def deff(rows, n, size):
    """The design effect of the means of successive runs of ``size`` samples."""
    means = rows[: len(rows) // size * size].reshape(-1, size).mean(axis=1, dtype=np.float64)
    uniform = (n * n - 1) / 12 / size * (n - size) / (n - 1)
    return ((means - (n - 1) / 2) ** 2).mean() / uniform


def test_one_batch_in_every_decile(epochs):
    for rows in epochs[0]:
        deciles = [deff(part, ROWS, G) for part in np.array_split(rows, 10)]
        assert max(deciles) <= 1.1, deciles


def test_sixteen_successive_batches(epochs):
    for rows in epochs[0]:
        assert deff(rows, ROWS, 16 * G) <= 1.5


def test_each_epoch_holds_every_row_once(epochs):
    for rows in epochs[0]:
        assert (np.bincount(rows, minlength=ROWS) == 1).all()


def test_two_epochs_are_uncorrelated(epochs):
    (first, second), clump_size = epochs
    for lag in (0, 1, G):
        z = np.corrcoef(first[lag:], second[: ROWS - lag])[0, 1] * math.sqrt(ROWS)
        assert abs(z) < 4
    # The places of the same row in both epochs, as well; the rows of a clump move as one.
    places = []
    for rows in (first, second):
        place = np.empty(ROWS, np.int64)
        place[rows] = np.arange(ROWS)
        places.append(place)
    assert abs(np.corrcoef(*places)[0, 1]) * math.sqrt(ROWS / clump_size) < 4


@pytest.mark.parametrize("num_splits", [64, 256])
def test_classes_in_a_batch(num_splits):
    n, classes, batch = 640_000, 100, 64
    rows = epoch_rows(n, 3, 0, num_splits, 32, 8)
    label = rows.astype(np.int64) * classes // n
    # canonical batches: steps of num_splits samples or more, sorted by split, sliced
    step = max(batch, num_splits)
    g = np.arange(n // step * step).reshape(-1, step)
    canonical = np.take_along_axis(g, np.argsort(g % num_splits, axis=1, kind="stable"), 1)
    batches = np.sort(label[canonical.reshape(-1, batch)], axis=1)
    distinct = 1 + (np.diff(batches, axis=1) > 0).sum(axis=1)
    assert distinct.mean() >= 46.5
    # a smaller step than there are splits is a plain run of samples
    runs = np.sort(label[: n // batch * batch].reshape(-1, batch), axis=1)
    assert (1 + (np.diff(runs, axis=1) > 0).sum(axis=1)).mean() >= 46.5


def z_of_chi_square(counts):
    """How far the chi-square of counts that should be even lies from its mean, in deviations."""
    expected = counts.sum() / len(counts)
    chi = ((counts - expected) ** 2).sum() / expected
    return (chi - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


@pytest.mark.parametrize(
    ("n", "num_splits", "clump_size", "window"),
    [(100_003, 256, 32, 8), (1003, 8, 3, 4), (1003, 16, 8, 4), (1003, 1, 1, 1)],
)
def test_rows_at_chosen_positions_are_uniform(n, num_splits, clump_size, window):
    g = np.array([0, 1, n // 2, n - 1])
    rows = np.array(
        [Order(n, seed, 0, num_splits, clump_size, window).rows(g) for seed in range(10_000)]
    )
    for column in rows.T:
        counts = np.bincount(column * 100 // n, minlength=100)
        # a hundred bins of n // 100 rows or one more are even enough at this many rows
        assert abs(z_of_chi_square(counts)) < 4


def check_permutations(orders):
    """Every permutation of range(n) must be a row of ``orders`` about equally often."""
    n = orders.shape[1]
    number = {p: i for i, p in enumerate(itertools.permutations(range(n)))}
    found = np.array([number[tuple(order)] for order in orders.tolist()])
    assert abs(z_of_chi_square(np.bincount(found, minlength=len(number)))) < 4


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_orders_are_every_permutation_equally_often(n):
    seeds, g = 20_000, np.arange(n)
    keys = [subkey(subkey(epoch_key(seed, 0), 0), 0) for seed in range(seeds)]
    # With clumps of one row an order is the keyed permutation: many at once, as they are slow alone
    flat = permute(np.tile(g, seeds), n, np.repeat(np.array(keys, np.uint64), n))
    orders = flat.reshape(seeds, n)
    for seed in range(20):
        assert np.array_equal(Order(n, seed).rows(g), orders[seed])
    check_permutations(orders)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_orders_of_one_window_are_every_permutation_equally_often(n):
    orders = [Order(n, seed, clump_size=n).rows(np.arange(n)) for seed in range(4000)]
    check_permutations(np.array(orders))
