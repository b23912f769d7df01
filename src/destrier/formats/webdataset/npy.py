"""Arrays in NumPy's ``.npy`` form, to Arrow and back. Nothing is unpickled."""

from __future__ import annotations

import ast
import io
import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["Header", "array_of", "header_of", "npy_bytes"]

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # as NumPy's own reader; shapes and a type take 128
_PYTHON_2 = re.compile(r"(\d)L\b")
_KINDS = "biuf"
_MAX_ITEM = 8  # wider floats differ between machines


class Header(NamedTuple):
    """What the header of an array says."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran: bool
    start: int


def header_of(data: memoryview) -> Header:
    """Read the header of an array.

    Raises:
        ValueError: If it is damaged, or the array is of a type that columns cannot hold.
    """
    if bytes(data[:6]) != _MAGIC or len(data) < 12:
        raise ValueError("it does not begin as an .npy file does")
    width = 2 if data[6] == 1 else 4
    if data[6] not in (1, 2):
        raise ValueError(f"version {data[6]} of the .npy format is not supported")
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    if start > min(len(data), _MAX_HEADER):
        raise ValueError("its header is longer than it can be")
    header = _parse(bytes(data[8 + width : start]), start)
    expected = start + header.dtype.itemsize * _count(header.shape)
    if len(data) != expected:
        raise ValueError(
            f"it has {len(data):,} bytes, but its header (shape {header.shape}, {header.dtype}) "
            f"asks for {expected:,}"
        )
    return header


@lru_cache(maxsize=1024)
def _parse(raw: bytes, start: int) -> Header:
    text = raw.decode("latin-1")
    try:
        parts = ast.literal_eval(_PYTHON_2.sub(r"\1", text).strip())
        descr, fortran, shape = parts["descr"], parts["fortran_order"], parts["shape"]
        dtype = np.dtype(descr) if isinstance(descr, str) else None
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise ValueError(f"its header is damaged: {text[:80]!r}") from None
    if dtype is None or dtype.kind not in _KINDS or dtype.itemsize > _MAX_ITEM:
        raise ValueError(f"it is an array of {descr!r}, which a column of numbers cannot hold")
    if (
        not isinstance(shape, tuple)
        or not all(type(length) is int and 0 <= length < 1 << 31 for length in shape)
        or not isinstance(fortran, bool)
    ):
        raise ValueError(f"its header is damaged: {text[:80]!r}")
    return Header(dtype, shape, fortran, start)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def array_of(data: memoryview, header: Header) -> NDArray[np.generic]:
    """The values in row order and in this machine's byte order, flat."""
    values = np.frombuffer(data, header.dtype, offset=header.start)
    if header.fortran and len(header.shape) > 1:
        values = values.reshape(header.shape, order="F").ravel()
    return values.astype(header.dtype.newbyteorder("="), copy=False)


def npy_bytes(array: NDArray[np.generic]) -> bytes:
    """An array as the bytes of an ``.npy`` file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array, order="C"), allow_pickle=False)
    return buffer.getvalue()


def value_type(dtype: np.dtype[np.generic]) -> pa.DataType:
    """The Arrow type of an array's items."""
    return pa.from_numpy_dtype(dtype.newbyteorder("="))
