"""Every loader at its best honest setting, as an endless iterator of batches.

A loader is a function of a `Job` that imports what it needs and returns a function that builds it:
what the latter takes until the first batch is the time to first batch. Each batch is
``(labels, payload)``: what was delivered, as the loader hands it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from formats import peer_setup
from images import crop, finished, own_decoder
from workloads import BLOCK, KEPT_BELOW, WORKLOADS, Workload

Batch: TypeAlias = "tuple[np.ndarray, Any]"
Build: TypeAlias = Callable[[], Iterator[Batch]]


@dataclass(frozen=True)
class Case:
    """A loader with its setting.

    Attributes:
        loader: Key of `LOADERS`.
        workers: Processes that load.
        decoder: ``"ours"`` or ``"pillow"``, where images are decoded.
    """

    loader: str
    workers: int
    decoder: str = "ours"

    def shown(self, workload: Workload) -> str:
        """Its name in tables."""
        words = [LOADERS[self.loader].title]
        if workload.decodes and not LOADERS[self.loader].ours:
            words.append({"ours": "our decoder", "pillow": "its decoder"}[self.decoder])
        if not LOADERS[self.loader].ours:
            words.append(f"{self.workers} workers")
        return ", ".join(words)


@dataclass(frozen=True)
class Job:
    """A case, on data.

    Attributes:
        workload: What is asked.
        case: Of which loader.
        path: The data set in the loader's format.
        seed: Of the order.
    """

    workload: Workload
    case: Case
    path: str
    seed: int

    def finisher(self) -> Callable[[Any], Any]:
        """What is done to each value of a row, in loaders that work row by row."""
        decoder = "pillow" if self.case.decoder == "pillow" else own_decoder()
        return Finish(self.workload.images, decoder, self.seed)


class Finish:
    """From a stored value to what the workload asks for; may travel to a worker process."""

    def __init__(self, images: str | None, decoder: str, seed: int) -> None:
        self.images = images
        self.decoder = decoder
        self.rng = np.random.default_rng(seed)

    def __call__(self, value: Any) -> Any:
        """The value, decoded or cropped if that is asked for."""
        if self.images is None:
            return value
        return finished(value, self.images, self.decoder, self.rng)


def touch(payload: Any) -> int:
    """Read a byte of every 4 KiB page of a batch: a mapping that nobody reads is no delivery."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return int(np.frombuffer(payload, np.uint8)[::4096].sum())
    if isinstance(payload, dict):
        return sum(map(touch, payload.values()))
    if isinstance(payload, list | tuple):
        return sum(map(touch, payload))
    if hasattr(payload, "numpy"):
        payload = payload.numpy()
    return int(np.ascontiguousarray(payload).reshape(-1).view(np.uint8)[::4096].sum())


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


# ---- ours -------------------------------------------------------------------------------------


def destrier(job: Job, clump: int | None = None) -> Build:
    from destrier import StreamingDataLoader, StreamingDataset

    load = job.workload

    def cropped(batch: Any, seeds: Any) -> Any:
        import torch

        images = [
            crop(np.ascontiguousarray(image.numpy().transpose(1, 2, 0)), np.random.default_rng(s))
            for image, s in zip(batch["image"], seeds.tolist(), strict=True)
        ]
        return {"image": torch.from_numpy(np.stack(images)), "label": batch["label"]}

    def build() -> Iterator[Batch]:
        dataset = StreamingDataset(
            job.path,
            columns=None if load.columns is None else list(load.columns),
            filter=load.filter,
            shuffle_seed=job.seed,
            shuffle_clump_size=clump,
        )
        loader = StreamingDataLoader(
            dataset,
            batch_size=load.batch,
            decode={} if load.images == "bytes" else None,
            transform=cropped if load.images == "crop" else None,
        )
        for batch in endless(loader):
            yield labels_of(load, batch), batch

    return build


def labels_of(load: Workload, batch: Any) -> np.ndarray:
    """The classes in a batch of named columns."""
    if load.table == "wide":
        return np.asarray(batch["c0"])
    if load.table == "tokens":
        return np.asarray(batch["tokens"][:, 0])
    return np.asarray(batch["label"])


# ---- over the same table ----------------------------------------------------------------------


def lancedb(job: Job) -> Build:
    """Reads of 1,024 small rows, faster than the default of 64; queues of one read a split.

    Its queues are without a bound by default: it would be measured on what it read while it
    planned.
    """
    import lancedb as db
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    load, path = job.workload, Path(job.path)
    columns = list(load.columns) if load.columns else None

    def build() -> Iterator[Batch]:
        dataset = StreamingDataset(
            db.connect(str(path.parent)).open_table(path.stem),
            num_splits=_splits(load),
            read_batch_size=_read_rows(load),
            io_queue_depth=1,
            transform_queue_depth=1,
            shuffle_seed=job.seed,
            columns=columns,
            filter=load.filter,
            transform=Rows(load.table, job.finisher()),
        )
        loader = StreamingDataLoader(
            dataset,
            batch_size=load.batch,
            num_workers=job.case.workers,
            multiprocessing_context="spawn" if job.case.workers else None,
        )
        for batch in loader:  # one epoch: the next would be planned for as long as this one
            yield labels_of(load, batch), batch

    return build


def _splits(load: Workload) -> int:
    return 16 if load.decodes else 64


def _read_rows(load: Workload) -> int:
    if load.decodes:
        return 16
    return 64 if load.table in ("tokens", "jpeg") else 1024


class Rows:
    """From a RecordBatch to rows, without Python objects for numbers where that is faster."""

    def __init__(self, table: str, finish: Callable[[Any], Any]) -> None:
        self.table = table
        self.finish = finish

    def __call__(self, batch: Any) -> list[Any]:
        """The rows as dicts."""
        import torch

        if self.table == "tokens":
            return [
                {"tokens": row} for row in torch.from_numpy(token_matrix(batch.column(0)).copy())
            ]
        if self.table == "jpeg":
            images, labels = batch["image"], batch["label"].to_pylist()
            rows = zip(images, labels, strict=True)
            return [{"image": self.finish(i.as_py()), "label": label} for i, label in rows]
        rows_of_dicts: list[Any] = batch.to_pylist()
        return rows_of_dicts


def token_matrix(column: Any) -> np.ndarray:
    """A column of token blocks as one array."""
    values: np.ndarray = column.flatten().to_numpy().reshape(-1, BLOCK)
    return values


class Offsets:
    """A map-style dataset over a Lance table that takes a batch of offsets at once."""

    def __init__(self, job: Job) -> None:
        self.path = job.path
        self.load = job.workload
        self.finish = job.finisher()
        self.dataset: Any = None
        self.kept: np.ndarray | None = None
        self.rows = self._open().count_rows()
        if self.load.filter is not None:
            scanned = self._open().to_table(["_rowoffset"], filter=self.load.filter)
            self.kept = scanned["_rowoffset"].to_numpy().astype(np.int64)
            self.rows = len(self.kept)
        self.dataset = None  # a worker process opens its own

    def _open(self) -> Any:
        import lance

        if self.dataset is None:
            self.dataset = lance.dataset(self.path)
        return self.dataset

    def __len__(self) -> int:
        return int(self.rows)

    def __getitems__(self, chosen: list[int]) -> Batch:
        import torch

        offsets = np.sort(np.array(chosen))  # the order in a batch is nobody's concern
        if self.kept is not None:
            offsets = self.kept[offsets]
        columns = list(self.load.columns) if self.load.columns else None
        # Arrow's memory is copied: a tensor may be written to.
        taken = self._open().take(offsets, columns=columns).combine_chunks()
        if self.load.table == "tokens":
            tokens = token_matrix(taken["tokens"].combine_chunks()).copy()
            return tokens[:, 0], torch.from_numpy(tokens)
        if self.load.table == "jpeg":
            images = [self.finish(value.as_py()) for value in taken["image"]]
            labels = taken["label"].to_numpy()
            if self.load.images == "bytes":
                return labels, images
            return labels, torch.from_numpy(np.stack(images))
        batch = {
            name: torch.from_numpy(taken[name].to_numpy().copy()) for name in taken.column_names
        }
        return labels_of(self.load, batch), batch


def same(value: Any) -> Any:
    """What it was given: the batch is made already."""
    return value


def torch_lance(job: Job) -> Build:
    """The DataLoader of torch with a RandomSampler, one take a batch: a uniform shuffle."""
    import lance  # noqa: F401 - before the clock starts
    import torch
    from torch.utils.data import DataLoader

    def build() -> Iterator[Batch]:
        loader: Any = DataLoader(
            Offsets(job),  # type: ignore[arg-type]
            batch_size=job.workload.batch,
            shuffle=True,
            generator=torch.Generator().manual_seed(job.seed),
            drop_last=True,
            collate_fn=same,
            num_workers=job.case.workers,
            multiprocessing_context="spawn" if job.case.workers else None,
            persistent_workers=job.case.workers > 0,
        )
        yield from endless(loader)

    return build


# ---- with formats of their own ----------------------------------------------------------------


class Item:
    """From a stored row ``{"value": ..., "label": ...}`` to what is asked for."""

    def __init__(self, job: Job) -> None:
        self.finish = job.finisher()

    def __call__(self, row: Any) -> Any:
        """The row with its value finished."""
        row["value"] = self.finish(row["value"])
        return row


def peer_batches(load: Workload, loader: Iterable[Any]) -> Iterator[Batch]:
    """Batches of the collated rows of a peer, none of which filters or leaves columns out."""
    for batch in endless(loader):
        if load.table in ("wide", "tokens"):
            values = batch["value"] if isinstance(batch, dict) else batch
            yield np.asarray(values[:, 0]), values
            continue
        if load.filter is not None:
            keep = (batch["f0"] if "f0" in batch else batch["value"][:, 0]) < KEPT_BELOW
            batch = {name: values[keep] for name, values in batch.items()}  # noqa: PLW2901
        yield np.asarray(batch["label"]), batch


def peer_options(job: Job) -> dict[str, Any]:
    """What the loaders of litdata and streaming, which are torch's, are made with."""
    return {
        "batch_size": job.workload.batch,
        "num_workers": job.case.workers,
        "drop_last": True,
        "persistent_workers": job.case.workers > 0,
    }


def litdata(job: Job) -> Build:
    """Chunks of 64 MB, mapped in place; shuffled chunks, and blocks of 256 rows inside them."""
    peer_setup()
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    load = job.workload
    options: dict[str, Any] = {}
    if load.table == "tokens":
        options["item_loader"] = TokensLoader(block_size=BLOCK)
    if load.images is not None:
        options["transform"] = Item(job)

    def build() -> Iterator[Batch]:
        dataset = StreamingDataset(
            job.path, shuffle=True, drop_last=True, seed=job.seed + 42, **options
        )
        loader = StreamingDataLoader(dataset, **peer_options(job))
        yield from peer_batches(load, loader)

    return build


def mosaic(job: Job) -> Build:
    """Shards of 64 MB; its default shuffle, py1e, over blocks of at least 262,144 rows."""
    peer_setup()
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    load = job.workload
    item = Item(job)

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return item(super().__getitem__(at))

    def build() -> Iterator[Batch]:
        clean_stale_shared_memory()
        dataset = (StreamingDataset if load.images is None else Images)(
            local=job.path,
            batch_size=load.batch,
            predownload=8 * load.batch,
            shuffle=True,
            shuffle_algo="py1e",
            shuffle_seed=job.seed,
        )
        loader = StreamingDataLoader(dataset, **peer_options(job))
        yield from peer_batches(load, loader)

    return build


def webdataset(job: Job) -> Build:
    """Tars of 50 MB in shuffled order, and 1,000 samples shuffled in memory."""
    peer_setup()
    import webdataset as wds

    load = job.workload
    urls = sorted(map(str, Path(job.path).glob("*.tar")))
    finish = job.finisher()

    def tokens(data: bytes) -> np.ndarray:
        return np.frombuffer(bytearray(data), np.int32)  # torch wants memory it may write

    def build() -> Iterator[Batch]:
        dataset = wds.WebDataset(
            urls, shardshuffle=len(urls), seed=job.seed, empty_check=False
        ).repeat()
        dataset = dataset.shuffle(1000, seed=job.seed)
        if load.table == "tokens":
            dataset = dataset.to_tuple("bin").map_tuple(tokens)
        else:
            dataset = dataset.to_tuple("jpg", "cls").map_tuple(finish, int)
        collated = None if load.images == "bytes" else wds.filters.default_collation_fn
        loader = wds.WebLoader(
            dataset.batched(load.batch, collation_fn=collated, partial=False),
            batch_size=None,
            num_workers=job.case.workers,
        )
        for batch in loader:
            if load.table == "tokens":
                yield np.asarray(batch[0][:, 0]), batch[0]
            elif load.images == "bytes":
                values, labels = zip(*batch, strict=True)
                yield np.array(labels), values
            else:
                yield np.asarray(batch[1]), batch[0]

    return build


# ---- which there are --------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """A loader.

    Attributes:
        title: In tables.
        format: Of its data.
        make: From a job to its builder.
        tables: What it is run on.
        ours: Whether it is destrier.
        ahead: Rows that it may hold read when its first batch comes, which the warm-up uses up.
    """

    title: str
    format: str
    make: Callable[[Job], Build]
    tables: tuple[str, ...] = ("small", "wide", "tokens", "jpeg")
    ours: bool = False
    ahead: Callable[[Workload], int] = lambda _: 0

    @property
    def peer(self) -> bool:
        """Whether it runs in the peers' environment."""
        return self.format != "lance"


LOADERS = {
    "destrier": Loader("destrier", "lance", destrier, ours=True),
    "destrier-clump1": Loader(
        "destrier, clump 1", "lance", lambda job: destrier(job, clump=1), ours=True
    ),
    "lancedb": Loader(
        "LanceDB streaming",
        "lance",
        lancedb,
        ahead=lambda load: 2 * _splits(load) * _read_rows(load),
    ),
    "torch-lance": Loader("DataLoader over Lance", "lance", torch_lance),
    "litdata": Loader("LitData", "litdata", litdata),
    "mosaic": Loader("MosaicML Streaming", "mds", mosaic),
    "webdataset": Loader("WebDataset", "tars", webdataset, ("tokens", "jpeg")),
}


def cases(workload: Workload) -> list[Case]:
    """All settings of all loaders that a workload is measured with."""
    found = []
    for name, loader in LOADERS.items():
        if workload.table not in loader.tables:
            continue
        if loader.ours:
            found.append(Case(name, 0))
            continue
        decoders = ("ours", "pillow") if workload.decodes else ("ours",)
        found += [Case(name, workers, decoder) for decoder in decoders for workers in (0, 2)]
    return found


def build(workload: str, case: Case, path: str, seed: int) -> Build:
    """What a measurement times."""
    return LOADERS[case.loader].make(Job(WORKLOADS[workload], case, path, seed))
