"""The shared battery: kinds of stream, two faces that deliver them, and slow plans to compare with.

The plans here are written in Python lists from the definition of the order alone. They share no
code with the plan, the schedule and the pipeline of the library: only `Order.rows`, which has its
own tests, is taken for granted.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import torch

import packed
import tables
from destrier import (
    Order,
    Packed,
    Permutation,
    PermutationBuilder,
    StreamingDataLoader,
    StreamingDataset,
    View,
    split,
    subsample,
    subset,
)
from destrier.keyed import BUCKET_KEY, PACKING_KEY, SUBSAMPLE_KEY, epoch_key, mix, permute, subkey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from destrier.streaming import Streaming

COLUMNS = ["id", "label", "vector", "name", "tokens"]
REMAINDERS = ("drop", "keep", "pad")
FACES = ("loader", "dataset")
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 8, 12)
KINDS = (
    "plain",
    "clump 1",
    "clumps",
    "filtered",
    "filtered clumps",
    "table order",
    "table order in splits",
    "saved order",
    "built part",
    "curriculum",
    "permutation shuffled",
    "view of a split",
    "view with a filter",
    "subsample above 1",
    "packed",
    "packed best fit",
    "by length",
)
KINDS_OF_BATCHES = ("packed", "packed best fit", "by length")  # no rows of a table, or no row mode
BLOCK = 3  # tokens of a packed block: documents have 0 to 4


# ---- kinds of stream --------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _positions(
    n: int, epoch: int, seed: int, splits: int, clump: int, window: int, shuffle: bool
) -> np.ndarray[Any, Any]:
    order = Order(n, seed, epoch, splits, clump, window, shuffle)
    return order.rows(np.arange(n))


@dataclass(frozen=True)
class Plan:
    """An epoch, written down.

    Attributes:
        rows: Every sample's row, as `Batch` has it.
        ids: Every sample's id.
        place: From a sample to what a step is sorted by, before the sample itself.
    """

    rows: list[Any]
    ids: list[int]
    place: Callable[[int], Any]


class AnyKind(Protocol):
    """A kind of stream: over a table here, over several in `mixed` and `zipped`."""

    @property
    def unit(self) -> int:
        """Samples that no share cuts apart."""
        ...

    @property
    def columns(self) -> list[str] | None:
        """The columns that are read."""
        ...

    @property
    def any_batch(self) -> bool:
        """Whether a run can go on with another batch size."""
        ...

    def make(self, **options: Any) -> Streaming:
        """Make such a stream."""
        ...

    def samples(self, state: dict[str, Any]) -> int:
        """Samples in an epoch."""
        ...

    def plan(self, state: dict[str, Any], epoch: int) -> Plan:
        """Write down an epoch; sizes that were chosen are taken from a state."""
        ...

    def repeats(self, state: dict[str, Any]) -> bool:
        """Whether every epoch is the same."""
        ...

    def locate(self, batch: dict[str, Any]) -> list[Any]:
        """The rows of a batch, of which each is the one that its id says."""
        ...

    def check_coverage(self, rows: list[Any], state: dict[str, Any], epoch: int) -> None:
        """Raise unless the rows are those of a whole epoch."""
        ...


@dataclass(frozen=True)
class Kind:
    """A kind of stream over one table.

    Attributes:
        path: The table, or a view of it.
        ids: Row offset → id.
        options: What StreamingDataset is given.
        listed: Row offsets in the order of positions: the selection, or the listing.
        fixed: Whether the listing itself is the order, in every epoch.
    """

    path: Any
    ids: np.ndarray[Any, Any]
    options: dict[str, Any]
    listed: np.ndarray[Any, Any]
    fixed: bool = False
    unit = 1
    any_batch = True

    @property
    def uri(self) -> str:
        """Where the table lies."""
        return str(self.path.table.uri if isinstance(self.path, View) else self.path)

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        return len(self.listed)

    @property
    def source(self) -> Any:
        """What is streamed."""
        return self.path

    @property
    def columns(self) -> list[str] | None:
        """The columns that are read."""
        return COLUMNS

    def chosen(self, state: dict[str, Any], epoch: int) -> list[int]:  # noqa: ARG002 - of others
        """Return the row offsets of an epoch, in any order."""
        return self.listed.tolist()

    def make(self, **options: Any) -> StreamingDataset:
        """Make such a stream."""
        return StreamingDataset(self.source, **{**self.options, **options})

    def samples(self, state: dict[str, Any]) -> int:  # noqa: ARG002 - of mixtures it says so
        """Samples in an epoch."""
        return self.count

    def plan(self, state: dict[str, Any], epoch: int) -> Plan:
        """Write down an epoch; sizes that were chosen are taken from a state."""
        offsets = self.offsets(state, epoch)
        return Plan(offsets, self.ids_of(offsets), lambda g: g % state["num_splits"])

    def ids_of(self, offsets: list[int]) -> list[int]:
        """Return the ids of rows."""
        return self.ids[offsets].tolist() if len(self.ids) else []

    def repeats(self, state: dict[str, Any]) -> bool:
        """Whether every epoch is the same."""
        return self.fixed or not state["shuffle"]

    def locate(self, batch: dict[str, Any]) -> list[int]:
        """The row offsets of a batch, which has their values."""
        offsets: list[int] = batch["row_offset"].tolist()
        assert batch["id"].tolist() == self.ids[offsets].tolist()
        check_values(batch)
        return offsets

    def check_coverage(self, rows: list[Any], state: dict[str, Any], epoch: int) -> None:
        """Raise unless every row that is listed comes just as often."""
        assert sorted(rows) == sorted(self.chosen(state, epoch))

    def offsets(self, state: dict[str, Any], epoch: int) -> list[int]:
        """Return the row offset of every sample of an epoch; sizes are taken from a state."""
        if self.fixed:
            return self.listed.tolist()
        names = ("shuffle_seed", "num_splits", "clump_size", "window", "shuffle")
        sizes = (state[name] for name in names)
        chosen = np.array(self.chosen(state, epoch))
        return chosen[_positions(self.count, epoch, *sizes)].tolist()


def check_values(batch: dict[str, Any]) -> None:
    """Check every value of a batch against its row's id."""
    ids = batch["id"].numpy()
    assert batch["id"].dtype == torch.int64
    assert batch["label"].tolist() == (ids % tables.CLASSES).tolist()
    assert batch["label"].dtype == torch.int32
    assert batch["vector"].shape == (len(ids), 4)
    expected = (ids[:, None] + np.arange(4) / 4).astype(np.float32)
    assert np.array_equal(batch["vector"].numpy(), expected)
    assert batch["name"] == [f"row {i}" for i in ids.tolist()]
    assert [t.tolist() for t in batch["tokens"]] == [tokens_of(i) for i in ids.tolist()]


def tokens_of(i: int) -> list[int]:
    """Return the tokens of the row with this id."""
    return list(range(i, i + i % 5))


@dataclass(frozen=True)
class PackedKind(Kind):
    """A stream of blocks; row offsets are their addresses, and ``listed`` their numbers.

    Attributes:
        packing: What Packed is given.
        documents: The tokens of the selected rows.
    """

    packing: dict[str, Any] = field(default_factory=dict)
    documents: list[list[int]] = field(default_factory=list)

    @property
    def source(self) -> Any:
        return Packed(self.path, block_size=BLOCK, labels=True, documents=True, **self.packing)

    @property
    def columns(self) -> list[str] | None:
        return None

    @cached_property
    def line(self) -> list[tuple[int, int]]:
        """All tokens: document and place."""
        return [(d, i) for d, tokens in enumerate(self.documents) for i in range(len(tokens))]

    @cached_property
    def windows(self) -> list[packed.Block]:
        """All blocks of best fit."""
        lengths = [len(tokens) for tokens in self.documents]
        return packed.windows(lengths, BLOCK, self.packing["window"])

    def chosen(self, state: dict[str, Any], epoch: int) -> list[int]:
        if "window" in self.packing:
            return self.listed.tolist()
        total = len(self.line)
        key = subkey(epoch_key(state["shuffle_seed"], epoch), PACKING_KEY)
        first = (key * total) >> 64
        return [(first + b * BLOCK) % total for b in range(self.count)]

    def ids_of(self, offsets: list[int]) -> list[int]:  # noqa: ARG002 - blocks have none
        return []

    def locate(self, batch: dict[str, Any]) -> list[int]:
        addresses: list[int] = batch["row_offset"].tolist()
        for i, address in enumerate(addresses):
            if "window" in self.packing:
                block = self.windows[address]
            else:
                (block,) = packed.cut(self.line, [address], BLOCK, circle=True)
            wanted = packed.columns(block, self.documents, BLOCK)
            assert {name: batch[name][i].tolist() for name in wanted} == wanted
        return addresses


@dataclass(frozen=True)
class BucketKind(Kind):
    """A stream of batches of like length, from the definition."""

    def offsets(self, state: dict[str, Any], epoch: int) -> list[int]:
        base = super().offsets(state, epoch)
        _, window, batch = json.loads(state["buckets"])
        splits, size = state["num_splits"], window * batch
        key = subkey(epoch_key(state["shuffle_seed"], epoch), BUCKET_KEY)

        def by_lane(samples: list[int]) -> list[int]:
            return sorted(samples, key=lambda g: (g % splits, g))

        out = [-1] * len(base)
        for first in range(0, len(base), size):
            samples = list(range(first, min(first + size, len(base))))
            samples.sort(key=lambda g: len(tokens_of(self.ids[base[g]])))
            count = -(-len(samples) // batch)
            turn = sorted(range(count), key=lambda i: mix((first + i) ^ key))
            sizes = [batch] * count
            sizes[turn[-1]] = len(samples) - batch * (count - 1)
            batches = [[samples.pop(0) for _ in range(n)] for n in sizes]
            place = first
            for i in turn:
                places = by_lane(list(range(place, place + sizes[i])))
                for at, g in zip(places, by_lane(batches[i]), strict=True):
                    out[at] = base[g]
                place += sizes[i]
        return out


def make_kind(  # noqa: C901, PLR0911, PLR0912 - one branch a kind
    name: str, path: str, ids: np.ndarray[Any, Any], folder: Path
) -> Kind:
    """Make one of `KINDS` over the varied table; what it needs is written into a folder."""
    everything = np.arange(len(ids))
    labelled = everything[ids % tables.CLASSES < 7]
    clumps = {"num_splits": 8, "shuffle_clump_size": 3, "shuffle_window": 4}
    if name == "plain":
        return Kind(path, ids, {}, everything)
    if name == "clump 1":
        return Kind(path, ids, {"shuffle_clump_size": 1, "num_splits": 16}, everything)
    if name == "clumps":
        return Kind(path, ids, {"shuffle_seed": 5, **clumps}, everything)
    if name == "filtered":
        return Kind(path, ids, {"filter": "label < 7"}, labelled)
    if name == "filtered clumps":
        return Kind(path, ids, {"filter": "label < 7", **clumps}, labelled)
    if name == "table order":
        return Kind(path, ids, {"shuffle": False}, everything)
    if name == "table order in splits":
        return Kind(path, ids, {"shuffle": False, "num_splits": 8}, everything)
    if name == "saved order":
        writer = StreamingDataset(path, shuffle_seed=9, **clumps)
        saved = Permutation.open(writer.permutation(2).save(str(folder / "order.lance")))
        order = Order(len(ids), seed=9, epoch=2, num_splits=8, clump_size=3, window=4)
        return Kind(path, ids, {"permutation": saved}, order.rows(everything), fixed=True)
    if name == "built part":
        builder = PermutationBuilder(path).filter("label < 7").shuffle(seed=4)
        parts = builder.split_random(ratios=[0.8, 0.2], seed=3, names=["train", "val"]).execute()
        listed = parts["train"].to_arrow()["row_offset"].to_numpy()
        return Kind(path, ids, {"permutation": parts["train"]}, listed, fixed=True)
    if name == "view of a split":
        builder = PermutationBuilder(path).split_random(counts=[702, 301], seed=3)
        listed = builder.execute()["0"].to_arrow()["row_offset"].to_numpy()
        return Kind(split(path, [0.7, 0.3], seed=3)[0], ids, {"shuffle_seed": 6, **clumps}, listed)
    if name == "view with a filter":
        view = subset(path, slice(100, 900))
        return Kind(
            view, ids, {"filter": "label < 7"}, labelled[(labelled >= 100) & (labelled < 900)]
        )
    if name == "subsample above 1":
        line = permute(everything, len(ids), subkey(epoch_key(2, 0), SUBSAMPLE_KEY))
        listed = np.concatenate([everything, everything[line < round(0.5 * len(ids))]])
        return Kind(subsample(path, 1.5, seed=2), ids, {}, listed)
    curriculum = np.concatenate([everything[:300], everything[100:200], everything[::-2]])
    given = pa.table({"row_offset": curriculum})
    if name == "curriculum":
        return Kind(path, ids, {"permutation": given}, curriculum, fixed=True)
    if name == "permutation shuffled":
        options = {"permutation": given, "shuffle": True, "shuffle_seed": 2, **clumps}
        return Kind(path, ids, options, curriculum)
    if name == "packed":
        kind = PackedKind(path, ids, clumps, everything, packing={}, documents=tokens(ids))
        return replace(kind, listed=np.arange(len(kind.line) // BLOCK))
    if name == "packed best fit":
        kind = PackedKind(
            path,
            ids,
            {"filter": "label < 7", **clumps},
            everything,
            packing={"how": "best_fit", "pad_id": 0, "window": 64},
            documents=tokens(ids[labelled]),
        )
        return replace(kind, listed=np.arange(len(kind.windows)))
    if name == "by length":
        return BucketKind(
            path, ids, {"bucket_by": "tokens", "bucket_window": 3, **clumps}, everything
        )
    raise AssertionError(name)


def tokens(ids: np.ndarray[Any, Any]) -> list[list[int]]:
    """Return the tokens of some rows."""
    return [tokens_of(i) for i in ids.tolist()]


# ---- the slow plan ----------------------------------------------------------------------------


def steps(
    count: int,
    place: Callable[[int], Any],
    batch: int,
    *,
    start: int = 0,
    remainder: str = "drop",
) -> list[list[int]]:
    """Return the sample indices of every step in canonical order, from the definition."""
    out = []
    begin = start
    while begin < count:
        samples = list(range(begin, begin + batch))
        if samples[-1] >= count:
            if remainder == "drop":
                break
            if remainder == "keep":
                samples = [g for g in samples if g < count]
        out.append(sorted(samples, key=lambda g: (place(g), g)))
        begin += batch
    return out


def share(step: Sequence[Any], rank: int, size: int, unit: int = 1) -> list[Any]:
    """Return a rank's contiguous share of a step."""
    units = len(step) // unit
    return list(step[rank * units // size * unit : (rank + 1) * units // size * unit])


def sharing(kind: AnyKind, batch: int, sizes: Sequence[int]) -> list[int]:
    """Return the world sizes that can share a step of a kind."""
    return [size for size in sizes if kind.unit == 1 or batch // kind.unit % size == 0]


# ---- what a stream delivers -------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What was delivered at one step: where it came from, checked against its values.

    Attributes:
        rows: Row offsets; of several tables, pairs of the table's name and the row offset there.
    """

    samples: tuple[int, ...]
    rows: tuple[Any, ...]
    mask: tuple[bool, ...] | None = None


@contextmanager
def opened(face: str, kind: AnyKind, *, batch: int, **options: Any) -> Iterator[Any]:
    """Open a stream through our loader or through the dataset's batch mode; close it after."""
    settings = {"columns": kind.columns, **options}
    own = {k: settings.pop(k) for k in ("remainder", "uneven") if k in settings}
    own.update(global_batch_size=batch, with_index=True)
    if face == "loader":
        stream: Any = StreamingDataLoader(kind.make(**settings), **own)
    else:
        stream = kind.make(**own, **settings)
    try:
        yield stream
    finally:
        stream.close()


def check(kind: AnyKind, batch: dict[str, Any]) -> Batch:
    """Check every value of a batch against its row."""
    samples = batch["sample_index"]
    offsets = [batch[name] for name in batch if name.endswith("row_offset")]
    assert {column.dtype for column in (samples, *offsets)} == {torch.int64}
    rows = kind.locate(batch)
    mask = tuple(batch["mask"].tolist()) if "mask" in batch else None
    return Batch(tuple(samples.tolist()), tuple(rows), mask)


def read(kind: AnyKind, stream: Any, most: int | None = None) -> list[Batch]:
    """Read an epoch, or so many of its batches, and check every value."""
    out: list[Batch] = []
    if most == 0:
        return out
    for batch in stream:
        out.append(check(kind, batch))
        if len(out) == most:
            break
    return out


def expected(
    kind: AnyKind,
    state: dict[str, Any],
    *,
    epoch: int,
    batch: int,
    start: int = 0,
    rank: int = 0,
    size: int = 1,
    remainder: str = "drop",
) -> list[Batch]:
    """Return what the definition says a rank is given in an epoch."""
    plan = kind.plan(state, epoch)
    count = len(plan.rows)
    out = []
    for step in steps(count, plan.place, batch, start=start, remainder=remainder):
        mine = share(step, rank, size, kind.unit)
        mask = tuple(g >= count for g in mine) if remainder == "pad" else None
        out.append(Batch(tuple(mine), tuple(plan.rows[g % count] for g in mine), mask))
    return out


def joined(ranks: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Join the shares of all ranks to global batches, in rank order."""
    assert len({len(batches) for batches in ranks}) == 1, "ranks have different numbers of steps"
    out = []
    for parts in zip(*ranks, strict=True):
        samples = tuple(s for part in parts for s in part.samples)
        rows = tuple(row for part in parts for row in part.rows)
        mask = None
        if parts[0].mask is not None:
            mask = tuple(m for part in parts for m in part.mask or ())
        out.append(Batch(samples, rows, mask))
    return out


@dataclass
class Journal:
    """What a transform saw, over all threads."""

    calls: list[Any] = field(default_factory=list)

    def __call__(self, batch: Any) -> Any:
        self.calls.append(batch)
        return batch


# ---- rows -------------------------------------------------------------------------------------


def rows_of(
    kind: AnyKind,
    state: dict[str, Any],
    *,
    epoch: int,
    rank: int = 0,
    size: int = 1,
    worker: int = 0,
    workers: int = 1,
    start: int = 0,
) -> list[int]:
    """Return the ids that one worker of one rank yields in row mode, from the definition."""
    splits = state["num_splits"]
    owned = splits // (size * workers)
    first = (rank * workers + worker) * owned
    ids = kind.plan(state, epoch).ids
    return [
        ids[cycle * splits + lane]
        for cycle in range(start // splits, len(ids) // splits)
        for lane in range(first, first + owned)
    ]


def in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Take one of each list in turn, as a DataLoader does with its workers."""
    out = []
    for i in range(max(len(items) for items in lists)):
        out += [items[i] for items in lists if i < len(items)]
    return out


# ---- transforms that other processes can import -----------------------------------------------


def doubled(batch: dict[str, Any], seeds: Any) -> dict[str, Any]:
    """A transform with per-row seeds, which says in which process it ran."""
    return {
        **batch,
        "double": batch["id"] * 2,
        "seed": torch.from_numpy(seeds),
        "pid": torch.full((len(batch["id"]),), os.getpid()),
    }


def numbers(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that keeps numpy arrays and drops everything else."""
    return {"id": batch["id"], "vector": batch["vector"].astype(np.float64)}


def odd_only(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that fails on some rows."""
    if (batch["id"] % 50 == 0).any():
        raise ValueError("a row that is a multiple of 50")
    return batch


def dies(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that takes its process with it."""
    if (batch["id"] % 50 == 0).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def leaves(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that ends its process."""
    os._exit(3)


def refuses(batch: Any) -> Any:
    """A transform of RecordBatches that fails on some rows."""
    ids = batch["id"].to_pylist()
    if any(i % 50 == 0 for i in ids):
        raise ValueError("a row that is a multiple of 50")
    return ids


def hopeless(batch: dict[str, Any]) -> Any:
    """A transform whose result cannot be pickled."""
    return {"id": batch["id"], "what": lambda: None}
