"""How documents become blocks: the two packings against slow plans, and lengths."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packed as slow
from destrier import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    EmptyError,
    ReadError,
    open_table,
)
from destrier.keyed import PACKING_KEY, epoch_key, subkey
from destrier.packing import lengthfile
from destrier.packing.best_fit import BestFit, pack_window
from destrier.packing.concatenate import Concatenated
from destrier.packing.lengths import Lengths, find_lengths
from destrier.packing.packed import Packed
from destrier.packing.pieces import Blocks
from destrier.packing.reader import PackedReader
from destrier.read import Reader
from destrier.selection import OffsetRows, select_rows

quick = settings(derandomize=True, deadline=None, max_examples=60)
some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def lengths_of(values: list[int], extra: int = 0) -> Lengths:
    stored = lengthfile._in_memory([np.array(values, np.uint32)])
    return Lengths(stored.values, stored.sums, stored.digest, extra)


def pieces_of(blocks: Blocks, addresses: Any, ahead: int = 0) -> list[list[tuple[int, int, int]]]:
    pieces = blocks.pieces(np.asarray(addresses, np.int64), ahead)
    out: list[list[tuple[int, int, int]]] = [[] for _ in addresses]
    for block, document, begin, length, at in zip(
        pieces.block, pieces.document, pieces.begin, pieces.length, pieces.at, strict=True
    ):
        assert at == sum(piece[2] for piece in out[block]), "pieces lie side by side, in order"
        out[block].append((int(document), int(begin), int(length)))
    return out


# ---- best fit ---------------------------------------------------------------------------------


@quick
@given(some_lengths, st.integers(1, 30))
def test_a_window_is_packed_as_it_is_defined(lengths: list[int], size: int):
    window = pack_window(np.array(lengths), size)
    bounds = window.bounds.tolist()
    found = [
        list(
            zip(
                window.document[i:j].tolist(),
                window.begin[i:j].tolist(),
                window.length[i:j].tolist(),
                strict=True,
            )
        )
        for i, j in itertools.pairwise(bounds)
    ]
    assert found == slow.best_fit(lengths, size)
    assert len(found) == -(-sum(lengths) // size)
    tokens = [(d, b + i) for block in found for d, b, n in block for i in range(n)]
    assert sorted(tokens) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]


@quick
@given(some_lengths, st.integers(1, 30), st.integers(1, 20), st.randoms())
def test_best_fit_finds_any_block(lengths: list[int], size: int, window: int, random: Any):
    if not sum(lengths):
        return
    blocks = BestFit(lengths_of(lengths), size, window)
    expected = slow.windows(lengths, size, window)
    assert blocks.count == len(expected)
    numbers = random.choices(range(blocks.count), k=10)
    assert pieces_of(blocks, numbers) == [expected[b].pieces for b in numbers]


def test_vectors_of_best_fit():
    # docs/tokens.md
    lengths = [5, 17, 0, 8, 3, 8, 1, 9, 2, 6]
    blocks = BestFit(lengths_of(lengths), 8, 10)
    assert blocks.count == 8
    assert pieces_of(blocks, range(8)) == [
        [(0, 0, 5), (4, 0, 3)],
        [(1, 0, 8)],
        [(1, 8, 8)],
        [(1, 16, 1), (6, 0, 1), (7, 8, 1)],
        [(3, 0, 8)],
        [(5, 0, 8)],
        [(7, 0, 8)],
        [(8, 0, 2), (9, 0, 6)],
    ]


def test_best_fit_wastes_little_and_cuts_little():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(400), 1, 3 * 4096).astype(np.int64))
    blocks = BestFit(lengths_of(lengths.tolist()), 2048, 4096)
    pads = blocks.count * 2048 - blocks.tokens
    assert pads / (blocks.count * 2048) <= 0.001
    pieces = blocks.pieces(np.arange(blocks.count))
    least = int((-(-lengths // 2048)).sum())
    assert (len(pieces) - least) / len(pieces) <= 0.04


def test_windows_beyond_what_is_kept_are_packed_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("destrier.packing.best_fit._KEPT_BYTES", 300)
    lengths = [3, 4, 5, 6] * 8
    blocks = BestFit(lengths_of(lengths), 7, 4)
    expected = [block.pieces for block in slow.windows(lengths, 7, 4)]
    for _ in range(2):
        assert pieces_of(blocks, range(blocks.count)) == expected
    assert len(blocks._kept) < 8


# ---- concatenate ------------------------------------------------------------------------------


@quick
@given(some_lengths, st.integers(1, 30), st.data())
def test_a_line_is_cut_as_it_is_defined(lengths: list[int], size: int, data: Any):
    if sum(lengths) < size:
        return
    overlap = data.draw(st.integers(0, size - 1))
    blocks = Concatenated(lengths_of(lengths), size, overlap)
    rows = blocks.rows(3, 1, shuffle=True)
    assert (rows.first == 0) or not overlap
    expected = slow.line(lengths, size, overlap=overlap, first=rows.first)
    assert blocks.count == len(rows) == len(expected)
    numbers = data.draw(st.lists(st.integers(0, blocks.count - 1), min_size=1, max_size=10))
    found = pieces_of(blocks, rows.offsets(np.array(numbers)).tolist())
    assert found == [expected[b].pieces for b in numbers]
    assert blocks.unreached == sum(lengths) - overlap - blocks.count * (size - overlap)


def test_lines_over_many_groups_of_documents():
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 3, 9 * lengthfile.GROUP + 5).tolist()
    lengths[2000:6000] = [0] * 4000  # whole groups of no tokens
    blocks = Concatenated(lengths_of(lengths), 64)
    rows = blocks.rows(0, 2, shuffle=True)
    expected = slow.line(lengths, 64, first=rows.first)
    numbers = rng.permutation(blocks.count)
    found = pieces_of(blocks, rows.offsets(numbers).tolist())
    assert found == [expected[b].pieces for b in numbers]


def test_vectors_of_concatenate():
    # docs/tokens.md
    blocks = Concatenated(lengths_of([5, 17, 0, 8, 3]), 8)
    rows = blocks.rows(7, 4, shuffle=True)
    assert (subkey(epoch_key(7, 4), PACKING_KEY) * 33) >> 64 == rows.first == 8
    assert pieces_of(blocks, rows.offsets(np.arange(4)).tolist()) == [
        [(1, 3, 8)],
        [(1, 11, 6), (3, 0, 2)],
        [(3, 2, 6), (4, 0, 2)],
        [(4, 2, 1), (0, 0, 5), (1, 0, 2)],
    ]


def test_cuts_move_every_epoch_only_where_rows_are_shuffled():
    blocks = Concatenated(lengths_of([100_000] * 10), 16)
    assert len({blocks.rows(0, epoch, shuffle=True).first for epoch in range(20)}) == 20
    assert {blocks.rows(0, epoch, shuffle=False).first for epoch in range(3)} == {0}


# ---- lengths ----------------------------------------------------------------------------------


def write(path: Path, documents: Any, **more: Any) -> str:
    kind = more.pop("kind", pa.list_(pa.int32()))
    columns = {"tokens": pa.array(documents, kind), **more}
    lance.write_dataset(pa.table(columns), str(path), max_rows_per_file=40)
    return str(path)


DOCUMENTS = [list(range(10 * i, 10 * i + i % 7)) for i in range(100)]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16())])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
def test_lengths_come_from_counts_or_lists(tmp_path: Path, kind: Any, counted: bool, extra: int):
    sizes = [len(d) for d in DOCUMENTS]
    more = {"tokens_count": pa.array(sizes)} if counted else {}
    table = open_table(write(tmp_path / "t.lance", DOCUMENTS, kind=kind, **more))
    lengths = find_lengths(table, select_rows(table, None), "tokens", extra=extra)
    assert lengths.part(0, 100).tolist() == [n + extra * (n > 0) for n in sizes]
    assert lengths.tokens == sum(sizes) + extra * sum(n > 0 for n in sizes)


def test_lengths_of_chosen_rows(tmp_path: Path):
    table = open_table(write(tmp_path / "t.lance", DOCUMENTS, i=pa.array(range(100))))
    sizes = [len(d) for d in DOCUMENTS]
    filtered = find_lengths(table, select_rows(table, "i % 3 = 1"), "tokens")
    assert filtered.part(0, 100).tolist() == sizes[1::3]
    listed = find_lengths(table, OffsetRows(np.array([5, 99, 5, 3])), "tokens")
    assert listed.part(0, 4).tolist() == [sizes[i] for i in (5, 99, 5, 3)]
    assert filtered.digest != listed.digest


def test_lists_of_one_size_are_not_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind = pa.list_(pa.int32(), 3)
    table = open_table(write(tmp_path / "t.lance", [[1, 2, 3]] * 50, kind=kind))
    monkeypatch.setattr("destrier.packing.lengths._scanned", None)
    lengths = find_lengths(table, select_rows(table, None), "tokens")
    assert (lengths.count, lengths.tokens) == (50, 150)
    assert lengths.window_tokens(20).tolist() == [60, 60, 30]


@quick
@given(st.integers(0, 5000), st.integers(1, 3000))
def test_tokens_of_windows(count: int, window: int):
    values = np.arange(count) % 11
    lengths = lengths_of(values.tolist(), extra=1)
    sums = [
        sum(n + (n > 0) for n in values[i : i + window].tolist()) for i in range(0, count, window)
    ]
    assert lengths.window_tokens(window).tolist() == sums


def cached() -> list[Path]:
    return sorted(Path(os.environ["DESTRIER_CACHE"]).glob("*.lengths"))


def test_lengths_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = open_table(write(tmp_path / "t.lance", DOCUMENTS))
    rows = select_rows(table, None)
    before = find_lengths(table, rows, "tokens")
    monkeypatch.setattr("destrier.packing.lengths._scanned", None)
    after = find_lengths(table, rows, "tokens")
    assert isinstance(after.values, np.memmap)
    assert after.digest == before.digest
    assert len(cached()) == 1


@pytest.mark.parametrize("damage", ["cut", "sums", "header", "empty"])
def test_a_damaged_file_of_lengths_is_made_anew(tmp_path: Path, damage: str):
    table = open_table(write(tmp_path / "t.lance", DOCUMENTS))
    rows = select_rows(table, None)
    before = find_lengths(table, rows, "tokens").part(0, 100)
    content = bytearray(cached()[0].read_bytes())
    if damage == "cut":
        del content[-8:]
    elif damage == "empty":
        content.clear()
    else:
        content[-9 if damage == "sums" else 2] ^= 1
    cached()[0].unlink()
    path_of(table).write_bytes(content)
    assert find_lengths(table, rows, "tokens").part(0, 100).tolist() == before.tolist()


def path_of(table: Any) -> Path:
    key = f"{table.identity}|{table.version}|tokens"
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".lengths"
    return Path(os.environ["DESTRIER_CACHE"]) / name


@pytest.mark.parametrize(
    "make",
    [
        lambda lengths: Concatenated(lengths, 8),
        lambda lengths: BestFit(lengths, 8, 1024),
        lambda lengths: BestFit(lengths, 8, 100),
    ],
)
def test_lengths_that_were_damaged_later_are_an_error(tmp_path: Path, make: Any):
    table = open_table(write(tmp_path / "t.lance", DOCUMENTS))
    rows = select_rows(table, None)
    find_lengths(table, rows, "tokens")
    content = bytearray(cached()[0].read_bytes())
    content[lengthfile._HEADER_BYTES + 4 * 50] ^= 1
    cached()[0].write_bytes(content)
    lengths = find_lengths(table, rows, "tokens")
    with pytest.raises(ReadError, match=r"lengths of documents 0 to 99 are damaged"):
        make(lengths).pieces(np.array([0]))


@pytest.mark.parametrize("bound", ["_MOST_FILES", "_MOST_BYTES"])
def test_lengths_that_are_not_used_make_room(
    tmp_path: Path, bound: str, monkeypatch: pytest.MonkeyPatch
):
    uris = [write(tmp_path / f"{i}.lance", DOCUMENTS[i:]) for i in range(5)]
    tables = [open_table(uri) for uri in uris]
    everything = [select_rows(table, None) for table in tables]
    kept = [find_lengths(tables[i], everything[i], "tokens") for i in range(3)]
    size = max(path.stat().st_size for path in cached())
    monkeypatch.setattr(lengthfile, bound, 3 if bound == "_MOST_FILES" else 3 * size)
    for age, i in enumerate((2, 1, 0)):  # the first one was used last
        os.utime(path_of(tables[i]), (age, age))
    find_lengths(tables[2], everything[2], "tokens")  # is used again
    for i in (3, 4):
        find_lengths(tables[i], everything[i], "tokens")
    assert set(cached()) == {path_of(tables[i]) for i in (2, 3, 4)}
    assert kept[0].part(0, 100).tolist() == [len(d) for d in DOCUMENTS]  # it stays mapped
    monkeypatch.setattr(lengthfile, bound, 0)
    find_lengths(tables[0], everything[0], "tokens")
    assert cached() == [path_of(tables[0])]  # one that is larger than all the room is kept


def test_lengths_stay_in_memory_where_the_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DESTRIER_CACHE", str(tmp_path / "file" / "below"))
    table = open_table(write(tmp_path / "t.lance", DOCUMENTS))
    with pytest.warns(DestrierWarning, match="stay in memory"):
        lengths = find_lengths(table, select_rows(table, None), "tokens")
    assert lengths.part(0, 100).tolist() == [len(d) for d in DOCUMENTS]


def test_a_missing_list_is_an_error_unless_it_is_filtered_out(tmp_path: Path):
    table = open_table(write(tmp_path / "t.lance", [[1], [2, 3], None, [4]]))
    with pytest.raises(ReadError, match=r"'tokens' of row 2 .*is null.*IS NOT NULL") as caught:
        find_lengths(table, select_rows(table, None), "tokens")
    assert (caught.value.offset, caught.value.column) == (2, "tokens")
    kept = select_rows(table, "tokens IS NOT NULL")
    assert find_lengths(table, kept, "tokens").part(0, 3).tolist() == [1, 2, 1]


HIDDEN = [[1, 2, 3], [4, 5], [], [6, 7, 8], [9]]
HIDES = {"tokens_count": pa.array([3, 0, 0, 3, 1])}  # the second document


def test_a_count_of_0_does_not_hide_a_document(tmp_path: Path):
    table = open_table(write(tmp_path / "t.lance", HIDDEN, **HIDES))
    message = r"'tokens' of row 1 .* has 2 tokens, but 'tokens_count' says 0; .*tokens_count > 0'"
    for filter in (None, "tokens_count < 3"):
        with pytest.raises(ReadError, match=message) as caught:
            find_lengths(table, select_rows(table, filter), "tokens")
        assert (caught.value.offset, caught.value.column) == (1, "tokens")
    kept = select_rows(table, "tokens_count > 0")
    assert find_lengths(table, kept, "tokens").part(0, 3).tolist() == [3, 3, 1]
    other = open_table(write(tmp_path / "o.lance", HIDDEN, **HIDES))
    assert find_lengths(other, select_rows(other, "tokens_count > 0"), "tokens").documents == 3
    with pytest.raises(ReadError, match=message):  # though the lengths of all rows are known now
        find_lengths(other, select_rows(other, None), "tokens")
    assert find_lengths(table, select_rows(table, None), "tokens_count").count == 5
    right = open_table(write(tmp_path / "r.lance", HIDDEN, tokens_count=[3, 2, 0, 3, 1]))
    assert find_lengths(right, select_rows(right, None), "tokens").documents == 4


def test_many_counts_of_0_are_looked_at_here_and_there(tmp_path: Path):
    lists = [[1], *([] for _ in range(3000)), [2, 3]]
    counts = [len(tokens) for tokens in lists]
    for wrong in (0, 3001):  # the first and the last one are looked at
        more = {"tokens_count": pa.array([0 if i == wrong else n for i, n in enumerate(counts)])}
        table = open_table(write(tmp_path / f"{wrong}.lance", lists, **more))
        with pytest.raises(ReadError, match=f"'tokens' of row {wrong} "):
            find_lengths(table, select_rows(table, None), "tokens")


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_hidden_document_between_others_is_found(
    tmp_path: Path, tolerant: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("destrier.packing.lengths._CHECKED", 0)
    path = write(tmp_path / "t.lance", HIDDEN, **HIDES)
    reader, blocks = reader_of(path, tolerant=tolerant, block_size=2)
    addresses = blocks.rows(0, 0, shuffle=False).offsets(np.arange(blocks.count))
    if tolerant:  # it is in no block that could be left out
        rows = reader.read(addresses)
        ids = [block["input_ids"] for block in rows.batch.to_pylist()]
        assert (ids, rows.errors) == ([[1, 2], [3, 6], [7, 8]], {})
        return
    assert reader.read(addresses[:1]).batch.num_rows == 1  # of the first document alone
    with pytest.raises(ReadError, match=r"row 1 .* has 2 tokens, but 'tokens_count', .* say 0;"):
        reader.read(addresses[1:2])


@pytest.mark.parametrize("count", [-1, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])
def test_a_count_that_is_none(tmp_path: Path, count: int):
    counts = pa.array([1, count, 2], pa.int64() if count < 1 << 63 else pa.uint64())
    table = open_table(write(tmp_path / "t.lance", [[1], [2], [3, 4]], tokens_count=counts))
    with pytest.raises(ReadError, match=rf"'tokens_count' of row 1 .* is {count}, which"):
        find_lengths(table, select_rows(table, None), "tokens")


def test_a_count_that_is_null(tmp_path: Path):
    counts = pa.array([1, None, 2], pa.int64())
    table = open_table(write(tmp_path / "t.lance", [[1], [2], [3, 4]], tokens_count=counts))
    with pytest.raises(ReadError, match=r"'tokens_count' of row 1 .*='tokens_count IS NOT NULL"):
        find_lengths(table, select_rows(table, None), "tokens")


def test_columns_that_hold_no_tokens(tmp_path: Path):
    more = {"text": pa.array(["a"]), "floats": pa.array([[0.5]])}
    table = open_table(write(tmp_path / "t.lance", [[]], **more))
    rows = select_rows(table, None)
    for name in ("text", "floats"):
        with pytest.raises(ColumnError, match=f"'{name}' .*; tokens are lists of integers"):
            Packed(table, block_size=4, column=name).packing.blocks(table, rows)
    with pytest.raises(ColumnError, match=r"'text' .*type string, which has no lengths"):
        find_lengths(table, rows, "text")
    with pytest.raises(ColumnError, match="no column 'none'"):
        find_lengths(table, rows, "none")
    with pytest.raises(EmptyError, match="no tokens in any of the 1 chosen rows"):
        find_lengths(table, rows, "tokens")


# ---- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size must be from 1"),
        ({"block_size": 2.5}, "block_size must be an integer"),
        ({"overlap": 8}, r"overlap is 8, which must be less than block_size \(8\)"),
        ({"overlap": -1}, "overlap must be at least 0"),
        ({"how": "first_fit"}, "how must be one of concatenate, best_fit, got 'first_fit'"),
        ({"how": "best_fit"}, "pass pad_id"),
        ({"how": "best_fit", "pad_id": 0, "overlap": 1}, "overlap is 1, but with how='best_fit'"),
        ({"how": "best_fit", "pad_id": 0, "window": 0}, "window must be from 1"),
        ({"pad_id": 0}, "pad_id is 0, but with how='concatenate'"),
        ({"eos_id": -1}, "eos_id must be from 0"),
        ({"eos_id": 1 << 31, "dtype": "int32"}, "eos_id must be from 0 to 2147483647"),
        ({"dtype": "uint16"}, "dtype must be one of int32, int64, got 'uint16'"),
        ({"parallel": "mask"}, "parallel must be a list of names"),
        ({"parallel": 5}, "parallel must be a list of names, got 5"),
        ({"parallel": ["mask", "tokens"]}, "parallel has 'tokens', the column of the tokens"),
        ({"how": "best_fit", "pad_id": 7, "eos_id": 7}, "eos_id is 7 and pad_id is 7"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], words: str):
    with pytest.raises(ArgumentError, match=words):
        Packed("t.lance", **{"block_size": 8, **options})


def test_blocks_beyond_the_tokens_there_are(tmp_path: Path):
    table = open_table(write(tmp_path / "t.lance", [[1, 2], [3]]))
    packing = Packed(table, block_size=4).packing
    with pytest.raises(EmptyError, match="block_size is 4, but all documents together have 3"):
        packing.blocks(table, select_rows(table, None))


# ---- reading ----------------------------------------------------------------------------------


def reader_of(
    path: str, columns: list[str] | None = None, *, tolerant: bool = False, **options: Any
) -> tuple[PackedReader, Blocks]:
    table = open_table(path)
    packing = Packed(table, **options).packing
    rows = select_rows(table, None)
    blocks = packing.blocks(table, rows)
    names = packing.schema(table).names if columns is None else columns
    inner = Reader(table, packing.read_columns(names), tolerant=tolerant)
    return PackedReader(inner, packing, blocks, rows, names), blocks


WAYS = [
    {},
    {"overlap": 3},
    {"eos_id": 5000},
    {"mask_borders": True},
    {"how": "best_fit", "pad_id": 9999, "window": 16},
    {"how": "best_fit", "pad_id": 9999, "window": 16, "eos_id": 5000, "mask_borders": True},
    {"how": "best_fit", "pad_id": 9999, "window": 100, "eos_id": 5000},
]


def expected_blocks(
    documents: list[list[int]], blocks: Blocks, options: dict[str, Any]
) -> list[dict[str, Any]]:
    size, eos = options["block_size"], options.get("eos_id")
    lengths = [len(d) + (eos is not None and len(d) > 0) for d in documents]
    if options.get("how") == "best_fit":
        plan = slow.windows(lengths, size, options["window"])
    else:
        first = blocks.rows(0, 1, shuffle=True).first
        plan = slow.line(lengths, size, overlap=options.get("overlap", 0), first=first)
    masked = options.get("mask_borders", False)
    pad = options.get("pad_id", 0)
    return [slow.columns(b, documents, size, eos=eos, pad=pad, masked=masked) for b in plan]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 30])
@pytest.mark.parametrize("short", [1, 10_000])  # the two ways of copying
def test_blocks_are_what_they_should_be(
    tmp_path: Path, options: dict[str, Any], size: int, short: int, monkeypatch: pytest.MonkeyPatch
):
    if options.get("overlap", 0) >= size:
        return
    monkeypatch.setattr("destrier.packing.copying._SHORT", short)
    path = write(tmp_path / "t.lance", DOCUMENTS)
    options = {"block_size": size, "labels": True, "documents": True, **options}
    reader, blocks = reader_of(path, **options)
    expected = expected_blocks(DOCUMENTS, blocks, options)
    rows = blocks.rows(0, 1, shuffle=True)
    everything = np.arange(blocks.count)
    found = reader.read(rows.offsets(everything))
    assert (found.index, found.errors) == (None, {})
    assert found.batch.to_pylist() == expected
    mixed = np.random.default_rng(0).permutation(everything)[: max(1, blocks.count // 3)]
    mixed = np.concatenate([mixed, mixed[:2]])  # repeats too
    some = reader.read(rows.offsets(mixed)).batch.to_pylist()
    assert some == [expected[b] for b in mixed]


@quick
@given(
    st.lists(st.lists(st.integers(1, 99), max_size=20), min_size=1, max_size=25),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, 100]),
    st.booleans(),
)
def test_blocks_of_any_documents(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    size: int,
    best_fit: bool,
    eos: int | None,
    masked: bool,
):
    if sum(map(len, documents)) < size:
        return
    options: dict[str, Any] = {"block_size": size, "eos_id": eos, "mask_borders": masked}
    options |= {"labels": True, "documents": True}
    if best_fit:
        options |= {"how": "best_fit", "pad_id": 0, "window": 7}
    path = write(tmp_path_factory.mktemp("any") / "t.lance", documents)
    reader, blocks = reader_of(path, **options)
    rows = blocks.rows(0, 1, shuffle=True)
    found = reader.read(rows.offsets(np.arange(blocks.count))).batch.to_pylist()
    assert found == expected_blocks(documents, blocks, options)


@pytest.mark.parametrize("eos", [None, 5000])
def test_documents_that_are_kept_are_read_once(
    tmp_path: Path, eos: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("destrier.packing.held._PART_DOCUMENTS", 30)
    path = write(tmp_path / "t.lance", DOCUMENTS)
    options: dict[str, Any] = {"block_size": 9, "labels": True, "documents": True, "eos_id": eos}
    reader, blocks = reader_of(path, **options)
    reader.keep()
    expected = expected_blocks(DOCUMENTS, blocks, options)
    addresses = blocks.rows(0, 1, shuffle=True).offsets(np.arange(blocks.count))
    for _ in range(6):
        assert reader.read(addresses).batch.to_pylist() == expected
    rows = reader.counts.stage("read").rows
    assert reader.read(addresses[::-1]).batch.to_pylist() == expected[::-1]
    assert reader.read(addresses[:0]).batch.num_rows == 0
    assert reader.counts.stage("read").rows == rows


def test_bad_documents_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("destrier.packing.held._PART_DOCUMENTS", 2)
    documents = [[1, 2, 3], [4, 5], [], [7, -3], [6, 7, 8], [9, 10, 11]]
    path = write(tmp_path / "t.lance", documents)
    reader, blocks = reader_of(path, tolerant=True, block_size=3)
    reader.keep()
    addresses = blocks.rows(0, 0, shuffle=False).offsets(np.arange(blocks.count))
    for _ in range(6):
        rows = reader.read(addresses)
        assert {b: error.offset for b, error in rows.errors.items()} == {1: 3, 2: 3}
        good = [rows.batch["input_ids"][b].as_py() for b in (0, 3)]
        assert good == [[1, 2, 3], [8, 9, 10]]


@pytest.mark.parametrize("tolerant", [False, True])
def test_documents_that_could_not_be_read_are_read_again(
    tmp_path: Path, tolerant: bool, monkeypatch: pytest.MonkeyPatch
):
    """A storage that was away for a moment: a part of what is kept was just being read."""
    monkeypatch.setattr("destrier.packing.held._PART_DOCUMENTS", 2)
    documents = [[1, 2, 3], [4, 5], [6], [7, 3], [6, 7, 8], [9, 10, 11]]
    path = write(tmp_path / "t.lance", documents)
    reader, blocks = reader_of(path, tolerant=tolerant, block_size=3)
    reader.keep()
    addresses = blocks.rows(0, 0, shuffle=False).offsets(np.arange(blocks.count))
    line = list(itertools.chain(*documents))
    expected = [line[at : at + 3] for at in range(0, 12, 3)]
    assert reader.read(addresses).batch.to_pylist() == [{"input_ids": ids} for ids in expected]

    away = [True]
    take = Reader.read

    def read(of: Reader, offsets: Any) -> Any:
        rows = take(of, offsets)
        if not away or len(offsets) > 2:
            return rows
        error = ReadError("away", offset=int(offsets[0]), column="tokens")
        if not of.tolerant:
            away.clear()
            raise error
        rows.errors = {0: error}
        rows.index = np.array([-1, 1])
        return rows

    monkeypatch.setattr(Reader, "read", read)
    if tolerant:
        for _ in range(4):
            reader.read(addresses)
        away.clear()
    else:
        with pytest.raises(ReadError, match="away"):
            reader.read(addresses)
    for _ in range(8):
        rows = reader.read(addresses)
        assert not rows.errors
        assert rows.batch.to_pylist() == [{"input_ids": ids} for ids in expected]
    if not tolerant:
        before = reader.counts.stage("read").rows
        reader.read(addresses)
        assert reader.counts.stage("read").rows == before, "all parts are kept by now"


def test_parallel_columns_are_cut_alike(tmp_path: Path):
    weights = [[t / 4 for t in d] for d in DOCUMENTS]
    marks = [[t % 3 == 0 for t in d] for d in DOCUMENTS]
    path = write(
        tmp_path / "t.lance",
        DOCUMENTS,
        weights=pa.array(weights, pa.large_list(pa.float32())),
        marks=pa.array(marks),
    )
    reader, blocks = reader_of(
        path,
        block_size=9,
        how="best_fit",
        pad_id=9999,
        window=30,
        eos_id=5000,
        parallel=["weights", "marks"],
    )
    batch = reader.read(np.arange(blocks.count)).batch
    ids, weight, mark = (batch.column(name).to_pylist() for name in reader.columns)
    assert [t for block in ids for t in block].count(5000) == sum(len(d) > 0 for d in DOCUMENTS)
    for block in range(len(ids)):
        for token, w, m in zip(ids[block], weight[block], mark[block], strict=True):
            added = token in (5000, 9999)
            assert (w, m) == ((0.0, False) if added else (token / 4, token % 3 == 0))


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path):
    path = write(tmp_path / "t.lance", DOCUMENTS, marks=pa.array(DOCUMENTS))
    options = {"block_size": 9, "documents": True, "parallel": ["marks"]}
    reader, _ = reader_of(path, ["cu_seqlens", "input_ids"], **options)
    assert reader._reader.columns == ["tokens"]
    assert reader.read(np.array([0])).batch.schema.names == ["cu_seqlens", "input_ids"]


BAD = {
    "negative": ([7, -3], "has the token -3 at place 1, which is negative"),
    "large": ([1, 2, 1 << 40], "has the token 1099511627776 at place 2, which is beyond dtype"),
    "pad": ([1, 0, 2], "has the token 0 at place 1, which is pad_id"),
    "null": ([1, None], "has a null at place 1"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("how", ["concatenate", "best_fit"])
def test_what_is_no_token_is_an_error_of_its_row(tmp_path: Path, kind: str, how: str):
    if kind == "pad" and how == "concatenate":
        return
    document, words = BAD[kind]
    documents = [[1, 2, 3], [4, 5], [], document, [6, 7, 8]]
    path = write(tmp_path / "t.lance", documents, kind=pa.list_(pa.int64()))
    options: dict[str, Any] = {"block_size": 4, "dtype": "int32", "labels": True}
    if how == "best_fit":
        options |= {"how": how, "pad_id": 0, "window": 10}
    reader, blocks = reader_of(path, **options)
    addresses = blocks.rows(0, 0, shuffle=False).offsets(np.arange(blocks.count))
    with pytest.raises(ReadError, match=f"'tokens' of row 3 .*{words}") as caught:
        reader.read(addresses)
    assert (caught.value.offset, caught.value.column) == (3, "tokens")

    reader, blocks = reader_of(path, tolerant=True, **options)
    rows = reader.read(addresses)
    touched = {
        b
        for b, pieces in enumerate(pieces_of(blocks, addresses.tolist(), ahead=1))
        if 3 in [piece[0] for piece in pieces]
    }
    assert set(rows.errors) == touched
    assert rows.index is not None
    assert rows.index.tolist() == [-1 if b in touched else b for b in range(blocks.count)]


def test_counts_that_disagree_with_the_lists(tmp_path: Path):
    path = write(tmp_path / "t.lance", [[1, 2], [3, 4, 5], [6]], tokens_count=pa.array([2, 2, 1]))
    reader, _ = reader_of(path, block_size=2)
    with pytest.raises(ReadError, match=r"row 1 .*has 3 tokens, but 'tokens_count'.* say 2"):
        reader.read(np.array([0, 2]))


def test_parallel_lists_of_another_length(tmp_path: Path):
    marks = pa.array([[0, 1], [1], [0]])
    path = write(tmp_path / "t.lance", [[1, 2], [3, 4], [6]], marks=marks)
    reader, _ = reader_of(path, block_size=2, parallel=["marks"])
    with pytest.raises(ReadError, match=r"'marks' of row 1 .*has 1 values, but 'tokens' has 2"):
        reader.read(np.array([0, 2]))


def test_parallel_columns_that_cannot_be_cut(tmp_path: Path):
    more = {"text": pa.array(["a", "b"]), "labels": pa.array([[1, 2], [1]])}
    path = write(tmp_path / "t.lance", [[1, 2], [3]], **more)
    with pytest.raises(ColumnError, match=r"'text' .*parallel columns are lists of numbers"):
        reader_of(path, block_size=2, parallel=["text"])
    with pytest.raises(ColumnError, match="a block gets a column 'labels'"):
        reader_of(path, block_size=2, labels=True, parallel=["labels"])
