"""LitData datasets that are damaged, hostile, or of a kind that litdata no longer writes."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from destrier import ArgumentError, ColumnError, SchemaError, SourceError
from destrier.files import Store
from destrier.formats.litdata import LitDataSink, detect, open_source, samples
from destrier.formats.litdata.chunk import Rows
from destrier.formats.litdata.nested import decode_nested, encode_nested
from destrier.formats.litdata.reading import Dataset

LEAF = {"type": None, "context": None, "children_spec": []}
ZSTD = {"compression": "zstd"}


def spec(*names: Any, kind: str = "builtins.dict", context: Any = ...) -> str:
    keys = json.dumps(names) if context is ... else context
    node = {"type": kind, "context": keys, "children_spec": [LEAF for _ in names]}
    return json.dumps([1, node])


def item(*leaves: bytes) -> bytes:
    return struct.pack(f"<{len(leaves)}I", *map(len, leaves)) + b"".join(leaves)


def classic(items: list[bytes]) -> bytes:
    header = 4 + 4 * (len(items) + 1)
    offsets = np.cumsum([header, *map(len, items)], dtype="<u4")
    return struct.pack("<I", len(items)) + offsets.tobytes() + b"".join(items)


def dataset(
    folder: Path, chunks: list[bytes], formats: list[str], text: str | None, **more: Any
) -> Path:
    """Write chunks and an index; ``rows`` and ``config`` and ``entry`` override what it says."""
    folder.mkdir(exist_ok=True)
    entries = []
    for number, chunk in enumerate(chunks):
        (folder / f"c{number}.bin").write_bytes(chunk)
        rows = more.get("rows", int.from_bytes(chunk[:4], "little"))
        entry = {"chunk_bytes": len(chunk), "chunk_size": rows, "filename": f"c{number}.bin"}
        entries.append({**entry, **more.get("entry", {})})
    config = {"data_format": formats, "data_spec": text, **more.get("config", {})}
    index = {"chunks": entries, "config": {"item_loader": "PyTreeLoader", **config}}
    (folder / "index.json").write_text(json.dumps({**index, **more.get("index", {})}))
    return folder


def pairs(folder: Path, rows: int = 4, **more: Any) -> Path:
    """A dataset of a number and a text."""
    items = [item(struct.pack("<q", i), f"t{i}".encode()) for i in range(rows)]
    return dataset(folder, [classic(items)], ["int", "str"], spec("n", "t"), **more)


SHAPED = pa.struct([("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.int64()))])


def rows_of(folder: Path, **options: Any) -> list[dict[str, Any]]:
    source = open_source(Store(folder), **options)
    return [
        row
        for unit in source.units()
        for batch in source.read(unit, source.schema)
        for row in batch.to_pylist()
    ]


def change(folder: Path, position: int, data: bytes, file: str = "c0.bin") -> None:
    held = bytearray((folder / file).read_bytes())
    held[position : position + len(data)] = data
    (folder / file).write_bytes(held)


def edit_index(folder: Path, function: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    function(index)
    (folder / "index.json").write_text(json.dumps(index))


def test_old_indexes_are_read(tmp_path: Path) -> None:
    """Without what came later, and with lengths that leave out the header."""
    folder = pairs(tmp_path / "d")

    def old(index: Any) -> None:
        del index["config"]["item_loader"]
        index["chunks"][0]["chunk_bytes"] -= 4 * (4 + 2)

    edit_index(folder, old)
    assert rows_of(folder) == [{"n": i, "t": f"t{i}"} for i in range(4)]
    documents = classic([np.arange(n, dtype=np.int32).tobytes() for n in (2, 3)])
    dataset(tmp_path / "t", [documents], ["no_header_tensor:16"], json.dumps([1, LEAF]))
    edit_index(tmp_path / "t", lambda index: index["config"].pop("item_loader"))
    assert rows_of(tmp_path / "t") == [{"tokens": [0, 1]}, {"tokens": [0, 1, 2]}]


def test_a_cut_chunk_names_the_file(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d")
    data = (folder / "c0.bin").read_bytes()
    (folder / "c0.bin").write_bytes(data[:-3])
    with pytest.raises(SourceError, match=r"c0\.bin: has 93 bytes, but the index lists 96") as e:
        rows_of(folder)
    assert str(e.value.file).endswith("c0.bin")
    edit_index(folder, lambda index: index["chunks"][0].update(chunk_bytes=93))
    with pytest.raises(SourceError, match=r"row 3: its samples end at 96, but the chunk at 93"):
        rows_of(folder)
    (folder / "c0.bin").write_bytes(data[:10])
    edit_index(folder, lambda index: index["chunks"][0].update(chunk_bytes=10))
    with pytest.raises(SourceError, match="too few for the offsets of 4 samples: it is cut off"):
        rows_of(folder)


@pytest.mark.parametrize(
    ("position", "data", "message"),
    [
        (0, struct.pack("<I", 5), "holds 5 samples, but the index lists 4"),
        (4, struct.pack("<I", 20), "its first sample begins at 20 instead of 24"),
        (8, struct.pack("<I", 70), "row 1: its offsets are out of order: 70 before"),
        (20, struct.pack("<I", 4_000_000), "row 3: its samples end at 4,000,000"),
        (24, struct.pack("<I", 9), "row 0: a sample has 18 bytes, but its 2 values 19"),
        (24, struct.pack("<II", 6, 4), "row 0, column 'n': has 6 bytes, a value of int has 8"),
        (40, b"\xff", "row 0, column 't': is not UTF-8"),
    ],
)
def test_flipped_headers(position: int, data: bytes, message: str, tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d", rows=4)
    (folder / "c0.bin").write_bytes((folder / "c0.bin").read_bytes())
    change(folder, position, data)
    with pytest.raises(SourceError, match=message):
        rows_of(folder)


def test_missing_repeated_and_empty_chunks(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d")
    edit_index(folder, lambda index: index["chunks"].append(index["chunks"][0]))
    with pytest.raises(SourceError, match=r"lists 'c0\.bin' twice"):
        rows_of(folder)
    pairs(folder)
    empty = {"chunk_size": 0, "chunk_bytes": 8, "filename": "e.bin"}
    (folder / "e.bin").write_bytes(classic([]))
    edit_index(folder, lambda index: index["chunks"].insert(0, empty))
    assert len(rows_of(folder)) == 4
    edit_index(folder, lambda index: index["chunks"].pop())
    with pytest.raises(SourceError, match="lists no samples"):
        rows_of(folder)
    (pairs(folder) / "c0.bin").unlink()
    with pytest.raises(SourceError, match=r"lists 'c0\.bin', but there is no such file"):
        rows_of(folder)
    edit_index(folder, lambda i: i["chunks"][0].update(filename="c0.zstd.bin"))
    edit_index(folder, lambda i: i["config"].update(compression="zstd"))
    (folder / "c0.bin").write_bytes(b"")
    with pytest.raises(SourceError, match="litdata inflated the files when it read them"):
        rows_of(folder)


@pytest.mark.parametrize(
    "name", ["../c0.bin", "/etc/passwd", "a/../../b", "..", "", "a\\b", "s3://x/y", "a//b", 7]
)
def test_names_that_lead_out_of_the_folder(name: Any, tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d", entry={"filename": name})
    with pytest.raises(SourceError, match="is not a name below the dataset's folder"):
        rows_of(folder)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"entry": {"chunk_size": -1}}, "chunk 0: its chunk_size is -1"),
        ({"entry": {"chunk_bytes": "many"}}, "chunk 0: its chunk_bytes is 'many'"),
        ({"index": {"chunks": [None]}}, "chunk 0: is None, not an object"),
        ({"index": {"chunks": {}}}, "lacks the lists of chunks"),
        ({"index": {"config": None}}, "lacks the lists of chunks"),
        ({"config": {"data_format": ["int"]}}, "data_spec has 2 leaves, but data_format names 1"),
        ({"config": {"data_format": "int"}}, "has data_format 'int'"),
        ({"config": {"compression": "lz4"}}, "has compression 'lz4'"),
        ({"config": {"compression_level": 4}}, "has compression_level 4"),
        ({"config": {"item_loader": "MyLoader"}}, "the item loader 'MyLoader' is not one of"),
        ({"config": {"encryption": {"algorithm": "rot13", "level": "chunk"}}}, "with 'rot13'"),
        ({"config": {"data_format": ["int", "mine:x"]}}, "'t' is written by the serializer 'mine"),
        ({"index": {"shards": []}}, "is the index of an MDS dataset"),
    ],
)
def test_indexes_that_are_damaged(more: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        rows_of(pairs(tmp_path / "d", **more))


def test_an_unknown_serializer_can_be_left_out(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d", config={"data_format": ["int", "mine:x"]})
    assert rows_of(folder, columns=["n"]) == [{"n": i} for i in range(4)]


def test_detection(tmp_path: Path) -> None:
    assert detect(Store(pairs(tmp_path / "d")))
    assert not detect(Store(pairs(tmp_path / "m", index={"shards": []})))
    (tmp_path / "d" / "index.json").write_text("{")
    assert not detect(Store(tmp_path / "d"))
    with pytest.raises(SourceError, match=r"index\.json is not JSON"):
        rows_of(tmp_path / "d")
    (tmp_path / "d" / "index.json").unlink()
    assert not detect(Store(tmp_path / "d"))
    with pytest.raises(SourceError, match="it is not a LitData dataset"):
        rows_of(tmp_path / "d")


def test_partial_indexes_must_agree(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d")
    (folder / "index.json").rename(folder / "0.index.json")
    pairs(folder, config={"data_format": ["int", "bytes"]})
    (folder / "index.json").rename(folder / "1.index.json")
    with pytest.raises(SourceError, match=r"1\.index\.json describes samples of another kind"):
        rows_of(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[2, null]", "not of the one known protocol"),
        (json.dumps([1, 5]), "data_spec is damaged"),
        (spec("n", "t", kind="builtins.set"), "of type 'builtins.set', which is not known"),
        (spec("n", "t", context=json.dumps(["n"])), "2 values with the keys"),
        (spec("n", "t", context=json.dumps(["n", "n"])), "2 values with the keys"),
        (spec("n", "t", context=json.dumps([1, "1"])), "2 values with the keys"),
        (spec("n", "t", context="7"), "a dict with the keys '7'"),
        (spec("n", "t", kind="collections.defaultdict", context=None), "a dict with the keys"),
        (json.dumps([1, {**LEAF, "children_spec": [LEAF]}]), "a leaf with children"),
        ('[1, {"children_spec": [' * 40 + "]}" * 40 + "]", "is not JSON"),
    ],
)
def test_specifications_that_are_damaged(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        rows_of(pairs(tmp_path / "d", config={"data_spec": text}))


def test_nothing_that_a_specification_names_is_imported(tmp_path: Path) -> None:
    context = {
        "default_factory_module": "antigravity",
        "default_factory_name": "fly",
        "dict_context": ["n", "t"],
    }
    text = spec("n", "t", kind="collections.defaultdict", context=context)
    assert len(rows_of(pairs(tmp_path / "d", config={"data_spec": text}))) == 4
    assert "antigravity" not in sys.modules
    named = spec("n", "t", kind="collections.namedtuple", context="os.system")
    assert rows_of(pairs(tmp_path / "e", config={"data_spec": named}))[1] == {"0": 1, "1": "t1"}


def test_names_that_a_table_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ColumnError, match=r"a column named 'a\.b'"):
        rows_of(pairs(tmp_path / "d", config={"data_spec": spec("a.b", "t")}))


def one_leaf(folder: Path, encoding: str, *leaves: bytes, **more: Any) -> Path:
    return dataset(folder, [classic([item(leaf) for leaf in leaves])], [encoding], None, **more)


def header(order: str, *numbers: int) -> bytes:
    return struct.pack(f"{order}{len(numbers)}I", *numbers)


@pytest.mark.parametrize(
    ("encoding", "leaf", "message"),
    [
        ("numpy", b"1234567", "too few for an array's dtype and shape"),
        ("numpy", header("<", 99, 1, 1), "is an array of the unknown dtype 99"),
        ("numpy", header("<", 9, 1 << 30), "claims an array of 1,073,741,824 dimensions"),
        ("numpy", header("<", 9, 2, 1 << 31, 1 << 31), r"0 bytes are not an array of float32"),
        ("numpy", header("<", 9, 2, 0, 1 << 31), "beyond what a list holds"),
        ("tensor", header(">", 10, 0) + b"12", "bfloat16, which Arrow does not have"),
        ("no_header_numpy:9", b"12345", "5 bytes are no array of float32"),
        ("no_header_tensor:x", b"", "is an array of the unknown dtype -1"),
        ("bool", b"12", "has 2 bytes, a value of bool has 1"),
        ("pil", b"12", "too few for an image's size and mode"),
        ("pil", header("<", 1, 1, 9), "claims a mode of 9 letters"),
        ("jpeg_array", header("<", 1 << 31), "claims 2,147,483,648 images"),
        ("jpeg_array", header("<", 1, 5) + b"four", "its images have 5"),
        ("json", b"\x05\xff\xff\xff\xff", "is no JSON leaf"),
        ("json", b"\x02\x09\x00\x00\x00", "claims 77"),
        ("json", b"\x0c", "has the unknown tag 12"),
        ("json", b"\x0b\x0b", "ends at 1 of 2 bytes"),
        ("json", b"{", "row 1"),
    ],
)
def test_leaves_that_are_damaged(encoding: str, leaf: bytes, message: str, tmp_path: Path) -> None:
    good = {"numpy": header("<", 9, 0) + bytes(4), "tensor": header(">", 1, 0) + bytes(4)}
    good |= {"pil": header("<", 0, 0, 0), "jpeg_array": header("<", 0), "bool": b"1"}
    folder = one_leaf(tmp_path / "d", encoding, good.get(encoding, b""), leaf)
    if encoding == "json":
        folder = one_leaf(tmp_path / "d", encoding, b"[]", leaf)
    with pytest.raises(SourceError, match=message):
        rows_of(folder)


def test_an_array_of_another_dtype_is_not_cast(tmp_path: Path) -> None:
    leaves = [header("<", dtype, 1, 1) + bytes(8) for dtype in (10, 3)]
    with pytest.raises(SchemaError, match=r"row 1, column 'value': is an array of int64.*float64"):
        rows_of(one_leaf(tmp_path / "d", "numpy", *leaves))


def test_json_leaves() -> None:
    record = struct.pack("<BII", 6, 1, 2) + b"\x01\0\0\0a" + b"\x01\0\0\0b"
    record += b"\x11\x01\0\0\0x" + b"\x12" + struct.pack("<q", 5)
    assert decode_nested(record) == [{"a": "x", "b": 5}]
    assert decode_nested(b'{"a": [1, null]}') == {"a": [1, None]}
    for value in (
        *(None, True, "ß", -5, 1.5, [], ["a", ""], [1, 2], [0.5], [True, False], {}),
        {"a": [1, "x", None, {"b": [[]]}], "c": {"d": None}},
    ):
        assert decode_nested(encode_nested(value)) == value
    with pytest.raises(ValueError, match="Out of range float"):
        encode_nested([1, float("nan"), "x"])


def frames(text: bytes, **change: Any) -> bytes:
    """One frame around two texts."""
    packed = pa.Codec("zstd").compress(text, asbytes=True)
    told = {"version": 1, "flags": 0, "rows": 2, "count": 1, "first": 0, "n": 2, **change}
    told = {"plain": len(text), "packed": len(packed), "at": 24 + 12 + 24, **told}
    head = struct.pack(
        *("<8sHHIII", b"LDFZ01\0\0", told["version"], told["flags"], told["rows"], 256),
        told["count"],
    )
    table = struct.pack(
        *("<IIQII", told["first"], told["n"], told["at"], told["packed"], told["plain"])
    )
    return head + header("<", 0, len(text) // 2, len(text)) + table + packed


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"version": 2}, "is of version 2 with flags 0"),
        ({"rows": 3}, "holds 3 samples, but the index lists 2"),
        ({"first": 1}, "its frames do not hold every sample once"),
        ({"n": 1}, "its frames do not hold every sample once"),
        ({"plain": 1 << 31}, "its frames and its offsets disagree"),
        ({"at": 1 << 40}, "a frame lies outside of it"),
        ({"packed": 1 << 31}, "a frame ends beyond it"),
        ({"packed": 9}, "row 0: zstd data are damaged"),
        ({"at": 61, "packed": 12}, "row 0: no zstd data where it should begin"),
    ],
)
def test_frames_that_are_damaged(told: Any, message: str, tmp_path: Path) -> None:
    plain = item(b"ab") + item(b"cd")
    config = {"config": {**ZSTD, "compression_level": "batch"}, "rows": 2}
    dataset(tmp_path / "d", [frames(plain)], ["str"], None, **config)
    assert rows_of(tmp_path / "d") == [{"value": "ab"}, {"value": "cd"}]
    dataset(tmp_path / "d", [frames(plain, **told)], ["str"], None, **config)
    with pytest.raises(SourceError, match=message):
        rows_of(tmp_path / "d")
    dataset(tmp_path / "d", [classic([plain, plain])], ["str"], None, **config)
    with pytest.raises(SourceError, match="does not begin as a chunk compressed in frames"):
        rows_of(tmp_path / "d")


def streamed(data: bytes) -> bytes:
    """A frame that does not tell its size."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def test_zstd_of_unknown_size_is_bounded(tmp_path: Path) -> None:
    items = [item(f"t{i}".encode()) for i in range(3)]
    config = {**ZSTD, "compression_level": "sample"}
    chunk = classic([streamed(each) for each in items])
    dataset(tmp_path / "s", [chunk], ["str"], None, config=config)
    assert rows_of(tmp_path / "s") == [{"value": f"t{i}"} for i in range(3)]

    whole = {"config": ZSTD, "rows": 3, "entry": {"chunk_bytes": len(classic(items))}}
    dataset(tmp_path / "w", [streamed(classic(items))], ["str"], None, **whole)
    assert rows_of(tmp_path / "w") == [{"value": f"t{i}"} for i in range(3)]
    for bomb in (streamed(bytes(1 << 24)), pa.Codec("zstd").compress(bytes(1 << 24), asbytes=True)):
        dataset(tmp_path / "w", [bomb], ["str"], None, **whole)
        with pytest.raises(SourceError, match=r"inflate to more|claim to be"):
            rows_of(tmp_path / "w")


def test_a_damaged_sample_names_its_row(tmp_path: Path) -> None:
    codec = pa.Codec("zstd")
    packed = [codec.compress(item(b"text " * 20), asbytes=True) for _ in range(3)]
    packed[1] = packed[1][:-2] + b"\0\0"
    config = {**ZSTD, "compression_level": "sample"}
    dataset(tmp_path / "d", [classic(packed)], ["str"], None, config=config)
    with pytest.raises(SourceError, match="zstd data are damaged") as caught:
        rows_of(tmp_path / "d")
    assert caught.value.row == 1


def arrow(table: pa.Table, rows: int, size: int | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    ipc = sink.getvalue().to_pybytes()
    offsets = np.full(rows + 1, 8 + 4 * rows, "<u4").tobytes()
    told = len(ipc) if size is None else size
    return struct.pack("<I", rows) + offsets + ipc + struct.pack("<I8s", told, b"LDARW01\0")


def test_arrow_rows_that_are_damaged(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, None], "b": ["x", "ß", None]})
    folder = dataset(tmp_path / "d", [arrow(table, 3)], ["int", "str"], spec("a", "b"))
    assert rows_of(folder) == table.to_pylist()
    for chunk, message in (
        (arrow(table, 3, 1 << 30), "its Arrow rows claim 1,073,741,824 bytes"),
        (arrow(table, 2), "has 2 samples, but 3 Arrow rows"),
        (arrow(table, 3).replace(b"\xc3\x9f", b"\xc3\xc3"), "row 1, column 'b'"),
    ):
        dataset(folder, [chunk], ["int", "str"], spec("a", "b"))
        with pytest.raises(SourceError, match=message):
            rows_of(folder)
    odd = pa.table({"a": pa.array([1], pa.timestamp("s"))})
    with pytest.raises(SourceError, match="which LitData's rows cannot have"):
        rows_of(dataset(folder, [arrow(odd, 1)], ["int"], spec("a")))


def test_rows_of_arrow_among_classic_chunks(tmp_path: Path) -> None:
    items = [item(struct.pack("<q", i), b"x") for i in range(2)]
    chunks = [arrow(pa.table({"n": [7, None], "t": [None, None]}), 2), classic(items)]
    expected = [{"n": 7, "t": None}, {"n": None, "t": None}, {"n": 0, "t": "x"}, {"n": 1, "t": "x"}]
    assert rows_of(dataset(tmp_path / "a", chunks, ["int", "str"], spec("n", "t"))) == expected
    chunks.reverse()
    assert rows_of(dataset(tmp_path / "b", chunks, ["int", "str"], spec("n", "t"))) == [
        *expected[2:],
        *expected[:2],
    ]
    chunks[1] = arrow(pa.table({"n": [7], "t": ["x"], "late": [1]}), 1)
    with pytest.raises(SchemaError, match="columns that the first chunk lacks: late"):
        rows_of(dataset(tmp_path / "b", chunks, ["int", "str"], spec("n", "t")))


def keys(folder: Path, **columns: Any) -> Path:
    (folder / "keys").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "keys" / "shard-00000.parquet")
    return folder


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": ["a", "b", "a", "c"], "index": [0, 1, 2, 3]}, "has the key 'a' twice"),
        ({"key": ["a", "b", "c", "d"], "index": [0, 1, 1, 3]}, "not belong one to one"),
        ({"key": ["a", "b", "c"], "index": [0, 1, 2]}, "has 3 keys that do not belong"),
        ({"key": ["a", "b", "c", "d"], "index": [1, 2, 3, 4]}, "not belong one to one"),
        ({"key": ["a", None, "c", "d"], "index": [0, 1, 2, 3]}, "has a null among its keys"),
        ({"key": [0.5, 1, 2, 3], "index": [0, 1, 2, 3]}, "has keys of type double"),
        ({"key": ["a", "b", "c", "d"]}, "lacks the columns key and index"),
        (
            {"key": [1, 2, 3, 4], "index": [0, 1, 2, 3], "chunk_index": [0, 0, 1, 1]},
            "in other chunks than the index lists",
        ),
    ],
)
def test_keys_that_do_not_fit(columns: Any, message: str, tmp_path: Path) -> None:
    folder = keys(pairs(tmp_path / "d"), **columns)
    with pytest.raises(SourceError, match=message):
        rows_of(folder)
    assert len(rows_of(folder, key_column=None)) == 4


def test_keys_of_unfinished_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    for rank in (0, 1):
        pairs(folder, rows=2)
        (folder / "c0.bin").rename(folder / f"r{rank}.bin")
        edit_index(folder, lambda i, rank=rank: i["chunks"][0].update(filename=f"r{rank}.bin"))
        (folder / "index.json").rename(folder / f"{rank}.index.json")
        table = pa.table({"key": [f"{rank}b", f"{rank}a"], "index": [1, 0]})
        pq.write_table(table, folder / f"{rank}.keys.parquet")
    assert [row["key"] for row in rows_of(folder)] == ["0a", "0b", "1a", "1b"]


def test_tokens_that_disagree_with_the_index(tmp_path: Path) -> None:
    chunk = classic([np.arange(n, dtype=np.int32).tobytes() for n in (2, 3)])
    loader = {"config": {"item_loader": "TokensLoader"}}

    def tokens(chunk: bytes, encoding: str = "no_header_tensor:16", **entry: Any) -> Path:
        text = json.dumps([1, LEAF])
        return dataset(tmp_path / "t", [chunk], [encoding], text, entry=entry, **loader)

    assert rows_of(tokens(chunk, dim=5), block_size=2) == [{"tokens": [0, 1]}, {"tokens": [0, 1]}]
    with pytest.raises(SourceError, match="the index lists 6 tokens"):
        rows_of(tokens(chunk, dim=6))
    with pytest.raises(SourceError, match="does not list its tokens"):
        rows_of(tokens(chunk), block_size=2)
    with pytest.raises(SourceError, match="row 0, column 'tokens': 3 bytes are no array of int32"):
        rows_of(tokens(classic([b"abc", b"d"])))
    with pytest.raises(SourceError, match=r"tokens of dtype 10 \(bfloat16\)"):
        rows_of(tokens(chunk, "no_header_tensor:10"))
    with pytest.raises(ArgumentError, match="block_size must be a positive integer"):
        rows_of(tokens(chunk, dim=5), block_size=0)


def test_temporal_arrays_that_are_damaged(tmp_path: Path) -> None:
    record = struct.pack("<I", 2) + np.arange(2, dtype="<f4").tobytes()
    field = {"dtype": "<f4", "shape": [], "tensor": False}
    schema = {"version": 1, "fields": {"f": field}, "field_order": ["f"], "groups": [["f"]]}

    def temporal(schema: Any, record: bytes, **entry: Any) -> Path:
        config = {"item_loader": "TemporalArrayLoader", "temporal_schema": schema}
        chunk = classic([record])
        folder = tmp_path / "t"
        return dataset(folder, [chunk], ["bytes"], None, config=config, entry=entry)

    source = open_source(Store(temporal(schema, record)))
    assert source.schema.field("f").type == pa.fixed_shape_tensor(pa.float32(), (2,))
    for wrong, message in (
        ({**schema, "version": 2}, "version 2 is not known"),
        ({**schema, "groups": [["f"], ["f"]]}, "do not hold each field once"),
        ({**schema, "fields": {}}, "temporal_schema is damaged"),
        ({**schema, "fields": {"f": {**field, "dtype": "O"}}}, "is of dtype 'O'"),
        ({**schema, "fields": {"f": {**field, "shape": [1 << 40]}}}, "temporal_schema is damaged"),
        (None, "temporal_schema is damaged"),
    ):
        with pytest.raises(SourceError, match=message):
            rows_of(temporal(wrong, record))
    with pytest.raises(SourceError, match="does not hold 2 frames of 4"):
        rows_of(temporal(schema, record + b"more"))
    with pytest.raises(SourceError, match="not those that the index lists"):
        rows_of(temporal(schema, record, temporal_frames=[3]))


# ---- exports --------------------------------------------------------------------------------


def test_columns_that_litdata_cannot_hold_are_named() -> None:
    schema = pa.schema(
        [
            ("ok", pa.int64()),
            ("when", pa.timestamp("s")),
            ("map", pa.map_(pa.string(), pa.int64())),
            ("blobs", pa.list_(pa.large_binary())),
        ]
    )
    with pytest.raises(ColumnError, match=r"'when'.*'map'.*'blobs'") as caught:
        LitDataSink().check(schema)
    assert "'ok'" not in str(caught.value)
    with pytest.raises(ColumnError, match="JSON cannot hold large_binary"):
        LitDataSink(json=["b"]).check(pa.schema([("b", pa.large_binary())]))
    tokens = pa.schema([("t", pa.list_(pa.int32())), ("x", pa.int64())])
    with pytest.raises(ColumnError, match=r"has also 'x': pass columns=\['t'\]"):
        LitDataSink(tokens="t").check(tokens)
    with pytest.raises(ColumnError, match="not a column of lists of numbers"):
        LitDataSink(tokens="t").check(pa.schema([("t", pa.string())]))
    with pytest.raises(ArgumentError, match="chunk_bytes must be below 4 GiB"):
        LitDataSink(chunk_bytes=1 << 32)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([1, None]), "^column 'c' is null"),
        (pa.array([[1], [None]]), "^column 'c' .*has a null in its list"),
        (pa.array([1, 1 << 63], pa.uint64()), "^column 'c' .*beyond 64 signed bits"),
        (pa.array([{"a": 1}, None]), "^column 'c' .*is null"),
        (pa.array([{"a": 1}, {"a": None}]), "^column 'c' .*is null"),
        (pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)), "^column 'c' .*has a null in its"),
        (
            pa.array([[[1], [2]], [[3], None]], pa.list_(pa.list_(pa.int8(), 1), 2)),
            "^column 'c' .*a nu",
        ),
        (pa.array([{"shape": s, "values": [1]} for s in ([1], [2])], SHAPED), "the shape .2."),
        (pa.array([{"shape": s, "values": [1]} for s in ([1], None)], SHAPED), "a part that is nu"),
        (pa.array([[[1.0]], [[float("nan")]]]), "^column 'c' .*cannot be a JSON leaf"),
    ],
)
def test_values_that_litdata_cannot_hold(array: pa.Array, message: str, tmp_path: Path) -> None:
    batch = pa.record_batch({"c": array})
    with pytest.raises(SourceError, match=message) as caught:
        LitDataSink().write(Store(tmp_path), 3, iter([batch]))
    assert caught.value.row == 1


def test_what_is_exported_is_read_back(tmp_path: Path) -> None:
    """Types that did not come from LitData."""
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8.0).reshape(2, 2, 2))
    batch = pa.record_batch(
        {
            "small": pa.array([1, 2], pa.uint8()),
            "half": pa.array(np.array([0.5, 2], np.float16)),
            "text": pa.array(["a", "ß"], pa.large_string()),
            "raw": pa.array([b"a", b""], pa.binary()),
            "tensor": tensor,
            "words": pa.array([["a"], []]),
            "numbers": pa.array([[1], []], pa.list_(pa.uint32())),
            "struct": pa.array([{"x": 1, "y": {"z": "a"}}, {"x": 2, "y": {"z": "b"}}]),
            "nothing": pa.nulls(2),
            "lists": pa.array([[[1], []], [[2], [3]]], pa.list_(pa.list_(pa.int8()), 2)),
        }
    )
    sink = LitDataSink()
    halves = [batch.slice(0, 1), batch.slice(1)]
    infos = [sink.write(Store(tmp_path), number, iter(halves)) for number in (0, 1)]
    sink.finish(Store(tmp_path), infos)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("chunk-0-0.bin", "chunk-1-0.bin", "index.json"),
    ]
    source = open_source(Store(tmp_path), ragged=["numbers"])
    assert source.schema.field("tensor").type == tensor.type
    assert source.schema.field("struct").type == batch.schema.field("struct").type
    rows = rows_of(tmp_path, ragged=["numbers"])
    assert rows[:2] == rows[2:]
    wanted = batch.to_pylist()
    for row, expected in zip(rows, wanted, strict=False):
        expected["half"] = float(expected["half"])
        expected["words"] = json.dumps(expected["words"])
        expected["nothing"] = "null"
        expected["lists"] = json.dumps(expected["lists"], separators=(",", ":"))
        assert {**row, "tensor": None} == {**expected, "tensor": None}


def test_rows_know_their_file_and_their_number_in_it(tmp_path: Path) -> None:
    items = [item(struct.pack("<q", i), b"t") for i in range(3)]
    folder = dataset(tmp_path / "d", [classic(items)] * 2, ["int", "str"], spec("n", "t"))
    source = open_source(Store(folder))
    assert [unit.name for unit in source.units()] == [str(folder / f"c{n}.bin") for n in (0, 1)]
    files, rows = source.origins(source.units()[1], 1, 2)
    assert files.to_pylist() == [str(folder / "c1.bin")] * 2
    assert rows.to_pylist() == [1, 2]


def test_a_worker_is_given_the_keys_of_its_chunks_only(tmp_path: Path) -> None:
    items = [item(struct.pack("<q", i), b"t") for i in range(100)]
    folder = dataset(tmp_path / "d", [classic(items)] * 20, ["int", "str"], spec("n", "t"))
    names = [f"{i:099d}x" for i in range(2000)]
    keys(folder, key=names[::-1], index=list(range(2000))[::-1])
    source = open_source(Store(folder))
    worker = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 20_000
    found = []
    for unit in source.units():
        sent = pickle.dumps(unit)
        assert len(sent) < 20_000
        for batch in worker.read(pickle.loads(sent), source.schema):
            found += batch["key"].to_pylist()
    assert found == names


def test_few_large_chunks_are_opened_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks that are compressed as a whole, which an opening inflates."""
    monkeypatch.setattr(samples, "_MOST_HELD", 3000)
    opening = most = 0
    lock = threading.Lock()
    real = Dataset.body

    def body(self: Dataset, chunk: Any) -> Any:
        nonlocal opening, most
        with lock:
            opening += 1
            most = max(most, opening)
        time.sleep(0.01)
        try:
            return real(self, chunk)
        finally:
            with lock:
                opening -= 1

    monkeypatch.setattr(Dataset, "body", body)
    plain = [arrow(pa.table({"n": np.arange(i, i + 20)}), 20) for i in range(12)]
    folder = dataset(
        tmp_path / "d",
        [pa.compress(chunk, "zstd", asbytes=True) for chunk in plain],
        ["int"],
        spec("n"),
        rows=20,
        entry={"chunk_bytes": max(map(len, plain))},
        config=ZSTD,
    )
    source = open_source(Store(folder))
    assert 1 <= most <= 3000 // len(plain[0])
    assert source.schema.names == ["n"]


def test_an_opening_reads_of_rows_no_more_than_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [arrow(pa.table({"n": np.arange(100_000) + i}), 100_000) for i in range(3)]
    folder = dataset(tmp_path / "d", chunks, ["int"], spec("n"))
    sizes: list[int] = []
    real = Rows.read

    def read(self: Rows, most: int | None = None) -> pa.Buffer:
        found = real(self, most)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(Rows, "read", read)
    source = open_source(Store(folder))
    assert len(sizes) == 3
    assert max(sizes) <= 65_536 < min(map(len, chunks))
    assert sum(batch.num_rows for u in source.units() for batch in source.read(u, None)) == 300_000


def test_a_chunk_that_only_the_index_calls_empty_is_refused(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "d")
    (folder / "e.bin").write_bytes((folder / "c0.bin").read_bytes())
    size = (folder / "e.bin").stat().st_size
    entry = {"chunk_size": 0, "chunk_bytes": size, "filename": "e.bin"}
    edit_index(folder, lambda index: index["chunks"].append(entry))
    with pytest.raises(SourceError, match=r"e\.bin.*holds 4 samples, but the index lists 0"):
        open_source(Store(folder))


def test_tokens_that_the_index_does_not_count_are_refused(tmp_path: Path) -> None:
    chunk = classic([np.arange(4, dtype="<u2").tobytes()] * 2)
    folder = dataset(tmp_path / "d", [chunk, chunk], ["no_header_numpy:4"], None)
    edit_index(folder, lambda index: index["config"].update(item_loader="TokensLoader"))
    for dim, rows in ((8, 0), (0, 2), (0, 0)):
        edit_index(folder, lambda i, d=dim, r=rows: i["chunks"][1].update(dim=d, chunk_size=r))
        edit_index(folder, lambda index: index["chunks"][0].update(dim=8))
        with pytest.raises(SourceError, match=r"c1\.bin.*but the index lists 0"):
            open_source(Store(folder), block_size=2)


def test_images_and_booleans_of_other_bytes_are_refused(tmp_path: Path) -> None:
    def image(data: bytes) -> bytes:
        return item(struct.pack("<3I", 2, 1, 3) + b"RGB" + data)

    folder = dataset(tmp_path / "i", [classic([image(b"123456")])], ["pil"], spec("x"))
    assert rows_of(folder)[0]["x"]["data"] == b"123456"
    folder = dataset(tmp_path / "i", [classic([image(b"12345")])], ["pil"], spec("x"))
    with pytest.raises(SourceError, match=r"row 0.*has 5 bytes of pixels, but 2 x 1 of mode RGB"):
        rows_of(folder)
    folder = dataset(tmp_path / "b", [classic([item(b"\1"), item(b"\2")])], ["bool"], spec("x"))
    with pytest.raises(SourceError, match=r"row 1.*is the byte 2, which is no bool"):
        rows_of(folder)
