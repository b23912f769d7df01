"""What the threads of a loader did when, as a file that Perfetto opens."""

from __future__ import annotations

import json
import os
import threading
from typing import Any, TextIO

__all__ = ["Trace"]


class Trace:
    """Spans of stages, one track a thread, in Chrome's trace event format.

    Kept in memory until they are written, about 200 bytes a span and half a dozen spans a batch.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, str, str, float, float, int, int, int]] = []

    def add(self, stage: str, began: float, ended: float, rows: int, size: int, step: int) -> None:
        """Add a span of this thread, by `time.perf_counter`."""
        thread = threading.current_thread()
        # One append, so that threads need no lock.
        self._spans.append((thread.ident or 0, thread.name, stage, began, ended, rows, size, step))

    def write(self, file: TextIO) -> None:
        """Write the spans so far.

        Raises:
            OSError: If the file cannot be written.
        """
        spans = list(self._spans)
        first = min((span[3] for span in spans), default=0.0)
        process = os.getpid()
        # Two threads that have run one after another may have had the same number.
        tracks: dict[tuple[int, str], int] = {}
        events: list[dict[str, Any]] = []
        for ident, thread, stage, began, ended, rows, size, step in spans:
            track = tracks.setdefault((ident, thread), len(tracks) + 1)
            told = {"step": step if step >= 0 else None, "rows": rows, "bytes": size}
            events.append(
                {
                    "name": stage,
                    "cat": "wait" if stage.startswith("wait") else "work",
                    "ph": "X",
                    "ts": (began - first) * 1e6,
                    "dur": (ended - began) * 1e6,
                    "pid": process,
                    "tid": track,
                    "args": {
                        key: value
                        for key, value in told.items()
                        if value or (key == "step" and value is not None)
                    },
                }
            )
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": track,
                "args": {"name": thread},
            }
            for (_, thread), track in tracks.items()
        ]
        file.write(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
