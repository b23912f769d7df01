from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tables
from destrier import selection
from destrier.errors import DestrierWarning, EmptyError, FilterError
from destrier.selection import BitmapRows, OffsetRows, RangeRows, cache_folder, select_rows
from destrier.table import open_table

# ---- bitmaps ---------------------------------------------------------------------------------


def bitmap(mask):
    padded = np.zeros(-(-len(mask) // 64) * 64, np.bool_)
    padded[: len(mask)] = mask
    return BitmapRows(np.packbits(padded, bitorder="little").view(np.uint64))


def all_offsets(rows):
    return rows.offsets(np.arange(len(rows)))


sizes = st.one_of(
    st.sampled_from([1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025]),
    st.integers(1, 3000),
)


@settings(max_examples=300, deadline=None)
@given(sizes, st.sampled_from([0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.999, 1]), st.integers(0, 2**32 - 1))
@example(512, 1, 0)
@example(513, 0, 0)
def test_select_equals_numpy(size, density, seed):
    generator = np.random.default_rng(seed)
    mask = generator.random(size) < density
    rows, expected = bitmap(mask), np.flatnonzero(mask)
    assert len(rows) == len(expected)
    assert np.array_equal(all_offsets(rows), expected)
    if len(expected):
        positions = generator.integers(0, len(expected), 50)
        assert np.array_equal(rows.offsets(positions), expected[positions])


@pytest.mark.parametrize("place", [0, 1, 63, 64, 511, 512, 1000])
def test_select_a_single_bit(place):
    mask = np.zeros(1003, np.bool_)
    mask[place] = True
    assert all_offsets(bitmap(mask)).tolist() == [place]


def test_popcount_without_numpy_2(monkeypatch):
    words = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64, endpoint=False)
    words[:2] = 0, 2**64 - 1
    expected = [int(word).bit_count() for word in words]
    assert selection._popcount(words).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert selection._popcount(words).tolist() == expected


def test_a_bitmap_costs_little_more_than_a_bit_a_row():
    rows = bitmap(np.arange(1_000_000) % 3 == 0)
    assert (rows.words.nbytes + rows.ranks.nbytes) * 8 / 1_000_000 < 1.13


def test_large_selects_need_little_memory_beside_their_result():
    rows = bitmap(np.arange(1_500_000) % 3 == 0)
    positions = np.random.default_rng(0).permutation(500_000)
    tracemalloc.start()
    found = rows.offsets(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(found, positions * 3)
    assert peak < found.nbytes + 24e6


def test_digests_are_of_the_content():
    mask = np.arange(1003) % 3 == 0
    assert bitmap(mask).digest == bitmap(mask.copy()).digest
    other = mask.copy()
    other[700] ^= True
    lists = [
        bitmap(mask),
        bitmap(other),
        OffsetRows(np.flatnonzero(mask)),
        OffsetRows(np.flatnonzero(mask)[::-1]),
        RangeRows(1003),
        RangeRows(1004),
    ]
    assert len({rows.digest for rows in lists}) == len(lists)


def test_lists_of_offsets_keep_order_and_repeats():
    rows = OffsetRows(np.array([5, 5, 2, 900], np.int32))
    found = rows.offsets(np.array([3, 0, 0, 2]))
    assert found.tolist() == [900, 5, 5, 2]
    assert found.dtype == np.int64


# ---- filters ---------------------------------------------------------------------------------

FILTERS = {
    "label = 3": lambda i: i % 10 == 3,
    "label = 3 AND value > 20": lambda i: (i % 10 == 3) & (i / 8 > 20),
    "maybe IS NULL": lambda i: i % 7 == 0,
    "maybe > 500": lambda i: (i % 7 != 0) & (i > 500),
    "name LIKE 'row 1%' OR id % 2 = 0": lambda i: (
        np.char.startswith(i.astype(str), "1") | (i % 2 == 0)
    ),
    "id IN (60, 500, 1000)": lambda i: np.isin(i, [60, 500, 1000]),
    "true": lambda i: i >= 0,
}


@pytest.mark.parametrize("text", FILTERS)
def test_filter_equals_numpy(table_path, table_ids, text):
    rows = select_rows(open_table(table_path), text)
    assert all_offsets(rows).tolist() == np.flatnonzero(FILTERS[text](table_ids)).tolist()


def test_offsets_are_those_of_take(table_path):
    table = open_table(table_path)
    offsets = all_offsets(select_rows(table, "label = 3"))
    taken = table.dataset.take(offsets, columns=["label"])
    assert set(taken["label"].to_pylist()) == {3}


def test_no_filter_is_every_row(table_path):
    rows = select_rows(open_table(table_path), None)
    assert isinstance(rows, RangeRows)
    assert len(rows) == tables.ROWS
    assert not list(cache_folder().glob("*"))


def test_few_rows_are_kept_as_offsets(table_path):
    table = open_table(table_path)
    assert isinstance(select_rows(table, "id IN (60, 500, 1000)"), OffsetRows)
    assert isinstance(select_rows(table, "label = 3"), BitmapRows)


@pytest.mark.parametrize("kind", ["BTREE", "BITMAP"])
def test_scalar_index_is_used_and_gives_the_same(plain, kind):
    before = select_rows(open_table(plain), "label = 3 OR label = 7")
    plain.create_scalar_index("label", kind)
    plain.delete("id < 20")
    table = open_table(lance.dataset(plain.uri))
    plan = table.dataset.scanner(
        columns=["_rowoffset"], filter="label = 3 OR label = 7"
    ).explain_plan()
    assert "ScalarIndexQuery" in plan
    after = select_rows(table, "label = 3 OR label = 7")
    assert all_offsets(after).tolist() == [o - 20 for o in all_offsets(before) if o >= 20]


def test_rows_appended_after_the_index_are_found(plain):
    plain.create_scalar_index("label", "BTREE")
    more = plain.to_table().slice(0, 100)
    table = open_table(lance.write_dataset(more, plain.uri, mode="append"))
    expected = np.flatnonzero(table.dataset.to_table()["label"].to_numpy() == 3)
    assert all_offsets(select_rows(table, "label = 3")).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "text", ["", "nope = 1", "label = ", "label = 'x'", "label", "sum(id) > 3"]
)
def test_filter_that_cannot_run_names_the_columns(table_path, text):
    with pytest.raises(FilterError, match="id, label, value, vector") as caught:
        select_rows(open_table(table_path), text)
    assert repr(text) in str(caught.value)
    assert "version" in str(caught.value)
    assert not list(cache_folder().glob("*"))


def test_long_filters_are_shortened_in_errors(table_path):
    text = "label = 3 AND " * 200 + "nope = 1"
    with pytest.raises(FilterError) as caught:
        select_rows(open_table(table_path), text)
    assert len(str(caught.value)) < 1500


def test_filter_that_keeps_nothing(table_path):
    for _ in range(2):  # scanned, then from the cache
        with pytest.raises(EmptyError, match=r"'label = 99' keeps none of the 1003 rows of"):
            select_rows(open_table(table_path), "label = 99")


@pytest.mark.parametrize("text", [None, "id > 3"])
def test_table_without_rows(tmp_path, text):
    table = open_table(tables.plain_table(tmp_path / "empty.lance", 0))
    with pytest.raises(EmptyError, match=r"empty\.lance \(version 1\)"):
        select_rows(table, text)


def test_table_whose_rows_are_all_deleted(plain):
    plain.delete("true")
    with pytest.raises(EmptyError, match="has no rows"):
        select_rows(open_table(plain.uri), None)


# ---- the cache -------------------------------------------------------------------------------


@pytest.fixture
def scans(monkeypatch):
    """The filters that were scanned for."""
    seen = []
    original = selection._scan

    def scan(table, text):
        seen.append(text)
        return original(table, text)

    monkeypatch.setattr(selection, "_scan", scan)
    return seen


def selected_or_none(table, text):
    try:
        return all_offsets(select_rows(table, text)).tolist()
    except EmptyError:
        return None


def cached_files():
    return sorted(cache_folder().iterdir())


@pytest.mark.parametrize("text", ["label = 3", "id = 500", "label = 99"])
def test_second_selection_does_not_scan(table_path, scans, text):
    first, second = (selected_or_none(open_table(table_path), text) for _ in range(2))
    assert first == second
    assert scans == [text]
    assert [path.suffix for path in cached_files()] == [".rows"]


def test_cached_rows_are_mapped_and_keep_their_digest(table_path):
    first = select_rows(open_table(table_path), "label = 3")
    second = select_rows(open_table(table_path), "label = 3")
    assert isinstance(second.words, np.memmap)
    assert first.digest == second.digest


def test_other_filters_versions_and_tables_have_their_own_files(own_table, table_path, scans):
    table = open_table(own_table.path)
    before = select_rows(table, "label = 3")
    select_rows(table, "label = 4")
    table.dataset.delete("id = 63")
    after = select_rows(open_table(own_table.path), "label = 3")
    assert len(after) == len(before) - 1
    select_rows(open_table(table_path), "label = 3")
    assert len(scans) == len(cached_files()) == 4


def test_columns_that_changed_names_are_not_mistaken(tmp_path):
    paths = [str(tmp_path / name) for name in ("a.lance", "b.lance")]
    lance.write_dataset(pa.table({"x": range(100), "y": range(100, 0, -1)}), paths[0])
    shutil.copytree(*paths)
    lance.dataset(paths[0]).alter_columns({"path": "x", "name": "z"})
    lance.dataset(paths[1]).alter_columns({"path": "y", "name": "z"})
    found = [all_offsets(select_rows(open_table(path), "z <= 10")).tolist() for path in paths]
    assert found == [list(range(11)), list(range(90, 100))]


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "empty":
        content = bytearray()
    elif how == "truncated":
        content = content[:-8]
    elif how == "longer":
        content += bytes(8)
    elif how == "half a header":
        content = content[:30]
    elif how == "size of the header":
        content[16:24] = b"\xff\xff\xff\xff\xff\xff\xff\x7f"
    elif how == "another format":
        content[:8] = b"somewhat"
    elif how == "header":
        content[26] ^= 0xFF
    elif how == "content":
        content[len(content) // 2 + 20] ^= 1
    elif how == "directory":
        content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "truncated",
        "longer",
        "half a header",
        "size of the header",
        "another format",
        "header",
        "content",
        "directory",
    ],
)
def test_damaged_file_is_rebuilt(table_path, scans, how):
    expected = all_offsets(select_rows(open_table(table_path), "label = 3")).tolist()
    (path,) = cached_files()
    whole = path.read_bytes()
    damage(path, how)
    assert path.read_bytes() != whole
    assert all_offsets(select_rows(open_table(table_path), "label = 3")).tolist() == expected
    assert len(scans) == 2
    assert path.read_bytes() == whole
    assert cached_files() == [path]


def test_folder_that_cannot_be_written(table_path, table_ids, tmp_path, monkeypatch):
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    monkeypatch.setenv("DESTRIER_CACHE", str(blocked / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = select_rows(open_table(table_path), "label = 3")
    assert [warning.category for warning in caught] == [DestrierWarning]
    assert "DESTRIER_CACHE" in str(caught[0].message)
    assert str(blocked) in str(caught[0].message)
    assert all_offsets(rows).tolist() == np.flatnonzero(table_ids % 10 == 3).tolist()


def test_disk_that_is_full(table_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selection.os, "replace", full)
    with pytest.warns(DestrierWarning, match="No space left on device"):
        rows = select_rows(open_table(table_path), "label = 3")
    assert len(rows)
    assert cached_files() == []


def test_cache_folder_of_the_user(monkeypatch):
    monkeypatch.delenv("DESTRIER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/destrier")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/destrier")


BUILDER = """
import sys, time
from pathlib import Path
from destrier import selection
from destrier.table import open_table

scan = selection._scan

def slow_scan(table, filter):
    print("scanned", flush=True)
    time.sleep(0.5)  # long enough for the others to arrive
    return scan(table, filter)

selection._scan = slow_scan
table = open_table(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(selection.select_rows(table, "label = 3").digest)
"""


def test_processes_that_build_at_once(table_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, table_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(line == "scanned" for lines in said for line in lines) == 1
    expected = select_rows(open_table(table_path), "label = 3").digest
    assert {lines[-1] for lines in said} == {expected}
    assert [path.suffix for path in cached_files()] == [".rows"]


def test_builder_that_is_killed_leaves_no_lock(table_path):
    program = BUILDER.replace("time.sleep(0.5)", "time.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-c", program, table_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdin.write("go\n")
    process.stdin.flush()
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "scanned\n"]
    process.kill()
    process.communicate()
    assert len(select_rows(open_table(table_path), "label = 3"))


# ---- only what is needed is read -------------------------------------------------------------


def test_only_the_columns_of_the_filter_are_read(tmp_path):
    count = 20_000
    wide = pa.array([bytes(1000)] * count)
    path = str(tmp_path / "wide.lance")
    lance.write_dataset(pa.table({"id": range(count), "wide": wide}), path)
    table = open_table(path)
    table.dataset.io_stats_incremental()
    assert len(select_rows(table, "id % 2 = 0")) == count // 2
    assert table.dataset.io_stats_incremental().read_bytes < 1_000_000
