"""Data sets of other formats, made from a seed, and what the benchmarks that read them share.

The original libraries run in ``.venv-peers`` (``make peers``): a script starts itself there for
what they write and read.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DATA, PEERS, fresh, report

ROOT = Path(__file__).parent.parent
SCRATCH = DATA / "scratch"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        members: Of the tars that are linked.
        samples: Of 20 kB, that are streamed.
        images: Of 50 kB, that are converted.
        large: Of 50 kB, while whose conversion the memory is looked at.
        small: Rows of numbers.
        many: Rows that only our own writer makes.
        seconds: That a reader is watched.
        rounds: Of all cases of a kind, interleaved.
    """

    members: int = 100_000
    samples: int = 20_000
    images: int = 10_000
    large: int = 40_000
    small: int = 200_000
    many: int = 2_000_000
    seconds: float = 3.0
    rounds: int = 3


QUICK = Sizes(16_000, 4_000, 2_000, 6_000, 20_000, 200_000, 1.5, 1)


def sizes() -> tuple[Sizes, str]:
    """What the command line asks for, and the ending of the result's name."""
    return (QUICK, "-quick") if "--quick" in sys.argv else (Sizes(), "")


def peers_python() -> str:
    """The interpreter of the peers' environment, made if it is not there."""
    if not (PEERS / ".installed").exists():
        subprocess.run(["make", "-C", str(ROOT), "peers", f"PYTHON={sys.executable}"], check=True)
    if (PEERS / "failed").exists():
        raise SystemExit(f"the original libraries could not be installed in {PEERS}")
    return str(PEERS / "bin" / "python")


def peer_setup() -> None:
    """Make the peers quiet; run in their environment before they are imported."""
    import warnings

    warnings.simplefilter("ignore")
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(SCRATCH / "cache")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(SCRATCH / "cache")
    sys.path.insert(0, str(ROOT / "tests" / "peers"))  # a torchvision that streaming can import


def interleaved(
    script: Path, runs: dict[str, tuple[str, ...]], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Run cases in fresh processes, all of them once a round: by name its results.

    The first item of a run is the interpreter. What was written before reaches the disk first.
    """
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, (python, *arguments) in runs.items():
            os.sync()
            results[name].append(fresh(script, *arguments, python=python))
            print(f"round {number}: {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A place to write to, dropped afterwards."""
    path = SCRATCH / name
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def watch(
    batches: Iterable[Any], rows: Callable[[Any], int], seconds: float, *, warm_rows: int = 0
) -> None:
    """Report rows a second of an endless reader, once what it had read ahead is used up.

    So many rows are read before, at least: memory that a process touches first is slow.
    """
    began = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    first = time.perf_counter() - began
    until, warm = time.perf_counter() + seconds / 4, 0
    while time.perf_counter() < until or warm < warm_rows:
        warm += rows(next(iterator))
    began, count = time.perf_counter(), 0
    until = began + seconds
    while time.perf_counter() < until:
        count += rows(next(iterator))
    report({"first": first, "rows_per_second": count / (time.perf_counter() - began)})


# ---- data -------------------------------------------------------------------------------------


def made(name: str, write: Callable[[Path], None]) -> Path:
    """A data set, written if it is not there."""
    path = DATA / name
    if not path.exists():
        print(f"making {path}", file=sys.stderr, flush=True)
        part = DATA / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        part.rename(path)
    return path


def payloads(count: int, least: int, most: int) -> Iterator[bytes]:
    """Bytes that do not compress, as of images."""
    import numpy as np

    rng = np.random.default_rng(0)
    for size in rng.integers(least, most, count).tolist():
        yield b"\xff\xd8\xff\xe0" + rng.bytes(size - 4)


def tars(count: int, size: int, a_tar: int) -> Path:
    """Tars of images and classes, as WebDataset has them."""

    def write(folder: Path) -> None:
        tar = None
        for number, image in enumerate(payloads(count, size * 3 // 4, size * 5 // 4)):
            if number % a_tar == 0:
                if tar is not None:
                    tar.close()
                tar = tarfile.open(folder / f"{number // a_tar:05}.tar", "w")  # noqa: SIM115
            assert tar is not None
            for ending, data in (("jpg", image), ("cls", b"%d" % (number % 1000))):
                info = tarfile.TarInfo(f"{number:08}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        if tar is not None:
            tar.close()

    return made(f"tars-{count}-{size}", write)


def files(count: int, size: int) -> Path:
    """The same images as files in ten folders."""

    def write(folder: Path) -> None:
        for number in range(10):
            (folder / str(number)).mkdir()
        for number, image in enumerate(payloads(count, size * 3 // 4, size * 5 // 4)):
            (folder / str(number % 10) / f"{number:08}.jpg").write_bytes(image)

    return made(f"files-{count}-{size}", write)


def peer_made(kind: str, count: int, python: str) -> Path:
    """A data set that a peer writes in its environment; ``kind`` is a key of `WRITERS`."""

    def write(folder: Path) -> None:
        fresh(Path(__file__), kind, str(count), str(folder), python=python)

    return made(f"{kind}-{count}", write)


def write_mds_images(count: int, folder: str) -> None:
    from streaming import MDSWriter
    from streaming.base.format.mds import encodings

    class Stored(encodings.JPEG):  # type: ignore[misc]
        """Takes the bytes of a file, where the original takes a decoded image."""

        def encode(self, obj: Any) -> bytes:
            return bytes(obj)

    encodings._encodings["jpeg"] = Stored  # noqa: SLF001
    with MDSWriter(out=folder, columns={"jpeg": "jpeg", "label": "int"}) as writer:
        for number, image in enumerate(payloads(count, 37_500, 62_500)):
            writer.write({"jpeg": image, "label": number % 1000})


def write_mds_small(count: int, folder: str) -> None:
    from streaming import MDSWriter

    columns = {"index": "int", "value": "float64", "text": "str"}
    with MDSWriter(out=folder, columns=columns) as writer:
        for number in range(count):
            writer.write({"index": number, "value": number / 7, "text": f"text of row {number}"})


def _litdata(rows: Iterable[dict[str, Any]], folder: str) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(folder, chunk_bytes="64MB")
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer._merge_no_wait()  # noqa: SLF001


def write_litdata_arrays(count: int, folder: str) -> None:
    """An array keeps the rows out of Arrow: these are classic chunks."""
    import numpy as np

    values = np.random.default_rng(0).random((count, 8), np.float32)
    _litdata(({"index": i, "score": i / 7, "values": values[i]} for i in range(count)), folder)


def write_litdata_rows(count: int, folder: str) -> None:
    """Rows that litdata stores as Arrow."""
    _litdata(({"index": i, "score": i / 7, "text": f"text of {i}"} for i in range(count)), folder)


WRITERS = {
    "mds-images": write_mds_images,
    "mds-small": write_mds_small,
    "litdata-arrays": write_litdata_arrays,
    "litdata-rows": write_litdata_rows,
}

if __name__ == "__main__":
    peer_setup()
    WRITERS[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
    report({})
