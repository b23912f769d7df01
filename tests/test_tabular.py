from __future__ import annotations

import decimal
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import lance
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import feather

import destrier
from destrier.errors import ArgumentError, ColumnError, SchemaError, SourceError
from destrier.files import Store
from destrier.formats import batches as batches_module
from destrier.formats import tabular
from destrier.formats.tabular import ipc as ipc_module
from destrier.formats.tabular import parquet as parquet_module
from destrier.formats.tabular.kinds import convert, kept_field
from destrier.writing.layout import Layout
from destrier.writing.source import BATCH_BYTES, ENCODING_KEY, SOURCE_KEY, Source


def source(path: Path | str, format: str | None = None, **options: Any) -> Source:
    store = Store(path)
    name = format or tabular.detect(store)
    assert name is not None
    opened = tabular.open_source(store, format=name, **options)
    return pickle.loads(pickle.dumps(opened))


def table(opened: Source) -> pa.Table:
    """All rows, read as the writer reads them."""
    batches = []
    for unit in opened.units():
        rows = 0
        for batch in opened.read(unit, opened.schema):
            assert batch.schema.equals(opened.schema, check_metadata=False)
            assert batch.num_rows == 1 or batch.nbytes <= BATCH_BYTES
            batch.validate(full=True)
            batches.append(batch)
            rows += batch.num_rows
        assert unit.rows in (None, rows)
    return pa.Table.from_batches(batches, opened.schema)


def mixed(rows: int = 500) -> pa.Table:
    ids = np.arange(rows)
    texts = [None if i % 7 == 0 else f"text {i}" for i in ids]
    return pa.table(
        {
            "id": pa.array(ids),
            "text": pa.array(texts, pa.large_string()),
            "kind": pa.array([f"kind {i % 3}" for i in ids]).dictionary_encode(),
            "when": pa.array(ids * 1000, pa.timestamp("us", "Europe/Berlin")),
            "list": pa.array(
                [list(range(i % 4)) if i % 5 else None for i in ids], pa.list_(pa.int16())
            ),
            "deep": pa.array([{"a": {"b": [i, None]}} if i % 6 else None for i in ids.tolist()]),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(
                np.arange(rows * 4, dtype=np.float32).reshape(rows, 2, 2)
            ),
            "half": pa.array(ids.astype(np.float16)),
            "price": pa.array([decimal.Decimal(int(i)) / 4 for i in ids], pa.decimal128(20, 2)),
        }
    )


def plain(found: pa.Table) -> pa.Table:
    """With dictionaries as their values, which is what a table keeps."""
    fields = [
        pa.field(f.name, f.type.value_type) if pa.types.is_dictionary(f.type) else f
        for f in found.schema
    ]
    return found.cast(pa.schema(fields)).replace_schema_metadata(None)


# --- Arrow types


KEPT = {
    "null": pa.nulls(3),
    "uint64": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "float16": pa.array([np.float16(1.5), None, np.float16(0)], pa.float16()),
    "date64": pa.array([86400000, None, 0], pa.date64()),
    "time32": pa.array([1, None, 0], pa.time32("s")),
    "time64": pa.array([1, None, 0], pa.time64("ns")),
    "duration": pa.array([1, None, 0], pa.duration("ms")),
    "zone": pa.array([1, None, 0], pa.timestamp("ns", "+02:00")),
    "decimal128": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal128(20, 2)),
    "decimal256": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal256(50, 2)),
    "large_string": pa.array(["a", None, ""], pa.large_string()),
    "binary": pa.array([b"a", None, b""], pa.binary()),
    "fixed binary": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "fixed list": pa.array([[1, None], None, [2, 3]], pa.list_(pa.int32(), 2)),
    "lists": pa.array([[[1], None, []], None, []], pa.list_(pa.large_list(pa.int32()))),
    "structs": pa.array([{"a": {"x": 1}}, None, {"a": None}]),
    "map": pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int32())),
    "map of lists": pa.array([[(7, [1])], None, []], pa.map_(pa.int8(), pa.list_(pa.int32()))),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]),
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    ),
    "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
    "no nulls": pa.StructArray.from_arrays(
        [pa.array([1, 2, 3])], fields=[pa.field("a", pa.int64(), False)]
    ),
}

MAPPED = {
    "dictionary": (pa.array(["a", None, "b"]).dictionary_encode(), pa.string()),
    "dictionary of views": (
        pa.DictionaryArray.from_arrays([0, None, 1], pa.array(["a", "b"], pa.string_view())),
        pa.string(),
    ),
    "runs": (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", None]), pa.string()),
    "string_view": (pa.array(["a", None, "b" * 20], pa.string_view()), pa.string()),
    "binary_view": (pa.array([b"a", None, b"b" * 20], pa.binary_view()), pa.binary()),
    "list_view": (pa.array([[1], None, [2, 3]], pa.list_view(pa.int32())), pa.list_(pa.int32())),
    "large_list_view": (
        pa.array([["a"], None, ["b", "c"]], pa.large_list_view(pa.string_view())),
        pa.large_list(pa.string()),
    ),
    "fixed list of structs": (  # Lance writes it, and reads it only where no other column is read
        pa.array([[{"a": 1}], None, [None]], pa.list_(pa.struct([("a", pa.int8())]), 1)),
        pa.list_(pa.struct([("a", pa.int8())])),
    ),
    "decimal32": (
        pa.array([decimal.Decimal("1.5"), None, None], pa.decimal32(5, 2)),
        pa.decimal128(5, 2),
    ),
    "fixed list of text": (
        pa.array([["a"], None, ["b"]], pa.list_(pa.string(), 1)),
        pa.list_(pa.string()),
    ),
    "nested dictionary": (
        pa.ListArray.from_arrays([0, 1, 1, 3], pa.array(["a", "b", "a"]).dictionary_encode()),
        pa.list_(pa.string()),
    ),
    "sorted map": (
        pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int32(), keys_sorted=True)),
        pa.map_(pa.string(), pa.int32()),
    ),
    "json": (
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1.0}', None, "[]"])),
        pa.string(),
    ),
}

REFUSED = {
    "interval": pa.nulls(3, pa.month_day_nano_interval()),
    "no fields": pa.array([{}, None, {}], pa.struct([])),
    "no fields in a list": pa.array([[{}], None, []], pa.list_(pa.struct([]))),
    "dense union": pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()),
        pa.array([0, 0, 1], pa.int32()),
        [pa.array([1, 2]), pa.array(["a"])],
    ),
    "twice": pa.StructArray.from_arrays([pa.array([1, 2, 3])] * 2, names=["x", "x"]),
}


def stretched(array: pa.Array) -> list[pa.Array]:
    """Slices of a longer array, for which Lance and pyarrow have paths of their own."""
    if pa.types.is_run_end_encoded(array.type):
        return [array, array.slice(1)]
    longer = pa.concat_arrays([array] * 700)
    return [array.slice(1), longer.slice(1, 1700), longer.slice(5, 90)]


def written(arrays: list[pa.Array], kind: pa.DataType, path: Path) -> list[Any]:
    field = pa.field("c", kind)
    schema = pa.schema([field])
    batches = [
        piece
        for array in arrays
        for piece in batches_module.split(
            batches_module.checked(pa.record_batch([convert(array, kind)], schema=schema), "x", 0)
        )
    ]
    layout = Layout.choose(schema, batches, columns=None, compression=None, provenance=False)
    stored = [layout.store(batch, "x", None, None).select(["c"]) for batch in batches]
    lance.write_dataset(pa.RecordBatchReader.from_batches(stored[0].schema, stored), path)
    found = lance.dataset(path).to_table()
    assert found.schema.field(0).equals(field)
    return found["c"].to_pylist()


@pytest.mark.parametrize("name", KEPT)
def test_types_that_are_kept(name: str, tmp_path: Path) -> None:
    array = KEPT[name]
    assert kept_field(pa.field("c", array.type), "x").type.equals(array.type)
    arrays = stretched(array)
    expected = [value for part in arrays for value in part.to_pylist()]
    assert repr(written(arrays, array.type, tmp_path / "t")) == repr(expected)


@pytest.mark.parametrize("name", MAPPED)
def test_types_that_become_others(name: str, tmp_path: Path) -> None:
    array, kind = MAPPED[name]
    assert kept_field(pa.field("c", array.type), "x").type.equals(kind)
    arrays = stretched(array) if "view" not in name and name != "runs" else [array, array.slice(1)]
    expected = [value for part in arrays for value in part.to_pylist()]
    assert repr(written(arrays, kind, tmp_path / "t")) == repr(expected)


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_are_refused(name: str, tmp_path: Path) -> None:
    feather.write_feather(pa.table({"ok": [1, 2, 3]}), tmp_path / "a.arrow")
    found = pa.table({"ok": [1, 2, 3], "bad": REFUSED[name]})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_file(file, found.schema) as out,
    ):
        out.write_table(found)
    with pytest.raises(ColumnError, match=r"'bad' cannot be kept exactly.*columns=\["):
        source(tmp_path / "a.arrow")
    assert table(source(tmp_path / "a.arrow", columns=["ok"])).to_pydict() == {"ok": [1, 2, 3]}


@pytest.mark.parametrize("name", ["a.b", "", "a`b", "_rowid"])
def test_names_that_a_table_cannot_have(name: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({name: [1], "ok": [2]}), tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match="cannot have a column named"):
        source(tmp_path / "a.parquet")
    assert table(source(tmp_path / "a.parquet", columns=["ok"])).to_pydict() == {"ok": [2]}


# --- Parquet


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
def test_parquet_is_read_as_pyarrow_reads_it(compression: str, tmp_path: Path) -> None:
    pq.write_table(mixed(), tmp_path / "a.parquet", compression=compression, row_group_size=120)
    opened = source(tmp_path / "a.parquet")
    assert opened.format == "parquet"
    assert opened.total_rows == 500
    assert table(opened).replace_schema_metadata(None).equals(plain(mixed()))


def test_parquet_of_polars(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "cat": pl.Series(["a", "b", None, "a"], dtype=pl.Categorical),
            "day": pl.Series([1, 2, None, 4]).cast(pl.Date),
            "span": pl.Series([1, 2, None, 4]).cast(pl.Duration("us")),
            "nest": [[{"x": 1}], [], None, [{"x": None}]],
        }
    )
    frame.write_parquet(tmp_path / "a.parquet")
    found = table(source(tmp_path / "a.parquet"))
    assert found.to_pylist() == frame.with_columns(pl.col("cat").cast(pl.String)).to_dicts()


def test_parquet_units_are_runs_of_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pa.table({"a": np.arange(1000)})
    pq.write_table(expected, tmp_path / "a.parquet", row_group_size=100, compression="none")
    monkeypatch.setattr(parquet_module, "_UNIT_BYTES", 3000)
    opened = source(tmp_path / "a.parquet")
    assert len(opened.units()) > 3
    assert sum(unit.rows for unit in opened.units()) == 1000
    assert table(opened).replace_schema_metadata(None).equals(expected)


def test_parquet_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row group of long texts that the file stores once: 1.2 GB decoded, 200 kB there."""
    texts = [str(i) * 200_000 for i in range(3)]
    indices = pa.array(np.arange(2000) % 3, pa.int32())
    found = pa.table({"a": pa.DictionaryArray.from_arrays(indices, texts)})
    pq.write_table(found, tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 24)
    opened = source(tmp_path / "a.parquet")
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    most = rows = 0
    for unit in opened.units():
        for batch in opened.read(unit, None):
            most = max(most, pool.bytes_allocated() - before)
            assert batch["a"][0].as_py() == texts[rows % 3]
            rows += batch.num_rows
    assert rows == 2000
    assert most < 500 << 20


def test_old_parquet_timestamps(tmp_path: Path) -> None:
    good = pa.table({"a": pa.array([0, None, 1500], pa.timestamp("ns"))})
    pq.write_table(good, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert table(source(tmp_path / "a.parquet"))["a"].equals(good["a"])
    far = pa.table({"b": [1], "a": pa.array([253370764800000000], pa.timestamp("us"))})
    pq.write_table(far, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(SourceError, match="'a': an INT96 timestamp beyond"):
        table(source(tmp_path / "a.parquet"))
    assert table(source(tmp_path / "a.parquet", columns=["b"])).to_pydict() == {"b": [1]}


def test_parquet_text_that_is_not_utf8_names_the_row(tmp_path: Path) -> None:
    data = pa.array([b"ok"] * 300 + [b"\xff\xfe"] + [b"ok"] * 10)
    bad = pa.Array.from_buffers(pa.string(), len(data), data.buffers())
    pq.write_table(
        pa.table({"i": range(311), "t": bad}), tmp_path / "a.parquet", row_group_size=100
    )
    with pytest.raises(SourceError, match=r"row 300, column 't': .*UTF8") as caught:
        table(source(tmp_path / "a.parquet"))
    assert (caught.value.row, caught.value.column) == (300, "t")


def test_parquet_page_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    written_table = pa.table({"a": np.arange(1000)})
    pq.write_table(
        written_table, path, compression="none", use_dictionary=False, write_page_checksum=True
    )
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="CRC"):
        table(source(path))


# --- Arrow IPC


def write_ipc(path: Path, found: pa.Table, *, stream: bool, rows: int = 100) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, found.schema) as out:
        out.write_table(found, max_chunksize=rows)


@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_and_streams(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = mixed().append_column("view", mixed()["text"].cast(pa.string_view()))
    write_ipc(tmp_path / "a.arrow", found, stream=stream)
    monkeypatch.setattr(ipc_module, "_UNIT_BYTES", 10_000)
    opened = source(tmp_path / "a.arrow")
    assert len(opened.units()) == (1 if stream else 5)
    assert opened.total_rows == (None if stream else 500)
    got = table(opened).replace_schema_metadata(None)
    assert got.drop_columns("view").equals(plain(mixed()))
    assert got["view"].to_pylist() == mixed()["text"].to_pylist()
    only = table(source(tmp_path / "a.arrow", columns=["view", "id"]))
    assert only.column_names == ["view", "id"]
    assert only["id"].equals(found["id"])


def test_feather_of_pyarrow_and_polars(tmp_path: Path) -> None:
    feather.write_feather(plain(mixed()).drop_columns("tensor"), tmp_path / "a.feather")
    frame = pl.DataFrame({"id": [1, 2], "t": ["a", None]})
    frame.write_ipc(tmp_path / "b.ipc", compression="zstd")
    assert table(source(tmp_path / "a.feather"))["deep"].equals(mixed()["deep"])
    assert table(source(tmp_path / "b.ipc")).to_pylist() == frame.to_dicts()


def test_a_file_without_a_known_name_is_known_by_its_bytes(tmp_path: Path) -> None:
    write_ipc(tmp_path / "a", mixed(5), stream=False)
    pq.write_table(mixed(5), tmp_path / "b")
    assert tabular.detect(Store(tmp_path / "a")) == "arrow"
    assert tabular.detect(Store(tmp_path / "b")) == "parquet"


def test_a_stream_without_its_end_or_with_more_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.arrows"
    write_ipc(path, mixed(), stream=True)
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    with pytest.raises(SourceError, match="does not end as a stream"):
        source(path)
    path.write_bytes(data + data)
    with pytest.raises(SourceError, match="what follows would be lost"):
        table(source(path))


def test_a_null_where_none_is_declared(tmp_path: Path) -> None:
    field = pa.field("s", pa.struct([pa.field("x", pa.int64(), nullable=False)]))
    inner = pa.array([1, 2, None, 4])
    struct = pa.StructArray.from_arrays([inner], fields=list(field.type))
    write_ipc(tmp_path / "a.arrow", pa.table([struct], schema=pa.schema([field])), stream=False)
    with pytest.raises(SourceError, match="row 2, column 's': a null"):
        table(source(tmp_path / "a.arrow"))


# --- several files


def test_a_folder_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        folder = tmp_path / f"part {number}"
        folder.mkdir()
        pq.write_table(pa.table({"n": [number]}), folder / "x.parquet")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".x.parquet.crc").touch()
    (tmp_path / "_metadata.parquet").touch()
    (tmp_path / "README.md").write_text("hello")
    assert tabular.detect(Store(tmp_path)) == "parquet"
    assert table(source(tmp_path))["n"].to_pylist() == [1, 2, 10]


def test_patterns(tmp_path: Path) -> None:
    for name in ("a1.parquet", "a2.parquet", "b1.parquet", "x/a3.parquet", "x/y/a4.parquet"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [name]}), path)

    def names(pattern: str) -> list[str]:
        return table(source(f"{tmp_path}/{pattern}"))["n"].to_pylist()

    assert names("a*.parquet") == ["a1.parquet", "a2.parquet"]
    assert names("a[!1].parquet") == ["a2.parquet"]
    assert names("?1.parquet") == ["a1.parquet", "b1.parquet"]
    assert names("**/a*.parquet") == ["a1.parquet", "a2.parquet", "x/a3.parquet", "x/y/a4.parquet"]
    assert names("*/*.parquet") == ["x/a3.parquet"]
    assert names("x/**") == ["x/a3.parquet", "x/y/a4.parquet"]
    with pytest.raises(SourceError, match="no file matches"):
        source(f"{tmp_path}/c*.parquet", "parquet")
    odd = tmp_path / "odd [1].parquet"
    pq.write_table(pa.table({"n": ["odd"]}), odd)
    assert table(source(odd))["n"].to_pylist() == ["odd"]


def test_mixed_folders(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("n\n2\n")
    with pytest.raises(SourceError, match=r"parquet \(a.parquet\) and csv \(b.csv\)"):
        tabular.detect(Store(tmp_path))
    assert table(source(tmp_path, "csv"))["n"].to_pylist() == [2]
    (tmp_path / "b.csv").rename(tmp_path / "b.docx")
    with pytest.raises(SourceError, match=r"others \(b.docx\).*format='parquet'"):
        tabular.detect(Store(tmp_path))
    assert table(source(tmp_path, "parquet"))["n"].to_pylist() == [1]


def test_pictures_with_a_table_beside_are_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("file_name,caption\na.jpg,x\n")
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff")
    assert tabular.detect(Store(tmp_path)) is None


def drifting(tmp_path: Path, one: pa.Table, other: pa.Table) -> Path:
    pq.write_table(one, tmp_path / "a.parquet")
    pq.write_table(other, tmp_path / "b.parquet")
    return tmp_path


def test_drift_of_a_type_names_files_and_types(tmp_path: Path) -> None:
    one = pa.table({"i": [1], "x": pa.array([1], pa.int32())})
    folder = drifting(tmp_path, one, pa.table({"i": [2], "x": pa.array([1], pa.int64())}))
    with pytest.raises(
        SchemaError, match=r"'x' is int32 in \S+a.parquet and int64 in \S+b.parquet"
    ):
        source(folder)
    assert table(source(folder, columns=["i"]))["i"].to_pylist() == [1, 2]


def test_drift_of_columns(tmp_path: Path) -> None:
    folder = drifting(tmp_path, pa.table({"i": [1], "x": [1]}), pa.table({"y": ["z"], "i": [2]}))
    with pytest.raises(
        SchemaError, match=r"b.parquet lacks the column 'x', which \S+a.parquet has"
    ):
        source(folder)
    found = table(source(folder, missing="null"))
    assert found.to_pydict() == {"i": [1, 2], "x": [1, None], "y": [None, "z"]}
    assert found.schema.field("x").nullable
    assert table(source(folder, missing="null", columns=["y"])).to_pydict() == {"y": [None, "z"]}


def test_drift_that_loses_nothing(tmp_path: Path) -> None:
    one = pa.table(
        [pa.array(["a"]).dictionary_encode(), pa.nulls(1), pa.array([1])],
        schema=pa.schema(
            [
                ("t", pa.dictionary(pa.int32(), pa.string())),
                ("n", pa.null()),
                pa.field("i", pa.int64(), nullable=False),
            ]
        ),
    )
    other = pa.table({"i": [None, 2], "n": [1.5, 2.5], "t": ["b", "c"]})
    found = table(source(drifting(tmp_path, one, other)))
    assert found.to_pydict() == {"t": ["a", "b", "c"], "n": [None, 1.5, 2.5], "i": [1, None, 2]}


# --- options


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    for options, message in (
        ({"link": True}, r"cannot be linked.*destrier\.convert"),
        ({"delimiter": ";"}, "delimiter= is no option of parquet files"),
        ({"missing": "x"}, "missing is 'error' or 'null'"),
        ({"columns": "n"}, "list of names"),
        ({"columns": []}, "columns is empty"),
        ({"columns": ["n", "n"]}, "'n' twice"),
        ({"split": "train"}, "split= and config= are of format='hf'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            source(tmp_path, "parquet", **options)
    with pytest.raises(ColumnError, match="no column 'x'; there are: n"):
        source(tmp_path, columns=["x"])


def test_the_digest_names_content_and_options(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1], "m": [2]}), tmp_path / "a.parquet")
    one = source(tmp_path).digest()
    assert one == source(tmp_path).digest()
    assert one != source(tmp_path, columns=["n"]).digest()
    pq.write_table(pa.table({"n": [1], "m": [2]}), tmp_path / "b.parquet")
    assert one != source(tmp_path).digest()


# --- Hugging Face


PICTURES = {
    "info": {
        "features": {
            "image": {"_type": "Image"},
            "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
        }
    }
}


def pictures(paths: list[str | None] | None = None) -> pa.Table:
    data = [b"\x89PNG 1", b"\x89PNG 2", None]
    paths = paths or ["a.png", None, None]
    mask = pa.array([False, False, True])
    image = pa.StructArray.from_arrays(
        [pa.array(data, pa.binary()), pa.array(paths, pa.string())], ["bytes", "path"], mask=mask
    )
    made = pa.table({"image": image, "label": [0, 1, 0]})
    return made.replace_schema_metadata({"huggingface": json.dumps(PICTURES)})


def hub(folder: Path, **splits: int) -> Path:
    (folder / "data").mkdir(parents=True)
    start = 0
    for name, files in splits.items():
        for number in range(files):
            path = folder / "data" / f"{name}-{number:05d}-of-{files:05d}.parquet"
            pq.write_table(pa.table({"n": [start]}), path)
            start += 1
    return folder


def test_hub_folders(tmp_path: Path) -> None:
    folder = hub(tmp_path / "d", train=3, test=1)
    assert tabular.detect(Store(folder)) == "hf"
    with pytest.raises(ArgumentError, match="several splits: test, train; choose one with split="):
        source(folder)
    assert table(source(folder, split="train"))["n"].to_pylist() == [0, 1, 2]
    assert table(source(folder, split="test"))["n"].to_pylist() == [3]
    with pytest.raises(ArgumentError, match="no split 'val'"):
        source(folder, split="val")
    assert table(source(hub(tmp_path / "e", train=1)))["n"].to_pylist() == [0]
    assert table(source(f"{folder}/data/t*.parquet", "hf"))["n"].to_pylist() == [3, 0, 1, 2]
    pq.write_table(pa.table({"n": [9]}), folder / "data" / "more.parquet")
    with pytest.raises(SourceError, match=r"more\.parquet, whose name says no split"):
        source(folder, split="train")


def test_hub_folders_with_a_readme(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    for name in ("en/a.jsonl", "en/b.jsonl", "de/a.jsonl", "test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"n": name}) + "\n")
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n"
        "- config_name: en\n  data_files:\n"
        "  - split: train\n    path: en/*.jsonl\n  - split: test\n    path: ['test.jsonl']\n"
        "- config_name: de\n  data_dir: de\n  data_files: '*.jsonl'\n---\n# text\n"
    )
    assert tabular.detect(Store(tmp_path)) == "hf"
    with pytest.raises(ArgumentError, match="several configs: en, de"):
        source(tmp_path)
    found = table(source(tmp_path, config="en", split="train"))
    assert found["n"].to_pylist() == ["en/a.jsonl", "en/b.jsonl"]
    assert table(source(tmp_path, config="de"))["n"].to_pylist() == ["de/a.jsonl"]


def test_splits_by_words(tmp_path: Path) -> None:
    for name in ("train.csv", "my-validation.csv", "eval/x.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"n\n{name}\n")
    for split, name in (
        ("train", "train.csv"),
        ("validation", "my-validation.csv"),
        ("test", "eval/x.csv"),
    ):
        assert table(source(tmp_path, "hf", split=split))["n"].to_pylist() == [name]


def saved(folder: Path, found: pa.Table, files: int = 2) -> Path:
    """Write what `datasets.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        part = found.slice(i * found.num_rows // files, found.num_rows // files)
        write_ipc(folder / name, part, stream=True, rows=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def test_saved_datasets(tmp_path: Path) -> None:
    folder = saved(tmp_path / "one", pa.table({"n": range(8)}))
    assert tabular.detect(Store(folder)) == "hf"
    assert table(source(folder))["n"].to_pylist() == list(range(8))
    saved(tmp_path / "d" / "train", pa.table({"n": range(6)}))
    saved(tmp_path / "d" / "test", pa.table({"n": range(2)}))
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ArgumentError, match="several splits: train, test"):
        source(tmp_path / "d")
    assert table(source(tmp_path / "d", split="test"))["n"].to_pylist() == [0, 1]
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(SourceError, match="which is not there"):
        source(folder)
    for state, message in (
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "none of its folder"),
        ('{"_data_files": []}', "names no data files"),
        ('{"_data_files": [{"filename": "x"}], "_indices_data_files": [{}]}', "flatten_indices"),
        ("[]", "no JSON object"),
        ("{", "not JSON"),
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(SourceError, match=message):
            source(folder, "hf")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_pictures_become_bytes_and_paths(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pictures(), path)
    else:
        write_ipc(path, pictures(), stream=False)
    opened = source(path)
    schema = opened.schema
    assert schema.names == ["image", "image_path", "label"]
    assert schema.field("image").type == pa.large_binary()
    assert schema.field("image").metadata[b"content_type"] == b"image/*"
    assert json.loads(schema.field("label").metadata[b"class_names"]) == ["cat", "dog"]
    assert table(opened).to_pydict() == {
        "image": [b"\x89PNG 1", b"\x89PNG 2", None],
        "image_path": ["a.png", None, None],
        "label": [0, 1, 0],
    }
    assert table(source(path, columns=["image"])).column_names == ["image"]
    assert table(source(path, columns=["image_path"])).column_names == ["image_path"]


def test_a_picture_that_is_neither_bytes_nor_path(tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"x", "path": None}, {"bytes": None, "path": None}])
    image = image.cast(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    found = pa.table({"image": image}).replace_schema_metadata(
        {"huggingface": json.dumps(PICTURES)}
    )
    pq.write_table(found, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="row 1, column 'image': a value with neither"):
        table(source(tmp_path / "a.parquet"))


class FakeHub(MemoryFileSystem):
    """Files in memory under ``hf://``: the hub itself cannot be reached from a test."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("hf://", "memory://"))


def test_hub_uris(tmp_path: Path) -> None:
    folder = hub(tmp_path / "d", train=2, test=1)
    known = fsspec.registry.get("hf")
    fsspec.register_implementation("hf", FakeHub, clobber=True)
    try:
        files = fsspec.filesystem("hf")
        for path in sorted((folder / "data").iterdir()):
            files.pipe(f"hf://datasets/org/name/data/{path.name}", path.read_bytes())
        store = Store("hf://datasets/org/name")
        assert tabular.detect(store) == "hf"
        opened = tabular.open_source(store, format="hf", split="train")
        assert table(opened)["n"].to_pylist() == [0, 1]
        pattern = "hf://datasets/org/name/data/*.parquet"
        assert table(source(pattern, "parquet"))["n"].to_pylist() == [2, 0, 1]
    finally:
        FakeHub.store.clear()
        registry = sys.modules["fsspec.registry"]._registry
        registry.pop("hf", None)
        if known is not None:
            registry["hf"] = known


@pytest.mark.parametrize("null", [2, 5])
@pytest.mark.parametrize("kind", ["list", "large", "fixed", "map", "struct", "nested"])
def test_text_that_is_no_utf8_in_lists_names_its_row(kind: str, null: int) -> None:
    texts = pa.array([b"ab"] * 10 + [b"\xff"] + [b"ab"] * 7, pa.binary()).view(pa.string())
    offsets = pa.array(range(0, 20, 2), pa.int32())
    mask = pa.array([row == null for row in range(9)])
    made: pa.Array
    if kind == "fixed":
        made = pa.FixedSizeListArray.from_arrays(texts, 2, mask=mask)
    elif kind == "map":
        made = pa.MapArray.from_arrays(offsets, pa.array(range(18)), texts)
    elif kind == "large":
        made = pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), texts, mask=mask)
    else:
        made = pa.ListArray.from_arrays(offsets, texts, mask=mask)
    if kind == "struct":
        made = pa.StructArray.from_arrays([made], ["x"])
    if kind == "nested":
        made = pa.ListArray.from_arrays(pa.array(range(10), pa.int32()), made)
    for first in (0, 3):
        batch = pa.record_batch([made.slice(first)], names=["c"])
        with pytest.raises(SourceError, match=r"row 105, column 'c': .*UTF8") as caught:
            batches_module.checked(batch, "file", 100 + first)
        assert caught.value.row == 105


# --- export


def exported(found: pa.Table, folder: Path, ranges: int = 3) -> Path:
    sink = pickle.loads(pickle.dumps(tabular.ParquetSink()))
    store = Store(folder)
    sink.check(found.schema)
    step = -(-found.num_rows // ranges)
    infos = [
        sink.write(store, i, iter(found.slice(i * step, step).to_batches(max_chunksize=50)))
        for i in range(ranges)
    ]
    sink.finish(store, json.loads(json.dumps(infos)))
    return folder


def test_export_and_back(tmp_path: Path) -> None:
    pq.write_table(mixed(), tmp_path / "a.parquet")
    first = table(source(tmp_path / "a.parquet"))
    folder = exported(first, tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [
        f"part-0000{i}.parquet" for i in range(3)
    ]
    assert pq.read_table(folder).replace_schema_metadata(None).equals(plain(mixed()))
    again = table(source(folder))
    assert again.equals(first, check_metadata=True)


def test_export_of_pictures_and_back(tmp_path: Path) -> None:
    pq.write_table(pictures(), tmp_path / "a.parquet")
    first = table(source(tmp_path / "a.parquet"))
    folder = exported(first, tmp_path / "out", 1)
    found = pq.read_table(folder / "part-00000.parquet")
    assert found.equals(pictures())
    assert json.loads(found.schema.metadata[b"huggingface"]) == PICTURES
    assert table(source(folder)).equals(first, check_metadata=True)
    folder = exported(first.drop_columns("image_path"), tmp_path / "less", 1)
    found = pq.read_table(folder / "part-00000.parquet")
    assert found["image"].to_pylist() == [b"\x89PNG 1", b"\x89PNG 2", None]
    assert b"huggingface" not in found.schema.metadata  # their library would not open it


def test_export_keeps_the_note_of_another_format(tmp_path: Path) -> None:
    field = pa.field("x", pa.large_binary(), metadata={ENCODING_KEY: b"mds:jpeg"})
    schema = pa.schema([field], metadata={SOURCE_KEY: b'{"format": "mds"}'})
    folder = exported(
        pa.table([pa.array([b"1"], pa.large_binary())], schema=schema), tmp_path / "o", 1
    )
    again = source(folder).schema
    assert again.metadata[SOURCE_KEY] == b'{"format": "mds"}'
    assert again.field("x").metadata[ENCODING_KEY] == b"mds:jpeg"


def test_what_parquet_cannot_hold(tmp_path: Path) -> None:
    schema = pa.schema([("ok", pa.int8()), ("s", pa.timestamp("s")), ("d", pa.list_(pa.date64()))])
    with pytest.raises(
        ColumnError, match=r"'s' \(timestamp\[s\]: it becomes timestamp\[ms\]\); 'd'"
    ):
        tabular.ParquetSink().check(schema)
    with pytest.raises(ColumnError, match="decimal128"):
        tabular.ParquetSink().check(pa.schema([("x", pa.decimal128(20, -2))]))


# --- bad files


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows"])
def test_cut_and_empty_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(mixed(), path)
    else:
        write_ipc(path, mixed(), stream=kind == "arrows")
    data = path.read_bytes()
    for keep in (0, 3, 10, len(data) // 2, len(data) - 5, len(data) - 1):
        path.write_bytes(data[:keep])
        with pytest.raises(SourceError, match=rf"a\.{kind}"):
            table(source(path))


def test_columns_named_twice(tmp_path: Path) -> None:
    twice = pa.table([[1], [2]], names=["n", "n"])
    pq.write_table(twice, tmp_path / "a.parquet")
    write_ipc(tmp_path / "a.arrow", twice, stream=False)
    for path in tmp_path.iterdir():
        with pytest.raises(SchemaError, match="'n' twice"):
            source(path)


def test_old_feather(tmp_path: Path) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(SourceError, match="first version"):
        source(tmp_path / "a.feather")


def origins(opened: Source) -> list[tuple[str | None, int | None]]:
    """Where all rows come from, as workers tell it: unit by unit, some rows at a time."""
    found: list[tuple[str | None, int | None]] = []
    for unit in opened.units():
        start = 0
        for batch in opened.read(unit, opened.schema):
            files, rows = opened.origins(unit, start, batch.num_rows)
            found += zip(files.to_pylist(), rows.to_pylist(), strict=True)
            start += batch.num_rows
    return found


@pytest.mark.parametrize("names", [["n"], ["t"], ["l"], ["n", "t", "l"]])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_rows_know_their_file_and_their_number_in_it(
    kind: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_module, "_UNIT_BYTES", 3000)
    monkeypatch.setattr(ipc_module, "_UNIT_BYTES", 3000)
    numbers = list(range(1000))
    whole = pa.table({"n": numbers, "t": map(str, numbers), "l": [[n] for n in numbers]})
    paths = [tmp_path / f"{name}.{'arrow' if kind == 'stream' else kind}" for name in "ab"]
    for path in paths:
        if kind == "parquet":
            pq.write_table(whole.select(names), path, row_group_size=90, compression="none")
            continue
        writer = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with writer(path, whole.select(names).schema) as out:
            out.write_table(whole.select(names), max_chunksize=90)
    opened = source(tmp_path)
    assert len(opened.units()) > 4 or kind == "stream"
    assert origins(opened) == [(str(path), n) for path in paths for n in numbers]


def test_braces_choose_files_in_their_order(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b1"):
        pq.write_table(pa.table({"n": [name]}), tmp_path / f"{name}.parquet")

    def names(pattern: str) -> list[str]:
        return table(source(f"{tmp_path}/{pattern}"))["n"].to_pylist()

    assert names("{b,a}*.parquet") == ["b1", "a1", "a2"]
    assert names("a{1..2}.parquet") == ["a1", "a2"]
    with pytest.raises(SourceError, match=r"there is no .*a3\.parquet"):
        names("a{1..3}.parquet")


def test_a_table_made_in_the_folder_is_no_data_of_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    for name in ("t.lance/data/x.lance", "u/_versions/1.manifest", "u/data/b.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"none of ours")
    (tmp_path / "t.lance.writing").mkdir()
    (tmp_path / "t.lance.writing" / "b.csv").write_text("n\n1\n")
    assert tabular.detect(Store(tmp_path)) == "parquet"
    assert table(source(tmp_path))["n"].to_pylist() == [1]


@pytest.mark.parametrize("rows", range(1, 6))
def test_decimals_of_a_mapped_file(rows: int, tmp_path: Path) -> None:
    """Lance ends in a panic if they are not at multiples of 16 bytes."""
    found = pa.table(
        {
            "a": ["x" * (i + 1) for i in range(rows)],
            "d": pa.array([decimal.Decimal("1.5")] * rows, pa.decimal128(10, 2)),
        }
    )
    (tmp_path / "ipc").mkdir()
    with (
        pa.OSFile(str(tmp_path / "ipc" / "x.arrow"), "wb") as file,
        pa.ipc.new_file(file, found.schema) as out,
    ):
        out.write_table(found)
    destrier.convert(tmp_path / "ipc", tmp_path / "t.lance", num_workers=0)
    assert lance.dataset(str(tmp_path / "t.lance")).to_table().equals(found)


def test_bytes_under_nulls_are_no_text(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 3, 4], pa.int32()).buffers()[1]
    data = [offsets, pa.py_buffer(b"a\xff\xfeb")]
    text = pa.StringArray.from_buffers(3, *data, pa.py_buffer(b"\5"))
    inner = pa.ListArray.from_arrays(pa.array([0, 1, 3, 3], pa.int32()), text)
    made = pa.table({"t": text, "l": inner, "s": pa.StructArray.from_arrays([text], ["x"])})
    with pa.ipc.new_file(tmp_path / "a.arrow", made.schema) as writer:
        writer.write_table(made)
    got = table(source(tmp_path / "a.arrow"))
    assert got.to_pydict() == made.to_pydict()
    for name in ("t", "l", "s"):
        part = got[name].chunk(0)
        part = part.values if name == "l" else part.field("x") if name == "s" else part
        assert bytes(part.buffers()[2])[: part.buffers()[2].size].isascii()
