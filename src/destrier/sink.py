"""What an export writes: one range of rows at a time, and an index at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from destrier.files import Store

__all__ = ["Back", "Sink"]


@dataclass(frozen=True)
class Back:
    """How an export is read again, to compare it with its table.

    Attributes:
        names: For each column of the table that the export has, what it is called there.
        options: With which the format's ``open_source`` gives types that hold the table's values.
    """

    names: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)


class Sink(ABC):
    """A format that a table can be exported to. Picklable: workers write with it.

    Attributes:
        format: Its name, such as ``"mds"``.
    """

    format: ClassVar[str]

    @abstractmethod
    def check(self, schema: pa.Schema) -> None:
        """Raise unless the format can hold every column.

        Raises:
            ColumnError: Naming each column that it cannot hold, and why.
        """

    def back(self, schema: pa.Schema) -> Back:
        """How an export of these columns is read again."""
        return Back({name: name for name in schema.names})

    @abstractmethod
    def write(self, store: Store, number: int, batches: Iterator[pa.RecordBatch]) -> Any:
        """Write one range of rows, in a worker.

        Args:
            store: The folder of the export.
            number: Of the range, from 0; names of files derive from it.
            batches: Its rows; blob columns come as bytes.

        Returns:
            What `finish` needs to know of it, as JSON.
        """

    @abstractmethod
    def finish(self, store: Store, infos: list[Any]) -> None:
        """Write what belongs to the whole, such as an index, after all ranges are written."""
