"""One epoch of a dataset, as an iterator."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from destrier.errors import IterationError
from destrier.pipeline import Delivery
from destrier.plan import Cycles
from destrier.rows import SKIPPED
from destrier.topology import current_worker

if TYPE_CHECKING:
    from destrier.dataset import StreamingDataset

__all__ = ["DatasetIterator"]


class DatasetIterator:
    """One epoch of a dataset."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        self._started = False
        self._closed = False
        self._rows: list[Any] = []
        self._at = 0
        self._index = 0
        self.consumed = 0
        self.total = 0
        self.share_rows = 0

    def __iter__(self) -> DatasetIterator:
        return self

    @property
    def in_hand(self) -> int:
        """Rows of the current share that were not yielded yet."""
        return len(self._rows) - self._at

    def _begin(self) -> None:
        dataset = self._dataset
        if dataset._live is not None and dataset._live() is not None:
            raise IterationError(
                "StreamingDataset does not support concurrent iteration: another iterator of this "
                "dataset is live; exhaust or close() it first, or make a second dataset"
            )
        position = dataset.position.begin()
        self._runner, self._shares = dataset._start(position)
        dataset.position = position
        dataset._live = weakref.ref(self)
        self._started = True
        self.share_rows = self._shares.largest
        self.total = len(self._shares) * self._shares.largest
        if isinstance(self._shares, Cycles):
            self.total = self._shares.cycles * self._shares.owned

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        if not self._started:
            self._begin()
        dataset = self._dataset
        if not self._is_live():
            raise IterationError(
                "this iterator is closed: the dataset was closed, or a state was loaded"
            )
        cycles = isinstance(self._shares, Cycles)
        while True:
            if cycles and self._at < len(self._rows):
                row = self._rows[self._at]
                self._at += 1
                self._count_cycles()
                if row is SKIPPED:
                    dataset._rows_skipped += 1
                    continue
                self.consumed += 1
                return row
            delivery = self._get()
            if delivery.index < 0:
                self._end()
                dataset.position = dataset.position.ended()
                raise StopIteration
            self._index = delivery.index
            if cycles:
                self._rows, self._at = delivery.value.batch, 0
                continue
            self._commit(self._shares.counter(delivery.index + 1))
            self.consumed += self._shares.largest
            return delivery.value.batch

    def _get(self) -> Delivery:
        dataset = self._dataset
        try:
            delivery = self._runner.get()
        except BaseException as error:
            self._end()
            dataset._stop()
            if isinstance(error, Exception):
                dataset.position = dataset.position.failed()
            raise
        self._report()
        return delivery

    def _count_cycles(self) -> None:
        shares = self._shares
        assert isinstance(shares, Cycles)
        if self._at % shares.owned == 0 or self._at == len(self._rows):
            whole = self._at // shares.owned
            self._commit(shares.counter(self._index) + whole * shares.num_splits)

    def _commit(self, counter: int) -> None:
        dataset = self._dataset
        dataset.position = replace(dataset.position, counter=counter)

    def _report(self) -> None:
        dataset = self._dataset
        worker = current_worker()
        if worker is not None and dataset._shared is not None:
            dataset._shared.report(worker.id, list(dataset._counters().values()))

    def _is_live(self) -> bool:
        live = self._dataset._live
        return live is not None and live() is self

    def _end(self) -> None:
        self._closed = True
        self._dataset._live = None

    def close(self) -> None:
        """Leave the epoch; its place stays in the state until the next iterator."""
        if self._started and not self._closed and self._is_live():
            self._end()
            self._runner.stop()

    def __del__(self) -> None:
        self.close()
