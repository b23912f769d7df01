"""Python values become Arrow values of their natural types, and stay what they are."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import io
import math
import subprocess
import sys
import uuid
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from destrier.encoding.encoder import RowEncoder
from destrier.errors import ColumnError, SchemaError, SourceError
from destrier.writing.layout import Layout
from destrier.writing.source import BATCH_BYTES

UTC = dt.timezone.utc


def encoded(rows: Any, schema: pa.Schema | None = None, **options: Any) -> pa.Table:
    encoder = RowEncoder(schema, **options)
    batches = list(encoder.batches(rows))
    assert all(batch.schema.equals(encoder.schema, check_metadata=True) for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, schema=encoder.schema)


def column(*values: Any, want: pa.DataType | None = None) -> pa.Array:
    schema = None if want is None else pa.schema([("x", want)])
    table = encoded([{"x": value} for value in values], schema, declared=want is not None)
    return table["x"].combine_chunks()


def refusal(*values: Any, want: pa.DataType | None = None, kind: type = SchemaError) -> str:
    with pytest.raises(SourceError) as caught:
        column(*values, want=want)
    assert type(caught.value) is kind
    assert caught.value.column == "x"
    return f"{caught.value.row}: {caught.value}"


# ---- any values -------------------------------------------------------------------------------

INT64 = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.sampled_from(
    [
        st.booleans(),
        INT64,
        st.floats(allow_nan=False),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.dates(),
        st.datetimes(),
        st.datetimes(timezones=st.just(UTC)),
        st.times(),
        st.timedeltas(dt.timedelta(-100_000_000), dt.timedelta(100_000_000)),
        st.decimals(-(10**9), 10**9, places=3),
        st.uuids(),
        st.integers(0, 255).map(np.uint8),
        st.floats(width=32, allow_nan=False).map(np.float32),
    ]
)


def with_nulls(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def containers(kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """From kinds of values, which are strategies, to kinds of lists and dicts of them."""
    names = st.text("abc_", min_size=1, max_size=3)
    return kinds.map(lambda values: st.lists(with_nulls(values), max_size=3)) | st.dictionaries(
        names, kinds, min_size=1, max_size=3
    ).map(lambda fields: st.fixed_dictionaries({k: with_nulls(v) for k, v in fields.items()}))


KINDS = st.recursive(SCALARS, containers, max_leaves=4)


@st.composite
def many_rows(draw: Any) -> list[dict[str, Any]]:
    kinds = draw(st.dictionaries(st.text(min_size=1, max_size=3), KINDS, min_size=1, max_size=3))
    row = st.fixed_dictionaries({name: with_nulls(kind) for name, kind in kinds.items()})
    return draw(st.lists(row, min_size=1, max_size=6))


@settings(deadline=None, max_examples=100)
@given(rows=many_rows())
def test_rows_come_back_as_they_were(rows: list[dict[str, Any]]) -> None:
    assert encoded(rows).to_pylist() == rows


@settings(deadline=None, max_examples=25)
@given(rows=many_rows())
def test_rows_come_back_from_a_table(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    named = [{f"c{i}": row[name] for i, name in enumerate(rows[0])} for row in rows]
    path = tmp_path_factory.mktemp("t") / "t.lance"
    table = encoded(named)
    lance.write_dataset(table, path, data_storage_version="2.2")
    read = lance.dataset(path).to_table()
    assert read.to_pylist() == named
    assert read.schema == table.schema


@settings(deadline=None, max_examples=40)
@given(rows=many_rows(), data=st.data())
def test_the_same_rows_pass_the_schema_that_they_fixed(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    encoder = RowEncoder()
    list(encoder.batches(rows))
    again = data.draw(st.permutations(rows))
    (batch,) = RowEncoder(encoder.schema).batches(again)
    assert batch.to_pylist() == again


# ---- natural types ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, np.int64(2)], pa.int64()),
        ([True, np.bool_(False)], pa.bool_()),
        ([1.5, np.float64(2)], pa.float64()),
        ([np.float32(1.5)], pa.float32()),
        ([np.float16(1.5)], pa.float16()),
        ([np.int8(1)], pa.int8()),
        ([np.uint64(2**64 - 1)], pa.uint64()),
        (["a", np.str_("b")], pa.string()),
        ([b"a", np.bytes_(b"b")], pa.large_binary()),
        ([dt.date(2020, 1, 2)], pa.date32()),
        ([dt.datetime(2020, 1, 2, 3, 4, 5, 6)], pa.timestamp("us")),
        ([dt.datetime(2020, 1, 2, tzinfo=ZoneInfo("Europe/Berlin"))],
         pa.timestamp("us", "Europe/Berlin")),
        ([dt.time(1, 2, 3, 4)], pa.time64("us")),
        ([dt.timedelta(1, 2, 3)], pa.duration("us")),
        ([decimal.Decimal("1.50"), decimal.Decimal("2")], pa.decimal128(38, 2)),
        ([uuid.UUID(int=7)], pa.uuid()),
        ([(1, 2), [3], []], pa.list_(pa.int64())),
        ([[[1], None], [[]]], pa.list_(pa.list_(pa.int64()))),
        ([{"a": 1, "b": ["x"]}], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
        ([None, None], pa.null()),
        ([[], None], pa.list_(pa.null())),
        ([pa.scalar(1, pa.int8()), None], pa.int8()),
        ([pa.array([1, 2], pa.int16()), None, pa.array([], pa.int16())], pa.list_(pa.int16())),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_natural_types(values: list[Any], kind: pa.DataType) -> None:
    array = column(*values)
    assert array.type == kind
    expected = [list(v) if isinstance(v, tuple) else v for v in values]
    expected = [v.as_py() if isinstance(v, pa.Scalar) else v for v in expected]
    expected = [v.to_pylist() if isinstance(v, pa.Array) else v for v in expected]
    assert array.to_pylist() == expected


def test_bytes_of_all_kinds() -> None:
    assert column(b"a", bytearray(b"b"), memoryview(b"c")).to_pylist() == [b"a", b"b", b"c"]
    text = refusal(memoryview(np.arange(3)), kind=SourceError)
    assert "row 0, column 'x'" in text


def test_times_of_numpy() -> None:
    array = column(np.datetime64("2020-01-02T03:04:05", "ns"), np.datetime64("NaT", "ns"), None)
    assert array.type == pa.timestamp("ns")
    assert array.cast(pa.int64()).to_pylist() == [1577934245 * 10**9, None, None]
    assert column(np.datetime64("2020-01-02"), None).to_pylist() == [dt.date(2020, 1, 2), None]
    assert column(np.timedelta64(5, "ms")).type == pa.duration("ms")
    assert "after" in refusal(np.timedelta64(5, "ms"), np.timedelta64(5, "s"))
    assert "row 0" in refusal(np.datetime64("2020", "Y"), kind=SourceError)


def test_nan_is_not_null() -> None:
    array = column(float("nan"), None, 1.0)
    assert array.is_null().to_pylist() == [False, True, False]


def test_a_str_is_never_a_path(tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"bytes")
    assert column(str(path)).to_pylist() == [str(path)]


# ---- arrays -----------------------------------------------------------------------------------

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">i4", ">f8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 2, 3)])
def test_arrays_of_one_shape_are_tensors(dtype: str, shape: tuple[int, ...]) -> None:
    arrays = [(np.arange(np.prod(shape)).reshape(shape) + i).astype(dtype) for i in range(3)]
    array = column(arrays[0], None, arrays[1].T.copy().T, arrays[2])
    native = pa.from_numpy_dtype(np.dtype(dtype).newbyteorder("="))
    assert array.type == pa.fixed_shape_tensor(native, shape)
    items = array.storage.to_pylist()
    assert items[1] is None
    for item, value in zip([items[0], *items[2:]], arrays, strict=True):
        np.testing.assert_array_equal(np.array(item).reshape(shape), value)


def test_arrays_of_several_lengths_are_lists() -> None:
    array = column(np.arange(3, dtype=np.int32), None, np.arange(0, dtype=np.int32))
    assert array.type == pa.list_(pa.int32())
    assert array.to_pylist() == [[0, 1, 2], None, []]


def test_arrays_of_several_shapes_are_structs() -> None:
    array = column(np.ones((2, 3), np.uint8), None, np.zeros((1, 2, 2), np.uint8))
    assert array.type == pa.struct(
        [("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.uint8()))]
    )
    assert array.to_pylist() == [
        {"shape": [2, 3], "values": [1] * 6},
        None,
        {"shape": [1, 2, 2], "values": [0] * 4},
    ]


def test_arrays_of_no_size() -> None:
    assert column(np.zeros(0), np.zeros(0)).to_pylist() == [[], []]
    assert column(np.zeros((2, 0))).to_pylist() == [{"shape": [2, 0], "values": []}]


def test_arrays_of_no_dimension_are_scalars() -> None:
    array = column(np.array(1.5, np.float32), np.float32(2), torch.tensor(3.0))
    assert array.type == pa.float32()
    assert array.to_pylist() == [1.5, 2.0, 3.0]


def test_arrays_inside_dicts_and_lists() -> None:
    values = np.arange(4, dtype=np.int16).reshape(2, 2)
    array = column({"a": values, "b": [values, values]})
    kind = pa.fixed_shape_tensor(pa.int16(), (2, 2))
    assert array.type == pa.struct([("a", kind), ("b", pa.list_(kind))])
    assert "column 'x'.a" in refusal({"a": values}, {"a": values.astype(np.int32)})


def test_tensors_are_arrays() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    array = column(tensor, tensor.T.contiguous().T, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert array.type == pa.fixed_shape_tensor(pa.int32(), (2, 3))
    assert array.storage.to_pylist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert column(torch.ones(2, requires_grad=True)).type.value_type == pa.float32()
    assert column(torch.ones(2, dtype=torch.complex64).conj().real).type.shape == [2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "pass .cpu()"),
        (np.array([None, "a"], object), "pass .tolist()"),
        (np.array(["a"]), "pass .tolist()"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, "i4,f4"), "no Arrow type"),
        (np.ma.masked_array([1, 2], [True, False]), "masked"),
        (np.longdouble(1), "numpy.float64"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arrays_without_a_type_are_refused(value: Any, text: str) -> None:
    assert text in refusal(value, kind=SourceError)


def test_torch_is_not_imported() -> None:
    script = (
        "import sys\nimport numpy as np\nfrom destrier.encoding.encoder import RowEncoder\n"
        "list(RowEncoder().batches([{'a': np.ones(3), 'b': 'c', 'd': [1]}]))\n"
        "list(RowEncoder().batches([{'a': np.ones(3), 'b': 'c', 'd': [1]}]))\n"
        "sys.exit('torch' in sys.modules or 'PIL.Image' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ---- images -----------------------------------------------------------------------------------


def drawing(mode: str = "RGB") -> Image.Image:
    image = Image.new("RGB", (9, 7))
    ImageDraw.Draw(image).ellipse((1, 1, 7, 5), fill=(250, 40, 3))
    return image.convert(mode)


def jpeg(path: Path) -> bytes:
    drawing().save(path, "JPEG")
    return path.read_bytes()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_an_image_from_a_file_keeps_its_bytes(tmp_path: Path) -> None:
    data = jpeg(tmp_path / "a.jpg")
    lazy, loaded = Image.open(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg")
    loaded.load()
    table = encoded([{"x": lazy}, {"x": loaded}, {"x": opened(data)}, {"x": None}])
    assert table["x"].to_pylist() == [data, data, data, None]
    assert table.schema.field("x").metadata == {b"content_type": b"image/*"}
    lazy.close()


def test_a_changed_image_is_png(tmp_path: Path) -> None:
    jpeg(tmp_path / "a.jpg")
    painted = Image.open(tmp_path / "a.jpg")
    painted.putpixel((0, 0), (1, 2, 3))
    drafted = Image.open(tmp_path / "a.jpg")
    drafted.draft("L", (2, 2))
    rewritten = Image.open(tmp_path / "a.jpg")
    rewritten.load()
    (tmp_path / "a.jpg").write_bytes(b"something else")
    for image in (painted, drafted, rewritten, drawing()):
        expected = image.copy()
        data = column(image).to_pylist()[0]
        again = opened(data)
        assert (again.format, again.mode) == ("PNG", expected.mode)
        assert again.tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_images_of_these_modes_are_kept(mode: str) -> None:
    image = (
        drawing(mode) if mode != "I;16" else Image.fromarray(np.arange(6, dtype=np.uint16)[None])
    )
    again = opened(column(image).to_pylist()[0])
    assert again.mode == mode
    assert again.tobytes() == image.tobytes()
    assert again.getpalette() == image.getpalette()


@pytest.mark.parametrize("mode", ["F", "I", "CMYK", "YCbCr", "HSV"])
def test_images_of_other_modes_are_refused(mode: str) -> None:
    text = refusal(drawing("L" if mode in "FI" else "RGB").convert(mode), kind=SourceError)
    assert f"mode {mode}" in text
    assert "numpy.asarray" in text


def test_a_palette_that_is_too_short_is_refused() -> None:
    image = Image.new("P", (4, 4), 200)
    image.putpalette([0, 0, 0, 1, 1, 1])
    assert "palette" in refusal(image, kind=SourceError)


def test_images_in_lists() -> None:
    array = column([drawing(), drawing()])
    assert array.type == pa.list_(pa.large_binary())


# ---- what is refused --------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


@dataclass
class Point:
    x: int


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - as old code has it


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Colour.RED, "its name or its value"),
        (Number.ONE, "its name or its value"),
        (Text("a"), "pass str() of it"),
        (Point(1), "asdict"),
        (Pair(1, 2), "_asdict"),
        (Path("a"), "the bytes of the file"),
        ({1, 2}, "sorted list"),
        (1j, "real and imaginary"),
        (object(), "no Arrow type"),
        ({}, "empty dict"),
        (lambda: 1, "no Arrow type"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_without_a_type_are_refused(value: Any, text: str) -> None:
    got = refusal(None, value, kind=SourceError)
    assert got.startswith("1: row 1, column 'x'")
    assert text in got
    assert text in refusal([None, value], kind=SourceError)


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        (1, 1.5, ["float 1.5", "int64"]),
        (1.5, 1, ["int 1", "double"]),
        (1, True, ["bool True", "int64"]),
        (True, 1, ["int 1", "bool"]),
        (1, "1", ["str '1'", "int64"]),
        ("1", b"1", ["bytes b'1'", "string"]),
        (1, np.int32(1), ["int32", "int64"]),
        (np.float32(1), 1.0, ["float 1.0", "float"]),
        (1, [1], ["list [1]", "int64"]),
        ([1], 1, ["int 1", "list<item: int64>"]),
        ([1], ["a"], ["'x'[0]", "str 'a'", "int64"]),
        ({"a": 1}, {"a": "b"}, ["'x'.a", "str 'b'"]),
        ({"a": 1}, {"b": 1}, ["field 'b'"]),
        ({"a": 1, "b": 2}, {"a": 1}, ["lacks the field 'b'"]),
        (np.ones(3), np.ones(4), ["shape (4,)", "shape (3,)", "schema="]),
        (np.ones(3), np.ones(3, np.float32), ["float", "double"]),
        (np.ones(3), [1.0, 1.0, 1.0], ["NumPy array"]),
        (dt.date(2020, 1, 1), dt.datetime(2020, 1, 1), ["datetime", "date32"]),
        (dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=UTC), ["+00:00", "one time zone"]),
        (decimal.Decimal("1.5"), decimal.Decimal("1.25"), ["1.25", "schema="]),
        (None, 1, ["int 1", "null or empty in all the first rows", "schema="]),
        ([], [1], ["'x'[0]", "null or empty", "schema="]),
        (1, 2**63, ["int 9223372036854775808", "uint64"]),
        ("a", "\ud800", ["Unicode"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_row_of_another_type(first: Any, later: Any, words: list[str]) -> None:
    encoder = RowEncoder()
    list(encoder.batches([{"id": 0, "x": first}]))
    rows = [{"id": 1, "x": first}, {"id": 2, "x": None}, {"id": 3, "x": later}]
    with pytest.raises(SchemaError) as caught:
        list(encoder.batches(rows, first_row=100))
    assert (caught.value.row, caught.value.column) == (102, "x")
    text = str(caught.value)
    assert text.startswith("row 102, column 'x'")
    assert not [word for word in words if word not in text], text


def test_a_list_that_holds_itself_is_refused() -> None:
    items: list[Any] = []
    items.append(items)
    assert "holds itself" in refusal(items, kind=SourceError)


def test_types_mixed_in_the_first_rows() -> None:
    assert refusal(1, None, "a").startswith(
        "2: row 2, column 'x': got str 'a' (string) after int 1"
    )
    assert "column 'x'[1]" in refusal([1, "a"])
    assert "float64" in refusal(np.ones(2), np.ones(2, np.float32))
    assert column([1.0], np.array([2.0, 3.0])).to_pylist() == [[1.0], [2.0, 3.0]]
    assert "column 'x'[0]" in refusal([1], np.array([2.0, 3.0]))


def test_columns_must_be_the_same() -> None:
    with pytest.raises(SchemaError, match=r"row 1 lacks the column 'b'.*None") as caught:
        encoded([{"a": 1, "b": 2}, {"a": 1}])
    assert (caught.value.row, caught.value.column) == (1, "b")
    with pytest.raises(SchemaError, match="row 2 has a column 'c'"):
        encoded([{"a": 1}, {"a": 1}, {"a": 1, "c": 2}])
    with pytest.raises(SourceError, match="row 0 has a key 1"):
        encoded([{1: 1}])
    with pytest.raises(SourceError, match="no columns"):
        encoded([{}])
    with pytest.raises(SourceError, match="row 1 is int 7: a row is a dict"):
        encoded([{"a": 1}, 7])
    assert encoded([{"a": 1, "b": 2}, MappingProxyType({"b": 4, "a": 3})]).to_pylist() == [
        {"a": 1, "b": 2},
        {"a": 3, "b": 4},
    ]


# ---- a declared schema ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "values"),
    [
        (pa.int8(), [1, None, np.int64(-128)]),
        (pa.uint64(), [2**64 - 1]),
        (pa.float64(), [1, 2.5, np.float32(0.5), np.int8(3)]),
        (pa.float32(), [2**24]),
        (pa.float16(), [2048, -2048]),
        (pa.large_string(), ["a"]),
        (pa.binary(), [b"a"]),
        (pa.binary(2), [b"ab", None]),
        (pa.timestamp("s"), [dt.datetime(2020, 1, 1)]),
        (pa.date64(), [dt.date(2020, 1, 1)]),
        (pa.duration("s"), [dt.timedelta(1)]),
        (pa.decimal128(10, 4), [decimal.Decimal("1.5")]),
        (pa.large_list(pa.int32()), [[1], None, []]),
        (pa.list_(pa.int32(), 2), [[1, 2], None]),
        (pa.list_(pa.list_(pa.int32())), [[[1], None], []]),
        (pa.struct([("b", pa.int8()), ("a", pa.list_(pa.float32()))]), [{"a": [0.5], "b": 1}]),
        (pa.list_(pa.int64()), [[], []]),
    ],
    ids=str,
)
def test_declared_types_are_met_exactly(want: pa.DataType, values: list[Any]) -> None:
    array = column(*values, want=want)
    assert array.type == want
    assert array.to_pylist() == values


@pytest.mark.parametrize(
    ("want", "value"),
    [
        (pa.int8(), 128),
        (pa.uint8(), -1),
        (pa.int32(), 1.0),
        (pa.int32(), True),
        (pa.int32(), "1"),
        (pa.bool_(), 1),
        (pa.string(), 1),
        (pa.string(), b"a"),
        (pa.large_binary(), "a"),
        (pa.binary(2), b"abc"),
        (pa.float32(), 2**24 + 1),
        (pa.float64(), 2**53 + 1),
        (pa.float16(), 2049),
        (pa.float16(), np.int8(-128) * np.int16(100)),
        (pa.float32(), np.float64(0.1)),
        (pa.float32(), 1e300),
        (pa.float16(), 1e6),
        (pa.timestamp("s"), dt.datetime(2020, 1, 1, 0, 0, 0, 1)),
        (pa.timestamp("us", "UTC"), dt.datetime(2020, 1, 1)),
        (pa.timestamp("us"), dt.datetime(2020, 1, 1, tzinfo=UTC)),
        (pa.decimal128(4, 1), decimal.Decimal("1.25")),
        (pa.list_(pa.int32(), 2), [1, 2, 3]),
        (pa.list_(pa.int8()), [1, 300]),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), [1, None]),
        (pa.struct([pa.field("a", pa.int8(), nullable=False)]), {"a": None}),
        (pa.fixed_shape_tensor(pa.float32(), (2,)), np.ones(3, np.float32)),
        (pa.list_(pa.float32()), np.full(3, 0.1)),
        (pa.list_(pa.float32()), np.ones((2, 2), np.float32)),
        (pa.map_(pa.string(), pa.int64()), {"a": 1}),
    ],
    ids=str,
)
def test_declared_types_that_cannot_be_met(want: pa.DataType, value: Any) -> None:
    assert refusal(None, value, want=want).startswith("1: row 1, column 'x'")


def test_a_declared_narrow_float_rounds_floats() -> None:
    assert column(0.1, None, want=pa.float32()).to_pylist() == [float(np.float32(0.1)), None]
    array = column(float("inf"), float("nan"), want=pa.float16())
    assert np.isinf(array[0].as_py())
    assert np.isnan(array[1].as_py())


def test_declared_arrays() -> None:
    tensor = pa.fixed_shape_tensor(pa.float64(), (2,))
    assert column(np.ones(2, np.float32), np.ones(2, np.int8), want=tensor).type == tensor
    ragged = pa.struct([("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.int64()))])
    value = column(np.ones((2, 1), np.int32), None, np.ones(2, np.uint8), want=ragged)
    assert value.to_pylist() == [
        {"shape": [2, 1], "values": [1, 1]},
        None,
        {"shape": [2], "values": [1, 1]},
    ]
    nested = pa.list_(pa.list_(pa.int16()))
    assert column(np.ones((2, 1), np.int16), want=nested).to_pylist() == [[[1], [1]]]
    lists = pa.large_list(pa.int16())
    assert column(np.ones(2, np.int16), np.ones(0, np.int16), want=lists).to_pylist() == [
        [1, 1],
        [],
    ]
    assert column(np.ones(2, np.int16), want=pa.list_(pa.int16(), 2)).to_pylist() == [[1, 1]]


def test_a_declared_zone_takes_any_instant() -> None:
    berlin = dt.datetime(2020, 1, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    array = column(berlin, berlin.astimezone(UTC), want=pa.timestamp("us", "UTC"))
    assert array.to_pylist() == [berlin, berlin]


def test_the_order_of_a_declared_schema_counts() -> None:
    schema = pa.schema([pa.field("b", pa.int8(), metadata={"k": "v"}), ("a", pa.string())])
    table = encoded([{"a": "x", "b": 1}], schema, declared=True)
    assert table.schema.equals(schema, check_metadata=True)
    strict = pa.schema([pa.field("a", pa.int8(), nullable=False)])
    with pytest.raises(SchemaError, match="which the schema does not allow"):
        encoded([{"a": None}], strict, declared=True)


@pytest.mark.parametrize(
    "kind",
    [pa.string_view(), pa.month_day_nano_interval(), pa.list_(pa.binary_view()), pa.struct([])],
)
def test_types_that_a_table_cannot_hold_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="column 'x'"):
        RowEncoder(pa.schema([("x", kind)]))
    with pytest.raises(SchemaError, match="two columns 'x'"):
        RowEncoder(pa.schema([("x", pa.int8()), ("x", pa.int8())]))


# ---- batches ----------------------------------------------------------------------------------


def test_batches_are_bounded() -> None:
    sizes = [10, 3_000_000, 20_000_000, 10, 9_000_000, 9_000_000, 5, 5]
    rows = [{"x": bytes(size), "i": i} for i, size in enumerate(sizes)]
    batches = list(RowEncoder().batches(rows))
    assert all(batch.nbytes <= BATCH_BYTES or batch.num_rows == 1 for batch in batches)
    assert [len(x) for batch in batches for x in batch["x"].to_pylist()] == sizes
    assert len(batches) < len(rows)


def test_rows_are_pulled_only_as_needed() -> None:
    pulled = []

    def rows():
        for i in range(100):
            pulled.append(i)
            yield {"x": bytes(4_000_000)}

    next(RowEncoder().batches(rows()))
    assert len(pulled) <= 5


def test_small_rows_share_batches() -> None:
    batches = list(RowEncoder().batches({"a": i} for i in range(10_000)))
    assert [i for batch in batches for i in batch["a"].to_pylist()] == list(range(10_000))
    assert len(batches) <= 4


def test_text_is_measured_in_bytes() -> None:
    rows = [{"x": "\N{GRINNING FACE}" * 5_000_000}] * 3
    batches = list(RowEncoder().batches(rows))
    assert all(batch.nbytes <= BATCH_BYTES or batch.num_rows == 1 for batch in batches)


def test_buffers_that_are_filled_anew() -> None:
    array, tensor, items, row = np.zeros(2), torch.zeros(2), [0], {}
    nested, raw = {"a": np.zeros(2)}, bytearray(1)

    def rows():
        for i in range(5):
            array[:] = i
            tensor[:] = i
            items[0] = i
            nested["a"][:] = i
            raw[0] = i
            row.update(array=array, tensor=tensor, items=items, nested=nested, raw=raw, i=i)
            row["view"] = array[:1]
            yield row

    table = encoded(rows())
    assert table["array"].combine_chunks().storage.to_pylist() == [[i, i] for i in range(5)]
    assert table["tensor"].combine_chunks().storage.to_pylist() == [[i, i] for i in range(5)]
    assert table["view"].combine_chunks().storage.to_pylist() == [[i] for i in range(5)]
    assert table["items"].to_pylist() == [[i] for i in range(5)]
    assert table["raw"].to_pylist() == [bytes([i]) for i in range(5)]
    assert table["i"].to_pylist() == list(range(5))
    inner = table["nested"].combine_chunks().field("a").storage
    assert inner.to_pylist() == [[i, i] for i in range(5)]


def test_batches_of_rows_pass_through() -> None:
    field = pa.field("a", pa.int8(), metadata={"k": "v"})
    batch = pa.record_batch([[1, 2], ["x", "y"]], schema=pa.schema([field, ("b", pa.string())]))
    table = encoded([batch, pa.table({"b": ["z"], "a": pa.array([3], pa.int8())})])
    assert table.schema.field("a").metadata == {b"k": b"v"}
    assert table.to_pylist() == [{"a": i + 1, "b": b} for i, b in enumerate("xyz")]
    mixed = encoded([{"b": "w", "a": np.int8(0)}, batch, {"a": np.int8(9), "b": "v"}])
    assert mixed["a"].to_pylist() == [0, 1, 2, 9]
    empty = pa.table({"a": pa.array([None], pa.null()), "b": ["z"]})
    assert encoded([batch, empty, batch.slice(0, 0)])["a"].to_pylist() == [1, 2, None]


def test_batches_of_other_columns_or_types() -> None:
    batch = pa.record_batch({"a": [1]})
    with pytest.raises(SchemaError, match=r"column 'a' of a batch at row 2 is double, .* int64"):
        encoded([batch, {"a": 2}, pa.record_batch({"a": [1.5]})])
    with pytest.raises(SchemaError, match="has the columns b, but"):
        encoded([batch, pa.record_batch({"b": [1]})])
    with pytest.raises(SchemaError, match="got str"):
        encoded([batch, {"a": "x"}])
    with pytest.raises(SchemaError, match="cannot hold"):
        encoded([pa.record_batch({"a": pa.array(["x"], pa.string_view())})])


# ---- arrays of several dtypes among other values ------------------------------------------------

HALVES = st.integers(-4, 4).map(lambda n: n / 2)
"""Exact in any float type."""


def nested(rank: int) -> st.SearchStrategy[Any]:
    """Lists of so many levels, or a number; none is ragged."""
    if not rank:
        return HALVES
    sizes = st.tuples(*[st.sampled_from([0, 1, 2, 2])] * rank)
    count = math.prod
    return sizes.flatmap(
        lambda shape: st.lists(HALVES, min_size=count(shape), max_size=count(shape)).map(
            lambda items: np.array(items, "f8").reshape(shape).tolist()
        )
    )


def made(rank: int) -> list[st.SearchStrategy[Any]]:
    """The same in many kinds of values."""
    kinds = [
        nested(rank),
        nested(rank).map(lambda value: np.array(value, "f4")),
        nested(rank).map(lambda value: np.array(value, "f8")),
        nested(rank).map(lambda value: torch.tensor(value, dtype=torch.float64)),
    ]
    if rank == 1:
        kinds.append(nested(1).map(lambda items: pa.array(items, pa.float32())))
        kinds.append(nested(1).map(lambda items: pa.array(items, pa.float64())))
    return kinds


RAGGED = pa.struct([("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))])
WANTED = {
    0: [pa.float64(), pa.float32()],
    1: [
        pa.list_(pa.float64()),
        pa.list_(pa.float32()),
        pa.large_list(pa.float64()),
        pa.list_(pa.float64(), 2),
        pa.fixed_shape_tensor(pa.float64(), [2]),
        RAGGED,
    ],
    2: [pa.list_(pa.list_(pa.float64())), pa.fixed_shape_tensor(pa.float64(), [2, 2]), RAGGED],
}


@st.composite
def mixed_columns(draw: Any) -> tuple[list[Any], pa.DataType | None]:
    """Values of one or several kinds, and the type that is declared, which most of them fit."""
    rank = draw(st.sampled_from([0, 1, 1, 1, 2]))
    ranks = draw(st.sampled_from([[rank], [rank], [0, 1, 2]]))
    kinds = [kind for number in ranks for kind in made(number)]
    chosen = draw(st.sampled_from([kinds, kinds[1:3], [draw(st.sampled_from(kinds))]]))
    want = draw(st.none() | st.sampled_from(WANTED[rank]))
    value = st.none() | st.one_of(chosen)
    if (want is None or pa.types.is_list(want)) and draw(st.booleans()):
        value = st.none() | st.lists(value, max_size=3)
        want = None if want is None else pa.list_(want)
    return draw(st.lists(value, min_size=draw(st.sampled_from([1, 5])), max_size=8)), want


def plainly(value: Any) -> Any:
    if isinstance(value, pa.Array):
        return value.to_pylist()
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    return [plainly(item) for item in value] if isinstance(value, list) else value


def told(value: Any, kind: pa.DataType) -> Any:
    """A value that was read, with the shape that its array had."""
    if value is None:
        return None
    if isinstance(kind, pa.FixedShapeTensorType):
        return np.array(value, "f8").reshape(kind.shape).tolist()
    if pa.types.is_struct(kind):
        return np.array(value["values"], "f8").reshape(value["shape"]).tolist()
    return [told(v, kind.value_type) for v in value] if isinstance(value, list) else value


@settings(max_examples=250, deadline=None)
@given(mixed_columns(), st.sampled_from([1, 3, 100]))
def test_as_many_rows_come_out_as_go_in(
    mixed: tuple[list[Any], pa.DataType | None], most: int
) -> None:
    values, want = mixed
    schema = None if want is None else pa.schema([("n", pa.int64()), ("x", want)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("destrier.encoding.encoder._MOST_ROWS", most)
        rows = ({"n": n, "x": value} for n, value in enumerate(values))
        refused = None
        try:
            table = encoded(rows, schema, declared=want is not None)
        except SchemaError as error:
            refused = error
    if refused is not None:
        assert refused.column == "x"
        assert refused.row in range(len(values))
        assert f"row {refused.row}, column 'x'" in str(refused)
        return
    assert table["n"].to_pylist() == list(range(len(values)))
    column = table["x"]
    found = [told(value, column.type) for value in column.to_pylist()]
    assert found == [plainly(value) for value in values]


def test_nulls_between_arrays_of_two_dtypes() -> None:
    f4, f8 = np.arange(2, dtype="f4"), np.arange(2.0)
    for values in ([f8, None, f4], [None, f8, f4, None], [f4, None, None, f8]):
        got = column(*values, want=pa.list_(pa.float64())).to_pylist()
        assert got == [None if value is None else [0.0, 1.0] for value in values]
    nested = column([f8, None, f4], [np.array([7.0])], want=pa.list_(pa.list_(pa.float64())))
    assert nested.to_pylist() == [[[0.0, 1.0], None, [0.0, 1.0]], [[7.0]]]


@pytest.mark.parametrize("null", [[], [None]])
def test_arrays_of_two_dtypes(null: list[None]) -> None:
    at = 1 + len(null)
    for first, later in (("f4", "f8"), ("f8", "f4"), ("i8", "f8")):
        text = refusal(np.zeros(2, first), *null, np.zeros(2, later))
        assert text.startswith(f"{at}: row {at}, column 'x': got ndarray of float")
    text = refusal(torch.zeros(2), *null, torch.zeros(2, dtype=torch.float64))
    assert text.startswith(f"{at}: ")


def test_an_empty_array_of_another_dtype_than_the_first_rows() -> None:
    encoder = RowEncoder(pa.schema([("x", pa.list_(pa.float64()))]))
    with pytest.raises(SchemaError, match="row 1, column 'x': got an array of float"):
        list(encoder.batches([{"x": None}, {"x": np.zeros(0, "f4")}]))


# ---- what Arrow would change without a word -----------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.datetime64("2024-01-01", "25s"), "cast it to s, ms, us or ns"),
        (np.timedelta64(2, "60s"), "cast it to s, ms, us or ns"),
        (
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=30))),
            "pass .astimezone",
        ),
        (decimal.Decimal("-0.0"), "-0.0 has a sign"),
    ],
)
def test_values_that_would_change_are_refused(value: Any, text: str) -> None:
    assert text in refusal(None, value, kind=SourceError)
    assert "row 1, column 'x'[1]" in refusal(None, [None, value], kind=SourceError)


def test_days_beyond_those_of_arrow_are_refused() -> None:
    near, far = np.datetime64(2**31 - 1, "D"), np.datetime64(2**31, "D")
    assert column(near, None, np.datetime64("NaT", "D")).cast(pa.int32()).to_pylist() == [
        2**31 - 1,
        None,
        None,
    ]
    assert refusal(None, near, far).startswith("2: ")
    assert "row 1, column 'x'[1]" in refusal(np.array([near]), np.array([near, far]))


def test_an_offset_of_minutes_or_of_a_named_zone_is_kept() -> None:
    half = dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30)))
    assert column(half).to_pylist() == [half]
    old = dt.datetime(1880, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam"))  # 19 minutes, 32 seconds
    assert column(old).cast(pa.int64()).to_pylist() == [
        (old - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(microseconds=1)
    ]


# ---- what a table cannot hold -------------------------------------------------------------------

PAIRS = pa.list_(pa.struct([("a", pa.int64())]), 2)


@pytest.mark.parametrize(
    "kind", [PAIRS, pa.list_(PAIRS), pa.struct([("s", PAIRS)]), pa.map_(pa.string(), PAIRS)]
)
def test_fixed_lists_of_structs_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="make them list<item: struct<a: int64>>") as caught:
        RowEncoder(pa.schema([("i", pa.int64()), ("v", kind)]))
    assert caught.value.column == "v"
    batch = pa.record_batch([pa.nulls(2, kind)], names=["v"])
    with pytest.raises(SchemaError, match="column 'v'"):
        list(RowEncoder().batches([batch]))
    with pytest.raises(ColumnError, match="column 'v' cannot be kept"):
        Layout.choose(batch.schema, [batch], columns=None, compression=None, provenance=False)


def test_a_scalar_of_such_a_type_is_refused() -> None:
    with pytest.raises(SchemaError, match="column 'x' is fixed_size_list"):
        column(pa.scalar([{"a": 1}, {"a": 2}], PAIRS))


def deep(levels: int) -> list[Any]:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_deep_nesting_is_kept_or_refused(tmp_path: Path) -> None:
    table = encoded([{"i": 1, "x": deep(60)}])
    lance.write_dataset(table, str(tmp_path / "t"))
    assert lance.dataset(str(tmp_path / "t")).to_table() == table
    for levels in (61, 80):
        with pytest.raises(SchemaError, match=r"column 'x' .* more than 60 levels deep"):
            encoded([{"i": 1, "x": deep(levels)}])


@pytest.mark.parametrize("name", ["a`b", "a.b", "a\0b", "", "_rowid"])
def test_names_that_a_table_cannot_have(name: str) -> None:
    batch = pa.record_batch([pa.array([1])], names=[name])
    with pytest.raises(ColumnError, match="a column cannot be named"):
        Layout.choose(batch.schema, [batch], columns=None, compression=None, provenance=False)


# ---- scalars and buffers of Arrow ---------------------------------------------------------------


def test_arrow_scalars_of_maps_and_structs() -> None:
    kind = pa.map_(pa.string(), pa.int64())
    got = column(pa.scalar([("a", 1), ("a", 2)], kind), None, pa.scalar([], kind))
    assert got.type == kind
    assert got.to_pylist() == [[("a", 1), ("a", 2)], None, []]
    inside = column([pa.scalar([("a", 1)], kind)], [])
    assert inside.to_pylist() == [[[("a", 1)]], []]
    struct = pa.scalar({"a": 1}, pa.struct([("a", pa.int8())]))
    assert column(struct, None).type == struct.type


def test_arrow_buffers_that_are_filled_anew() -> None:
    buffer = np.zeros(2)

    def rows(make: Any) -> Any:
        for number in range(3):
            buffer[:] = number
            yield make(pa.array(buffer))

    expected = [[float(number)] * 2 for number in range(3)]
    assert encoded(rows(lambda a: {"x": a}))["x"].to_pylist() == expected
    assert encoded(rows(lambda a: {"x": pa.chunked_array([a])}))["x"].to_pylist() == expected
    assert encoded(rows(lambda a: {"x": [a]}))["x"].to_pylist() == [[item] for item in expected]
    listed = encoded(rows(lambda a: {"x": pa.ListArray.from_arrays([0, 2], a)[0]}))
    assert listed["x"].to_pylist() == expected
    flat = [item for pair in expected for item in pair]
    assert encoded(rows(lambda a: pa.record_batch([a], ["x"])))["x"].to_pylist() == flat
    assert encoded(rows(lambda a: pa.table([a], ["x"])))["x"].to_pylist() == flat
