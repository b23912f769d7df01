"""Which part a row belongs to: codes of parts, and the rows of one part.

A membership gives each position of a selection the number of its part. A part's rows are a bitmap
over these numbers, made when its rows are first asked for.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.arrays import divided
from destrier.errors import ArgumentError
from destrier.keyed import MEMBERSHIP_KEY, Ints, Words, epoch_key, hash_words, mix, permute, subkey
from destrier.selection import BitmapRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from destrier.selection import RowList

__all__ = [
    "MAX_PARTS",
    "CalculatedCodes",
    "GivenMembership",
    "Membership",
    "PartRows",
    "RandomMembership",
    "SlicedRows",
    "code_type",
    "hash_rows",
    "hashable",
]

MAX_PARTS = (1 << 16) - 1
_PIECE = 1 << 16
_KEPT = 4  # bitmaps of parts kept, so that a table of many parts is written in little memory


class SlicedRows:
    """A range of the rows of a list."""

    def __init__(self, rows: RowList, start: int, count: int) -> None:
        self.base = rows
        self.start = start
        self.count = count

    def __len__(self) -> int:
        return self.count

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shift the positions."""
        return self.base.offsets(positions + self.start)

    @property
    def digest(self) -> str:
        """Of what defines the list."""
        if self.count == len(self.base):
            return self.base.digest
        return _digest(f"slice|{self.start}|{self.count}|{self.base.digest}")


class Membership(ABC):
    """The number of the part of each position of a selection."""

    def __init__(self) -> None:
        self._kept: dict[int, BitmapRows] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    @property
    @abstractmethod
    def codes(self) -> NDArray[Any]:
        """Unsigned integers; the largest of their type is for positions in no part."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of the content, or of what defines it."""

    def positions(self, part: int) -> BitmapRows:
        """The positions of one part, ascending."""
        kept = self._kept.get(part)
        if kept is None:
            codes = self.codes
            bits = np.zeros(-(-len(codes) // 64) * 8, np.uint8)
            for start in range(0, len(codes), _PIECE):
                packed = np.packbits(codes[start : start + _PIECE] == part, bitorder="little")
                bits[start // 8 : start // 8 + len(packed)] = packed
            kept = BitmapRows(bits.view(np.uint64))
            self._kept = {**dict(list(self._kept.items())[1 - _KEPT :]), part: kept}
        return kept


class RandomMembership(Membership):
    """Parts of exact sizes, drawn by a keyed permutation.

    The n positions are cut into clumps of ``clump_size``, the last one perhaps short. A keyed
    permutation puts the clumps in a line; part i takes the places ``bounds[i]`` to
    ``bounds[i + 1]`` of the line. Only the clumps at the bounds are cut.
    """

    def __init__(self, n: int, bounds: Sequence[int], *, seed: int, clump_size: int = 1) -> None:
        super().__init__()
        self.n = n
        self.bounds = list(bounds)
        self.seed = seed
        self.clump_size = clump_size
        self._codes: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_codes": None}

    def line(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place in the line of each position: a permutation of [0, n)."""
        key = subkey(epoch_key(self.seed, 0), MEMBERSHIP_KEY)
        c = self.clump_size
        clumps = -(-self.n // c)
        clump, inner = divided(positions, c)
        slot = permute(clump, clumps, key)
        short = permute(np.array([clumps - 1]), clumps, key)[0]
        line: Ints = slot * c + inner - (slot > short) * (clumps * c - self.n)
        return line

    def _pieces(self) -> Iterator[NDArray[np.int64]]:
        """Yield the parts of all positions, a piece at a time; -1 for no part."""
        parts = len(self.bounds) - 1
        for start in range(0, self.n, _PIECE):
            place = self.line(np.arange(start, min(start + _PIECE, self.n)))
            part = np.searchsorted(self.bounds[1:], place, side="right")
            yield np.where(part == parts, -1, part)

    @property
    def codes(self) -> NDArray[Any]:
        """Computed when they are first needed."""
        if self._codes is None:
            kind = code_type(len(self.bounds) - 1)
            self._codes = np.concatenate([piece.astype(kind) for piece in self._pieces()])
        return self._codes

    def positions(self, part: int) -> BitmapRows:
        """Return the positions of one part; of few parts all bitmaps are made at once."""
        parts = len(self.bounds) - 1
        if parts > _KEPT:
            return super().positions(part)
        if not self._kept:
            bits = np.zeros((parts, -(-self.n // 64) * 8), np.uint8)
            for i, piece in enumerate(self._pieces()):
                start = i * _PIECE // 8
                for j in range(parts):
                    packed = np.packbits(piece == j, bitorder="little")
                    bits[j, start : start + len(packed)] = packed
            self._kept = {j: BitmapRows(bits[j].view(np.uint64)) for j in range(parts)}
        return self._kept[part]

    @property
    def digest(self) -> str:
        """Of the arguments."""
        return _digest(f"random|{self.n}|{self.seed}|{self.clump_size}|{self.bounds}")


class GivenMembership(Membership):
    """Parts that are given position by position."""

    def __init__(self, codes: NDArray[Any]) -> None:
        super().__init__()
        self._codes = codes

    @property
    def codes(self) -> NDArray[Any]:
        """As given."""
        return self._codes

    @cached_property
    def digest(self) -> str:
        """Of the codes."""
        return hashlib.blake2b(np.ascontiguousarray(self._codes).data, digest_size=16).hexdigest()


def code_type(parts: int) -> type[np.uint8 | np.uint16]:
    """The type of the codes of so many parts."""
    return np.uint8 if parts <= np.iinfo(np.uint8).max else np.uint16


class PartRows:
    """The rows of one part, in the order of the list that they are a part of."""

    def __init__(self, rows: RowList, membership: Membership, part: int, count: int) -> None:
        self.base = rows
        self.membership = membership
        self.part = part
        self.count = count

    def __len__(self) -> int:
        return self.count

    def offsets(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Select the part's positions, then the list's offsets."""
        chosen = self.membership.positions(self.part)
        return self.base.offsets(chosen.offsets(positions))

    @property
    def digest(self) -> str:
        """Of what defines the list."""
        return _digest(f"part|{self.part}|{self.membership.digest}|{self.base.digest}")


class CalculatedCodes:
    """The values of an expression as numbers of parts."""

    def __init__(self, sql: str, names: Sequence[str] | None) -> None:
        self._sql = sql
        self._names = names
        self._pieces: list[NDArray[np.uint16]] = []
        self._largest = 0
        # of strings, the number of each value: in the order of names, or as they come
        self._numbers = {name: i for i, name in enumerate(names or ())}
        self._text = False

    def add(self, column: pa.Array) -> None:
        """Take the values of a batch."""
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        self._text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if self._text:
            codes = self._of_text(column)
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
            codes = self._of_integers(column)
        else:
            raise ArgumentError(
                f"split_calculated needs integers or strings, {self._sql!r} is of type {kind}"
            )
        self._pieces.append(codes.astype(np.uint16))

    def _of_text(self, column: pa.Array) -> NDArray[np.int64]:
        coded = column.dictionary_encode()
        for value in coded.dictionary.to_pylist():
            if value not in self._numbers:
                if self._names is not None:
                    raise ArgumentError(
                        f"split_calculated: {self._sql!r} is {value!r} for a row, which is none of "
                        f"the names: {', '.join(self._names)}"
                    )
                if len(self._numbers) == MAX_PARTS:
                    raise ArgumentError(f"there can be {MAX_PARTS} parts at most")
                self._numbers[value] = len(self._numbers)
        numbers = [self._numbers[value] for value in coded.dictionary.to_pylist()]
        places = coded.indices.fill_null(len(numbers)).to_numpy()
        codes: Ints = np.array([*numbers, -1], np.int64)[places.astype(np.int64)]
        return codes

    def _of_integers(self, column: pa.Array) -> NDArray[np.int64]:
        if pa.types.is_null(column.type):
            return np.full(len(column), -1, np.int64)
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.uint8())
        most = MAX_PARTS if self._names is None else len(self._names)
        present = column.drop_null().to_numpy()
        bad = present[(present < 0) | (present >= most)]
        if len(bad):
            named = "" if self._names is None else f", for the names {', '.join(self._names)}"
            raise ArgumentError(
                f"split_calculated: {self._sql!r} is {bad[0]} for a row, it must be 0 to "
                f"{most - 1}{named}"
            )
        if len(present):
            self._largest = max(self._largest, int(present.max()))
        missing = column.is_null().to_numpy(zero_copy_only=False)
        return np.where(missing, -1, column.fill_null(0).to_numpy()).astype(np.int64)

    def result(self) -> tuple[list[NDArray[Any]], list[str]]:
        """The codes and the names of the parts."""
        if self._text and self._names is None:
            names = sorted(self._numbers)
            table = np.full(MAX_PARTS + 1, -1, np.int64)
            table[[self._numbers[name] for name in names]] = np.arange(len(names))
            renumbered = table.astype(np.uint16)
            return [renumbered[piece] for piece in self._pieces], names
        numbered = [str(number) for number in range(self._largest + 1)]
        return [*self._pieces], list(numbered if self._names is None else self._names)


# ---- the hash of a row's values -------------------------------------------------------------


def hash_rows(columns: Sequence[pa.Array]) -> NDArray[np.uint64]:
    """Hash the values of each row, the same on every machine and with every library.

    A value becomes a word ``mix(v ^ mix(t))``: an integer, boolean, date or time with t = 1 and v
    its 64 bits; a float with t = 2 and v the bits of its float64, with one zero and one NaN; a
    string, decimal or bytes with t = 3 and v the first 8 bytes, little endian, of the BLAKE2b of
    its (UTF-8) bytes with digest size 8; a null with t = 4 and v = 0. A row starts with h = 0, and
    each column in turn makes it h = mix(h ^ word). `mix` is the order's.

    Example:
        >>> [hex(h) for h in hash_rows([pa.array([0, 1, None])]).tolist()]
        ['0xb18a02f46d8d86c3', '0x5775264a9a7e1b09', '0x743d4fd0e0f20311']
        >>> [hex(h) for h in hash_rows([pa.array([0, 1]), pa.array(["a", "b"])]).tolist()]
        ['0xf7f4829241abb51e', '0x30ca4bb5a693e90f']
    """
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        out = hash_words(out ^ _words(column))
    return out


def hashable(kind: pa.DataType) -> bool:
    """Whether `hash_rows` takes values of a type."""
    t = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return hashable(kind.storage_type)
    if t.is_dictionary(kind):
        return hashable(kind.value_type)
    plain = t.is_integer(kind) or t.is_boolean(kind) or t.is_floating(kind) or t.is_null(kind)
    return bool(plain or (t.is_temporal(kind) and not t.is_interval(kind)) or _is_bytes(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    t = pa.types
    texts = (t.is_string, t.is_large_string, t.is_string_view, t.is_decimal)
    blobs = (t.is_binary, t.is_large_binary, t.is_fixed_size_binary, t.is_binary_view)
    return any(check(kind) for check in (*texts, *blobs))


def _words(column: pa.Array) -> NDArray[np.uint64]:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if _is_bytes(column.type):
        tag, values = 3, _byte_words(column)
    elif pa.types.is_floating(column.type):
        numbers = column.cast(pa.float64()).fill_null(0).to_numpy() + 0.0  # -0.0 becomes 0.0
        tag, values = 2, np.where(np.isnan(numbers), np.nan, numbers).view(np.uint64)
    else:
        tag, values = 1, _integer_words(column)
    values = np.where(missing, np.uint64(0), values)
    tags = np.where(missing, np.uint64(mix(4)), np.uint64(mix(tag)))
    return hash_words(values ^ tags)


def _integer_words(column: pa.Array) -> NDArray[np.uint64]:
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.uint64)
    if pa.types.is_uint64(column.type):
        return np.asarray(column.fill_null(0).to_numpy(), np.uint64)
    if pa.types.is_date32(column.type) or pa.types.is_time32(column.type):
        column = column.cast(pa.int32())
    numbers = column.cast(pa.int64()).fill_null(0).to_numpy()
    return np.asarray(numbers, np.int64).view(np.uint64)


def _byte_words(column: pa.Array) -> NDArray[np.uint64]:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    coded = column.cast(pa.large_binary()).dictionary_encode()
    unique = [
        int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")
        for value in coded.dictionary.to_pylist()
    ]
    places = coded.indices.fill_null(0).to_numpy()
    if not unique:
        return np.zeros(len(column), np.uint64)
    hashes: Words = np.array(unique, np.uint64)[places]
    return hashes


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
