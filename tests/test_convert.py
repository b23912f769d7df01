"""Ways in and out, over all formats: convert, link, export, verify, and their commands."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import destrier
import tables
from destrier import ArgumentError, ColumnError, EmptyError, LinkError, SourceError, WriteError
from destrier.cli import main
from destrier.formats import EXPORTS, FORMATS

ROWS = 300


def payload(i: int) -> bytes:
    return tables.blob(i) * 600


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table that every format can hold."""
    path = tmp_path_factory.mktemp("convert") / "t.lance"
    ids = np.arange(ROWS)
    columns = {
        "id": pa.array(ids),
        "value": pa.array(ids / 8, pa.float64()),
        "name": pa.array([f"row {i}" for i in ids.tolist()]),
        "data": pa.array([payload(i) for i in ids.tolist()], pa.large_binary()),
    }
    lance.write_dataset(pa.table(columns), str(path), max_rows_per_file=120)
    return str(path)


def rows(uri: str | Path) -> list[dict[str, Any]]:
    return lance.dataset(str(uri)).to_table().to_pylist()


@pytest.fixture(scope="module")
def exported(table: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The table in each format."""
    folder = tmp_path_factory.mktemp("exports")
    for format in EXPORTS:
        done = destrier.export(table, folder / format, format=format, num_workers=0)
        assert done.rows == ROWS
        assert done.files > 0
    return {format: str(folder / format) for format in EXPORTS}


@pytest.mark.parametrize("format", EXPORTS)
def test_there_and_back_again(
    table: str, exported: dict[str, str], format: str, tmp_path: Path
) -> None:
    names = ["id", "value", "name", "data"]
    written = destrier.convert(exported[format], tmp_path / "t.lance", num_workers=0)
    assert written.rows == ROWS
    source = lance.dataset(table).to_table()
    back = lance.dataset(str(tmp_path / "t.lance")).to_table()
    kept = [n for n in names if n in back.column_names]
    if format == "webdataset":  # columns have the members' names there
        data = next(n for n in back.column_names if n.startswith("data"))
        assert back[data].to_pylist() == source["data"].to_pylist()
    else:
        assert kept == names or sorted(kept) == sorted(names)
        for name in names:
            assert back[name].to_pylist() == source[name].to_pylist()
            assert back.schema.field(name).type == source.schema.field(name).type
    again = destrier.verify(exported[format], tmp_path / "t.lance", num_workers=0)
    assert (again.equal, again.rows, again.differences) == (True, ROWS, ())


@pytest.mark.parametrize("format", [f for f in EXPORTS if f != "webdataset"])
def test_verify_proves_an_export(table: str, exported: dict[str, str], format: str) -> None:
    assert destrier.verify(exported[format], table, num_workers=0).equal


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_export(table: str, tmp_path: Path, workers: int) -> None:
    destrier.export(table, tmp_path / "one", format="mds", num_workers=0)
    destrier.export(table, tmp_path / "two", format="mds", num_workers=workers)
    for name in os.listdir(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_export_rows_and_columns(table: str, tmp_path: Path) -> None:
    destrier.export(
        table, tmp_path / "p", format="parquet", filter="id % 2 = 1", columns=["name", "id"]
    )
    destrier.convert(tmp_path / "p", tmp_path / "t.lance", num_workers=0)
    assert rows(tmp_path / "t.lance") == [{"name": f"row {i}", "id": i} for i in range(1, ROWS, 2)]


def test_export_a_permutation(table: str, tmp_path: Path) -> None:
    order = destrier.PermutationBuilder(table).shuffle(seed=5).execute()
    destrier.export(table, tmp_path / "p", format="parquet", permutation=order, num_workers=0)
    destrier.convert(tmp_path / "p", tmp_path / "t.lance", num_workers=0)
    listed = order.to_arrow()["row_offset"].to_pylist()
    assert [row["id"] for row in rows(tmp_path / "t.lance")] == listed
    with pytest.raises(ArgumentError, match="filter and permutation"):
        destrier.export(table, tmp_path / "q", format="parquet", permutation=order, filter="id > 3")


def test_an_export_leaves_out_what_the_writer_made(tmp_path: Path) -> None:
    destrier.optimize(
        lambda i: {"id": i, "tokens": list(range(i % 4))},
        range(50),
        tmp_path / "t.lance",
        num_workers=0,
    )
    destrier.export(tmp_path / "t.lance", tmp_path / "p", format="parquet", num_workers=0)
    destrier.convert(tmp_path / "p", tmp_path / "u.lance", num_workers=0)
    assert rows(tmp_path / "u.lance") == rows(tmp_path / "t.lance")
    assert destrier.verify(tmp_path / "p", tmp_path / "t.lance", num_workers=0).equal


def test_export_refuses(table: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for arguments, error, match in (
        ({"dst": tmp_path / "full", "format": "mds"}, WriteError, "choose an empty place"),
        ({"dst": tmp_path / "e", "format": "zip"}, ArgumentError, "litdata, mds, parquet"),
        ({"dst": tmp_path / "e", "format": "mds", "nix": 1}, ArgumentError, "'nix' is no option"),
        ({"dst": tmp_path / "e", "format": "mds", "filter": "id < 0"}, EmptyError, "keeps none"),
        ({"dst": tmp_path / "e", "format": "mds", "columns": ["nix"]}, ColumnError, "nix"),
    ):
        with pytest.raises(error, match=match):
            destrier.export(table, **arguments)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["full"]


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    data = pa.table({"id": range(10), "name": ["x"] * 9 + [None]})
    lance.write_dataset(data, str(tmp_path / "t.lance"))
    with pytest.raises(SourceError, match=r"(?i)row 9|null"):
        destrier.export(tmp_path / "t.lance", tmp_path / "out", format="mds", num_workers=0)
    assert os.listdir(tmp_path) == ["t.lance"]


@pytest.mark.parametrize("format", EXPORTS)
def test_provenance(table: str, tmp_path: Path, format: str, monkeypatch: Any) -> None:
    """File and row of the source, also of rows that a filter keeps, over several files."""
    monkeypatch.setattr("destrier.exporting._RANGE_BYTES", 300_000)
    destrier.export(table, tmp_path / "x", format=format, num_workers=0)
    uri = tmp_path / "t.lance"
    destrier.convert(tmp_path / "x", uri, provenance=True, num_workers=2)
    found = rows(uri)
    by_file: dict[str, list[int]] = {}
    for row in found:
        by_file.setdefault(row["source_file"], []).append(row["source_row"])
    assert len(by_file) > 1
    assert all(Path(file).is_file() for file in by_file)
    assert all(numbers == list(range(len(numbers))) for numbers in by_file.values())
    assert destrier.verify(tmp_path / "x", uri, num_workers=0).equal
    if format != "webdataset":
        destrier.convert(
            tmp_path / "x", uri, provenance=True, filter="id % 3 = 1", mode="overwrite"
        )
        assert rows(uri) == [row for row in found if row["id"] % 3 == 1]


def test_linked_and_converted_tables_are_equal(
    exported: dict[str, str], table: str, tmp_path: Path
) -> None:
    for format in ("mds", "webdataset"):
        linked = tmp_path / f"{format}.lance"
        destrier.link(exported[format], linked, num_workers=0)
        assert destrier.verify(exported[format], linked, num_workers=0).equal
    files = tmp_path / "files"
    for row in rows(table)[:20]:
        path = files / ("even" if row["id"] % 2 == 0 else "odd") / f"{row['id']}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(row["data"])
    destrier.link(files, tmp_path / "f.lance", format="folder", num_workers=0)
    assert destrier.verify(files, tmp_path / "f.lance", format="folder", num_workers=0).equal


@pytest.mark.parametrize("crc", [False, True])
def test_a_file_changed_in_place(exported: dict[str, str], tmp_path: Path, crc: bool) -> None:
    """With size and time kept only a CRC tells, since both sides are read from the same file."""
    shard = tmp_path / "shards"
    shard.mkdir()
    for name in os.listdir(exported["mds"]):
        (shard / name).write_bytes(Path(exported["mds"], name).read_bytes())
    uri = tmp_path / "t.lance"
    destrier.link(shard, uri, num_workers=0, crc=crc)
    assert destrier.verify(shard, uri, num_workers=0).equal
    os.rename(shard, tmp_path / "moved")
    destrier.relink(uri, shard, tmp_path / "moved")
    file = next((tmp_path / "moved").glob("*.mds"))
    before = file.stat()
    body = bytearray(file.read_bytes())
    body[body.index(payload(177))] ^= 1
    file.write_bytes(body)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = destrier.verify(tmp_path / "moved", uri, num_workers=0)
    assert found.equal == (not crc)
    if crc:
        assert [(each.row, each.column) for each in found.differences] == [(177, "data")]
    os.utime(file)
    with pytest.raises(LinkError):
        destrier.verify(tmp_path / "moved", uri, num_workers=0)


def test_verify_finds_every_kind_of_difference(exported: dict[str, str], tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    destrier.convert(exported["parquet"], uri, num_workers=0)
    good = lance.dataset(uri).to_table()

    def found(changed: pa.Table, limit: int = 10) -> destrier.verification.Verified:  # type: ignore[name-defined]
        lance.write_dataset(changed, uri, mode="overwrite")
        return destrier.verify(exported["parquet"], uri, num_workers=0, limit=limit)

    assert found(good).equal
    answer = found(good.slice(1))
    assert (
        str(answer.differences[0])
        == f"rows: {ROWS} rows in the dataset, {ROWS - 1} rows in the table"
    )
    values = good["value"].to_pylist()
    values[7], values[201] = -values[7], None
    answer = found(good.set_column(1, "value", pa.array(values)))
    assert (answer.equal, answer.differing) == (False, 2)
    assert [(d.row, d.column, d.source, d.table) for d in answer.differences] == [
        (7, "value", "0.875", "-0.875"),
        (201, "value", "25.125", "None"),
    ]
    assert found(good.set_column(1, "value", pa.array(values)), limit=1).differences[1:] == ()
    values = [-0.0 if v == 0 else v for v in good["value"].to_pylist()]
    assert found(good.set_column(1, "value", pa.array(values))).differing == 1
    swapped = good.take(pa.array([1, 0, *range(2, ROWS)]))
    assert {d.row for d in found(swapped).differences} == {0, 1}
    assert found(good.drop_columns("name")).differences[0].column == "name"
    more = found(good.append_column("more", good["id"]))
    assert (more.differences[0].column, more.differences[0].source) == ("more", "no such column")
    retyped = found(good.set_column(0, "id", good["id"].cast(pa.int32())))
    assert str(retyped.differences[0]) == "column 'id': int64 in the dataset, int32 in the table"


def test_verify_some_columns_and_rows(exported: dict[str, str], tmp_path: Path) -> None:
    src, uri = exported["parquet"], tmp_path / "t.lance"
    destrier.convert(src, uri, columns=["name", "id"], filter="id < 100", num_workers=0)
    assert destrier.verify(src, uri, columns=["name", "id"], filter="id < 100").equal
    found = destrier.verify(src, uri, filter="id < 100")
    assert {(d.row, d.column) for d in found.differences} == {(None, "value"), (None, "data")}
    assert found.differing == 2
    with pytest.raises(ColumnError, match="no column 'nix'"):
        destrier.verify(src, uri, columns=["nix"], filter="id < 100")


def test_an_export_does_not_touch_what_lies_beside(table: str, tmp_path: Path) -> None:
    (tmp_path / "out.writing").mkdir()
    (tmp_path / "out.writing" / "mine").touch()
    (tmp_path / "full" / "folder").mkdir(parents=True)
    os.symlink(tmp_path / "out.writing", tmp_path / "link")
    destrier.export(table, tmp_path / "out", format="mds", num_workers=0)
    assert (tmp_path / "out.writing" / "mine").exists()
    for name in ("full", "link"):
        with pytest.raises(WriteError, match="choose an empty place"):
            destrier.export(table, tmp_path / name, format="mds", num_workers=0)
    (tmp_path / "empty").mkdir()
    destrier.export(table, tmp_path / "empty", format="mds", num_workers=0)
    assert sorted(os.listdir(tmp_path)) == ["empty", "full", "link", "out", "out.writing"]


def test_formats_and_options_are_checked(exported: dict[str, str], tmp_path: Path) -> None:
    dst = tmp_path / "t.lance"
    with pytest.raises(ArgumentError, match=", ".join(FORMATS)):
        destrier.convert(exported["mds"], dst, format="zip")
    with pytest.raises(ArgumentError, match="'blocks' is no option of the format mds; its options"):
        destrier.convert(exported["mds"], dst, blocks=3)
    with pytest.raises(ColumnError, match=r"nix.*"):
        destrier.convert(exported["mds"], dst, columns=["nix"], num_workers=0)
    with pytest.raises(SourceError, match="nothing that can be converted"):
        destrier.convert(tmp_path / "nowhere", dst)
    with pytest.raises(ArgumentError, match="convert"):
        destrier.link(exported["parquet"], dst)
    lance.write_dataset(pa.table({"id": [1]}), str(tmp_path / "is.lance"))
    with pytest.raises(SourceError, match="is a Lance table already"):
        destrier.convert(tmp_path / "is.lance", dst)
    shutil.rmtree(tmp_path / "is.lance")
    assert os.listdir(tmp_path) == []


# ---- commands ---------------------------------------------------------------------------------


def test_the_commands(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mds, copy, linked = (str(tmp_path / n) for n in ("mds", "copy.lance", "linked.lance"))
    one = ["--num-workers", "0"]
    assert main(["export", table, mds, "--format", "mds", "--filter", "id < 100", *one]) == 0
    assert "100 rows in 2 files" in capsys.readouterr().out
    assert main(["convert", mds, copy, "--compression", "id=zstd", "--provenance", *one]) == 0
    assert f"{copy}: 100 of 100 rows" in capsys.readouterr().out
    assert main(["link", mds, linked, "--crc", "--json", *one]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 100
    for uri in (copy, linked):
        assert main(["verify", mds, uri, *one]) == 0
        assert capsys.readouterr().out == "equal: 100 rows\n"
    assert main(["verify", mds, table, *one]) == 1
    assert "100 rows in the dataset, 300 rows in the table" in capsys.readouterr().out
    csv = tmp_path / "few.csv"
    csv.write_text("id\n1\n")
    assert main(["verify", table, str(csv), *one]) == 1
    assert "destrier verify DATASET TABLE" in capsys.readouterr().err
    chunks = str(tmp_path / "chunks")
    assert main(["export", table, chunks, "--format", "litdata", "--columns", "id", *one]) == 0
    assert main(["verify", chunks, table, *one]) == 1
    assert "destrier verify TABLE EXPORT" in capsys.readouterr().out
    os.rename(mds, f"{mds}2")
    assert main(["relink", linked, mds, f"{mds}2"]) == 0
    assert "100 links changed" in capsys.readouterr().out
    assert main(["verify", f"{mds}2", linked, "--json", *one]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    parts = destrier.PermutationBuilder(table).split_random(counts=[10, 290], names=["a", "b"])
    parts.execute().save(str(tmp_path / "parts.lance"))
    some = ["--permutation", str(tmp_path / "parts.lance"), "--part", "a"]
    assert main(["export", table, str(tmp_path / "a"), "--format", "parquet", *some, *one]) == 0
    assert "10 rows in 1 files" in capsys.readouterr().out
    assert main(["export", table, mds, "--format", "mds", "--part", "a"]) == 1
    assert "--permutation" in capsys.readouterr().err
    assert main(["convert", mds, copy, *one]) == 1
    assert "destrier: error:" in capsys.readouterr().err
    assert main(["convert", str(csv), copy, *one]) == 1
    assert "pass --mode append or --mode overwrite" in capsys.readouterr().err
    assert main(["convert", f"{mds}2", copy, "--option", "nix=true", *one]) == 1
    assert "'nix' is no option" in capsys.readouterr().err
