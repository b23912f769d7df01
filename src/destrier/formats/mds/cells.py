"""The bytes of one column in a run of rows, gathered without a Python object a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.errors import SchemaError, SourceError

__all__ = ["Cells", "Ints", "bounds_of", "join", "offsets_of", "pieces"]

Ints: TypeAlias = NDArray[np.int64]

_INT32 = (1 << 31) - 1


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
        if not len(self):
            return np.empty(0, kind)
        # every position is seen as the start of a number, so that one index per row gathers it
        every = np.ndarray(
            (self.buffer.size - kind.itemsize + 1,), kind, buffer=self.buffer, strides=(1,)
        )
        picked: NDArray[Any] = every[self.starts + offset]
        return picked

    def bytes(self) -> pa.LargeBinaryArray:
        """The values as bytes, copied once."""
        if not len(self):
            return pa.array([], pa.large_binary())
        return _every_second(pa.large_binary(), np.int64, self)

    def text(self) -> pa.StringArray:
        """The values as text.

        Raises:
            SourceError: If one is not UTF-8, naming its row.
        """
        if not len(self):
            return pa.array([], pa.string())
        self.fits(self.lengths, "bytes of text")
        small = self.buffer.size <= _INT32
        kind, width = (pa.binary(), np.int32) if small else (pa.large_binary(), np.int64)
        gathered = _every_second(kind, width, self)
        try:
            return gathered.cast(pa.string())
        except pa.ArrowInvalid:
            for index, value in enumerate(gathered):
                try:
                    value.as_py().decode("utf-8")
                except UnicodeDecodeError as error:
                    raise self.fail(
                        index, f"is not UTF-8: {error}", 'bad_utf8="binary" keeps text as bytes'
                    ) from None
            raise

    def fits(self, counts: Ints, what: str) -> None:
        """Raise if one value alone has more items than a list of Arrow holds."""
        if len(counts) and int(counts.max()) > _INT32:
            index = int(np.argmax(counts))
            raise self.fail(
                index,
                f"has {int(counts[index]):,} {what}, more than the 2,147,483,647 that fit",
                "leave the column out with columns=",
            )


def _every_second(kind: pa.DataType, width: Any, cells: Cells) -> pa.Array:
    """See the buffer as value, gap, value, gap and so on, and take the values."""
    count = len(cells)
    bounds = np.empty(2 * count, width)
    bounds[0::2] = cells.starts
    bounds[1::2] = cells.starts + cells.lengths
    seen = pa.Array.from_buffers(
        kind, 2 * count - 1, [None, pa.py_buffer(bounds), cells.buffer], null_count=0
    )
    return seen.take(pa.array(np.arange(0, 2 * count, 2)))


def offsets_of(lengths: Ints) -> Ints:
    """Where values of these lengths begin if they lie side by side, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def bounds_of(array: pa.Array) -> Ints:
    """Where the values of an array of bytes, text or lists begin, and where the last one ends."""
    large = pa.types.is_large_binary(array.type)
    bounds = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)
    return bounds[array.offset : array.offset + len(array) + 1].astype(np.int64)


def pieces(lengths: Ints | int, data: Any, count: int) -> pa.LargeBinaryArray:
    """Values that lie side by side in memory, as bytes.

    Args:
        lengths: Bytes of each, or of all alike.
        data: A buffer, or an array in C order.
        count: Number of values.
    """
    if isinstance(lengths, int):
        offsets = np.arange(count + 1, dtype=np.int64) * lengths
    else:
        offsets = offsets_of(lengths)
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(np.ascontiguousarray(data))
    return pa.Array.from_buffers(
        pa.large_binary(), count, [None, pa.py_buffer(offsets), buffer], null_count=0
    )


def join(parts: list[pa.LargeBinaryArray]) -> pa.LargeBinaryArray:
    """Put the parts of each value together: the first of all parts, then the second of all."""
    count = len(parts[0])
    if len(parts) == 1 or not count:
        return parts[0]
    order = np.arange(count * len(parts), dtype=np.int64).reshape(len(parts), count).T
    gathered = pa.concat_arrays(parts).take(pa.array(order.ravel()))
    ends = bounds_of(gathered)[:: len(parts)]
    return pa.Array.from_buffers(
        pa.large_binary(),
        count,
        [None, pa.py_buffer(np.ascontiguousarray(ends)), gathered.buffers()[2]],
        null_count=0,
    )
