"""A source of numbered rows that can fail, die and wait, for tests of the writer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from destrier.errors import SourceError
from destrier.writing.source import FileSource, Unit


def rows(first: int, count: int, payload: int = 0) -> pa.RecordBatch:
    """Rows whose values are functions of their number."""
    ids = np.arange(first, first + count)
    columns: dict[str, Any] = {
        "id": pa.array(ids),
        "name": pa.array([None if i % 5 == 0 else f"row {i}" for i in ids.tolist()], pa.string()),
        "tokens": pa.array([list(range(i % 4)) for i in ids.tolist()], pa.list_(pa.int32())),
    }
    if payload:
        values = [i.to_bytes(4, "little") * (payload // 4) for i in ids.tolist()]
        columns["data"] = pa.array(values, pa.large_binary())
    return pa.record_batch(columns)


@dataclass
class Numbers(FileSource):
    """Units of equal length.

    Attributes:
        units_: How many.
        length: Rows of each.
        payload: Bytes of a binary column, or 0 for none.
        fail: The unit that raises.
        die: The unit whose process is killed, as long as the file `armed` is there.
        armed: See `die`.
        short: The unit that lacks its last row.
        odd: The unit of another type.
        log: A folder in which each read of a unit leaves a file.
        wait: Seconds that each unit takes.
        declared: Whether the schema and the rows are known in advance.
    """

    format: ClassVar[str] = "numbers"
    units_: int = 12
    length: int = 50
    payload: int = 0
    fail: int | None = None
    die: int | None = None
    armed: str | None = None
    short: int | None = None
    odd: int | None = None
    log: str | None = None
    wait: float = 0.0
    declared: bool = True
    nbytes: int = 16 << 20  # so that each unit is a shard
    name: str = "numbers"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return self.name

    @property
    def schema(self) -> pa.Schema | None:
        return rows(0, 1, self.payload).schema if self.declared else None

    def units(self) -> list[Unit]:
        count = self.length if self.declared else None
        return [Unit(f"unit {i}", count, self.nbytes, i) for i in range(self.units_)]

    def identity(self) -> list[Any]:
        return [self.units_, self.length, self.payload, self.name]

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        i = unit.place
        if self.log is not None:
            Path(self.log, f"{i}-{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(self.wait)
        if self.fail == i:
            raise SourceError(f"{unit.name} is damaged", file=unit.name, row=3)
        half = self.length // 2
        yield rows(i * self.length, half, self.payload)
        if self.die == i and self.armed is not None and os.path.exists(self.armed):
            os.kill(os.getpid(), 9)
        rest = rows(i * self.length + half, self.length - half, self.payload)
        if self.short == i:
            rest = rest.slice(0, rest.num_rows - 1)
        if self.odd == i:
            rest = rest.set_column(0, "id", rest.column("id").cast(pa.float64()))
        yield rest
