"""Run with litdata itself: writes datasets of every kind, and says what litdata reads from them."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import polars as pl
import torch
from litdata import StreamingDataset, TokensLoader
from litdata.streaming.item_loader import ParquetLoader
from litdata.streaming.serializers import BytesSerializer
from litdata.streaming.temporal import TemporalArrayLoader
from litdata.streaming.writer import BinaryWriter, index_parquet_dataset
from litdata.types import Audio, File, Graph, Image, Jpeg, Mesh, Nifti, Pdf, Text, Tiff, Video
from litdata.utilities.encryption import FernetEncryption, RSAEncryption
from litdata.utilities.keys_index import write_keys_store
from PIL import Image as PILImage

MEDIA = (
    *("jpeg", "jpeg_array", "image", "video", "audio", "nifti", "mesh", "pdf", "tifffile"),
    *("tiff", "file", "graph", "png", "jpg"),
)
RAW = {name: BytesSerializer() for name in MEDIA}  # media as they were stored


def plain(value):  # noqa: PLR0911 - a table of types
    """A value as JSON, with all that distinguishes it."""
    if isinstance(value, torch.Tensor):
        return {**plain(value.numpy()), "tensor": True}
    if isinstance(value, np.ndarray):
        value = value.astype(value.dtype.newbyteorder("="))
        data = base64.b64encode(value.tobytes()).decode()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "data": data}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[str(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple | deque):
        return [plain(item) for item in value]
    if isinstance(value, PILImage.Image):
        data = base64.b64encode(value.tobytes()).decode()
        return {"mode": value.mode, "size": list(value.size), "data": data}
    return value


def read(folder, **options):
    options.setdefault("serializers", RAW)
    dataset = StreamingDataset(str(folder), **options)
    return [plain(dataset[i]) for i in range(len(dataset))]


class Cases:
    def __init__(self, root):
        self.root = Path(root)
        self.rows = {}

    def write(self, name, items, *, expect=True, merge=True, rank=None, **options):
        options.setdefault("chunk_size", 5)
        folder = self.root / name
        if rank is not None:
            os.environ["DATA_OPTIMIZER_GLOBAL_RANK"] = str(rank)
        writer = BinaryWriter(str(folder), **options)
        for number, item in enumerate(items):
            writer[number] = item
        writer.done()
        os.environ.pop("DATA_OPTIMIZER_GLOBAL_RANK", None)
        if merge:
            writer._merge_no_wait()
        if expect is True:
            self.rows[name] = read(folder)
        elif expect is not False:
            self.rows[name] = read(folder, **expect)
        return folder


def scalars(i):
    return {
        "id": i - 3,
        "x": i / 3,
        "ok": i % 2 == 0,
        "text": f"ä{i}" * (i % 4),
        "raw": bytes([i]) * (i % 5),
        "tag": np.array([i, i + 1], np.uint8),  # an array keeps the rows out of Arrow
    }


def arrays(i):
    return {
        "same1": np.arange(3, dtype=np.int32) + i,
        "ragged1": np.arange(i % 4, dtype=np.float32),
        "same2": np.arange(6, dtype=np.float64).reshape(2, 3) * i,
        "ragged2": np.ones((1 + i % 2, 2), np.uint16) * i,
        "ranks": np.ones((2,) * (2 + i % 2), np.int8),
        "bools": np.array([[i % 2, 1, 0]], bool),
        "halves": np.array([i / 7, 1], np.float16),
        "complexes": np.array([i + 1j, 2.5], np.complex64),
        "complexes2": np.array([[i + 1j, 2.5]], np.complex128),
        "tensor1": torch.arange(4, dtype=torch.int16) * i,
        "tensor2": torch.arange(4).reshape(2, 2) * i,
        "tensor0": torch.tensor(i, dtype=torch.float32),
        "tensorr": torch.zeros(i % 3, 2, dtype=torch.bool),
        "words": torch.tensor([i, 65535], dtype=torch.uint16),
        "large": np.array([2**64 - 1 - i, 5], np.uint64),
    }


def nested(i):
    return {
        "a": {"b": i, "c": {"d": np.arange(2) + i, "e": f"e{i}"}},
        "pair": np.array([i]),
        "tags": [f"t{k}" for k in range(i % 3)],
        "numbers": list(range(i % 4)),
        "mixed": [1, "x", None, {"k": [i / 2]}],
        "records": [{"n": k, "s": "ß"} for k in range(i % 3)],
    }


def jpeg(i):
    buffer = io.BytesIO()
    PILImage.new("RGB", (8 + i, 6), (i * 9 % 256, 3, 4)).save(buffer, "JPEG")
    return buffer.getvalue()


def media(i):
    return {
        "jpeg": Jpeg(bytes=jpeg(i)),
        "image": Image(bytes=jpeg(i), path="x.png"),
        "video": Video(bytes=b"video" * i, path="x.webm"),
        "audio": Audio(bytes=b"audio" * i),
        "nifti": Nifti(bytes=b"nifti", path="x.nii.gz"),
        "mesh": Mesh(bytes=b"mesh", path="x.ply"),
        "pdf": Pdf(bytes=b"%PDF"),
        "file": File(bytes=b"file" * i, path="x.xyz"),
        "text": Text(text=f"ü{i}"),
        "pil": PILImage.new("L", (2, 1 + i % 2), i),
        "label": i,
    }


def row(i):
    return {
        "id": i,
        "text": f"täxt {i}" * (i % 3),
        "score": i / 7,
        "flag": i % 2 == 1,
        "raw": bytes([i % 256]) * (i % 4),
        "tags": [f"t{k}" for k in range(i % 3)],
        "inner": {"n": i, "l": [[i], []]},
    }


def drifting(i):
    """The first chunk knows neither `late` nor a value of `seldom`."""
    item = {"id": i, "seldom": None if i < 7 else f"s{i}", "inner": {"a": i}}
    if i >= 6:
        item["late"] = i / 2
        item["inner"] = {"a": i, "b": [i]}
    return item


def temporal(i):
    frames = 3 + i % 3
    return {
        "features": np.arange(frames * 2, dtype=np.float32).reshape(frames, 2) + i,
        "score": torch.arange(frames, dtype=torch.float32),
        "valid": np.arange(frames) % 2 == 0,
        "wide": (np.arange(frames) * i).astype(">i8"),
    }


def write_all(root):
    cases = Cases(root)
    cases.write("scalars", map(scalars, range(23)))
    cases.write("arrays", map(arrays, range(12)))
    cases.write("nested", map(nested, range(12)))
    cases.write("media", map(media, range(12)))
    cases.write("tuple", [(i, f"s{i}", {"x": np.ones(2) * i}) for i in range(7)])
    cases.write("list", [[np.ones((2, 2)) * i, i] for i in range(7)])
    cases.write("single", [np.full((2, 2), i) for i in range(7)])
    cases.write("number", range(7))
    cases.write(
        "containers",
        [
            (OrderedDict(b=i, a=1.5), deque([i, "x"], maxlen=3), defaultdict(list, k=b"v"), {5: i})
            for i in range(7)
        ],
    )
    cases.write("pickle", [(i, None, np.float32(i)) for i in range(4)])
    cases.write("graph", [(Graph(x=torch.ones(i + 1, 2)), i) for i in range(4)])
    images = [PILImage.open(io.BytesIO(jpeg(k))) for k in range(3)]
    cases.write("jpegs", [(images[: 1 + i % 3], i) for i in range(4)])
    tiff = Path(root) / "x.tiff"
    PILImage.new("L", (2, 2)).save(tiff)
    cases.write("tiff", [(Tiff(path=str(tiff)), str(tiff)) for i in range(3)], expect=False)

    late = [{"v": np.ones(2 if i < 5 else 3), "w": [i] if i < 5 else [i / 2]} for i in range(7)]
    cases.write("late", late, expect=False)

    cases.write("framed", map(arrays, range(12)), compression="zstd", compression_batch_size=2)
    cases.write("framed9", map(scalars, range(23)), compression="zstd:9")
    cases.write("sample", map(arrays, range(12)), compression="zstd", compression_level="sample")
    whole = {"compression": "zstd", "compression_level": "chunk"}
    cases.write("whole", map(arrays, range(12)), expect=False, **whole)
    cases.rows["whole"] = cases.rows["arrays"]  # litdata would replace the files that it reads

    for level in ("sample", "chunk"):
        fernet = FernetEncryption(password="secret", level=level)
        options = {"encryption": fernet}
        cases.write(f"fernet-{level}", map(scalars, range(7)), expect=options, **options)
        fernet.save(str(cases.root / f"fernet-{level}.key"))
    rsa = RSAEncryption(password="secret", level="sample")
    small = [np.arange(i % 3) for i in range(4)]
    cases.write("rsa-sample", small, expect={"encryption": rsa}, encryption=rsa)
    rsa.save(str(cases.root / "rsa-sample.key"))
    rsa = RSAEncryption(password="secret", level="chunk")
    cases.write("rsa-chunk", small, expect={"encryption": rsa}, encryption=rsa, chunk_size=2)
    rsa.save(str(cases.root / "rsa-chunk.key"))
    RSAEncryption(password="secret", level="chunk").save(str(cases.root / "rsa-other.key"))
    fernet = FernetEncryption(password="secret", level="chunk")
    both = {"encryption": fernet, **whole}
    cases.write("fernet-whole", map(scalars, range(7)), expect=False, **both)
    cases.rows["fernet-whole"] = cases.rows["fernet-chunk"]
    fernet.save(str(cases.root / "fernet-whole.key"))

    cases.write("rows", map(row, range(600)), chunk_size=300)
    cases.write("rows-zstd", map(row, range(23)), compression="zstd")
    cases.write("rows-drift", map(drifting, range(12)))
    for rank, number in enumerate((1, 0.5)):
        lists = [{"id": i, "x": [number]} for i in range(3)]
        cases.write("rows-conflict", lists, rank=rank, merge=rank == 1, expect=False)

    for kind, wrap in (("numpy", np.asarray), ("tensor", torch.tensor)):
        documents = [wrap(np.arange(3 + i * 5 % 11, dtype=np.int32) + i) for i in range(20)]
        options = {"item_loader": TokensLoader(), "chunk_size": 40}
        expect = {"item_loader": TokensLoader(block_size=4)}
        cases.write(f"tokens-{kind}", documents, expect=expect, **options)
        cases.rows[f"documents-{kind}"] = [plain(d) for d in documents]
    whole_tokens = {**options, **whole, "expect": False}
    cases.write("tokens-whole", documents, **whole_tokens)

    loader = TemporalArrayLoader(field_groups=[["score", "valid"]])
    expect = {"item_loader": TemporalArrayLoader(), "serializers": None}
    cases.write("temporal", map(temporal, range(12)), expect=expect, item_loader=loader)

    folder = cases.write("keyed", map(scalars, range(12)))
    write_keys_store(str(folder), [f"k{i * 7 % 12}" for i in range(12)], num_shards=2)
    folder = cases.write("numbered", map(scalars, range(12)), expect=False)
    write_keys_store(str(folder), [100 - i for i in range(12)])

    for rank in range(11):
        cases.write("parts", [scalars(rank)], merge=False, expect=False, rank=rank)

    folder = cases.root / "parquet"
    folder.mkdir()
    for part in range(3):
        frame = pl.DataFrame({"i": [part, 5], "s": ["a", None], "l": [[1, part], []]})
        frame.write_parquet(folder / f"p{2 - part}.parquet")
    index_parquet_dataset(str(folder), num_workers=1)
    cases.rows["parquet"] = read(folder, item_loader=ParquetLoader())
    return cases.rows


def read_all(root):
    """What litdata reads from each dataset below a folder."""
    rows = {}
    for folder in sorted(Path(root).iterdir()):
        index = json.loads((folder / "index.json").read_text())
        tokens = index["config"]["item_loader"] == "TokensLoader"
        options = {"item_loader": TokensLoader(block_size=4)} if tokens else {}
        rows[folder.name] = read(folder, **options)
    return rows


def main():
    rows = {"write": write_all, "read": read_all}[sys.argv[1]](sys.argv[2])
    print()  # after what litdata printed
    Path(sys.argv[3]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
