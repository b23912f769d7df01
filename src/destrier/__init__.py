"""Destrier streams training data from Lance tables into PyTorch: elastic, resumable, fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from destrier.builder import PermutationBuilder as PermutationBuilder
    from destrier.convert import convert as convert
    from destrier.dataset import StreamingDataset as StreamingDataset
    from destrier.errors import ArgumentError as ArgumentError
    from destrier.errors import ColumnError as ColumnError
    from destrier.errors import DecodeError as DecodeError
    from destrier.errors import DestrierError as DestrierError
    from destrier.errors import DestrierWarning as DestrierWarning
    from destrier.errors import EmptyError as EmptyError
    from destrier.errors import FilterError as FilterError
    from destrier.errors import IterationError as IterationError
    from destrier.errors import LengthError as LengthError
    from destrier.errors import LinkError as LinkError
    from destrier.errors import MissingDependencyError as MissingDependencyError
    from destrier.errors import ReadError as ReadError
    from destrier.errors import RowError as RowError
    from destrier.errors import SchemaError as SchemaError
    from destrier.errors import SourceError as SourceError
    from destrier.errors import StateError as StateError
    from destrier.errors import TableError as TableError
    from destrier.errors import TransformError as TransformError
    from destrier.errors import VersionError as VersionError
    from destrier.errors import WorkerError as WorkerError
    from destrier.errors import WriteError as WriteError
    from destrier.loader import StreamingDataLoader as StreamingDataLoader
    from destrier.order import Order as Order
    from destrier.permutation import Permutation as Permutation
    from destrier.table import open_table as open_table

# Names are looked up when they are used: worker processes that write do not pay for PyTorch.
_PLACES = {
    "Order": "order",
    "Permutation": "permutation",
    "PermutationBuilder": "builder",
    "StreamingDataLoader": "loader",
    "StreamingDataset": "dataset",
    "convert": "convert",
    "open_table": "table",
}
_ERRORS = (
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
    "ReadError",
    "RowError",
    "SchemaError",
    "SourceError",
    "StateError",
    "TableError",
    "TransformError",
    "VersionError",
    "WorkerError",
    "WriteError",
)
__all__ = sorted([*_PLACES, *_ERRORS])  # noqa: PLE0605 - the names stand above
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    place = "errors" if name in _ERRORS else _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'destrier' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"destrier.{place}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
