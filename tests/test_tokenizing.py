"""Tables of tokens: a function that is called with many documents at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import destrier
from destrier import ArgumentError, SourceError, View, optimize
from destrier.jobs.inputs import IterableSource, SequenceSource
from destrier.packing.packed import Packed
from destrier.writing.source import Measure

EOS = 256
TOKEN = pa.field("item", pa.uint16(), nullable=False)
TOKENS = pa.schema([pa.field("tokens", pa.list_(TOKEN))])


def documents(count: int) -> list[str]:
    random_ = random.Random(0)
    return ["wörd " * random_.randrange(40) for _ in range(count)]


def tokenized(texts: list[str]) -> list[dict[str, Any]]:
    return [{"tokens": [*text.encode(), EOS]} for text in texts]


def expected(texts: list[str]) -> list[dict[str, Any]]:
    rows = tokenized(texts)
    return [{**row, "tokens_count": len(row["tokens"])} for row in rows]


def read(path: Path) -> list[dict[str, Any]]:
    return lance.dataset(path).to_table().to_pylist()


# ---- lists of inputs --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_same_table_for_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    texts = documents(3001)
    written = optimize(
        tokenized, texts, tmp_path / "t", batch_size=100, schema=TOKENS, num_workers=workers
    )
    assert written.rows == len(texts)
    table = lance.dataset(tmp_path / "t")
    assert table.schema.field("tokens").type == pa.list_(TOKEN)
    assert read(tmp_path / "t") == expected(texts)
    packed = destrier.StreamingDataset(Packed(tmp_path / "t", block_size=32))
    assert packed.stream().count == sum(row["tokens_count"] for row in expected(texts)) // 32


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 30), st.floats(1e-7, 100), st.booleans())
def test_lists_do_not_depend_on_shards(count: int, size: int, seconds: float, stream: bool) -> None:
    called = []

    def note(numbers: list[int]) -> list[dict[str, int]]:
        called.append(numbers)
        return [{"n": n} for n in numbers]

    kind = IterableSource if stream else SequenceSource
    inputs: Any = iter(range(count)) if stream else range(count)
    source = kind(note, inputs, batch_size=size)
    found = []
    shards = [source.first()]
    for shard in shards:
        for unit in shard.units:
            found += [n for batch in source.read(unit, None) for n in batch["n"].to_pylist()]
        if len(shards) == 1:
            shards += source.rest(Measure(source.taken, 1000, seconds))
    assert found == list(range(count))
    assert called == [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def test_a_record_batch_has_a_row_for_each_input(tmp_path: Path) -> None:
    def columns(numbers: list[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"n": numbers})

    optimize(columns, range(1003), tmp_path / "t", batch_size=50, num_workers=0)
    assert read(tmp_path / "t") == [{"n": n} for n in range(1003)]
    with pytest.raises(SourceError, match=r"returned 49 rows for the 50 inputs .* 0 to 49"):
        optimize(
            lambda numbers: columns(numbers[1:]),
            range(1003),
            tmp_path / "u",
            batch_size=50,
            num_workers=0,
        )


def test_none_leaves_a_document_out(tmp_path: Path) -> None:
    def long(texts: list[str]) -> Any:
        return (row if len(row["tokens"]) > 20 else None for row in tokenized(texts))

    texts = documents(500)
    optimize(long, texts, tmp_path / "t", batch_size=64, num_workers=0)
    assert read(tmp_path / "t") == [row for row in expected(texts) if len(row["tokens"]) > 20]


def test_rows_of_a_table_are_read_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = documents(500)
    lance.write_dataset(pa.table({"text": texts, "id": range(500)}), tmp_path / "texts")
    view = View(tmp_path / "texts", columns=["text"])
    sizes = []
    whole = View.__getitems__

    def counted(self: View, indices: Any) -> Any:
        sizes.append(len(indices))
        return whole(self, indices)

    monkeypatch.setattr(View, "__getitems__", counted)
    optimize(
        lambda rows: tokenized([row["text"] for row in rows]),
        view,
        tmp_path / "t",
        batch_size=128,
        num_workers=0,
    )
    assert sizes == [128, 128, 128, 116]
    assert read(tmp_path / "t") == expected(texts)


# ---- bad output -------------------------------------------------------------------------------


def bad(value: Any) -> Any:
    """Return a function that gives the document 1234 a bad token."""

    def function(numbers: list[int]) -> list[dict[str, Any]]:
        return [{"tokens": [n % 7, value if n == 1234 else 3]} for n in numbers]

    return function


@pytest.mark.parametrize(
    ("value", "words"),
    [(-1, "-1"), (65536, "65536"), (1.5, "1.5"), ("a", "'a'"), (None, "null"), (True, "True")],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_token_that_is_none_names_its_document(
    value: Any, words: str, on_error: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError) as caught:
        optimize(
            bad(value),
            range(2000),
            tmp_path / "t",
            batch_size=100,
            schema=TOKENS,
            on_error=on_error,
            num_workers=0,
        )
    assert "input 1234" in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.row == 1234
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda n: [{"a": 1}] * (len(n) - 1),
            "returned 9 rows for the 10 inputs",
        ),
        (lambda n: [{"a": 1}] * (len(n) + 1), "returned 11 rows for the 10 inputs"),
        (lambda _: [], "returned 0 rows"),
        (lambda n: {"a": [1] * len(n)}, "with batch_size it returns a list of rows"),
        (lambda _: None, "with batch_size it returns a list of rows"),
        (lambda n: [[1, 2]] * len(n), r"gave .* as the row of input 0"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_results_that_do_not_fit_the_inputs(
    function: Any, words: str, on_error: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=words):
        optimize(
            function, range(35), tmp_path / "t", batch_size=10, on_error=on_error, num_workers=0
        )
    assert not (tmp_path / "t").exists()


def test_the_document_that_a_function_fails_on_is_named_or_left_out(tmp_path: Path) -> None:
    texts: list[Any] = documents(300)
    texts[137] = texts[205] = None
    with pytest.raises(SourceError, match=r"raised on input 137: AttributeError") as caught:
        optimize(tokenized, texts, tmp_path / "t", batch_size=50, num_workers=0)
    assert caught.value.row == 137
    with pytest.warns(destrier.DestrierWarning, match="2"):
        written = optimize(
            tokenized, texts, tmp_path / "t", batch_size=50, on_error="skip", num_workers=0
        )
    assert [number for number, _ in written.skipped] == [137, 205]
    assert read(tmp_path / "t") == expected([text for text in texts if text is not None])


def test_a_list_that_fails_only_as_a_whole(tmp_path: Path) -> None:
    def fussy(numbers: list[int]) -> list[dict[str, int]]:
        if len(numbers) > 1:
            raise RuntimeError("too many")
        return [{"n": n} for n in numbers]

    for on_error in ("raise", "skip"):
        with pytest.raises(SourceError, match=r"inputs 0 to 9 together, .* smaller batch_size"):
            optimize(
                fussy, range(20), tmp_path / "t", batch_size=10, on_error=on_error, num_workers=0
            )

    def greedy(numbers: list[int]) -> list[dict[str, int]]:
        raise MemoryError

    with pytest.raises(SourceError, match="memory ran out"):
        optimize(greedy, range(20), tmp_path / "t", batch_size=10, num_workers=0)


def test_an_input_that_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    class Holes(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, number: int) -> int:
            if number == 77:
                raise OSError("gone")
            if number > 99:
                raise IndexError
            return number

        def __getitems__(self, numbers: list[int]) -> list[int]:
            return [self[number] for number in numbers]

    def rows(numbers: list[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"n": numbers})

    with pytest.warns(destrier.DestrierWarning):
        written = optimize(
            rows, Holes(), tmp_path / "t", batch_size=30, on_error="skip", num_workers=0
        )
    assert written.skipped == ((77, "OSError: gone"),)
    assert [row["n"] for row in read(tmp_path / "t")] == [n for n in range(100) if n != 77]


@pytest.mark.parametrize("size", [0, -1, 1.5, "many"])
def test_a_size_that_is_none(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="batch_size"):
        optimize(tokenized, documents(10), tmp_path / "t", batch_size=size)


# ---- continued --------------------------------------------------------------------------------


def test_another_size_is_another_job() -> None:
    texts = documents(10)
    digests = {SequenceSource(tokenized, texts, batch_size=n).digest() for n in (None, 5, 6)}
    assert len(digests) == 3


SCRIPT = """
import time
import pyarrow as pa
from destrier import optimize

texts = ["wörd " * (n % 40) for n in range(4000)]

def tokenized(texts):
    time.sleep(0.05)
    with open({log!r}, "a") as file:
        file.write(f"{{len(texts)}}\\n")
    return [{{"tokens": [*text.encode(), 256]}} for text in texts]

schema = pa.schema([pa.field("tokens", pa.list_(pa.uint16()))])
optimize(tokenized, texts, {uri!r}, batch_size=50, schema=schema, num_workers=2)
"""


def test_a_killed_job_goes_on_with_the_same_lists(tmp_path: Path) -> None:
    script, log, uri = tmp_path / "job.py", tmp_path / "log", tmp_path / "t"
    script.write_text(SCRIPT.format(log=str(log), uri=str(uri)))
    process = subprocess.Popen([sys.executable, script])
    done = tmp_path / "t.writing" / "done"
    until = time.monotonic() + 60
    while not (done.exists() and len(os.listdir(done)) >= 3):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not uri.exists()
    before = len(log.read_text().splitlines())
    subprocess.run([sys.executable, script], check=True)
    sizes = log.read_text().splitlines()
    assert set(sizes) == {"50"}
    assert len(sizes) < before + 80  # it did not begin anew
    assert read(uri) == expected(["wörd " * (n % 40) for n in range(4000)])


# ---- real tokenizers --------------------------------------------------------------------------


def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    texts = [text or "empty" for text in documents(300)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["?"])
    tokenizer.train_from_iterator(texts, trainer)

    def rows(batch: list[str]) -> list[dict[str, Any]]:
        return [{"tokens": made.ids} for made in tokenizer.encode_batch(batch)]

    for workers in (0, 1):
        uri = tmp_path / f"t{workers}"
        optimize(rows, texts, uri, batch_size=50, schema=TOKENS, num_workers=workers)
        found = [tokenizer.decode(row["tokens"]).replace(" ", "") for row in read(uri)]
        assert found == [text.replace(" ", "") for text in texts]


def test_an_encoding_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|end|>": 256},
    )

    def rows(batch: list[str]) -> list[dict[str, Any]]:
        return [{"tokens": [*ids, 256]} for ids in encoding.encode_ordinary_batch(batch)]

    texts = documents(300)
    for workers in (0, 1):
        uri = tmp_path / f"t{workers}"
        optimize(rows, texts, uri, batch_size=50, schema=TOKENS, num_workers=workers)
        assert read(uri) == expected(texts)
