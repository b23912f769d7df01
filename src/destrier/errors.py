"""The errors of Destrier, one small tree.

::

    DestrierError
    ├── ArgumentError (ValueError)          an argument that cannot be used
    │   ├── ColumnError                     a column that is not there, or not of a usable type
    │   ├── FilterError                     a filter that Lance cannot run
    │   ├── MissingKeyError (KeyError)      a key that no row has
    │   ├── MissingRowError (IndexError)    a row number beyond the last one
    │   └── EmptyError                      no rows, or an epoch of no steps
    ├── TableError (OSError)                a table that cannot be opened
    │   └── VersionError (LookupError)      a version, tag or file of it that is gone
    ├── StorageError (OSError)              an object store that goes on failing
    ├── StateError (ValueError)             a state that does not belong to this stream
    ├── RowError (RuntimeError)             a row that could not be delivered
    │   ├── ReadError (OSError)             ... because reading it failed
    │   │   └── LinkError                   ... because the file it is linked to has changed
    │   ├── DecodeError (ValueError)        ... because decoding it failed
    │   └── TransformError                  ... because the transform failed on it
    │       └── LengthError (ValueError)    ... it returned another number of rows
    ├── SourceError (ValueError)            a source that is damaged, or cannot be kept exactly
    │   └── SchemaError (TypeError)         a row of another type than the column's
    ├── WriteError (OSError)                a table or export that cannot be written there
    ├── WorkerError (RuntimeError)          a worker process that died
    ├── IterationError (RuntimeError)       an iterator used in a way that cannot be exact
    └── MissingDependencyError (ImportError)  an optional package that is not installed
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ColumnError",
    "DecodeError",
    "DestrierError",
    "DestrierWarning",
    "EmptyError",
    "FilterError",
    "IterationError",
    "LengthError",
    "LinkError",
    "MissingDependencyError",
    "MissingKeyError",
    "MissingRowError",
    "ReadError",
    "RowError",
    "SchemaError",
    "SourceError",
    "StateError",
    "StorageError",
    "TableError",
    "TransformError",
    "VersionError",
    "WorkerError",
    "WriteError",
]


class DestrierError(Exception):
    """The root of all errors raised on purpose by Destrier."""


class ArgumentError(DestrierError, ValueError):
    """An argument cannot be used; the message names the values and the way out."""


class ColumnError(ArgumentError):
    """A column is not in the table, or its type cannot be delivered as asked."""


class FilterError(ArgumentError):
    """Lance could not run a filter; the message names the table's columns."""


class MissingKeyError(ArgumentError, KeyError):
    """No row of the table has the key."""

    __str__ = Exception.__str__  # a KeyError would show its text in quotes


class MissingRowError(ArgumentError, IndexError):
    """A row number is beyond the last row."""


class EmptyError(ArgumentError):
    """There is nothing to read: no rows, or fewer than one step takes."""


class TableError(DestrierError, OSError):
    """A table cannot be opened."""


class VersionError(TableError, LookupError):
    """A version or tag of a table, or a file that it needs, is gone."""


class StorageError(DestrierError, OSError):
    """An object store fails, or does not answer, for longer than it is waited for."""


class StateError(DestrierError, ValueError):
    """A state does not belong to this stream, or is not a state at all."""


class RowError(DestrierError, RuntimeError):
    """A row could not be delivered.

    Attributes:
        offset: The row's offset in the pinned version of the table.
        column: The column at fault, or None if it is not one column.
    """

    def __init__(
        self, message: str, *, offset: int | None = None, column: str | None = None
    ) -> None:
        super().__init__(message)
        self.offset = offset
        self.column = column

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.offset, self.column)


class ReadError(RowError, OSError):
    """Reading a row, or the table, failed."""


class LinkError(ReadError):
    """A file that a column is linked to is gone, or is not the one that was linked."""


class DecodeError(RowError, ValueError):
    """The bytes or values of a row could not be decoded."""


class TransformError(RowError):
    """The transform raised on a row."""


class LengthError(TransformError, ValueError):
    """A transform returned another number of rows than it was given: a fault of no row."""


class SourceError(DestrierError, ValueError):
    """A source is damaged, or holds what cannot be kept exactly; the message names the place.

    Attributes:
        file: The file at fault, or None.
        row: The row in that file (or of the input), or None.
        column: The column at fault, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.row = row
        self.column = column

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_source, (type(self), self.args, self.file, self.row, self.column)


class SchemaError(SourceError, TypeError):
    """A row has another type than its column; nothing is coerced."""


class WriteError(DestrierError, OSError):
    """A table or an export cannot be written there; what was there is as it was."""


class WorkerError(DestrierError, RuntimeError):
    """A worker process died; the message says how."""


class IterationError(DestrierError, RuntimeError):
    """An iterator is used in a way that could not give exact batches or states."""


class MissingDependencyError(DestrierError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class DestrierWarning(UserWarning):
    """The category of all warnings raised by Destrier."""


def _rebuild(
    kind: type[RowError], args: tuple[str, ...], offset: int | None, column: str | None
) -> RowError:
    return kind(*args, offset=offset, column=column)


def _rebuild_source(
    kind: type[SourceError],
    args: tuple[str, ...],
    file: str | None,
    row: int | None,
    column: str | None,
) -> SourceError:
    return kind(*args, file=file, row=row, column=column)
