"""A table and its export are equal exactly when no value was lost."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import destrier
from destrier.cli import main
from destrier.formats import EXPORTS

ROWS = 40


def tensors(rows: int, *shape: int) -> pa.Array:
    flat = pa.array(np.arange(rows * int(np.prod(shape)), dtype=np.float32))
    storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), shape), storage)


def everything() -> dict[str, pa.Array]:
    """Columns of types that no format but Parquet keeps."""
    i = range(ROWS)
    half = np.arange(ROWS) / 8
    shapes = [[n % 3 + 1, 2] for n in i]
    ragged = {"shape": pa.list_(pa.int32()), "values": pa.list_(pa.int16())}
    return {
        "small": pa.array([n - 20 for n in i], pa.int8()),
        "huge": pa.array([2**64 - 1 - n for n in i], pa.uint64()),
        "half": pa.array(half.astype(np.float16)),
        "single": pa.array([n / 3 for n in i], pa.float32()),
        "flag": pa.array([n % 2 == 0 for n in i]),
        "text": pa.array([f"text {n}" for n in i], pa.large_string()),
        "key": pa.array([f"key-{n}" for n in i]),
        "bytes": pa.array([bytes([n]) * 4 for n in i], pa.binary(4)),
        "fixed": pa.array([[n, n + 1] for n in i], pa.list_(pa.int16(), 2)),
        "nested": pa.array([[[n, 1], [2, n]] for n in i], pa.list_(pa.list_(pa.int8(), 2), 2)),
        "tensor": tensors(ROWS, 2, 3),
        "numbers": pa.array([[n] * (n % 4 + 1) for n in i], pa.large_list(pa.uint8())),
        "alike": pa.array([[n, 7] for n in i], pa.list_(pa.float64())),
        "words": pa.array([["a", f"{n}"] for n in i], pa.list_(pa.string())),
        "ragged": pa.array(
            [{"shape": s, "values": [n] * (s[0] * s[1])} for n, s in enumerate(shapes)],
            pa.struct(list(ragged.items())),
        ),
        "flat": pa.array(
            [{"shape": [2], "values": [n, n]} for n in i], pa.struct(list(ragged.items()))
        ),
        "struct": pa.array(
            [{"b": n, "a": {"c": n / 3, "d": f"{n}"}} for n in i],
            pa.struct(
                [("b", pa.int16()), ("a", pa.struct([("c", pa.float32()), ("d", pa.string())]))]
            ),
        ),
        "money": pa.array([Decimal(n) / 100 for n in i], pa.decimal128(12, 2)),
    }


LACKS: dict[str, set[str]] = {
    "litdata": {"huge", "money"},
    "mds": {"flag", "words", "nested", "struct"},
    "parquet": set(),
    "webdataset": {"nested", "money"},
}


@pytest.fixture(scope="module")
def columns() -> dict[str, pa.Array]:
    return everything()


def write(columns: dict[str, pa.Array], path: Path) -> str:
    lance.write_dataset(pa.table(columns), str(path), mode="overwrite")
    return str(path)


def held(columns: dict[str, pa.Array], format: str) -> dict[str, pa.Array]:
    return {name: column for name, column in columns.items() if name not in LACKS[format]}


@pytest.mark.parametrize("format", EXPORTS)
def test_an_export_is_equal_to_its_table(
    columns: dict[str, pa.Array], format: str, tmp_path: Path
) -> None:
    table = write(held(columns, format), tmp_path / "t.lance")
    destrier.export(table, tmp_path / "out", format=format, num_workers=0)
    found = destrier.verify(table, tmp_path / "out", num_workers=0)
    assert found == destrier.verification.Verified(ROWS, True, 0, ())


def changed(columns: dict[str, pa.Array], name: str, row: int) -> dict[str, pa.Array]:
    """The columns with the value of another row in one place."""
    rows = np.arange(ROWS)
    rows[row] = row + 1
    return {**columns, name: columns[name].take(pa.array(rows))}


@pytest.mark.parametrize("format", EXPORTS)
def test_a_value_that_differs_is_found_in_every_column(
    columns: dict[str, pa.Array], format: str, tmp_path: Path
) -> None:
    columns = held(columns, format)
    table = write(columns, tmp_path / "t.lance")
    destrier.export(table, tmp_path / "out", format=format, num_workers=0)
    every = columns
    for row, name in enumerate(columns):
        every = changed(every, name, row)
    write(every, tmp_path / "t.lance")
    found = destrier.verify(table, tmp_path / "out", num_workers=0, limit=99)
    assert [(d.row, d.column) for d in found.differences] == list(enumerate(columns))
    assert found.differing == len(columns)


@pytest.mark.parametrize("format", EXPORTS)
def test_a_value_that_only_rounds_to_the_same_differs(format: str, tmp_path: Path) -> None:
    doubles = {"x": pa.array([0.1, 0.5]), "n": pa.array([1, 2])}
    table = write(doubles, tmp_path / "t.lance")
    destrier.export(table, tmp_path / "out", format=format, num_workers=0)
    write({**doubles, "x": doubles["x"].cast(pa.float32())}, tmp_path / "t.lance")
    found = destrier.verify(table, tmp_path / "out", num_workers=0)
    assert [(d.row, d.column) for d in found.differences] == [(0, "x")]
    texts = {**doubles, "n": pa.array(["1", "2"])}
    found = destrier.verify(write(texts, tmp_path / "u.lance"), tmp_path / "out", num_workers=0)
    assert found.differing >= 1
    assert {d.column for d in found.differences} <= {"n", "n_cls"}


@pytest.mark.parametrize("format", EXPORTS)
def test_rows_and_columns_of_an_export(
    columns: dict[str, pa.Array], format: str, tmp_path: Path
) -> None:
    kept = ["small", "text", "fixed", *({"money"} - LACKS[format])]
    table = write({**held(columns, format), "more": columns["small"]}, tmp_path / "t.lance")
    one: dict[str, Any] = {"filter": "small % 2 = 0", "num_workers": 0}
    destrier.export(table, tmp_path / "out", format=format, columns=kept, **one)
    assert destrier.verify(table, tmp_path / "out", columns=kept, **one).equal
    lacking = destrier.verify(table, tmp_path / "out", columns=[*kept, "more"], **one)
    assert {d.column for d in lacking.differences} == {"more"}
    assert {d.source for d in lacking.differences} <= {"no such column", "None"}
    more = destrier.verify(table, tmp_path / "out", columns=["text", "fixed"], **one)
    assert not more.equal
    assert {d.table for d in more.differences} == {"no such column"}
    rows = destrier.verify(table, tmp_path / "out", columns=kept, num_workers=0)
    assert str(rows.differences[0]) == "rows: 20 rows in the dataset, 40 rows in the table"
    write(changed(held(columns, format), "text", 10), tmp_path / "t.lance")
    changes = destrier.verify(table, tmp_path / "out", columns=kept, **one)
    assert [(d.row, d.column) for d in changes.differences] == [(10, "text")]


def test_options_of_the_export_tell_how_it_is_read(tmp_path: Path) -> None:
    tokens = pa.array([[1, 2], [3]], pa.list_(pa.uint16()))
    names = pa.array(["b", "a"])
    lists = pa.array([["x", None], None], pa.list_(pa.string()))
    table = write({"ids": tokens, "name": names, "lists": lists}, tmp_path / "t.lance")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("litdata", {"columns": ["ids"], "tokens": "ids"}),
        ("litdata", {"json": ["ids", "lists"]}),
        ("webdataset", {"key_column": "name"}),
    ]
    for number, (format, arguments) in enumerate(cases):
        arguments["num_workers"] = 0
        destrier.export(table, tmp_path / f"{number}", format=format, **arguments)
        assert destrier.verify(table, tmp_path / f"{number}", **arguments).equal, arguments
    lost = destrier.verify(table, tmp_path / "2", num_workers=0)
    assert {d.column for d in lost.differences} == {"name"}


@pytest.mark.parametrize("format", EXPORTS)
def test_the_commands_export_and_verify(
    columns: dict[str, pa.Array], format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, one = str(tmp_path / "out"), ["--num-workers", "0"]
    table = write(held(columns, format), tmp_path / "t.lance")
    assert main(["export", table, out, "--format", format, *one]) == 0
    assert main(["verify", table, out, *one]) == 0
    assert f"equal: {ROWS} rows" in capsys.readouterr().out
    write(changed(held(columns, format), "small", 3), tmp_path / "t.lance")
    assert main(["verify", table, out, *one]) == 1
    assert "row 3, column 'small': -17 in the dataset, -16 in the table" in capsys.readouterr().out


def test_two_tables_are_no_dataset(tmp_path: Path) -> None:
    table = write({"x": pa.array([1])}, tmp_path / "t.lance")
    with pytest.raises(destrier.SourceError, match="is a Lance table already"):
        destrier.verify(table, table)
    with pytest.raises(destrier.ArgumentError, match="no dataset"):
        destrier.verify(lance.dataset(table), table)
    with pytest.raises(destrier.SourceError, match="nothing that can be converted"):
        destrier.verify(table, tmp_path / "nowhere")
    destrier.export(table, tmp_path / "out", format="mds", num_workers=0)
    with pytest.raises(destrier.ArgumentError, match="a db:// table"):
        destrier.verify(tmp_path / "out", "db://company/table")
