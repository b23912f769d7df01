"""What a dataset is doing, in LanceDB's names."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from destrier.sharing import COUNTERS, Shared

if TYPE_CHECKING:
    from destrier.iteration import DatasetIterator
    from destrier.runner import Runner

__all__ = ["Counted"]


class Counted:
    """The counters of a dataset: its own, and those of its copies in workers."""

    _runner: Runner | None
    _live: weakref.ref[DatasetIterator] | None
    _shared: Shared | None

    def __init__(self) -> None:
        super().__init__()
        self._rows_skipped = 0
        self._past = (0.0, 0.0, 0.0)

    def _keep_counters(self, runner: Runner) -> None:
        """Add up what a runner counted before it goes."""
        loaded, fetch, transform = self._past
        pipeline = runner.pipeline
        self._past = (
            loaded + runner.work.reader.bytes_loaded,
            fetch + runner.work.reader.fetch_time,
            transform + (pipeline.transform_time if pipeline is not None else 0.0),
        )

    def _counters(self) -> dict[str, int]:
        runner = self._runner
        live = None if self._live is None else self._live()
        pipeline = None if runner is None else runner.pipeline
        loaded, fetch, transform = self._past
        if runner is not None:
            loaded += runner.work.reader.bytes_loaded
            fetch += runner.work.reader.fetch_time
        if pipeline is not None:
            transform += pipeline.transform_time
        consumed = ready = left = raw = 0
        if live is not None:
            consumed = live.consumed
            raw = 0 if pipeline is None else pipeline.unfinished * live.share_rows
            queued = 0 if pipeline is None else pipeline.queued * live.share_rows
            ready = max(0, min(live.total - consumed, queued - raw + live.in_hand))
            left = max(0, live.total - consumed - ready - raw)
        return {
            "bytes_loaded": int(loaded),
            "fetch_time": int(fetch * 1e6),
            "transform_time": int(transform * 1e6),
            "raw_queue_depth": raw,
            "prefetch_queue_depth": ready,
            "unscanned_rows": left,
            "consumed_rows": consumed,
            "rows_skipped": self._rows_skipped,
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
        """Seconds spent transforming, summed over threads."""
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
        """Rows yielded by the current iterator."""
        return self._count("consumed_rows")

    @property
    def rows_skipped(self) -> int:
        """Rows dropped because their transform raised."""
        return self._count("rows_skipped")
