"""LitData datasets: chunks with an index, of both generations."""

from __future__ import annotations

from destrier.files import Store
from destrier.formats.litdata.export import LitDataSink, open_sink
from destrier.formats.litdata.index import has_index
from destrier.formats.litdata.source import LitDataSource, open_source

__all__ = ["LitDataSink", "LitDataSource", "detect", "open_sink", "open_source"]


def detect(store: Store) -> bool:
    """Whether a folder holds a LitData dataset, whole or with its partial indexes only.

    Example:
        >>> detect(Store("/nowhere"))
        False
    """
    return has_index(store)
