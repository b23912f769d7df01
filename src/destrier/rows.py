"""Row mode: dict rows as LanceDB's streaming gives them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from destrier.batch import Finished, RawBatch
from destrier.errors import ArgumentError, LengthError

__all__ = ["SKIPPED", "OnTransformError", "RowFinisher", "check_on_transform_error"]

OnTransformError: TypeAlias = "Literal['raise', 'skip', 'warn'] | Callable[[Exception], bool]"
SKIPPED = object()

logger = logging.getLogger("destrier")


def check_on_transform_error(value: OnTransformError) -> None:
    """Raise unless it is one of the policies."""
    if value not in ("raise", "skip", "warn") and not callable(value):
        raise ArgumentError(
            f"on_transform_error must be 'raise', 'skip', 'warn', or a callable, got {value!r}"
        )


class RowFinisher:
    """Turns a share into a list of rows, one entry a row, `SKIPPED` for one that was dropped.

    Args:
        transform: Called with RecordBatches of at most ``most_rows`` rows; returns an iterable of
            as many rows. None gives dicts.
        on_error: What happens to rows on which the transform raises.
        most_rows: Rows of a RecordBatch.
    """

    def __init__(
        self,
        transform: Callable[[pa.RecordBatch], Any] | None,
        on_error: OnTransformError,
        most_rows: int,
    ) -> None:
        self.transform = transform
        self.on_error = on_error
        self.most_rows = most_rows

    def __call__(self, raw: RawBatch) -> Finished:
        """Finish one share."""
        data = raw.data
        assert isinstance(data, pa.RecordBatch)
        if self.transform is None:
            return Finished(data.to_pylist())
        rows: list[Any] = []
        for start in range(0, data.num_rows, self.most_rows):
            rows.extend(self._transformed(data.slice(start, self.most_rows)))
        return Finished(rows)

    def _transformed(self, batch: pa.RecordBatch) -> list[Any]:
        try:
            return self._call(batch)
        except Exception as error:
            if not self._skips(error):
                raise
            first = repr(error)  # the error itself would hold this frame, and the frame it
        rows: list[Any] = []
        for i in range(batch.num_rows):
            try:
                rows.extend(self._call(batch.slice(i, 1)))
            except Exception as error:
                if not self._skips(error):
                    raise
                rows.append(SKIPPED)
        if self.on_error == "warn":
            logger.warning(
                "Skipped %d of %d rows whose transform failed (first error: %s)",
                sum(row is SKIPPED for row in rows),
                batch.num_rows,
                first,
            )
        return rows

    def _call(self, batch: pa.RecordBatch) -> list[Any]:
        assert self.transform is not None
        rows = list(self.transform(batch))
        if len(rows) != batch.num_rows:
            raise LengthError(
                f"transform returned {len(rows)} rows for a batch of {batch.num_rows}; transforms "
                "must return exactly one output row per input row. To drop bad rows, raise inside "
                "the transform and pass on_transform_error='skip'"
            )
        return rows

    def _skips(self, error: Exception) -> bool:
        if isinstance(error, LengthError) or self.on_error == "raise":
            return False
        return bool(self.on_error(error)) if callable(self.on_error) else True
