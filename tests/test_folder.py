"""Folders of files as tables."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest

from destrier.errors import ArgumentError, ColumnError, EmptyError, SchemaError, SourceError
from destrier.files import File, Store
from destrier.formats.folder import detect, open_source
from destrier.formats.folder import source as sources
from destrier.formats.media import content_type, media_kind
from destrier.writing.source import BATCH_BYTES, LINK

JPEG = b"\xff\xd8\xff"


def make(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def read(root: Path, **options: Any) -> pa.Table:
    source = open_source(Store(root), **options)
    worker = pickle.loads(pickle.dumps(source))
    batches = []
    for unit in source.units():
        got = list(worker.read(pickle.loads(pickle.dumps(unit)), source.schema))
        assert sum(batch.num_rows for batch in got) == unit.rows
        for batch in got:
            batch.validate(full=True)
            assert batch.schema.equals(source.schema, check_metadata=True)
            assert batch.nbytes <= BATCH_BYTES or batch.num_rows == 1
        batches += got
    table = pa.Table.from_batches(batches, source.schema)
    assert len(table) == source.total_rows
    return table


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make(
        tmp_path / "photos",
        {
            "cat/x10.jpg": JPEG + b"ten",
            "cat/x2.jpg": JPEG + b"two",
            "cat/x2.txt": "zwölf\n",
            "dog/y.jpg": b"",
            ".git/z.jpg": b"hidden",
            "dog/.thumb.jpg": b"hidden",
        },
    )


def test_class_folders(photos: Path) -> None:
    table = read(photos)
    assert table.to_pydict() == {
        "image": [JPEG + b"two", JPEG + b"ten", b""],
        "caption": ["zwölf\n", None, None],
        "label": ["cat", "cat", "dog"],
        "path": ["cat/x2.jpg", "cat/x10.jpg", "dog/y.jpg"],
    }
    assert table.schema.field("image").type == pa.large_binary()
    assert table.schema.field("image").metadata == {b"content_type": b"image/jpeg"}
    assert read(photos, columns=["path", "image"]).column_names == ["path", "image"]
    assert read(photos, columns=["label"]).to_pydict() == {"label": ["cat", "cat", "dog"]}
    assert read(photos / "cat").column_names == ["image", "caption", "path"]
    assert "label" not in read(photos, labels=None).column_names
    assert detect(Store(photos))


def test_links(photos: Path) -> None:
    (photos / "cat" / "a b%é.jpg").write_bytes(b"odd")
    copied, linked = read(photos), read(photos, link=True)
    assert linked.schema.field("image").type == LINK
    assert linked.schema.field("image").metadata == {b"content_type": b"image/jpeg"}
    assert linked.drop_columns("image").equals(copied.drop_columns("image"))
    for path, link in zip(linked["path"].to_pylist(), linked["image"].to_pylist(), strict=True):
        stat = (photos / path).stat()
        assert link == {
            "uri": (photos / path).as_uri(),
            "position": 0,
            "size": stat.st_size,
            "file_size": stat.st_size,
            "file_stamp": stat.st_mtime_ns,
        }
    os.chmod(photos / "cat" / "x2.jpg", 0)
    os.remove(photos / "cat" / "x10.jpg")
    source = open_source(Store(photos), link=True)
    os.remove(photos / "dog" / "y.jpg")  # files are not opened
    assert sum(b.num_rows for unit in source.units() for b in source.read(unit, None)) == 3


def test_a_remote_folder_is_read_as_a_local_one(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = read(photos)
    monkeypatch.setattr(Store, "local", property(lambda _: False))
    monkeypatch.setattr(
        Store, "_opened", property(lambda store: (pa.fs.LocalFileSystem(), store.uri))
    )
    assert detect(Store(photos))
    assert read(photos).equals(local)


def test_kinds_of_files(tmp_path: Path) -> None:
    make(tmp_path / "sounds", {"a.wav": b"1", "b.FLAC": b"2"})
    table = read(tmp_path / "sounds")
    assert table["audio"].to_pylist() == [b"1", b"2"]
    assert table.schema.field("audio").metadata is None  # not all of one content type
    mixed = make(tmp_path / "mixed", {"a.jpg": b"1", "b.png": b"2", "c.md": b"3", "d": b"4"})
    assert detect(Store(mixed))
    with pytest.raises(ArgumentError) as caught:
        open_source(Store(mixed))
    for text in ("several kinds", "1 jpg", "1 md", "1 without extension", "pattern=", "column="):
        assert text in str(caught.value)
    assert read(mixed, pattern=["*.jpg", "*.png"])["image"].to_pylist() == [b"1", b"2"]
    assert read(mixed, column="file")["file"].to_pylist() == [b"1", b"2", b"3", b"4"]
    unknown = make(tmp_path / "unknown", {"a.xyz": b"1"})
    assert read(unknown)["file"].to_pylist() == [b"1"]
    assert not detect(Store(unknown))
    alone = make(tmp_path / "alone", {"a.jpg": b"1", "b.txt": "of no picture"})
    with pytest.raises(ArgumentError, match="1 jpg, 1 txt"):
        open_source(Store(alone))


def test_folders_without_rows(tmp_path: Path) -> None:
    with pytest.raises(EmptyError, match="holds no files"):
        open_source(Store(tmp_path))
    make(tmp_path, {"a.jpg": b""})
    with pytest.raises(EmptyError, match=r"none of its 1 files.*pattern=\['\*\.png'\]"):
        open_source(Store(tmp_path), pattern="*.png")
    with pytest.raises(SourceError, match="a file, not a folder"):
        open_source(Store(tmp_path / "a.jpg"))
    with pytest.raises(SourceError, match="not there"):
        open_source(Store(tmp_path / "nothing"))
    assert not detect(Store(tmp_path / "a.jpg"))


def test_links_of_the_file_system(photos: Path) -> None:
    (photos / "cat" / "loop").symlink_to(photos)
    (photos / "more").symlink_to(photos / "dog")
    assert read(photos)["path"].to_pylist() == [
        "cat/x2.jpg",
        "cat/x10.jpg",
        "dog/y.jpg",
        "more/y.jpg",
    ]
    (photos / "gone.jpg").symlink_to(photos / "nothing")
    with pytest.raises(SourceError, match=r"gone\.jpg: No such file"):
        open_source(Store(photos))
    os.remove(photos / "gone.jpg")
    os.mkfifo(photos / "pipe.jpg")
    with pytest.raises(SourceError, match=r"pipe\.jpg is neither a file nor a folder"):
        open_source(Store(photos))
    os.remove(photos / "pipe.jpg")
    try:
        Path(os.fsdecode(os.fsencode(photos) + b"/\xff.jpg")).touch()
    except OSError:  # macOS has no such names
        return
    with pytest.raises(SourceError, match=r"is not UTF-8.*rename"):
        open_source(Store(photos))


def test_metadata_tables(photos: Path) -> None:
    make(
        photos,
        {
            "metadata.jsonl": '{"file_name": "dog/y.jpg", "score": 0.5, "tags": ["a", "b"]}\n\n',
            "cat/metadata.csv": 'file_name,code\nx2.jpg,"007, ""x"""\nx10.jpg,\n',
        },
    )
    table = read(photos)
    assert table.select(["score", "tags", "code"]).to_pydict() == {
        "score": [None, None, 0.5],
        "tags": [None, None, ["a", "b"]],
        "code": ['007, "x"', "", None],
    }
    assert len(read(photos, pattern="x2.jpg")) == 1
    with pytest.raises(ArgumentError, match=r"3 jpg, 1 csv, 1 jsonl|several kinds"):
        open_source(Store(photos), metadata=False)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        (
            "metadata.jsonl",
            '{"file_name": "cat/no.jpg"}',
            r"row 0 names 'cat/no\.jpg', which is not",
        ),
        ("metadata.jsonl", '{"name": "cat/x2.jpg"}', "row 0 has no file_name"),
        ("metadata.jsonl", '{"file_name": "dog/y.jpg"}\n{"file_name": "dog/y.jpg"}', "row 1 names"),
        ("metadata.jsonl", '{"file_name": "dog/y.jpg"}\n{', "row 1: not JSON"),
        ("metadata.jsonl", "[1]", "row 0: a line holds one object"),
        ("metadata.csv", "file_name,a\ndog/y.jpg\n", "row 0 has another number of cells"),
        ("metadata.csv", 'file_name,a\n"dog/y.jpg', "unexpected end"),
        ("metadata.csv", b"\xff\xff", "not UTF-8"),
    ],
)
def test_damaged_metadata(photos: Path, name: str, text: str | bytes, match: str) -> None:
    make(photos, {name: text})
    with pytest.raises(SourceError, match=rf"{name}.*{match}") as caught:
        open_source(Store(photos))
    assert caught.value.file is not None


def test_metadata_that_does_not_fit(photos: Path) -> None:
    row = '{"file_name": "%s", "v": %s}\n'
    make(photos, {"metadata.jsonl": row % ("cat/x2.jpg", "1") + row % ("dog/y.jpg", '"a"')})
    with pytest.raises(SchemaError, match=r"metadata\.jsonl, row 1, column 'v'"):
        open_source(Store(photos))
    make(photos, {"metadata.jsonl": '{"file_name": "cat/x2.jpg", "label": "tabby"}'})
    with pytest.raises(ArgumentError, match=r"a column 'label'.*labels=None"):
        open_source(Store(photos))
    assert read(photos, labels=None)["label"].to_pylist() == ["tabby", None, None]


def test_grouped_rows(tmp_path: Path) -> None:
    make(
        tmp_path,
        {f"{i}_{part}.png": f"{part}{i}" for i in (10, 9) for part in ("image", "mask")}
        | {"11_image.png": b"no mask"},
    )

    def pairs(files: list[File]) -> Any:
        by_path = {file.path: file for file in files}
        for path, file in by_path.items():
            if path.endswith("_image.png"):
                yield {
                    "image": file,
                    "mask": by_path.get(path.replace("_image", "_mask")),
                    "number": int(path.split("_")[0]),
                    "name": path,
                    "box": np.zeros((2, 2), np.float32),
                }

    table = read(tmp_path, group=pairs)
    assert table.drop_columns("box").to_pydict() == {
        "image": [b"image9", b"image10", b"no mask"],
        "mask": [b"mask9", b"mask10", None],
        "number": [9, 10, 11],
        "name": ["9_image.png", "10_image.png", "11_image.png"],
    }
    assert table["box"].type == pa.fixed_shape_tensor(pa.float32(), [2, 2])
    assert table.schema.field("mask").metadata == {b"content_type": b"image/png"}
    linked = read(tmp_path, group=pairs, link=True)
    assert linked["mask"].to_pylist()[2] is None
    assert linked["mask"].to_pylist()[0]["uri"] == (tmp_path / "9_mask.png").as_uri()
    assert read(tmp_path, group=lambda files: [{"n": len(files)}]).to_pydict() == {"n": [5]}


def test_groups_that_are_no_rows(photos: Path) -> None:
    store = Store(photos)
    for group, error, match in [
        (lambda files: files, ArgumentError, "row 0 that group= made is File, not a dict"),
        (lambda _: [], EmptyError, "group= made no rows of its 4 files"),
        (lambda _: [{"a": File("x", 1)}], ArgumentError, "a file that is not in the list"),
        (lambda files: [{"a": files[0]}, {"a": "x"}], ArgumentError, "row 1 .* not a file"),
        (lambda _: [{"a": 1}, {"a": "x"}], SchemaError, "row 1, column 'a'"),
        (lambda _: [{"a": object()}], SourceError, "row 0, column 'a'"),
    ]:
        with pytest.raises(error, match=match):
            open_source(store, group=group)
    with pytest.raises(ArgumentError, match="group= makes the rows"):
        open_source(store, group=lambda _: [], pattern="*.jpg")
    with pytest.raises(ArgumentError, match="labels is 'name'"):
        open_source(store, labels="name")
    with pytest.raises(ColumnError, match=r"no column 'picture'.*image, caption, label, path"):
        open_source(store, columns=["picture"])
    with pytest.raises(ColumnError, match="named twice"):
        open_source(store, columns=["path", "path"])


def test_units_and_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_UNIT_ROWS", 7)
    make(tmp_path, {f"{i}.png": bytes([i]) for i in range(50)})
    source = open_source(Store(tmp_path))
    assert [unit.rows for unit in source.units()] == [7] * 7 + [1]
    assert read(tmp_path)["image"].to_pylist() == [bytes([i]) for i in range(50)]
    assert source.digest() == open_source(Store(tmp_path)).digest()
    make(tmp_path, {"3.png": b"other"})
    assert source.digest() != open_source(Store(tmp_path)).digest()
    large = make(tmp_path / "large", {"a.mp4": bytes(BATCH_BYTES + 5), "b.mp4": b"1", "c.mp4": b""})
    source = open_source(Store(large))
    batches = [b for unit in source.units() for b in source.read(unit, None)]
    assert [batch.num_rows for batch in batches] == [1, 2]


def test_a_folder_that_changes(photos: Path) -> None:
    source = open_source(Store(photos))
    (unit,) = source.units()
    make(photos, {"cat/x2.txt": b"\xff\xff\xff\xff\xff\xff\xff"})
    with pytest.raises(SourceError, match=r"x2\.txt, the caption of row 0, is not UTF-8"):
        next(source.read(unit, None))
    make(photos, {"cat/x10.jpg": b"longer than before"})
    with pytest.raises(SourceError, match=r"x10\.jpg had 6 bytes when it was listed"):
        next(source.read(unit, None))
    os.remove(photos / "cat/x2.jpg")
    with pytest.raises(SourceError, match=r"x2\.jpg: No such file"):
        next(source.read(unit, None))


def test_content_types() -> None:
    assert content_type("jpg") == "image/jpeg"
    assert content_type("xyz") is media_kind("json") is None
    assert media_kind("flac") == "audio"


def test_rows_know_their_file(photos: Path) -> None:
    def origins(**options: Any) -> tuple[list[Any], list[Any]]:
        source = open_source(Store(photos), **options)
        worker = pickle.loads(pickle.dumps(source))
        (unit,) = source.units()
        files, rows = worker.origins(unit, 1, 2)
        return files.to_pylist(), rows.to_pylist()

    expected = [str(photos / name) for name in ("cat/x10.jpg", "dog/y.jpg")]
    assert origins() == origins(columns=["label"]) == (expected, [0, 0])

    def pairs(files: list[File]) -> list[dict[str, Any]]:
        return [{"n": 0}, {"n": 1}, {"n": 2, "a": None, "b": files[0]}, {"a": files[1]}]

    assert origins(group=pairs) == ([None, str(photos / "cat/x2.jpg")], [None, 0])


def test_tables_and_indexes_in_a_folder_are_no_data_of_it(photos: Path) -> None:
    before = read(photos)
    none = {
        "t.lance/data/a.lance": b"",
        "t.lance.writing/job.json": b"",
        "t.lance.writing.lock": b"",
        "cat/copy/_versions/1.manifest": b"",
        "cat/copy/data/x.jpg": b"",
        "u.exporting/files/x.jpg": b"",
        "index.json.zstd": b"",
    }
    make(photos, none)
    assert detect(Store(photos))
    assert read(photos).equals(before)
    make(photos, {"_versions/own.jpg": b"a folder of yours, if nothing is beside it"})
    assert len(read(photos)) == len(before) + 1


def test_metadata_of_two_equal_names_is_refused(photos: Path) -> None:
    make(photos, {"metadata.csv": "file_name,x,x\ncat/x2.jpg,1,2\n"})
    with pytest.raises(SourceError, match=r"metadata\.csv has two columns named 'x'"):
        read(photos)
    (photos / "metadata.csv").unlink()
    make(photos, {"metadata.jsonl": '{"file_name": "cat/x2.jpg", "x": 1, "x": 2}\n'})
    with pytest.raises(SourceError, match=r"metadata\.jsonl, row 0: the key 'x' is there twice"):
        read(photos)


def test_metadata_of_two_types_names_its_row_and_a_way_out(photos: Path) -> None:
    rows = ['{"file_name": "dog/y.jpg", "x": 1.5}', '{"file_name": "cat/x2.jpg", "x": 1}']
    make(photos, {"metadata.jsonl": "\n".join(rows)})
    match = r"metadata\.jsonl, row 0, column 'x': .*metadata=False"
    with pytest.raises(SchemaError, match=match) as caught:
        read(photos)
    assert "schema=" not in str(caught.value)
    assert "x" not in read(photos, metadata=False, pattern="*.jpg").schema.names


def test_a_name_with_a_control_character_is_not_linked(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", {"a\nb.jpg": JPEG})
    assert read(folder)["image"].to_pylist() == [JPEG]
    with pytest.raises(SourceError, match=r"control character: .*destrier\.convert"):
        read(folder, link=True)
