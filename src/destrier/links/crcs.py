"""CRCs of linked values: they find what equal size and time of a file hide."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from destrier.errors import SourceError
from destrier.files import Store

__all__ = ["CRC", "crcs_of", "crcs_of_links"]

CRC = pa.field("crc32", pa.uint32())
"""The field of a link's companion column that holds `zlib.crc32` of the value."""


def crcs_of(values: pa.Array) -> pa.Array:
    """The CRC of each value of a binary column."""
    return pa.array(
        [zlib.crc32(value.as_buffer()) if value.is_valid else None for value in values], CRC.type
    )


def crcs_of_links(links: pa.StructArray, options: Mapping[str, str] | None) -> pa.Array:
    """The CRC of each linked value, for which all of them are read.

    Args:
        links: Of the type `destrier.writing.source.LINK`.
        options: Of the store that holds the files.

    Raises:
        SourceError: If a file is shorter than its range.
    """
    uris = links.field("uri").to_pylist()
    places = links.field("position").to_pylist()
    sizes = links.field("size").to_pylist()
    found: list[int | None] = [None] * len(links)
    by_file: dict[str, list[int]] = {}
    for i in np.flatnonzero(links.is_valid().to_numpy(zero_copy_only=False)).tolist():
        by_file.setdefault(uris[i], []).append(i)
    for uri, rows in by_file.items():
        store = Store(_path(uri), options)
        with store.open() as file:
            for i in rows:
                value = file.read_at(sizes[i], places[i])
                if len(value) != sizes[i]:
                    raise SourceError(
                        f"{store.shown} ends before byte {places[i] + sizes[i]}", file=store.shown
                    )
                found[i] = zlib.crc32(value)
    return pa.array(found, CRC.type)


def _path(uri: str) -> str:
    from destrier.links.files import split_uri

    root, path = split_uri(uri)
    return f"{root}/{path}" if root else path
