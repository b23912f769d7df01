"""Token blocks: plans of many documents, waste, and tokens a second.

Plans are of a table of counts alone, with lengths drawn as below and no tokens: made once with an
empty cache folder, and again where the lengths are known, with what is read at 99 % of an epoch.
Memory is what the process has of its own, without the mapped file. Streams deliver blocks of 2,048
tokens from documents with lognormal lengths (median 400, sigma 1), and the same documents as they
are; blocks that a table holds already come beside LitData's TokensLoader, with 0 and 2 workers, of
which the better counts. Rates are those of endless reading, after a warm-up. Every run is a fresh
process; rounds are interleaved. Files are in the system's cache. ``--quick`` measures little, and
little can be told from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DATA, fresh, report, save, spread, timed
from formats import interleaved, made, peer_setup, peers_python, scratch, watch

BLOCK = 2048
BATCH = 32
MEDIAN, SIGMA = 400, 1.0
HOW = {"concatenate": {}, "best_fit": {"how": "best_fit", "pad_id": 0}}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        planned: Documents of the plans.
        documents: That are streamed.
        seconds: That a reader is watched.
        rounds: Of all cases, interleaved.
    """

    planned: int = 100_000_000
    documents: int = 1_000_000
    seconds: float = 5.0
    rounds: int = 3


QUICK = Sizes(2_000_000, 50_000, 1.5, 1)


# ---- data -------------------------------------------------------------------------------------


def lengths(rng: Any, count: int) -> Any:
    import numpy as np

    return np.maximum(1, rng.lognormal(np.log(MEDIAN), SIGMA, count)).astype(np.int64)


def counts_table(count: int) -> str:
    """A table of documents that have lengths, but no tokens."""

    def write(folder: Path) -> None:
        import lance
        import numpy as np
        import pyarrow as pa

        schema = pa.schema([("tokens", pa.list_(pa.int32())), ("tokens_count", pa.int64())])
        rng = np.random.default_rng(0)

        def batches() -> Iterator[Any]:
            for start in range(0, count, 1 << 20):
                sizes = lengths(rng, min(1 << 20, count - start))
                ends = pa.array(np.zeros(len(sizes) + 1, np.int32))
                lists = pa.ListArray.from_arrays(ends, pa.array([], pa.int32()))
                yield pa.record_batch([lists, pa.array(sizes)], schema=schema)

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        lance.write_dataset(reader, str(folder / "t.lance"), max_rows_per_file=10_000_000)

    return str(made(f"counts-{count}", write) / "t.lance")


def documents_table(count: int) -> str:
    """A table of documents with their tokens."""

    def write(folder: Path) -> None:
        import lance
        import numpy as np
        import pyarrow as pa

        schema = pa.schema([("tokens", pa.list_(pa.int32())), ("tokens_count", pa.int64())])
        rng = np.random.default_rng(0)

        def batches() -> Iterator[Any]:
            for start in range(0, count, 20_000):
                sizes = lengths(rng, min(20_000, count - start))
                ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
                tokens = rng.integers(1, 50_000, ends[-1], np.int32)
                lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens))
                yield pa.record_batch([lists, pa.array(sizes)], schema=schema)

        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, batches()), str(folder / "t.lance")
        )

    return str(made(f"documents-{count}", write) / "t.lance")


def blocks_table(count: int) -> str:
    """A table of blocks."""

    def write(folder: Path) -> None:
        import lance
        import numpy as np
        import pyarrow as pa

        schema = pa.schema([("tokens", pa.list_(pa.int32(), BLOCK))])
        rng = np.random.default_rng(0)

        def batches() -> Iterator[Any]:
            for start in range(0, count, 4096):
                tokens = rng.integers(1, 50_000, min(4096, count - start) * BLOCK, np.int32)
                lists = pa.FixedSizeListArray.from_arrays(pa.array(tokens), BLOCK)
                yield pa.record_batch([lists], schema=schema)

        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, batches()), str(folder / "t.lance")
        )

    return str(made(f"blocks-{count}", write) / "t.lance")


def litdata_write_case(count: str, folder: str) -> None:
    """The same number of tokens in chunks of LitData's."""
    peer_setup()
    import numpy as np
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(folder, chunk_size=BLOCK * 4096, item_loader=TokensLoader(BLOCK))
    rng = np.random.default_rng(0)
    for number in range(int(count) // 64):
        writer[number] = rng.integers(1, 50_000, BLOCK * 64, np.int32)
    writer.done()
    writer._merge_no_wait()  # noqa: SLF001
    report({})


# ---- cases ------------------------------------------------------------------------------------


def own_memory() -> int:
    """Bytes of the process that are of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def plan_case(path: str, how: str, position: str) -> None:
    import numpy as np

    from destrier import Packed, StreamingDataset
    from destrier.topology import ALONE

    before = own_memory()

    def look() -> Any:
        packed = Packed(path, block_size=BLOCK, **HOW[how])
        stream = StreamingDataset(packed).stream(256)
        assert stream.packed is not None
        if float(position):
            steps = stream.steps(256, ALONE, "drop")
            samples = steps.share(int(float(position) * len(steps)))
            addresses = stream.rows.offsets(stream.order(0).rows(samples))
            assert len(np.unique(stream.packed.blocks.pieces(addresses).block)) == 256
        return stream

    seconds, stream = timed(look)
    grown = own_memory() - before
    report({"seconds": seconds, "memory_mb": grown / 1e6, "blocks": stream.count})


def waste_case(count: str) -> None:
    import numpy as np

    from destrier.packing.best_fit import pack_window

    rng = np.random.default_rng(0)
    blocks = pieces = least = tokens = 0
    for _ in range(int(count) // 4096):
        sizes = lengths(rng, 4096)
        window = pack_window(sizes, BLOCK)
        blocks += len(window.bounds) - 1
        pieces += len(window.document)
        least += int((-(-sizes // BLOCK)).sum())
        tokens += int(sizes.sum())
    report({"waste": 1 - tokens / (blocks * BLOCK), "cut": (pieces - least) / pieces})


def stream_case(path: str, how: str, dtype: str, seconds: str) -> None:
    import destrier

    if how == "documents":
        dataset = destrier.StreamingDataset(path, columns=["tokens"])
        loader = destrier.StreamingDataLoader(dataset, batch_size=3 * BATCH)
    elif how == "blocks":
        loader = destrier.StreamingDataLoader(path, batch_size=BATCH)
    else:
        packed = destrier.Packed(path, block_size=BLOCK, dtype=dtype, **HOW[how])
        loader = destrier.StreamingDataLoader(packed, batch_size=BATCH)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    def tokens(batch: Any) -> int:
        (value,) = batch.values()
        return sum([len(t) for t in value]) if isinstance(value, list) else value.numel()

    watch(batches(), tokens, float(seconds))


def litdata_case(folder: str, workers: str, seconds: str) -> None:
    peer_setup()
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        folder, item_loader=TokensLoader(BLOCK), shuffle=True, drop_last=True
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=int(workers))

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    watch(batches(), lambda batch: int(batch.numel()), float(seconds))


# ---- all of it --------------------------------------------------------------------------------


def plans(script: Path, count: int, rounds: int) -> dict[str, Any]:
    path = counts_table(count)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for how in HOW:
            with scratch("lengths") as cache:
                os.environ["DESTRIER_CACHE"] = str(cache)
                for name, position in (("made", "0"), ("again", "0"), ("resumed", "0.99")):
                    found = fresh(script, "plan", path, how, position)
                    results.setdefault(f"{how}, {name}", []).append(found)
                    print(f"{how}, {name}: {found}", file=sys.stderr, flush=True)
    return {n: {key: spread([r[key] for r in rs]) for key in rs[0]} for n, rs in results.items()}


def main() -> None:
    size, ending = (QUICK, "-quick") if "--quick" in sys.argv else (Sizes(), "")
    script, ours, peers = Path(__file__), sys.executable, peers_python()
    table, blocks = documents_table(size.documents), blocks_table(size.documents // 4)
    chunks = made(
        f"litdata-tokens-{size.documents // 4}",
        lambda folder: report(
            fresh(script, "litdata-write", str(size.documents // 4), str(folder), python=peers)
        ),
    )
    seconds = str(size.seconds)
    runs = {
        "documents": (ours, "stream", table, "documents", "", seconds),
        "fixed blocks": (ours, "stream", blocks, "blocks", "", seconds),
        **{
            f"{how}, {dtype}": (ours, "stream", table, how, dtype, seconds)
            for how in HOW
            for dtype in ("int32", "int64")
        },
        **{
            f"litdata, {workers} workers": (peers, "litdata", str(chunks), workers, seconds)
            for workers in ("0", "2")
        },
    }
    os.environ["DESTRIER_CACHE"] = str(DATA / "lengths")
    results = interleaved(script, runs, size.rounds)

    def rate(prefix: str, i: int) -> float:
        return max(r[i]["rows_per_second"] for n, r in results.items() if n.startswith(prefix))

    ratios = {
        f"{one} to {other}": spread([rate(one, i) / rate(other, i) for i in range(size.rounds)])
        for one, other in (
            ("concatenate, int32", "documents"),
            ("best_fit, int32", "documents"),
            ("fixed blocks", "litdata"),
        )
    }
    save(
        f"packing{ending}",
        {
            "planned": size.planned,
            "documents": size.documents,
            "plans": plans(script, size.planned, size.rounds),
            "best_fit": fresh(script, "waste", str(min(size.documents, 200_000))),
            "tokens_per_second": {
                name: spread([r["rows_per_second"] for r in rs]) for name, rs in results.items()
            },
            "ratios": ratios,
        },
    )


CASES = {
    "plan": plan_case,
    "waste": waste_case,
    "stream": stream_case,
    "litdata-write": litdata_write_case,
    "litdata": litdata_case,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        CASES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
