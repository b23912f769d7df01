"""Where a value stands, so that an error can name it; and how the errors of this format begin."""

from __future__ import annotations

from dataclasses import dataclass

from destrier.errors import SchemaError, SourceError

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """A file of the dataset, the row of its first value here, and the column.

    Attributes:
        file: The file's address without credentials.
        first: The row in that file of the first of the values at hand.
        column: The column, with dots between the names of nested fields.
    """

    file: str
    first: int = 0
    column: str | None = None

    def at(self, column: str) -> Place:
        """The same rows of a column."""
        return Place(self.file, self.first, column)

    def damaged(self, what: str, index: int | None = None) -> SourceError:
        """An error about a damaged value.

        Args:
            what: What is wrong.
            index: Of the value among those at hand; None if it is no single value.
        """
        row = None if index is None else self.first + index
        return SourceError(
            f"{self._where(row)}: {what}", file=self.file, row=row, column=self.column
        )

    def other_type(self, what: str, index: int) -> SchemaError:
        """An error about a value of another type than its column."""
        row = self.first + index
        return SchemaError(
            f"{self._where(row)}: {what}", file=self.file, row=row, column=self.column
        )

    def _where(self, row: int | None) -> str:
        parts = [self.file]
        if row is not None:
            parts.append(f"row {row}")
        if self.column is not None:
            parts.append(f"column {self.column!r}")
        return ", ".join(parts)
