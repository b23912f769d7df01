"""What the copies of a dataset in a DataLoader's workers share with their parent.

The copies must agree on the epoch, also when workers persist or are started anew for each epoch,
and the parent shows their counters. All of it is one small tensor in shared memory; a plain
pickle holds a copy of it.
"""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

from destrier.counters import COUNTERS
from destrier.errors import ArgumentError
from destrier.keyed import mix

__all__ = ["Shared"]

_WORKERS = 128  # of one rank, at most
_EPOCH_BITS = 32
_BASE, _TIMES = len(COUNTERS), len(COUNTERS) + 1  # of a worker's row, behind its counters


class Shared:
    """The shared tensor.

    Cell (0, 0) holds ``tag·2³² + epoch`` in one word, so that it is read and written as a whole.
    Tag 0 means that the epoch is still to begin; else it names the DataLoader iterator under which
    it began. All workers of one iterator compute the same tag, so whichever comes first moves the
    word on and the others find it moved, or move it to the same value. The tag is made of the base
    seed of torch's iterator and of how often in a row the worker met that seed: persistent workers
    keep theirs, and a user who seeds torch before each epoch makes new workers meet it again.
    """

    def __init__(self) -> None:
        self._cells = torch.zeros((1 + _WORKERS, len(COUNTERS) + 2), dtype=torch.int64)
        self._cells.share_memory_()  # type: ignore[no-untyped-call]

    def place(self, epoch: int, counter: int) -> None:
        """Let the next iterator begin here."""
        self._cells[0, 1] = counter
        self._cells[0, 0] = epoch
        self._cells[0, 2] = 0

    def begin(self) -> tuple[int, int]:
        """In a worker: the epoch and counter at which this iterator begins."""
        tag = self._tag()
        word = int(self._cells[0, 0])
        before, epoch = word >> _EPOCH_BITS, word & ((1 << _EPOCH_BITS) - 1)
        if before not in (0, tag):
            epoch += 1
            self._cells[0, 1] = 0
        self._cells[0, 0] = (tag << _EPOCH_BITS) + epoch
        return epoch, int(self._cells[0, 1])

    def begin_at(self, epoch: int) -> None:
        """In a worker that was given a state: its iterator begins in this epoch."""
        self._cells[0, 0] = (self._tag() << _EPOCH_BITS) + epoch

    def _tag(self) -> int:
        info = get_worker_info()
        assert info is not None
        if info.id >= _WORKERS:
            raise ArgumentError(f"num_workers is {info.num_workers}, above {_WORKERS}")
        row = self._cells[1 + info.id]
        base = mix(info.seed - info.id & (1 << 64) - 1) >> 1
        row[_TIMES] = int(row[_TIMES]) + 1 if int(row[_BASE]) == base else 0
        row[_BASE] = base
        self._cells[0, 2] = 1
        return mix(base ^ mix(int(row[_TIMES]))) >> 33 | 1

    @property
    def reading(self) -> bool:
        """Whether workers have read since the position was last placed."""
        return bool(self._cells[0, 2])

    def report(self, worker: int, values: list[int]) -> None:
        """In a worker: publish its counters."""
        self._cells[1 + worker, : len(COUNTERS)] = torch.tensor(values)

    def total(self, counter: int) -> int:
        """The sum of a counter over the workers."""
        return int(self._cells[1:, counter].sum())
