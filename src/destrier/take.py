"""Takes: values of a table's rows by offset, in the way that costs least on its storage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import lance
import numpy as np
import pyarrow as pa

from destrier.errors import ReadError
from destrier.keyed import Ints
from destrier.table import Table
from destrier.uring import uring_uri
from destrier.writing.layout import is_blob

__all__ = ["Takes"]

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

    @cached_property
    def dataset(self) -> lance.LanceDataset:
        """The table as it is read in bulk: local files through io_uring."""
        fast = None if self.table.storage_options else uring_uri(self.table.uri)
        if fast is None:
            return self.table.dataset
        try:
            return Table(fast, self.table.version).dataset
        except Exception:  # any reason is one to read it the ordinary way
            return self.table.dataset

    @cached_property
    def _fragments(self) -> list[lance.LanceFragment]:
        return self.dataset.get_fragments()

    @cached_property
    def _bounds(self) -> Ints:
        """The offset at which each fragment begins, and one past the last row."""
        rows = [fragment.metadata.num_rows for fragment in self._fragments]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])

    def take(self, offsets: Ints, names: list[str]) -> dict[str, pa.Array]:
        """Take rows.

        Args:
            offsets: Live-row offsets, ascending, each once; at least one.
            names: Columns.

        Raises:
            ReadError: If Lance gives other than that many rows.
        """
        pieces = list(self._pieces(offsets, names))
        rows = sum(piece.num_rows for piece in pieces)
        if rows != len(offsets):
            raise ReadError(
                f"Lance returned {rows} rows of {self.table.name} for {len(offsets)} offsets"
            )
        return {
            name: _joined([chunk for piece in pieces for chunk in piece.column(name).chunks])
            for name in names
        }

    def _pieces(self, offsets: Ints, names: list[str]) -> Iterator[pa.Table]:
        # Fragments cannot give the descriptions of blobs.
        whole = any(is_blob(self.table.schema.field(name)) for name in names)
        if whole or self.table.remote or offsets[0] < 0 or offsets[-1] >= self._bounds[-1]:
            yield self.dataset.take(pa.array(offsets), columns=names)
            return
        first = int(np.searchsorted(self._bounds, offsets[0], side="right")) - 1
        last = int(np.searchsorted(self._bounds, offsets[-1], side="right"))
        cuts = np.searchsorted(offsets, self._bounds[first : last + 1])
        touched = np.flatnonzero(cuts[1:] > cuts[:-1])
        if len(offsets) < _ROWS_OF_A_FRAGMENT * len(touched) and len(touched) > 1:
            yield self.dataset.take(pa.array(offsets), columns=names)
            return
        for i in touched.tolist():
            part = offsets[cuts[i] : cuts[i + 1]] - self._bounds[first + i]
            yield self._fragments[first + i].take(part.tolist(), columns=names)


def _joined(chunks: list[pa.Array]) -> pa.Array:
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
