"""MDS without its library: damage, what is refused, and what we write ourselves."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierError,
    SchemaError,
    SourceError,
)
from destrier.files import Store
from destrier.formats import mds
from destrier.formats.mds import MdsSink, detect, open_source

WIDTHS = {"int": 8, "uint8": 1, "int32": 4, "ndarray:int16:2": 4}


def pack(rows: list[list[bytes]], encodings: list[str], config: bytes) -> bytes:
    """Build a shard by hand."""
    bodies = []
    for row in rows:
        sizes = [len(v) for v, e in zip(row, encodings, strict=True) if e not in WIDTHS]
        bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(row))
    at = 4 + 4 * (len(rows) + 1) + len(config)
    offsets = [at]
    for body in bodies:
        offsets.append(offsets[-1] + len(body))
    head = struct.pack(f"<{len(offsets) + 1}I", len(rows), *offsets)
    return head + config + b"".join(bodies)


def record(columns: dict[str, str]) -> dict[str, Any]:
    names = sorted(columns)
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": 1 << 26,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [WIDTHS.get(columns[name]) for name in names],
    }


def write_mds(root: Path, columns: dict[str, str], shards: list[list[dict[str, bytes]]]) -> Path:
    """Write a dataset of encoded values by hand."""
    root.mkdir(parents=True, exist_ok=True)
    records = []
    config = record(columns)
    text = json.dumps(config, sort_keys=True).encode()
    for number, rows in enumerate(shards):
        values = [[row[name] for name in config["column_names"]] for row in rows]
        data = pack(values, config["column_encodings"], text)
        name = f"shard.{number:05}.mds"
        (root / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        records.append({**config, "samples": len(rows), "raw_data": raw, "zip_data": None})
    save_index(root, records)
    return root


def save_index(root: Path, records: list[dict[str, Any]], version: Any = 2) -> None:
    (root / "index.json").write_text(json.dumps({"version": version, "shards": records}))


def load_index(root: Path) -> list[dict[str, Any]]:
    return json.loads((root / "index.json").read_text())["shards"]


def text_row(i: int) -> dict[str, bytes]:
    return {"id": struct.pack("<q", i), "text": f"row {i}".encode(), "data": bytes(i)}


TEXT = {"id": "int", "text": "str", "data": "bytes"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_mds(
        tmp_path / "plain", TEXT, [[text_row(i) for i in range(s, s + 5)] for s in (0, 5, 10)]
    )


def read(path: Path | str, **options: Any) -> pa.Table:
    source = open_source(Store(path), **options)
    batches = [b for unit in source.units() for b in source.read(unit, source.schema)]
    table = pa.Table.from_batches(batches, source.schema)
    table.validate(full=True)
    return table


def one(tmp_path: Path, encoding: str, *values: bytes, **options: Any) -> list[Any]:
    root = write_mds(tmp_path / "one", {"x": encoding}, [[{"x": value} for value in values]])
    return read(root, **options)["x"].to_pylist()


def test_a_dataset(plain: Path) -> None:
    assert detect(Store(plain))
    table = read(plain)
    assert table.column_names == ["data", "id", "text"]
    assert table["id"].to_pylist() == list(range(15))
    assert table["text"].to_pylist() == [f"row {i}" for i in range(15)]
    assert table["data"].to_pylist() == [bytes(i) for i in range(15)]


def test_a_source_reaches_workers(plain: Path) -> None:
    source = open_source(Store(plain))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.digest() == source.digest()
    assert copy.digest() != open_source(Store(plain), columns=["id"]).digest()
    unit = pickle.loads(pickle.dumps(source.units()[1]))
    assert next(iter(copy.read(unit, source.schema)))["id"].to_pylist() == [5, 6, 7, 8, 9]


def test_columns(plain: Path) -> None:
    assert read(plain, columns=["text", "id"]).column_names == ["text", "id"]
    with pytest.raises(ColumnError, match=r"'label'.*data, id, text"):
        open_source(Store(plain), columns=["label"])
    with pytest.raises(ColumnError, match="'id' twice"):
        open_source(Store(plain), columns=["id", "id"])


@pytest.mark.parametrize(
    "options",
    [
        {"bad_utf8": "ignore"},
        {"ragged": "x"},
        {"ragged": ["id"]},
        {"raw_arrays": ["absent"]},
        {"decimals": "int32"},
        {"decimals": {"id": "int64"}},
        {"decimals": {"price": "int64"}},
    ],
    ids=str,
)
def test_options_that_cannot_be_used(plain: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        open_source(Store(plain), **options)


def test_what_is_no_mds(tmp_path: Path) -> None:
    assert not detect(Store(tmp_path))
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {}}')
    assert not detect(Store(tmp_path))
    (tmp_path / "index.json").unlink()
    with pytest.raises(ArgumentError, match="neither"):
        open_source(Store(tmp_path))


# Damage


def cut(data: bytearray, at: int) -> None:
    del data[at:]


def put(data: bytearray, at: int, value: int) -> None:
    data[at : at + 4] = struct.pack("<I", value)


def damaged(plain: Path, change: Callable[[bytearray], Any], *, rebuilt: bool = False) -> str:
    """The error of a dataset whose second shard is changed, with an index that has its size."""
    path = plain / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    records = load_index(plain)
    records[1]["raw_data"]["bytes"] = len(data)
    save_index(plain, records)
    if rebuilt:
        (plain / "index.json").unlink()
    with pytest.raises(SourceError) as caught:
        read(plain)
    assert "shard.00001.mds" in str(caught.value)
    assert caught.value.file is not None
    return str(caught.value)


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: cut(d, 3), "too few for a shard"),
        (lambda d: cut(d, 0), "too few for a shard"),
        (lambda d: cut(d, 11), "do not hold so many offsets"),
        (lambda d: cut(d, 40), "ends at byte"),
        (lambda d: cut(d, len(d) - 1), "ends at byte"),
        (lambda d: d.append(0), "ends at byte"),
        (lambda d: put(d, 0, 0xFFFFFFFF), "do not hold so many offsets"),
        (lambda d: put(d, 0, 4), "ends at byte"),
        (lambda d: put(d, 12, 0xFFFFFFF0), "row 2 .*out of order"),
        (lambda d: put(d, 12, 5), "row 1 .*out of order"),
        (lambda d: put(d, 4, 9), "inside the table"),
    ],
)
def test_damaged_tables(
    plain: Path, change: Callable[[bytearray], Any], problem: str, rebuilt: bool
) -> None:
    assert re.search(problem, damaged(plain, change, rebuilt=rebuilt))


def test_damaged_rows(plain: Path) -> None:
    data = (plain / "shard.00001.mds").read_bytes()
    row = struct.unpack_from("<I", data, 12)[0]
    error = damaged(plain, lambda d: put(d, row, 0xFFFFFFFF))
    assert "row 2 of" in error
    assert "add up to 4,294," in error


def test_a_moved_offset(plain: Path) -> None:
    at = struct.unpack_from("<I", (plain / "shard.00001.mds").read_bytes(), 12)[0]
    assert "row 1 of" in damaged(plain, lambda d: put(d, 12, at + 1))


def test_a_shard_of_other_columns_than_the_index_says(plain: Path) -> None:
    def rename(data: bytearray) -> None:
        at = data.index(b'"text"')
        data[at : at + 6] = b'"next"'

    error = damaged(plain, rename)
    assert "'next'" in error
    assert "'text'" in error


def test_a_damaged_self_description(plain: Path) -> None:
    def spoil(data: bytearray) -> None:
        data[data.index(b'{"column')] = 0xFF

    assert "no JSON" in damaged(plain, spoil)


# The index


def changed(plain: Path, change: Callable[[list[dict[str, Any]]], Any]) -> SourceError:
    records = load_index(plain)
    change(records)
    save_index(plain, records)
    with pytest.raises(SourceError) as caught:
        read(plain)
    return caught.value


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r[1].update(samples=6), "5 rows, but the index says 6"),
        (lambda r: r[1].update(samples=-1), "samples = -1"),
        (lambda r: r[1].update(samples="5"), 'samples = "5"'),
        (lambda r: r[1]["raw_data"].update(bytes=7), "bytes, but .*says 7"),
        (lambda r: r[1]["raw_data"].update(bytes=5 << 30), "5,368,709,120 bytes.*smaller shards"),
        (lambda r: r[1]["raw_data"].update(basename="../shard.mds"), "leads out of"),
        (lambda r: r[1]["raw_data"].update(basename="/etc/passwd"), "leads out of"),
        (lambda r: r[1]["raw_data"].update(basename="a/../../x"), "leads out of"),
        (lambda r: r[1]["raw_data"].update(basename="shard.00009.mds"), "shard.00009.mds is not"),
        (lambda r: r[1]["raw_data"].update(basename=""), "basename"),
        (lambda r: r[1].update(raw_data=None), "raw_data"),
        (lambda r: r.append(r[0]), "lists shard.00000.mds twice, as shard 0 and as shard 3"),
        (lambda r: r[1].update(version=1), "shard 1 has version 1"),
        (lambda r: r[1].update(format="parquet"), '"parquet"'),
        (lambda r: r[1].update(column_sizes=[None, 8]), "other length"),
        (lambda r: r[1].update(column_sizes=[None, True, None]), "column_sizes"),
        (lambda r: r[1].update(column_names=["id", "id", "text"]), "two columns 'id'"),
        (lambda r: [x.update(column_sizes=[None, 4, None]) for x in r], "4 for the size"),
        (lambda r: r[1].update(compression="lzma", zip_data={}), '"lzma"'),
        (
            lambda r: r[2].update(column_encodings=["bytes", "int", "json"]),
            r"00002.mds has .*'text' \(json\).*00000.mds has .*'text' \(str\)",
        ),
        (lambda r: r.clear(), "no shards"),
        (lambda r: r.insert(0, 7), "no object but 7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_index_that_is_wrong(plain: Path, change: Callable[..., Any], problem: str) -> None:
    error = changed(plain, change)
    assert re.search(problem, str(error)), str(error)


@pytest.mark.parametrize("version", [1, 3, "2", None])
def test_other_versions(plain: Path, version: Any) -> None:
    save_index(plain, load_index(plain), version)
    with pytest.raises(SourceError, match="only version 2"):
        read(plain)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff"])
def test_an_index_that_is_no_json(plain: Path, text: str) -> None:
    (plain / "index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=r"index.json"):
        read(plain)


def test_a_missing_shard(plain: Path) -> None:
    (plain / "shard.00001.mds").unlink()
    with pytest.raises(SourceError, match=r"shard.00001.mds is not there, but .*index.json"):
        open_source(Store(plain))


def test_columns_that_only_some_shards_have(tmp_path: Path) -> None:
    wide = write_mds(tmp_path / "wide", TEXT, [[text_row(i) for i in range(3)]])
    narrow = {"id": "int", "extra": "bytes"}
    write_mds(wide / "part", narrow, [[{"id": struct.pack("<q", 9), "extra": b"xx"}]])
    records = load_index(wide) + load_index(wide / "part")
    records[1]["raw_data"]["basename"] = "part/shard.00000.mds"
    save_index(wide, records)
    with pytest.raises(SourceError, match=r"part/shard.00000.mds has .*'extra'.*columns="):
        read(wide)
    assert read(wide, columns=["id"])["id"].to_pylist() == [0, 1, 2, 9]


def test_an_unknown_encoding_can_be_left_out(tmp_path: Path) -> None:
    root = write_mds(
        tmp_path / "odd", {"a": "int", "b": "my_codec"}, [[{"a": bytes(8), "b": b"z"}]]
    )
    with pytest.raises(SourceError, match=r"'b' of .*'my_codec'.*columns="):
        open_source(Store(root))
    assert read(root, columns=["a"])["a"].to_pylist() == [0]


@pytest.mark.parametrize(
    "encoding", ["ndarray:bool", "ndarray::2,3", "ndarray:int8:0", "ndarray:int8:-1,-1", "int:8"]
)
def test_encodings_that_are_none(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(SourceError, match="not one of MDS"):
        one(tmp_path, encoding, b"12")


# Folders


def test_an_index_speaks_for_all_below_it(plain: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    plain.rename(root / "b")
    write_mds(root / "b" / "deep", TEXT, [[text_row(99)]])
    write_mds(root / "a2", TEXT, [[text_row(50)]])
    write_mds(root / "a10", TEXT, [[text_row(51)]])
    (root / "a10" / "index.json").unlink()
    assert detect(Store(root))
    assert read(root)["id"].to_pylist() == [50, 51, *range(15)]


def test_splits_are_not_mixed(tmp_path: Path) -> None:
    write_mds(tmp_path / "train", TEXT, [[text_row(1)]])
    write_mds(tmp_path / "val", TEXT, [[text_row(2)]])
    with pytest.raises(ArgumentError, match=r"splits train, val; .*/train"):
        open_source(Store(tmp_path))
    assert read(tmp_path / "val")["id"].to_pylist() == [2]


def test_shards_of_no_rows(tmp_path: Path) -> None:
    columns = {"id": "int", "any": "ndarray", "list": "ndarray:int8"}
    root = write_mds(tmp_path / "none", columns, [[], []])
    table = read(root)
    assert table.num_rows == 0
    assert pa.types.is_struct(table.schema.field("any").type)


def test_a_store_that_is_not_local(plain: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in plain.iterdir():
        memory.pipe(f"/mds-test/{path.name}", path.read_bytes())
    try:
        assert detect(Store("memory://mds-test"))
        assert read("memory://mds-test").equals(read(plain))
        memory.rm("/mds-test/index.json")
        assert read("memory://mds-test").equals(read(plain))
    finally:
        memory.rm("/mds-test", recursive=True)


# Values


@pytest.mark.parametrize(
    ("encoding", "value", "problem"),
    [
        ("pil", b"\0" * 11, "head of an image"),
        ("pil", struct.pack("<3I", 1, 1, 9) + b"RGB123", "mode of an image"),
        ("pil", struct.pack("<3I", 2, 1, 3) + b"RGB123", "2 x 1 of mode RGB take 6"),
        ("pil", struct.pack("<3I", 1 << 31, 1 << 31, 1) + b"L1", "of mode L take"),
        ("pil", struct.pack("<3I", 1, 1, 1) + b"\xff1", "not UTF-8"),
        ("list[jpeg]", b"\0" * 7, "head of a list"),
        ("list[jpeg]", struct.pack("<2I", 1, 0), "reserved"),
        ("list[jpeg]", struct.pack("<2I", 0, 0xFFFFFFFF), "sizes of its items"),
        ("list[jpeg]", struct.pack("<3I", 0, 1, 5) + b"1234", "its 1 items take 17"),
        ("list[pil]", struct.pack("<3I", 0, 1, 4) + b"1234", "head of an image"),
        ("jpeg_array", struct.pack("<2I", 1, 5) + b"123456", "its 1 items take 13"),
        ("ndarray", b"\x08", "head of an array"),
        ("ndarray", b"\x63\x041", "dtype number 99"),
        ("ndarray", b"\x08\x07\x01", "shape of an array"),
        ("ndarray", b"\x08\x04\x02" + b"1", "its shape takes 2"),
        ("ndarray:int16", b"\x04\x01" + b"123", "its shape takes 2"),
        ("ndarray:int8", bytes([2 << 2 | 3]) + struct.pack("<2Q", 1 << 40, 1), "too large"),
        ("ndarray:int8", bytes([2 << 2 | 2]) + struct.pack("<2I", 1 << 30, 1 << 30), "its shape"),
        ("ndarray:int8", bytes([63 << 2]) + b"\xff" * 63, "its shape takes"),
        ("str", b"ab\xffcd", "not UTF-8"),
        ("json", b"\xed\xa0\x80", "not UTF-8"),
        ("str_float", b"1.5x", "no number"),
    ],
)
def test_damaged_values(tmp_path: Path, encoding: str, value: bytes, problem: str) -> None:
    with pytest.raises(SourceError, match=rf"'x' of row 0 of .*{problem}"):
        one(tmp_path, encoding, value)


def test_numbers_are_read_as_python_reads_them(tmp_path: Path) -> None:
    texts = [b"0.1", b"1e-05", b"inf", b"-inf", b"nan", b"1_0.5", b" 2.5", b"-0.0"]
    found = one(tmp_path, "str_float", *texts)
    assert [repr(x) for x in found] == [repr(float(t)) for t in texts]


@pytest.mark.parametrize("text", [b"9223372036854775808", b"0x10", b"1.5", b""])
def test_integers_that_do_not_fit(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(SchemaError, match="row 1 of"):
        one(tmp_path, "str_int", b"7", text, decimals="int64")
    assert one(tmp_path, "str_int", b"7", text) == ["7", text.decode()]


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"1.005", b"1000000.00"])
def test_decimals_that_do_not_fit(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(SchemaError, match=r"row 1 of .*(no number|decimals=)"):
        one(tmp_path, "str_decimal", b"1.10", text, decimals="decimal(6, 2)")
    assert one(tmp_path, "str_decimal", b"1E+1", decimals="decimal(6, 2)") == [Decimal("10.00")]


def test_one_dimension_is_a_list_until_a_row_has_two(tmp_path: Path) -> None:
    flat, square = b"\x04\x02ab", b"\x08\x01\x02ab"
    assert one(tmp_path, "ndarray:int8", flat, flat) == [[97, 98]] * 2
    with pytest.raises(SchemaError, match=r"row 1 .*2 dimensions.*ragged=\[.x.\]"):
        one(tmp_path, "ndarray:int8", flat, square)
    assert one(tmp_path, "ndarray:int8", flat, square, ragged=["x"]) == [
        {"shape": [2], "values": [97, 98]},
        {"shape": [1, 2], "values": [97, 98]},
    ]


def test_a_pickle_that_lies_is_an_error(tmp_path: Path) -> None:
    good = pickle.dumps({"a": 1})
    with pytest.raises(SourceError, match=r"'x' of row 1 .*cannot be unpickled"):
        one(tmp_path, "pkl", good, b"\x80\x05broken", allow_pickle=True)
    with pytest.raises(SourceError, match="row 1 of"):
        one(tmp_path, "pkl", good, pickle.dumps("text"), allow_pickle=True)


def test_small_batches_hold_the_same(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(plain)
    monkeypatch.setattr(mds.source, "BATCH_BYTES", 160)
    source = open_source(Store(plain))
    batches = [b for unit in source.units() for b in source.read(unit, source.schema)]
    assert len(batches) > 5
    assert pa.Table.from_batches(batches).equals(whole)
    for batch in batches:
        assert batch.num_rows == 1 or batch.nbytes <= 160


def test_snappy_claims_are_not_believed(plain: Path) -> None:
    path = plain / "shard.00001.mds"
    (plain / "shard.00001.mds.snappy").write_bytes(b"\xff\xff\xff\xff\x0f" + bytes(20))
    path.unlink()
    (plain / "index.json").unlink()
    with pytest.raises(SourceError, match=r"00001.mds.snappy .*claims to inflate to 4,294,967,295"):
        read(plain)


def test_what_inflates_to_another_size(plain: Path) -> None:
    path = plain / "shard.00001.mds"
    squeezed = pa.compress(path.read_bytes(), "zstd", asbytes=True)
    path.unlink()
    (plain / "shard.00001.mds.zstd").write_bytes(squeezed)
    records = load_index(plain)
    zipped = {"basename": "shard.00001.mds.zstd", "bytes": len(squeezed), "hashes": {}}
    records[1].update(compression="zstd:3", zip_data=zipped)
    save_index(plain, records)
    assert read(plain)["id"].to_pylist() == list(range(15))
    for wrong in (records[1]["raw_data"]["bytes"] - 1, 1 << 30):
        records[1]["raw_data"]["bytes"] = wrong
        save_index(plain, records)
        with pytest.raises(SourceError, match=rf"00001.mds.zstd inflates to .*{wrong:,}"):
            read(plain)
    (plain / "shard.00001.mds.zstd").write_bytes(squeezed[:-9])
    records[1]["zip_data"]["bytes"] -= 9
    save_index(plain, records)
    with pytest.raises(SourceError, match=r"cannot inflate .*00001.mds.zstd"):
        read(plain)


# Text


def write_text(root: Path, rows: list[bytes], header: bytes = b"", **config: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    data = header + b"".join(rows)
    ends = np.cumsum([len(header), *map(len, rows)]).astype("<u4")
    settings = {"version": 2, "compression": None, "hashes": [], "size_limit": None, **config}
    meta = struct.pack("<I", len(rows)) + ends.tobytes() + json.dumps(settings).encode()
    (root / "shard.00000.x").write_bytes(data)
    (root / "shard.00000.x.meta").write_bytes(meta)
    record = {**settings, "samples": len(rows), "zip_data": None, "zip_meta": None}
    record["raw_data"] = {"basename": "shard.00000.x", "bytes": len(data), "hashes": {}}
    record["raw_meta"] = {"basename": "shard.00000.x.meta", "bytes": len(meta), "hashes": {}}
    save_index(root, [record])
    return root


def lines(root: Path, *rows: str, kind: str = "int", **options: Any) -> list[Any]:
    columns = {"a": kind, "b": "str"}
    encoded = [row.encode() + b"\n" for row in rows]
    write_text(root / "lines", encoded, format="json", columns=columns, newline="\n")
    return read(root / "lines", **options)["a"].to_pylist()


def test_json_lines(tmp_path: Path) -> None:
    assert lines(tmp_path, '{"a": 1, "b": "x"}', '{"b": "", "a": -2}') == [1, -2]
    assert lines(tmp_path, '{"a": 1.5, "b": "x"}', kind="float") == [1.5]


@pytest.mark.parametrize(
    "rows",
    [
        ('{"a": 1, "b": ""},{"a": 2', '"b": "x"}'),
        ('{"a": 1, "b": "', 'x"}'),
        ('{"a": 1, "b": "x"}]', '[{"a": 1, "b": "x"}'),
    ],
)
def test_rows_that_are_json_only_together(tmp_path: Path, rows: tuple[str, ...]) -> None:
    with pytest.raises(SourceError, match=r"row 0 .*no JSON"):
        lines(tmp_path, *rows)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"a": true, "b": ""}', "'a' of row 1 .*True, not of type int"),
        ('{"a": 1.0, "b": ""}', "'a' of row 1 .*1.0, not of type int"),
        ('{"a": null, "b": ""}', "'a' of row 1 .*None"),
        ('{"a": 1, "b": 2}', "'b' of row 1 .*2, not of type str"),
        ('{"a": 9223372036854775808, "b": ""}', "'a' of row 1 .*decimals="),
        ('{"a": 1}', "row 1 .*'a', not the columns a, b"),
        ('[["a", 1], ["b", ""]]', "row 1 .*not the columns"),
        ("{}", "row 1 .*not the columns"),
        ('{"a": 1, "b": "", "c": 3}', "row 1 .*'a, b, c', not the"),
        ('{"a": 1, "b": "", "a": 2}', "row 1 .*twice"),
        ("[1]", "row 1 .*not the columns"),
        ('{"a": 1, "b": ""', "row 1 .*no JSON"),
        ('{"a": ' + "[" * 100_000, "row 1 .*no JSON"),
        ('{"a": ' + "9" * 5000 + ', "b": ""}', "row 1 .*no JSON"),
        ('{"a": 1, "b": "\\ud800"}', "'b' of row 1 .*UTF-8"),
        ("", "row 1 .*no JSON"),
    ],
    ids=lambda value: value[:24],
)
def test_json_lines_that_are_wrong(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        lines(tmp_path, '{"a": 1, "b": ""}', row)


def test_large_integers_in_text(tmp_path: Path) -> None:
    row = '{"a": 9223372036854775808, "b": ""}'
    assert lines(tmp_path, row, decimals={"a": "text"}) == ["9223372036854775808"]
    assert lines(tmp_path, row, decimals="decimal(20, 0)") == [Decimal(2**63)]


def test_text_as_bytes(tmp_path: Path) -> None:
    row = '{"a": "\u00e9", "b": ""}'
    assert lines(tmp_path, row, kind="str", bad_utf8="binary") == ["é".encode()]


def separated(root: Path, *rows: bytes, header: bytes = b"a||b<>", **options: Any) -> pa.Table:
    write_text(
        root / "separated",
        list(rows),
        header,
        format="xsv",
        column_names=["a", "b"],
        column_encodings=["int", "str"],
        separator="||",
        newline="<>",
    )
    return read(root / "separated", **options)


def test_values_between_separators(tmp_path: Path) -> None:
    table = separated(tmp_path, b"1||x<>", b"-2||<>", "3||é|<>".encode())
    assert table.to_pydict() == {"a": [1, -2, 3], "b": ["x", "", "é|"]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"1<>", "row 1 .*has 1 values, not 2"),
        (b"1||2||3<>", "row 1 .*has 3 values, not 2"),
        (b"1||2", "row 1 .*does not end with '<>'"),
        (b"1", "row 1 .*does not end with '<>'"),
        (b"x||2<>", "'a' of row 1 .*'x', which is no number"),
        (b"1.0||2<>", "'a' of row 1 .*no number"),
        (b"1||\xff<>", "'b' of row 1 .*not UTF-8"),
    ],
)
def test_values_between_separators_that_are_wrong(tmp_path: Path, row: bytes, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        separated(tmp_path, b"1||x<>", row)


def test_bad_text_between_separators_as_bytes(tmp_path: Path) -> None:
    table = separated(tmp_path, b"1||\xff<>", bad_utf8="binary")
    assert table["b"].to_pylist() == [b"\xff"]


@pytest.mark.parametrize("header", [b"", b"b||a<>", b"a||b<", b"a||b<><>"])
def test_other_headers(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(SourceError, match="does not begin with"):
        separated(tmp_path, b"1||x<>", header=header)


def test_offsets_of_text_that_leave_its_file(tmp_path: Path) -> None:
    separated(tmp_path, b"1||x<>", b"2||y<>")
    root = tmp_path / "separated"
    meta = bytearray((root / "shard.00000.x.meta").read_bytes())
    put(meta, 12, 0x7FFFFFFF)
    (root / "shard.00000.x.meta").write_bytes(meta)
    with pytest.raises(SourceError, match="ends at byte 2,147,483,647, but the file at 18"):
        read(root)


# Export


def export(to: Path, *batches: pa.RecordBatch) -> Path:
    sink = pickle.loads(pickle.dumps(MdsSink()))
    sink.check(batches[0].schema)
    store = Store(to)
    infos = [sink.write(store, number, iter([batch])) for number, batch in enumerate(batches)]
    assert not (to / "index.json").exists()
    sink.finish(store, json.loads(json.dumps(infos)))
    return to


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize(
    "field",
    [
        pa.field("bad", pa.bool_()),
        pa.field("bad", pa.timestamp("us")),
        pa.field("bad", pa.list_(pa.string())),
        pa.field("bad", pa.list_(pa.large_binary())),
        pa.field("bad", pa.struct([("a", pa.int32())])),
        pa.field("bad", pa.dictionary(pa.int32(), pa.string())),
        pa.field("bad", pa.null()),
        pa.field("bad", pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[1, 0])),
    ],
    ids=lambda field: str(field.type),
)
def test_types_that_mds_cannot_hold(field: pa.Field) -> None:
    with pytest.raises(ColumnError, match="'bad'"):
        MdsSink().check(pa.schema([("good", pa.int8()), field]))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (pa.array([1, None]), r"^column 'x' is null.*x IS NOT NULL"),
        (pa.array([[1], []]), r"^column 'x' .*shape \[0\]"),
        (pa.array([[1], [2, None]]), "^column 'x' .*null among"),
        (pa.array([[[1], [2]]] * 2, pa.list_(pa.list_(pa.int8(), 1), 2)), "cannot hold"),
        (
            pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)),
            "^column 'x' .*null among",
        ),
        (
            pa.array(
                [{"shape": [2, 2], "values": [1.0]}],
                pa.struct([("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))]),
            ),
            r"^column 'x' .*1 values, but the shape \[2, 2\]",
        ),
        (
            pa.array(
                [{"dtype": "bool", "shape": [1], "values": b"1"}],
                pa.struct(
                    [
                        ("dtype", pa.string()),
                        ("shape", pa.list_(pa.int32())),
                        ("values", pa.large_binary()),
                    ]
                ),
            ),
            "^column 'x' .*dtype 'bool'",
        ),
    ],
    ids=lambda value: str(getattr(value, "type", ""))[:30],
)
def test_values_that_mds_cannot_hold(tmp_path: Path, values: pa.Array, problem: str) -> None:
    with pytest.raises(DestrierError, match=problem) as caught:
        export(tmp_path / "out", batch(x=values))
    if isinstance(caught.value, SourceError):
        assert caught.value.row == len(values) - 1
    assert not (tmp_path / "out" / "index.json").exists()


def test_ranges_become_shards_and_large_ones_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = [
        batch(id=list(range(n, n + 7)), data=[bytes(i) for i in range(7)]) for n in (0, 7, 14)
    ]
    one = export(tmp_path / "one", *ranges)
    assert len(load_index(one)) == 3
    monkeypatch.setattr(mds.export, "_SHARD_BYTES", 60)
    several = export(tmp_path / "several", *ranges)
    names = [record["raw_data"]["basename"] for record in load_index(several)]
    assert len(names) > 6
    assert names[0] == "shard.00000.mds"
    assert sorted(names) == sorted(p.name for p in several.glob("*.mds"))
    assert read(several).equals(read(one))
    assert read(one)["id"].to_pylist() == list(range(21))


def test_a_row_that_no_shard_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds.export, "LIMIT", 500)
    monkeypatch.setattr(mds.export, "_SHARD_BYTES", 100)
    with pytest.raises(SourceError, match="it takes"):
        export(tmp_path / "out", batch(data=[b"1", bytes(450)]))


def test_slices_and_empty_batches(tmp_path: Path) -> None:
    whole = batch(
        a=pa.array([[1], [2, 3], [4], [5, 6, 7]]),
        b=pa.array(["x", "yy", "", "z"]),
        c=pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int16(), 2)),
        d=pa.array([1.5, 2.5, 3.5, 4.5], pa.float16()),
    )
    out = export(tmp_path / "out", whole.slice(1, 2), whole.slice(0, 0), whole.slice(3))
    expected = whole.slice(1).to_pydict()
    found = read(out).to_pydict()
    found["c"] = [list(value) for value in found["c"]]
    assert found == expected


@pytest.mark.parametrize("key", ["content_type", "content-type"])
def test_images_are_exported_as_images(key: str) -> None:
    kinds = {"image/jpeg": "jpeg", "image/png": "png", "image/webp": "bytes"}
    for content_type, encoding in kinds.items():
        field = pa.field("x", pa.binary(), metadata={key: content_type})
        assert mds.export.exported(field).name == encoding


def test_a_column_that_changed_its_type_is_exported_by_it() -> None:
    field = pa.field("x", pa.int32(), metadata={"destrier:encoding": "mds:str"})
    assert mds.export.exported(field).name == "int32"


def test_lance_keeps_what_is_read(tmp_path: Path) -> None:
    columns = {
        "any": "ndarray",
        "flat": "ndarray:uint16",
        "image": "pil",
        "images": "list[pil]",
        "jpegs": "jpeg_array",
        "json": "json",
        "price": "str_decimal",
        "pair": "ndarray:int16:2",
        "small": "uint8",
    }
    image = struct.pack("<3I", 2, 1, 1) + b"Lab"
    row = {
        "any": bytes([66, 2 << 2, 1, 2]) + struct.pack("<2d", 1, 2),
        "flat": b"\x04\x02abcd",
        "image": image,
        "images": struct.pack("<4I", 0, 2, len(image), len(image)) + image * 2,
        "jpegs": struct.pack("<2I", 1, 4) + b"\xff\xd8\xff\xe0",
        "json": b'{"b":  1, "a": NaN}',
        "price": b"1.10",
        "pair": b"abcd",
        "small": b"\xff",
    }
    root = write_mds(tmp_path / "all", columns, [[row, row]])
    table = read(root, decimals={"price": "decimal(50, 2)"})
    lance.write_dataset(table, str(tmp_path / "all.lance"))
    back = lance.dataset(str(tmp_path / "all.lance")).to_table()
    assert back.equals(table)
    assert back.schema.types == table.schema.types
    for batches in back.to_batches(), table.to_batches():
        again = export(tmp_path / f"again{len(list(tmp_path.iterdir()))}", *batches)
        assert load_index(again)[0]["column_encodings"] == load_index(root)[0]["column_encodings"]
        assert read(again, decimals={"price": "decimal(50, 2)"}).equals(table)


def test_rows_know_their_file_and_their_number_in_it(plain: Path) -> None:
    source = open_source(Store(plain))
    units = source.units()
    files, rows = source.origins(units[1], 1, 3)
    assert files.to_pylist() == [str(plain / "shard.00001.mds")] * 3
    assert rows.to_pylist() == [1, 2, 3]


def test_a_table_in_a_folder_of_shards_is_no_part_of_it(plain: Path) -> None:
    (plain / "index.json").unlink()
    before = read(plain)
    for name in ("t.lance/old.mds", "made/_versions/1.manifest", "made/data/x.mds"):
        (plain / name).parent.mkdir(parents=True, exist_ok=True)
        (plain / name).write_bytes(b"none of ours")
    assert read(plain).equals(before)


def test_pickles_of_two_types_name_the_file_and_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"shard.*columns=") as caught:
        one(tmp_path, "pkl", pickle.dumps(1), pickle.dumps("text"), allow_pickle=True)
    assert "schema=" not in str(caught.value)
    assert caught.value.file is not None
