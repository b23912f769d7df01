"""Random samples of rows: uniform, weighted, balanced over classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from destrier.check import integer
from destrier.errors import ArgumentError, EmptyError
from destrier.expressions import classes, numbers
from destrier.keyed import MASK, SAMPLE_KEY, Ints, Words, epoch_key, hash_words, subkey
from destrier.rowlists import compact, layers
from destrier.subsetting import chosen_rows
from destrier.view import View, as_view, view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from destrier.table import TableLike

__all__ = ["sample"]

_PIECE = 1 << 18
_BITS = 52  # of a draw: half a step more is exact in a float64, and never 0 or 1


def sample(
    source: TableLike | View,
    n: int,
    *,
    weights: str | Sequence[float] | np.ndarray[Any, Any] | None = None,
    balance: str | None = None,
    replacement: bool = True,
    seed: int = 0,
) -> View:
    """Draw n rows at random.

    With replacement each draw is independent, so that a row can come several times; without, no
    row comes twice. Rows come in table order, first each of them once, then those that come
    twice or more, and so on; a stream shuffles them as any others. Draws depend on the seed, n
    and the rows alone, on no generator of a library's.

    Without replacement the rows with the n least of ``-log(u) / weight`` are taken, u uniform
    (Efraimidis, Spirakis: "Weighted random sampling with a reservoir", 2006), which is as if they
    were drawn one after another.

    While it runs, weights and classes take up to 30 bytes for each row of the table.

    Args:
        source: A table or a view.
        n: How many rows, 0 or more.
        weights: Chances in proportion to a column or SQL expression, or to an array or list of
            one number a row of the source. None is a uniform sample.
        balance: A column or SQL expression whose values are classes. Each class gets n / classes
            rows, the first classes of the table one more where that is no integer.
        replacement: Whether a row can come several times.
        seed: From 0 to 2**32 - 1.

    Raises:
        ArgumentError: If a weight is negative, not finite or null, if all are 0, or if there are
            fewer rows than are to be drawn without replacement.
        EmptyError: If there are no rows to draw from.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> numbers = pa.table({"id": range(100), "rare": [i % 50 == 0 for i in range(100)]})
        >>> _ = lance.write_dataset(numbers, uri)
        >>> even = sample(uri, 80, balance="rare")
        >>> sum(row["rare"] for row in even)
        40
        >>> heavy = sample(uri, 10, weights="id * id", replacement=False, seed=1)
    """
    n = integer("n", n)
    key = subkey(epoch_key(seed, 0), SAMPLE_KEY)
    view = as_view(source)
    if weights is not None and balance is not None:
        raise ArgumentError(
            f"weights and balance={balance!r} are both given; weights alone can say both: one "
            "over the size of a row's class, times what else it shall weigh"
        )
    if n and not len(view):
        raise EmptyError(f"there are no rows to draw {n} from: the view has none")
    if balance is not None:
        places = _balanced(view, n, balance, key, replacement=replacement)
    elif weights is not None:
        places = _weighted(_weights(view, weights), n, key, replacement=replacement)
    elif replacement:
        places = _uniform(n, key, len(view))
    else:
        _check_enough(n, len(view), "rows")
        rows = compact(chosen_rows(view, n, key), view.table.num_rows)
        return view_of(view, rows)
    places.sort()
    first = np.flatnonzero(np.diff(places, prepend=-1))
    counts = np.diff(first, append=len(places))
    return view_of(view, layers(view.rows, places[first], counts, view.table.num_rows))


def _check_enough(n: int, there: int, what: str) -> None:
    if n > there:
        raise ArgumentError(
            f"n is {n}, but there are only {there} {what}: draw fewer, or with replacement"
        )


# ---- draws ----------------------------------------------------------------------------------


def _words(places: Ints, key: int) -> Words:
    """A word for each place: what `subkey` gives."""
    return hash_words(hash_words(places.astype(np.uint64)) ^ np.uint64(key & MASK))


def _draws(places: Ints, key: int) -> NDArray[np.float64]:
    """A number between 0 and 1 for each place, neither of them ever."""
    words = _words(places, key) >> np.uint64(64 - _BITS)
    drawn: NDArray[np.float64] = (words.astype(np.float64) + 0.5) * 2.0**-_BITS
    return drawn


def _uniform(n: int, key: int, count: int) -> Ints:
    out = np.empty(n, np.int64)
    for i in range(0, n, _PIECE):
        some = np.arange(i, min(i + _PIECE, n))
        out[some] = np.minimum(_draws(some, key) * count, count - 1)
    return out


def _weighted(weights: NDArray[np.float64], n: int, key: int, *, replacement: bool) -> Ints:
    if not n:
        return np.empty(0, np.int64)
    if not replacement:
        return _exponential(weights, n, key)
    weights /= weights.max()  # so that no sum overflows
    reached = np.cumsum(weights, out=weights)  # one after another, so alike on every machine
    last = int(np.searchsorted(reached, reached[-1]))
    out = np.empty(n, np.int64)
    for i in range(0, n, _PIECE):
        some = np.arange(i, min(i + _PIECE, n))
        drawn = np.sort(_draws(some, key)) * reached[-1]  # sorted: neighbours in memory
        out[some] = np.minimum(np.searchsorted(reached, drawn, side="right"), last)
    return out


def _exponential(weights: NDArray[np.float64], n: int, key: int) -> Ints:
    positive = np.flatnonzero(weights > 0)
    _check_enough(n, len(positive), f"of {len(weights)} rows with a weight over 0")
    waits = np.empty(len(positive))
    for i in range(0, len(positive), _PIECE):
        some = positive[i : i + _PIECE]
        with np.errstate(over="ignore"):
            waits[i : i + len(some)] = -_log(_draws(some, key)) / weights[some]
    most = np.partition(waits, n - 1)[n - 1]
    chosen = waits < most
    ties = np.flatnonzero(waits == most)
    chosen[ties[: n - int(chosen.sum())]] = True
    found: Ints = positive[chosen]
    return found


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The natural logarithm by additions, multiplications and divisions alone.

    Those are the same on every machine to the last bit, which logarithms of libraries are not.
    With x = m·2^e and m in [2/3, 4/3): log x = e·log 2 + 2·artanh((m - 1) / (m + 1)).
    """
    m, e = np.frexp(x)
    low = m < 2 / 3
    m, e = np.where(low, 2 * m, m), e - low
    s = (m - 1) / (m + 1)
    square = s * s
    series = np.zeros_like(s)
    for k in range(23, 0, -2):
        series = series * square + 1 / k
    logarithm: NDArray[np.float64] = e * 0.6931471805599453 + 2 * s * series
    return logarithm


# ---- weights and classes --------------------------------------------------------------------


def _weights(view: View, weights: Any) -> NDArray[np.float64]:
    """Weights of the rows of a view, which may be changed in place."""
    if isinstance(weights, str):
        values = numbers(view, weights, "weights")
        what = f"weights={weights!r}"
    else:
        what = "weights"
        try:
            values = np.array(weights, np.float64)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"weights must be a column, an SQL expression, or numbers, got {weights!r}"
            ) from None
        if values.shape != (len(view),):
            raise ArgumentError(
                f"weights has shape {values.shape}, but there must be one number for each of the "
                f"{len(view)} rows"
            )
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        raise ArgumentError(
            f"{what} is {values[bad[0]]} for row {bad[0]} of the {len(view)} rows: weights must be "
            "finite and not negative"
        )
    if len(view) and values.max() == 0:
        raise ArgumentError(f"{what} is 0 for all of the {len(view)} rows, so none can be drawn")
    return values


def _balanced(view: View, n: int, column: str, key: int, *, replacement: bool) -> Ints:
    found = classes(view, column, "balance")
    sizes = found.counts()
    present = np.flatnonzero(sizes)
    quotas = np.zeros(len(sizes), np.int64)
    if len(present):
        quotas[present] = n // len(present)
        quotas[present[: n % len(present)]] += 1
    short = np.flatnonzero(quotas > sizes)
    if len(short) and not replacement:
        value = found.values[int(short[0])].as_py()
        raise ArgumentError(
            f"n={n} is {quotas[short[0]]} rows of each of {len(present)} classes, but "
            f"{column}={value!r} has only {sizes[short[0]]}: draw fewer, or with replacement"
        )
    starts = np.cumsum(sizes) - sizes
    if replacement:
        grouped = np.argsort(found.codes, kind="stable")
        drawn = np.repeat(np.arange(len(sizes)), quotas)
        inside = (_draws(np.arange(n), key) * sizes[drawn]).astype(np.int64)
        places: Ints = grouped[starts[drawn] + np.minimum(inside, sizes[drawn] - 1)]
        return places
    # Of each class those with the least words, which are in no two places the same.
    grouped = np.lexsort((_words(np.arange(len(view)), key), found.codes))
    rank = np.arange(len(view)) - starts[found.codes[grouped]]
    chosen: Ints = grouped[rank < quotas[found.codes[grouped]]]
    return chosen
