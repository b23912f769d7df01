"""Destrier streams training data from Lance tables into PyTorch: elastic, resumable, fast."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from destrier.builder import PermutationBuilder
    from destrier.conversion import convert, link
    from destrier.dataset import StreamingDataset
    from destrier.editing.adding import add_columns
    from destrier.editing.changes import append, delete, tag, update, upsert
    from destrier.editing.lookup import get, index
    from destrier.editing.merging import merge
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
        LinkError,
        MissingDependencyError,
        MissingKeyError,
        MissingRowError,
        ReadError,
        RowError,
        SchemaError,
        SourceError,
        StateError,
        StorageError,
        TableError,
        TransformError,
        VersionError,
        WorkerError,
        WriteError,
    )
    from destrier.evaluation import gather
    from destrier.exporting import export
    from destrier.images import Image
    from destrier.jobs.mapping import map
    from destrier.jobs.optimizing import ALL_DONE, optimize
    from destrier.links.relinking import relink
    from destrier.loader import StreamingDataLoader
    from destrier.mixture import Mixture, cycle
    from destrier.order import Order
    from destrier.packing.packed import Packed
    from destrier.permutation import Permutation
    from destrier.randomness import generators
    from destrier.sampling import sample
    from destrier.splitting import split
    from destrier.stats import Stats
    from destrier.subsetting import concat, subsample, subset
    from destrier.table import open_table
    from destrier.verification import verify
    from destrier.view import View
    from destrier.zip import Zip

__all__ = [
    "ALL_DONE",
    "ArgumentError",
    "ColumnError",
    "DecodeError",
    "DestrierError",
    "DestrierWarning",
    "EmptyError",
    "FilterError",
    "Image",
    "IterationError",
    "LengthError",
    "LinkError",
    "MissingDependencyError",
    "MissingKeyError",
    "MissingRowError",
    "Mixture",
    "Order",
    "Packed",
    "Permutation",
    "PermutationBuilder",
    "ReadError",
    "RowError",
    "SchemaError",
    "SourceError",
    "StateError",
    "Stats",
    "StorageError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TableError",
    "TransformError",
    "VersionError",
    "View",
    "WorkerError",
    "WriteError",
    "Zip",
    "add_columns",
    "append",
    "concat",
    "convert",
    "cycle",
    "delete",
    "export",
    "gather",
    "generators",
    "get",
    "index",
    "link",
    "map",
    "merge",
    "open_table",
    "optimize",
    "relink",
    "sample",
    "split",
    "subsample",
    "subset",
    "tag",
    "update",
    "upsert",
    "verify",
]
__version__ = "0.1.0"

# Names are looked up when they are used: processes that only write do not pay for PyTorch.
_PLACES = {
    "PermutationBuilder": "builder",
    "convert": "conversion",
    "link": "conversion",
    "StreamingDataset": "dataset",
    "add_columns": "editing.adding",
    "append": "editing.changes",
    "delete": "editing.changes",
    "tag": "editing.changes",
    "update": "editing.changes",
    "upsert": "editing.changes",
    "get": "editing.lookup",
    "index": "editing.lookup",
    "merge": "editing.merging",
    "gather": "evaluation",
    "export": "exporting",
    "Image": "images",
    "map": "jobs.mapping",
    "ALL_DONE": "jobs.optimizing",
    "optimize": "jobs.optimizing",
    "relink": "links.relinking",
    "StreamingDataLoader": "loader",
    "Mixture": "mixture",
    "cycle": "mixture",
    "Order": "order",
    "Packed": "packing.packed",
    "Permutation": "permutation",
    "sample": "sampling",
    "split": "splitting",
    "Stats": "stats",
    "concat": "subsetting",
    "subsample": "subsetting",
    "subset": "subsetting",
    "open_table": "table",
    "verify": "verification",
    "View": "view",
    "Zip": "zip",
    "generators": "randomness",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'destrier' has no attribute {name!r}")
    value: object = getattr(_import_module(f"destrier.{_PLACES.get(name, 'errors')}"), name)
    globals()[name] = value  # looked up once; it also hides a module of the same name
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
