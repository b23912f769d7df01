"""What a dataset is doing, in LanceDB's names."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from destrier.pipeline import Pipeline
    from destrier.sharing import Shared
    from destrier.trace import Trace

__all__ = ["COUNTERS", "Consumer", "Counted", "Counts", "Sums"]

COUNTERS = (
    "bytes_loaded",
    "fetch_time",
    "transform_time",
    "raw_queue_depth",
    "prefetch_queue_depth",
    "unscanned_rows",
    "consumed_rows",
    "rows_skipped",
)


class Sums(NamedTuple):
    """What a stage has done so far."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    spans: int = 0
    rows: int = 0
    bytes: int = 0


class Counts:
    """Sums that threads add to: of each stage, and others by name.

    Stages are measured once a batch or block, so a span may cost a microsecond and no more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._stages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0, 0, 0])
        self._parts: list[Counts] = []
        self._early: dict[str, float] | None = None
        self._cpu_began: float | None = None
        self.queued = 0  # batches that were ready, summed over the times that one was asked for
        self.trace: Trace | None = None

    def part(self) -> Counts:
        """Counts whose sums are also part of these."""
        part = Counts()
        self._parts.append(part)
        return part

    def add(self, name: str, amount: float) -> None:
        """Add to a sum."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + amount

    def __getitem__(self, name: str) -> float:
        return self._sums.get(name, 0) + sum(part[name] for part in self._parts)

    def done(
        self,
        stage: str,
        began: float,
        *,
        rows: int = 0,
        size: int = 0,
        step: int = -1,
        cpu_began: float | None = None,
    ) -> float:
        """Add a span that ends now to a stage.

        Args:
            stage: Its name.
            began: What `time.perf_counter` said.
            rows: That were worked on.
            size: Their bytes.
            step: The batch since the start of the iterator.
            cpu_began: What `time.thread_time` said, where this thread does the work itself.

        Returns:
            The time now, at which another span may begin.
        """
        now = time.perf_counter()
        with self._lock:
            sums = self._stages[stage]
            sums[0] += now - began
            sums[2] += 1
            sums[3] += rows
            sums[4] += size
            if cpu_began is not None:
                sums[1] += time.thread_time() - cpu_began
        trace = self.trace
        if trace is not None:
            trace.add(stage, began, now, rows, size, step)
        return now

    def handed(self, given: float, asked: float, *, rows: int, size: int, step: int) -> float:
        """Count a batch for the trainer, which had got one before and then worked until it asked.

        Args:
            given: When the trainer got something last, as `time.perf_counter` says.
            asked: When it asked for this batch.
            rows: Of the batch.
            size: Its bytes.
            step: The batch since the start of the iterator.

        Returns:
            The time now.
        """
        self._stages["train"][0] += asked - given  # by one thread only
        trace = self.trace
        if trace is not None:
            trace.add("train", given, asked, 0, 0, step)
        now = self.done("next", asked, rows=rows, size=size, step=step)
        if self._early is None:
            with self._lock:
                self._early = {name: sums[0] for name, sums in self._stages.items()}
        return now

    @contextlib.contextmanager
    def time(self, stage: str, rows: int = 0) -> Iterator[None]:
        """Add what runs inside as a span, with the processor time of this thread."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.done(stage, began, rows=rows, cpu_began=cpu_began)

    def stage(self, name: str) -> Sums:
        """What a stage has done so far."""
        with self._lock:
            own = Sums(*self._stages.get(name, ()))
        return Sums(*map(sum, zip(own, *(part.stage(name) for part in self._parts), strict=True)))

    def early(self, stage: str) -> float:
        """Seconds of a stage until the first batch was out."""
        return (self._early or {}).get(stage, 0.0)

    def enter(self) -> None:
        """Count the processor time of this process from now on."""
        if self._cpu_began is None:
            self._cpu_began = time.process_time()

    def leave(self) -> None:
        """Count it no longer."""
        if self._cpu_began is not None:
            self.add("cpu_seconds", time.process_time() - self._cpu_began)
            self._cpu_began = None

    @property
    def cpu_seconds(self) -> float:
        """Processor time of this process between `enter` and `leave`, or until now."""
        running = 0.0 if self._cpu_began is None else time.process_time() - self._cpu_began
        return self["cpu_seconds"] + running

    def __reduce__(self) -> tuple[type[Counts], tuple[()], dict[str, Any]]:
        # A copy in another process counts for itself.
        return Counts, (), {"_parts": self._parts}


class Consumer(Protocol):
    """An iterator over a dataset, as far as its counters want to know it."""

    consumed: int
    total: int
    share_rows: int

    def end(self, why: str) -> None:
        """Close it; with a reason, using it further is an error."""
        ...

    @property
    def in_hand(self) -> int:
        """Rows of the current share that were not yielded yet."""
        ...

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline it reads from."""
        ...


class Counted:
    """The counters of a dataset: its own, and those of its copies in workers."""

    _live: weakref.ref[Consumer] | None
    _last_consumed: int
    _shared: Shared | None

    def __init__(self) -> None:
        super().__init__()
        self._counts = Counts()

    def _counters(self) -> dict[str, int]:
        live = None if self._live is None else self._live()
        pipeline = None if live is None else live.pipeline
        consumed = self._last_consumed if live is None else live.consumed
        read = self._counts.stage("read")
        ready = left = raw = 0
        if live is not None and pipeline is not None:
            raw = pipeline.unfinished * live.share_rows
            queued = pipeline.queued * live.share_rows
            ready = max(0, min(live.total - consumed, queued - raw + live.in_hand))
            left = max(0, live.total - consumed - ready - raw)
        return {
            "bytes_loaded": int(read.bytes),
            "fetch_time": int(read.seconds * 1e6),
            "transform_time": int(self._counts.stage("finish").seconds * 1e6),
            "raw_queue_depth": raw,
            "prefetch_queue_depth": ready,
            "unscanned_rows": left,
            "consumed_rows": consumed,
            "rows_skipped": int(self._counts["rows_skipped"]),
        }

    def _count(self, name: str) -> int:
        own = self._counters()[name]
        return own + (0 if self._shared is None else self._shared.total(COUNTERS.index(name)))

    @property
    def bytes_loaded(self) -> int:
        """Bytes of Arrow data read so far."""
        return self._count("bytes_loaded")

    @property
    def fetch_time(self) -> float:
        """Seconds spent reading, summed over threads."""
        return self._count("fetch_time") / 1e6

    @property
    def transform_time(self) -> float:
        """Seconds spent decoding and transforming, summed over threads."""
        return self._count("transform_time") / 1e6

    @property
    def raw_queue_depth(self) -> int:
        """Rows that were read and wait for the transform, about."""
        return self._count("raw_queue_depth")

    @property
    def prefetch_queue_depth(self) -> int:
        """Rows ready for the consumer, about."""
        return self._count("prefetch_queue_depth")

    @property
    def unscanned_rows(self) -> int:
        """Rows of the epoch that are not read yet, about."""
        return self._count("unscanned_rows")

    @property
    def consumed_rows(self) -> int:
        """Rows yielded by the current iterator, or the last one."""
        return self._count("consumed_rows")

    @property
    def rows_skipped(self) -> int:
        """Rows that were left out because they failed."""
        return self._count("rows_skipped")
