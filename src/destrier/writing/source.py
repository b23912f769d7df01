"""What the writer reads: a source is a list of units, each read by one worker in one go."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

__all__ = [
    "BATCH_BYTES",
    "ENCODING_KEY",
    "LINK",
    "SOURCE_KEY",
    "FileSource",
    "Measure",
    "Shard",
    "Source",
    "Unit",
]

BATCH_BYTES = 16 << 20
"""What a batch of a source holds at most, but for a single row that is larger."""

ENCODING_KEY = b"destrier:encoding"
"""Field metadata: the column's encoding in the format it came from, such as ``mds:jpeg``."""

SOURCE_KEY = b"destrier:source"
"""Schema metadata: JSON about the format the table came from, for an exact export."""

LINK = pa.struct(
    [
        ("uri", pa.string()),
        ("position", pa.uint64()),
        ("size", pa.uint64()),
        ("file_size", pa.uint64()),
        ("file_stamp", pa.int64()),
    ]
)
"""A value that stays where it is: a range of bytes in a file, and that file's size and time."""

_MIN_SHARD_BYTES = 8 << 20
_MAX_SHARD_BYTES = 256 << 20
_SHARDS = 16  # at least so many, where there are bytes enough, so that workers have even shares


@dataclass(frozen=True)
class Unit:
    """A part of a source: a file, or a range of rows or bytes in one.

    Attributes:
        name: Its file and place in it, for messages.
        rows: Number of rows if the source declares it; reading another number is an error.
        nbytes: Roughly how many bytes it holds.
        place: What the source needs to read it; picklable.
        inputs: Number of inputs of a function that makes rows of them, by which progress is then
            counted.
        file: The full address of the file that its rows come from, without credentials; None if
            they come from no file.
        first_row: Number in the file of its first row; None if only the source can tell, see
            `Source.origins`.
    """

    name: str
    rows: int | None
    nbytes: int
    place: Any
    inputs: int | None = None
    file: str | None = None
    first_row: int | None = 0


@dataclass(frozen=True)
class Shard:
    """Consecutive units that are written, journalled and continued as one."""

    index: int
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Measure:
    """What writing the first shard took, by which the others are cut. Kept in the journal.

    Attributes:
        rows: Number of rows that were read, or of inputs of a function.
        nbytes: Size of the rows that were written.
        seconds: In all.
    """

    rows: int
    nbytes: int
    seconds: float


class Source(ABC):
    """Something that can be written as a table. Picklable: workers read it.

    Attributes:
        format: Its name, such as ``"mds"``.
        resumable: Whether the same shards come when it is asked again.
    """

    format: ClassVar[str]
    resumable: ClassVar[bool] = True

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of all batches, or None if it is known only from the first shard's rows."""
        return None

    @property
    def total_rows(self) -> int | None:
        """Number of rows, if it is known before reading."""
        return None

    @property
    def total_inputs(self) -> int | None:
        """Number of inputs, if its units count them."""
        return None

    @property
    @abstractmethod
    def shown(self) -> str:
        """Its address without credentials, for messages."""

    @abstractmethod
    def digest(self) -> str:
        """What names the content as far as it can be told without reading it."""

    @abstractmethod
    def first(self) -> Shard:
        """The shard that is written before all others."""

    @abstractmethod
    def rest(self, measure: Measure) -> Iterator[Shard | None]:
        """The other shards, the same ones for the same measure; None where none has come yet."""

    @abstractmethod
    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
        """Read a unit as batches of at most `BATCH_BYTES` or one row.

        Args:
            unit: One of the units of the shards.
            schema: That of the batches, which is then enforced; None in the first unit of a source
                without a schema of its own: its batches have one schema among them.

        Raises:
            SourceError: Naming file and row, if the unit is damaged or cannot be kept exactly.
        """

    def origins(self, unit: Unit, start: int, count: int) -> tuple[pa.Array, pa.Array]:
        """Where rows come from, as the table keeps it if it is asked to.

        Args:
            unit: One of the units of the shards.
            start: The first of the rows, counted in the unit.
            count: Number of rows.

        Returns:
            The file of each row and the row's number in it, null where there is none. A unit that
            is of no file is called by its name.
        """
        file = unit.name if unit.file is None else unit.file
        files = pa.repeat(pa.scalar(file, pa.string()), count)
        if unit.first_row is None:
            return files, pa.nulls(count, pa.int64())
        first = unit.first_row + start
        return files, pa.array(np.arange(first, first + count, dtype=np.int64))


class FileSource(Source):
    """A source whose units are known in advance, mostly from a list of files.

    A subclass gives `units` and `read`.
    """

    @abstractmethod
    def units(self) -> list[Unit]:
        """All units in order; the rows of the table come in this order."""

    def digest(self) -> str:
        """A digest of what names the content; a subclass adds its options to `identity`."""
        text = json.dumps([self.format, *self.identity()], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def identity(self) -> Iterable[Any]:
        """JSON values that name the content: files with size and time, and the options."""
        return [asdict(unit) for unit in self.units()]

    @property
    def total_rows(self) -> int | None:
        """The sum over the units, if each declares its rows."""
        counts = [unit.rows for unit in self.units()]
        return None if None in counts else sum(count for count in counts if count is not None)

    def shards(self) -> list[Shard]:
        """The units grouped by bytes: enough shards for even shares, none needlessly small."""
        units = self.units()
        share = sum(unit.nbytes for unit in units) // _SHARDS
        target = min(max(share, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
        groups: list[list[Unit]] = [[]]
        held = 0
        for unit in units:
            if groups[-1] and held + unit.nbytes > target:
                groups.append([])
                held = 0
            groups[-1].append(unit)
            held += unit.nbytes
        return [Shard(index, tuple(group)) for index, group in enumerate(groups)]

    def first(self) -> Shard:
        """The first group of units."""
        return self.shards()[0]

    def rest(self, measure: Measure) -> Iterator[Shard]:  # noqa: ARG002 - the bytes are known
        """The other groups of units."""
        return iter(self.shards()[1:])
