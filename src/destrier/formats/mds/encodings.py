"""The encodings of MDS: what a column becomes in Arrow, and back.

An encoding that only copies is here; numbers kept as text, arrays and images have modules of their
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from destrier.errors import SourceError
from destrier.formats.gather import even
from destrier.formats.mds.cells import Cells

__all__ = ["DTYPES", "Binary", "Encoding", "Fail", "Scalar", "Text"]

DTYPES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "uint32": 32,
    "int32": 33,
    "float32": 34,
    "uint64": 64,
    "int64": 65,
    "float64": 66,
}
"""The dtypes of scalars and arrays, and the number of each in an array of any dtype."""

Fail: TypeAlias = Callable[[int, str], SourceError]
"""Makes the error for a row: its index in the values, and what is wrong."""


class Encoding(ABC):
    """How one column is encoded.

    Attributes:
        name: As MDS writes it.
        width: Bytes of a value, or None if they vary.
        type: In Arrow.
        content_type: What the bytes are, if that is known.
    """

    name: str
    width: int | None = None
    content_type: bytes | None = None

    @property
    @abstractmethod
    def type(self) -> pa.DataType:
        """The column's type in Arrow."""

    @abstractmethod
    def decode(self, cells: Cells) -> pa.Array:
        """From the bytes of a shard to Arrow.

        Raises:
            SourceError: Naming file, row and column, if they are damaged or do not fit.
        """

    @abstractmethod
    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        """From values of `type`, none of them null, to the bytes of a shard.

        Raises:
            SourceError: If a value cannot be held.
        """


@dataclass(frozen=True)
class Binary(Encoding):
    """Bytes as they are, such as image files."""

    name: str
    content_type: bytes | None = None

    @property
    def type(self) -> pa.DataType:
        """Always large binary."""
        return pa.large_binary()

    def decode(self, cells: Cells) -> pa.Array:
        """Copy."""
        return cells.bytes()

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:  # noqa: ARG002
        """Nothing to do."""
        return array


@dataclass(frozen=True)
class Text(Encoding):
    """UTF-8."""

    name: str = "str"
    content_type: bytes | None = None

    @property
    def type(self) -> pa.DataType:
        """Always string."""
        return pa.string()

    def decode(self, cells: Cells) -> pa.Array:
        """Copy, and check that it is UTF-8."""
        return cells.text()

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:  # noqa: ARG002
        """The same bytes."""
        return array.cast(pa.large_binary())


@dataclass(frozen=True)
class Scalar(Encoding):
    """A number of fixed width."""

    name: str
    dtype: str

    @property
    def width(self) -> int:  # type: ignore[override]
        """Of the dtype."""
        return np.dtype(self.dtype).itemsize

    @property
    def type(self) -> pa.DataType:
        """The same as the dtype."""
        return pa.from_numpy_dtype(np.dtype(self.dtype))

    def decode(self, cells: Cells) -> pa.Array:
        """Gather."""
        return pa.array(cells.fixed(_little(self.dtype)))

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:  # noqa: ARG002
        """The numbers side by side."""
        return even(numbers(array), len(array), self.width)


def numbers(array: pa.Array) -> Any:
    """The numbers of an array without nulls, as numpy sees them."""
    return np.ascontiguousarray(array.to_numpy(zero_copy_only=False))


def _little(dtype: str) -> Any:
    return np.dtype(dtype).newbyteorder("<")
