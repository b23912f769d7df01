"""One leaf of many rows, and what makes a column of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from destrier.formats.gather import MOST_OFFSETS, Bytes, Ints, binary, fixed, text
from destrier.formats.litdata.places import Place

__all__ = ["Cells", "Codec", "text_array"]


@dataclass(frozen=True)
class Cells:
    """One leaf of many rows.

    Attributes:
        data: The buffer that holds them, and more.
        starts: Where each begins.
        sizes: Their bytes.
        place: Where they come from.
    """

    data: Bytes
    starts: Ints
    sizes: Ints
    place: Place

    def width(self, size: int, what: str) -> None:
        """Raise unless each has this size."""
        if (odd := np.flatnonzero(self.sizes != size)).size:
            row = int(odd[0])
            raise self.place.damaged(f"has {self.sizes[row]:,} bytes, {what} has {size}", row)

    def header(self, size: int, what: str) -> Bytes:
        """The first bytes of each.

        Raises:
            SourceError: If one is shorter.
        """
        if (short := np.flatnonzero(self.sizes < size)).size:
            row = int(short[0])
            raise self.place.damaged(f"has {self.sizes[row]:,} bytes, too few for {what}", row)
        return fixed(self.data, self.starts, size)

    def whole(self) -> pa.LargeBinaryArray:
        """All of their bytes."""
        return binary(self.data, self.starts, self.sizes)


class Codec(ABC):
    """A leaf's serializer.

    Attributes:
        encoding: As the index and the field's metadata name it.
        content_type: Of media, or None.
        linkable: Whether the bytes are the value.
    """

    content_type: str | None = None
    linkable = False

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding

    @property
    @abstractmethod
    def type(self) -> pa.DataType | None:
        """The column's type, or None as long as no rows were observed that decide it."""

    def observe(self, cells: Cells) -> None:  # noqa: B027 - most types need no rows
        """Take note of rows of the first chunk, where they decide the type."""

    @abstractmethod
    def decode(self, cells: Cells, kind: pa.DataType) -> pa.Array:
        """Make a column, or a part of it, of a type that was decided before.

        Raises:
            SourceError: If a value is damaged.
            SchemaError: If a value is of another type.
        """


def text_array(cells: Cells) -> pa.Array:
    """Text, checked to be UTF-8."""
    total = int(cells.sizes.sum())
    if total > MOST_OFFSETS:
        raise cells.place.damaged(f"has {total:,} bytes, more than a string holds", 0)
    return text(cells.whole(), lambda row, problem: cells.place.damaged(problem, row))
