"""Stats, traces, the repeated batch, and the command that measures."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import sys
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tables
from destrier import IterationError, Stats, StreamingDataLoader, StreamingDataset
from destrier.cli import main
from destrier.stats import Stage
from destrier.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ["id", "value"]
ROW_BYTES = 8 + 4
STEPS = tables.ROWS // 100


def loader_of(uri: Any, **arguments: Any) -> StreamingDataLoader:
    dataset = StreamingDataset(str(uri), columns=COLUMNS, shuffle_seed=1)
    return StreamingDataLoader(dataset, **{"batch_size": 100, **arguments})


def slow(batch: Any) -> Any:
    time.sleep(0.01)
    return batch


# ---- counts ---------------------------------------------------------------------------------


def test_nothing_is_counted_before_the_first_batch(table_path):
    with loader_of(table_path) as loader:
        stats = loader.stats()
    assert (stats.batches, stats.rows, stats.seconds, stats.waited) == (0, 0, 0.0, 0.0)
    assert stats.bound == ""
    assert stats.verdict == "no verdict yet: fewer than two batches were delivered"
    assert stats.stages["read"] == stats.stages["decode"] == Stage()


def test_counts_rows_and_bytes(table_path):
    with loader_of(table_path) as loader:
        for done, _ in enumerate(itertools.islice(loader, 4), 1):
            stats = loader.stats()
            assert (stats.batches, stats.rows) == (done, 100 * done)
            assert stats.bytes == 100 * done * ROW_BYTES
    for name in ("read", "gather", "format"):
        assert stats.stages[name].rows >= stats.rows
    assert stats.stages["read"].bytes >= stats.bytes
    worked = {name for name, stage in stats.stages.items() if stage.seconds}
    assert worked == {"start", "plan", "read", "gather", "format"}


def test_counts_go_on_over_epochs_and_stay_after_close(table_path):
    loader = loader_of(table_path)
    for epoch in (1, 2, 3):
        assert len(list(loader)) == STEPS
        assert loader.stats().batches == epoch * STEPS
    loader.close()
    stats = loader.stats()
    assert stats.rows == 3 * STEPS * 100
    assert stats.ready == 0
    assert stats == loader.stats()


def test_a_pause_between_epochs_is_not_counted(table_path):
    with loader_of(table_path) as loader:
        list(loader)
        before = loader.stats()
        time.sleep(0.05)
        after = loader.stats()
    assert after.seconds == before.seconds
    assert after.waited_seconds == pytest.approx(before.waited_seconds)  # shared out anew
    assert after.cpu_seconds == before.cpu_seconds


def test_counts_go_on_after_a_resume(table_path):
    with loader_of(table_path) as loader:
        list(itertools.islice(loader, 3))
        state = loader.state_dict()
        list(itertools.islice(loader, 2))
        loader.load_state_dict(state)
        assert len(list(loader)) == STEPS - 3
        assert loader.stats().batches == 5 + STEPS - 3


def test_loaders_of_one_dataset_count_for_themselves(table_path):
    dataset = StreamingDataset(table_path, columns=COLUMNS)
    first = StreamingDataLoader(dataset, batch_size=100)
    second = StreamingDataLoader(dataset, batch_size=50)
    list(first)
    first.close()
    assert first.stats().batches == STEPS
    assert second.stats() == Stats()
    assert dataset.bytes_loaded == first.stats().stages["read"].bytes > 0


def test_counts_of_dropped_loaders_stay_with_the_dataset(table_path):
    dataset = StreamingDataset(table_path, columns=COLUMNS)
    read = 0
    for _ in range(4):
        with StreamingDataLoader(dataset, batch_size=100) as loader:
            list(loader)
        read += loader.stats().stages["read"].bytes
        assert dataset.bytes_loaded == read > 0
    del loader
    gc.collect()
    StreamingDataLoader(dataset, batch_size=100)
    assert len(dataset._counts._parts) == 1
    assert dataset.bytes_loaded == read


def test_processor_time_counts_as_long_as_seconds_do(table_path):
    with loader_of(table_path) as loader:
        for done, _ in enumerate(loader):
            if done == 2:
                break
        before = loader.stats()
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        after = loader.stats()
        list(loader)
        last = loader.stats()
    assert before.cpu_seconds == after.cpu_seconds
    assert before.seconds == after.seconds
    assert last.cpu_seconds > after.cpu_seconds > 0


def test_a_copy_counts_for_itself(table_path):
    with loader_of(table_path) as loader:
        list(loader)
        copy = pickle.loads(pickle.dumps(loader))
        assert copy.stats().batches == 0
        copy.set_epoch(0)
        with copy:
            list(copy)
        assert copy.stats().batches == STEPS
        assert copy.dataset.bytes_loaded == copy.stats().stages["read"].bytes
        assert loader.stats().batches == STEPS


def test_counts_skipped_rows(table_path):
    def fails(batch):
        if (batch["id"] % 10 == 0).any():
            raise ValueError("no")
        return batch

    with loader_of(table_path, transform=fails, on_error="skip") as loader:
        list(loader)
        stats = loader.stats()
    assert stats.rows_skipped == loader.rows_skipped > 0
    assert f"{stats.rows_skipped} rows skipped" in str(stats)


# ---- verdicts -------------------------------------------------------------------------------


def check_sound(stats: Stats) -> None:
    assert 0 <= stats.waited <= 1
    assert 0 < stats.first_batch_seconds < stats.seconds
    assert stats.cpu_seconds > 0
    waited = sum(stage.waited for stage in stats.stages.values())
    assert waited == pytest.approx(stats.waited_seconds)
    assert all(stage.seconds >= 0 and stage.waited >= 0 for stage in stats.stages.values())
    assert stats.mean_ready >= 0


def test_a_slow_trainer_is_the_bound(table_path):
    with loader_of(table_path, batch_size=50) as loader:
        for _ in loader:
            time.sleep(0.01)
            while not loader.stats().ready:
                time.sleep(0.001)
        stats = loader.stats()
    check_sound(stats)
    assert stats.bound == "trainer"
    assert (
        stats.verdict == f"trainer-bound: the trainer waited {stats.waited * 100:.1f} % of the time"
    )
    assert stats.mean_ready > 0.9


def test_a_slow_transform_is_the_bound(table_path):
    with loader_of(table_path, batch_size=20, transform=slow) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    check_sound(stats)
    assert stats.bound == "transform"
    assert stats.verdict.startswith("transform-bound: ")
    assert f"of {stats.threads} threads" in stats.verdict
    transform = stats.stages["transform"]
    assert transform.seconds >= 0.01 * stats.batches
    assert transform.cpu_seconds < transform.seconds
    assert transform.waited > stats.waited_seconds / 2


def test_batches_that_are_not_transformed_yet_are_not_ready(table_path):
    with loader_of(table_path, batch_size=20) as loader:
        first = next(iter(loader))["id"]
    go_on = threading.Event()

    def held_up(batch: Any) -> Any:
        if batch["id"][0] != first[0]:
            go_on.wait(10)
        return batch

    with loader_of(table_path, batch_size=20, transform=held_up) as loader:
        batches = iter(loader)
        next(batches)
        pipeline = loader._runner.pipeline  # type: ignore[union-attr]
        while pipeline.queued < 2:  # type: ignore[union-attr]
            time.sleep(0.001)
        assert loader.stats().ready == 0
        threading.Timer(0.05, go_on.set).start()
        next(batches)
        assert loader.stats().mean_ready == 0


def test_a_slow_transform_in_processes_is_the_bound(table_path):
    with loader_of(table_path, batch_size=20, transform=slow, num_workers=2) as loader:
        list(loader)
        stats = loader.stats()
    check_sound(stats)
    assert (stats.bound, stats.threads) == ("transform", 2)


def test_a_slow_collate_fn_is_the_bound(table_path):
    with loader_of(table_path, batch_size=20, collate_fn=slow) as loader:
        list(loader)
        stats = loader.stats()
    check_sound(stats)
    assert stats.bound == "collate"


def test_slow_reading_is_the_bound(table_path, monkeypatch: pytest.MonkeyPatch):
    from destrier.read import Reader

    read = Reader._read_good

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.04)
        return read(*arguments)

    monkeypatch.setattr(Reader, "_read_good", slowly)
    with loader_of(table_path, batch_size=20, prefetch_bytes=1 << 14) as loader:
        list(loader)
        stats = loader.stats()
    check_sound(stats)
    assert stats.bound == "read"


def stats_with(bound: str, **more: Any) -> Stats:
    stage = Stage(seconds=15.2, cpu_seconds=15.2, rows=900, bytes=8_400_000, waited=7.0)
    stages = {"plan": Stage(seconds=1.0, waited=0.1), bound: stage}
    given = {"batches": 90, "rows": 900, "seconds": 8.0, "waited_seconds": 7.1, "threads": 2}
    return Stats(**{**given, "stages": stages, **more})


@pytest.mark.parametrize(
    ("stats", "verdict"),
    [
        (stats_with("decode"), "decode-bound: 1.9 of 2 cores decoding"),
        (stats_with("read"), "read-bound: 1.1 MB/s on 1.9 threads"),
        (
            stats_with("read", bandwidth=1.25e6),
            "storage-bound: 84 % of the measured bandwidth",
        ),
        (stats_with("read", bandwidth=1.05e7), "read-bound: 10 % of the measured bandwidth"),
        (stats_with("gather"), "gather-bound: 1.9 threads gathering"),
        (stats_with("format", threads=0), "format-bound: 1.9 threads forming tensors"),
        (stats_with("move"), "move-bound: 1.9 threads moving to the device"),
    ],
)
def test_verdicts(stats: Stats, verdict: str):
    waited = "the trainer waited 88.8 % of the time"
    assert stats.verdict == f"{verdict}; {waited}"
    assert str(stats).splitlines()[-1] == stats.verdict


def test_threads_without_cores_are_named():
    stage = Stage(seconds=8.0, cpu_seconds=4.0, waited=3.0)
    stats = stats_with("transform", stages={"transform": stage}, seconds=4.0, threads=2)
    assert stats.verdict.startswith("transform-bound: 2.0 of 2 threads on 1.0 cores transforming")


def test_prints_a_table(table_path):
    with loader_of(table_path) as loader:
        list(loader)
        lines = str(loader.stats()).splitlines()
    assert lines[0].startswith(f"{STEPS} batches of 1,000 rows, 12.0 kB, in ")
    assert lines[3].split()[:2] == ["stage", "seconds"]
    assert [line.split()[0] for line in lines[4:-1]] == [
        *("start", "plan", "read", "gather", "format")
    ]


# ---- the trace ------------------------------------------------------------------------------


def spans_of(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return names, [e for e in events if e["ph"] == "X"]


def test_a_trace_has_a_track_for_each_thread(table_path, tmp_path):
    path = tmp_path / "trace.json"
    with loader_of(table_path, transform=slow) as loader, loader.trace(path):
        list(loader)
    names, spans = spans_of(path)
    tracks = defaultdict(set)
    for span in spans:
        tracks[span["name"]].add(names[span["tid"]].rstrip("0123456789").rstrip("-"))
    assert tracks["read"] >= {"destrier-read"}
    assert tracks["gather"] == tracks["plan"] == {"destrier-drive"}
    assert tracks["transform"] == tracks["finish"] == {"destrier-finish"}
    assert tracks["next"] == tracks["train"] == {"MainThread"}
    delivered = [span for span in spans if span["name"] == "next"]
    assert [span["args"]["step"] for span in delivered] == list(range(STEPS))
    assert all(s["args"]["rows"] == 100 for s in delivered)
    assert all(s["args"]["bytes"] == 100 * ROW_BYTES for s in delivered)


def test_spans_of_a_thread_nest(table_path, tmp_path):
    path = tmp_path / "trace.json"
    with loader_of(table_path, transform=slow) as loader, loader.trace(path):
        list(loader)
    _, spans = spans_of(path)
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    tracks = defaultdict(list)
    for span in spans:
        tracks[span["tid"]].append((span["ts"], span["ts"] + span["dur"], span["name"]))
    inside = set()
    for track in tracks.values():
        open_: list[tuple[float, float, str]] = []
        for began, ended, name in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1][1] <= began + 0.5:
                open_.pop()
            if open_:
                assert ended <= open_[-1][1] + 0.5
                inside.add((name, open_[-1][2]))
            open_.append((began, ended, name))
    assert ("transform", "finish") in inside
    assert ("wait for its finish", "next") in inside


def test_a_trace_ends_with_its_block(table_path, tmp_path):
    path = tmp_path / "trace.json"
    with loader_of(table_path) as loader:
        batches = iter(loader)
        next(batches)
        with loader.trace(path):
            for _ in range(3):
                next(batches)
        next(batches)
        _, spans = spans_of(path)
        assert [s["args"]["step"] for s in spans if s["name"] == "next"] == [1, 2, 3]
        with loader.trace(path):
            next(batches)
        _, spans = spans_of(path)
        assert [s["args"]["step"] for s in spans if s["name"] == "next"] == [5]


def test_two_traces_at_once_are_an_error(table_path, tmp_path):
    with (
        loader_of(table_path) as loader,
        loader.trace(tmp_path / "one.json"),
        pytest.raises(IterationError, match="traced already"),
        loader.trace(tmp_path / "two.json"),
    ):
        pass
    assert not (tmp_path / "two.json").exists()


def test_a_trace_that_cannot_be_written_costs_no_run(table_path, tmp_path):
    with loader_of(table_path) as loader:
        with pytest.raises(FileNotFoundError), loader.trace(tmp_path / "none" / "trace.json"):
            pytest.fail("the block was run")
        with loader.trace(tmp_path / "trace.json"):
            list(loader)
    assert spans_of(tmp_path / "trace.json")[1]


def test_an_error_in_the_block_is_not_hidden(table_path, tmp_path, monkeypatch):
    def fails(_: Any) -> None:
        raise ZeroDivisionError

    path = tmp_path / "trace.json"
    with loader_of(table_path) as loader:
        with pytest.raises(ZeroDivisionError), loader.trace(path):
            list(map(fails, loader))
        assert "next" in {span["name"] for span in spans_of(path)[1]}

        def full(*_: Any) -> None:
            raise OSError("no space")

        monkeypatch.setattr(Trace, "write", full)
        with pytest.raises(ZeroDivisionError), loader.trace(path):
            raise ZeroDivisionError
        with pytest.raises(OSError, match="no space"), loader.trace(path):
            pass


# ---- one batch again and again --------------------------------------------------------------


def test_a_repeated_batch_is_the_first_one(table_path):
    with loader_of(table_path) as loader:
        first = next(iter(loader))
    with loader_of(table_path, repeat_batch=True) as loader:
        for epoch in range(2):
            batches = list(loader)
            assert len(batches) == len(loader) == STEPS
            for batch in batches:
                assert torch.equal(batch["id"], first["id"])
            assert loader.dataset.epoch == epoch + 1
        stats = loader.stats()
    assert stats.batches == 2 * STEPS
    assert stats.bytes == 2 * STEPS * 100 * ROW_BYTES


def test_a_repeated_batch_is_made_once(table_path):
    calls = []

    def seen(batch):
        calls.append(len(batch["id"]))
        return batch

    with loader_of(table_path, batch_size=10, transform=seen, repeat_batch=True) as loader:
        list(loader)
        loader._runner.stop(wait=True)  # what ran when the first batch came may end
        made = len(calls)
        for _ in range(3):
            list(loader)
        assert len(calls) == made < len(loader)


def test_states_and_skips_go_on_with_a_repeated_batch(table_path):
    with loader_of(table_path) as plain, loader_of(table_path, repeat_batch=True) as loader:
        ours, theirs = iter(loader), iter(plain)
        for _ in range(3):
            next(ours), next(theirs)
            assert loader.state_dict() == plain.state_dict()
        loader.skip(2)
        assert len(list(ours)) == STEPS - 5


def test_a_loaded_state_brings_another_batch(table_path):
    with loader_of(table_path) as plain:
        batches = iter(plain)
        next(batches)
        state = plain.state_dict()
        second = next(batches)["id"]
    with loader_of(table_path, repeat_batch=True) as loader:
        next(iter(loader))
        loader.load_state_dict(state)
        left = list(loader)
    assert len(left) == STEPS - 1
    assert all(torch.equal(batch["id"], second) for batch in left)


# ---- the command ----------------------------------------------------------------------------


def answer(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    assert main(["bench", *map(str, arguments), "--json", "--seconds", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_bench_for_scripts(capsys, table_path):
    report = answer(
        capsys, table_path, "--columns", "id,value", "--filter", "label < 5", "--batch-size", 50
    )
    assert report["columns"] == COLUMNS
    assert report["batch_size"] == 50
    assert 450 < report["rows"] < 550
    stats = report["stats"]
    assert stats["rows"] == 50 * stats["batches"]
    assert stats["bytes"] == stats["rows"] * ROW_BYTES
    assert stats["bandwidth"] == report["headroom"]["storage_bytes_per_second"] > 0
    assert report["rows_per_second"] > 0
    assert report["bytes_per_second"] == pytest.approx(report["rows_per_second"] * ROW_BYTES)
    assert report["headroom"]["repeated_rows_per_second"] > 0
    assert report["first_batch_seconds"] == stats["first_batch_seconds"] > 0
    assert stats["verdict"].startswith(stats["bound"]) or stats["bound"] == "read"


def test_bench_for_people(capsys, table_path, tmp_path):
    path = tmp_path / "trace.json"
    arguments = ("--columns", "id", "--no-shuffle", "--seconds", "0.1", "--trace", path)
    assert main(["bench", table_path, *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "1,003 rows, id" in out
    assert "one batch again and again: " in out
    assert "rows are held in memory after the first pass" in out
    assert "-bound: " in out.splitlines()[-1]
    assert {span["name"] for span in spans_of(path)[1]} >= {"read", "gather", "finish", "next"}


@pytest.fixture
def _own_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_own_path")
def test_a_process_of_bench_imports_from_the_current_folder(
    capsys, table_path, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine_for_a_process.py").write_text("def same(batch):\n    return batch\n")
    monkeypatch.chdir(tmp_path)
    report = answer(
        *(capsys, table_path, "--columns", "id", "--batch-size", 100, "--num-workers", 1),
        *("--transform", "mine_for_a_process:same"),
    )
    assert "transform" in report["stats"]["stages"]


@pytest.mark.usefixtures("_own_path")
def test_bench_decodes_and_transforms(capsys, tmp_path, monkeypatch: pytest.MonkeyPatch):
    import io

    import lance
    import pyarrow as pa
    from PIL import Image

    def png(value: int) -> bytes:
        out = io.BytesIO()
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(out, "PNG")
        return out.getvalue()

    uri = str(tmp_path / "images.lance")
    lance.write_dataset(pa.table({"image": pa.array([png(i) for i in range(64)])}), uri)
    (tmp_path / "mine_for_bench.py").write_text(
        "def half(batch):\n    return {'image': batch['image'] // 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    report = answer(
        *(capsys, uri, "--decode", "image=gray", "--batch-size", 8),
        *("--transform", "mine_for_bench:half"),
    )
    for name in ("decode", "transform"):
        assert report["stats"]["stages"][name]["rows"] >= report["stats"]["rows"]
    assert report["stats"]["bytes"] == report["stats"]["rows"] * 16


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--num-workers", "2"], 1, "--num-workers 2 are processes for a --transform"),
        (["--transform", "no_such_module:f"], 1, "the form is MODULE:FUNCTION"),
        (["--transform", "math:pi"], 1, "--transform math:pi is a float, not a function"),
        (["--seconds", "0"], 2, "'0' is not a number of seconds above 0"),
        (["--decode", "image"], 2, "'image' is not of the form COLUMN=MODE"),
        (["--batch-size", "2000"], 1, "give a smaller --batch-size"),
        (["--global-batch", "2000"], 1, "1003"),
    ],
)
def test_bench_says_what_is_wrong(capsys, table_path, arguments, code, message):
    try:
        ended = main(["bench", table_path, *arguments])
    except SystemExit as wrong:
        ended = int(wrong.code or 0)
    out, err = capsys.readouterr()
    assert (ended, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_bench_tells_people_how_long_it_takes(capsys, table_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["bench", table_path, "--columns", "id", "--seconds", "0.1"]) == 0
    assert capsys.readouterr().err == "measuring for about 0.15 s ...\n"


def test_bench_reads_blobs(capsys, tmp_path):
    import lance
    import pyarrow as pa

    uri = str(tmp_path / "blobs.lance")
    table = pa.table(
        {"data": lance.blob_array([b"x" * 100] * 64), "n": np.arange(64)},
        schema=pa.schema([lance.blob_field("data"), pa.field("n", pa.int64())]),
    )
    lance.write_dataset(table, uri, data_storage_version="2.2")
    report = answer(capsys, uri, "--batch-size", 8, "--columns", "data")
    assert report["headroom"]["storage_rows_per_second"] > 0
    assert report["stats"]["bytes"] == report["stats"]["rows"] * 100
