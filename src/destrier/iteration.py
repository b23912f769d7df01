"""One epoch of a dataset or a loader, as an iterator."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from destrier.errors import IterationError
from destrier.pipeline import Delivery, Pipeline
from destrier.plan import Cycles
from destrier.process import check_process
from destrier.rows import SKIPPED
from destrier.topology import current_worker

if TYPE_CHECKING:
    from destrier.loader import StreamingDataLoader
    from destrier.streaming import Streaming

__all__ = ["DatasetIterator", "LoaderIterator"]


class DatasetIterator:
    """One epoch of a dataset."""

    def __init__(self, dataset: Streaming) -> None:
        self._dataset = dataset
        self._started = False
        self._closed = False
        self._why = ""
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

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline it reads from."""
        return self._runner.pipeline if self._started else None

    def _begin(self) -> None:
        dataset = self._dataset
        dataset._check_free()
        position = dataset._position.begin()
        self._runner, self._shares = dataset._start(position)
        dataset._position = position
        dataset._live = weakref.ref(self)
        self._started = True
        self.share_rows = self._shares.largest
        self.total = self._shares.rows_left

    def __next__(self) -> Any:
        check_process()
        if self._why:
            raise IterationError(f"this iterator is closed: {self._why}")
        if self._closed:
            raise StopIteration
        if not self._started:
            self._begin()
        dataset = self._dataset
        cycles = isinstance(self._shares, Cycles)
        while True:
            if cycles and self._at < len(self._rows):
                row = self._rows[self._at]
                self._at += 1
                self._count_cycles()
                if row is SKIPPED:
                    dataset._counts.add("rows_skipped", 1)
                    continue
                self.consumed += 1
                return row
            delivery = self._get()
            if delivery.index < 0:
                self.end()
                dataset._position = dataset._position.ended()
                raise StopIteration
            self._index = delivery.index
            if cycles:
                self._rows, self._at = delivery.value.batch, 0
                continue
            self._commit(self._shares.counter(delivery.index + 1))
            self.consumed += self._shares.size(delivery.index)
            return delivery.value.batch

    def _get(self) -> Delivery:
        dataset = self._dataset
        try:
            delivery = self._runner.get()
        except BaseException as error:
            self.end()
            dataset._stop()
            if isinstance(error, Exception):
                dataset._position = dataset._position.failed()
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
        dataset._position = replace(dataset._position, counter=counter)

    def _report(self) -> None:
        dataset = self._dataset
        worker = current_worker()
        if worker is not None and dataset._shared is not None:
            dataset._shared.report(worker.id, list(dataset._counters().values()))

    def end(self, why: str = "") -> None:
        """Close the iterator; with a reason, using it further is an error."""
        self._closed = True
        self._why = why
        self._dataset._leave(self)

    def close(self) -> None:
        """Leave the epoch; its place stays in the state until the next iterator."""
        if self._started and not self._closed:
            self.end()
            self._runner.stop()

    def __del__(self) -> None:
        self.close()


class LoaderIterator:
    """One epoch of a loader."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._counts = loader._counts
        self._counts.enter()
        began = time.perf_counter()
        older = loader._live
        if older is not None:
            older.end("a newer iterator of the loader was started")
        self._loader: StreamingDataLoader | None = loader
        self._why = ""
        self.consumed = 0
        dataset = loader.dataset
        dataset._check_free()
        before = dataset._position
        dataset._position = before.begin()
        try:
            self._runner, self._shares = loader._start()
        except BaseException:
            dataset._position = before
            raise
        self.total = self._shares.rows_left
        self.share_rows = self._shares.largest
        dataset._live = weakref.ref(self)
        self._index = -1
        self._given = self._counts.done("start", began)  # when the trainer got something last

    def __iter__(self) -> LoaderIterator:
        return self

    @property
    def in_hand(self) -> int:
        """Rows of the current share that were not yielded yet: shares are yielded whole."""
        return 0

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline it reads from."""
        return self._runner.pipeline

    def is_of(self, loader: StreamingDataLoader) -> bool:
        """Whether it iterates this loader."""
        return self._loader is loader

    def __next__(self) -> Any:
        check_process()
        loader = self._loader
        if loader is None:
            if self._why:
                raise IterationError(f"this iterator is closed: {self._why}")
            raise StopIteration
        dataset = loader.dataset
        asked = time.perf_counter()
        try:
            delivery = self._delivery(loader)
        except BaseException as error:
            self.end("")
            loader._stop()
            if isinstance(error, Exception):
                dataset._position = dataset._position.failed()
            raise
        if delivery.index < 0:
            self._counts.done("end", self._given)
            self._counts.count_cpu()
            self.end("")
            dataset._position = dataset._position.ended()
            raise StopIteration
        counter = self._shares.counter(delivery.index + 1)
        dataset._position = replace(dataset._position, counter=counter)
        rows, finished = self._shares.size(delivery.index), delivery.value
        self.consumed += rows
        dataset._last_consumed = self.consumed  # it may be dropped without a word
        batch = loader._deliver(finished)
        self._given = self._counts.handed(
            self._given, asked, rows=rows, size=finished.bytes, step=delivery.index
        )
        return batch

    def _delivery(self, loader: StreamingDataLoader) -> Delivery:
        if loader._repeated is None:
            delivery = self._runner.get()
            self._index = delivery.index
            if loader._repeat_batch and delivery.index >= 0:
                loader._repeated = replace(delivery.value, failed=[])
                self._runner.stop()
            return delivery
        self._index += 1
        if self._index < len(self._shares):
            return Delivery(loader.dataset.epoch, self._index, loader._repeated)
        return Delivery(loader.dataset.epoch, -1, None)

    def restart(self) -> None:
        """Go on at the loader's position."""
        assert self._loader is not None
        self._runner, self._shares = self._loader._start()
        self.total = self.consumed + self._shares.rows_left
        self._index = -1

    def end(self, why: str) -> None:
        """Close the iterator; with a reason, using it further is an error."""
        if self._loader is not None:
            self._loader.dataset._leave(self)
        self._loader = None
        self._why = why
