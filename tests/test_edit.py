"""Edits of a table, and rows by key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from lance.blob import Blob, BlobType

from destrier.editing import lookup
from destrier.editing.changes import append, delete, tag, update, upsert
from destrier.editing.lookup import get, index
from destrier.editing.merging import merge
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierError,
    DestrierWarning,
    FilterError,
    MissingKeyError,
    SchemaError,
    TableError,
    VersionError,
    WriteError,
)

MEDIA = {b"content_type": b"image/png"}


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def rows_of(uri: Any, **options: Any) -> list[dict[str, Any]]:
    return lance.dataset(str(uri)).to_table(blob_handling="all_binary", **options).to_pylist()


def blob_value(i: int) -> bytes | None:
    return None if i % 5 == 0 else bytes([i % 256]) * (i % 4 * 40_000)


def rich_schema() -> pa.Schema:
    tensor = pa.fixed_shape_tensor(pa.float32(), [2, 2])
    image = lance.blob_field("image")
    return pa.schema(
        [
            pa.field("id", pa.int64()),
            image.with_metadata({**(image.metadata or {}), **MEDIA}),
            pa.field("name", pa.string()),
            pa.field("grid", tensor),
        ],
        metadata={b"made": b"here"},
    )


def rich_table(path: Path, ids: range, schema: pa.Schema | None = None) -> str:
    """Write a table with blobs (some null, some empty, some large), and delete every 7th row."""
    schema = schema or rich_schema()
    grids = np.array([[i, 1, 2, 3] for i in ids], np.float32)
    storage = pa.FixedSizeListArray.from_arrays(pa.array(grids.ravel()), 4)
    made = {
        "id": pa.array(ids),
        "image": lance.blob_array([blob_value(i) for i in ids]),
        "name": pa.array([f"row {i}" for i in ids]),
        "grid": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), [2, 2]), storage
        ),
    }
    table = pa.table([made[name] for name in schema.names], schema=schema)
    lance.write_dataset(table, str(path), max_rows_per_file=50)
    lance.dataset(str(path)).delete("id % 7 = 6")
    return str(path)


# ---- append -----------------------------------------------------------------------------------


def as_table(schema: pa.Schema) -> pa.Table:
    return pa.table({"id": [1, 2], "label": [3, 4], "value": [0.5, None]}, schema=schema)


FORMS = {
    "table": lambda t: t,
    "columns in another order": lambda t: t.select(["value", "id", "label"]),
    "batch": lambda t: t.to_batches()[0],
    "reader": lambda t: t.to_reader(),
    "batches": lambda t: iter(t.to_batches(max_chunksize=1)),
    "dicts": lambda t: t.to_pylist(),
    "generator of dicts": lambda t: (row for row in t.to_pylist()),
    "polars": pl.from_arrow,
}


@pytest.mark.parametrize("form", FORMS)
def test_append_takes(plain: lance.LanceDataset, form: str) -> None:
    table = as_table(plain.schema)
    assert append(plain, FORMS[form](table)) == 2
    grown = lance.dataset(plain.uri)
    assert grown.version == 2
    assert grown.to_table().slice(1003).combine_chunks() == table.combine_chunks()


def test_append_of_text_and_bytes_from_polars(tmp_path: Path) -> None:
    table = pa.table({"s": ["a", None], "b": [b"x", b""], "l": [["p"], []]})
    lance.write_dataset(table, str(tmp_path / "t.lance"))
    append(tmp_path / "t.lance", pl.from_arrow(table))
    assert rows_of(tmp_path / "t.lance") == table.to_pylist() * 2


WRONG = {
    "type": ({"id": [1], "label": [1], "value": [1.0]}, r"'label' is int32 in .*int64 in the data"),
    "missing": ({"id": [1], "value": [1.0]}, "lacks column 'label'"),
    "more": ({"id": [1], "label": [1], "value": [1.0], "x": [1]}, "'x' of the data is not in"),
}


@pytest.mark.parametrize("case", WRONG)
def test_append_refuses(plain: lance.LanceDataset, case: str) -> None:
    data, message = WRONG[case]
    before = files(Path(plain.uri))
    with pytest.raises(SchemaError, match=message):
        append(plain, pa.table(data))
    assert files(Path(plain.uri)) == before


def test_append_names_the_row_of_another_type(plain: lance.LanceDataset) -> None:
    good = as_table(plain.schema).to_pylist()
    with pytest.raises(SchemaError, match="label") as caught:
        append(plain, [*good, {"id": 1, "label": "x", "value": 0.0}])
    assert caught.value.row == 2
    assert lance.dataset(plain.uri).version == 1


def test_a_failure_in_the_middle_appends_nothing(plain: lance.LanceDataset) -> None:
    def batches() -> Any:
        for _ in range(3):
            yield from as_table(plain.schema).to_batches()
        raise ZeroDivisionError("mine")

    before = files(Path(plain.uri))
    with pytest.raises(ZeroDivisionError, match="mine"):
        append(plain, batches())
    assert files(Path(plain.uri)) == before
    with pytest.raises(ArgumentError, match="got str"):
        append(plain, "rows.csv")
    with pytest.raises(ArgumentError, match="got int"):
        append(plain, [1, 2])


def test_append_of_bytes_to_blobs_and_of_nothing(tmp_path: Path) -> None:
    uri = rich_table(tmp_path / "t.lance", range(20))
    rows = rows_of(uri)
    assert append(uri, []) == lance.dataset(uri).version == 2
    schema = lance.dataset(uri).to_table(blob_handling="all_binary").schema
    append(uri, pa.Table.from_pylist(rows, schema=schema.remove_metadata()))
    dicts = [{**row, "grid": np.array(row["grid"], np.float32).reshape(2, 2)} for row in rows]
    append(uri, dicts)
    assert rows_of(uri) == rows * 3
    assert isinstance(lance.dataset(uri).schema.field("image").type, BlobType)


# ---- merge ------------------------------------------------------------------------------------


def test_merge_keeps_rows_blobs_and_metadata(tmp_path: Path) -> None:
    first = rich_table(tmp_path / "a.lance", range(120))
    schema = rich_schema()
    second = rich_table(  # columns in another order
        tmp_path / "b.lance", range(500, 530), pa.schema(reversed(schema), metadata=schema.metadata)
    )
    assert merge([first, second, first], tmp_path / "all.lance") == 1
    expected = [*rows_of(first), *rows_of(second), *rows_of(first)]
    assert rows_of(tmp_path / "all.lance") == expected
    merged = lance.dataset(str(tmp_path / "all.lance"))
    assert merged.schema.equals(lance.dataset(first).schema, check_metadata=True)
    assert merge([second], tmp_path / "all.lance", mode="append") == 2
    assert rows_of(tmp_path / "all.lance") == expected + rows_of(second)
    assert merge([second], tmp_path / "all.lance", mode="overwrite") == 3
    assert rows_of(tmp_path / "all.lance") == rows_of(second)


def test_merge_keeps_links_as_links(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 10
    (tmp_path / "big.bin").write_bytes(payload)
    place = (tmp_path / "big.bin").as_uri()
    values = [Blob.from_uri(place, i, i + 1) for i in range(20)]
    values[3:6] = [None, b"inline", Blob.from_uri(place)]
    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("data")])
    table = pa.table([pa.array(range(20)), lance.blob_array(values)], schema=schema)
    for name in "ab":
        lance.write_dataset(
            table, str(tmp_path / f"{name}.lance"), allow_external_blob_outside_bases=True
        )
    merge([tmp_path / "a.lance", tmp_path / "b.lance"], tmp_path / "c.lance")
    assert rows_of(tmp_path / "c.lance") == rows_of(tmp_path / "a.lance") * 2
    described = lance.dataset(str(tmp_path / "c.lance")).to_table()["data"].to_pylist()
    kinds = [value and value["kind"] for value in described]
    assert kinds == ([3, 3, 3, None, 0] + [3] * 15) * 2


def test_merge_makes_blobs_of_the_older_format_blobs(tmp_path: Path) -> None:
    old = {b"lance-encoding:blob": b"true", **MEDIA}
    schema = pa.schema(
        [pa.field("id", pa.int64()), pa.field("image", pa.large_binary(), metadata=old)]
    )
    table = pa.table([[1, 2, 3], [b"a", None, b""]], schema=schema)
    lance.write_dataset(table, str(tmp_path / "old.lance"), data_storage_version="2.0")
    merge([tmp_path / "old.lance"], tmp_path / "new.lance")
    assert rows_of(tmp_path / "new.lance") == table.to_pylist()
    field = lance.dataset(str(tmp_path / "new.lance")).schema.field("image")
    assert isinstance(field.type, BlobType)
    assert field.metadata[b"content_type"] == b"image/png"
    append(tmp_path / "old.lance", [{"id": 4, "image": b"d"}])
    merge([tmp_path / "new.lance"], tmp_path / "old.lance", mode="append")
    rows = table.to_pylist()
    assert rows_of(tmp_path / "old.lance") == [*rows, {"id": 4, "image": b"d"}, *rows]


def test_merge_refuses_other_schemas_and_leaves_nothing(tmp_path: Path) -> None:
    made = {
        "a": pa.schema([pa.field("id", pa.int64()), pa.field("x", pa.int32(), metadata=MEDIA)]),
        "type": pa.schema([pa.field("id", pa.int64()), pa.field("x", pa.int64(), metadata=MEDIA)]),
        "name": pa.schema([pa.field("id", pa.int64()), pa.field("y", pa.int32())]),
        "meta": pa.schema([pa.field("id", pa.int64()), pa.field("x", pa.int32())]),
    }
    for name, schema in made.items():
        columns = [pa.array([1], field.type) for field in schema]
        lance.write_dataset(pa.table(columns, schema=schema), str(tmp_path / f"{name}.lance"))
    for name, message in {
        "type": "'x' is int32 in .*int64",
        "name": "only one of them has x, y",
        "meta": r"metadata of column 'x' is \{'content_type': 'image/png'\}",
    }.items():
        with pytest.raises(SchemaError, match=message):
            merge([tmp_path / "a.lance", tmp_path / f"{name}.lance"], tmp_path / "all.lance")
    with pytest.raises(WriteError, match="is a table at"):
        merge([tmp_path / "a.lance"], tmp_path / "type.lance")
    with pytest.raises(TableError, match="no table at"):
        merge([tmp_path / "a.lance"], tmp_path / "all.lance", mode="append")
    with pytest.raises(WriteError, match="something else"):
        merge([tmp_path / "a.lance"], tmp_path)
    with pytest.raises(ArgumentError, match="list"):
        merge(str(tmp_path / "a.lance"), tmp_path / "all.lance")
    assert not (tmp_path / "all.lance").exists()


def test_a_merge_that_cannot_read_leaves_nothing(tmp_path: Path) -> None:
    good = rich_table(tmp_path / "a.lance", range(200))
    bad = rich_table(tmp_path / "b.lance", range(200))
    for path in sorted((tmp_path / "b.lance/data").glob("*.lance"))[1:]:
        path.unlink()
    with pytest.raises(DestrierError):
        merge([good, bad], tmp_path / "all.lance")
    assert {path.name for path in tmp_path.iterdir()} == {"a.lance", "b.lance"}
    merge([good], tmp_path / "all.lance")
    before = files(tmp_path / "all.lance")
    for mode in ("append", "overwrite"):
        with pytest.raises(DestrierError):
            merge([good, bad], tmp_path / "all.lance", mode=mode)
    assert files(tmp_path / "all.lance") == before


def test_a_merge_that_is_killed_leaves_no_files_in_the_table(tmp_path: Path) -> None:
    uri = rich_table(tmp_path / "a.lance", range(300))
    target = tmp_path / "all.lance"
    merge([uri], target)
    before = files(target)
    script = """
        import os, sys
        from destrier.editing import merging

        def dies(tables, schema):
            yield from rows(tables, schema)
            os.kill(os.getpid(), 9)

        rows, merging._all_rows = merging._all_rows, dies
        merging.merge([sys.argv[1]] * 2, sys.argv[2], mode=sys.argv[3])
    """
    for mode in ("append", "overwrite"):
        command = [sys.executable, "-c", textwrap.dedent(script), uri, str(target), mode]
        killed = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert killed.returncode == -9, killed.stderr
        assert files(target) == before
        assert (tmp_path / "all.lance.merging").exists()
    assert merge([uri], target, mode="append") == 2
    assert rows_of(target) == rows_of(uri) * 2
    assert {path.name for path in tmp_path.iterdir()} == {"a.lance", "all.lance"}


def test_merge_says_which_metadata_of_the_schema_is_lost(tmp_path: Path) -> None:
    for name in "ab":
        schema = pa.schema([("id", pa.int64())], metadata={"from": name, "same": "yes"})
        lance.write_dataset(pa.table([[1]], schema=schema), str(tmp_path / f"{name}.lance"))
    with pytest.warns(DestrierWarning, match="metadata from,"):
        merge([tmp_path / "a.lance", tmp_path / "b.lance"], tmp_path / "c.lance")
    assert lance.dataset(str(tmp_path / "c.lance")).schema.metadata == {b"same": b"yes"}


# ---- delete, update, upsert, tag --------------------------------------------------------------


def test_delete(plain: lance.LanceDataset) -> None:
    done = delete(plain, "id >= 1000")
    assert (done.version, done.deleted) == (2, 3)
    assert lance.dataset(plain.uri).count_rows() == 1000
    for where in ("nope = 1", "id =", "id + 1", ""):
        with pytest.raises(FilterError, match=re.escape(repr(where))) as caught:
            delete(plain, where)
        assert "id, label, value" in str(caught.value)
    assert lance.dataset(plain.uri).version == 2


def test_edits_are_of_the_latest_version(plain: lance.LanceDataset) -> None:
    old = lance.dataset(plain.uri)
    delete(plain.uri, "id = 0")
    assert delete(old, "id = 1").version == 3
    assert lance.dataset(plain.uri).count_rows() == 1001


VALUES = {
    "n": -7,
    "u": 2**64 - 1,
    "f": 0.1,
    "nan": float("nan"),
    "s": "O'Hara; -- \\ \n",
    "b": b"\x00'\xff",
    "yes": True,
    "many": [1, 2],
}


@pytest.fixture
def varied(tmp_path: Path) -> str:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("n", pa.int8()),
            ("u", pa.uint64()),
            ("f", pa.float32()),
            ("nan", pa.float64()),
            ("s", pa.string()),
            ("b", pa.binary()),
            ("yes", pa.bool_()),
            ("many", pa.list_(pa.int64())),
        ]
    )
    empty = pa.Table.from_pylist([{"id": i} for i in range(3)], schema=schema)
    lance.write_dataset(empty, str(tmp_path / "v.lance"))
    return str(tmp_path / "v.lance")


def test_update_sets_values_as_they_are(varied: str) -> None:
    assert update(varied, "id = 1", VALUES).updated == 1
    row = next(row for row in rows_of(varied) if row["id"] == 1)
    assert np.isnan(row.pop("nan"))
    assert row.pop("f") == np.float32(0.1)
    assert row == {"id": 1} | {k: v for k, v in VALUES.items() if k not in ("nan", "f")}
    update(varied, None, {"s": None, "n": None}, sql={"u": "u - 1"})
    rows = rows_of(varied)
    assert [row["s"] for row in rows] == [row["n"] for row in rows] == [None] * 3
    assert [row["u"] for row in sorted(rows, key=lambda row: row["id"])] == [None, 2**64 - 2, None]


@pytest.mark.parametrize(
    ("values", "sql", "error", "message"),
    [
        ({"n": "1"}, {}, SchemaError, "'n'"),
        ({"n": 300}, {}, SchemaError, "300"),
        ({"s": 1}, {}, SchemaError, "'s'"),
        ({"n": 1.5}, {}, SchemaError, "1.5"),
        ({"nope": 1}, {}, ColumnError, "no column 'nope'"),
        ({}, {"nope": "1"}, ColumnError, "no column 'nope'"),
        ({}, {"n": "nope + 1"}, FilterError, "nope"),
        ({}, {"n": "1.9"}, FilterError, "gives double, but the column is int8"),
        ({}, {"n": "f * 2"}, FilterError, "gives float, but the column is int8"),
        ({}, {"s": "id"}, FilterError, "gives int64, but the column is string"),
        ({}, {"n": "'1'"}, FilterError, "gives string, but the column is int8"),
        ({}, {"n": "300"}, WriteError, "as it was"),
        ({"n": 1}, {"n": "2"}, ArgumentError, "both"),
        ({}, {}, ArgumentError, "changes nothing"),
    ],
)
def test_update_refuses(
    varied: str, values: dict[str, Any], sql: dict[str, str], error: type, message: str
) -> None:
    before = rows_of(varied)
    with pytest.raises(error, match=message):
        update(varied, None, values, sql=sql)
    assert rows_of(varied) == before
    with pytest.raises(FilterError, match="bad"):
        update(varied, "bad = 1", {"s": "x"})


def test_updated_rows_move_behind_all_others(plain: lance.LanceDataset) -> None:
    update(plain, "id = 5", {"label": 99})
    ids = lance.dataset(plain.uri).to_table()["id"].to_pylist()
    assert ids == [*range(5), *range(6, 1003), 5]


def test_upsert(tmp_path: Path) -> None:
    uri = rich_table(tmp_path / "t.lance", range(100))
    grid = np.ones((2, 2), np.float32)
    new = [{"id": i, "image": b"new", "name": f"new {i}", "grid": grid} for i in (3, 1000, 50, 6)]
    before = {row["id"]: row for row in rows_of(uri)}
    done = upsert(uri, new, on="id")
    assert (done.inserted, done.updated) == (2, 2)  # 6 was deleted before
    assert done.version == lance.dataset(uri).version
    after = {row["id"]: row for row in rows_of(uri)}
    changed = {row["id"] for row in new}
    assert set(after) == set(before) | changed
    assert all(after[i]["image"] == b"new" for i in changed)
    assert all(after[i] == before[i] for i in set(after) - changed)


def test_upsert_refuses_keys_that_are_no_keys(plain: lance.LanceDataset) -> None:
    def row(i: Any) -> dict[str, Any]:
        return {"id": i, "label": 1, "value": 0.0}

    with pytest.raises(ArgumentError, match="key 8 is in the data twice, in rows 1 and 3"):
        upsert(plain, [row(7), row(8), row(9), row(8)], on="id")
    with pytest.raises(ArgumentError, match="row 1 of the data has no key"):
        upsert(plain, [row(7), row(None)], on="id")
    with pytest.raises(ColumnError, match="no column 'nope'"):
        upsert(plain, [row(7)], on="nope")
    with pytest.raises(ColumnError, match="float"):
        upsert(plain, [row(7)], on="value")
    with pytest.raises(SchemaError, match="label"):
        upsert(plain, pa.table({"id": [1]}), on="id")
    assert lance.dataset(plain.uri).version == 1


def test_tag(plain: lance.LanceDataset) -> None:
    delete(plain.uri, "id = 0")
    assert tag(plain.uri, "whole", version=1) == 1
    assert tag(plain.uri, "now") == 2
    assert lance.dataset(plain.uri, version="whole").count_rows() == 1003
    with pytest.raises(VersionError, match="whole"):
        tag(plain.uri, "whole", version=2)


# ---- get --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_warned", set())


def test_get_warns_once_without_an_index_and_never_writes(own_table: Any) -> None:
    before = files(own_table.path)
    with pytest.warns(DestrierWarning, match=r"no index of column 'id'.*index\(table, 'id'\)"):
        row = get(own_table.path, 100)
    assert row["name"] == "row 100"
    assert row["vector"] == [100, 100.25, 100.5, 100.75]
    assert get(own_table.path, 101, columns=["label"]) == {"label": 1}
    assert files(own_table.path) == before


def test_get_by_an_index(tmp_path: Path) -> None:
    uri = rich_table(tmp_path / "t.lance", range(100))
    index(uri, "name")
    rows = {row["id"]: row for row in rows_of(uri)}
    wanted = [50, 3, 98, 3]
    found = get(uri, [f"row {i}" for i in wanted])  # the column with the index
    for i, row in zip(wanted, found, strict=True):
        assert row["grid"].shape == (2, 2)
        assert {**row, "grid": row["grid"].ravel().tolist()} == rows[i]
    upsert(uri, [{**rows[3], "grid": np.ones((2, 2), np.float32), "image": b"3"}], on="id")
    assert get(uri, "row 3", columns=["image", "id"]) == {"image": b"3", "id": 3}
    assert get(uri, "row 3", version=3, on="name", columns=["image"]) != {"image": b"3"}
    assert get(uri, [], on="name") == []


def test_get_refuses(plain: lance.LanceDataset) -> None:
    index(plain, "id")
    uri = plain.uri
    with pytest.raises(MissingKeyError, match=r"has the key 5000, -1 \(column 'id'\)"):
        get(uri, [1, 5000, -1])
    with pytest.raises(KeyError, match="key 9223372036854775808"):
        get(uri, 2**63)
    for key in ("1", True, 1.0, b"1", None):
        with pytest.raises(ArgumentError, match=r"int64|a key is"):
            get(uri, key)
    with pytest.raises(ColumnError, match="float"):
        get(uri, 1.0, on="value")
    with pytest.raises(ColumnError, match="nope"):
        get(uri, 1, columns=["nope"])
    append(uri, [{"id": 7, "label": 1, "value": 0.0}])
    with pytest.raises(ArgumentError, match=r"two rows .* have the key 7 .*: 7 and 1003"):
        get(uri, 7)


def test_get_knows_the_key_column(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": [1, 2], "b": ["x'y", "z"], "c": [b"\0", b"\1"]}), uri)
    with pytest.raises(ColumnError, match="on="):
        get(uri, 1)
    for column in "abc":
        index(uri, column)
    with pytest.raises(ColumnError, match="indices of a, b, c"):
        get(uri, 1)
    assert get(uri, "x'y", on="b")["a"] == 1
    assert get(uri, b"\1", on="c")["a"] == 2
    assert get(uri, np.array([2, 1]), on="a", columns=["a"]) == [{"a": 2}, {"a": 1}]
    assert os.path.isdir(uri)


def test_a_table_of_lancedb(tmp_path: Path) -> None:
    table = lancedb.connect(tmp_path).create_table("t", pa.table({"id": [1, 2], "x": [3, 4]}))
    append(table, [{"id": 3, "x": 5}])
    delete(table, "id = 1")
    index(table, "id")
    table.checkout_latest()
    assert get(table, 3) == {"id": 3, "x": 5}
