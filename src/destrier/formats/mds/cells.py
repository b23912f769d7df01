"""The bytes of one column in a run of rows, gathered without a Python object a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.errors import SchemaError, SourceError
from destrier.formats.gather import MOST_OFFSETS, Ints, as_bytes, binary, fixed, text

__all__ = ["TEXT_AS_BYTES", "Cells"]

TEXT_AS_BYTES = 'bad_utf8="binary" keeps text as bytes'
"""The way out where text is not UTF-8."""


@dataclass(frozen=True)
class Cells:
    """Where the values of a column lie in a buffer, one after the other.

    Attributes:
        buffer: Holds them all.
        starts: Position of each in the buffer, ascending.
        lengths: Of each in bytes; no value overlaps the next.
        rows: The row of each in its shard, for messages.
        file: The shard's file, for messages.
        column: The column's name, for messages.
        base: Position of the buffer in the file.
    """

    buffer: pa.Buffer
    starts: Ints
    lengths: Ints
    rows: Ints
    file: str
    column: str
    base: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def fail(self, index: int, problem: str, way_out: str = "") -> SourceError:
        """The error for one value, which is damaged."""
        return self._error(SourceError, index, problem, way_out)

    def differ(self, index: int, problem: str, way_out: str = "") -> SchemaError:
        """The error for one value, which is of another type than its column."""
        error = self._error(SchemaError, index, problem, way_out)
        assert isinstance(error, SchemaError)
        return error

    def _error(
        self, kind: type[SourceError], index: int, problem: str, way_out: str
    ) -> SourceError:
        row = int(self.rows[index])
        text = f"column {self.column!r} of row {row} of {self.file} {problem}"
        return kind(
            f"{text}; {way_out}" if way_out else text, file=self.file, row=row, column=self.column
        )

    def within(self, starts: Ints, lengths: Ints) -> Cells:
        """Parts of the values, one of each."""
        return replace(self, starts=starts, lengths=lengths)

    def at_least(self, size: int | Ints, what: str) -> None:
        """Raise unless each value holds so many bytes."""
        short = self.lengths < size
        if short.any():
            index = int(np.argmax(short))
            needed = int(np.broadcast_to(size, short.shape)[index])
            raise self.fail(
                index, f"holds {self.lengths[index]:,} bytes, too few for {what} ({needed:,})"
            )

    def fixed(self, dtype: Any, offset: int | Ints = 0) -> NDArray[Any]:
        """One number or record at an offset in each value; the values are long enough."""
        kind = np.dtype(dtype)
        picked = fixed(as_bytes(self.buffer), self.starts + offset, kind.itemsize)
        return picked.view(kind) if len(picked) else np.empty(0, kind)

    def bytes(self) -> pa.LargeBinaryArray:
        """The values as bytes, copied once."""
        return binary(self.buffer, self.starts, self.lengths)

    def text(self) -> pa.StringArray:
        """The values as text.

        Raises:
            SourceError: If one is not UTF-8, naming its row.
        """
        self.fits(self.lengths, "bytes of text")
        return text(self.bytes(), lambda index, problem: self.fail(index, problem, TEXT_AS_BYTES))

    def fits(self, counts: Ints, what: str) -> None:
        """Raise if one value alone has more items than a list of Arrow holds."""
        if len(counts) and int(counts.max()) > MOST_OFFSETS:
            index = int(np.argmax(counts))
            raise self.fail(
                index,
                f"has {int(counts[index]):,} {what}, more than the 2,147,483,647 that fit",
                "leave the column out with columns=",
            )
