"""New columns: computed in parallel, resumed after a kill, visible in one commit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.blob import BlobType

from destrier import StreamingDataset
from destrier.editing.adding import add_columns
from destrier.editing.changes import append, delete, update
from destrier.errors import (
    ArgumentError,
    ColumnError,
    FilterError,
    LengthError,
    SchemaError,
    TransformError,
    WorkerError,
    WriteError,
)


def ids_and(uri: Any, column: str) -> tuple[list[int], list[Any]]:
    table = lance.dataset(str(uri)).to_table(columns=["id", column], blob_handling="all_binary")
    return table["id"].to_pylist(), table[column].to_pylist()


def data_files(uri: Any) -> set[str]:
    return {path.name for path in (Path(uri) / "data").iterdir()}


def referenced(uri: Any) -> set[str]:
    """Return the data files of all versions."""
    latest = lance.dataset(str(uri))
    versions = [lance.dataset(str(uri), version=v["version"]) for v in latest.versions()]
    return {
        f.path for v in versions for fragment in v.get_fragments() for f in fragment.metadata.files
    }


def check_clean(uri: Any) -> None:
    """Nothing is left beside the table, nor in it."""
    path = Path(uri)
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(path.name + ".")] == []
    assert data_files(uri) == referenced(uri)


def double(batch: pa.RecordBatch) -> dict[str, Any]:
    return {"double": batch["id"].to_numpy() * 2}


def test_sql(plain: lance.LanceDataset) -> None:
    assert add_columns(plain, {"twice": "id * 2", "text": "CAST(label AS STRING)"}) == 2
    ids, twice = ids_and(plain.uri, "twice")
    assert twice == [2 * i for i in ids]
    with pytest.raises(ColumnError, match=r"'twice' is in .* already"):
        add_columns(plain.uri, {"twice": "id"})
    with pytest.raises(FilterError, match="nope"):
        add_columns(plain.uri, {"new": "nope + 1"})
    with pytest.raises(ArgumentError, match="no expression"):
        add_columns(plain.uri, {})
    with pytest.raises(ArgumentError, match="got int"):
        add_columns(plain.uri, 3)  # type: ignore[arg-type]
    assert lance.dataset(plain.uri).version == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_over_fragments_with_deleted_rows(own_table: Any, workers: int) -> None:
    factor = 3

    def work(batch: pa.RecordBatch) -> dict[str, Any]:
        assert batch.schema.names == ["id", "tokens"]
        assert batch.num_rows <= 64
        ids = batch["id"].to_numpy()
        vectors = np.stack([ids, ids * factor], axis=1).astype(np.float32)
        return {
            "vector2": vectors,
            "text": [f"n{i}" for i in ids.tolist()],
            "first": pa.compute.list_slice(batch["tokens"], 0, 1),
        }

    before = lance.dataset(str(own_table.path))
    old = data_files(own_table.path)
    version = add_columns(
        own_table.path, work, columns=["id", "tokens"], num_workers=workers, batch_size=64
    )
    after = lance.dataset(str(own_table.path))
    assert after.version == version == before.version + 1
    assert after.to_table(columns=before.schema.names) == before.to_table()
    ids, vectors = ids_and(own_table.path, "vector2")
    assert ids == own_table.ids.tolist()
    assert vectors == [[i, i * factor] for i in ids]
    assert ids_and(own_table.path, "text")[1] == [f"n{i}" for i in ids]
    tokens = after.to_table(columns=["tokens", "first"]).to_pylist()
    assert all(row["first"] == row["tokens"][:1] for row in tokens)
    assert after.schema.field("vector2").type == pa.fixed_shape_tensor(pa.float32(), [2])
    assert old < data_files(own_table.path)  # nothing was rewritten
    check_clean(own_table.path)


def test_blobs_in_and_out(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("image")])
    values = [None if i % 5 == 0 else bytes([i]) * (i * 2000) for i in range(100)]
    table = pa.table([pa.array(range(100)), lance.blob_array(values)], schema=schema)
    lance.write_dataset(table, str(tmp_path / "t.lance"), max_rows_per_file=30)
    delete(tmp_path / "t.lance", "id % 3 = 1")

    def work(batch: pa.RecordBatch) -> dict[str, Any]:
        images = batch["image"].to_pylist()
        return {"copy": images, "size": [None if i is None else len(i) for i in images]}

    new = pa.schema(
        [lance.blob_field("copy"), pa.field("size", pa.int32(), metadata={"unit": "bytes"})]
    )
    add_columns(tmp_path / "t.lance", work, schema=new, num_workers=0)
    ids, copies = ids_and(tmp_path / "t.lance", "copy")
    assert copies == [values[i] for i in ids]
    assert ids_and(tmp_path / "t.lance", "size")[1] == [v and len(v) for v in copies]
    after = lance.dataset(str(tmp_path / "t.lance")).schema
    assert isinstance(after.field("copy").type, BlobType)
    assert after.field("size").metadata == {b"unit": b"bytes"}


def test_what_a_function_may_return(plain: lance.LanceDataset) -> None:
    import torch

    def work(batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = batch["id"]
        return pa.record_batch({"a": ids, "b": pa.compute.cast(ids, pa.string())})

    def tensors(batch: pa.RecordBatch) -> dict[str, Any]:
        ids = torch.from_numpy(batch["id"].to_numpy().copy())
        return {
            "t": ids.reshape(-1, 1, 1) * torch.ones(2, 3),
            "l": [[i] * (i % 3) for i in ids.tolist()],
        }

    add_columns(plain.uri, work, num_workers=0)
    add_columns(plain.uri, tensors, num_workers=0)
    schema = lance.dataset(plain.uri).schema
    assert schema.field("b").type == pa.string()
    assert schema.field("t").type == pa.fixed_shape_tensor(pa.float32(), [2, 3])
    ids, lists = ids_and(plain.uri, "l")
    assert lists == [[i] * (i % 3) for i in ids]


def late(value: Any) -> Any:
    """Return a function that gives the value for the rows from 800 on."""

    def work(batch: pa.RecordBatch) -> Any:
        ids = batch["id"].to_pylist()
        return {"new": ids} if ids[0] < 800 else value(ids)

    return work


def fail(_: Any) -> Any:
    raise ZeroDivisionError("mine")


def die(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


BAD = {
    "raises": (fail, TransformError, "rows 800 to 899 of .*ZeroDivisionError: mine"),
    "too few": (lambda ids: {"new": ids[1:]}, LengthError, "99 values of column 'new' for the 100"),
    "other type": (lambda ids: {"new": [str(i) for i in ids]}, SchemaError, "'new'.*str"),
    "other array": (lambda ids: {"new": np.array(ids, np.int32)}, SchemaError, "'new'.*int32"),
    "one type off": (lambda ids: {"new": [*ids[1:], 1.5]}, SchemaError, "at 99 .*1.5"),
    "other columns": (lambda ids: {"other": ids}, SchemaError, "other.*those to add are new"),
    "no columns": (lambda ids: ids, TransformError, "returned list for rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_functions_change_nothing(plain: lance.LanceDataset, case: str) -> None:
    value, error, message = BAD[case]
    before = data_files(plain.uri)
    with pytest.raises(error, match=message):
        add_columns(plain.uri, late(value), batch_size=100, num_workers=0)
    assert lance.dataset(plain.uri).version == 1
    assert data_files(plain.uri) == before
    # what was finished is kept, and dropped on request
    assert add_columns(plain.uri, late(lambda ids: {"new": ids}), restart=True, num_workers=0) == 2
    check_clean(plain.uri)


def test_bad_arguments(plain: lance.LanceDataset) -> None:
    with pytest.raises(ColumnError, match="no column 'nope'"):
        add_columns(plain.uri, double, columns=["nope"])
    with pytest.raises(ColumnError, match="empty"):
        add_columns(plain.uri, double, columns=[])
    with pytest.raises(ColumnError, match=r"'id' is in .* already"):
        add_columns(plain.uri, lambda batch: {"id": batch["id"]}, num_workers=0)
    with pytest.raises(ColumnError, match=r"'label' is in .* already"):
        add_columns(plain.uri, double, schema=pa.schema([("label", pa.int64())]), num_workers=0)
    field = pa.field("double", pa.int64(), nullable=False)
    with pytest.raises(ColumnError, match="nullable"):
        add_columns(plain.uri, double, schema=pa.schema([field]), num_workers=0)
    with pytest.raises(SchemaError, match="only nulls"):
        add_columns(plain.uri, lambda b: {"x": [None] * b.num_rows}, restart=True, num_workers=0)
    assert lance.dataset(plain.uri).version == 1


def test_older_formats(tmp_path: Path) -> None:
    blobs = pa.schema([lance.blob_field("new")])
    for version in ("2.0", "legacy"):
        uri = str(tmp_path / f"{version}.lance")
        lance.write_dataset(pa.table({"id": range(9)}), uri, data_storage_version=version)
    with pytest.raises(ColumnError, match="cannot hold the blobs"):
        add_columns(tmp_path / "2.0.lance", double, schema=blobs)
    add_columns(tmp_path / "2.0.lance", double, num_workers=0)
    assert ids_and(tmp_path / "2.0.lance", "double") == ([*range(9)], [*range(0, 18, 2)])
    with pytest.raises(WriteError, match="merge"):
        add_columns(tmp_path / "legacy.lance", double)


def test_a_table_without_rows(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"id": pa.array([], pa.int64())}), str(tmp_path / "t.lance"))
    with pytest.raises(ArgumentError, match="pass schema="):
        add_columns(tmp_path / "t.lance", double, num_workers=0)
    schema = pa.schema([("double", pa.int64())])
    add_columns(tmp_path / "t.lance", double, schema=schema, num_workers=0, restart=True)
    assert lance.dataset(str(tmp_path / "t.lance")).schema.names == ["id", "double"]


SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    from destrier.editing.adding import add_columns

    uri, log, mode = sys.argv[1:4]

    def work(batch):
        first = batch["id"][0].as_py()
        with open(log, "a") as file:
            file.write(f"{first}\\n")
        if first == 700 and os.environ.get("KILL"):
            os.kill(os.getppid() if mode == "parent" else os.getpid(), signal.SIGKILL)
            time.sleep(20)
        return {"double": batch["id"].to_numpy() * 2}

    add_columns(uri, work, batch_size=50, num_workers=0 if mode == "alone" else 1)
"""


@pytest.mark.parametrize("mode", ["alone", "parent", "worker"])
def test_a_killed_run_goes_on_where_it_stopped(
    plain: lance.LanceDataset, tmp_path: Path, mode: str
) -> None:
    script, log = tmp_path / "job.py", tmp_path / "log"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), plain.uri, str(log), mode]
    before = data_files(plain.uri)
    killed = subprocess.run(
        command, env={**os.environ, "KILL": "1"}, capture_output=True, timeout=60, check=False
    )
    if mode == "worker":
        assert b"WorkerError" in killed.stderr
        assert b"by signal 9" in killed.stderr
    else:
        assert killed.returncode == -signal.SIGKILL
    assert lance.dataset(plain.uri).version == 1
    assert data_files(plain.uri) == before
    assert log.read_text().split().count("0") == 2  # once for the types
    append(plain.uri, [{"id": i, "label": 0, "value": 0.0} for i in (5000, 5001)])
    log.write_text("")
    subprocess.run(command, timeout=60, check=True)
    starts = sorted(map(int, log.read_text().split()))
    assert starts == [*range(400, 1003, 50), 5000]  # not the first fragment, but the new rows
    ids, doubled = ids_and(plain.uri, "double")
    assert doubled == [2 * i for i in ids]
    assert len(ids) == 1005
    check_clean(plain.uri)


def test_a_journal_of_another_job_is_refused(plain: lance.LanceDataset) -> None:
    with pytest.raises(WorkerError, match="run the same again"):
        add_columns(plain.uri, late(die), columns=["id"], num_workers=1, batch_size=100)
    for other in (
        {"what": double, "columns": ["id"]},
        {"what": late(die), "columns": ["id", "label"]},
        {"what": late(die), "columns": ["id"], "schema": pa.schema([("new", pa.int64())])},
    ):
        with pytest.raises(WriteError, match="restart=True"):
            add_columns(plain.uri, num_workers=0, **other)
    assert add_columns(plain.uri, double, columns=["id"], num_workers=0, restart=True) == 2
    check_clean(plain.uri)


@pytest.mark.parametrize("kind", ["arrow", "numpy"])
def test_a_buffer_that_is_filled_anew_for_each_batch(plain: lance.LanceDataset, kind: str) -> None:
    buffer = np.zeros(50, np.int64)

    def work(batch: pa.RecordBatch) -> dict[str, Any]:
        part = buffer[: batch.num_rows]
        part[:] = batch["id"].to_numpy() * 2
        return {"double": pa.array(part) if kind == "arrow" else part}

    add_columns(plain.uri, work, columns=["id"], num_workers=0, batch_size=50)
    ids, doubled = ids_and(plain.uri, "double")
    assert doubled == [2 * i for i in ids]


def test_a_function_that_fails_leaves_nothing(plain: lance.LanceDataset) -> None:
    for _ in range(2):
        with pytest.raises(TransformError):
            add_columns(plain.uri, late(fail), columns=["id"], num_workers=0, batch_size=100)
        check_clean(plain.uri)
    add_columns(plain.uri, double, columns=["id"], num_workers=0)
    with pytest.raises(ColumnError):
        add_columns(plain.uri, double, columns=["id"], num_workers=0)
    check_clean(plain.uri)


def test_edits_by_others_meanwhile(plain: lance.LanceDataset) -> None:
    """Appended rows are computed too; deletes, updates and new columns cost little or nothing."""
    calls: list[int] = []

    def work(batch: pa.RecordBatch) -> dict[str, Any]:
        ids = batch["id"].to_pylist()
        calls.append(ids[0])
        if len(calls) == 4:  # the last of the first round, which begins with the types
            append(plain.uri, [{"id": 9000, "label": 1, "value": 0.0}])
            delete(plain.uri, "id = 3")
            update(plain.uri, "id = 850", {"label": 77})
            add_columns(plain.uri, {"other": "label + 1"})
        return {"double": [i * 2 for i in ids]}

    add_columns(plain.uri, work, columns=["id"], num_workers=0)
    ids, doubled = ids_and(plain.uri, "double")
    assert len(ids) == 1003
    assert 3 not in ids
    assert doubled == [2 * i for i in ids]
    assert ids_and(plain.uri, "other")[1][-1] == 78
    assert calls == [0, 0, 400, 800, 9000, 850]
    check_clean(plain.uri)


def test_a_run_killed_after_the_commit_is_found_done(
    plain: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from destrier.writing.journal import Journal

    clear = Journal.clear
    calls = []

    def dies(journal: Journal) -> None:
        calls.append(journal)
        if len(calls) == 2:  # the first one is at the start
            raise KeyboardInterrupt
        clear(journal)

    monkeypatch.setattr(Journal, "clear", dies)
    with pytest.raises(KeyboardInterrupt):
        add_columns(plain.uri, double, columns=["id"], num_workers=0)
    assert add_columns(plain.uri, double, columns=["id"], num_workers=0) == 2
    check_clean(plain.uri)


def test_a_commit_that_fails_leaves_no_files(
    plain: lance.LanceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_files(plain.uri)
    commit = lance.LanceDataset.commit

    def full(*args: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(lance.LanceDataset, "commit", full)
    with pytest.raises(WriteError, match="No space left"):
        add_columns(plain.uri, double, columns=["id"], num_workers=0)
    assert data_files(plain.uri) == before
    monkeypatch.setattr(lance.LanceDataset, "commit", commit)
    assert add_columns(plain.uri, double, columns=["id"], num_workers=0) == 2
    check_clean(plain.uri)


def test_a_dead_worker_is_an_error(plain: lance.LanceDataset) -> None:
    with pytest.raises(WorkerError, match="signal 9"):
        add_columns(
            plain.uri, lambda _: os.kill(os.getpid(), signal.SIGKILL), columns=["id"], num_workers=1
        )


def test_a_stream_resumes_on_the_version_with_the_column(own_table: Any) -> None:
    def stream(version: int, columns: list[str]) -> StreamingDataset:
        return StreamingDataset(
            str(own_table.path), batch_size=32, shuffle_seed=7, version=version, columns=columns
        )

    old = lance.dataset(str(own_table.path)).version
    whole = [batch["id"].tolist() for batch in stream(old, ["id"])]
    first = stream(old, ["id"])
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    del iterator
    new = add_columns(own_table.path, double, columns=["id"], num_workers=0)
    again = stream(new, ["id", "double"])
    again.load_state_dict(state)
    rest = list(again)
    assert [batch["id"].tolist() for batch in rest] == whole[5:]
    assert all((batch["double"] == batch["id"] * 2).all() for batch in rest)
