"""Bad arguments, bad rows, and tables that break while they are read."""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

import battery
import tables
from battery import FACES, opened
from destrier import (
    ArgumentError,
    ColumnError,
    DecodeError,
    EmptyError,
    FilterError,
    ReadError,
    StreamingDataLoader,
    StreamingDataset,
    TableError,
    TransformError,
    VersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BATCH = 40
SIZES = {"num_splits": 8, "shuffle_clump_size": 2, "shuffle_window": 2}


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(shared_table: Any, tmp_path: Path) -> battery.Kind:
    return battery.make_kind("clumps", str(shared_table.path), shared_table.ids, tmp_path)


# ---- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "8"])
@pytest.mark.parametrize(
    "name",
    ["num_splits", "shuffle_clump_size", "shuffle_window", "batch_size", "global_batch_size"],
)
def test_sizes_are_whole_numbers_from_one(table_path: str, name: str, bad: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} must be .*(at least|from) 1.*, got {bad!r}"):
        StreamingDataset(table_path, **{name: bad})
    if "batch" in name:
        with pytest.raises(
            ArgumentError, match=rf"{name} must be .*(at least|from) 1.*, got {bad!r}"
        ):
            StreamingDataLoader(table_path, **{name: bad})


def test_one_batch_size_is_needed_and_enough(table_path: str) -> None:
    with pytest.raises(ArgumentError, match="global_batch_size or global_batch_tokens must be"):
        StreamingDataLoader(table_path)
    for make in (StreamingDataLoader, StreamingDataset):
        with pytest.raises(ArgumentError, match=r"batch_size=4 .* global_batch_size=8"):
            make(table_path, batch_size=4, global_batch_size=8)


def test_a_world_size_that_does_not_divide(kind: battery.Kind, face: str) -> None:
    message = r"global_batch_size 40 .* world_size 3; .*: 1, 2, 4, 5, 8, 10, 20, 40;.*uneven"
    with (
        pytest.raises(ArgumentError, match=message),
        opened(face, kind, batch=BATCH, rank=0, world_size=3) as stream,
    ):
        next(iter(stream))


def test_ranks_out_of_range(table_path: str) -> None:
    for rank, size in ((4, 4), (-1, 4), (0, 0)):
        with pytest.raises(ArgumentError, match=f"{rank if size else size}"):
            StreamingDataset(table_path, rank=rank, world_size=size)
    with pytest.raises(ArgumentError, match="rank is not given"):
        StreamingDataset(table_path, world_size=4)


def test_columns_that_are_not_there(kind: battery.Kind, face: str) -> None:
    for columns, message in (
        (["id", "nonsense"], r"'nonsense' .*columns are: id, label"),
        ([], "empty"),
        (["id", "id"], "twice"),
        (["vector.item"], "vector.item"),
    ):
        with opened(face, kind, batch=BATCH, columns=columns) as stream:
            with pytest.raises(ColumnError, match=message):
                next(iter(stream))
            with pytest.raises(ColumnError, match=message):
                next(iter(stream))


def test_versions_that_are_gone(table_path: str) -> None:
    for version in (77, "no-such-tag"):
        with pytest.raises(VersionError, match=str(version)):
            StreamingDataset(table_path, version=version)
    with pytest.raises(TableError, match="nowhere"):
        StreamingDataset(table_path + "-nowhere")
    with pytest.raises(ArgumentError, match="version"):
        StreamingDataset(table_path, version=1.5)


def test_a_version_and_a_tag_are_read(own_table: Any) -> None:
    path = str(own_table.path)
    lance.dataset(path).tags.create("run", lance.dataset(path).version)
    before = lance.dataset(path).version
    lance.write_dataset(tables.columns(60, 5000), path, mode="append")
    for version, rows in ((before, 1003), ("run", 1003), (None, 1063)):
        assert len(StreamingDataset(path, version=version, num_splits=1)) == rows


def test_empty_tables_and_selections(tmp_path: Path, table_path: str, face: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64())])
    lance.write_dataset(schema.empty_table(), str(tmp_path / "empty.lance"), schema=schema)
    empty = battery.Kind(str(tmp_path / "empty.lance"), np.arange(0), {}, np.arange(0))
    with opened(face, empty, batch=4, columns=["id"]) as stream:
        with pytest.raises(EmptyError, match=r"empty\.lance.* has no rows"):
            next(iter(stream))
        with pytest.raises(EmptyError, match="has no rows"):
            len(stream)
    none = battery.Kind(table_path, np.arange(0), {"filter": "id > 100000"}, np.arange(0))
    with (
        opened(face, none, batch=4) as stream,
        pytest.raises(EmptyError, match=r"id > 100000.* none of the 1003 rows"),
    ):
        next(iter(stream))
    with (
        opened(
            face, battery.Kind(table_path, np.arange(0), {}, np.arange(0)), batch=2000
        ) as stream,
        pytest.raises(EmptyError, match=r"1003 rows .* 2000 .*remainder='keep'"),
    ):
        next(iter(stream))


def test_a_filter_with_an_error(table_path: str, face: str) -> None:
    for text in ("labl < 3", "label <", "label = 'x' +"):
        wrong = battery.Kind(table_path, np.arange(0), {"filter": text}, np.arange(0))
        with opened(face, wrong, batch=4) as stream, pytest.raises(FilterError) as caught:
            next(iter(stream))
        assert text in str(caught.value)
        assert "id, label, value" in str(caught.value)


def test_splits_beyond_the_rows(table_path: str, face: str) -> None:
    many = battery.Kind(table_path, np.arange(0), {"num_splits": 1004}, np.arange(0))
    with (
        opened(face, many, batch=4) as stream,
        pytest.raises(ArgumentError, match="num_splits is 1004, but there are only 1003 rows"),
    ):
        next(iter(stream))


def test_choices_by_name(table_path: str) -> None:
    for name, values in (
        ("remainder", "drop, keep, pad"),
        ("format", "torch, numpy, arrow, rows"),
        ("on_error", "'raise', 'skip', 'fill'"),
    ):
        with pytest.raises(ArgumentError, match=f"{values}.*'nonsense'"):
            StreamingDataLoader(table_path, batch_size=4, **{name: "nonsense"})
    with pytest.raises(ArgumentError, match="prefetch_bytes"):
        StreamingDataLoader(table_path, batch_size=4, prefetch_bytes=0)


def test_combinations_that_contradict(table_path: str) -> None:
    dataset = StreamingDataset(table_path, transform=battery.refuses)
    with pytest.raises(ArgumentError, match="both have a transform"):
        StreamingDataLoader(dataset, batch_size=4, transform=battery.doubled)
    with pytest.raises(ArgumentError, match="'torch'"):
        StreamingDataLoader(dataset, batch_size=4, format="torch")
    with pytest.raises(ArgumentError, match="decode"):
        StreamingDataLoader(table_path, batch_size=4, format="rows", decode={"blob": "rgb"})
    with pytest.raises(ArgumentError, match=r"decode=\{'image': 'rgb'\}"):
        StreamingDataLoader(table_path, batch_size=4, decode="rgb")  # type: ignore[arg-type]
    given = pa.table({"row_offset": [1, 2]})
    with pytest.raises(ArgumentError, match="filter and permutation"):
        StreamingDataset(table_path, filter="id > 1", permutation=given)


def test_decode_names_binary_columns(table_path: str) -> None:
    for decode, error, message in (
        ({"nonsense": "rgb"}, ColumnError, "nonsense"),
        ({"name": "rgb"}, ColumnError, "not binary"),
        ({"blob": "cmyk"}, ArgumentError, "cmyk.*rgb, rgba, gray"),
    ):
        with (
            StreamingDataLoader(table_path, batch_size=4, decode=decode) as loader,
            pytest.raises(error, match=message),
        ):
            next(iter(loader))


def test_added_columns_may_not_hide_the_tables(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"row_offset": [1, 2, 3], "mask": [1, 2, 3]}), uri)
    with (
        StreamingDataLoader(uri, batch_size=1, with_index=True) as loader,
        pytest.raises(ColumnError, match="row_offset"),
    ):
        next(iter(loader))
    with (
        StreamingDataLoader(uri, batch_size=1, remainder="pad") as loader,
        pytest.raises(ColumnError, match="mask"),
    ):
        next(iter(loader))


def test_offsets_of_a_permutation_are_checked(table_path: str) -> None:
    for offsets, message in (
        ([0, 1003], "1003"),
        ([5, -1], "-1"),
        ([1, None], "null"),
    ):
        with pytest.raises(ArgumentError, match=message):
            StreamingDataset(
                table_path, permutation=pa.table({"row_offset": pa.array(offsets, pa.int64())})
            )


# ---- bad rows ---------------------------------------------------------------------------------

ROWS = 403


def png(i: int) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(np.full((3, 4), i % 251, np.uint8)).save(data, "PNG")
    return data.getvalue()


def bad_ids(stage: str) -> set[int]:
    """Rows at fault: some lie together, so that whole clumps are bad, others are alone."""
    some = {*range(40, 52), 7, 8, 100, 301, 402}
    return {*range(300, ROWS)} if stage == "read" else some


@pytest.fixture(params=["read", "decode", "null", "transform"])
def stage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def broken(stage: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A table some of whose rows cannot be delivered, and the loader's options that find it out."""
    uri = str(tmp_path / "broken.lance")
    ids = np.arange(ROWS)
    bad = bad_ids(stage)
    if stage == "read":
        external = tmp_path / "external.bin"
        external.write_bytes(bytes(10 * ROWS))
        blobs = [lance.blob.Blob.from_uri(external.as_uri(), 10 * i, 10) for i in range(ROWS)]
        schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("data")])
        table = pa.table({"id": ids, "data": lance.blob_array(blobs)}, schema=schema)
        lance.write_dataset(
            table, uri, data_storage_version="2.2", allow_external_blob_outside_bases=True
        )
        os.truncate(external, 3000)
        return uri, {}
    if stage == "decode":
        images = [b"not an image" if i in bad else png(i) for i in range(ROWS)]
        table = pa.table({"id": ids, "data": pa.array(images, pa.binary())})
        options: dict[str, Any] = {"decode": {"data": "gray"}}
    elif stage == "null":
        data = pa.array(ids, pa.int32(), mask=np.isin(ids, list(bad)))
        table = pa.table({"id": ids, "data": data})
        options = {}
    else:
        table = pa.table({"id": ids, "data": np.isin(ids, list(bad))})
        options = {"transform": refuse_marked}
    lance.write_dataset(table, uri, max_rows_per_file=150)
    return uri, options


def refuse_marked(batch: dict[str, Any]) -> dict[str, Any]:
    if batch["data"].any():
        raise ArithmeticError("a marked row")
    return batch


ERRORS = {
    "read": ReadError,
    "decode": DecodeError,
    "null": DecodeError,
    "transform": TransformError,
}


def load(
    uri: str, rank: int, size: int, sizes: dict[str, int] = SIZES, **options: Any
) -> StreamingDataLoader:
    dataset = StreamingDataset(uri, rank=rank, world_size=size, **sizes)
    return StreamingDataLoader(dataset, global_batch_size=BATCH, with_index=True, **options)


def plan_of(uri: str, rank: int, size: int, sizes: dict[str, int] = SIZES) -> list[battery.Batch]:
    kind = battery.Kind(uri, np.arange(ROWS), {}, np.arange(ROWS))
    with load(uri, rank, size, sizes) as loader:
        state = loader.state_dict()
    return battery.expected(kind, state, epoch=0, batch=BATCH, rank=rank, size=size)


@pytest.mark.parametrize("policy", ["skip", "callable"])
@pytest.mark.parametrize("sizes", [SIZES, {"shuffle_clump_size": 1, "num_splits": 8}])
def test_skipped_rows_shift_nothing(
    broken: Any, stage: str, policy: str, sizes: dict[str, int]
) -> None:
    uri, options = broken
    bad = bad_ids(stage)
    seen: list[Any] = []

    def judge(error: Exception) -> bool:
        seen.append(error)
        return True

    on_error: Any = judge if policy == "callable" else policy
    for rank in range(2):
        plan = plan_of(uri, rank, 2, sizes)
        with load(uri, rank, 2, sizes, on_error=on_error, **options) as loader:
            batches = list(loader)
            assert len(batches) == len(plan) == len(loader)
            for batch, whole in zip(batches, plan, strict=True):
                kept = [
                    pair
                    for pair in zip(whole.samples, whole.rows, strict=True)
                    if pair[1] not in bad
                ]
                got = zip(batch["sample_index"].tolist(), batch["row_offset"].tolist(), strict=True)
                assert list(got) == kept
                assert batch["id"].tolist() == batch["row_offset"].tolist()
                assert len(batch["data"]) == len(kept)
            gone = [offset for whole in plan for offset in whole.rows if offset in bad]
            assert loader.rows_skipped == len(gone)
            assert sorted(error.offset for error in loader.failures) == sorted(gone)
            column = {None} if stage == "transform" else {"data"}
            assert {error.column for error in loader.failures} == column
            assert all(isinstance(error, ERRORS[stage]) for error in loader.failures)
            assert all("broken.lance" in str(error) for error in loader.failures)
    if policy == "callable":
        assert {error.offset for error in seen} >= {error.offset for error in loader.failures}


def test_filled_rows_shift_nothing(broken: Any, stage: str) -> None:
    uri, options = broken
    bad = bad_ids(stage)
    for rank in range(2):
        plan = plan_of(uri, rank, 2)
        with load(uri, rank, 2, on_error="fill", **options) as loader:
            batches = list(loader)
        assert len(batches) == len(plan)
        for batch, whole in zip(batches, plan, strict=True):
            assert batch["sample_index"].tolist() == list(whole.samples)
            good = [i for i, offset in enumerate(whole.rows) if offset not in bad]
            wanted = [
                whole.rows[min(good, key=lambda j, i=i: (abs(i - j), j))]
                for i in range(len(whole.rows))
            ]
            assert batch["row_offset"].tolist() == wanted
            assert batch["id"].tolist() == wanted
            if stage == "decode":
                assert batch["data"].shape == (len(wanted), 1, 3, 4)
                assert batch["data"][:, 0, 0, 0].tolist() == [i % 251 for i in wanted]


def test_raise_names_table_row_and_column(broken: Any, stage: str) -> None:
    uri, options = broken
    for on_error in ("raise", lambda _: False):
        with load(uri, 0, 1, on_error=on_error, **options) as loader:
            with pytest.raises(ERRORS[stage]) as caught:
                list(loader)
            error = caught.value
            assert error.offset in bad_ids(stage)
            assert str(error.offset) in str(error)
            assert "broken.lance" in str(error)
            if stage != "transform":
                assert error.column == "data"
                assert "'data'" in str(error)
            else:
                assert "a marked row" in str(error)
            # trying again fails again, and does not leave the epoch
            with pytest.raises(ERRORS[stage]):
                list(loader)
            assert loader.state_dict()["epoch"] == 0


def test_a_batch_of_only_bad_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "nulls.lance")
    lance.write_dataset(pa.table({"id": pa.array([None] * 20 + [1] * 20, pa.int64())}), uri)
    dataset = StreamingDataset(uri, shuffle=False)
    with StreamingDataLoader(dataset, batch_size=10, on_error="skip", with_index=True) as loader:
        assert [len(batch["id"]) for batch in loader] == [0, 0, 10, 10]
    with StreamingDataLoader(dataset, batch_size=10, on_error="fill") as loader:
        # nothing to fill with: empty, so that no rank ends before the others
        assert [len(batch["id"]) for batch in loader] == [0, 0, 10, 10]


def test_nulls_by_the_stated_rule(table_path: str) -> None:
    for kind in ("rows", "arrow"):
        with StreamingDataLoader(table_path, batch_size=50, format=kind) as loader:
            for batch in loader:
                rows = batch if kind == "rows" else batch.to_pylist()
                assert all(
                    row["maybe"] == (None if row["id"] % 7 == 0 else row["id"]) for row in rows
                )


def test_nulls_of_other_types(tmp_path: Path) -> None:
    uri = str(tmp_path / "nulls.lance")
    table = pa.table(
        {
            "f": pa.array([1.5, None], pa.float32()),
            "s": pa.array([None, "a"]),
            "b": pa.array([b"x", None], pa.binary()),
            "l": pa.array([None, [1, 2]], pa.list_(pa.int32())),
            "v": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
        }
    )
    lance.write_dataset(table, uri)
    dataset = StreamingDataset(uri, shuffle=False)
    with StreamingDataLoader(dataset, batch_size=2) as loader:
        (batch,) = list(loader)
    assert batch["f"][0] == 1.5
    assert batch["f"].isnan().tolist() == [False, True]
    assert batch["s"] == [None, "a"]
    assert batch["b"] == [b"x", None]
    assert batch["l"][0] is None
    assert batch["l"][1].tolist() == [1, 2]
    assert batch["v"].isnan().tolist() == [[False, False], [True, True]]


# ---- transforms -------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "skip", "fill"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda batch: {"id": batch["id"][1:]},
        lambda batch: [0] * (len(batch["id"]) + 1),
        lambda batch: {"id": torch.cat([batch["id"], batch["id"]])},
    ],
)
def test_a_transform_of_the_wrong_length_is_never_a_rows_fault(
    kind: battery.Kind, transform: Callable[[Any], Any], on_error: Any
) -> None:
    dataset = StreamingDataset(kind.path, columns=["id"], **kind.options)
    with (
        StreamingDataLoader(
            dataset, batch_size=BATCH, transform=transform, on_error=on_error
        ) as loader,
        pytest.raises(TransformError, match="one output row per input row"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_transform_that_returns_nothing(kind: battery.Kind, on_error: Any) -> None:
    def forgets(batch: dict[str, Any]) -> None:
        batch["id"] += 1

    dataset = StreamingDataset(kind.path, columns=["id"], **kind.options)
    with (
        StreamingDataLoader(
            dataset, batch_size=BATCH, transform=forgets, on_error=on_error
        ) as loader,
        pytest.raises(TransformError, match=f"returned None for a batch of {BATCH} rows"),
    ):
        next(iter(loader))


def test_a_transform_that_fails_only_on_a_whole_batch(kind: battery.Kind) -> None:
    def picky(batch: dict[str, Any]) -> dict[str, Any]:
        if len(batch["id"]) > 1:
            raise ValueError("too many")
        return batch

    dataset = StreamingDataset(kind.path, columns=["id"], **kind.options)
    with (
        StreamingDataLoader(dataset, batch_size=BATCH, transform=picky, on_error="skip") as loader,
        pytest.raises(TransformError, match="too many"),
    ):
        next(iter(loader))


def test_seeds_belong_to_samples(kind: battery.Kind) -> None:
    def seeded(batch: dict[str, Any], seeds: Any) -> dict[str, Any]:
        return {**batch, "seed": torch.from_numpy(seeds)}

    def seeds_of(size: int, batch: int, epoch: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank in range(size):
            dataset = StreamingDataset(
                kind.path, columns=["id"], rank=rank, world_size=size, epoch=epoch, **kind.options
            )
            with StreamingDataLoader(
                dataset,
                global_batch_size=batch,
                transform=seeded,
                with_index=True,
                remainder="keep",
            ) as loader:
                for one in loader:
                    found.update(
                        zip(one["sample_index"].tolist(), one["seed"].tolist(), strict=True)
                    )
        return found

    one, other = seeds_of(1, 120, 0), seeds_of(3, 48, 0)
    assert one == other
    assert len(set(one.values())) == len(one) == 1003
    assert not set(one.values()) & set(seeds_of(1, 120, 1).values())
    assert all(0 <= seed < 1 << 63 for seed in one.values())


# ---- tables that break ------------------------------------------------------------------------


def many_fragments(path: Path) -> str:
    rows, width = 6000, 64
    values = pa.array(np.arange(rows * width, dtype=np.float32))
    table = pa.table(
        {"id": np.arange(rows), "wide": pa.FixedSizeListArray.from_arrays(values, width)}
    )
    lance.write_dataset(table, str(path), max_rows_per_file=100)
    return str(path)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_files_that_vanish_while_they_are_read(tmp_path: Path, on_error: Any) -> None:
    uri = many_fragments(tmp_path / "t.lance")
    dataset = StreamingDataset(uri, shuffle=False)
    with StreamingDataLoader(
        dataset, batch_size=50, prefetch_bytes=1 << 16, on_error=on_error
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        for file in (tmp_path / "t.lance" / "data").iterdir():
            file.unlink()
        with pytest.raises(ReadError, match=r"a file of .*t\.lance .*is gone.*pin="):
            list(iterator)


def test_a_file_that_was_cut_is_an_error(tmp_path: Path, face: str) -> None:
    uri = many_fragments(tmp_path / "t.lance")
    files = sorted((tmp_path / "t.lance" / "data").iterdir())
    for file in files[::2]:
        os.truncate(file, file.stat().st_size // 2)
    kind = battery.Kind(uri, np.arange(6000), {}, np.arange(6000))
    with (
        opened(face, kind, batch=50, columns=["id", "wide"]) as stream,
        pytest.raises(ReadError, match=r"t\.lance"),
    ):
        list(stream)


def test_nothing_runs_after_an_error(tmp_path: Path) -> None:
    uri = many_fragments(tmp_path / "t.lance")
    before = threading.active_count()
    loader = StreamingDataLoader(uri, batch_size=50, transform=lambda _: 1 / 0)
    with pytest.raises(TransformError, match="ZeroDivisionError"):
        list(loader)
    loader.close()
    for thread in threading.enumerate():
        if thread.name.startswith("destrier"):
            thread.join(20)
    assert threading.active_count() <= before
