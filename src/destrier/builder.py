"""The builder of permutations: filter, cut into parts, shuffle.

What part a row belongs to is a pure function, so a permutation is described, not stored: a random
part costs one or two bytes a selected row once its rows are asked for, a sequential one nothing.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from destrier.check import integer
from destrier.errors import (
    ArgumentError,
    ColumnError,
    EmptyError,
    FilterError,
    ReadError,
    StateError,
)
from destrier.keyed import epoch_key
from destrier.lists import OrderedRows, scan
from destrier.membership import (
    MAX_PARTS,
    CalculatedCodes,
    GivenMembership,
    Membership,
    PartRows,
    RandomMembership,
    SlicedRows,
    code_type,
    hash_rows,
    hashable,
)
from destrier.order import Order
from destrier.permutation import Part, Permutation, describe
from destrier.selection import RowList, select_rows
from destrier.table import Table, open_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from destrier.table import TableLike

    Ratio: TypeAlias = float | Fraction

__all__ = ["PermutationBuilder"]

_SUM_TOLERANCE = Fraction(1, 10**9)
_DEFAULT_WINDOW = 8
_NO_PART = -1


class FilteredRows:
    """The rows that a filter keeps. It pickles to the table and the filter."""

    def __init__(self, table: Table, filter: str) -> None:
        rows = select_rows(table, filter)
        self.table = table
        self.filter = filter
        self.count = len(rows)
        self.digest = rows.digest
        self._rows: RowList | None = rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def __len__(self) -> int:
        return self.count

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look the positions up in the selection."""
        if self._rows is None:
            rows = select_rows(self.table, self.filter)
            if rows.digest != self.digest:
                raise StateError(
                    f"the filter {self.filter!r} kept {self.count} rows of {self.table.name}, and "
                    f"now keeps {len(rows)} rows, or others: it must give the same rows each time"
                )
            self._rows = rows
        return self._rows.offsets(positions)


class PermutationBuilder:
    """Builds a `Permutation`: filter the rows, cut them into parts, shuffle.

    Every step is optional. Without a filter all rows are taken; without a split they are one list
    without a name; without `shuffle` they stay in the order of the table. Parts without names are
    called "0", "1", and so on.

    Args:
        table: A URI, a path, a Lance dataset or a LanceDB table.
        version: A version number or a tag; None is the latest, or the one that is open.
        storage_options: Passed to Lance untouched.

    Example:
        >>> import tempfile, lance, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"id": range(1003)}), uri)
        >>> builder = PermutationBuilder(uri).filter("id % 2 = 0")
        >>> builder = builder.split_random(ratios=[0.8, 0.2], seed=7, names=["train", "val"])
        >>> permutation = builder.shuffle(seed=7).execute()
        >>> permutation
        Permutation(502 rows, parts: train 401, val 101)
        >>> len(permutation["val"])
        101
    """

    def __init__(
        self,
        table: TableLike,
        *,
        version: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._table = open_table(table, version=version, storage_options=storage_options)
        self._filter: str | None = None
        self._split: Callable[[RowList], list[Part]] | None = None
        self._split_name = ""
        self._order: Callable[[int], Order] | None = None
        self._num_splits = 1

    def filter(self, sql: str) -> PermutationBuilder:
        """Keep the rows for which an SQL expression of Lance's dialect is true."""
        if self._filter is not None:
            raise ArgumentError(
                f"the filter is {self._filter!r} already: write both conditions into one, with AND"
            )
        if not isinstance(sql, str):
            raise ArgumentError(f"a filter is SQL text, got {type(sql).__name__}")
        self._filter = sql
        return self

    # ---- parts ------------------------------------------------------------------------------

    def split_random(
        self,
        *,
        ratios: Sequence[Ratio] | None = None,
        counts: Sequence[int] | None = None,
        fixed: int | None = None,
        seed: int = 0,
        names: Sequence[str] | None = None,
        clump_size: int | None = None,
    ) -> PermutationBuilder:
        """Cut the rows into random parts of exact sizes.

        Exactly one of ratios, counts and fixed says how large the parts are. A ratio is the
        decimal number that it prints as, and the sizes are ``floor(N·(r₁ + … + rᵢ))`` apart, so
        that 0.7 of 1,000 rows are 700, and ratios that sum to 1 leave no row out. Rows beyond
        the sum are in no part.

        Which part a row is in depends on its position in the selection, their number N, and the
        seed: a keyed permutation puts the positions in a line, which is cut at the sizes.

        Args:
            ratios: The share of each part; over 0, and 1 at most in all.
            counts: The rows of each part.
            fixed: A number of parts, whose sizes differ by at most one.
            seed: From 0 to 2**32 - 1.
            names: The names of the parts.
            clump_size: Keep runs of so many consecutive selected rows in one part. Exact sizes
                cut one run at each border.
        """
        names = self._begin("split_random", names)
        parts = _number_of_parts(ratios, counts, fixed)
        seed = integer("seed", seed, 0)
        epoch_key(seed, 0)
        clump = 1 if clump_size is None else integer("clump_size", clump_size, 1)
        called = _called(parts, names)

        def split(rows: RowList) -> list[Part]:
            bounds = _bounds(len(rows), ratios, counts, fixed)
            membership = RandomMembership(len(rows), bounds, seed=seed, clump_size=clump)
            return _member_parts(rows, membership, called, np.diff(bounds).tolist())

        self._split = split
        return self

    def split_sequential(
        self,
        *,
        ratios: Sequence[Ratio] | None = None,
        counts: Sequence[int] | None = None,
        fixed: int | None = None,
        names: Sequence[str] | None = None,
    ) -> PermutationBuilder:
        """Cut the rows into parts in the order of the table.

        The arguments and sizes are those of `split_random`.
        """
        names = self._begin("split_sequential", names)
        called = _called(_number_of_parts(ratios, counts, fixed), names)

        def split(rows: RowList) -> list[Part]:
            bounds = _bounds(len(rows), ratios, counts, fixed)
            return [
                Part(name, SlicedRows(rows, bounds[i], bounds[i + 1] - bounds[i]))
                for i, name in enumerate(called)
            ]

        self._split = split
        return self

    def split_hash(
        self,
        columns: str | Sequence[str],
        weights: Sequence[int],
        *,
        discard_weight: int = 0,
        names: Sequence[str] | None = None,
    ) -> PermutationBuilder:
        """Cut the rows into parts by a hash of their values.

        The part of a row depends on its values in these columns alone: rows that agree in them
        are in the same part, and stay there when others are added, removed or moved. Sizes are
        therefore not exact.

        The hash of a row is `destrier.membership.hash_rows`; its upper 32 bits h give the slot
        ``(h · T) >> 32`` of T slots, T the sum of all weights. Parts take their weight of slots in
        order, the last slots are discarded.

        Args:
            columns: Columns of numbers, booleans, dates, times, strings or bytes.
            weights: The weight of each part, 1 or more.
            discard_weight: The weight of the rows that are in no part.
            names: The names of the parts.

        Example:
            Of the integers 0 to 19, the weights ``[8, 2]`` put 2, 3, 7 and 16 into part "1".
        """
        names = self._begin("split_hash", names)
        chosen = [columns] if isinstance(columns, str) else list(columns)
        if not chosen:
            raise ArgumentError("split_hash needs at least one column")
        self._table.check_columns(chosen)
        for column in chosen:
            kind = self._table.schema.field(column).type
            if not hashable(kind):
                raise ColumnError(f"split_hash cannot hash the column {column!r} of type {kind}")
        shares = [integer("a weight", weight, 1) for weight in weights]
        called = _called(len(shares), names)
        edges = np.cumsum(shares, dtype=np.int64)
        total = sum(shares) + integer("discard_weight", discard_weight, 0)
        if total >= 1 << 32:
            raise ArgumentError(f"the weights must sum to less than 2**32, they sum to {total}")

        def code(batch: pa.RecordBatch) -> NDArray[np.int64]:
            h = hash_rows([batch.column(column) for column in chosen]) >> np.uint64(32)
            slot = (h * np.uint64(total)) >> np.uint64(32)
            part = np.searchsorted(edges, slot.astype(np.int64), side="right")
            return np.where(part == len(edges), _NO_PART, part)

        def split(rows: RowList) -> list[Part]:
            pieces = [
                code(batch).astype(code_type(len(shares)))
                for batch in scan(self._table, chosen, self._filter, "split_hash")
            ]
            return _given_parts(rows, pieces, called)

        self._split = split
        return self

    def split_calculated(
        self, sql: str, *, names: Sequence[str] | None = None
    ) -> PermutationBuilder:
        """Cut the rows into parts by an SQL expression of Lance's dialect, evaluated by one scan.

        Args:
            sql: An expression. An integer is the number of the part, from 0; true is 1 and false
                is 0. A string is the part's name. Rows for which it is null are in no part.
            names: Of integers, the names of the parts. Of strings, the parts in their order: a
                value that is not among them is an error. Without names, strings are sorted.
        """
        names = self._begin("split_calculated", names)
        if not isinstance(sql, str):
            raise ArgumentError(f"split_calculated takes SQL text, got {type(sql).__name__}")
        chosen = names

        def split(rows: RowList) -> list[Part]:
            codes = CalculatedCodes(sql, chosen)
            try:
                for batch in scan(self._table, {"part": sql}, self._filter, "Lance"):
                    codes.add(batch.column(0))
            except ReadError as error:
                raise FilterError(
                    f"split_calculated cannot evaluate {sql!r} on {self._table.name}: {error}; "
                    f"its columns are: {', '.join(self._table.schema.names)}"
                ) from error
            return _given_parts(rows, *codes.result())

        self._split = split
        return self

    def _begin(self, split: str, names: Sequence[str] | None) -> list[str] | None:
        if self._split is not None:
            raise ArgumentError(f"{split} after {self._split_name}: rows are split once")
        self._split_name = split
        if names is None:
            return None
        if isinstance(names, str):
            raise ArgumentError(f"names must be a list of names, got {names!r}")
        for i, name in enumerate(names):
            if not isinstance(name, str) or not name:
                raise ArgumentError(f"the name of a part must be text, got {name!r}")
            if name in names[:i]:
                raise ArgumentError(f"two parts have the name {name!r}")
        return list(names)

    # ---- order ------------------------------------------------------------------------------

    def shuffle(
        self,
        *,
        seed: int = 0,
        clump_size: int | None = None,
        epoch: int = 0,
        num_splits: int = 1,
        window: int | None = None,
    ) -> PermutationBuilder:
        """Shuffle the rows of each part.

        Each part gets the order of a stream with the same arguments over its rows.

        Args:
            seed: From 0 to 2**32 - 1.
            clump_size: Rows that are permuted as one and read as one; 1 if None.
            epoch: From 0 to 2**32 - 1.
            num_splits: Lanes that the samples are dealt to.
            window: Clumps inside which rows are permuted; 8 if None. Without meaning if
                clump_size is 1.
        """
        if self._order is not None:
            raise ArgumentError("shuffle is called twice")
        clump = 1 if clump_size is None else integer("clump_size", clump_size, 1)
        default = _DEFAULT_WINDOW if clump > 1 else 1
        lanes = integer("num_splits", num_splits, 1)
        order = partial(
            Order,
            seed=integer("seed", seed, 0),
            epoch=integer("epoch", epoch, 0),
            num_splits=lanes,
            clump_size=clump,
            window=default if window is None else integer("window", window, 1),
        )
        order(lanes)  # checks seed, epoch and window
        self._order, self._num_splits = order, lanes
        return self

    def execute(self) -> Permutation:
        """Return the permutation. Its rows are computed when they are asked for.

        A filter, `split_hash` and `split_calculated` are evaluated now, by one scan each.

        Raises:
            ArgumentError: If the counts or num_splits are more than there are rows.
            EmptyError: If no row is left.
            FilterError: If Lance cannot run the filter, or the SQL of `split_calculated`.
        """
        rows: RowList
        if self._filter is None:
            rows = select_rows(self._table, None)
        else:
            rows = FilteredRows(self._table, self._filter)
        parts = [Part(None, rows)] if self._split is None else self._split(rows)
        if not any(len(part.rows) for part in parts):
            raise EmptyError(f"{self._split_name} leaves none of the {len(rows)} rows in a part")
        if self._order is None:
            return Permutation(parts, describe(self._table, filter=self._filter))
        ordered: list[Part] = []
        for part in parts:
            n = len(part.rows)
            if n and self._num_splits > n:
                what = "there are" if part.name is None else f"part {part.name!r} has"
                raise ArgumentError(
                    f"num_splits is {self._num_splits}, but {what} only {n} rows: every split "
                    "needs at least 1 row"
                )
            rows = OrderedRows(part.rows, self._order(n)) if n else part.rows
            ordered.append(Part(part.name, rows))
        order = self._order(self._num_splits)
        return Permutation(ordered, describe(self._table, filter=self._filter, order=order))


# ---- sizes ----------------------------------------------------------------------------------


def _ratio(value: Any) -> Fraction:
    """A number as what it prints as: 0.7 is seven tenths, not the nearest binary fraction."""
    try:
        number = value if isinstance(value, Fraction) else Fraction(str(float(value)))
    except (TypeError, ValueError):
        raise ArgumentError(f"a ratio must be a finite number, got {value!r}") from None
    if number <= 0:
        raise ArgumentError(f"a ratio must be over 0, got {value!r}")
    return number


def _shown(ratio: Ratio) -> str:
    return f"{float(ratio):.10g}"


def _number_of_parts(
    ratios: Sequence[Ratio] | None,
    counts: Sequence[int] | None,
    fixed: int | None,
) -> int:
    """Check what can be checked without the number of rows."""
    choices = {"ratios": ratios, "counts": counts, "fixed": fixed}
    given = " and ".join(name for name, value in choices.items() if value is not None)
    if given not in choices:
        raise ArgumentError(f"one of ratios, counts and fixed is needed, got {given or 'none'}")
    if ratios is not None:
        total = sum(map(_ratio, ratios), Fraction(0))
        if total > 1 + _SUM_TOLERANCE:
            raise ArgumentError(
                f"the ratios must sum to 1 at most, {', '.join(map(_shown, ratios))} sum to "
                f"{_shown(total)}"
            )
        return len(ratios)
    if counts is not None:
        for count in counts:
            integer("a count", count, 1)
        return len(counts)
    return integer("fixed", fixed, 1)


def _bounds(
    n: int, ratios: Sequence[Ratio] | None, counts: Sequence[int] | None, fixed: int | None
) -> list[int]:
    """Where the parts begin and end in a line of n rows."""
    if counts is not None:
        total = sum(counts)
        if total > n:
            raise ArgumentError(f"the counts sum to {total}, but there are only {n} rows")
        return [0, *np.cumsum(counts).tolist()]
    if fixed is not None:
        if fixed > n:
            raise ArgumentError(f"fixed is {fixed}, but there are only {n} rows")
        return [n * i // fixed for i in range(fixed + 1)]
    assert ratios is not None
    shares = list(map(_ratio, ratios))
    total_share = sum(shares, Fraction(0))
    whole = total_share if abs(total_share - 1) <= _SUM_TOLERANCE else Fraction(1)
    bounds, reached = [0], Fraction(0)
    for share in shares:
        reached += share
        bounds.append(int(n * reached / whole))
    return bounds


def _called(parts: int, names: Sequence[str] | None) -> list[str]:
    if not 1 <= parts <= MAX_PARTS:
        raise ArgumentError(f"there can be 1 to {MAX_PARTS} parts, got {parts}")
    if names is None:
        return [str(i) for i in range(parts)]
    if len(names) != parts:
        raise ArgumentError(f"there are {parts} parts but {len(names)} names: {', '.join(names)}")
    return list(names)


# ---- parts given row by row -----------------------------------------------------------------


def _member_parts(
    rows: RowList, membership: Membership, names: Sequence[str], sizes: Sequence[int]
) -> list[Part]:
    return [Part(name, PartRows(rows, membership, i, sizes[i])) for i, name in enumerate(names)]


def _given_parts(rows: RowList, pieces: list[NDArray[Any]], names: Sequence[str]) -> list[Part]:
    codes = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    pieces.clear()
    if len(codes) != len(rows):
        raise FilterError(
            f"the filter kept {len(rows)} rows at first and {len(codes)} in the scan that split "
            "them: it must give the same rows each time"
        )
    codes = codes.astype(code_type(len(names)), copy=False)
    sizes = np.zeros(MAX_PARTS + 1, np.int64)
    for start in range(0, len(codes), 1 << 20):  # bincount needs 8 bytes a row while it runs
        sizes += np.bincount(codes[start : start + (1 << 20)], minlength=len(sizes))
    return _member_parts(rows, GivenMembership(codes), names, sizes.tolist())
