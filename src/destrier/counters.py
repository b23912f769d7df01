"""What a dataset is doing, in LanceDB's names."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from destrier.pipeline import Pipeline
    from destrier.sharing import Shared

__all__ = ["COUNTERS", "Consumer", "Counted", "Counts"]

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


class Counts:
    """Sums that threads add to: bytes loaded, and seconds of reading and of transforming."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Add to a sum."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + amount

    def __getitem__(self, name: str) -> float:
        return self._sums.get(name, 0)

    def __reduce__(self) -> tuple[type[Counts], tuple[()]]:
        return Counts, ()  # a copy in another process counts for itself


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
        ready = left = raw = 0
        if live is not None and pipeline is not None:
            raw = pipeline.unfinished * live.share_rows
            queued = pipeline.queued * live.share_rows
            ready = max(0, min(live.total - consumed, queued - raw + live.in_hand))
            left = max(0, live.total - consumed - ready - raw)
        return {
            "bytes_loaded": int(self._counts["bytes_loaded"]),
            "fetch_time": int(self._counts["fetch_time"] * 1e6),
            "transform_time": int(self._counts["transform_time"] * 1e6),
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
