"""Destrier streams training data from Lance tables into PyTorch: elastic, resumable, fast."""

from destrier.builder import PermutationBuilder
from destrier.dataset import StreamingDataset
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DecodeError,
    DestrierError,
    DestrierWarning,
    EmptyError,
    FilterError,
    IterationError,
    LengthError,
    MissingDependencyError,
    ReadError,
    RowError,
    StateError,
    TableError,
    TransformError,
    VersionError,
    WorkerError,
)
from destrier.loader import StreamingDataLoader
from destrier.order import Order
from destrier.permutation import Permutation
from destrier.table import open_table

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
    "MissingDependencyError",
    "Order",
    "Permutation",
    "PermutationBuilder",
    "ReadError",
    "RowError",
    "StateError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TableError",
    "TransformError",
    "VersionError",
    "WorkerError",
    "open_table",
]
__version__ = "0.1.0"
