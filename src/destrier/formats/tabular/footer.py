"""What a Parquet footer says of where columns lie and how long they are.

pyarrow ends the process where a damaged footer makes it construct the metadata of a column chunk,
and does not tell how long texts are decoded. So the few numbers needed are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Chunk", "row_groups"]

# Types of Thrift's compact protocol
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_DEEPEST = 24

# The fields that are kept, by number, with those of the structs below them
_SIZES = {1: None}
_CHUNK = {6: None, 7: None, 9: None, 11: None, 16: _SIZES}
_WANTED: dict[int, Any] = {4: {1: {3: _CHUNK}}}


@dataclass(frozen=True)
class Chunk:
    """A column of a row group.

    Attributes:
        start: Of its bytes in the file.
        size: Their number.
        uncompressed: Their number without compression.
        dictionary: Bytes of the dictionary in the file, 0 if there is none.
        decoded: Bytes of all its texts, 0 if the file does not say so.
    """

    start: int
    size: int
    uncompressed: int
    dictionary: int
    decoded: int


def row_groups(footer: bytes) -> list[list[Chunk]]:
    """The columns of each row group.

    Args:
        footer: The bytes of the footer alone.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        found = _Reader(footer).struct(_WANTED, 0)
        return [[_chunk(c.get(3, {})) for c in group.get(1, [])] for group in found.get(4, [])]
    except (IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the footer cannot be read: {error}") from None


def _chunk(fields: dict[int, Any]) -> Chunk:
    sizes = fields.get(16, {})
    numbers = [fields.get(n, 0) for n in (9, 11, 7, 6)] + [sizes.get(1, 0)]
    if any(type(number) is not int for number in numbers):
        raise ValueError("the footer holds an offset that is no number")
    data, dictionary, size, uncompressed, decoded = numbers
    first = dictionary if 0 < dictionary < data else data
    return Chunk(first, size, uncompressed, data - first, decoded)


class _Reader:
    """Reads Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, wanted: dict[int, Any], depth: int) -> dict[int, Any]:
        """The wanted fields of a struct, by number."""
        if depth > _DEEPEST:
            raise ValueError("the footer is nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while True:
            head = self._data[self._at]
            self._at += 1
            if head == 0:
                return found
            number = number + (head >> 4) if head >> 4 else self._integer()
            value = self._value(head & 15, wanted.get(number), depth + 1)
            if number in wanted:
                found[number] = value

    def _value(  # noqa: PLR0911 - a table of types
        self, kind: int, wanted: dict[int, Any] | None, depth: int
    ) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BINARY:
            return self._skip(self._varint())
        if kind == _STRUCT:
            return self.struct(wanted or {}, depth)
        if kind in (_LIST, _SET):
            return list(self._items(wanted, depth))
        if kind == _DOUBLE:
            return self._skip(8)
        if kind == _BYTE:
            return self._skip(1)
        if kind == _MAP or kind > _STRUCT or kind == 0:
            raise ValueError(f"the footer holds a value of type {kind}")
        return self._integer()

    def _items(self, wanted: dict[int, Any] | None, depth: int) -> Iterator[Any]:
        head = self._data[self._at]
        self._at += 1
        kind = head & 15
        count = head >> 4 if head >> 4 < 15 else self._varint()
        if count > len(self._data) - self._at:
            raise ValueError(f"the footer holds a list of {count} values")
        for _ in range(count):
            if kind in (_TRUE, _FALSE):
                self._skip(1)  # in a list they take a byte
            else:
                yield self._value(kind, wanted, depth + 1)

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError(f"the footer holds a value of {count} bytes")
        self._at += count

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("the footer holds a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
