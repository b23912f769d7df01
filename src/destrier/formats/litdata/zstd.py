"""Zstandard frames, inflated to a size that is bounded before anything is allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from destrier.formats.gather import Bytes, Ints, fixed

__all__ = ["content_size", "content_sizes", "inflate", "inflate_frames"]

_MAGIC = b"\x28\xb5\x2f\xfd"
_MOST_RATIO = 1 << 15  # a block of 128 KiB takes at least four bytes
_STEP = 4 << 20


def content_size(frame: memoryview) -> int | None:
    """The size that the header of a frame declares, or None if it declares none.

    Raises:
        ValueError: If it is no frame.
    """
    if bytes(frame[:4]) != _MAGIC:
        raise ValueError("no zstd data where it should begin")
    if len(frame) < 6:
        raise ValueError("zstd data are cut off")
    at, width = _size_field(frame[4])
    if width == 0:
        return None
    if len(frame) < at + width:
        raise ValueError("zstd data are cut off")
    size = int.from_bytes(frame[at : at + width], "little")
    return size + 256 if width == 2 else size


def _size_field(descriptor: int) -> tuple[int, int]:
    """Where a frame's header has its size, and in how many bytes, by the header's first byte."""
    single = bool(descriptor & 0x20)
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    return at, (1 if single else 0, 2, 4, 8)[descriptor >> 6]


def content_sizes(data: Bytes, bounds: Ints) -> Ints | None:
    """The sizes that many frames declare, one after another in a buffer.

    Returns:
        None unless each of them is a frame that declares one that it can have.
    """
    starts, lengths = bounds[:-1], np.diff(bounds)
    if not len(starts) or lengths.min() < 6:
        return None
    heads = fixed(data, starts, 5).reshape(-1, 5)
    if (heads[:, :4] != np.frombuffer(_MAGIC, np.uint8)).any():
        return None
    sizes = np.empty(len(starts), np.int64)
    for descriptor in np.unique(heads[:, 4]).tolist():
        at, width = _size_field(descriptor)
        rows = np.flatnonzero(heads[:, 4] == descriptor)
        if width == 0 or lengths[rows].min() < at + width:
            return None
        found = fixed(data, starts[rows] + at, width).view(f"<u{width}").astype(np.int64)
        sizes[rows] = found + 256 if width == 2 else found
    if (sizes < 0).any() or (sizes > lengths * _MOST_RATIO).any():
        return None
    return sizes


def inflate_frames(data: Any, size: int) -> pa.Buffer:
    """Decompress frames that follow one another, of a size in all that was checked before.

    Raises:
        ValueError: If the data are damaged.
    """
    try:
        return pa.Codec("zstd").decompress(data, decompressed_size=size)
    except (OSError, pa.ArrowException, MemoryError) as error:
        raise ValueError(f"zstd data are damaged ({error})") from None


def inflate(data: Any, *, size: int | None = None, most: int) -> pa.Buffer:
    """Decompress a frame.

    Args:
        data: The frame, and nothing after it.
        size: What it must inflate to, if that is known.
        most: What it may inflate to at most.

    Raises:
        ValueError: If the data are damaged, or are of another size.
    """
    view = memoryview(data)
    declared = content_size(view)
    if declared is not None:
        if size is not None and declared != size:
            raise ValueError(f"zstd data of {declared:,} bytes where {size:,} are expected")
        if declared > most or declared > len(view) * _MOST_RATIO:
            raise ValueError(f"zstd data claim to be {declared:,} bytes, which cannot be")
        return inflate_frames(data, declared)
    parts = []
    held = 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            while part := stream.read(_STEP):
                held += len(part)
                if held > most:
                    raise ValueError(f"zstd data inflate to more than {most:,} bytes")
                parts.append(part)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"zstd data are damaged ({error})") from None
    if size is not None and held != size:
        raise ValueError(f"zstd data of {held:,} bytes where {size:,} are expected")
    return pa.py_buffer(b"".join(parts))
