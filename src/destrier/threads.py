"""A few daemon threads that run calls in order, and can be left behind.

`concurrent.futures` makes the interpreter's exit wait until every queued call has run; a transform
that sleeps, or a worker process that hangs, would then keep a crashed rank alive.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """A pool of daemon threads.

    Args:
        count: How many.
        name: Of the threads, for those who look at them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a call when a thread is free."""
        future: Future[T] = Future()
        self._calls.put((future, lambda: call(*arguments)))
        return future

    def stop(self) -> None:
        """Cancel the calls that wait; the threads end after those that run."""
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._calls.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
        for _ in self._threads:
            self._calls.put(None)

    @property
    def alive(self) -> bool:
        """Whether any of the threads still runs."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def has_this_thread(self) -> bool:
        """Whether the thread that asks is one of them."""
        return threading.current_thread() in self._threads

    def join(self, until: float | None = None) -> None:
        """Wait for the threads of a stopped pool, until `time.monotonic` says so at most."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _work(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while True:
        entry = calls.get()
        if entry is None:
            return
        future, call = entry
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del entry, future, call
