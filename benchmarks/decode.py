"""Decoding alone, and through the loader: the same decoder, threads and images.

JPEGs of 256 by 256 pixels and 25 kB. Each run is a process of its own, on one core or on two, and
every round runs all of them. Alone, threads decode files that lie in memory; the loader reads,
shuffles, decodes and forms batches of 256. The clock starts before the first batch is asked for.

    python benchmarks/decode.py [quick]
"""

from __future__ import annotations

import os
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

from common import fresh, report, save, spread
from pictures import picture_table

ROWS, QUICK_ROWS = 50_000, 8_000
ROUNDS, QUICK_ROUNDS = 5, 3
BATCH = 256


def alone(path: str, decoder: str, cores: int) -> tuple[int, Any]:
    import io

    import lance
    import numpy as np
    import simplejpeg
    from PIL import Image

    def pillow(data: bytes) -> None:
        with Image.open(io.BytesIO(data)) as image:
            np.asarray(image.convert("RGB"))

    def simple(data: bytes) -> None:
        simplejpeg.decode_jpeg(data, "RGB")

    decode = pillow if decoder == "pillow" else simple
    table = lance.dataset(path)
    count = min(table.count_rows(), 20_000)
    files = table.take(list(range(count)), columns=["image"])["image"].to_pylist()

    def some(first: int) -> None:
        for data in files[first::cores]:
            decode(data)

    def run() -> None:
        threads = [threading.Thread(target=some, args=(i,)) for i in range(cores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return count, run


def loader(path: str, decoder: str, cores: int) -> tuple[int, Any]:  # noqa: ARG001
    from destrier import StreamingDataLoader, jpeg

    if decoder == "pillow":
        jpeg._library = lambda: None  # type: ignore[assignment]  # noqa: SLF001
    made = StreamingDataLoader(path, batch_size=BATCH)

    def run() -> None:
        with made:
            for _ in made:
                pass

    return len(made) * BATCH, run


CASES = {"alone": alone, "loader": loader}


def measure(case: str, path: str, decoder: str, cores: str) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    rows, run = CASES[case](path, decoder, int(cores))
    began, cpu = time.perf_counter(), time.process_time()
    run()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    report({"samples_per_s": rows / took, "cpu_us": cpu / rows * 1e6})


def main(*, quick: bool) -> None:
    path = str(picture_table(QUICK_ROWS if quick else ROWS))
    cores = [n for n in (1, 2) if n <= len(os.sched_getaffinity(0))]
    runs: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for decoder, count, case in product(("pillow", "simplejpeg"), cores, CASES):
            result = fresh(Path(__file__), case, path, decoder, str(count))
            runs.setdefault((decoder, count, case), []).append(result)
    out: dict[str, Any] = {}
    for (decoder, count, case), found in runs.items():
        numbers = {key: spread([run[key] for run in found]) for key in found[0]}
        if case == "loader":
            pairs = list(zip(found, runs[decoder, count, "alone"], strict=True))
            for key in found[0]:
                numbers[f"{key}_to_alone"] = spread([mine[key] / base[key] for mine, base in pairs])
        out[f"{decoder}, {count} cores, {case}"] = numbers
    save("decode", out)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(*sys.argv[1:])
    else:
        main(quick="quick" in sys.argv)
