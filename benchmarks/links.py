"""Links: how fast tars are linked, and how fast a stream reads what they link to.

100,000 members of plain tars are linked in one process and by 2 workers. Images of about 20 kB, as
they are on disk, are then delivered in batches of 256, shuffled: by our loader from a link to the
tars, from the same data in binary and in blob columns, and by webdataset (shuffling shards, and
1,000 samples in memory); and from a link to a folder of the same images, and by LitData's
StreamingRawDataset. Both peers with 0 and 2 workers, of which the better counts. Rates are those
of endless reading, after a warm-up. Every run is a fresh process; rounds are interleaved. Files are
in the system's cache. ``--quick`` measures little, and little can be told from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import DATA, fresh, report, save, spread, timed
from formats import files, interleaved, peer_setup, peers_python, scratch, sizes, tars, watch

BATCH = 256
SIZE = 20_000


def link_case(source: str, workers: str, members: str) -> None:
    from destrier import link

    with scratch("link.lance") as path:
        seconds, written = timed(lambda: link(source, path, num_workers=int(workers)))
    assert written.rows * 2 == int(members)
    report({"members_per_second": int(members) / seconds, "seconds": seconds})


def table_case(kind: str, source: str, path: str) -> None:
    """Make a table to stream from."""
    import destrier
    from destrier.writing import layout

    if kind == "blob":
        layout._BLOB_BYTES = 0  # noqa: SLF001 - in this process, which writes by itself
    function = destrier.link if kind == "link" else destrier.convert
    # LitData leaves its index among the files.
    options = {} if any(Path(source).glob("*.tar")) else {"pattern": "*.jpg"}
    function(source, path, num_workers=0, mode="overwrite", **options)
    report({})


def destrier_case(path: str, column: str, seconds: str) -> None:
    from destrier import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(path, columns=[column])
    loader = StreamingDataLoader(dataset, batch_size=BATCH, format="arrow")

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    watch(batches(), lambda batch: int(batch.num_rows), float(seconds))


def webdataset_case(folder: str, workers: str, seconds: str) -> None:
    peer_setup()
    import webdataset as wds

    urls = sorted(map(str, Path(folder).glob("*.tar")))
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls))
        .repeat()
        .shuffle(1000)
        .to_tuple("jpg")
        .batched(BATCH, collation_fn=None)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=int(workers))
    watch(loader, len, float(seconds))


def raw_case(folder: str, workers: str, seconds: str) -> None:
    peer_setup()
    from litdata import StreamingRawDataset
    from torch.utils.data import DataLoader

    with scratch("raw") as cache:
        dataset = StreamingRawDataset(folder, cache_dir=str(cache))
        loader = DataLoader(
            dataset,
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            collate_fn=list,
            num_workers=int(workers),
            persistent_workers=workers != "0",
        )

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        watch(batches(), len, float(seconds))


def tables(sources: dict[str, Path], count: int) -> dict[str, str]:
    """The tables that are streamed; links are made anew, for files may have been."""
    paths = {}
    for name, kind, source in (
        ("link-tars", "link", "tars"),
        ("link-files", "link", "files"),
        ("binary", "binary", "tars"),
        ("blob", "blob", "tars"),
    ):
        path = DATA / f"{name}-{count}.lance"
        if kind == "link" or not path.exists():
            fresh(Path(__file__), "table", kind, str(sources[source]), str(path))
        paths[name] = str(path)
    return paths


def main() -> None:
    size, ending = sizes()
    script, peers, ours = Path(__file__), peers_python(), sys.executable
    many = str(tars(size.members // 2, 2_000, 5_000))
    sources = {"tars": tars(size.samples, SIZE, 2_000), "files": files(size.samples, SIZE)}
    table = tables(sources, size.samples)
    linking = {
        f"link, {where}": (ours, "link", many, workers, str(size.members))
        for where, workers in (("in one process", "0"), ("2 workers", "2"))
    }
    seconds = str(size.seconds)
    streams = {
        "link to tars": (ours, "destrier", table["link-tars"], "jpg", seconds),
        "blob column": (ours, "destrier", table["blob"], "jpg", seconds),
        "binary column": (ours, "destrier", table["binary"], "jpg", seconds),
        "link to files": (ours, "destrier", table["link-files"], "image", seconds),
    }
    for workers in ("0", "2"):
        name = f"{workers} workers"
        tar, raw = str(sources["tars"]), str(sources["files"])
        streams[f"webdataset, {name}"] = (peers, "webdataset", tar, workers, seconds)
        streams[f"litdata raw, {name}"] = (peers, "raw", raw, workers, seconds)
    results = interleaved(script, {**linking, **streams}, size.rounds)

    def rate(prefix: str, i: int) -> float:
        return max(r[i]["rows_per_second"] for n, r in results.items() if n.startswith(prefix))

    ratios = {
        f"{one} to {other}": spread([rate(one, i) / rate(other, i) for i in range(size.rounds)])
        for one, other in (
            ("link to tars", "webdataset"),
            ("link to files", "litdata raw"),
            ("link to tars", "blob column"),
            ("link to tars", "binary column"),
        )
    }
    runs = {n: {key: spread([r[key] for r in rs]) for key in rs[0]} for n, rs in results.items()}
    save(
        f"links{ending}",
        {
            "members": size.members,
            "samples": size.samples,
            "sample_bytes": SIZE,
            "link": {name: runs[name] for name in linking},
            "streams": {name: runs[name] for name in streams},
            "ratios": ratios,
        },
    )


CASES = {
    "link": link_case,
    "table": table_case,
    "destrier": destrier_case,
    "webdataset": webdataset_case,
    "raw": raw_case,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        CASES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
