"""The writer: one commit in the order of the input, atomic, resumable, the same for any workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from destrier import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    FilterError,
    SchemaError,
    SourceError,
    StreamingDataLoader,
    StreamingDataset,
    TableError,
    WorkerError,
    WriteError,
    convert,
    verify,
)
from destrier.writing.write import write_table
from sources import Numbers, rows


def read(uri: Path) -> pa.Table:
    return lance.dataset(str(uri)).to_table()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def files(uri: Path) -> set[str]:
    """The data files that are there."""
    return {p.name for p in (uri / "data").iterdir()}


def referenced(uri: Path) -> set[str]:
    """The data files that some version has."""
    dataset = lance.dataset(str(uri))
    found: set[str] = set()
    for version in dataset.versions():
        for fragment in dataset.checkout_version(version["version"]).get_fragments():
            found |= {file.path for file in fragment.data_files()}
    return found


def expected(count: int) -> pa.Table:
    return pa.Table.from_batches([rows(0, count)])


@pytest.mark.parametrize(
    ("workers", "declared"), [(0, True), (1, True), (2, False), (4, True), (0, False)]
)
def test_rows_come_in_the_order_of_the_input(tmp_path: Path, workers: int, declared: bool) -> None:
    written = write_table(Numbers(declared=declared), tmp_path / "t.lance", num_workers=workers)
    table = read(tmp_path / "t.lance")
    assert (written.rows, written.rows_read, written.version) == (600, 600, 1)
    assert table.select(["id", "name", "tokens"]).equals(expected(600))
    assert names(tmp_path) == ["t.lance"]
    assert files(tmp_path / "t.lance") == referenced(tmp_path / "t.lance")


def test_a_list_of_integers_gets_a_count_column(tmp_path: Path) -> None:
    write_table(Numbers(), tmp_path / "t.lance", num_workers=0)
    table = read(tmp_path / "t.lance")
    assert table.column_names == ["id", "name", "tokens", "tokens_count"]
    assert table["tokens_count"].to_pylist() == [i % 4 for i in range(600)]


def test_large_values_become_blobs_and_stream(tmp_path: Path) -> None:
    source = Numbers(units_=3, length=4, payload=300_000)
    write_table(source, tmp_path / "t.lance", num_workers=2)
    dataset = lance.dataset(str(tmp_path / "t.lance"))
    assert dataset.schema.field("data").type.extension_name.startswith("lance.blob")
    stream = StreamingDataset(str(tmp_path / "t.lance"), columns=["id", "data"])
    seen = {}
    for batch in StreamingDataLoader(stream, batch_size=4, format="arrow"):
        seen.update(zip(batch["id"].to_pylist(), batch["data"].to_pylist(), strict=True))
    assert seen == {i: i.to_bytes(4, "little") * 75_000 for i in range(12)}


def test_small_values_stay_binary(tmp_path: Path) -> None:
    write_table(Numbers(payload=100), tmp_path / "t.lance", num_workers=0)
    assert read(tmp_path / "t.lance").schema.field("data").type == pa.large_binary()


def test_filter_columns_provenance_and_compression(tmp_path: Path) -> None:
    written = write_table(
        Numbers(),
        tmp_path / "t.lance",
        num_workers=2,
        filter="id % 3 = 1 AND name IS NOT NULL",
        columns=["tokens", "id"],
        provenance=True,
        compression={"id": "zstd:5"},
    )
    table = read(tmp_path / "t.lance")
    kept = [i for i in range(600) if i % 3 == 1 and i % 5]
    assert table.column_names == ["tokens", "tokens_count", "id", "source_file", "source_row"]
    assert table["id"].to_pylist() == kept
    assert table["source_file"].to_pylist() == [f"unit {i // 50}" for i in kept]
    assert table["source_row"].to_pylist() == [i % 50 for i in kept]
    assert (written.rows, written.rows_read) == (len(kept), 600)
    metadata = lance.dataset(str(tmp_path / "t.lance")).schema.field("id").metadata
    assert metadata[b"lance-encoding:compression"] == b"zstd"
    assert metadata[b"lance-encoding:compression-level"] == b"5"


def test_append_and_overwrite(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=2), uri, num_workers=0)
    assert write_table(Numbers(units_=1), uri, num_workers=0, mode="append").version == 2
    assert read(uri)["id"].to_pylist() == [*range(100), *range(50)]
    assert write_table(Numbers(units_=1), uri, num_workers=0, mode="overwrite").version == 3
    assert read(uri)["id"].to_pylist() == list(range(50))
    assert lance.dataset(str(uri), version=1).count_rows() == 100


def test_append_keeps_the_blobs_of_the_table(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=1, length=2, payload=300_000), uri, num_workers=0)
    write_table(Numbers(units_=1, length=2, payload=40), uri, num_workers=0, mode="append")
    found = lance.dataset(str(uri)).read_blobs("data", indices=[0, 1, 2, 3], preserve_order=True)
    assert [len(value) for _, value in found] == [300_000, 300_000, 40, 40]


@pytest.mark.parametrize(
    ("payload", "match"), [(8, "lacks: data"), (0, "id.*is int32 in .* but int64")]
)
def test_append_checks_the_schema(tmp_path: Path, payload: int, match: str) -> None:
    uri = tmp_path / "t.lance"
    table = expected(3)
    if not payload:
        table = table.set_column(0, "id", table["id"].cast(pa.int32()))
    lance.write_dataset(table, str(uri))
    with pytest.raises(SchemaError, match=match):
        write_table(Numbers(payload=payload), uri, num_workers=0, mode="append")
    assert lance.dataset(str(uri)).version == 1
    assert names(tmp_path) == ["t.lance"]
    assert len(files(uri)) == 1


def test_a_table_that_is_there_is_not_touched(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=1), uri, num_workers=0)
    with pytest.raises(WriteError, match="mode='append' or mode='overwrite'"):
        write_table(Numbers(units_=2), uri, num_workers=0)
    assert lance.dataset(str(uri)).version == 1


def test_other_things_that_are_there_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    for name in ("folder", "file"):
        for mode in ("create", "overwrite"):
            with pytest.raises(WriteError, match="choose another place"):
                write_table(Numbers(units_=1), tmp_path / name, num_workers=0, mode=mode)
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["thesis.tex"]


def test_nothing_to_append_to(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="mode='create'"):
        write_table(Numbers(units_=1), tmp_path / "t.lance", num_workers=0, mode="append")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"mode": "replace"}, ArgumentError, "create, append, overwrite"),
        ({"num_workers": -1}, ArgumentError, "num_workers"),
        ({"columns": ["id", "nix"]}, ColumnError, "no column 'nix'.*id, name, tokens"),
        ({"filter": "nix > 3"}, FilterError, "nix.*id, name, tokens"),
        ({"compression": {"id": "rar"}}, ArgumentError, "none, lz4, zstd, fsst"),
        ({"compression": {"nix": "zstd"}}, ColumnError, "nix"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_arguments(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        write_table(Numbers(), tmp_path / "t.lance", **{"num_workers": 0, **arguments})
    assert names(tmp_path) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        (Numbers(fail=7), SourceError, "unit 7 is damaged"),
        (Numbers(fail=0), SourceError, "unit 0 is damaged"),
        (Numbers(short=9), SourceError, "unit 9 gave 49 rows, but 50 are declared"),
        (Numbers(odd=5), SchemaError, "column 'id' is double in unit 5, but int64"),
        (Numbers(odd=0), SchemaError, "column 'id' is double in unit 0, but int64"),
    ],
    ids=["damaged", "damaged first", "short", "odd", "odd first"],
)
def test_a_bad_source_leaves_nothing(
    tmp_path: Path, source: Numbers, error: type[Exception], match: str, workers: int
) -> None:
    with pytest.raises(error, match=match) as caught:
        write_table(source, tmp_path / "t.lance", num_workers=workers)
    if source.fail is not None:
        assert (caught.value.file, caught.value.row) == (f"unit {source.fail}", 3)
    assert names(tmp_path) == []


def test_a_killed_worker_and_going_on(tmp_path: Path) -> None:
    armed, log = tmp_path / "armed", tmp_path / "log"
    armed.touch()
    log.mkdir()
    uri = tmp_path / "t.lance"
    source = Numbers(die=9, armed=str(armed), log=str(log))
    with pytest.raises(WorkerError, match="signal 9"):
        write_table(source, uri, num_workers=2)
    assert not uri.exists()
    before = {int(p.name.split("-")[0]) for p in log.iterdir()}
    for path in log.iterdir():
        path.unlink()
    armed.unlink()
    written = write_table(source, uri, num_workers=1)
    after = {int(p.name.split("-")[0]) for p in log.iterdir()}
    assert written.rows == 600
    assert read(uri).select(["id", "name", "tokens"]).equals(expected(600))
    assert after < set(range(12)), "finished shards were read again"
    assert before | after == set(range(12))
    assert names(tmp_path) == ["log", "t.lance"]
    assert files(uri) == referenced(uri)


def unfinished(tmp_path: Path) -> Numbers:
    """Leave an unfinished job at t.lance."""
    armed = tmp_path / "armed"
    armed.touch()
    source = Numbers(die=9, armed=str(armed))
    with pytest.raises(WorkerError):
        write_table(source, tmp_path / "t.lance", num_workers=2)
    armed.unlink()
    return source


def test_the_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    source = unfinished(tmp_path)
    for other, arguments, what in (
        (Numbers(name="others"), {}, "source"),
        (source, {"filter": "id > 3"}, "filter"),
        (source, {"columns": ["id"]}, "columns"),
        (source, {"provenance": True}, "provenance"),
    ):
        with pytest.raises(WriteError, match=f"differs in: {what}; .*restart=True"):
            write_table(other, tmp_path / "t.lance", num_workers=0, **arguments)
    written = write_table(
        Numbers(name="others", units_=2), tmp_path / "t.lance", num_workers=0, restart=True
    )
    assert written.rows == 100
    assert names(tmp_path) == ["t.lance"]
    assert files(tmp_path / "t.lance") == referenced(tmp_path / "t.lance")


def test_inputs_that_come_once_start_anew_and_say_so(tmp_path: Path) -> None:
    source = unfinished(tmp_path)
    source.resumable = False  # type: ignore[misc]
    with pytest.warns(DestrierWarning, match="starts anew"):
        write_table(source, tmp_path / "t.lance", num_workers=0)
    assert read(tmp_path / "t.lance").num_rows == 600
    assert names(tmp_path) == ["t.lance"]


SCRIPT = """
    import sys
    sys.path[:0] = {path!r}
    from sources import Numbers
    from destrier.writing.write import write_table
    print("started", flush=True)
    write_table(Numbers(wait=0.03, log={log!r}), {uri!r}, num_workers={workers}, mode={mode!r})
    print("done", flush=True)
"""


def start(tmp_path: Path, workers: int, mode: str) -> subprocess.Popen[str]:
    log = tmp_path / "log"
    log.mkdir(exist_ok=True)
    script = SCRIPT.format(
        path=[str(Path(__file__).parent)],
        log=str(log),
        uri=str(tmp_path / "t.lance"),
        workers=workers,
        mode=mode,
    )
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("mode", ["create", "append"])
@pytest.mark.parametrize("reads", [2, 9])
def test_kill_at_any_point_and_go_on(tmp_path: Path, reads: int, mode: str) -> None:
    """SIGKILL after so many units were begun; the table is the old one or the new one."""
    uri = tmp_path / "t.lance"
    old = 0
    if mode == "append":
        write_table(Numbers(units_=1), uri, num_workers=0)
        old = 50
    process = start(tmp_path, 2, mode)
    assert process.stdout is not None
    process.stdout.readline()
    while len(os.listdir(tmp_path / "log")) < reads and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    process.stdout.close()
    there = lance.dataset(str(uri)).count_rows() if (uri / "_versions").exists() else 0
    assert there in (old, old + 600)
    if there == old:
        again = start(tmp_path, 1, mode)
        assert again.stdout is not None
        assert again.stdout.read().split() == ["started", "done"]
        again.stdout.close()
        assert again.wait() == 0
    ids = read(uri)["id"].to_pylist()
    assert ids == [*range(old), *range(600)]
    assert names(tmp_path) == ["log", "t.lance"]
    assert files(uri) == referenced(uri)


@pytest.mark.parametrize("mode", ["create", "append", "overwrite"])
@pytest.mark.parametrize("when", ["before the move", "in the move", "before the commit", "after"])
def test_kill_while_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, mode: str
) -> None:
    """The four places at which a kill could leave files between the journal and the table."""
    from destrier.files import Store
    from destrier.writing import publish
    from destrier.writing.journal import Journal

    uri = tmp_path / "t.lance"
    if mode != "create":
        write_table(Numbers(units_=1), uri, num_workers=0)

    class KillError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KillError

    moves = []
    whole = Store.move

    def move(self: Store, *arguments: Any) -> None:
        moves.append(arguments)
        if len(moves) > 4:
            raise KillError
        whole(self, *arguments)

    with monkeypatch.context() as patch:
        # a kill runs no clean-up
        patch.setattr("destrier.writing.write._Run._leave", lambda *_: None)
        if when == "before the move":
            patch.setattr(publish, "move_files", kill)
        elif when == "in the move":
            patch.setattr(publish, "_MOVERS", 1)
            patch.setattr(Store, "move", move)
        elif when == "before the commit":
            patch.setattr(publish, "lance_call", kill)
        else:
            patch.setattr("destrier.writing.write._Run._written", kill)
            patch.setattr(Journal, "clear", lambda _: None)
        with pytest.raises(KillError):
            write_table(Numbers(), uri, num_workers=0, mode=mode)
    written = write_table(Numbers(), uri, num_workers=0, mode=mode)
    ids = read(uri)["id"].to_pylist()
    assert ids == [*range(50 if mode == "append" else 0), *range(600)]
    assert written.rows == 600
    assert names(tmp_path) == ["t.lance"]
    assert files(uri) == referenced(uri)


@pytest.mark.parametrize("mode", ["create", "append"])
def test_kill_anywhere_in_the_clearing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """However much of the journal is left, the rerun knows that the job is published."""
    from destrier.files import Store

    class KillError(BaseException):
        pass

    whole = Store.remove
    for allowed in range(20):
        folder = tmp_path / str(allowed)
        uri = folder / "t.lance"
        if mode == "append":
            write_table(Numbers(units_=1), uri, num_workers=0)
        removed = []

        def remove(
            self: Store, path: str = "", *, allowed: int = allowed, log: list = removed
        ) -> None:  # type: ignore[type-arg]
            if len(log) == allowed:
                raise KillError
            log.append(path)
            whole(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "remove", remove)
            patch.setattr("destrier.writing.write._Run._leave", lambda *_: None)
            try:
                write_table(Numbers(units_=3), uri, num_workers=0, mode=mode)
                break
            except KillError:
                pass
        if not (folder / "t.lance.writing" / "job.json").exists():
            continue  # all but the empty folder is gone: the job has ended
        written = write_table(Numbers(units_=3), uri, num_workers=0, mode=mode)
        assert (written.rows, written.version) == (150, 1 if mode == "create" else 2)
        assert read(uri).num_rows == 150 + (50 if mode == "append" else 0)
        assert names(folder) == ["t.lance"]
    assert allowed > 3


def test_what_lies_where_the_journal_would_be_is_not_touched(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"id": [1]}), str(tmp_path / "t.writing"))
    with pytest.raises(WriteError, match=r"t\.writing.*move it away"):
        write_table(Numbers(units_=1), tmp_path / "t", num_workers=0)
    assert read(tmp_path / "t.writing").num_rows == 1
    os.symlink("nowhere", tmp_path / "dangling")
    with pytest.raises(WriteError, match="choose another place"):
        write_table(Numbers(units_=1), tmp_path / "dangling", num_workers=0)
    assert names(tmp_path) == ["dangling", "t.writing"]


def test_credentials_in_an_address_are_not_repeated() -> None:
    with pytest.raises(ArgumentError) as refused:
        write_table(Numbers(units_=1), "s3://user:pw0rd@bucket/t.lance", num_workers=0)
    assert "pw0rd" not in str(refused.value)


def test_restart_after_a_kill_in_the_move_leaves_no_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from destrier.writing import publish

    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=1), uri, num_workers=0)

    class KillError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KillError

    with monkeypatch.context() as patch:
        patch.setattr("destrier.writing.write._Run._leave", lambda *_: None)
        patch.setattr(publish, "lance_call", kill)
        with pytest.raises(KillError):
            write_table(Numbers(), uri, num_workers=0, mode="append")
    assert files(uri) > referenced(uri)
    write_table(Numbers(units_=2), uri, num_workers=0, mode="append", restart=True)
    assert read(uri)["id"].to_pylist() == [*range(50), *range(100)]
    assert files(uri) == referenced(uri)
    assert names(tmp_path) == ["t.lance"]


def test_a_commit_that_fails_leaves_the_table_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from destrier import ReadError
    from destrier.writing import publish

    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=1), uri, num_workers=0)

    def refuse(what: str, *_: object) -> None:
        raise ReadError(f"{what}: the store says no")

    with monkeypatch.context() as patch:
        patch.setattr(publish, "lance_call", refuse)
        with pytest.raises(WriteError, match="the store says no"):
            write_table(Numbers(), uri, num_workers=0, mode="append")
    assert files(uri) == referenced(uri)
    assert write_table(Numbers(), uri, num_workers=0, mode="append").rows == 600


def lose_the_answer(patch: pytest.MonkeyPatch) -> None:
    """Let commits be taken, and fail to say so, as a store can when a connection breaks."""
    from destrier import ReadError
    from destrier.writing import publish

    whole = publish.lance_call

    def call(what: str, *arguments: Any) -> Any:
        answer = whole(what, *arguments)
        if what.startswith("committing"):
            raise ReadError(f"{what}: the connection was reset")
        return answer

    patch.setattr(publish, "lance_call", call)


@pytest.mark.parametrize("mode", ["create", "append", "overwrite"])
def test_a_commit_whose_answer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    uri = tmp_path / "t.lance"
    if mode != "create":
        write_table(Numbers(units_=1), uri, num_workers=0)
    with monkeypatch.context() as patch:
        lose_the_answer(patch)
        written = write_table(Numbers(), uri, num_workers=0, mode=mode)
    assert written.rows == 600
    assert read(uri)["id"].to_pylist() == [*range(50 if mode == "append" else 0), *range(600)]
    assert files(uri) == referenced(uri)
    assert names(tmp_path) == ["t.lance"]


def test_a_store_that_cannot_be_read_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known then whether the commit was taken, so nothing may be moved or removed."""
    from destrier.writing import publish

    def refuse(*_: Any, **__: Any) -> None:
        raise TableError("the store cannot be read now")

    uri = tmp_path / "t.lance"
    with monkeypatch.context() as patch:
        lose_the_answer(patch)
        patch.setattr(publish, "open_table", refuse)
        with pytest.raises(WriteError, match="not known whether the commit was taken"):
            write_table(Numbers(), uri, num_workers=0)
        with pytest.raises(TableError):
            write_table(Numbers(), uri, num_workers=0)
    assert read(uri).num_rows == 600
    assert write_table(Numbers(), uri, num_workers=0).version == 1
    assert read(uri).num_rows == 600
    assert names(tmp_path) == ["t.lance"]


def test_a_journal_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from destrier.files import Store
    from destrier.writing.journal import Journal

    class KillError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KillError

    def refuse(self: Store, path: str = "") -> None:
        raise SourceError(f"{path}: the store cannot be read now")

    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=1), uri, num_workers=0)
    with monkeypatch.context() as patch:
        patch.setattr("destrier.writing.write._Run._leave", lambda *_: None)
        patch.setattr("destrier.writing.write._Run._written", kill)
        patch.setattr(Journal, "clear", lambda _: None)
        with pytest.raises(KillError):
            write_table(Numbers(), uri, num_workers=0, mode="append")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read", refuse)
        with pytest.raises(SourceError, match="cannot be read now"):
            write_table(Numbers(), uri, num_workers=0, mode="append")
    assert write_table(Numbers(), uri, num_workers=0, mode="append").version == 2
    assert read(uri).num_rows == 650


def test_an_append_does_not_go_on_after_other_columns_came(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    write_table(Numbers(units_=1), uri, num_workers=0)
    armed = tmp_path / "armed"
    armed.touch()
    source = Numbers(die=9, armed=str(armed))
    with pytest.raises(WorkerError):
        write_table(source, uri, num_workers=1, mode="append")
    armed.unlink()
    table = read(uri)
    lance.write_dataset(table.select(table.column_names[::-1]), str(uri), mode="overwrite")
    with pytest.raises(WriteError, match=r"differs in: columns of the table; .*restart=True"):
        write_table(source, uri, num_workers=0, mode="append")
    write_table(source, uri, num_workers=0, mode="append", restart=True)
    assert read(uri)["id"].to_pylist() == [*range(50), *range(600)]
    assert files(uri) == referenced(uri)


@pytest.mark.parametrize("when", ["before", "in the moment"])
def test_a_table_that_somebody_else_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    from destrier.writing import publish

    uri = tmp_path / "t.lance"
    whole = publish.commit_files if when == "in the moment" else publish.publish
    theirs = pa.table({"theirs": [1, 2, 3]})

    def late(*arguments: Any, **options: Any) -> Any:
        lance.write_dataset(theirs, str(uri))
        return whole(*arguments, **options)

    with monkeypatch.context() as patch:
        if when == "in the moment":
            patch.setattr(publish, "commit_files", late)
        else:
            patch.setattr("destrier.writing.write.publish", late)
        with pytest.raises(WriteError, match=r"was made at .* meanwhile"):
            write_table(Numbers(), uri, num_workers=0)
    assert read(uri).equals(theirs)


def test_a_lock_is_not_taken_on_a_file_that_is_gone(tmp_path: Path) -> None:
    from destrier.writing.journal import Journal

    one, two, three = (Journal(str(tmp_path / "t")) for _ in range(3))
    with one.held(), pytest.raises(WriteError, match="another process"), two.held():
        pass
    with two.held(), pytest.raises(WriteError, match="another process"), three.held():
        pass
    assert names(tmp_path) == []


def test_two_writers_at_one_place(tmp_path: Path) -> None:
    process = start(tmp_path, 1, "create")
    assert process.stdout is not None
    process.stdout.readline()
    try:
        while not os.listdir(tmp_path / "log"):
            time.sleep(0.01)
        with pytest.raises(WriteError, match="another process is writing there"):
            write_table(Numbers(), tmp_path / "t.lance", num_workers=0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_ctrl_c_keeps_what_is_done_and_ends_the_workers(tmp_path: Path) -> None:
    import psutil

    process = start(tmp_path, 2, "create")
    assert process.stdout is not None
    process.stdout.readline()
    while len(os.listdir(tmp_path / "log")) < 6:
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert json.loads((tmp_path / "t.lance.writing" / "job.json").read_text())["mode"] == "create"
    written = write_table(Numbers(log=str(tmp_path / "log")), tmp_path / "t.lance", num_workers=0)
    assert written.rows == 600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(OSError, match=r"(?i)no space"):
            write_table(Numbers(payload=20_000), disk / "t.lance", num_workers=2)
        assert names(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot write"):
        write_table(Numbers(units_=1), tmp_path / "file" / "t.lance", num_workers=0)


@pytest.mark.parametrize("uri", ["db://company/table", "memory://table"])
def test_places_that_are_no_place(uri: str) -> None:
    with pytest.raises(WriteError, match="pass a path or a bucket"):
        write_table(Numbers(units_=1), uri, num_workers=0)


def test_column_names_that_collide(tmp_path: Path) -> None:
    data = pa.table({"source_row": [1], "n": [2]})
    pq.write_table(data, tmp_path / "p.parquet")
    with pytest.raises(ColumnError, match="two columns 'source_row'"):
        convert(tmp_path / "p.parquet", tmp_path / "t.lance", provenance=True, num_workers=0)


def test_a_column_named_like_a_count_keeps_its_name(tmp_path: Path) -> None:
    tokens = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    data = pa.table({"x": tokens, "x_count": pa.array([7, 8]), "y": tokens})
    pq.write_table(data, tmp_path / "p.parquet")
    uri = tmp_path / "t.lance"
    for mode in ("create", "append"):
        convert(tmp_path / "p.parquet", uri, mode=mode, num_workers=0)
        if mode == "create":
            assert verify(tmp_path / "p.parquet", uri, num_workers=0).equal
    assert read(uri).schema.names == ["x", "x_count", "y", "y_count"]
    assert read(uri)["x_count"].to_pylist() == [7, 8, 7, 8]
    assert read(uri)["y_count"].to_pylist() == [2, 1, 2, 1]
    pq.write_table(data.drop_columns("x_count"), tmp_path / "p.parquet")
    with pytest.raises(SchemaError, match=r"has a column 'x_count' .*which the input lacks"):
        convert(tmp_path / "p.parquet", uri, mode="append", num_workers=0)


def test_no_rows_make_an_empty_table(tmp_path: Path) -> None:
    written = write_table(Numbers(), tmp_path / "t.lance", num_workers=0, filter="id < 0")
    assert (written.rows, written.rows_read) == (0, 600)
    assert read(tmp_path / "t.lance").schema.names == ["id", "name", "tokens", "tokens_count"]


def test_a_shard_is_cut_into_fragments_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.writing.shards._FRAGMENT_BYTES", 60_000)
    source = Numbers(units_=4, length=100, payload=1000, nbytes=1)
    write_table(source, tmp_path / "t.lance", num_workers=0)
    fragments = lance.dataset(str(tmp_path / "t.lance")).get_fragments()
    assert len(fragments) > 5
    assert read(tmp_path / "t.lance")["id"].to_pylist() == list(range(400))


def test_units_are_grouped_by_bytes() -> None:
    small = Numbers(units_=1000, nbytes=1 << 20)
    shards = [small.first(), *small.rest(None)]  # type: ignore[arg-type]
    assert len(shards) == 17
    assert [unit.place for shard in shards for unit in shard.units] == list(range(1000))
    tiny = Numbers(units_=1000, nbytes=10)
    assert len(tiny.shards()) == 1
    huge = Numbers(units_=100, nbytes=1 << 30)
    assert len(huge.shards()) == 100


def test_a_table_written_here_opens_in_lancedb(tmp_path: Path) -> None:
    import lancedb

    write_table(Numbers(), tmp_path / "t.lance", num_workers=0)
    table = lancedb.connect(tmp_path).open_table("t")
    assert np.array_equal(table.to_arrow()["id"].to_numpy(), np.arange(600))


def test_slices_of_structs_in_structs(tmp_path: Path) -> None:
    """Lance ends in a panic when it is given such a slice."""
    array = pa.array([{"a": {"b": i, "c": [i] * (i % 3)}} for i in range(100)])
    batch = pa.record_batch({"x": array})

    class Sliced(Numbers):
        schema = batch.schema  # type: ignore[assignment]

        def read(self, unit: Any, schema: Any) -> Any:  # noqa: ARG002
            yield batch.slice(0, 30)
            yield batch.slice(30)

    write_table(Sliced(units_=1, length=100), tmp_path / "t.lance", num_workers=0)
    assert read(tmp_path / "t.lance")["x"].to_pylist() == array.to_pylist()
