"""Evaluation: the results of all ranks, each row once, in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from destrier.check import integer
from destrier.dataset import StreamingDataset
from destrier.errors import ArgumentError
from destrier.keyed import Ints
from destrier.loader import StreamingDataLoader
from destrier.streaming import Streaming

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["gather"]

_SHOWN = 3
_ONE = ""  # the name of results that are no dict


def gather(
    results: Any,
    index: Any,
    of: StreamingDataLoader | StreamingDataset | int,
    *,
    group: ProcessGroup | None = None,
    to: int | None = None,
) -> Any:
    """Bring the results of all ranks together, in the order of the rows.

    Make the stream with ``shuffle=False`` and ``with_index=True``, and with ``remainder="keep"``
    or ``"pad"``, so that every row comes and all ranks have the same number of steps. Keep the
    results of each batch with its ``sample_index``, and call this after the last one, on all
    ranks. Repeats of ``"pad"`` are left out. Without torch.distributed the results are put in
    order.

    Args:
        results: One result a row, in the order in which they came: a tensor, an array or a list,
            or a dict of such.
        index: The ``sample_index`` of each, as a tensor, an array or a list.
        of: The loader or dataset that was evaluated; or a number of rows, whose places the index
            then has.
        group: The process group whose ranks have different rows; None is all ranks. Where several
            ranks read the same (``replicas=``), it is that of the mesh's data dimension.
        to: The rank, in the group, that gets the results; None is all of them.

    Returns:
        As results is: tensors (on the CPU), arrays or lists with one result a row, in the order of
        the table, view or permutation; None on ranks that get nothing.

    Raises:
        ArgumentError: If the results do not fit the index, a row came twice or never, or the
            stream is shuffled; on every rank.

    Example:
        >>> gather(torch.tensor([2.0, 0.0, 1.0, 0.0]), [2, 0, 1, 3], 3)  # 3 is row 0 again
        tensor([0., 1., 2.])
    """
    mine, failed = None, None
    try:
        mine = _Results.of(results, index, of)
    except ArgumentError as error:
        failed = error  # the other ranks wait for this one
    report = str(failed) if mine is None else mine.report
    reports: list[_Report | str] = _exchange(report, group)
    if failed is not None or mine is None:
        raise failed or RuntimeError(report)
    _check(reports, mine.count)
    found = _collect(mine.values, group, to)
    return None if found is None else mine.like(_assembled(found, reports))


@dataclass(frozen=True)
class _Report:
    """What all ranks need to know of a rank's results.

    Attributes:
        places: Of the rows that it has results of.
        kinds: The type of the results, by name.
        is_dict: Whether they are a dict.
    """

    places: Ints
    kinds: dict[str, str]
    is_dict: bool


@dataclass(frozen=True)
class _Results:
    """Results of this rank, without repeats."""

    values: dict[str, Any]
    report: _Report
    count: int

    @staticmethod
    def of(results: Any, index: Any, of: StreamingDataLoader | StreamingDataset | int) -> _Results:
        """Check what was given."""
        places, count = _places(_integers(index), of)
        own = np.flatnonzero(places >= 0)
        is_dict = isinstance(results, Mapping)
        values: dict[str, Any] = {}
        for name, given in (results if is_dict else {_ONE: results}).items():
            what = f"results[{name!r}]" if is_dict else "results"
            values[name] = _chosen(what, given, own, len(places))
        kinds = {name: _kind(value) for name, value in values.items()}
        return _Results(values, _Report(places[own], kinds, is_dict), count)

    def like(self, values: dict[str, Any]) -> Any:
        """Results in the form in which they were given."""
        return values if self.report.is_dict else values[_ONE]


def _integers(index: Any) -> Ints:
    given = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
    if given.ndim == 1 and not len(given):
        return np.empty(0, np.int64)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ArgumentError(
            f"index must be integers in one dimension, got {given.dtype} of shape {given.shape}; "
            "join those of the batches first: torch.cat(indices)"
        )
    return given.astype(np.int64)


def _places(index: Ints, of: StreamingDataLoader | StreamingDataset | int) -> tuple[Ints, int]:
    """The place of each result, -1 for a repeat that fills the last step; and how many there are.

    A sample index beyond the last one is such a repeat.
    """
    dataset: Any = of
    step = None
    if isinstance(of, StreamingDataLoader):
        dataset, step = of.dataset, of.global_batch
    stream = dataset.stream(step) if isinstance(dataset, StreamingDataset) else None
    if isinstance(dataset, Streaming) and stream is None:
        raise ArgumentError(f"{dataset!r} has no one table order: evaluate its sources one by one")
    if stream is not None and stream.identity.shuffle:
        raise ArgumentError(
            "the stream is shuffled, so its sample_index says nothing of the order of the rows: "
            "evaluate with StreamingDataset(..., shuffle=False)"
        )
    count = stream.count if stream is not None else integer("of", dataset)
    if len(index) and index.min() < 0:
        raise ArgumentError(f"a sample_index is never negative, got {index.min()}")
    places = np.where(index < count, index, -1)
    if stream is not None:
        inside = places >= 0
        places[inside] = stream.order(0).rows(places[inside])
    return places, count


def _chosen(what: str, given: Any, own: Ints, length: int) -> Any:
    if not isinstance(given, torch.Tensor | np.ndarray | list | tuple):
        raise ArgumentError(
            f"{what} must be a tensor, an array or a list with one result a row, or a dict of "
            f"such, got {type(given).__name__}"
        )
    there = len(given) if not hasattr(given, "ndim") or given.ndim else None
    if there != length:
        raise ArgumentError(
            f"{what} has {'no' if there is None else there} rows, but the index has {length}: "
            "there must be one result for each row"
        )
    if isinstance(given, torch.Tensor):
        return given.detach().cpu()[torch.from_numpy(own)]
    if isinstance(given, np.ndarray):
        return given[own]
    return [given[i] for i in own.tolist()]


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    what = "tensor" if isinstance(value, torch.Tensor) else "array"
    return f"{what} of {value.dtype}, each of shape {tuple(value.shape[1:])}"


# ---- ranks ----------------------------------------------------------------------------------


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _exchange(mine: Any, group: ProcessGroup | None) -> list[Any]:
    if not _distributed():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _collect(mine: Any, group: ProcessGroup | None, to: int | None) -> list[Any] | None:
    """What each rank has, on the rank that wants it; None on others."""
    if to is None or not _distributed():
        return _exchange(mine, group)
    here = dist.get_rank(group) == to
    found: list[Any] | None = [None] * dist.get_world_size(group) if here else None
    target = to if group is None else dist.get_global_rank(group, to)
    dist.gather_object(mine, found, dst=target, group=group)
    return found


def _check(reports: list[_Report | str], count: int) -> None:
    """Raise, on every rank alike, unless each row came once and the results can be joined."""
    known: list[_Report] = []
    for rank, report in enumerate(reports):
        if isinstance(report, str):
            raise ArgumentError(f"the results of rank {rank} cannot be gathered: {report}")
        known.append(report)
    # A rank without rows does not know what its results would be.
    filled = [(rank, report) for rank, report in enumerate(known) if len(report.places)]
    for rank, report in filled[1:]:
        if report.kinds != filled[0][1].kinds:
            raise ArgumentError(
                f"the ranks have different results: rank {filled[0][0]} has {filled[0][1].kinds}, "
                f"rank {rank} has {report.kinds}"
            )
    places = np.concatenate([report.places for report in known])
    if len(places) and places.max() >= count:
        raise ArgumentError(f"row {places.max()} came, but there are {count} rows on this rank")
    came = np.bincount(places, minlength=count)
    if (came > 1).any():
        twice = int(np.flatnonzero(came > 1)[0])
        ranks = [rank for rank, report in filled if (report.places == twice).any()]
        raise ArgumentError(
            f"row {twice} came {came[twice]} times, from rank {', '.join(map(str, ranks))}: gather "
            "the results of one epoch; where ranks read the same rows, as with replicas=, pass "
            "the group of ranks that read different ones"
        )
    missing = np.flatnonzero(came == 0)
    if len(missing):
        shown = ", ".join(map(str, missing[:_SHOWN].tolist()))
        raise ArgumentError(
            f"{len(missing)} of {count} rows never came, first: {shown}: evaluate a whole epoch, "
            "with remainder='keep' or 'pad'; rows that on_error skipped have no result"
        )


def _assembled(found: list[dict[str, Any]], reports: list[Any]) -> dict[str, Any]:
    filled = [i for i, report in enumerate(reports) if len(report.places)] or [0]
    places = np.concatenate([reports[i].places for i in filled])
    order = np.argsort(places)
    out: dict[str, Any] = {}
    for name, first in found[filled[0]].items():
        pieces = [found[i][name] for i in filled]
        if isinstance(first, torch.Tensor):
            out[name] = torch.cat(pieces)[torch.from_numpy(order)]
        elif isinstance(first, np.ndarray):
            out[name] = np.concatenate(pieces)[order]
        else:
            joined = [value for piece in pieces for value in piece]
            out[name] = [joined[i] for i in order.tolist()]
    return out
