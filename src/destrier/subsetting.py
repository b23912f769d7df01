"""Views made of views: some rows, a fraction of the rows, several views one after another."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from destrier.errors import ArgumentError, MissingRowError
from destrier.keyed import SUBSAMPLE_KEY, Ints, epoch_key, permute, subkey
from destrier.permutation import Permutation
from destrier.rowlists import chunks, compact, stack, streamed_rows
from destrier.view import View, as_view, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from destrier.table import TableLike

__all__ = ["chosen_rows", "concat", "subsample", "subset"]

_PIECE = 1 << 18


def subset(
    source: TableLike | View,
    rows: str | slice | Sequence[int] | np.ndarray[Any, Any] | Permutation,
) -> View:
    """Choose rows of a table or view.

    Args:
        source: A table or a view.
        rows: An SQL expression, which keeps the rows for which it is true, in their order and as
            often as they come; a slice; a list or array of places, from 0, in an order of your own
            and with repeats as you like; or a `Permutation` of the table (not of a view).

    Raises:
        ArgumentError: If the rows are none of these.
        MissingRowError: If a place is negative or beyond the last row; it is an IndexError too.
        FilterError: If Lance cannot run the expression.
        EmptyError: If the expression keeps no row.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(10)}), uri)
        >>> odd = subset(uri, "id % 2 = 1")
        >>> [row["id"] for row in odd], subset(odd, [4, 0, 0])[0]
        ([1, 3, 5, 7, 9], {'id': 9})
    """
    if isinstance(rows, Permutation) and isinstance(source, View):
        raise ArgumentError(
            f"a permutation lists rows of a table, but the source is a view of {len(source)} of "
            f"them: give the table, or the filter or places that you want"
        )
    view = as_view(source)
    total = view.table.num_rows
    if isinstance(rows, str):
        return view_of(view, streamed_rows(view.table, view.rows, rows))
    if isinstance(rows, slice):
        return view[rows]
    if isinstance(rows, Permutation):
        rows.check_table(view.table)
        return view_of(view, compact(chunks(rows.rows), total))
    places = _places(rows, len(view))
    pieces = (view.rows.offsets(places[i : i + _PIECE]) for i in range(0, len(places), _PIECE))
    return view_of(view, compact(pieces, total))


def _places(rows: Any, count: int) -> Ints:
    try:
        given = np.asarray(rows)
    except (TypeError, ValueError, RuntimeError):  # lists in lists, a tensor on another device
        given = np.empty(0, np.object_)
    if given.ndim == 1 and not len(given) and given.dtype == np.float64:
        given = given.astype(np.int64)  # what numpy makes of an empty list
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ArgumentError(
            "rows are chosen by an SQL expression, a slice, or a list or array of integers in one "
            f"dimension, got {_shown(rows, given)}"
        )
    bad = np.flatnonzero((given < 0) | (given >= count))
    if len(bad):
        raise MissingRowError(
            f"place {bad[0]} of the list is row {given[bad[0]]}, but there are {count} rows, from "
            "0 on"
        )
    return given.astype(np.int64)


def _shown(rows: Any, given: np.ndarray[Any, Any]) -> str:
    if given.dtype == np.bool_:
        return "booleans: numpy.flatnonzero(mask) makes places of them"
    kind = type(rows).__name__
    return kind if given.dtype == np.object_ else f"{kind} of {given.dtype}, shape {given.shape}"


def subsample(source: TableLike | View, fraction: float, *, seed: int = 0) -> View:
    """Choose a random fraction of the rows, or repeat them.

    Of N rows, ``round(fraction·N)`` are chosen, none twice, and stay in their order. Above 1, all
    rows come ``floor(fraction)`` times, one time after another, and then such a choice of them.
    With one seed a smaller fraction is a part of a larger one.

    A keyed permutation puts the places in a line, of which the first ones are chosen, so which
    rows they are depends on N and the seed alone.

    Args:
        source: A table or a view.
        fraction: Over 0. It is the decimal number that it prints as.
        seed: From 0 to 2**32 - 1.

    Raises:
        ArgumentError: If the fraction is no finite number over 0.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(10)}), uri)
        >>> len(subsample(uri, 0.3)), len(subsample(uri, 2.5))
        (3, 25)
    """
    try:
        share = Fraction(str(float(fraction))) if not isinstance(fraction, bool) else Fraction(0)
    except (TypeError, ValueError):
        share = Fraction(0)
    if share <= 0:
        raise ArgumentError(f"fraction must be a finite number over 0, got {fraction!r}")
    view = as_view(source)
    whole, part = divmod(share, 1)
    key = subkey(epoch_key(seed, 0), SUBSAMPLE_KEY)
    rest = compact(chosen_rows(view, round(part * len(view)), key), view.table.num_rows)
    return view_of(view, stack([(view.rows, whole), (rest, 1)]))


def chosen_rows(view: View, count: int, key: int) -> Iterator[Ints]:
    """Yield the offsets of so many random rows of a view, none twice, in their order."""
    first = 0
    for piece in chunks(view.rows) if count else ():
        line = permute(np.arange(first, first + len(piece)), len(view), key)
        yield piece[line < count]
        first += len(piece)


def concat(views: Sequence[TableLike | View]) -> View:
    """Return the rows of several views of one table, one view after another, with repeats.

    Args:
        views: Views of the same rows of a table, or the table itself.

    Raises:
        ArgumentError: If there are none, or two are of different tables or columns.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(10)}), uri)
        >>> view = View(uri)
        >>> [row["id"] for row in concat([view[8:], view[:2], view[:1]])]
        [8, 9, 0, 1, 0]
    """
    if isinstance(views, str | View) or not isinstance(views, Sequence) or not views:
        raise ArgumentError(f"concat takes a list of views, got {views!r}")
    made = [as_view(each) for each in views]
    first = made[0]
    for each in made[1:]:
        if each.table.identity != first.table.identity:
            raise ArgumentError(
                f"concat takes views of one table, got {first.table.name} with identity "
                f"{first.table.identity} and {each.table.name} with identity "
                f"{each.table.identity}: mix streams of several tables with Mixture, or merge the "
                "tables"
            )
        if each.columns != first.columns:
            raise ArgumentError(
                f"concat takes views of the same columns, got {first.columns or 'all'} and "
                f"{each.columns or 'all'}"
            )
    return view_of(first, stack((each.rows, 1) for each in made))
