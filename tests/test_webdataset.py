"""Tars of samples, against webdataset itself and by hand."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierError,
    SchemaError,
    SourceError,
)
from destrier.files import Store
from destrier.formats.webdataset import WebDatasetSink, detect, open_source
from destrier.formats.webdataset import reader as readers
from destrier.writing.source import BATCH_BYTES, LINK
from oracle import needs_peers, run_peer

Members = list[tuple[str, bytes]]

WRITE = """
    import sys

    sys.modules["torch"] = None  # webdataset does without, and it takes seconds to import
    import numpy as np
    import webdataset as wds

    root = sys.argv[1]
    rng = np.random.default_rng(3)
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    with wds.ShardWriter(root + "/many-%04d.tar", maxcount=40, verbose=0) as sink:
        for i in range(100):
            sample = {
                "__key__": f"{'a/b.c/' if i % 2 else ''}sample{i:05d}",
                "png": image + np.uint8(i),
                "seg.png": rng.bytes(i * 7),
                "cls": i - 50,
                "txt": f"caf\\u00e9 {i}\\n",
                "json": {"i": i, "nested": [1, 2.5, None]},
                "npy": np.arange(6, dtype=np.float32).reshape(2, 3) + i,
                "raw.blob": bytes([i]),
            }
            if i % 3 == 1:
                del sample["cls"], sample["npy"]
            sink.write(sample)
    for name, options in {
        "packed.tar.gz": {"compress": True},
        "long.tar": {"format": "PAX_FORMAT"},
        "gnu.tar": {"format": "GNU_FORMAT"},
    }.items():
        stream = open(f"{root}/{name}", "wb")
        writer = wds.TarWriter(stream, **options)
        for i in range(30):
            key = f"folder\\u00e9/{'k' * 120}{i}" if name != "packed.tar.gz" else f"{i}"
            writer.write({"__key__": key, "JPG": rng.bytes(999 + i), "id": i, "txt": ""})
        writer.close()
        stream.close()
"""

READ = """
    import glob, json, sys

    sys.modules["torch"] = None
    import numpy as np
    import webdataset as wds

    def plain(value):
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, np.ndarray):
            return {"array": value.tolist(), "dtype": str(value.dtype)}
        return value

    found = {}
    for pattern in sys.argv[2:]:
        urls = sorted(glob.glob(pattern))
        for kind in ("raw", "decoded"):
            data = wds.WebDataset(urls, shardshuffle=False)
            if kind == "decoded":
                data = data.decode()
            found[f"{kind} {pattern}"] = [
                {k: plain(v) for k, v in sample.items() if k not in ("__url__", "__local_path__")}
                for sample in data
            ]
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
"""


def make(path: Path, members: Members, mode: str = "w", **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def convert(path: Path | str, **options: Any) -> pa.Table:
    """Read a source as the writer does: the first unit fixes the schema."""
    source = pickle.loads(pickle.dumps(open_source(Store(path), **options)))
    schema = None
    batches = []
    for unit in source.units():
        for batch in source.read(unit, schema):
            batch.validate(full=True)
            assert batch.nbytes <= BATCH_BYTES or batch.num_rows == 1
            if schema is None:
                schema = batch.schema
            batches.append(batch)
    return pa.Table.from_batches(batches, schema)


def export(table: pa.Table, folder: Path, number: int = 0, **options: Any) -> Path:
    sink = pickle.loads(pickle.dumps(WebDatasetSink(**options)))
    sink.check(table.schema)
    store = Store(folder)
    info = sink.write(store, number, iter(table.to_batches(max_chunksize=7)))
    sink.finish(store, [json.loads(json.dumps(info))])
    return folder / f"shard-{number:06d}.tar"


def plain(value: Any) -> Any:
    """Say a value as the peer's script says it."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Tars that webdataset wrote, our exports of them, and what it reads in both."""
    root = tmp_path_factory.mktemp("webdataset")
    run_peer(WRITE, root)
    for name in ("many-*.tar", "packed.tar.gz", "long.tar"):
        table = convert(root / name)
        export(table.slice(0, len(table) // 2), root / "out" / name, 0)
        export(table.slice(len(table) // 2), root / "out" / name, 1)
    export(natural_table(), root / "out" / "natural")
    patterns = ["many-*.tar", "packed.tar.gz", "long.tar", "gnu.tar"]
    patterns += [f"out/{p}/*.tar" for p in ("many-[*].tar", *patterns[1:3], "natural")]
    run_peer(READ, root / "found.json", *(root / pattern for pattern in patterns))
    found = json.loads((root / "found.json").read_text())
    return root, {key.replace(f"{root}/", ""): value for key, value in found.items()}


@needs_peers
@pytest.mark.parametrize("pattern", ["many-*.tar", "packed.tar.gz", "long.tar", "gnu.tar"])
def test_what_webdataset_wrote_is_read_as_it_reads_it(peer: Any, pattern: str) -> None:
    root, found = peer
    table = convert(root / pattern)
    extensions = {
        f.name: f.metadata[b"destrier:encoding"].decode().split(":")[1] for f in table.schema
    }
    raw, decoded = found[f"raw {pattern}"], found[f"decoded {pattern}"]
    assert len(raw) == len(decoded) == len(table) > 0
    columns = {
        name: column.combine_chunks().to_numpy_ndarray()
        if isinstance(column.type, pa.FixedShapeTensorType) and not column.null_count
        else column.to_pylist()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    for row, (theirs, read) in enumerate(zip(raw, decoded, strict=True)):
        mine = {e: columns[n][row] for n, e in extensions.items() if columns[n][row] is not None}
        assert mine.keys() == theirs.keys()
        for extension, value in mine.items():
            if extension.endswith(("png", "jpg", "blob")):
                assert plain(value) == theirs[extension]
            elif extension == "json":
                assert {"bytes": value.encode().hex()} == theirs[extension]
                assert json.loads(value) == read[extension]
            elif extension == "npy":
                kind = table.schema.field("npy").type
                array = np.array(value, kind.value_type.to_pandas_dtype()).reshape(kind.shape)
                assert plain(array) == read[extension]
            else:
                assert value == read[extension]


@needs_peers
@pytest.mark.parametrize("name", ["many-*.tar", "packed.tar.gz", "long.tar"])
def test_an_export_is_what_was_there_byte_for_byte(peer: Any, name: str) -> None:
    _, found = peer
    pattern = f"out/{name.replace('*', '[*]')}/*.tar"
    assert found[f"raw {pattern}"] == found[f"raw {name}"]


def natural_table() -> pa.Table:
    """Columns that came from no tar."""
    tensor = pa.fixed_shape_tensor(pa.int16(), [2, 2])
    storage = pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8]], pa.list_(pa.int16(), 4))
    image = {b"content_type": b"image/png"}
    ragged = pa.struct([("shape", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])
    columns = {
        pa.field("key", pa.string()): ["x", "y/z", "ü"],
        pa.field("Image", pa.large_binary(), metadata=image): [b"1", b"22", None],
        pa.field("blob", pa.binary()): [b"", b"b", b"c"],
        pa.field("label", pa.int32()): [1, -2, 3],
        pa.field("cls", pa.int64()): [0, None, 2],
        pa.field("caption", pa.string()): ["ä", "", None],
        pa.field("tokens", pa.list_(pa.uint16())): [[1, 2], [], None],
        pa.field("score", pa.float32()): [0.1, None, 2.0],
        pa.field("tensor", tensor): pa.ExtensionArray.from_storage(tensor, storage),
        pa.field("ragged", ragged): [{"shape": [1, 2], "values": [1, 2]}, None, None],
        pa.field("info", pa.struct([("a", pa.bool_()), ("b", pa.list_(pa.string()))])): [
            {"a": True, "b": ["é"]},
            None,
            {"a": None, "b": []},
        ],
    }
    arrays = [v if isinstance(v, pa.Array) else pa.array(v, f.type) for f, v in columns.items()]
    return pa.Table.from_arrays(arrays, schema=pa.schema(list(columns)))


@needs_peers
def test_columns_of_other_formats_get_natural_extensions(peer: Any) -> None:
    _, found = peer
    first, second, third = found["decoded out/natural/*.tar"]
    assert first == {
        "__key__": "x",
        "image.png": {"bytes": "31"},
        "blob.bin": {"bytes": ""},
        "label.cls": 1,
        "cls": 0,
        "caption.txt": "ä",
        "tokens.npy": {"array": [1, 2], "dtype": "uint16"},
        "score.json": float(np.float32(0.1)),
        "tensor.npy": {"array": [[1, 2], [3, 4]], "dtype": "int16"},
        "ragged.npy": {"array": [[1.0, 2.0]], "dtype": "float32"},
        "info.json": {"a": True, "b": ["é"]},
    }
    assert second.keys() == {
        "__key__", "image.png", "blob.bin", "label.cls", "caption.txt", "tokens.npy",
    }  # fmt: skip
    assert second["caption.txt"] == ""
    assert third["tensor.npy"]["array"] == [[5, 6], [7, 8]]
    assert third["__key__"] == "ü"


SAMPLES: Members = [
    ("d/one.jpg", b"\xff\xd8\xff one"),
    ("d/one.cls", b"3\n"),
    ("d/one.left.seg.png", b"png"),
    ("two.jpg", b""),
    ("two.txt", "zwölf".encode()),
    ("./three.cls", b"-7"),
    ("./three.what", b"\0\1"),
]


def test_members_make_columns(tmp_path: Path) -> None:
    table = convert(make(tmp_path / "a.tar", SAMPLES))
    assert table.to_pydict() == {
        "key": ["d/one", "two", "./three"],
        "jpg": [b"\xff\xd8\xff one", b"", None],
        "cls": [3, None, -7],
        "left_seg_png": [b"png", None, None],
        "txt": [None, "zwölf", None],
        "what": [None, None, b"\0\1"],
    }
    assert table.schema.field("jpg").type == pa.large_binary()
    assert table.schema.field("jpg").metadata[b"content_type"] == b"image/jpeg"
    assert table.schema.field("left_seg_png").metadata == {
        b"content_type": b"image/png",
        b"destrier:encoding": b"webdataset:left.seg.png",
    }
    assert b"content_type" not in table.schema.field("what").metadata


@pytest.mark.parametrize("codec", ["gz", "bz2", "zst"])
def test_compressed_tars(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_CHUNK", 700)  # members lie across windows
    data = make(tmp_path / "a.tar", SAMPLES).read_bytes()
    packed = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    }[codec](data)
    path = tmp_path / f"b.tar.{codec}"
    path.write_bytes(packed)
    assert convert(path).equals(convert(tmp_path / "a.tar"))
    with pytest.raises(ArgumentError, match=r"b\.tar.* is compressed.*destrier\.convert"):
        open_source(Store(path), link=True)
    disguised = tmp_path / "c.tar"
    disguised.write_bytes(packed)
    assert convert(disguised).equals(convert(tmp_path / "a.tar"))
    with pytest.raises(ArgumentError, match=r"c\.tar is compressed.*destrier\.convert"):
        convert(disguised, link=True)


def test_links_are_the_bytes_of_the_members(tmp_path: Path) -> None:
    for part in (1, 2, 10):
        members = [(f"{part}-{name}", data) for name, data in SAMPLES if "/" not in name]
        make(tmp_path / f"tars %é {part}.tar", [(f"{part}x.jpg", b"%d" % part), *members])
    copied, linked = convert(tmp_path), convert(tmp_path, link=True)
    assert linked.schema.field("jpg").type == LINK
    assert linked.schema.field("jpg").metadata == copied.schema.field("jpg").metadata
    assert linked.drop_columns("jpg").equals(copied.drop_columns("jpg"))
    assert linked["key"].to_pylist() == ["1x", "1-two", "2x", "2-two", "10x", "10-two"]
    for value, link in zip(copied["jpg"].to_pylist(), linked["jpg"].to_pylist(), strict=True):
        path = Path(unquote(link["uri"].removeprefix("file://")))
        data = path.read_bytes()
        assert data[link["position"] : link["position"] + link["size"]] == value
        assert link["file_size"] == len(data)
        assert link["file_stamp"] == path.stat().st_mtime_ns
    assert linked["jpg"][0].as_py()["uri"] == f"file://{tmp_path}/tars%20%25%C3%A9%201.tar"
    lacking = convert(make(tmp_path / "lacking.tar", SAMPLES), link=True)
    assert lacking["jpg"].is_valid().to_pylist() == [True, True, False]


@pytest.mark.parametrize("link", [False, True])
def test_a_remote_tar_is_read_as_a_local_one(
    tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("_CHUNK", 600), ("_AHEAD", 1024), ("_HEADERS", 512)):
        monkeypatch.setattr(readers, name, size)
    big = bytes(range(256)) * 20
    members = [*SAMPLES, ("z.npy", npy(np.arange(3))), ("z.jpg", big), ("zz.jpg", big)]
    path = make(tmp_path / "a.tar", members)
    local = convert(path, link=link)
    monkeypatch.setattr(Store, "local", property(lambda _: False))
    monkeypatch.setattr(
        Store, "_opened", property(lambda store: (pa.fs.LocalFileSystem(), store.uri))
    )
    source = open_source(Store(path), link=link)
    remote = pa.Table.from_batches(source.read(source.units()[0], None))
    for field in local.schema:
        mine, theirs = remote[field.name], local[field.name]
        if field.type != LINK:
            assert mine.equals(theirs)
            continue
        for part in ("position", "size", "file_size", "file_stamp"):  # the URIs differ
            assert pc.struct_field(mine, part).equals(pc.struct_field(theirs, part))


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def test_arrays(tmp_path: Path) -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.zeros((2, 3))]
    arrays[2] = arrays[2].astype(">f8") + 5
    members = [
        member
        for i, array in enumerate(arrays)
        for member in (
            (f"{i}.npy", npy(array)),
            (f"{i}.bool.npy", npy(np.array([True, False, i > 1]))),
            (f"{i}.scalar.npy", npy(np.float16(i / 4))),
        )
    ]
    path = make(tmp_path / "a.tar", [*members, ("9.txt", b"no arrays")])
    table = convert(path)
    kind = pa.fixed_shape_tensor(pa.float64(), [2, 3])
    assert table.schema.field("npy").type == kind
    assert table.schema.field("scalar_npy").type == pa.float16()
    assert table["npy"].to_pylist() == [a.ravel().tolist() for a in arrays] + [None]
    assert table["bool_npy"].to_pylist()[2:] == [[True, False, True], None]
    assert table["scalar_npy"].to_pylist() == [0.0, 0.25, 0.5, None]
    back = convert(export(table, tmp_path / "out"))
    assert back.equals(table)


def test_arrays_of_many_shapes_are_asked_about(tmp_path: Path) -> None:
    arrays = [np.arange(n * 2, dtype=np.int16).reshape(n, 2) for n in (1, 3, 0)]
    path = make(
        tmp_path / "a.tar",
        [
            member
            for n, array in enumerate(arrays)
            for member in ((f"{n}.npy", npy(array)), (f"{n}.flat.npy", npy(array.ravel())))
        ]
        + [("9.txt", b"")],
    )
    with pytest.raises(SchemaError, match=r"\(1, 2\) and \(3, 2\).*\{'npy': 'ragged'\}"):
        convert(path)
    table = convert(path, extensions={"npy": "ragged", "flat.npy": "ragged"})
    assert table["flat_npy"].type == pa.list_(pa.int16())
    assert table["flat_npy"].to_pylist() == [[0, 1], [0, 1, 2, 3, 4, 5], [], None]
    assert table["npy"].to_pylist() == [
        {"shape": [1, 2], "values": [0, 1]},
        {"shape": [3, 2], "values": [0, 1, 2, 3, 4, 5]},
        {"shape": [0, 2], "values": []},
        None,
    ]
    back = export(table, tmp_path / "out")
    assert convert(back, extensions={"npy": "ragged", "flat.npy": "ragged"}).equals(table)
    as_bytes = convert(path, extensions={"npy": "bytes", "flat.npy": "bytes"})
    assert as_bytes["npy"].to_pylist()[0] == npy(arrays[0])


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.array([{}], object), "array of '|O'"),
        (np.array(["a"]), "array of '<U1'"),
        (np.ones(2, complex), "array of '<c16'"),
    ],
)
def test_arrays_that_columns_cannot_hold(tmp_path: Path, array: Any, why: str) -> None:
    path = make(tmp_path / "a.tar", [("a.npy", npy(array))])
    with pytest.raises(SchemaError) as caught:
        convert(path)
    assert why in str(caught.value)
    assert "member 'a.npy'" in str(caught.value)
    assert "'bytes'" in str(caught.value)
    assert convert(path, extensions={"npy": "bytes"})["npy"].to_pylist() == [npy(array)]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (npy(np.arange(9))[:-1], "has 199 bytes.*asks for 200"),
        (npy(np.arange(9)) + b"x", "has 201 bytes"),
        (b"\x93NUMPY\x01\x00\xff\xff{'descr'", "longer than it can be"),
        (npy(np.arange(9)).replace(b"(9,)", b"(-9)"), "header is damaged"),
        (b"", "does not begin"),
    ],
)
def test_damaged_arrays(tmp_path: Path, data: bytes, why: str) -> None:
    path = make(tmp_path / "a.tar", [("ok.npy", npy(np.arange(9))), ("bad.npy", data)])
    with pytest.raises(SchemaError, match=rf"member 'bad\.npy'.*{why}"):
        convert(path)


@pytest.mark.parametrize("text", [b"007", b"1.5", b"", b"cat", b"1_0", b"+1", b"9" * 19, b"0x1"])
def test_numbers_that_are_not_plain_integers(tmp_path: Path, text: bytes) -> None:
    path = make(tmp_path / "a.tar", [("a.cls", b" 12\n"), ("b.cls", text)])
    with pytest.raises(SchemaError, match=r"a\.tar: member 'b\.cls' of sample 1") as caught:
        convert(path)
    assert caught.value.row == 1
    assert caught.value.column == "cls"
    table = convert(path, extensions={"cls": "string"})
    assert table["cls"].to_pylist() == [" 12\n", text.decode()]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", [("a.txt", b"a\xc3"), ("b.txt", b"\xa9")])
    with pytest.raises(SchemaError, match=r"member 'a\.txt' of sample 0: it is not UTF-8"):
        convert(path)  # together the two are UTF-8
    assert convert(path, extensions={"txt": "bytes"})["txt"].to_pylist() == [b"a\xc3", b"\xa9"]


def test_an_extension_that_the_first_tar_has_not(tmp_path: Path) -> None:
    make(tmp_path / "x1.tar", [("a.jpg", b"1")])
    make(tmp_path / "x2.tar", [("b.jpg", b"2"), ("b.txt", b"two")])
    with pytest.raises(SchemaError, match=r"x2\.tar: member 'b\.txt'.*extensions=\['txt'\]"):
        convert(tmp_path)
    rows = convert(tmp_path, extensions=["txt"]).to_pylist()
    assert rows == [
        {"key": "a", "txt": None, "jpg": b"1"},
        {"key": "b", "txt": "two", "jpg": b"2"},
    ]
    assert convert(tmp_path, columns=["jpg"]).to_pylist() == [{"jpg": b"1"}, {"jpg": b"2"}]
    assert convert(tmp_path, skip=["*.txt"])["key"].to_pylist() == ["a", "b"]
    with pytest.raises(ColumnError, match=r"no column 'txt'.*key, jpg.*extensions="):
        convert(tmp_path, columns=["txt"])


def test_extensions_that_make_one_column(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", [("a.b.c", b"1"), ("a.b_c", b"2"), ("a.key", b"3")])
    with pytest.raises(SchemaError, match=r"member 'a\.b_c' would be column 'b_c'.*'b\.c'"):
        convert(path)
    with pytest.raises(SchemaError, match=r"column 'key', which is that of the keys.*key_column="):
        convert(path, skip=["*.b_c"])
    assert convert(path, skip=["*.b_c"], key_column="name").to_pylist() == [
        {"name": "a", "b_c": b"1", "key": b"3"}
    ]
    assert convert(path, skip=["*.b_c"], key_column=None).to_pylist() == [
        {"b_c": b"1", "key": b"3"}
    ]


def test_names_that_are_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in [("d", tarfile.DIRTYPE), ("d/a.jpg", tarfile.REGTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        for name in ("__meta__/x.json", "__m__", "d/._a.jpg", "../../etc/a.jpg", "/root/b.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    assert convert(path)["key"].to_pylist() == ["d/a", "../../etc/a", "/root/b"]


@pytest.mark.parametrize("name", ["README", "d/README", ".hidden", "d/.hidden.jpg", "x."])
def test_a_member_without_key_or_extension(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "a.tar", [("a.jpg", b""), (name, b"x"), ("b.jpg", b"")])
    with pytest.raises(SourceError, match=r"a\.tar: member .* no key and extension.*skip=\["):
        convert(path)
    assert convert(path, skip=[name])["key"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a character device"),
        (tarfile.FIFOTYPE, "a named pipe"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (b"Z", "of the unknown type"),
    ],
)
def test_members_that_are_not_files(tmp_path: Path, kind: bytes, what: str) -> None:
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("b.jpg")
    info.type, info.linkname = kind, "a.jpg"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
        tar.addfile(info)
    with pytest.raises(SourceError, match=rf"a\.tar: member 'b\.jpg' is {what}.*skip="):
        convert(path)
    assert convert(path, skip=["b.jpg"])["key"].to_pylist() == ["a"]


def test_a_key_that_comes_again(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", [("a.jpg", b""), ("b.jpg", b""), ("a.cls", b"1")])
    with pytest.raises(SourceError, match=r"a\.tar: member 'a\.cls' belongs to sample 'a'"):
        convert(path)
    path = make(tmp_path / "b.tar", [("a.jpg", b""), ("a.JPG", b"")])
    with pytest.raises(SourceError, match=r"b\.tar: sample 'a' has two members 'jpg'"):
        convert(path)
    packed = tmp_path / "c.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(SourceError, match=r"c\.tar\.gz: member 'a\.cls' belongs to sample 'a'"):
        convert(packed)


def test_large_members_stand_alone(tmp_path: Path) -> None:
    sizes = [BATCH_BYTES // 2, BATCH_BYTES // 2, 5, BATCH_BYTES + 1, 7]
    members = [(f"{i}.bin", bytes([i]) * size) for i, size in enumerate(sizes)]
    path = make(tmp_path / "a.tar", members)
    source = open_source(Store(path))
    batches = list(source.read(source.units()[0], None))
    assert [batch.num_rows for batch in batches] == [1, 2, 1, 1]
    column = pa.chunked_array([batch["bin"] for batch in batches])
    assert column.to_pylist() == [data for _, data in members]


def test_patterns_and_folders(tmp_path: Path) -> None:
    for i in (2, 10, 9, 1):
        make(tmp_path / "d" / f"t-{i:03d}.tar", [(f"{i}.txt", b"")])
    make(tmp_path / "d" / "sub" / "u.tar", [("u.txt", b"")])
    (tmp_path / "d" / "README.md").write_text("not a tar")

    def keys(pattern: str) -> list[str]:
        return convert(f"{tmp_path}/{pattern}")["key"].to_pylist()

    assert keys("d") == ["u", "1", "2", "9", "10"]
    assert keys("d/t-{009..010}.tar") == ["9", "10"]
    assert keys("d/t-{010..009}.tar") == ["10", "9"]
    assert keys("d/{t-001,sub/u}.tar") == ["1", "u"]
    assert keys("d/t-0{0{1,2},10}.tar") == ["1", "2", "10"]
    assert keys("d/t-*.tar") == ["1", "2", "9", "10"]
    assert keys("*/t-00[!2].tar") == ["1", "9"]
    for pattern in ("d", "d/t-{001..002}.tar", "d/t-001.tar", "d/*.tar"):
        assert detect(Store(f"{tmp_path}/{pattern}"))
    (tmp_path / "d" / "photo.jpg").write_bytes(bytes(1_000_000))
    assert not detect(Store(tmp_path / "d"))
    assert not detect(Store(tmp_path))
    for pattern, error, match in [
        ("d/t-{000..002}.tar", SourceError, r"there is no .*t-000\.tar"),
        ("d/z*.tar", SourceError, "no file matches"),
        ("d/t-{1..x}.tar", ArgumentError, r"write \{1\.\.x\} as"),
        ("d/{t-001,t-001}.tar", ArgumentError, r"t-001\.tar twice"),
        ("nothing", SourceError, "nothing is not there"),
        ("d/t-{0..9999999}.tar", ArgumentError, "more than 1,000,000"),
    ]:
        with pytest.raises(error, match=match):
            keys(pattern)


def test_sizes_and_names_in_extended_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("x.bin")
    info.size = 3
    info.pax_headers = {"path": "ü" * 300 + ".bin", "size": "3", "comment": "a\nb=c"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as tar:
        tar.addfile(info, io.BytesIO(b"123"))
    data = bytearray(path.read_bytes())
    assert convert(path).to_pylist() == [{"key": "ü" * 300, "bin": b"123"}]

    base256 = tarfile.TarInfo("y.bin").tobuf(tarfile.GNU_FORMAT)
    field = b"\x80" + (4).to_bytes(11, "big")
    path.write_bytes(checked(base256[:124] + field + base256[136:]) + b"four".ljust(512, b"\0"))
    with path.open("ab") as file:
        file.write(bytes(1024))
    assert convert(path).to_pylist() == [{"key": "y", "bin": b"four"}]

    data[data.index(b"path=") - 1] = 0x39
    path.write_bytes(data)
    with pytest.raises(SourceError, match="pax header is damaged"):
        convert(path)


def checked(header: bytes) -> bytes:
    """Put the right checksum into a header."""
    blank = header[:148] + b" " * 8 + header[156:512]
    return header[:148] + b"%06o\0 " % sum(blank) + header[156:512]


def test_damage_is_named(tmp_path: Path) -> None:
    whole = make(tmp_path / "a.tar", SAMPLES, format=tarfile.USTAR_FORMAT).read_bytes()
    end = 2 * 512 * len(SAMPLES) - 512  # the second of the two jpg is empty
    assert not any(whole[end:])
    path = tmp_path / "b.tar"

    def error(data: bytes, **options: Any) -> str:
        path.write_bytes(data)
        with pytest.raises(SourceError) as caught:
            convert(path, **options)
        assert "b.tar" in str(caught.value)
        return str(caught.value)

    for cut, what in [
        (end, "without the blocks of zeros that end a tar"),
        (1024, "ends at byte 1,024 without"),
        (600, "ends at byte 600 without"),
        (515, "but the file has 515 bytes: it is cut"),
        (100, "ends at byte 100 without"),
        (0, "is empty without"),
    ]:
        assert what in error(whole[:cut])
    path.write_bytes(whole[:end])
    assert len(convert(path, require_end=False)) == 3
    assert "checksum" in error(whole[:30] + b"!" + whole[31:])
    assert "joined by cat" in error(whole + whole)
    assert "has no samples" in error(bytes(10_240))
    assert "not a tar" in error(b"plain text, which is no tar" * 99)
    huge = checked(whole[:124] + b"%011o\0" % (1 << 32) + whole[136:512])
    assert "takes 4,294,967,296 bytes" in error(huge + whole[512:])
    negative = checked(whole[:124] + b"\xff" * 12 + whole[136:512])
    assert "the size of the member" in error(negative + whole[512:])
    long_name = checked(whole[:156] + b"L" + whole[157:512])
    assert "an extended header that no member follows" in error(long_name + bytes(1024))
    not_text = checked(b"\xff.jpg" + whole[5:512])
    assert "is not UTF-8" in error(not_text + whole[512:])
    packed = gzip.compress(whole)
    assert "Truncated" in error(packed[:-9])
    assert "incorrect data check" in error(packed[:-8] + b"0000" + packed[-4:])
    assert "xz -d" in error(b"\xfd7zXZ\x00" + whole)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    packed=st.booleans(),
    link=st.booleans(),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=3),
    cut=st.none() | st.floats(0, 1),
)
def test_damage_is_an_error_or_no_difference(
    tmp_path: Path, packed: bool, link: bool, flips: list[tuple[float, int]], cut: float | None
) -> None:
    # names in the headers, which have checksums; what members hold has none
    members = [*SAMPLES, ("n" * 99 + "/" + "m" * 80 + ".npy", npy(np.arange(4))), ("é.json", b"{}")]
    path = make(tmp_path / "a.tar", members, format=tarfile.USTAR_FORMAT)
    right = convert(path)
    data = bytearray(path.read_bytes())
    data = bytearray(gzip.compress(data, mtime=0)) if packed else data
    if cut is not None:
        del data[int(cut * len(data)) :]
    for place, flip in flips:
        if data:
            data[int(place * (len(data) - 1))] ^= flip
    path.write_bytes(data)
    try:
        found = convert(path, link=link and not packed)
    except DestrierError:
        return
    # so names and sizes must be right
    assert found.column_names == right.column_names
    assert found["key"].equals(right["key"])
    for name in ("jpg", "left_seg_png", "what"):
        sizes = [None if value is None else len(value) for value in right[name].to_pylist()]
        kept = found[name].to_pylist()
        assert sizes == [
            v and v["size"] if isinstance(v, dict) else None if v is None else len(v) for v in kept
        ]
    if packed:
        assert found.equals(right)


def test_integers_beyond_64_signed_bits_come_back(tmp_path: Path) -> None:
    huge = pa.array([0, 2**63, None, 2**64 - 1], pa.uint64())
    out = export(pa.table({"huge": huge, "n": [1, 2, 3, 4]}), tmp_path / "out")
    back = convert(out)["huge_npy"]
    assert (back.type, back.to_pylist()) == (pa.uint64(), huge.to_pylist())


def test_exports_restore_a_table(tmp_path: Path) -> None:
    table = convert(make(tmp_path / "a.tar", [m for m in SAMPLES if not m[0].startswith(".")]))
    out = export(table, tmp_path / "out")
    assert convert(out).equals(table)
    again = export(table, tmp_path / "again")
    assert out.read_bytes() == again.read_bytes()
    with tarfile.open(out) as tar:
        infos = tar.getmembers()
        assert [info.name for info in infos][:3] == ["d/one.jpg", "d/one.cls", "d/one.left.seg.png"]
        assert {info.mtime for info in infos} == {0}
    assert out.stat().st_size % 10_240 == 0
    numbered = convert(export(table, tmp_path / "numbered", 7, key_column=None))
    assert numbered["key"].to_pylist() == ["000007_00000000", "000007_00000001"]
    assert numbered["jpg"].equals(table["jpg"])


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("a", "of a row before it"),
        ("b.c", "without dots"),
        ("", "without dots"),
        (None, "without dots"),
        ("x/", "without dots"),
        ("/abs", "outside its folder"),
        ("x/../../y", "outside its folder"),
    ],
)
def test_keys_that_tars_cannot_have(tmp_path: Path, key: str | None, why: str) -> None:
    table = pa.table({"key": pa.array(["a", key]), "txt": ["1", "2"]})
    if key is not None and ".." in key:
        why = "outside|without dots"
    with pytest.raises(SourceError, match=rf"^it has the key.*{why}.*key_column=None") as caught:
        export(table, tmp_path)
    assert (caught.value.row, caught.value.column) == (1, "key")
    assert convert(export(table, tmp_path, key_column=None))["txt"].to_pylist() == ["1", "2"]


def test_columns_that_tars_cannot_hold(tmp_path: Path) -> None:
    sink = WebDatasetSink()
    fields = [
        pa.field("when", pa.timestamp("us")),
        pa.field("deep", pa.list_(pa.struct([("raw", pa.binary())]))),
        pa.field("a/b", pa.string()),
        pa.field("fine", pa.string()),
        pa.field("FINE", pa.string()),
    ]
    with pytest.raises(ColumnError) as caught:
        sink.check(pa.schema(fields))
    for text in ("'when' (timestamp[us])", "'deep'", "'a/b.txt'", "'FINE'", "columns="):
        assert text in str(caught.value)
    with pytest.raises(ColumnError, match="only the keys"):
        sink.check(pa.schema([("key", pa.string())]))
    with pytest.raises(ArgumentError, match="key_column='id' is not a column of text"):
        WebDatasetSink(key_column="id").check(pa.schema([("id", pa.int64())]))
    with pytest.raises(SourceError, match=r"^it is null in all columns") as caught:
        export(pa.table({"txt": ["1", None]}), tmp_path)
    assert caught.value.row == 1
    for values in ([[1, 2], [3], [None], [4]], [[1], None, [None], [2, None]]):
        with pytest.raises(SourceError, match=r"^column 'v': a null among the numbers") as caught:
            export(pa.table({"v": values, "n": [1, 2, 3, 4]}), tmp_path)
        assert (caught.value.row, caught.value.column) == (2, "v")


def test_arguments(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", SAMPLES)
    for options, match in [
        ({"extensions": {"jpg": "picture"}}, "not one of int, string"),
        ({"extensions": "jpg"}, "lists of texts"),
        ({"columns": ["jpg", "jpg"]}, "twice"),
    ]:
        with pytest.raises(ArgumentError, match=match):
            open_source(Store(path), **options)
    one, other = open_source(Store(path)), open_source(Store(path), skip=["*.cls"])
    assert one.digest() == open_source(Store(path)).digest() != other.digest()
    (unit,) = one.units()
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(SourceError, match="when it was listed"):
        next(one.read(unit, None))


def test_rows_know_their_tar_and_their_number_in_it(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", [("1.txt", b"a"), ("2.txt", b"b"), ("3.txt", b"c")])
    source = open_source(Store(tmp_path))
    (unit,) = source.units()
    files, rows = source.origins(unit, 1, 2)
    assert (files.to_pylist(), rows.to_pylist()) == ([str(path)] * 2, [1, 2])


def test_linked_tars_are_shared_among_workers(tmp_path: Path) -> None:
    """Half a gigabyte of tars: one shard would leave all workers but one idle."""
    for number in range(4):
        with open(tmp_path / f"{number}.tar", "wb") as file:
            file.truncate(128 << 20)
    assert len(open_source(Store(tmp_path), link=True).shards()) == 4


def test_patterns_mean_what_they_mean_elsewhere(tmp_path: Path) -> None:
    names = ["a.tar", "b/c.tar", "b/d/e.tar", ".hidden.tar", "b/t.lance/data/x.tar"]
    for name in names:
        make(tmp_path / name, [(f"{name[0]}{len(name)}.txt", name.encode())])

    def found(pattern: str) -> list[str]:
        return convert(tmp_path / pattern)["txt"].to_pylist()

    assert found("**/*.tar") == ["a.tar", "b/c.tar", "b/d/e.tar"]
    assert found("{b/*,a}.tar") == ["b/c.tar", "a.tar"]
    assert found("") == ["a.tar", "b/c.tar", "b/d/e.tar"]
    with pytest.raises(ArgumentError, match="cannot be read"):
        found("[z-a].tar")
