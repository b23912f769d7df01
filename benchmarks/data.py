"""Writes the benchmarks' tables, and the same rows in the formats of the peers.

``python benchmarks/data.py`` makes every full-size data set, ``--quick`` the small ones; what is
there already stays. Each format is written once, from the same seed, in an environment that has
its library.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import fresh, report
from formats import made, peer_setup, peers_python
from images import encodings, numbered
from workloads import BLOCK, CLASSES, SMALL_COLUMNS, TABLES, TOKENS, WIDE_COLUMNS

PIECE = 10_000
CHUNK_BYTES = 64_000_000
FORMATS = {
    "small": ("lance", "litdata", "mds"),
    "wide": ("lance", "litdata", "mds"),
    "tokens": ("lance", "litdata", "mds", "tars"),
    "jpeg": ("lance", "litdata", "mds", "tars"),
}
_TAR_BYTES = 50_000_000


def dataset(table: str, format: str, rows: int) -> Path:
    """A data set in a format, written if it is not there."""
    # A Lance table's name ends so, for LanceDB to find it.
    name = f"tables/{table}-{rows}" + (".lance" if format == "lance" else f"-{format}")
    if table == "jpeg":
        distinct_images()
    python = sys.executable if format in ("lance", "tars") else peers_python()

    def write(folder: Path) -> None:
        fresh(Path(__file__), "--write", table, format, str(rows), str(folder), python=python)

    return made(name, write)


# ---- rows -------------------------------------------------------------------------------------


def pieces(table: str, rows: int) -> Iterator[dict[str, Any]]:
    """The rows of a table, some at a time: a 2-d array of values, or bytes, and labels."""
    images = distinct_images() if table == "jpeg" else []
    for start in range(0, rows, PIECE):
        count = min(PIECE, rows - start)
        numbers = np.arange(start, start + count)
        labels = numbers * CLASSES // rows
        rng = np.random.default_rng([0, start])
        if table == "small":
            yield {"values": rng.random((count, SMALL_COLUMNS), np.float32), "label": labels}
        elif table == "wide":
            values = rng.random((count, WIDE_COLUMNS), np.float32)
            values[:, 0] = labels  # the class is one of the columns
            yield {"values": values}
        elif table == "tokens":
            values = rng.integers(0, TOKENS, (count, BLOCK), np.int32)
            values[:, 0] = labels  # the class is a block's first token
            yield {"values": values}
        else:
            chosen = rng.integers(0, len(images), count).tolist()
            files = [numbered(images[k], start + i) for i, k in enumerate(chosen)]
            yield {"values": files, "label": labels}


def distinct_images() -> list[bytes]:
    """The images that the rows choose from."""
    import pyarrow as pa

    def write(folder: Path) -> None:
        table = pa.table({"image": pa.array(list(encodings()), pa.binary())})
        with pa.ipc.new_file(folder / "images.arrow", table.schema) as writer:
            writer.write_table(table)

    with pa.ipc.open_file(made("tables/images", write) / "images.arrow") as file:
        return list(file.read_all()["image"].to_pylist())


def samples(table: str, rows: int) -> Iterator[dict[str, Any]]:
    """The rows of a table, one at a time."""
    for piece in pieces(table, rows):
        labels = piece.get("label")
        for i, value in enumerate(piece["values"]):
            yield {"value": value} if labels is None else {"value": value, "label": int(labels[i])}


# ---- formats ----------------------------------------------------------------------------------


def write_lance(table: str, rows: int, folder: str) -> None:
    import lance
    import pyarrow as pa

    def batch(piece: dict[str, Any]) -> pa.RecordBatch:
        values = piece["values"]
        label = {"label": pa.array(piece["label"])} if "label" in piece else {}
        if table == "tokens":
            flat = pa.array(values.reshape(-1))
            return pa.record_batch({"tokens": pa.FixedSizeListArray.from_arrays(flat, BLOCK)})
        if table == "jpeg":
            field = pa.field("image", pa.binary(), metadata={"content_type": "image/jpeg"})
            schema = pa.schema([field, ("label", pa.int64())])
            return pa.record_batch({"image": pa.array(values, pa.binary()), **label}, schema)
        letter = "f" if table == "small" else "c"
        columns = {f"{letter}{i}": pa.array(values[:, i]) for i in range(values.shape[1])}
        return pa.record_batch({**columns, **label})

    batches = map(batch, pieces(table, rows))
    first = next(batches)

    def all_batches() -> Iterator[pa.RecordBatch]:
        yield first
        yield from batches

    reader = pa.RecordBatchReader.from_batches(first.schema, all_batches())
    lance.write_dataset(reader, folder, mode="overwrite")


def write_litdata(table: str, rows: int, folder: str) -> None:
    """Chunks of 64 MB; token blocks as litdata's TokensLoader wants them, one flat stream."""
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    if table == "tokens":
        per_chunk = CHUNK_BYTES // (4 * BLOCK) * BLOCK
        writer = BinaryWriter(folder, chunk_size=per_chunk, item_loader=TokensLoader())
        items: Iterator[Any] = (torch.from_numpy(s["value"]) for s in samples(table, rows))
    else:
        writer = BinaryWriter(folder, chunk_bytes=CHUNK_BYTES)
        items = samples(table, rows)
        if table == "small":  # rows of plain numbers it keeps as Arrow, which it reads faster
            items = (
                {**{f"f{i}": float(v) for i, v in enumerate(s["value"])}, "label": s["label"]}
                for s in samples(table, rows)
            )
    for number, item in enumerate(items):
        writer[number] = item
    writer.done()
    writer._merge_no_wait()  # noqa: SLF001 - what optimize does at its end


def write_mds(table: str, rows: int, folder: str) -> None:
    from streaming import MDSWriter

    value = {
        "small": f"ndarray:float32:{SMALL_COLUMNS}",
        "wide": f"ndarray:float32:{WIDE_COLUMNS}",
        "tokens": f"ndarray:int32:{BLOCK}",
        "jpeg": "bytes",
    }[table]
    columns = {"value": value}
    if table in ("small", "jpeg"):
        columns["label"] = "int"
    with MDSWriter(out=folder, columns=columns, size_limit=CHUNK_BYTES) as writer:
        for sample in samples(table, rows):
            writer.write(sample)


def write_tars(table: str, rows: int, folder: str) -> None:
    """Tars of 50 MB; the label is a member of its own, but a token block's first token."""
    tar, written, count = None, 0, 0
    for number, sample in enumerate(samples(table, rows)):
        if tar is None or written > _TAR_BYTES:
            if tar is not None:
                tar.close()
            tar = tarfile.open(Path(folder) / f"{count:05}.tar", "w")  # noqa: SIM115
            written, count = 0, count + 1
        members = {"bin" if table == "tokens" else "jpg": bytes(sample["value"])}
        if "label" in sample:
            members["cls"] = b"%d" % sample["label"]
        for ending, content in members.items():
            info = tarfile.TarInfo(f"{number:08}.{ending}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            written += len(content) + 1024
    if tar is not None:
        tar.close()


WRITERS: dict[str, Callable[[str, int, str], None]] = {
    "lance": write_lance,
    "litdata": write_litdata,
    "mds": write_mds,
    "tars": write_tars,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small data sets")
    parser.add_argument("--write", nargs=4, metavar=("TABLE", "FORMAT", "ROWS", "FOLDER"))
    options = parser.parse_args()
    if options.write:
        table, format, rows, folder = options.write
        if format in ("litdata", "mds"):
            peer_setup()
        WRITERS[format](table, int(rows), folder)
        report({})
        return
    for table in TABLES.values():
        for format in FORMATS[table.name]:
            print(dataset(table.name, format, table.quick if options.quick else table.rows))


if __name__ == "__main__":
    main()
