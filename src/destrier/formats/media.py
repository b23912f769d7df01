"""Kinds and content types of media, by extension; links to them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.errors import SourceError
from destrier.files import Store
from destrier.links.files import join_uri
from destrier.writing.source import LINK

__all__ = [
    "CONTENT_TYPE_KEY",
    "content_type",
    "extension_of",
    "link_array",
    "link_uri",
    "media_kind",
]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

CONTENT_TYPE_KEY = b"content_type"
"""Field metadata: the content type of all values of a column."""

_TYPES = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "jpe": "image/jpeg",
    "jfif": "image/jpeg",
    "png": "image/png",
    "apng": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
    "bmp": "image/bmp",
    "tif": "image/tiff",
    "tiff": "image/tiff",
    "avif": "image/avif",
    "heic": "image/heic",
    "jp2": "image/jp2",
    "jxl": "image/jxl",
    "ppm": "image/x-portable-pixmap",
    "pgm": "image/x-portable-graymap",
    "pbm": "image/x-portable-bitmap",
    "pnm": "image/x-portable-anymap",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
    "oga": "audio/ogg",
    "opus": "audio/opus",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "aiff": "audio/aiff",
    "mp4": "video/mp4",
    "m4v": "video/mp4",
    "mov": "video/quicktime",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
    "avi": "video/x-msvideo",
    "mpg": "video/mpeg",
    "mpeg": "video/mpeg",
    "pdf": "application/pdf",
    "gz": "application/gzip",
    "npz": "application/zip",
    "json": "application/json",
    "jsn": "application/json",
}


def extension_of(path: str) -> str:
    """The part of a file's name after its last dot, in lower case; empty if there is none."""
    stem, dot, extension = path.rpartition("/")[2].rpartition(".")
    return extension.lower() if dot and stem else ""


def content_type(extension: str) -> str | None:
    """The content type that an extension (after the last dot, lower case) stands for."""
    return _TYPES.get(extension)


def media_kind(extension: str) -> str | None:
    """``"image"``, ``"audio"`` or ``"video"``, or None if the extension is none of these."""
    kind = _TYPES.get(extension, "").partition("/")[0]
    return kind if kind in ("image", "audio", "video") else None


def link_uri(store: Store, path: str) -> str:
    """The URI of a file for a link.

    Raises:
        SourceError: If its name holds a character that Lance does not take in a link.
    """
    address = store.address(path)
    if _CONTROL.search(address):
        shown = store.show(path)
        raise SourceError(
            f"{shown!r} cannot be linked, for its name holds a control character: rename it, or "
            "use destrier.convert",
            file=shown,
        )
    if store.local:
        return join_uri("", address)
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return join_uri(f"{scheme}://{bucket}", key)


def link_array(
    uris: pa.Array | str,
    positions: Sequence[int] | NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    file_sizes: Sequence[int] | int,
    stamps: Sequence[int] | int,
    valid: NDArray[np.bool_] | None = None,
) -> pa.StructArray:
    """Build links: one for each position and size.

    Args:
        uris: One for each, or one for all.
        positions: Where the values begin in their files.
        sizes: Their bytes.
        file_sizes: Of the whole files; one for each, or one for all.
        stamps: Times of the files' last change, likewise.
        valid: Which are there; None is all.
    """
    count = len(positions)

    def column(values: Sequence[int] | NDArray[np.int64] | int, kind: pa.DataType) -> pa.Array:
        if isinstance(values, int):
            return pa.repeat(pa.scalar(values, kind), count)
        return pa.array(values, kind)

    if isinstance(uris, str):
        uris = pa.repeat(pa.scalar(uris, pa.string()), count)
    children = [
        uris,
        column(positions, pa.uint64()),
        column(sizes, pa.uint64()),
        column(file_sizes, pa.uint64()),
        column(stamps, pa.int64()),
    ]
    mask = None if valid is None or valid.all() else pa.array(~valid)
    return pa.StructArray.from_arrays(children, fields=list(LINK), mask=mask)
