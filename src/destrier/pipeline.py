"""Stages on threads: plan, read ahead, gather, finish; ordered, bounded by bytes.

::

    blocks ──► read (threads) ──► gather (one thread) ──► finish (threads) ──► consumer
       └──── a few blocks in flight ────┘        └─ a bounded queue of batches ─┘

One thread drives: it keeps some blocks being read, gathers the shares of the oldest one in order,
and puts each, finished or about to be, into a queue that holds so many bytes at most. A consumer
that sleeps therefore stops everything behind it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from destrier.batch import RawBatch
from destrier.errors import RowError
from destrier.pool import ArrowPool, ColumnPool, HeldArrow, HeldColumns, Pool
from destrier.read import Reader, Rows
from destrier.schedule import Block, Schedule

__all__ = ["Delivery", "Epoch", "Pipeline"]

_READ_THREADS = 2
_BLOCKS_AHEAD = 2
_MOST_READY = 64


@dataclass(frozen=True)
class Epoch:
    """One epoch's schedule and what a share becomes in it."""

    number: int
    schedule: Schedule
    pad_from: int | None = None


@dataclass
class Delivery:
    """What leaves the pipeline: a finished share, or the end of an epoch if ``index`` is -1."""

    epoch: int
    index: int
    value: Any


class Pipeline:
    """Runs the stages for a sequence of epochs.

    Args:
        epochs: The epochs, as far as the consumer goes.
        reader: Reads blocks.
        finish: From a share to what the consumer gets.
        columnar: Whether shares are numpy columns, else Arrow record batches.
        threads: Threads that finish shares; 0 finishes on the driving thread.
        ready_bytes: How many bytes of finished batches may wait for the consumer.
        most_ready: How many of them may wait.
    """

    def __init__(
        self,
        epochs: Iterable[Epoch],
        reader: Reader,
        finish: Callable[[RawBatch], Any],
        *,
        columnar: bool,
        threads: int,
        ready_bytes: int,
        most_ready: int | None = None,
    ) -> None:
        self._epochs = epochs
        self._reader = reader
        self._finish = finish
        self._columnar = columnar
        self._ready_bytes = ready_bytes
        self._ready_limit = _MOST_READY if most_ready is None else most_ready
        self._largest = 1
        self._condition = threading.Condition()
        self._queue: deque[Delivery | BaseException] = deque()
        self._stopped = False
        self._readers = ThreadPoolExecutor(_READ_THREADS, "destrier-read")
        self._finishers = ThreadPoolExecutor(threads, "destrier-finish") if threads else None
        self.transform_time = 0.0
        self.wait_time = 0.0
        self._driver = threading.Thread(target=self._drive, name="destrier-drive", daemon=True)
        self._driver.start()

    # ---- the consumer's side ------------------------------------------------------------------

    def get(self) -> Delivery:
        """Return the next delivery; waits for it.

        Raises:
            Exception: Whatever went wrong in a stage; the pipeline is stopped then.
        """
        began = time.perf_counter()
        with self._condition:
            while not self._queue:
                if self._stopped:
                    raise RuntimeError("the pipeline is stopped")
                self._condition.wait()
            item = self._queue.popleft()
            self._condition.notify_all()
        if isinstance(item, BaseException):
            self.stop()
            raise item
        if isinstance(item.value, Future):
            try:
                item.value = item.value.result()
            except BaseException:
                self.stop()
                raise
            self._largest = max(self._largest, _bytes(item.value))
        self.wait_time += time.perf_counter() - began
        return item

    @property
    def queued(self) -> int:
        """Deliveries that wait for the consumer."""
        return len(self._queue)

    def stop(self, *, wait: bool = False) -> None:
        """Stop all stages; with ``wait``, return when their threads have ended."""
        with self._condition:
            self._stopped = True
            self._queue.clear()
            self._condition.notify_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._finishers is not None:
            self._finishers.shutdown(wait=False, cancel_futures=True)
        if wait and threading.current_thread() is not self._driver:
            self._driver.join()
            self._readers.shutdown(wait=True)
            if self._finishers is not None:
                self._finishers.shutdown(wait=True)

    # ---- the driving thread -------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            ahead: deque[tuple[Epoch, Block | None, Future[Rows] | None]] = deque()
            blocks = self._blocks()
            pool: Pool | None = None
            errors: dict[int, RowError] = {}
            exhausted = False
            while not self._stopped:
                while not exhausted and len(ahead) <= _BLOCKS_AHEAD:
                    entry = next(blocks, None)
                    if entry is None:
                        exhausted = True
                        break
                    epoch, block = entry
                    future = (
                        None
                        if block is None
                        else self._readers.submit(self._reader.read, block.offsets)
                    )
                    ahead.append((epoch, block, future))
                if not ahead:
                    return
                epoch, block, future = ahead.popleft()
                if block is None or future is None:
                    pool, errors = None, {}
                    self._put(Delivery(epoch.number, -1, None))
                    continue
                rows = future.result()
                if block.targets is None:
                    held = HeldColumns(rows) if self._columnar else HeldArrow(rows)
                    self._gather(epoch, block, held, rows.errors, block.offsets)
                    continue
                if pool is None:
                    kind = ColumnPool if self._columnar else ArrowPool
                    pool, errors = kind(self._reader.schema), {}
                    offsets = np.empty(0, np.int64)
                for start, stop in block.freed:
                    pool.free(start, stop)
                    if errors:
                        errors = {k: e for k, e in errors.items() if not start <= k < stop}
                pool.reserve(block.capacity)
                if len(offsets) < block.capacity:
                    offsets = np.concatenate(
                        [offsets, np.empty(block.capacity - len(offsets), np.int64)]
                    )
                pool.put(block.targets, rows)
                offsets[block.targets] = block.offsets
                errors.update({int(block.targets[i]): e for i, e in rows.errors.items()})
                del rows, future
                self._gather(epoch, block, pool, errors, offsets)
        except BaseException as error:
            with self._condition:
                self._queue.append(error)
                self._condition.notify_all()

    def _blocks(self) -> Iterator[tuple[Epoch, Block | None]]:
        for epoch in self._epochs:
            for block in epoch.schedule:
                yield epoch, block
            yield epoch, None

    def _gather(
        self,
        epoch: Epoch,
        block: Block,
        source: Pool | HeldColumns | HeldArrow,
        errors: dict[int, RowError],
        offsets: Any,
    ) -> None:
        bounds = block.bounds.tolist()
        for i in range(len(bounds) - 1):
            if self._stopped:
                return
            part = slice(bounds[i], bounds[i + 1])
            samples, places = block.samples[part], block.places[part]
            failed: dict[int, RowError] = {}
            good = places
            if errors:
                failed = {k: errors[p] for k, p in enumerate(places.tolist()) if p in errors}
                good = np.delete(places, list(failed))
            padded = None if epoch.pad_from is None else samples >= epoch.pad_from
            raw = RawBatch(
                epoch.number, samples, offsets[places], source.take(good), failed, padded
            )
            if self._finishers is None:
                value = self._timed(raw)
                self._largest = max(self._largest, _bytes(value))
            else:
                self._largest = max(self._largest, _bytes(raw.data))
                value = self._finishers.submit(self._timed, raw)
            self._put(Delivery(epoch.number, block.first + i, value))

    def _timed(self, raw: RawBatch) -> Any:
        began = time.perf_counter()
        value = self._finish(raw)
        self.transform_time += time.perf_counter() - began
        return value

    def _put(self, delivery: Delivery) -> None:
        with self._condition:
            while not self._stopped and len(self._queue) >= self._most_ready():
                self._condition.wait()
            if not self._stopped:
                self._queue.append(delivery)
                self._condition.notify_all()

    def _most_ready(self) -> int:
        return max(1, min(self._ready_limit, self._ready_bytes // self._largest))


def _bytes(value: Any) -> int:
    """Bytes of a batch, about."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, np.ndarray | pa.RecordBatch):
        return int(value.nbytes)
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        # one in so many is measured, the others are taken to be alike
        some = value[:: max(1, len(value) // 16)]
        return sum(_bytes(item) for item in some) * len(value) // max(1, len(some))
    if hasattr(value, "values") and isinstance(value.values, np.ndarray):
        return _bytes(list(value.values)) if value.values.dtype == np.object_ else value.values.nbytes
    if hasattr(value, "batch"):
        return _bytes(value.batch)
    return 64
