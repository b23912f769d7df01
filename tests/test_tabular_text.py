from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destrier.errors import ArgumentError, ColumnError, SchemaError, SourceError
from destrier.files import Store
from destrier.formats import tabular
from destrier.formats.tabular import lines, text
from destrier.writing.source import BATCH_BYTES, Source


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, units and samples of some lines."""
    monkeypatch.setattr(lines, "_BLOCK", 64)
    monkeypatch.setattr(text, "RANGE_BYTES", 150)
    monkeypatch.setattr(text, "_SAMPLE_BYTES", 200)


def source(path: Path | str, **options: Any) -> Source:
    name = tabular.detect(Store(path))
    assert name is not None
    opened = tabular.open_source(Store(path), format=name, **options)
    return pickle.loads(pickle.dumps(opened))


def table(opened: Source) -> pa.Table:
    batches = []
    for unit in opened.units():
        for batch in opened.read(unit, opened.schema):
            assert batch.schema.equals(opened.schema)
            assert batch.num_rows == 1 or batch.nbytes <= BATCH_BYTES
            batch.validate(full=True)
            batches.append(batch)
    return pa.Table.from_batches(batches, opened.schema)


def of(tmp_path: Path, content: str | bytes, name: str = "a.csv", **options: Any) -> pa.Table:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    return table(source(tmp_path / name, **options))


def jsonl(tmp_path: Path, *rows: Any, **options: Any) -> pa.Table:
    content = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    return of(tmp_path, content, "a.jsonl", **options)


# --- CSV: types


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-7", "", "0"], pa.int64()),
        (["9223372036854775807", "-9223372036854775808"], pa.int64()),
        (["9223372036854775808"], pa.string()),
        (["007", "008"], pa.string()),
        (["+5"], pa.string()),
        (["0x10"], pa.string()),
        ([" 1"], pa.string()),
        (["1_000"], pa.string()),
        (["1.5", "2.0", "-0.0"], pa.float64()),
        (["1.5", "2"], pa.float64()),
        (["1.5", "2", "2.0"], pa.string()),
        (["1.50"], pa.string()),
        (["0.1", "1e-05", "1e+16", "1000000000000000.0", "nan", "inf"], pa.float64()),
        (["0.1000000000000000055"], pa.string()),
        (["1e5"], pa.string()),
        ([".5"], pa.string()),
        (["NaN"], pa.string()),
        (["true", "false", ""], pa.bool_()),
        (["True", "False"], pa.bool_()),
        (["true", "False"], pa.string()),
        (["yes", "no"], pa.string()),
        (["2020-01-01"], pa.string()),
        (["", ""], pa.string()),
    ],
)
def test_csv_types_lose_no_text(texts: list[str], kind: pa.DataType, tmp_path: Path) -> None:
    found = of(tmp_path, "x,y\n" + "".join(f"{text},0\n" for text in texts))
    assert found.schema.field("x").type == kind
    values = found["x"].to_pylist()
    if kind == pa.string():
        assert values == [text or None for text in texts]
    elif kind == pa.bool_():
        assert values == [None if not text else text.lower() == "true" for text in texts]
    else:
        make = int if kind == pa.int64() else float
        assert repr(values) == repr([make(text) if text else None for text in texts])


@given(st.lists(st.floats() | st.none(), min_size=1, max_size=20))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_csv_floats_as_python_writes_them(tmp_path: Path, values: list[float | None]) -> None:
    content = "x,y\n" + "".join(f"{'' if v is None else repr(v)},0\n" for v in values)
    found = of(tmp_path, content)
    kind = pa.float64() if any(v is not None for v in values) else pa.string()
    assert found.schema.field("x").type == kind
    assert repr(found["x"].to_pylist()) == repr(values)


def test_csv_quotes_and_nulls(tmp_path: Path) -> None:
    found = of(tmp_path, 'a,b\r\n1,""\r\n2,\r\n\r\n3,"x, ""y"""\r\n')
    assert found.to_pydict() == {"a": [1, 2, 3], "b": ["", None, 'x, "y"']}
    found = of(tmp_path, 'a,b\n1,NA\n2,"NA"\n', null_values=["NA"])
    assert found.to_pydict() == {"a": [1, 2], "b": [None, "NA"]}
    assert of(tmp_path, "a\n1\n\n3\n").to_pydict() == {"a": [1, None, 3]}
    assert of(tmp_path, 'a\tb\n1\t"x"\n', "a.tsv").to_pydict() == {"a": [1], "b": ["x"]}
    assert of(tmp_path, "a;b\n1;x\n", delimiter=";").to_pydict() == {"a": [1], "b": ["x"]}
    assert of(tmp_path, 'a,b\n1,5" x\n', quote_char=None).to_pydict() == {"a": [1], "b": ['5" x']}
    assert of(tmp_path, "\ufeffa,b\n1,x\n").to_pydict() == {"a": [1], "b": ["x"]}
    assert of(tmp_path, "a,b\n1,x").to_pydict() == {"a": [1], "b": ["x"]}
    assert of(tmp_path, "a,b\n").to_pydict() == {"a": [], "b": []}


def test_csv_headers(tmp_path: Path) -> None:
    assert of(tmp_path, ",b\n0,x\n", column_names=["i", "b"]).to_pydict() == {"i": [0], "b": ["x"]}
    found = of(tmp_path, "0,x\n1,y\n", header=False, column_names=["i", "b"])
    assert found.to_pydict() == {"i": [0, 1], "b": ["x", "y"]}
    with pytest.raises(ColumnError, match="name is empty"):
        of(tmp_path, ",b\n0,x\n")
    with pytest.raises(SchemaError, match=r"two columns named 'a'.*column_names"):
        of(tmp_path, "a,a\n1,2\n")
    with pytest.raises(ArgumentError, match=r"1 names, but .* has 2 columns"):
        of(tmp_path, "a,b\n1,2\n", column_names=["a"])
    with pytest.raises(ArgumentError, match="header=False needs"):
        of(tmp_path, "a,b\n1,2\n", header=False)
    with pytest.raises(ArgumentError, match="one character"):
        of(tmp_path, "a,b\n1,2\n", delimiter="::")


def test_csv_declared_types(tmp_path: Path) -> None:
    schema = pa.schema([("b", pa.date32()), ("c", pa.string())])
    found = of(tmp_path, "a,b,c\n1,2020-01-31,5\n", schema=schema)
    assert found.schema.types == [pa.int64(), pa.date32(), pa.string()]
    assert found["c"].to_pylist() == ["5"]
    with pytest.raises(SchemaError, match="row 1, column 'b': 'x' is not a value of the declared"):
        of(tmp_path, "a,b,c\n1,2020-01-31,5\n1,x,5\n", schema=schema)
    with pytest.raises(SchemaError, match="declares 'z', but the columns"):
        of(tmp_path, "a\n1\n", schema=pa.schema([("z", pa.int8())]))
    with pytest.raises(ArgumentError, match="declares 'a' as list"):
        of(tmp_path, "a\n1\n", schema=pa.schema([("a", pa.list_(pa.int8()))]))
    with pytest.raises(ArgumentError, match="which a table does not keep; declare string"):
        of(tmp_path, "a\n1\n", schema=pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))]))
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    with pytest.raises(SourceError, match=r"row 1, column 'a': .*no nulls"):
        of(tmp_path, "a,b\n1,2\n,2\n", schema=schema)


ROWS = [[i, f"text {i}, with é" * (i % 3), i / 4, i % 2 == 0] for i in range(200)]


def written(**options: Any) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n", **options)
    writer.writerows([["i", "t", "f", "b"], *ROWS])
    return file.getvalue()


def rows(found: pa.Table) -> list[list[Any]]:
    return [
        [value or "" if k == "t" else value for k, value in row.items()]
        for row in found.to_pylist()
    ]


@pytest.mark.usefixtures("small")
def test_csv_in_units_of_lines(tmp_path: Path) -> None:
    for content in (written(), written().replace("\n", "\r\n"), written(quoting=csv.QUOTE_ALL)):
        (tmp_path / "a.csv").write_text(content, newline="")
        opened = source(tmp_path / "a.csv")
        assert len(opened.units()) > 20
        assert rows(table(opened)) == ROWS
        assert rows(table(source(tmp_path / "a.csv", newlines_in_values=True))) == ROWS


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("1,2,3\n", SourceError, "3 values in a row of 4 columns: '1,2,3'"),
        ("1,2,3,4,5\n", SourceError, "5 values in a row of 4 columns"),
        ("x,,1.5,True\n", SchemaError, "column 'i': 'x' is not a whole number.*pa.string"),
        ("01,,1.5,True\n", SchemaError, "column 'i': '01'"),
        ("1,,1.50,True\n", SchemaError, "column 'f': '1.50' is not a number such as 1.5 or 2.0"),
        ("1,,2,True\n", SchemaError, "column 'f': '2'"),
        ("1,,1.5,true\n", SchemaError, "column 'b': 'true' is not True or False"),
        ('1,"x,1.5,True\n', SourceError, "a quote is not closed.*newlines_in_values"),
        (b"1,\xff,1.5,True\n", SourceError, "byte 0xff at 2 in its line is not UTF-8"),
    ],
)
@pytest.mark.usefixtures("small")
def test_csv_errors_name_the_row(
    line: str | bytes, error: type[SourceError], message: str, tmp_path: Path
) -> None:
    data = line.encode() if isinstance(line, str) else line
    content = written().encode() + data + b"1,,1.5,True\n"
    with pytest.raises(error, match=rf"a\.csv, row 200.*{message}") as caught:
        of(tmp_path, content)
    assert caught.value.row == 200


def test_csv_values_with_line_ends(tmp_path: Path) -> None:
    content = 'a,b\n1,"x\ny"\n2,z\n'
    with pytest.raises(SourceError, match="row 0: a quote is not closed"):
        of(tmp_path, content)
    assert of(tmp_path, content, newlines_in_values=True)["b"].to_pylist() == ["x\ny", "z"]
    with pytest.raises(SourceError, match="row 2: 1 values in a row of 2"):
        of(tmp_path, content + "3\n", newlines_in_values=True)
    with pytest.raises(SourceError, match="ends within quotes"):
        of(tmp_path, content + '3,"x\n', newlines_in_values=True)
    with pytest.raises(SourceError, match="carriage returns alone"):
        of(tmp_path, "a,b\r1,2\r3,4\r")
    assert of(tmp_path, "a,b\r1,2\r3,4\r", newlines_in_values=True)["a"].to_pylist() == [1, 3]
    # a quote that is text opens a value that swallows the next line
    with pytest.raises(SourceError, match=r"hold 1 rows|not closed"):
        of(tmp_path, 'a,b\n5","abc\n1,2"\n')


def test_csv_files_of_other_columns(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n")
    (tmp_path / "2.csv").write_text("b,a\ny,2\n")
    assert table(source(tmp_path)).to_pydict() == {"a": [1, 2], "b": ["x", "y"]}
    (tmp_path / "3.csv").write_text("a\n3\n")
    with pytest.raises(SchemaError, match=r"3\.csv lacks the column 'b', which \S+1\.csv has"):
        table(source(tmp_path))
    assert table(source(tmp_path, missing="null"))["b"].to_pylist() == ["x", "y", None]
    assert table(source(tmp_path, columns=["a"]))["a"].to_pylist() == [1, 2, 3]
    (tmp_path / "3.csv").write_text("a,b,c\n3,z,1\n")
    with pytest.raises(SchemaError, match=r"3\.csv has the column 'c', which \S+1\.csv lacks"):
        table(source(tmp_path))
    (tmp_path / "3.csv").write_text("")
    with pytest.raises(SourceError, match=r"3\.csv is empty"):
        table(source(tmp_path))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_text(compression: str, tmp_path: Path) -> None:
    suffix = {"gzip": "gz", "zstd": "zst"}[compression]
    data = pa.Codec(compression).compress(written().encode(), asbytes=True)
    if compression == "gzip":
        data = gzip.compress(written().encode())
    path = tmp_path / f"a.csv.{suffix}"
    path.write_bytes(data)
    assert rows(table(source(path))) == ROWS
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=rf"a\.csv\.{suffix}"):
        table(source(path))
    path.write_bytes(data + data)  # members one after the other, with a second header as a row
    assert table(source(path))["i"].to_pylist() == [
        *map(str, range(200)),
        "i",
        *map(str, range(200)),
    ]
    lines_file = tmp_path / f"b.jsonl.{suffix}"
    lines_file.write_bytes(gzip.compress(b'{"a": 1}\n') if suffix == "gz" else data)
    if suffix == "gz":
        assert table(source(lines_file)).to_pydict() == {"a": [1]}
    (tmp_path / "x.csv.bz2").write_bytes(b"BZh")
    with pytest.raises(ArgumentError, match=r"compressed as \.bz2"):
        tabular.open_source(Store(tmp_path / "x.csv.bz2"), format="csv")


def test_csv_of_polars_and_pyarrow(tmp_path: Path) -> None:
    frame = pl.DataFrame({"i": [1, None, 3], "f": [0.1, 1e300, None], "t": ['a"b', "", None]})
    frame.write_csv(tmp_path / "a.csv")
    assert table(source(tmp_path / "a.csv")).to_pylist() == frame.to_dicts()
    found = pa.table({"i": [1, None], "f": [1.0, 0.5], "t": ["", None], "b": [True, False]})
    pa_csv.write_csv(found, tmp_path / "b.csv")
    assert table(source(tmp_path / "b.csv")).equals(found)


# --- JSON lines


def test_jsonl_types(tmp_path: Path) -> None:
    data = [
        {"i": 1, "t": "2020-01-01", "s": {"x": [1, None], "y": None}, "n": None, "e": []},
        {"f": 1.5, "b": True, "s": {"z": "é\u0000"}, "t": "12:00"},
        {},
    ]
    found = jsonl(tmp_path, *data)
    struct = pa.struct([("x", pa.list_(pa.int64())), ("y", pa.null()), ("z", pa.string())])
    assert found.schema.equals(
        pa.schema(
            [
                ("i", pa.int64()),
                ("t", pa.string()),
                ("s", struct),
                ("n", pa.null()),
                ("e", pa.list_(pa.null())),
                ("f", pa.float64()),
                ("b", pa.bool_()),
            ]
        )
    )
    assert found["t"].to_pylist() == ["2020-01-01", "12:00", None]
    assert found["s"].to_pylist() == [
        {"x": [1, None], "y": None, "z": None},
        {"x": None, "y": None, "z": "é\0"},
        None,
    ]
    # pyarrow's own reader would make times of the strings
    assert pa.types.is_timestamp(pa_json.read_json(io.BytesIO(b'{"t": "2020-01-01"}'))["t"].type)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def same_shape(one: Any, other: Any) -> bool:
    """Whether the table's value is the text's, keys that are missing taken for null."""
    if isinstance(other, dict) and isinstance(one, dict):
        return all(same_shape(value, other.get(key)) for key, value in one.items()) and set(
            other
        ) <= set(one)
    if isinstance(other, list) and isinstance(one, list):
        return len(one) == len(other) and all(map(same_shape, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), JSON | st.floats(), max_size=3), max_size=6)
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_jsonl_is_exact_or_refused(tmp_path: Path, data: list[dict[str, Any]]) -> None:
    try:
        found = jsonl(tmp_path, *data).to_pylist()
    except (SourceError, ColumnError):
        return
    assert len(found) == len(data)
    for one, other in zip(found, data, strict=True):
        assert same_shape(one, other), (one, other)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ('{"i": 1.0}', SchemaError, "column 'i': a number with a fraction"),
        ('{"f": 1}', SchemaError, "column 'f': 1 is a whole number.*declare that"),
        ('{"s": {"x": 2.5}}', SchemaError, "column 's': a number with a fraction.*in 'x'"),
        ('{"l": [1.5, 2]}', SchemaError, "column 'l': 2.* is a whole number"),
        ('{"t": 5}', SchemaError, "column 't': a whole number, but the column is string"),
        ('{"i": true}', SchemaError, "column 'i': true or false"),
        ('{"i": "1"}', SchemaError, "column 'i': a string"),
        ('{"i": 9223372036854775808}', SchemaError, "column 'i': 9223372036854775808 is not in"),
        ('{"n": 5}', SchemaError, r"column 'n': a whole number, but the column is null.*schema="),
        ('{"q": 5}', SchemaError, "column 'q': the key 'q', which no row.*schema="),
        ('{"s": {"q": 5}}', SchemaError, "column 's': the key 'q'"),
        ('{"i": 1, "i": 2}', SourceError, "the key 'i' is there twice"),
        ('{"s": {"x": 1, "x": 1}}', SourceError, "the key 'x' is there twice"),
        ('{"i": 1}{"i": 2}', SourceError, "not JSON: Extra data"),
        ('{"i":\n1}', SourceError, "not JSON"),
        ("[1]", SourceError, "a line holds one object, this one holds a list"),
        ('{"i": 1', SourceError, "not JSON"),
        (b'{"t": "\xff"}', SourceError, "byte 0xff at 7 in its line is not UTF-8"),
        ('{"t": "\\ud800"}', SourceError, "surrogate"),
        ('{"i": ' + "[" * 200_000, SourceError, "column 'i'|nested too deeply|not JSON"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.usefixtures("small")
def test_jsonl_errors_name_the_row(
    early: bool, line: str | bytes, error: type[SourceError], message: str, tmp_path: Path
) -> None:
    first = [
        {"i": i, "f": i / 4, "t": "x" * (i % 9), "n": None, "s": {"x": i}, "l": [0.5]}
        for i in range(2 if early else 60)
    ]
    data = line.encode() if isinstance(line, str) else line
    content = "".join(json.dumps(row) + "\n" for row in first).encode() + data + b'\n{"i": 1}\n'
    if early and error is SchemaError and ('"q"' in str(line) or '"n"' in str(line)):
        assert (
            of(tmp_path, content, "a.jsonl").num_rows == 4
        )  # seen early, it is a type like others
        return
    with pytest.raises(SourceError, match=r"a\.jsonl, row ") as caught:
        of(tmp_path, content, "a.jsonl")
    assert caught.value.row == len(first)
    if not early:
        assert type(caught.value) is error
        caught.match(message)


def test_jsonl_declared_types(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("f", pa.float64()),
            ("e", pa.list_(pa.float32(), 2)),
            ("u", pa.uint64()),
            ("late", pa.string()),
        ]
    )
    found = jsonl(
        tmp_path, {"f": 1, "e": [1, 2.5], "u": 2**64 - 1}, {"f": 1.5, "a": 1}, schema=schema
    )
    assert found.to_pydict() == {
        "f": [1.0, 1.5],
        "e": [[1.0, 2.5], None],
        "u": [2**64 - 1, None],
        "a": [None, 1],
        "late": [None, None],
    }
    with pytest.raises(SchemaError, match="9007199254740993 is not exactly a double"):
        jsonl(tmp_path, {"f": 1.5}, {"f": 2**53 + 1}, schema=schema)
    with pytest.raises(SchemaError, match="16777217 is not exactly a float"):
        jsonl(tmp_path, {"e": [1, 2**24 + 1]}, schema=schema)
    with pytest.raises(SchemaError, match="a list of 1, but"):
        jsonl(tmp_path, {"e": [1.5]}, schema=schema)
    with pytest.raises(ArgumentError, match="declares 'm' as map"):
        jsonl(tmp_path, {"m": {}}, schema=pa.schema([("m", pa.map_(pa.string(), pa.string()))]))


def test_jsonl_columns(tmp_path: Path) -> None:
    data = [{"a.b": 1, "c": {}, "d": 5}]
    assert jsonl(tmp_path, *data, columns=["d"]).to_pydict() == {"d": [5]}
    with pytest.raises(ColumnError, match=r"named 'a\.b'"):
        jsonl(tmp_path, *data)
    with pytest.raises(ColumnError, match=r"'c' cannot be kept exactly: .*structs without fields"):
        jsonl(tmp_path, *data, columns=["c"])
    with pytest.raises(ColumnError, match="no column 'x'; there are: d"):
        jsonl(tmp_path, {"d": 1}, columns=["x"])
    with pytest.raises(SourceError, match="there are no rows"):
        jsonl(tmp_path, "")


@pytest.mark.usefixtures("small")
def test_jsonl_in_units_of_lines(tmp_path: Path) -> None:
    data = [{"i": i, "t": 'é"\\' * (i % 40), "f": i / 8} for i in range(300)]
    content = "".join(
        json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" * (1 + i % 3) for i, row in enumerate(data)
    )
    (tmp_path / "a.jsonl").write_text("\ufeff" + content)
    opened = source(tmp_path / "a.jsonl")
    assert len(opened.units()) > 20
    assert table(opened).to_pylist() == data
    (tmp_path / "a.jsonl").rename(tmp_path / "a.json")
    assert table(source(tmp_path / "a.json")).to_pylist() == data
    frame = pl.DataFrame(data)
    frame.write_ndjson(tmp_path / "b.ndjson")
    assert table(source(tmp_path / "b.ndjson")).to_pylist() == frame.to_dicts()


@pytest.mark.usefixtures("small")
def test_a_byte_order_mark_only_begins_a_file(tmp_path: Path) -> None:
    lines = [f'{{"n": {i}}}'.ljust(31) + "\n" for i in range(40)]
    file = tmp_path / "a.jsonl"
    ends = set()
    for row in (0, 1, 4, 16, 37):
        marked = [*lines[:row], "\ufeff" + lines[row], *lines[row + 1 :]]
        file.write_text("\ufeff" + "".join(marked))
        with pytest.raises(SourceError, match=rf"a\.jsonl, row {row}\b") as caught:
            table(source(file))
        assert caught.value.row == row
        ends.add(row)
    file.write_text("\ufeff" + "".join(lines))
    assert table(source(file))["n"].to_pylist() == list(range(40))


# --- where rows come from


@pytest.mark.parametrize("kind", ["csv", "one", "tsv", "jsonl", "gz", "headless"])
def test_rows_know_their_file_and_their_number_in_it(
    kind: str, tmp_path: Path, small: None
) -> None:
    blank = {"csv": "\n\r\n", "one": "\n", "tsv": "\n", "jsonl": " \n\t\n"}.get(kind, "")
    lines_ = [f'{{"n": {i}}}' if kind in ("jsonl", "gz") else f"{i}" for i in range(300)]
    if kind in ("csv", "headless"):
        lines_ = [f"{line},x" for line in lines_]
    if kind == "tsv":
        lines_ = [f"{line}\tx" if int(line) % 7 else "\t" for line in lines_]
    header = {"csv": "n,t\n", "one": "n\n", "tsv": "n\tt\n"}.get(kind, "")
    content = header + "".join(
        line + "\n" + (blank if i % 5 == 0 else "") for i, line in enumerate(lines_)
    )
    name = {"one": "a.csv", "headless": "a.csv", "gz": "a.jsonl.gz"}.get(kind, f"a.{kind}")
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if kind == "gz" else data)
    more = {"header": False, "column_names": ["n", "t"]} if kind == "headless" else {}
    opened = source(tmp_path / name, **more)
    found = []
    units = opened.units()
    assert len(units) > 5 or kind == "gz"
    # a worker has some of the units, another one the others
    for part in (units[::2], units[1::2], units[::-1]):
        worker = pickle.loads(pickle.dumps(opened))
        for unit in part:
            start = 0
            for batch in worker.read(unit, None):
                files, rows = worker.origins(unit, start, batch.num_rows)
                assert set(files.to_pylist()) == {str(tmp_path / name)}
                found += zip(rows.to_pylist(), batch["n"].to_pylist(), strict=True)
                start += batch.num_rows
    everything = sorted(set(found))
    assert len(everything) == len(found) / 2
    if kind == "one":  # where an empty line is a row
        assert [row for row, _ in everything] == list(range(360))
    elif kind == "tsv":
        assert all(n == (row if row % 7 else None) for row, n in everything)
    else:
        assert everything == [(i, i) for i in range(300)]


@pytest.mark.parametrize("options", [{}, {"newlines_in_values": True}])
@pytest.mark.parametrize(("mark", "name"), [(",", "a.csv"), ("\t", "a.tsv")])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_an_empty_last_value_is_null_with_and_without_a_line_end(
    tmp_path: Path, options: dict[str, Any], mark: str, name: str, end: str
) -> None:
    content = f'a,b\nx,y\n"z",{end}'.replace(",", mark)
    assert of(tmp_path, content, name, **options)["b"].to_pylist() == ["y", None]


@pytest.mark.parametrize("options", [{}, {"newlines_in_values": True}])
def test_only_the_first_mark_of_a_file_is_no_character(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for start in ("", "\ufeff"):
        found = of(tmp_path, f"{start}a,b\n\ufeffx,1\n\ufeff,2\n", **options)
        assert found.schema.names == ["a", "b"]
        assert found["a"].to_pylist() == ["\ufeffx", "\ufeff"]
        found = of(tmp_path, f"{start}a,b\n\ufeff,2\n", **options)
        assert found["a"].to_pylist() == ["\ufeff"]


@pytest.mark.usefixtures("small")
def test_marks_at_the_beginning_of_blocks_are_kept(tmp_path: Path) -> None:
    values = [f"\ufeff{i:027}" for i in range(20)]  # of 32 bytes with their line end
    content = "a" * 29 + ",b\n" + "".join(f"{value},\n" for value in values)
    found = of(tmp_path, content)
    assert found.columns[0].to_pylist() == values


def test_nulls_within_values_of_json(tmp_path: Path) -> None:
    nothing = {"role": "user", "name": None}
    for rows in (
        [{"a": [nothing, nothing]}, {"a": [nothing]}],
        [{"a": [None, None]}, {"a": None}, {"a": []}],
        [{"a": [{"b": [[None], []]}, {"b": None}]}, {"a": []}],
    ):
        assert jsonl(tmp_path, *rows).to_pylist() == rows
    kind = pa.large_list(pa.list_(pa.null()))
    rows = [{"a": [[None, None], [None]]}]
    assert jsonl(tmp_path, *rows, schema=pa.schema([("a", kind)])).to_pylist() == rows


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("value", [True, "x", 1, {}])
def test_a_later_value_where_all_were_null_is_refused(tmp_path: Path, value: Any) -> None:
    rows = [{"a": [None, None], "b": "x" * 100}] * 5
    with pytest.raises(SchemaError, match="row 5, column 'a'"):
        jsonl(tmp_path, *rows, {"a": [value], "b": ""})


def test_a_line_is_bounded_and_blanks_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_MAX_LINE", 1000)
    monkeypatch.setattr(lines, "_BLOCK", 64)
    blank = b" " * 5000 + b"\n" * 500 + b" \t\r\n" * 500 + b" " * 5000
    data = gzip.compress(b'{"a": 1}\n' + blank + b'{"a": 2}' + b"\n" + blank)
    assert of(tmp_path, data, "a.jsonl.gz")["a"].to_pylist() == [1, 2]
    data = gzip.compress(b'{"a": 1}\n' * 2 + b'{"a": "' + b"x" * 5000)
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz, row 2: the line is longer than 1,000"):
        of(tmp_path, data, "a.jsonl.gz")
    with pytest.raises(SourceError, match=r"a\.csv, row 1: the line is longer than 1,000"):
        of(tmp_path, "a,b\n1,2\n" + "x" * 5000)


def test_a_row_of_many_keys(tmp_path: Path) -> None:
    row = {f"k{i}": i for i in range(3000)}
    assert jsonl(tmp_path, row, row).to_pylist() == [row, row]
