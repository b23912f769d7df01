"""LitData itself writes datasets of every kind, and reads what is exported."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from destrier import (
    ArgumentError,
    ColumnError,
    DestrierError,
    SchemaError,
    SourceError,
    convert,
    export,
)
from destrier.files import Store
from destrier.formats.litdata import LitDataSource, detect, open_source
from destrier.writing.source import ENCODING_KEY, LINK
from oracle import needs_peers, run_peer

pytestmark = needs_peers

SECRET = ("fernet-sample", "fernet-chunk", "fernet-whole", "rsa-sample", "rsa-chunk")
READ = (
    *("scalars", "arrays", "nested", "media", "tuple", "list", "single", "number", "containers"),
    *("pickle", "graph", "framed", "framed9", "sample", "whole", "rows", "rows-zstd"),
    *("rows-drift", "temporal", "keyed", "parquet", *SECRET),
)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Datasets of every kind as litdata writes them, and the rows that it reads from them."""
    root = tmp_path_factory.mktemp("litdata")
    (root / "data").mkdir()
    run_peer(
        "import sys, litdata_peer; litdata_peer.main()", "write", root / "data", root / "rows.json"
    )
    return root / "data", json.loads((root / "rows.json").read_text())


def options_for(name: str, folder: Path) -> dict[str, Any]:
    if name in SECRET:
        return {"password": "secret", "key_file": str(folder / f"{name}.key")}
    return {"allow_pickle": True} if name == "pickle" else {}


def opened(folder: Path, name: str, **options: Any) -> LitDataSource:
    return open_source(Store(folder / name), **{**options_for(name, folder), **options})


def table_of(source: LitDataSource) -> pa.Table:
    batches = []
    for unit in source.units():
        rows = 0
        for batch in source.read(unit, source.schema):
            batch.validate(full=True)
            assert batch.schema.equals(source.schema)
            batches.append(batch)
            rows += batch.num_rows
        assert rows == unit.rows
    return pa.Table.from_batches(batches, source.schema)


def plain_array(values: Any, shape: Any, encoding: str) -> dict[str, Any]:
    family, _, rest = encoding.removeprefix("no_header_").partition(":")
    values = np.asarray(values)
    if rest.startswith("complex") or rest in ("11", "12"):
        values = values.view("c8" if values.dtype == np.float32 else "c16")
        shape = shape[:-1]
    data = base64.b64encode(values.tobytes()).decode()
    plain = {"dtype": str(values.dtype), "shape": list(shape), "data": data}
    return {**plain, "tensor": True} if family == "tensor" else plain


def numbers(array: pa.Array) -> Any:
    return array.to_numpy(zero_copy_only=False)


def plain_cell(  # noqa: PLR0911 - a table of types
    array: pa.Array, field: pa.Field, i: int
) -> Any:
    """A value as the peer prints it."""
    kind = field.type
    encoding = (field.metadata or {}).get(ENCODING_KEY, b"").decode().removeprefix("litdata:")
    one = array.slice(i, 1)
    if encoding.split(":")[0] in ("numpy", "tensor", "no_header_numpy", "no_header_tensor"):
        if isinstance(kind, pa.FixedShapeTensorType):
            return plain_array(numbers(one.storage.flatten()), kind.shape, encoding)
        if pa.types.is_struct(kind):
            shape, values = one.flatten()
            return plain_array(numbers(values.flatten()), shape.to_pylist()[0], encoding)
        if pa.types.is_list(kind):
            values = one.flatten()
            return plain_array(numbers(values), [len(values)], encoding)
        return plain_array(numbers(one)[0], [], encoding)
    if encoding == "pil":
        value = one.to_pylist()[0]
        data = base64.b64encode(value["data"]).decode()
        return {"mode": value["mode"], "size": [value["width"], value["height"]], "data": data}
    if encoding == "json" and pa.types.is_string(kind):
        return plain_value(json.loads(one.to_pylist()[0]))
    if pa.types.is_struct(kind) and one.is_valid()[0].as_py():
        fields = zip(kind, one.flatten(), strict=True)
        return {"dict": [[child.name, plain_cell(part, child, 0)] for child, part in fields]}
    return plain_value(one.to_pylist()[0])


def plain_value(value: Any) -> Any:
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {"dict": [[key, plain_value(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    return value


def plain_rows(table: pa.Table) -> list[Any]:
    columns = [column.combine_chunks() for column in table.columns]
    return [
        {
            "dict": [
                [field.name, plain_cell(column, field, i)]
                for field, column in zip(table.schema, columns, strict=True)
            ]
        }
        for i in range(table.num_rows)
    ]


def assert_same(got: Any, expected: Any, where: str) -> None:
    """Compare, where a list of litdata's may be a struct, and a key it lacks a null."""
    if isinstance(got, dict) and "dict" in got:
        items = dict(got["dict"])
        if isinstance(expected, list):
            expected = {"dict": [[str(i), value] for i, value in enumerate(expected)]}
        if not (isinstance(expected, dict) and "dict" in expected):
            assert list(items) == ["value"], where
            assert_same(items["value"], expected, where)
            return
        wanted = dict(expected["dict"])
        assert [k for k, v in items.items() if k in wanted or v is not None] == list(wanted), where
        for key, value in items.items():
            assert_same(value, wanted.get(key), f"{where}.{key}")
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{i}]")
    else:
        assert got == expected, where


def assert_rows(table: pa.Table, expected: list[Any], name: str) -> None:
    assert table.num_rows == len(expected)
    for i, row in enumerate(plain_rows(table)):
        assert_same(row, expected[i], f"{name}[{i}]")


@pytest.mark.parametrize("name", READ)
def test_rows_are_those_that_litdata_reads(name: str, peer: Any) -> None:
    folder, rows = peer
    assert detect(Store(folder / name))
    source = opened(folder, name)
    table = table_of(source)
    if name == "keyed":
        assert table.column("key").to_pylist() == [f"k{i * 7 % 12}" for i in range(12)]
        table = table.drop_columns("key")
    assert source.total_rows == len(rows[name])
    assert_rows(table, rows[name], name)


def test_types_and_metadata(peer: Any) -> None:
    arrays = opened(peer[0], "arrays").schema
    assert arrays.field("same2").type == pa.fixed_shape_tensor(pa.float64(), (2, 3))
    assert arrays.field("ragged1").type == pa.list_(pa.float32())
    assert arrays.field("ragged2").type == pa.struct(
        [("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.uint16()))]
    )
    assert arrays.field("complexes").type == pa.fixed_shape_tensor(pa.float32(), (2, 2))
    assert arrays.field("tensor0").type == pa.float32()
    assert arrays.field("same1").metadata == {ENCODING_KEY: b"litdata:no_header_numpy:2"}
    media = opened(peer[0], "media").schema
    assert media.field("jpeg").metadata[b"content_type"] == b"image/jpeg"
    assert media.field("image").metadata[b"content_type"] == b"image/png"
    assert media.field("video").metadata == {
        ENCODING_KEY: b"litdata:video:webm",
        b"content_type": b"video/webm",
    }
    nested = opened(peer[0], "nested").schema
    assert nested.field("numbers").type == pa.list_(pa.int64())
    assert nested.field("records").type.value_type == pa.struct({"n": pa.int64(), "s": pa.string()})
    assert nested.field("mixed").metadata[b"content_type"] == b"application/json"
    text = opened(peer[0], "nested", json="text", columns=["numbers"])
    assert table_of(text).column("numbers").to_pylist()[3] == "[0,1,2]"


def test_ragged_is_asked_for_where_the_first_chunk_does_not_show_it(peer: Any) -> None:
    source = opened(peer[0], "late")
    with pytest.raises(SchemaError, match=r"ragged=\['v'\]") as caught:
        table_of(source)
    assert (caught.value.row, caught.value.column) == (0, "v")
    assert caught.value.file is not None
    assert caught.value.file.endswith("chunk-0-1.bin")
    table = table_of(opened(peer[0], "late", ragged=["v"]))
    assert table.column("v").to_pylist() == [[1.0] * (2 if i < 5 else 3) for i in range(7)]
    assert table.column("w").to_pylist()[-1] == "[3.0]"  # the index declares no one type


def test_documents_and_blocks_of_tokens(peer: Any) -> None:
    folder, rows = peer
    for kind in ("numpy", "tensor"):
        documents = table_of(opened(folder, f"tokens-{kind}"))
        cells = documents.column("tokens").combine_chunks()
        assert cells.type == pa.list_(pa.int32())
        got = [plain_cell(cells, documents.schema.field(0), i) for i in range(len(cells))]
        assert got == rows[f"documents-{kind}"]
        source = opened(folder, f"tokens-{kind}", block_size=4)
        assert source.schema.field(0).type == pa.list_(pa.int32(), 4)
        blocks = table_of(source)
        assert source.total_rows == blocks.num_rows == len(rows[f"tokens-{kind}"])
        for block, expected in zip(
            blocks.column("tokens").to_pylist(), rows[f"tokens-{kind}"], strict=True
        ):
            data = base64.b64encode(np.array(block, np.int32).tobytes()).decode()
            assert data == expected["data"]
    assert table_of(opened(folder, "tokens-whole")).equals(documents)
    with pytest.raises(ArgumentError, match="block_size is for datasets of tokens"):
        opened(folder, "scalars", block_size=4)


def test_images_in_lists_and_tiffs_keep_their_bytes(peer: Any) -> None:
    table = table_of(opened(peer[0], "jpegs"))
    assert [len(images) for images in table.column("0").to_pylist()] == [1, 2, 3, 1]
    assert all(image[:3] == b"\xff\xd8\xff" for image in table.column("0")[1].as_py())
    tiff = (peer[0] / "x.tiff").read_bytes()
    assert table_of(opened(peer[0], "tiff")).column("0").to_pylist() == [tiff] * 3


def test_partial_indexes_are_merged_in_natural_order(peer: Any) -> None:
    assert not (peer[0] / "parts" / "index.json").exists()
    assert detect(Store(peer[0] / "parts"))
    table = table_of(opened(peer[0], "parts"))
    assert table.column("id").to_pylist() == [rank - 3 for rank in range(11)]


def test_rows_whose_types_differ_by_chunk(peer: Any) -> None:
    with pytest.raises(SchemaError, match=r"chunk-0-0.bin and double in .*chunk-1-0.bin"):
        opened(peer[0], "rows-conflict")
    table = table_of(opened(peer[0], "rows-conflict", promote=True))
    assert table.column("x").to_pylist() == [[1.0]] * 3 + [[0.5]] * 3
    assert opened(peer[0], "rows-conflict", columns=["id"]).total_rows == 6


def test_pickles_need_a_permission(peer: Any) -> None:
    with pytest.raises(SourceError, match=r"column '1' is pickled.*allow_pickle=True"):
        open_source(Store(peer[0] / "pickle"))
    assert table_of(open_source(Store(peer[0] / "pickle"), columns=["0"])).num_rows == 4


def test_passwords(peer: Any) -> None:
    folder = peer[0]
    for name in SECRET[:2]:
        with pytest.raises(SourceError, match="password, or the salt in key_file, is wrong"):
            opened(folder, name, password="Secret")
    with pytest.raises(ArgumentError, match="password= is wrong"):
        opened(folder, "rsa-sample", password="Secret")
    with pytest.raises(ArgumentError, match="pass password= and key_file="):
        opened(folder, "fernet-chunk", password=None)
    with pytest.raises(ArgumentError, match="is for level 'chunk'"):
        opened(folder, "fernet-sample", key_file=str(folder / "fernet-chunk.key"))
    with pytest.raises(SourceError, match="private key in key_file is another one"):
        table_of(opened(folder, "rsa-chunk", key_file=str(folder / "rsa-other.key")))
    # the key file of RSA holds its own password
    assert table_of(opened(folder, "rsa-sample", password=None)).num_rows == 4


def test_keys_are_a_column(peer: Any, tmp_path: Path) -> None:
    table = table_of(opened(peer[0], "numbered"))
    assert table.column("key").to_pylist() == [100 - i for i in range(12)]
    assert opened(peer[0], "numbered", key_column=None).schema.names[-1] == "tag"
    assert opened(peer[0], "numbered", columns=["key", "id"]).schema.names == ["id", "key"]
    with pytest.raises(ArgumentError, match="pass key_column="):
        opened(peer[0], "numbered", key_column="id")
    shutil.copytree(peer[0] / "keyed", tmp_path / "keyed")
    (tmp_path / "keyed" / "keys" / "shard-00001.parquet").unlink()
    with pytest.raises(SourceError, match="lists 2 files of keys, but there are 1"):
        opened(tmp_path, "keyed")


def test_a_source_travels_to_workers(peer: Any) -> None:
    source = opened(peer[0], "keyed")
    copy = pickle.loads(pickle.dumps(source))
    assert table_of(copy).equals(table_of(source))
    assert copy.digest() == source.digest()
    assert opened(peer[0], "keyed", key_column=None).digest() != source.digest()


def test_links_lead_into_the_chunks(peer: Any) -> None:
    source = opened(peer[0], "media", link=True)
    links, values = table_of(source), table_of(opened(peer[0], "media"))
    assert source.schema.field("jpeg").type.equals(LINK)
    assert source.schema.field("jpeg").metadata[b"content_type"] == b"image/jpeg"
    assert links.column("label").equals(values.column("label"))
    linked = [f.name for f in source.schema if f.type.equals(LINK)]
    assert linked == ["jpeg", "image", "video", "audio", "nifti", "mesh", "pdf", "file"]
    for name in linked:
        for at, value in zip(links.column(name).to_pylist(), values.column(name), strict=True):
            path = Path(at["uri"].removeprefix("file://"))
            assert at["file_size"] == path.stat().st_size
            assert at["file_stamp"] == path.stat().st_mtime_ns
            begin, end = at["position"], at["position"] + at["size"]
            assert path.read_bytes()[begin:end] == value.as_py()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("framed", "compressed"),
        ("whole", "compressed"),
        ("fernet-sample", "encrypted"),
        ("rows", "rows of Arrow"),
        ("tokens-numpy", "tokens"),
        ("temporal", "arrays"),
        ("parquet", "Parquet files"),
        ("tuple", "no column of bytes or media"),
    ],
)
def test_what_cannot_be_linked_says_why(name: str, why: str, peer: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{why}.*use destrier.convert"):
        opened(peer[0], name, link=True)


def test_unknown_columns_are_named(peer: Any) -> None:
    for name in ("scalars", "rows", "temporal", "parquet", "tokens-numpy"):
        with pytest.raises(ColumnError, match="has no column 'nope'"):
            opened(peer[0], name, columns=["nope"])


EXPORTED = (
    *("scalars", "arrays", "nested", "media", "tuple", "list", "single", "number", "containers"),
    *("pickle", "graph", "jpegs", "rows", "rows-drift", "temporal", "parquet"),
    *("tokens-numpy", "tokens-tensor"),
)
MORE = {
    "rows-drift": {"json": ["seldom", "late", "inner"]},
    "parquet": {"json": ["s", "l"]},
    "tokens-numpy": {"chunk_bytes": 10_000},
    "tokens-tensor": {"chunk_bytes": 10_000},
}


@pytest.fixture(scope="module")
def exported(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Datasets converted to tables and exported again, as litdata reads them."""
    folder, _ = peer
    root = tmp_path_factory.mktemp("exported")
    tables, exports = root / "tables", root / "exports"
    for name in EXPORTED:
        table = tables / f"{name}.lance"
        convert(folder / name, table, num_workers=0, **options_for(name, folder))
        options = {"chunk_bytes": 200, **MORE.get(name, {})}
        export(table, exports / name, format="litdata", num_workers=0, **options)
    run_peer("import litdata_peer; litdata_peer.main()", "read", exports, root / "rows.json")
    return root, json.loads((root / "rows.json").read_text())


@pytest.mark.parametrize("name", [n for n in EXPORTED if n not in MORE or n == "parquet"])
def test_litdata_reads_exports_to_the_same_samples(name: str, peer: Any, exported: Any) -> None:
    assert exported[1][name] == peer[1][name]


def test_exports_are_cut_into_chunks(exported: Any) -> None:
    index = json.loads((exported[0] / "exports" / "scalars" / "index.json").read_text())
    assert len(index["chunks"]) > 3
    assert all(c["chunk_size"] == 1 or c["chunk_bytes"] < 300 for c in index["chunks"])
    assert sorted(file.name for file in (exported[0] / "exports" / "scalars").iterdir()) == sorted(
        ["index.json", *(chunk["filename"] for chunk in index["chunks"])]
    )


def test_nulls_are_exported_in_json_leaves(exported: Any) -> None:
    rows = [dict(row["dict"]) for row in exported[1]["rows-drift"]]
    assert [row["seldom"] for row in rows] == [None] * 7 + [f"s{i}" for i in range(7, 12)]
    table = exported[0] / "tables" / "rows-drift.lance"
    with pytest.raises(SourceError, match=r"row 0 of .*: column 'seldom' is null.*json=\["):
        export(table, exported[0] / "refused", format="litdata", num_workers=0)


def test_tokens_are_exported_for_the_tokens_loader(peer: Any, exported: Any) -> None:
    for kind in ("numpy", "tensor"):
        flat = b"".join(base64.b64decode(d["data"]) for d in peer[1][f"documents-{kind}"])
        blocks = exported[1][f"tokens-{kind}"]
        data = b"".join(base64.b64decode(block["data"]) for block in blocks)
        assert data == flat[: len(data)]
        assert len(blocks) == len(flat) // 16
        assert all(block.get("tensor", False) == (kind == "tensor") for block in blocks)


BODIES = (
    *("arrays", "nested", "media", "jpegs", "framed", "sample", "whole", "rows", "rows-zstd"),
    *("tokens-numpy", "temporal", "parquet", "keyed"),
)


@pytest.mark.parametrize("name", BODIES)
def test_flipped_and_cut_files_are_errors_or_data(name: str, peer: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    files = sorted(path for path in (peer[0] / name).rglob("*") if path.is_file())
    refused = 0
    for number in range(24):
        folder = tmp_path / str(number)
        shutil.copytree(peer[0] / name, folder)
        file = folder / files[number % len(files)].relative_to(peer[0] / name)
        data = bytearray(file.read_bytes())
        head = 1 + len(data) // (4 if number % 2 else 1)  # headers more often than not
        for _ in range(1 + number % 3):
            data[rng.integers(min(head, len(data)))] ^= 1 << rng.integers(8)
        if number % 4 == 3:
            del data[rng.integers(len(data)) :]
        file.write_bytes(data)
        try:
            table_of(open_source(Store(folder)))
        except DestrierError:
            refused += 1
    assert refused >= 4
    assert pa.default_memory_pool().max_memory() < 1 << 30
