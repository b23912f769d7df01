"""Comparison bit for bit, over every kind of column."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from destrier.compare import differing

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
FLOATS = st.sampled_from([0.0, -0.0, 1.5, math.nan, NAN, math.inf])
TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-3, 3)),
    (pa.float64(), FLOATS),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.sampled_from(["", "a", "ab", "b"])),
    (pa.large_binary(), st.sampled_from([b"", b"a", b"ab"])),
    (pa.list_(pa.float64()), st.lists(st.none() | FLOATS, max_size=2)),
    (pa.list_(pa.list_(pa.int8())), st.lists(st.lists(st.integers(0, 1), max_size=2), max_size=2)),
    (pa.list_(pa.float64(), 2), st.lists(FLOATS, min_size=2, max_size=2)),
    (
        pa.struct([("x", pa.float64()), ("y", pa.list_(pa.string()))]),
        st.fixed_dictionaries(
            {"x": st.none() | FLOATS, "y": st.none() | st.lists(st.sampled_from("ab"), max_size=2)}
        ),
    ),
]


def exact(value: Any) -> Any:
    """A value whose equality is that of its bits."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, list):
        return [exact(each) for each in value]
    if isinstance(value, dict):
        return {key: exact(each) for key, each in value.items()}
    return value


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_finds_exactly_the_rows_that_differ(data: st.DataObject) -> None:
    kind, values = data.draw(st.sampled_from(TYPES))
    rows = st.lists(st.tuples(st.none() | values, st.none() | values, st.booleans()), max_size=6)
    pairs = [(a, a if same else b) for a, b, same in data.draw(rows)]
    skip = data.draw(st.integers(0, min(1, len(pairs))))
    one, other = (pa.array([p[i] for p in pairs], kind).slice(skip) for i in range(2))
    expected = [exact(a) != exact(b) for a, b in pairs[skip:]]
    assert differing(one, other).tolist() == expected


@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64])
def test_floats_of_every_width(width: Any) -> None:
    one = pa.array(np.array([0.0, 1.0, np.nan, 2.0], width))
    other = pa.array(np.array([-0.0, 1.0, np.nan, 3.0], width))
    assert differing(one, other).tolist() == [True, False, False, True]


def test_tensors_and_dictionaries() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    changed = values.copy()
    changed[1, 1, 1] = np.nan
    tensors = [pa.FixedShapeTensorArray.from_numpy_ndarray(v) for v in (values, changed)]
    assert differing(*tensors).tolist() == [False, True, False]
    words = [pa.array(w).dictionary_encode() for w in (["a", "b", None], ["a", "c", None])]
    assert differing(*words).tolist() == [False, True, False]
