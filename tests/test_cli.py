"""The command line: what it prints, what scripts get, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import tables
from destrier import (
    Mixture,
    Packed,
    Permutation,
    StreamingDataLoader,
    StreamingDataset,
    __version__,
)
from destrier.cli import main
from destrier.report import design_effect

if TYPE_CHECKING:
    from conftest import Made


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Run a command with --json and return what it says."""
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# ---- info -----------------------------------------------------------------------------------


def test_info_describes_a_table(capsys, table_path):
    code, out, err = run(capsys, "info", table_path)
    assert (code, err) == (0, "")
    assert "1,003, " in out
    assert "deleted" in out
    for name in ("vector", "fixed_size_list<item: float>[4]", "tokens", "versions: 3"):
        assert name in out


def test_info_for_scripts(capsys, own_table: Made):
    dataset = lance.dataset(str(own_table.path))
    dataset.tags.create("golden", 2)
    report = answer(capsys, "info", own_table.path)
    assert report["rows"] == tables.ROWS
    assert report["version"] == report["latest_version"] == dataset.version
    assert report["tags"] == {"golden": 2}
    assert [v["version"] for v in report["versions"]] == [1, 2, 3]
    assert [c["name"] for c in report["columns"]] == dataset.schema.names
    assert report["bytes"] >= sum(c["bytes"] for c in report["columns"]) > 0
    assert report["deleted_rows"] > 0
    assert report["warnings"] == []
    older = answer(capsys, "info", own_table.path, "--table-version", "golden")
    assert (older["version"], older["latest_version"]) == (2, 3)
    assert older["rows"] > report["rows"]
    assert answer(capsys, "info", own_table.path, "--table-version", "1")["rows"] == 50


def test_info_warns_of_many_small_fragments(capsys, tmp_path: Path):
    tables.appended_table(tmp_path / "many.lance", 70, 2)
    (warning,) = answer(capsys, "info", tmp_path / "many.lance")["warnings"]
    assert "compact" in warning
    code, out, _ = run(capsys, "info", tmp_path / "many.lance")
    assert code == 0
    assert "warning: " in out
    code, out, err = run(capsys, "plan", tmp_path / "many.lance", "--global-batch", 10)
    assert code == 0
    assert err.startswith("destrier: warning: ")
    assert err.count("\n") == 1


# ---- head -----------------------------------------------------------------------------------


def test_head_prints_rows_in_table_order(capsys, table_path, table_ids):
    rows = answer(capsys, "head", table_path, "-n", 5)
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["id"] for row in rows] == table_ids[:5].tolist()
    first = int(table_ids[0])
    assert rows[0]["blob"] == {
        "bytes": len(tables.blob(first)),
        "hex": tables.blob(first)[:8].hex(),
    }
    code, out, _ = run(capsys, "head", table_path)
    assert code == 0
    assert len(out.splitlines()) == 11
    assert "row  id" in out
    assert f"row {first}" in out


def test_head_filters_and_chooses_columns(capsys, table_path, table_ids):
    rows = answer(
        capsys, "head", table_path, "--filter", "label = 3", "-n", 4, "--columns", "label,id"
    )
    offsets = np.flatnonzero(table_ids % 10 == 3)[:4]
    assert rows == [
        {"row": offset, "label": 3, "id": table_ids[offset]} for offset in offsets.tolist()
    ]
    assert answer(capsys, "head", table_path, "--filter", "id < 0") == []
    code, out, _ = run(capsys, "head", table_path, "--filter", "id < 0", "--columns", "id")
    assert (code, out) == (0, "no rows where id < 0\n")


def test_head_of_a_table_without_rows(capsys, tmp_path: Path):
    tables.plain_table(tmp_path / "empty.lance", 0)
    assert run(capsys, "head", tmp_path / "empty.lance") == (0, "no rows\n", "")


def test_head_says_every_value_as_json(capsys, tmp_path: Path):
    blobs = pa.field("large", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema(
        [("x", pa.float32()), ("when", pa.timestamp("us")), ("d", pa.decimal128(9, 2)), blobs]
    )
    rows = [
        {"x": float("nan"), "when": 0, "d": None, "large": b"12345"},
        {"x": None, "when": None, "d": 5, "large": None},
    ]
    lance.write_dataset(pa.Table.from_pylist(rows, schema), tmp_path / "odd.lance")
    first, second = answer(capsys, "head", tmp_path / "odd.lance")
    assert first["x"] == "nan"
    assert first["when"] == "1970-01-01T00:00:00"
    assert first["large"] == {"bytes": 5}
    assert second["x"] is None
    assert second["d"] == "5.00"
    code, out, _ = run(capsys, "head", tmp_path / "odd.lance")
    assert code == 0
    assert "5 B blob" in out


def test_head_ends_quietly_when_nobody_reads_on(tmp_path: Path):
    tables.plain_table(tmp_path / "plain.lance", 50_000)
    command = [sys.executable, "-m", "destrier.cli", "head", str(tmp_path / "plain.lance")]
    with subprocess.Popen(
        [*command, "-n", "50000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("row ")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("arguments", [("head",), ("info", "--json"), ("--version",)])
def test_a_full_disk_is_an_error_of_one_line(table_path, arguments: tuple[str, ...]):
    command = [sys.executable, "-m", "destrier.cli", *arguments]
    if arguments != ("--version",):
        command.append(table_path)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("destrier: error: ")
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


# ---- plan -----------------------------------------------------------------------------------

PLAN = ("--filter", "label < 7", "--global-batch", 24, "--seed", 5, "--epoch", 2, "--step", 3)


def test_plan_lists_what_the_loaders_read(capsys, table_path):
    report = answer(capsys, "plan", table_path, *PLAN, "--world-size", 3)
    assert [share["rank"] for share in report["shares"]] == [0, 1, 2]
    for share in report["shares"]:
        dataset = StreamingDataset(
            table_path,
            columns=["id"],
            filter="label < 7",
            shuffle_seed=5,
            epoch=2,
            rank=share["rank"],
            world_size=3,
        )
        with StreamingDataLoader(dataset, global_batch_size=24, with_index=True) as loader:
            loader.skip(3)
            batch = next(iter(loader))
            assert batch["row_offset"].tolist() == share["rows"]
            assert batch["sample_index"].tolist() == share["samples"]
            assert len(loader) == report["steps"]
    assert report["steps"] * 24 + report["surplus_rows"] == report["rows"]
    assert report["table_rows"] == tables.ROWS


def test_plan_in_words(capsys, table_path):
    code, out, err = run(capsys, "plan", table_path, *PLAN, "--world-size", 3)
    assert (code, err) == (0, "")
    for words in ("steps of 24 rows", "rank 2: ", "deff", "requests a row", "where label < 7"):
        assert words in out


@pytest.mark.parametrize(
    "options", [(), ("--how", "best_fit", "--pad-id", 0)], ids=["concatenate", "best fit"]
)
def test_plan_of_packed_blocks(capsys, table_path, options):
    sizes = ("--block-size", 3, *options, "--global-batch", 24, "--seed", 5, "--step", 3)
    report = answer(capsys, "plan", table_path, *sizes, "--filter", "label < 7")
    how = {"how": "best_fit", "pad_id": 0} if options else {}
    packed = Packed(table_path, block_size=3, **how)
    assert report["packing"] == dataclasses.asdict(packed.report(filter="label < 7"))
    dataset = StreamingDataset(packed, filter="label < 7", shuffle_seed=5)
    with StreamingDataLoader(dataset, batch_size=24, with_index=True) as loader:
        loader.skip(3)
        assert next(iter(loader))["row_offset"].tolist() == report["shares"][0]["rows"]
        assert len(loader) == report["steps"]
    assert (report["columns"], report["read_columns"]) == (["input_ids"], ["tokens"])
    assert 0 < report["requests_a_step"] <= 24 * 3
    code, out, err = run(capsys, "plan", table_path, *sizes)
    assert (code, err) == (0, "")
    for words in ("documents:", "of 3 tokens", "pads", "deff"):
        assert words in out


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """4,000 documents of 25 tokens, sorted: each has its class as every token."""
    tokens = np.repeat(np.arange(4000) // 40, 25).astype(np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), 25).cast(pa.list_(pa.int32()))
    lance.write_dataset(pa.table({"tokens": column}), tmp_path / "documents.lance")
    return str(tmp_path / "documents.lance")


def test_plan_measures_blocks_by_their_documents(capsys, documents):
    """What is read are whole documents, and those of a block are neighbours."""
    order = ("--num-splits", 16, "--clump-size", 4, "--window", 4, "--global-batch", 16)
    stored = sum(file.file_size_bytes for file in _files(documents)) / 4000
    for size in (100, 10):
        report = answer(capsys, "plan", documents, "--block-size", size, *order)
        read = report["bytes_a_step"] / stored / 16  # documents a block
        # A clump of four blocks begins and ends inside of a document.
        assert size / 25 + 0.1 < read < size / 25 + 0.5

    alone = ("--clump-size", 1, "--global-batch", 16)
    report = answer(capsys, "plan", documents, "--block-size", 100, *alone)
    packed = Packed(documents, block_size=100)
    with StreamingDataLoader(StreamingDataset(packed), global_batch_size=16) as loader:
        means = [float(batch["input_ids"].double().mean()) for _ in range(8) for batch in loader]
    classes = np.arange(4000) // 40
    uniform = classes.var() / (16 * 4)  # of the mean of as many documents
    assert report["deff"] == 4
    assert 0.8 < np.var(means) / uniform / report["deff"] < 1.2
    code, out, _ = run(capsys, "plan", documents, "--block-size", 100)
    assert code == 0
    for words in ("requests a block", "addresses of blocks", "4 documents, which are neighbours"):
        assert words in out


def _files(uri: str):
    fragments = lance.dataset(uri).get_fragments()
    return [file for fragment in fragments for file in fragment.metadata.files]


def test_plan_counts_reads_and_open_rows(capsys, tmp_path: Path):
    tables.plain_table(tmp_path / "plain.lance", 40_000)
    sizes = ("--global-batch", 64, "--num-splits", 64, "--clump-size", 16, "--window", 4)
    one = answer(capsys, "plan", tmp_path / "plain.lance", *sizes)
    assert one["open_rows"] == 64 * 16 * 4
    assert one["open_bytes"] == one["open_rows"] * 16  # 8 + 4 + 4 bytes
    assert (one["held"], one["held_bytes"]) == ("all", 40_000 * (16 + 8))
    runs = one["requests_a_step"] / 3  # columns
    assert 64 / 16 <= runs <= 64 / 16 * 1.5  # clumps are cut where windows and splits end
    id_only = answer(capsys, "plan", tmp_path / "plain.lance", *sizes, "--columns", "id")
    assert id_only["requests_a_step"] == runs
    assert id_only["bytes_a_step"] < one["bytes_a_step"]
    assert (one["deff"], one["deff_successive"]) == (1.0, 1 + 15 / 4)
    four = answer(capsys, "plan", tmp_path / "plain.lance", *sizes, "--world-size", 4)
    assert four["open_rows"] == one["open_rows"]  # each rank holds its own splits
    assert four["notes"] == []
    eight = answer(capsys, "plan", tmp_path / "plain.lance", *sizes, "--world-size", 8)
    assert (eight["held"], eight["held_bytes"]) == ("windows", one["open_bytes"] / 8)
    odd = ("--global-batch", 96, "--num-splits", 64, "--clump-size", 16, "--window", 4)
    shared = answer(capsys, "plan", tmp_path / "plain.lance", *odd, "--world-size", 3)
    assert shared["open_rows"] > one["open_rows"]
    assert "read by" in shared["notes"][0]


def test_a_plan_holds_what_a_loader_holds(capsys, tmp_path: Path):
    path = tmp_path / "texts.lance"
    texts = ["a" * 3000] * 2048  # that take next to nothing on disk
    lance.write_dataset(pa.table({"text": texts, "id": range(2048)}), path)
    sizes = ("--global-batch", 64, "--num-splits", 64, "--clump-size", 2, "--window", 2)
    report = answer(capsys, "plan", path, *sizes)
    order = {"num_splits": 64, "shuffle_clump_size": 2, "shuffle_window": 2}
    with StreamingDataLoader(StreamingDataset(path, **order), batch_size=64) as loader:
        next(iter(loader))
        assert report["open_bytes"] == report["open_rows"] * loader._runner.work.feed.row_bytes
        assert report["held"] == loader._runner.work.feed.held
        assert loader._runner.work.feed.row_bytes > 3000


@pytest.fixture
def three(tmp_path: Path) -> dict[str, str]:
    """Make tables of 700, 300 and 50 rows."""
    paths = {name: str(tmp_path / f"{name}.lance") for name in ("web", "code", "books")}
    for path, rows in zip(paths.values(), (700, 300, 50), strict=True):
        tables.plain_table(path, rows)
    return paths


def test_plan_of_a_mixture_counts_what_loaders_deliver(capsys, three):
    weights = {"web": 4, "code": 3, "books": 1}
    given = ("--weights", 4, 3, 1, "--stop", "all_exhausted", "--seed", 5, "--epoch", 1)
    sizes = ("--global-batch", 40, "--world-size", 2, "--step", 3)
    report = answer(capsys, "plan", *three.values(), *given, *sizes)
    shares = []
    for rank in range(2):
        mixture = Mixture(
            {name: StreamingDataset(path, shuffle_seed=5) for name, path in three.items()},
            weights=weights,
            stop="all_exhausted",
            seed=5,
            source_column="from",
            epoch=1,
            rank=rank,
            world_size=2,
        )
        with StreamingDataLoader(mixture, global_batch_size=40) as loader:
            shares.append([Counter(batch["from"]) for batch in loader])
            assert report["steps"] == report["looked_at_steps"] == len(shares[-1]) == len(loader)
    steps = [sum(share, Counter()) for share in zip(*shares, strict=True)]
    assert report["shares"] == [{name: own[3][name] for name in three} for own in shares]
    epoch = report["steps"] * 40 + report["surplus_rows"]
    assert sum(source["samples"] for source in report["sources"]) == epoch
    for source, (name, weight) in zip(report["sources"], weights.items(), strict=True):
        assert source["name"] == name
        assert source["share"] == weight / 8
        assert source["samples"] == epoch * weight // 8
        assert source["times"] == source["samples"] / source["rows"] >= 1
        per_step = [step[name] for step in steps]
        assert source["least_a_step"] == min(per_step)
        assert source["most_a_step"] == max(per_step)
        assert source["held"] == "all"
        assert source["held_bytes"] > 0


def test_plan_of_a_mixture_in_words(capsys, three):
    some = ("plan", three["web"], f"b={three['code']}", "--global-batch", 32, "--world-size", 2)
    code, out, err = run(capsys, *some)
    assert (code, err) == (0, "")
    for said in ("every row of every source once", "31 steps of 32 rows, 8 rows over", "rank 1: "):
        assert said in out
    (line,) = [line for line in out.splitlines() if line.startswith("b ")]
    assert line.split()[:5] == ["b", "300", "30", "%", "300"]
    code, out, err = run(capsys, *some, "--weights", 1, 1, "--stop", "never")
    assert (code, err) == (0, "")
    assert "without end" in out
    report = answer(capsys, *some, "--temperature", 1e9, "--batching", "stratified")
    assert [source["least_a_step"] for source in report["sources"]] == [16, 16]
    assert report["slots"] == 32
    one = answer(capsys, "plan", three["books"], "--length", 1000)
    assert [(s["name"], s["samples"], s["times"]) for s in one["sources"]] == [("books", 1000, 20)]


def test_plans_of_mixtures_that_cannot_be(capsys, three):
    web, code_, _ = three.values()
    for given, said in (
        ((web, web), "two tables are called 'web'; give them names: a="),
        ((web, code_, "--weights", 1), "1 --weights for 2 tables: web, code"),
        ((web, code_, "--weights", 1, -1), "-1"),
        ((web, code_, "--table-version", 1), "--table-version is for a plan of one table"),
        ((web, code_, "--step", 10**6), "the epoch has the steps 0 to"),
        ((web, code_, "--weights", 1, 1, "--length", 9, "--stop", "never"), "both given"),
        ((web, code_, "--columns", "nix"), "nix"),
        ((web, code_, "--world-size", 3), "--world-size 3"),
    ):
        code, out, err = run(capsys, "plan", *given)
        assert (code, out) == (1, ""), given
        assert err.startswith("destrier: error: ")
        assert said in err
        assert err.count("\n") == 1


def test_plan_without_a_shuffle(capsys, table_path):
    report = answer(capsys, "plan", table_path, "--no-shuffle", "--global-batch", 10, "--step", 2)
    assert report["shares"][0]["rows"] == list(range(20, 30))
    assert report["deff"] is None
    assert report["open_rows"] == 0
    code, out, _ = run(capsys, "plan", table_path, "--no-shuffle")
    assert code == 0
    assert "nothing is shuffled" in out


def test_the_design_effect_is_that_of_the_order_page():
    sizes = {"clump_size": 32, "window": 8}
    assert design_effect(256, num_splits=64, **sizes) == 1.375
    assert design_effect(256, num_splits=256, **sizes) == 1
    assert design_effect(10, num_splits=256, **sizes) == 1
    assert design_effect(256, num_splits=1, clump_size=1, window=1) == 1


# ---- permute --------------------------------------------------------------------------------


def test_permute_writes_parts(capsys, table_path, table_ids, tmp_path: Path):
    out = tmp_path / "parts.lance"
    code, said, err = run(
        capsys, "permute", table_path, out, "--filter", "label < 5", "--parts", "train=0.8,val=0.2"
    )
    assert (code, err) == (0, "")
    permutation = Permutation.open(str(out))
    assert permutation.parts == ["train", "val"]
    rows = permutation.to_arrow()["row_offset"].to_numpy()
    assert sorted(rows.tolist()) == np.flatnonzero(table_ids % 10 < 5).tolist()
    assert rows.tolist() != sorted(rows.tolist())
    assert f"train {len(permutation['train']):,}, val {len(permutation['val']):,}" in said


def test_permute_by_counts_and_seed(capsys, table_path, tmp_path: Path):
    lists = []
    for name, *options in (("a",), ("b", "--seed", 0), ("c", "--seed", 1)):
        code, _, _ = run(
            capsys, "permute", table_path, tmp_path / name, "--parts", "a=100,b=3", *options
        )
        assert code == 0
        lists.append(Permutation.open(str(tmp_path / name)).to_arrow()["row_offset"].to_pylist())
    assert len(lists[0]) == 103
    assert lists[0] == lists[1] != lists[2]
    code, _, _ = run(capsys, "permute", table_path, tmp_path / "d", "--no-shuffle")
    assert code == 0
    plain = Permutation.open(str(tmp_path / "d")).to_arrow()["row_offset"].to_pylist()
    assert plain == list(range(tables.ROWS))


def test_permute_replaces_a_table_only_when_told_to(capsys, table_path, tmp_path: Path):
    out = tmp_path / "order.lance"
    assert run(capsys, "permute", table_path, out)[0] == 0
    code, _, err = run(capsys, "permute", table_path, out)
    assert code == 1
    assert "--overwrite" in err
    assert "overwrite=True" not in err
    assert run(capsys, "permute", table_path, out, "--overwrite")[0] == 0


def test_permute_never_replaces_data(capsys, own_table: Made, tmp_path: Path):
    other = tables.plain_table(tmp_path / "other.lance", 9)
    for out in (own_table.path, other.uri):
        code, _, err = run(capsys, "permute", own_table.path, out, "--overwrite")
        assert code == 1
        assert str(out) in err
        assert "choose another place" in err
    assert lance.dataset(own_table.path).count_rows() == tables.ROWS
    assert lance.dataset(other.uri).version == 1


# ---- failing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("info", "/no/such/table.lance"), "no such file"),
        (("info", "memory://x"), "memory://"),
        (("info", "TABLE", "--table-version", "99"), "version 99"),
        (("info", "TABLE", "--table-version", "gone"), "'gone'"),
        (("head", "TABLE", "--columns", "id,colour"), "no column 'colour'"),
        (("head", "TABLE", "--filter", "colour = 3"), "its columns are: id, label"),
        (("plan", "TABLE", "--filter", "colour = 3"), "its columns are: id, label"),
        (("plan", "TABLE", "--filter", "id < 0"), "keeps none"),
        (("plan", "TABLE", "--global-batch", "24", "--world-size", "5"), "1, 2, 3, 4, 6, 8"),
        (("plan", "TABLE", "--global-batch", "24", "--world-size", "5"), "by --world-size 5;"),
        (("plan", "TABLE", "--global-batch", "5000"), "fewer than one step"),
        (("plan", "TABLE", "--global-batch", "5000"), "give a smaller --global-batch"),
        (("plan", "TABLE", "--clump-size", "99999", "--window", "99999"), "times --window 99999"),
        (("plan", "TABLE", "--step", "3"), "the steps 0 to 2"),
        (("plan", "TABLE", "--seed", str(1 << 32)), "--seed must be"),
        (("plan", "TABLE", "--num-splits", "1004"), "--num-splits is 1004"),
        (("permute", "TABLE", "OUT", "--parts", "a=0.8,b=0.4"), "0.8, 0.4 sum to 1.2"),
        (("permute", "TABLE", "OUT", "--parts", "a=1000,b=4"), "1003"),
        (("permute", "TABLE", "OUT", "--parts", "a=0,b=1"), "over 0"),
        (("permute", "TABLE", "OUT", "--parts", "a=0.5,b=9"), "(a=0.5) and numbers of rows (b=9)"),
        (("permute", "TABLE", "OUT", "--parts", "a=1.5"), "neither a share of 1 nor a whole"),
        (("info", "FOLDER"), "the folder is empty"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    capsys, table_path, tmp_path: Path, arguments: tuple[str, ...], words: str
):
    places = {"TABLE": table_path, "OUT": str(tmp_path / "out.lance"), "FOLDER": str(tmp_path)}
    code, out, err = run(capsys, *(places.get(a, a) for a in arguments))
    assert (code, out) == (1, "")
    assert err.startswith("destrier: error: ")
    assert words in err
    assert err.count("\n") == 1
    for other in ("Traceback", "Fraction", "uneven=", "remainder=", "pin=", "overwrite="):
        assert other not in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("info",),
        ("head", "x", "-n", "0"),
        ("head", "x", "--columns", ""),
        ("plan", "x", "--world-size", "two"),
        ("permute", "x", "y", "--parts", "train"),
        ("permute", "x", "y", "--parts", "a=1,a=2"),
        ("permute", "x", "y", "--parts", "a=much"),
        ("info", "x", "--unknown"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, arguments: tuple[str, ...]):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("destrier: usage: ")
    assert err.count("\n") == 1


def test_an_unknown_option_leads_to_the_help_of_its_command(capsys):
    code, out, err = run(capsys, "plan", "x", "--batch-size", "7")
    said = "destrier: usage: unrecognized arguments: --batch-size 7; see destrier plan --help\n"
    assert (code, out, err) == (2, "", said)


def test_version_and_help(capsys):
    assert run(capsys, "--version") == (0, f"destrier {__version__}\n", "")
    for command in ((), ("info",), ("head",), ("plan",), ("permute",), ("demo",)):
        code, out, err = run(capsys, *command, "--help")
        assert (code, err) == (0, "")
        assert out.startswith("usage: destrier")


def test_credentials_are_not_echoed(capsys, table_path, tmp_path: Path):
    secret = "hunter2hunter2"
    given = ("--storage-option", f"aws_secret_access_key={secret}")
    for command in (("info",), ("head",), ("plan",), ("info", "--json"), ("plan", "--json")):
        code, out, err = run(capsys, command[0], table_path, *command[1:], *given)
        assert code == 0
        assert secret not in out + err
    # where a message would repeat one, and where the option itself is wrong
    code, out, err = run(capsys, "info", tmp_path / secret, *given)
    assert code == 1
    assert secret not in out + err
    code, out, err = run(capsys, "info", table_path, "--storage-option", secret)
    assert code == 2
    assert secret not in out + err
    # in a warning, which names the table
    many = tmp_path / secret
    tables.appended_table(many, 70, 2)
    code, out, err = run(capsys, "plan", many, "--global-batch", 10, *given)
    assert (code, err[:18]) == (0, "destrier: warning:")
    assert secret not in err
