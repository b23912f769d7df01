"""How many splits, how large clumps and windows, where nobody said.

Only the pinned table, the global batch and a constant budget enter: never columns, storage speed,
memory, machine, workers or the world size, because the order may not depend on them.
"""

from __future__ import annotations

from destrier.errors import EmptyError

__all__ = ["OPEN_BYTES", "default_clump", "default_num_splits", "default_source_splits"]

OPEN_BYTES = 512 << 20  # what the open rows of all ranks together may take
_SPLITS = 256
_SOURCE_SPLITS = 64  # of one of several sources
_CYCLES = 64
_MAX_CLUMP = 4096  # a resume hashes one window for each split: 0.2 s at 16,384 rows
_MAX_WINDOW = 8
_MIN_WINDOW = 4
_CLUMPS_PER_WINDOW_CLUMP = 64
# A split of few clumps cuts windows short, and what is cut loses its strata: with half as many,
# the mean of 16 batches has more than 1.5 times the variance of a uniform order on sorted rows.
_CLUMPS_PER_SPLIT = 32
_READ_BYTES_LOCAL = 128 << 10
_READ_BYTES_REMOTE = 256 << 10


def default_source_splits(n: int, *, global_batch: int | None) -> int:
    """Return the number of splits for n rows of one of several sources.

    Each source has fewer than a table alone, so that all of them together hold about as much. All
    have the same number, whatever their weights: ranks share a step by lane, and a source of fewer
    lanes would come to the first ranks only.

    Args:
        n: Rows in the selection.
        global_batch: Samples in a step, where it is known.
    """
    times = 1 if global_batch is None else max(1, min(4, global_batch // _SPLITS))
    return min(_SOURCE_SPLITS * times, n)


def default_num_splits(n: int, *, global_batch: int | None = None, multiple: int = 1) -> int:
    """Return the number of splits for n rows.

    Args:
        n: Rows in the selection.
        global_batch: Samples in a step, where it is known.
        multiple: What the number must be a multiple of (row mode: the world size).
    """
    if global_batch is not None:
        return max(1, min(global_batch * -(-_SPLITS // global_batch), n))
    if n < multiple:
        raise EmptyError(
            f"{n} rows are too few for {multiple} ranks: each needs at least 1 row per split"
        )
    splits = -(-_SPLITS // multiple) * multiple
    # Rows beyond the last whole cycle are left out: fewer than one in so many, if there are
    # rows enough.
    while splits > multiple and n < splits * _CYCLES:
        splits = max(multiple, splits // 2 // multiple * multiple)
    return splits


def default_clump(
    n: int,
    *,
    num_splits: int,
    row_bytes: float,
    remote: bool,
    clump_size: int | None = None,
    window: int | None = None,
    open_bytes: int = OPEN_BYTES,
    read_bytes: int | None = None,
) -> tuple[int, int]:
    """Return clump size and window; a given one is kept.

    Args:
        n: Rows in the selection.
        num_splits: Number of splits, S.
        row_bytes: Average bytes of a row of the table over the density of the selection.
        remote: Whether the table lies in an object store, where a read must be larger.
        clump_size: Rows in a clump, c, if given.
        window: Clumps in a window, w, if given.
        open_bytes: What the open rows of all ranks together may take.
        read_bytes: What a clump should have, where that is not what a read should.
    """
    chosen = clump_size
    if chosen is None:
        least = read_bytes or (_READ_BYTES_REMOTE if remote else _READ_BYTES_LOCAL)
        chosen = 1
        while chosen < _MAX_CLUMP and 2 * chosen * row_bytes <= least:
            chosen *= 2
        while chosen > 1 and num_splits * _MIN_WINDOW * chosen * row_bytes > open_bytes:
            chosen //= 2
    if window is None:
        fits = int(open_bytes // (num_splits * chosen * row_bytes))
        window = max(_MIN_WINDOW, min(_MAX_WINDOW, fits))
    if clump_size is None:
        clumps = max(_CLUMPS_PER_WINDOW_CLUMP * window, _CLUMPS_PER_SPLIT * num_splits)
        while chosen > 1 and n < clumps * chosen:
            chosen //= 2
    return (chosen, window) if chosen > 1 else (1, 1)
