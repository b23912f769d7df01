"""Stages on threads: plan, read ahead, gather, finish; ordered, bounded by bytes.

::

    blocks ──► read (threads) ──► gather (one thread) ──► finish (threads) ──► consumer
       └──── a few blocks in flight ────┘        └─ a bounded queue of batches ─┘

One thread drives: it keeps some blocks being read, gathers the shares of the oldest one in order,
and puts each, finished or about to be, into a queue that holds so many bytes at most. A consumer
that sleeps therefore stops everything behind it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from destrier.batch import Finished, RawBatch, batch_bytes
from destrier.feed import Feed, Memory
from destrier.threads import Threads

__all__ = ["Delivery", "Epoch", "Kept", "Pipeline"]

_MOST_READY = 64
_NEXT_EPOCH = 2
_EXIT_SECONDS = 10.0


@dataclass(frozen=True)
class Epoch:
    """One epoch, and the blocks of its shares in order."""

    number: int
    blocks: Iterable[Any]
    pad_from: int | None = None


@dataclass
class Delivery:
    """What leaves the pipeline: a finished share, or the end of an epoch if ``index`` is -1."""

    epoch: int
    index: int
    value: Any


@dataclass
class Kept:
    """All rows, once they are loaded: what one pipeline leaves to the next."""

    memory: Memory | None = None


class Pipeline:
    """Runs the stages for a sequence of epochs.

    Args:
        epochs: The epochs, as far as the consumer goes.
        feed: Reads blocks and holds their rows.
        finish: From a share to what the consumer gets.
        kept: Where all rows stay, if all are held.
        threads: Threads that finish shares; 0 finishes on the driving thread.
        ready_bytes: How many bytes of finished batches may wait for the consumer.
        most_ready: How many of them may wait.
    """

    def __init__(
        self,
        epochs: Iterable[Epoch],
        feed: Feed,
        finish: Callable[[RawBatch], Finished],
        *,
        kept: Kept,
        threads: int,
        ready_bytes: int,
        most_ready: int | None = None,
    ) -> None:
        self._epochs = epochs
        self._feed = feed
        self._counts = feed.counts
        self._finish = finish
        self._kept = kept
        self._ready_bytes = ready_bytes
        self._ready_limit = _MOST_READY if most_ready is None else most_ready
        self._largest = 0  # bytes of a batch, before or after it was finished
        self._condition = threading.Condition()
        self._queue: deque[Delivery | BaseException] = deque()
        self._ended = False  # whether the end of an epoch is in the queue
        self._finished = 0  # shares, and of them
        self._taken = 0  # by the consumer
        self._behind = 0  # deliveries of the next epoch
        self._between = False  # whether the consumer has not asked for the next epoch yet
        self._stopped = False
        self._readers = Threads(feed.read_ahead, "destrier-read")
        self._finishers = Threads(threads, "destrier-finish") if threads else None
        self._driver = threading.Thread(target=self._drive, name="destrier-drive", daemon=True)
        _running.add(self)
        self._driver.start()

    # ---- the consumer's side ------------------------------------------------------------------

    def get(self) -> Delivery:
        """Return the next delivery; waits for it.

        Raises:
            Exception: Whatever went wrong in a stage; the pipeline is stopped then.
        """
        with self._condition:
            self._between = False
            self._condition.notify_all()
            self._counts.queued += self.ready
            if not self._queue:
                began = time.perf_counter()
                while not self._queue and not self._stopped:
                    self._condition.wait()
                self._counts.done("wait for the next", began)
            if self._stopped:
                raise RuntimeError("the pipeline is stopped")
            item = self._queue.popleft()
            if isinstance(item, Delivery) and item.index < 0:
                self._ended = False
                self._between = True
            else:
                self._taken += 1
            self._condition.notify_all()
        try:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item.value, Future):
                began = time.perf_counter()
                item.value = item.value.result()
                self._counts.done("wait for its finish", began, step=item.index)
            return item
        except BaseException as error:
            self.stop()
            _let_go(error)
            raise
        finally:
            del item  # an error's traceback must not hold what holds the error

    @property
    def queued(self) -> int:
        """Deliveries that wait for the consumer."""
        return len(self._queue)

    @property
    def ready(self) -> int:
        """Deliveries among them that are finished."""
        return max(0, min(len(self._queue), self._finished - self._taken))

    @property
    def unfinished(self) -> int:
        """Deliveries that wait for a finishing thread, or are on one."""
        with self._condition:
            waiting = [d.value for d in self._queue if isinstance(d, Delivery)]
        return sum(isinstance(value, Future) and not value.done() for value in waiting)

    def stop(self) -> None:
        """Let all stages end soon. Takes no lock of others, so that a finaliser may call it."""
        with self._condition:
            self._stopped = True
            self._kept = Kept()  # what is there stays with who goes on with it
            self._queue.clear()
            self._condition.notify_all()

    @property
    def alive(self) -> bool:
        """Whether any of its threads still runs."""
        pools = (self._readers, self._finishers)
        return self._driver.is_alive() or any(pool.alive for pool in pools if pool is not None)

    def join(self, until: float | None = None) -> None:
        """Wait until the threads of a stopped pipeline have ended, or `time.monotonic` is late.

        One of them, that closes a loader in a transform or runs the collector, does not wait.
        """
        pools = [self._readers, *([] if self._finishers is None else [self._finishers])]
        own = threading.current_thread() is self._driver
        if own or any(pool.has_this_thread for pool in pools):
            return
        self._driver.join(None if until is None else max(0.0, until - time.monotonic()))
        for pool in pools:
            pool.join(until)

    # ---- the driving thread -------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            self._run()
        except BaseException as error:
            with self._condition:
                if not self._stopped:
                    self._queue.append(error)
                self._condition.notify_all()
        finally:
            pools = [self._readers]
            if self._finishers is not None:
                pools.append(self._finishers)
                with self._condition:  # what is queued may still be finished and consumed
                    while not self._stopped:
                        self._condition.wait()
            for pool in pools:
                pool.stop()
            # This thread keeps the pipeline, so that the interpreter's exit waits for all of them.
            for pool in pools:
                pool.join()

    def _run(self) -> None:
        blocks = self._blocks()
        ahead: deque[_Reading] = deque()
        memory = self._kept.memory or self._feed.memory()
        while not self._stopped:
            while len(ahead) <= self._feed.read_ahead:
                began = time.perf_counter()
                epoch, block = next(blocks, (None, None))
                self._counts.done("plan", began)
                if epoch is None:
                    break
                rows = None
                if block is not None:
                    rows = self._readers.submit(self._feed.read, block)
                ahead.append(_Reading(epoch, block, rows))
            if not ahead:
                raise RuntimeError("there is no epoch after this one")
            oldest = ahead.popleft()
            if oldest.block is None or oldest.rows is None:
                memory = memory.after_epoch()
                if self._wait_for_room(-1):
                    self._put(Delivery(oldest.epoch.number, -1, None))
                continue
            began = time.perf_counter()
            done = oldest.rows.result()
            began = self._counts.done("wait for a read", began)
            memory.load(oldest.block, done)
            if oldest.block.complete:
                self._kept.memory = memory
            self._counts.done("gather", began)
            del done
            self._gather(oldest.epoch, oldest.block, memory)
            del oldest

    def _blocks(self) -> Iterator[tuple[Epoch, Any]]:
        for epoch in self._epochs:
            for block in epoch.blocks:
                yield epoch, block
            yield epoch, None

    def _gather(self, epoch: Epoch, block: Any, memory: Memory) -> None:
        for i in range(len(block.bounds) - 1):
            # The room comes first: a batch that nobody asked for must not be made.
            if not self._wait_for_room(block.first + i):
                return
            began = time.perf_counter()
            raw = memory.share(block, i, epoch.number)
            if epoch.pad_from is not None:
                raw.padded = raw.samples >= epoch.pad_from
            step = block.first + i
            self._counts.done("gather", began, rows=len(raw.samples), step=step)
            value: Finished | Future[Finished]
            if self._finishers is None:
                value = self._timed(raw, step)
            else:
                value = self._finishers.submit(self._timed, raw, step)
            self._put(Delivery(epoch.number, step, value))

    def _timed(self, raw: RawBatch, step: int) -> Finished:
        began = time.perf_counter()
        try:
            value = self._finish(raw)
        except BaseException as error:
            _let_go(error)  # also of errors that the consumer will never see
            if isinstance(error, StopIteration):  # would end the consumer's loop like an epoch
                raise RuntimeError("a transform or collate_fn raised StopIteration") from error
            raise
        finally:
            with self._condition:
                self._finished += 1
        size = value.bytes = batch_bytes(value.batch)
        self._counts.done("finish", began, rows=len(raw.samples), size=size, step=step)
        for failed in value.failed:
            _strip(failed)
        if self._finishers is not None:  # else nothing waits unfinished
            size = max(size, batch_bytes(raw.data))
        if size > self._largest:
            with self._condition:
                self._largest = max(self._largest, size)
                self._condition.notify_all()
        return value

    def _wait_for_room(self, index: int) -> bool:
        """Wait until a delivery may be made; False if the pipeline was stopped."""
        with self._condition:
            if not self._has_room(index):
                began = time.perf_counter()
                while not self._stopped and not self._has_room(index):
                    self._condition.wait()
                self._counts.done("wait for room", began, step=index)
            return not self._stopped

    def _put(self, delivery: Delivery) -> None:
        with self._condition:
            if self._stopped:
                return
            self._behind += 1
            if delivery.index < 0:
                self._ended, self._behind = True, 0
            self._queue.append(delivery)
            self._condition.notify_all()

    def _has_room(self, index: int) -> bool:
        """Whether a delivery may be queued; the only thread that queues any asks.

        Of an epoch that nobody asked for yet just a few batches are made: enough to begin it
        without a pause, little to be thrown away where it was the last.
        """
        if self._ended or self._between:
            return self._behind < _NEXT_EPOCH and index >= 0
        return len(self._queue) < self._most_ready()

    def _most_ready(self) -> int:
        if not self._largest:
            return 2  # nothing is known of sizes before the first batch is finished
        return max(1, min(self._ready_limit, self._ready_bytes // self._largest))


def _let_go(error: BaseException) -> None:
    """Empty this library's frames of an error's traceback, and of its causes'.

    They hold batches, and some hold the error itself, so that all of it would stay until the cycle
    is collected. The frames of users stay as they are, for a debugger.
    """
    for each in _chain(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("destrier."):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()


def _strip(error: BaseException) -> None:
    """Drop the tracebacks of an error that is kept for its text: they hold whole batches."""
    for each in _chain(error):
        each.__traceback__ = None


def _chain(error: BaseException) -> list[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and all(following is not each for each in chain):
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain


_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Let no thread be inside native code when the interpreter takes itself apart."""
    pipelines = list(_running)
    for pipeline in pipelines:
        pipeline.stop()
    until = time.monotonic() + _EXIT_SECONDS
    for pipeline in pipelines:
        pipeline.join(until)


@dataclass
class _Reading:
    """A block whose rows are being read; no block is the end of its epoch."""

    epoch: Epoch
    block: Any
    rows: Future[Any] | None
