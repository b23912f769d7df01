"""MDS against MosaicML Streaming itself: it writes what we read, and reads what we write."""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import destrier
from destrier import DestrierError
from destrier.errors import ArgumentError, MissingDependencyError, SchemaError, SourceError
from destrier.files import Store
from destrier.formats.mds import MdsSink, detect, open_source
from destrier.writing.source import LINK
from oracle import needs_peers, run_peer

pytestmark = needs_peers

COMPRESSIONS = ("none", "br", "bz2", "gz", "snappy", "zstd")

SHOW = '''
import json, sys, os, shutil, io, decimal, pathlib, types
import numpy as np
from PIL import Image

class Left(types.ModuleType):
    """What the package imports and this does not use: it takes longer than all the rest."""
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object

for name in ("streaming.multimodal", "streaming.text", "streaming.vision", "transformers",
             "transformers.feature_extraction_utils", "transformers.tokenization_utils_base"):
    sys.modules[name] = Left(name)

from streaming import MDSWriter, JSONWriter, CSVWriter, TSVWriter, XSVWriter, LocalDataset
from streaming.base.compression import decompress
from streaming.base.util import merge_index

def show(value, encoding):
    """A value with all that makes it what it is, as JSON."""
    if encoding == "json":
        return ["json", json.dumps(value)]
    if isinstance(value, list):
        return ["list", [show(item, encoding) for item in value]]
    if isinstance(value, Image.Image):
        if "pil" in encoding:
            return ["pil", value.mode, *value.size, value.tobytes().hex()]
        return ["image", value.fp.getvalue().hex()]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, np.generic):
        return ["scalar", str(value.dtype), value.tobytes().hex()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    return [type(value).__name__, repr(value) if isinstance(value, float) else str(value)]

def read(folder):
    dataset = LocalDataset(str(folder))
    shard = dataset.shards[0]
    if hasattr(shard, "columns"):
        encodings = shard.columns
    else:
        encodings = dict(zip(shard.column_names, shard.column_encodings))
    return [{k: show(v, encodings[k]) for k, v in dataset[i].items()} for i in range(len(dataset))]
'''

WRITE = (
    SHOW
    + '''
root = pathlib.Path(sys.argv[1])
rng = np.random.default_rng(7)
expected = {}

def inflated(folder):
    """A copy with the files that their reader would make of compressed ones."""
    copy = root / "inflated" / folder.name
    shutil.copytree(folder, copy)
    for shard in json.loads((copy / "index.json").read_text())["shards"]:
        for what in ("data", "meta"):
            if shard.get("zip_" + what):
                data = (copy / shard["zip_" + what]["basename"]).read_bytes()
                raw = decompress(shard["compression"], data)
                (copy / shard["raw_" + what]["basename"]).write_bytes(raw)
    return copy

def write(name, writer, columns, rows, **options):
    folder = root / name
    with writer(out=str(folder), columns=columns, **options) as out:
        for row in rows:
            out.write(row)
    if rows:
        expected[name] = read(inflated(folder))

def image(mode, width, height):
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "I": 4, "F": 4}[mode]
    return Image.frombytes(mode, (width, height), rng.bytes(width * height * channels))

def packed(kind, width=5):
    buffer = io.BytesIO()
    image("RGB", width, 4).save(buffer, kind)
    return buffer.getvalue()

dtypes = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
          "float16", "float32", "float64"]
columns = {
    "bytes": "bytes", "str": "str", "int": "int", "jpeg": "jpeg", "png": "png", "pil": "pil",
    "str_int": "str_int", "str_float": "str_float", "str_decimal": "str_decimal", "json": "json",
    "jpeg_array": "jpeg_array", "jpegarray": "jpegarray",
    "list_pil": "list[pil]", "list_jpeg": "list[jpeg]", "list_png": "list[png]",
    "any_array": "ndarray", "ragged": "ndarray:int16", "tokens": "ndarray:uint16",
    "fixed": "ndarray:float32:2,3", "flat": "ndarray:int64:4",
    **{d: d for d in dtypes}, **{"array_" + d: f"ndarray:{d}:2" for d in dtypes},
}

def number(dtype):
    return np.frombuffer(rng.bytes(8), dtype)[0]

def row(i):
    opened = [Image.open(io.BytesIO(packed("JPEG", 3 + j))) for j in range(i % 3)]
    sample = {
        "bytes": rng.bytes(i % 7), "str": "\\u00e9\\U0001f40e" * (i % 4),
        "int": (-1) ** i * 2 ** (3 * i),
        "jpeg": image("RGB", 6, 4), "png": image("RGBA", 3, 2),
        "pil": image(["L", "RGB", "RGBA", "I", "F"][i % 5], 1 + i % 3, 2),
        "str_int": (-1) ** i * 10 ** (4 * i),
        "str_float": [0.1, 1e300, float("inf"), -0.0, 1e-7][i % 5],
        "str_decimal": decimal.Decimal(["1.10", "-3", "1E+3", "0.000001", "12345.678901"][i % 5]),
        "json": [{"b": [1, None, 2.5], "a": "\\u00e9"}, [], "x", None, float("inf")][i % 5],
        "jpeg_array": [packed("JPEG", 3 + j) for j in range(1 + i % 3)],
        "jpegarray": [packed("JPEG", 2 + j) for j in range(1 + i % 2)],
        "list_pil": [image("L", 1 + j, 2) for j in range(i % 3)],
        "list_jpeg": opened, "list_png": [image("RGB", 2, 1 + j) for j in range(i % 2)],
        "any_array": rng.normal(size=[(2, 2), (1, 3, 1), (300, 1)][i % 3]).astype("float32"),
        "ragged": rng.integers(-9, 9, [(2, 2), (1, 3, 1), (5,)][i % 3], "int16"),
        "tokens": rng.integers(0, 9, 1 + i * 20, "uint16"),
        "fixed": rng.normal(size=(2, 3)).astype("float32"), "flat": rng.integers(0, 9, 4),
    }
    for dtype in dtypes:
        sample[dtype] = number(dtype)
        sample["array_" + dtype] = np.frombuffer(rng.bytes(16), dtype)[:2]
    return sample

rows = [row(i) for i in range(21)]
for compression in ("none", "br", "bz2", "gz", "snappy", "zstd"):
    level = {"none": None, "snappy": "snappy"}.get(compression, compression + ":1")
    write("every-" + compression, MDSWriter, columns, rows, compression=level, size_limit=12000,
          hashes=["sha1"])

text = [{"s": "\\u00e9" * (i % 3) + "x", "i": (-3) ** i, "f": [0.5, float("inf"), -1e-9][i % 3]}
        for i in range(30)]
kinds = {"s": "str", "i": "int", "f": "float"}
for compression in (None, "zstd"):
    end = "-" + str(compression).lower()
    options = {"compression": compression, "hashes": ["md5"], "size_limit": 300}
    write("json" + end, JSONWriter, kinds, text, **options)
    write("csv" + end, CSVWriter, kinds, text, **options)
    write("tsv" + end, TSVWriter, kinds, text, newline="\\r\\n", **options)
    write("xsv" + end, XSVWriter, kinds, text, separator="||", newline="<>", **options)

small = {"id": "int", "text": "str", "data": "bytes", "array": "ndarray:uint8", "n": "uint8"}
def little(i):
    return {"id": i, "text": str(i) * (i % 4), "data": rng.bytes(i % 5), "n": np.int8(-(i % 100)),
            "array": np.arange(1 + i % 3, dtype="uint8")}
for part in ("0", "1", "2", "10"):
    write("parts/" + part, MDSWriter, small, [little(i + 100 * int(part)) for i in range(9)],
          size_limit=400)
shutil.copytree(root / "parts", root / "merged")
merge_index(str(root / "merged"), keep_local=True)
expected["merged"] = read(root / "merged")

write("huge-first", MDSWriter, {"data": "bytes"}, [{"data": rng.bytes(n)} for n in (500, 3, 4)],
      size_limit=400)
write("no-rows", MDSWriter, {"data": "bytes"}, [])
write("hashed", MDSWriter, {"data": "bytes"}, [{"data": b"abc"}], hashes=["sha256", "xxh64"])
write("pickled", MDSWriter, {"value": "pkl", "id": "int"},
      [{"value": {"a": [i, i + 1], "b": str(i)}, "id": i} for i in range(5)])
write("lying", MDSWriter, {"image": "jpeg", "text": "str"},
      [{"image": packed("PNG"), "text": "fine"}])
with MDSWriter(out=str(root / "not-utf8"), columns={"text": "str", "n": "int"}) as out:
    out.write({"text": "fine", "n": 1})
    out.write({"text": b"\\xff\\xfe", "n": 2})
write("mixed", MDSWriter, {"array": "ndarray"},
      [{"array": np.ones((2,), d)} for d in ("float32", "int8")])
write("numbers", MDSWriter, {"i": "str_int", "d": "str_decimal"},
      [{"i": v, "d": decimal.Decimal(d)} for v, d in ((5, "1.50"), (-7, "20"), (2**62, "0.25"))])

(root / "expected.json").write_text(json.dumps(expected))
'''
)

READ = (
    SHOW
    + """
root = pathlib.Path(sys.argv[1])
found = {p.name: read(p) for p in sorted(root.iterdir())}
(root.parent / "found.json").write_text(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mds")
    run_peer(WRITE, root)
    return root


@pytest.fixture(scope="module")
def expected(made: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads((made / "expected.json").read_text())


def table_of(path: Path | str, **options: Any) -> pa.Table:
    source = open_source(Store(path), **options)
    batches = []
    for unit in source.units():
        of_unit = list(source.read(unit, source.schema))
        assert sum(batch.num_rows for batch in of_unit) == unit.rows
        batches.extend(of_unit)
    table = pa.Table.from_batches(batches, source.schema)
    table.validate(full=True)
    assert table.num_rows == source.total_rows
    return table


def show_values(kind: pa.DataType, shape: list[int], values: pa.Array) -> list[Any]:
    data = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    return ["array", str(np.dtype(kind.to_pandas_dtype())), shape, data.tobytes().hex()]


def show_array(value: pa.Scalar) -> list[Any]:
    if isinstance(value.type, pa.FixedShapeTensorType):
        return show_values(value.type.value_type, list(value.type.shape), value.value.values)
    if not pa.types.is_struct(value.type):
        return show_values(value.type.value_type, [len(value.values)], value.values)
    if "dtype" in value:
        item = value.as_py()
        return ["array", item["dtype"], item["shape"], item["values"].hex()]
    values = value["values"].values
    return show_values(values.type, value["shape"].as_py(), values)


def show_pil(item: dict[str, Any]) -> list[Any]:
    return ["pil", item["mode"], item["width"], item["height"], item["data"].hex()]


def show_image(item: bytes) -> list[Any]:
    return ["image", item.hex()]


def show_images(items: list[bytes]) -> list[Any]:
    return ["list", [show_image(item) for item in items]]


SHOWN = {
    "json": lambda text: ["json", json.dumps(json.loads(text))],
    "bytes": lambda value: ["bytes", value.hex()],
    "jpeg": show_image,
    "png": show_image,
    "pil": show_pil,
    "jpeg_array": show_images,
    "jpegarray": show_images,
    "list[jpeg]": show_images,
    "list[png]": show_images,
    "list[pil]": lambda items: ["list", [show_pil(item) for item in items]],
    "str_decimal": lambda value: ["Decimal", str(Decimal(value))],
    **dict.fromkeys(("int", "str_int", "text int"), lambda value: ["int", str(value)]),
    **dict.fromkeys(("str_float", "text float"), lambda value: ["float", repr(value)]),
    **dict.fromkeys(("str", "text str"), lambda value: ["str", value]),
}


def show(column: pa.ChunkedArray, encoding: str, index: int) -> list[Any]:
    """The same as the peer's, from Arrow."""
    if encoding.startswith("ndarray"):
        return show_array(column[index])
    if encoding in SHOWN:
        return SHOWN[encoding](column[index].as_py())
    return ["scalar", encoding, column.slice(index, 1).to_numpy().tobytes().hex()]


def rows_of(table: pa.Table, encodings: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {name: show(table[name], encodings[name], i) for name in table.column_names}
        for i in range(table.num_rows)
    ]


def encodings_of(root: Path) -> dict[str, str]:
    shard = json.loads((root / "index.json").read_text())["shards"][0]
    if "columns" in shard:
        return {k: f"text {v}" for k, v in shard["columns"].items()}
    prefix = "" if shard["format"] == "mds" else "text "
    return {
        k: prefix + v for k, v in zip(shard["column_names"], shard["column_encodings"], strict=True)
    }


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_encoding_is_read_as_they_read_it(
    made: Path, expected: dict[str, Any], compression: str
) -> None:
    name = f"every-{compression}"
    table = table_of(made / name, check_hashes=True)
    assert len(list((made / name).glob("shard.*"))) > 2
    found = rows_of(table, encodings_of(made / name))
    assert found == expected[name]


def test_types(made: Path) -> None:
    schema = open_source(Store(made / "every-none")).schema
    plain = {name: str(schema.field(name).type) for name in ("uint8", "float16", "int", "str")}
    assert plain == {"uint8": "uint8", "float16": "halffloat", "int": "int64", "str": "string"}
    assert schema.field("fixed").type == pa.fixed_shape_tensor(pa.float32(), (2, 3))
    assert schema.field("tokens").type == pa.list_(pa.uint16())
    assert schema.field("ragged").type == pa.struct(
        [("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.int16()))]
    )
    assert schema.field("jpeg").metadata[b"content_type"] == b"image/jpeg"
    assert schema.field("list_png").metadata[b"destrier:encoding"] == b"mds:list[png]"
    assert schema.field("json").type == pa.string()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("format", ["json", "csv", "tsv", "xsv"])
def test_text_shards(made: Path, expected: dict[str, Any], format: str, compression: str) -> None:
    name = f"{format}-{compression}"
    table = table_of(made / name, check_hashes=True)
    assert table.schema.types == [pa.float64(), pa.int64(), pa.string()]
    assert rows_of(table, encodings_of(made / name)) == expected[name]


def test_merged_parts_come_in_the_order_of_the_index(made: Path, expected: dict[str, Any]) -> None:
    table = table_of(made / "merged")
    assert rows_of(table, encodings_of(made / "merged")) == expected["merged"]


def test_parts_without_a_root_index_come_in_natural_order(
    made: Path, expected: dict[str, Any]
) -> None:
    assert detect(Store(made / "parts"))
    table = table_of(made / "parts")
    parts = [expected[f"parts/{part}"] for part in ("0", "1", "2", "10")]
    found = rows_of(table, encodings_of(made / "parts" / "0"))
    assert found == [row for part in parts for row in part]


@pytest.mark.parametrize("name", ["every-none", "every-snappy", "json-zstd", "xsv-none"])
def test_a_lost_index_is_rebuilt(
    made: Path, expected: dict[str, Any], tmp_path: Path, name: str
) -> None:
    copy = shutil.copytree(made / name, tmp_path / name)
    (copy / "index.json").unlink()
    assert detect(Store(copy))
    table = table_of(copy)
    assert rows_of(table, encodings_of(made / name)) == expected[name]
    assert table.schema.equals(table_of(made / name).schema, check_metadata=True)


def test_one_shard_and_an_index_can_be_named(made: Path, expected: dict[str, Any]) -> None:
    index = made / "every-none" / "index.json"
    first = made / "every-none" / "shard.00000.mds"
    assert detect(Store(index))
    assert detect(Store(first))
    assert table_of(index).num_rows == 21
    assert rows_of(table_of(first, columns=["id", "int"][1:]), {"int": "int"}) == [
        {"int": row["int"]} for row in expected["every-none"][: table_of(first).num_rows]
    ]


def test_a_shard_of_no_rows_before_a_huge_one(made: Path, expected: dict[str, Any]) -> None:
    counts = [u.rows for u in open_source(Store(made / "huge-first")).units()]
    assert counts[0] == 0
    table = table_of(made / "huge-first")
    assert rows_of(table, {"data": "bytes"}) == expected["huge-first"]


def test_a_dataset_of_no_shards_has_no_columns(made: Path) -> None:
    with pytest.raises(SourceError, match="no shards"):
        open_source(Store(made / "no-rows"))


def test_xxhash_is_asked_for_only_when_it_is_needed(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    assert table_of(made / "hashed")["data"].to_pylist() == [b"abc"]
    with pytest.raises(MissingDependencyError, match=r"pip install.*\[mds\]"):
        table_of(made / "hashed", check_hashes=True)


@pytest.mark.parametrize("name", ["every-none", "every-zstd", "csv-zstd"])
def test_hashes_are_checked_on_request(made: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(made / name, tmp_path / name)
    index = json.loads((copy / "index.json").read_text())
    piece = index["shards"][0]["raw_data"]
    algorithm = next(iter(piece["hashes"]))
    piece["hashes"][algorithm] = hashlib.new(algorithm, b"other").hexdigest()
    (copy / "index.json").write_text(json.dumps(index))
    table_of(copy)
    with pytest.raises(SourceError, match=rf"shard.00000.*{algorithm}.*index says"):
        table_of(copy, check_hashes=True)


def test_check_hashes_needs_hashes(made: Path) -> None:
    with pytest.raises(SourceError, match="no hash of"):
        open_source(Store(made / "merged"), check_hashes=True)


def test_pickles_need_permission(made: Path) -> None:
    with pytest.raises(ArgumentError, match="allow_pickle=True"):
        open_source(Store(made / "pickled"))
    assert table_of(made / "pickled", columns=["id"])["id"].to_pylist() == [0, 1, 2, 3, 4]
    table = table_of(made / "pickled", allow_pickle=True)
    assert table["value"].to_pylist() == [{"a": [i, i + 1], "b": str(i)} for i in range(5)]


def test_bytes_that_went_around_an_encoder(made: Path, expected: dict[str, Any]) -> None:
    table = table_of(made / "lying")
    assert rows_of(table, encodings_of(made / "lying")) == expected["lying"]
    with pytest.raises(SourceError, match=r"'text' of row 1 of .*shard.00000.mds is not UTF-8"):
        table_of(made / "not-utf8")
    table = table_of(made / "not-utf8", bad_utf8="binary")
    assert table["text"].to_pylist() == [b"fine", b"\xff\xfe"]
    assert table.schema.field("text").type == pa.large_binary()


def test_arrays_of_more_than_one_dtype(made: Path, expected: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"row 1 .*int8.*float32.*raw_arrays=\[.array.\]"):
        table_of(made / "mixed")
    table = table_of(made / "mixed", raw_arrays=True)
    assert rows_of(table, {"array": "ndarray"}) == expected["mixed"]


def test_structs_on_request(made: Path, expected: dict[str, Any]) -> None:
    table = table_of(made / "every-none", ragged=True, columns=["tokens", "any_array"])
    assert pa.types.is_struct(table.schema.field("tokens").type)
    assert rows_of(table, encodings_of(made / "every-none")) == [
        {"tokens": row["tokens"], "any_array": row["any_array"]} for row in expected["every-none"]
    ]


def test_unsigned_numbers_of_spark_can_be_read_as_signed(made: Path) -> None:
    plain = table_of(made / "parts" / "0", columns=["n"])["n"].to_pylist()
    signed = table_of(made / "parts" / "0", columns=["n"], signed=True)
    assert signed.schema.field("n").type == pa.int8()
    assert signed["n"].to_pylist() == [-i for i in range(9)]
    assert plain[1] == 255


def test_numbers_kept_as_text(made: Path) -> None:
    path = made / "numbers"
    assert table_of(path)["d"].to_pylist() == ["1.50", "20", "0.25"]
    table = table_of(path, decimals={"i": "int64", "d": "decimal(5, 2)"})
    assert table.schema.types == [pa.decimal128(5, 2), pa.int64()]
    assert table["i"].to_pylist() == [5, -7, 2**62]
    assert table["d"].to_pylist() == [Decimal("1.50"), Decimal("20.00"), Decimal("0.25")]
    with pytest.raises(SchemaError, match=r"'d' of row 2 .*0.25.*decimal128\(5, 1\)"):
        table_of(path, decimals={"d": "decimal(5, 1)"})
    with pytest.raises(SchemaError, match=r"'i' of row 2 .*4611686018427387904"):
        table_of(path, decimals={"i": "decimal(5, 0)"})
    with pytest.raises(ArgumentError, match="'float', which is not"):
        table_of(path, decimals={"i": "float"})


def test_links_are_the_places_of_the_bytes(made: Path, expected: dict[str, Any]) -> None:
    table = table_of(made / "every-none", columns=["jpeg", "png", "bytes", "int"], link=True)
    assert [table.schema.field(n).type for n in ("jpeg", "png")] == [LINK, LINK]
    assert table.schema.field("bytes").type == pa.large_binary()  # small ones are read
    assert table.schema.field("png").metadata[b"content_type"] == b"image/png"
    for row, link in zip(expected["every-none"], table["png"].to_pylist(), strict=True):
        path = Path(link["uri"].removeprefix("file://"))
        data = path.read_bytes()[link["position"] : link["position"] + link["size"]]
        assert ["image", data.hex()] == row["png"]
        assert link["file_size"] == path.stat().st_size
        assert link["file_stamp"] == path.stat().st_mtime_ns


@pytest.mark.parametrize(
    ("name", "problem"),
    [("every-zstd", "compressed"), ("json-none", "text"), ("parts", "no column")],
)
def test_what_cannot_be_linked(made: Path, name: str, problem: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{problem}.*convert"):
        open_source(Store(made / name), link=True)


def export(table: pa.Table, to: Path, ranges: int = 2) -> None:
    sink = MdsSink()
    sink.check(table.schema)
    size = -(-table.num_rows // ranges)
    store = Store(to)
    infos = [
        sink.write(store, n, iter(table.slice(n * size, size).to_batches(max_chunksize=4)))
        for n in range(ranges)
    ]
    sink.finish(store, json.loads(json.dumps(infos)))


def natural_table() -> pa.Table:
    """Columns that did not come from MDS."""
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2)).save(buffer, "JPEG")
    images = [buffer.getvalue()] * 4
    columns = {
        "a text": (pa.array(["x", "", "é", "z"], pa.large_string()), "str"),
        "bytes": (pa.array([b"", b"1", b"2", b"3"], pa.binary()), "bytes"),
        "half": (pa.array(np.arange(4).astype("float16")), "float16"),
        "price": (pa.array([Decimal("1.10")] * 4, pa.decimal128(9, 2)), "str_decimal"),
        "points": (pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)), "ndarray:float32:2"),
        "tokens": (pa.array([[1], [2, 3], [4], [5] * 300], pa.list_(pa.int32())), "ndarray:int32"),
        "big": (pa.array([[1], [2, 3], [4], [5]], pa.large_list(pa.int8())), "ndarray:int8"),
    }
    arrays = [array for array, _ in columns.values()]
    fields = [pa.field(name, array.type) for name, (array, _) in columns.items()]
    arrays += [pa.array(images, pa.large_binary())]
    fields += [pa.field("image", pa.large_binary(), metadata={"content_type": "image/jpeg"})]
    return pa.table(arrays, schema=pa.schema(fields))


NATURAL = {
    "a text": "str",
    "bytes": "bytes",
    "half": "float16",
    "price": "str_decimal",
    "points": "ndarray:float32:2",
    "tokens": "ndarray:int32",
    "big": "ndarray:int8",
    "image": "jpeg",
}


def test_what_we_export_they_read_alike(
    made: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    to = tmp_path / "exports"
    every = table_of(made / "every-none")
    export(every, to / "every")
    export(table_of(made / "every-none", ragged=True), to / "structs")
    export(table_of(made / "mixed", raw_arrays=True), to / "mixed", 1)
    export(table_of(made / "json-none"), to / "text")
    export(
        table_of(made / "numbers", decimals={"i": "int64", "d": "decimal(9, 2)"}), to / "numbers"
    )
    export(natural_table(), to / "natural", 3)
    destrier.convert(made / "every-none", tmp_path / "every.lance", num_workers=0)
    assert destrier.verify(made / "every-none", tmp_path / "every.lance", num_workers=0).equal
    destrier.export(tmp_path / "every.lance", to / "table", format="mds", num_workers=0)
    run_peer(READ, to)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["every"] == expected["every-none"]
    assert found["structs"] == expected["every-none"]
    assert found["table"] == expected["every-none"]
    assert encodings_of(to / "table") == encodings_of(made / "every-none")
    assert encodings_of(to / "every") == encodings_of(made / "every-none")
    assert encodings_of(to / "structs") == encodings_of(made / "every-none")
    assert found["mixed"] == expected["mixed"]
    assert [row["i"] for row in found["text"]] == [row["i"] for row in expected["json-none"]]
    assert [row["s"] for row in found["text"]] == [row["s"] for row in expected["json-none"]]
    assert [row["i"] for row in found["numbers"]] == [row["i"] for row in expected["numbers"]]
    assert [row["d"][1] for row in found["numbers"]] == ["1.50", "20.00", "0.25"]
    assert encodings_of(to / "natural") == NATURAL
    table = natural_table()
    assert found["natural"] == [
        {name: show(table[name], NATURAL[name], i) for name in sorted(NATURAL)} for i in range(4)
    ]


def damage(data: bytearray, random_: random.Random, most: int) -> None:
    """Flip bits or cut."""
    if random_.random() < 0.2:
        del data[random_.randrange(len(data)) :]
        return
    for _ in range(random_.choice((1, 1, 4))):
        data[random_.randrange(min(most, len(data)))] ^= 1 << random_.randrange(8)


@pytest.mark.parametrize("name", ["parts/1", "every-none", "json-none", "xsv-none", "every-zstd"])
def test_damage_is_an_error_or_equal_data(made: Path, tmp_path: Path, name: str) -> None:
    """Values themselves are covered by hashes only; all else shows."""
    chance = random.Random(name)
    whole = table_of(made / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed = 0
    for number in range(60):
        copy = shutil.copytree(made / name, tmp_path / str(number))
        path = chance.choice(sorted(copy.iterdir()))
        data = bytearray(path.read_bytes())
        joint = path.suffix == ".mds"
        head = data.index(b"{") if joint else len(data)  # the table of offsets, or all of it
        anywhere = number % 2 == 0
        damage(data, chance, len(data) if anywhere else head)
        path.write_bytes(data)
        hashed = name != "parts/1" and path.name != "index.json"
        index = number % 6 != 5
        if not index:
            (copy / "index.json").unlink()
        try:
            table = table_of(copy, check_hashes=hashed and index)
        except DestrierError:
            failed += 1
        else:
            if index and (hashed or not anywhere):
                assert table.equals(whole)
        shutil.rmtree(copy)
    assert failed > 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes
