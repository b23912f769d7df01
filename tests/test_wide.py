"""Large values gathered with one copy equal what Arrow takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from destrier.wide import gather_wide, is_wide

VALUES = st.none() | st.sampled_from([b"", b"a", b"xyz" * 1000, bytes(range(256)) * 20])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_equal_to_what_arrow_takes(data: Any) -> None:
    kind = data.draw(st.sampled_from([pa.binary(), pa.large_binary()]))
    lists = data.draw(st.lists(st.lists(VALUES, min_size=1, max_size=6), min_size=1, max_size=4))
    skip = data.draw(st.integers(0, 2))
    arrays = [pa.array([b"no"] * skip + values, kind).slice(skip) for values in lists]
    there = [(i, row) for i, values in enumerate(lists) for row in range(len(values))]
    chosen = data.draw(st.lists(st.sampled_from(there), max_size=12))
    sources, rows = (np.array([pair[i] for pair in chosen], np.int64) for i in range(2))
    found = gather_wide(arrays, sources, rows)
    found.validate(full=True)
    assert found.type == kind
    assert found.to_pylist() == [lists[i][row] for i, row in chosen]


def test_which_are_wide() -> None:
    assert is_wide([pa.array([bytes(5000)] * 3), pa.array([bytes(10)])])
    assert not is_wide([pa.array([bytes(50)] * 3)])
    assert not is_wide([pa.array(["x" * 5000])])
    assert not is_wide([pa.array([1, 2, 3])])


def test_too_many_bytes_for_a_type() -> None:
    value = pa.array([bytes(1 << 20)])
    places = np.zeros(2048, np.int64)
    with pytest.raises(pa.ArrowInvalid, match="too many for one array of binary"):
        gather_wide([value], places, places)
