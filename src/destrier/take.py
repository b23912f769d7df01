"""Takes: values of a table's rows by offset, in the way that costs least on its storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import lance
import numpy as np
import pyarrow as pa

from destrier.errors import ReadError
from destrier.keyed import Ints
from destrier.table import Table
from destrier.writing.layout import is_blob

__all__ = ["Takes"]

T = TypeVar("T")

_RING = re.compile("io_uring|UringReader")
_ROWS_OF_A_FRAGMENT = 64  # in the mean: fewer do not pay for a call of their own


class Takes:
    """Takes rows of a pinned table.

    Lance's take of a dataset copies the rows once more to bring fragments together, and needs a
    third more time. On local disk, where nothing is gained by asking for many fragments at once,
    each fragment is therefore asked by itself.

    Args:
        table: The pinned table.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        # Fragments cannot give the descriptions of blobs.
        self._blobs = {field.name for field in table.schema if is_blob(field)}
        rows = [fragment.metadata.num_rows for fragment in table.dataset.get_fragments()]
        # Where each fragment begins, and one past the last row.
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
        self._fragments: tuple[lance.LanceDataset, list[lance.LanceFragment]] | None = None

    def take(self, offsets: Ints, names: list[str]) -> dict[str, pa.Array]:
        """Take rows.

        Args:
            offsets: Live-row offsets, ascending, each once; at least one.
            names: Columns.

        Raises:
            ReadError: If Lance gives other than that many rows.
        """
        pieces = self._tried(lambda: list(self._pieces(offsets, names)))
        rows = sum(piece.num_rows for piece in pieces)
        if rows != len(offsets):
            raise ReadError(
                f"Lance returned {rows} rows of {self.table.name} for {len(offsets)} offsets"
            )
        return {
            name: _joined([chunk for piece in pieces for chunk in piece.column(name).chunks])
            for name in names
        }

    def blobs(self, offsets: Ints, name: str) -> list[bytes | None]:
        """Read the values of a blob column through Lance's planned reads.

        Raises:
            ReadError: If Lance gives other than that many values.
        """
        pairs = self._tried(
            lambda: self.table.bulk.read_blobs(name, indices=offsets.tolist(), preserve_order=True)
        )
        if len(pairs) != len(offsets):
            raise ReadError(
                f"Lance returned {len(pairs)} blobs of {self.table.name} for {len(offsets)} offsets"
            )
        return [value for _, value in pairs]

    def _tried(self, read: Callable[[], T]) -> T:
        """Read; once more without io_uring where that is what failed.

        The kernel was asked for one ring, but may refuse those that Lance makes afterwards.
        """
        try:
            return read()
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            if not (panicked or _RING.search(str(error))) or not self.table.read_plainly():
                raise
        return read()

    def _pieces(self, offsets: Ints, names: list[str]) -> Iterator[pa.Table]:
        if (
            not self._blobs.isdisjoint(names)
            or self.table.remote
            or offsets[0] < 0
            or offsets[-1] >= self._bounds[-1]
        ):
            yield self.table.bulk.take(pa.array(offsets), columns=names)
            return
        first = int(np.searchsorted(self._bounds, offsets[0], side="right")) - 1
        last = int(np.searchsorted(self._bounds, offsets[-1], side="right"))
        cuts = np.searchsorted(offsets, self._bounds[first : last + 1])
        touched = np.flatnonzero(cuts[1:] > cuts[:-1])
        if len(offsets) < _ROWS_OF_A_FRAGMENT * len(touched) and len(touched) > 1:
            yield self.table.bulk.take(pa.array(offsets), columns=names)
            return
        bulk = self.table.bulk
        if self._fragments is None or self._fragments[0] is not bulk:
            self._fragments = bulk, bulk.get_fragments()
        fragments = self._fragments[1]
        for i in touched.tolist():
            part = offsets[cuts[i] : cuts[i + 1]] - self._bounds[first + i]
            yield fragments[first + i].take(part.tolist(), columns=names)


def _joined(chunks: list[pa.Array]) -> pa.Array:
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
