"""What a dataset is doing, in LanceDB's names."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import defaultdict
from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

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


class _Tally:
    """The sums themselves, which may outlive who adds to them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums: dict[str, float] = defaultdict(float)
        self.stages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0, 0, 0])

    def sum(self, name: str) -> float:
        return self.sums.get(name, 0)

    def stage(self, name: str) -> Sums:
        with self.lock:
            return Sums(*self.stages.get(name, ()))

    def take_in(self, other: _Tally) -> None:
        """Add what another has, to which nothing is added any longer."""
        with self.lock:
            for name, amount in other.sums.items():
                self.sums[name] += amount
            for name, sums in other.stages.items():
                self.stages[name] = [*map(add, self.stages[name], sums)]


class Counts:
    """Sums that threads add to: of each stage, and others by name.

    Stages are measured once a batch or block, so a span may cost a microsecond and no more.
    """

    def __init__(self) -> None:
        self.tally = _Tally()
        self._parts_lock = threading.Lock()
        self._parts: list[tuple[weakref.ref[Counts], _Tally]] = []
        self._early: dict[str, float] | None = None
        self._cpu_began = 0.0
        self.queued = 0  # batches that were ready, summed over the times that one was asked for
        self.trace: Trace | None = None

    def part(self) -> Counts:
        """Counts whose sums are also part of these, and stay so when they are dropped."""
        part = Counts()
        self._adopt([part])
        return part

    def _adopt(self, parts: list[Counts]) -> None:
        with self._parts_lock:
            kept = []
            for part, tally in self._parts:
                if part() is None:
                    self.tally.take_in(tally)
                else:
                    kept.append((part, tally))
            self._parts = kept + [(weakref.ref(part), part.tally) for part in parts]

    def add(self, name: str, amount: float) -> None:
        """Add to a sum."""
        with self.tally.lock:
            self.tally.sums[name] += amount

    def __getitem__(self, name: str) -> float:
        with self._parts_lock:
            return sum(tally.sum(name) for tally in self._tallies())

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
        with self.tally.lock:
            sums = self.tally.stages[stage]
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
        self.tally.stages["train"][0] += asked - given  # by one thread only
        trace = self.trace
        if trace is not None:
            trace.add("train", given, asked, 0, 0, step)
        now = self.done("next", asked, rows=rows, size=size, step=step)
        self.count_cpu()
        if self._early is None:
            with self.tally.lock:
                self._early = {name: sums[0] for name, sums in self.tally.stages.items()}
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
        with self._parts_lock:
            found = [tally.stage(name) for tally in self._tallies()]
        return Sums(*map(sum, zip(*found, strict=True)))

    def _tallies(self) -> list[_Tally]:
        return [self.tally, *(tally for _, tally in self._parts)]

    def early(self, stage: str) -> float:
        """Seconds of a stage until the first batch was out."""
        return (self._early or {}).get(stage, 0.0)

    def enter(self) -> None:
        """Begin an epoch: processor time of this process counts from now on."""
        self._cpu_began = time.process_time()

    def count_cpu(self) -> None:
        """Add the processor time since the last call, or since the epoch began."""
        now = time.process_time()
        self.add("cpu_seconds", now - self._cpu_began)
        self._cpu_began = now

    def __reduce__(self) -> tuple[type[Counts], tuple[()], list[Counts]]:
        # A copy in another process counts for itself.
        parts = [part() for part, _ in self._parts]
        return Counts, (), [part for part in parts if part is not None]

    def __setstate__(self, parts: list[Counts]) -> None:
        self._adopt(parts)


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
