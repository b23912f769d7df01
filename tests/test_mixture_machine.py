"""Random mixtures, used in random ways, against plans that are written down sample by sample."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import battery
import mixed
from battery import Kind
from destrier import ArgumentError, DestrierError, EmptyError, Mixture, StreamingDataLoader
from mixed import Mixed
from slow_mixture import slow_shares

if TYPE_CHECKING:
    from pathlib import Path

SIZES = (1, 2, 3, 8, 41, 97, 210, 331, 500)
FORMATS = ("torch", "numpy", "arrow", "rows")
ENDLESS = 1 << 62
MOST = 2500  # samples of an epoch that are written down


@pytest.fixture(scope="module")
def tables_of(tmp_path_factory: pytest.TempPathFactory) -> list[Kind]:
    """Tables of many sizes, without an id in common."""
    folder = tmp_path_factory.mktemp("tables")
    return make_tables(folder)


def make_tables(folder: Path) -> list[Kind]:
    return [
        mixed.small_table(folder, f"t{number}", size, 1000 * number)
        for number, size in enumerate(SIZES * 2)
    ]


def random_weights(rng: random.Random, count: int) -> tuple[float, ...]:
    some = rng.choice([(0, 1, 2, 5), (1, 1, 3), (0.1, 0.2, 0.7, 1.5), (1,)])
    weights = tuple(rng.choice(some) for _ in range(count))
    return weights if any(weights) else (*weights[1:], 1)


def random_table(rng: random.Random, kind: Kind) -> Kind:
    """A table, read in one of many ways."""
    rows = len(kind.listed)
    splits = min(rows, rng.choice([1, 3, 8, 16]))
    options: dict[str, Any] = rng.choice(
        [
            {},
            {"shuffle": False},
            {"shuffle_seed": rng.randrange(9), "shuffle_clump_size": 1},
            {"num_splits": splits, "shuffle_clump_size": rng.choice([1, 2, 3, 7])}
            | {"shuffle_window": rng.choice([1, 4, 5])},
        ]
    )
    if rng.random() < 0.3:
        listed = kind.listed[kind.ids % 10 < 7]
        if len(listed):
            options = {k: v for k, v in options.items() if k != "num_splits"}
            return replace(kind, options={**options, "filter": "label < 7"}, listed=listed)
    return replace(kind, options=options)


def random_mixture(rng: random.Random, found: list[Kind], *, inside: bool = False) -> Mixed:
    count = rng.randint(1, 2 if inside else 4)
    parts: dict[str, Any] = {}
    for name in "wxyz"[:count]:
        nested = not inside and rng.random() < 0.2
        parts[name] = (
            random_mixture(rng, found, inside=True) if nested else random_table(rng, found.pop())
        )
    options: dict[str, Any] = {"seed": rng.randrange(1 << 32)}
    unit, most, any_batch = 1, None, True
    if rng.random() < 0.8:
        weights = random_weights(rng, count)
        options["weights"] = dict(zip(parts, weights, strict=True))
        stop = rng.choice(["first_exhausted", "all_exhausted", "length", None])
        if not inside:
            options["batching"] = rng.choice(["mixed", "mixed", "stratified", "per_source"])
            stop = rng.choice([stop, stop, stop, "never"])
        least = math.ceil(1 / min(share for share in slow_shares(weights) if share))
        batching = options.get("batching")
        any_batch = batching in (None, "mixed")
        if batching != "stratified":
            options["window"] = least + rng.choice([0, 0, 1, 7, 30])
        if batching == "per_source" and rng.random() < 0.4:
            options["unit"] = unit = rng.choice([2, 3])
            any_batch = True
        if stop == "length":
            options["length"] = 240 if batching == "per_source" else rng.randint(1, 300)
        elif stop is not None:
            options["stop"] = stop
        most = 1200 if stop == "never" else None
    return Mixed(parts, options, unit, any_batch, changes=(), most=most)


class Machine:
    """A mixture that is read, left, resumed and changed, and what must come of it."""

    def __init__(self, seed: int, tables: list[Kind]) -> None:
        self.rng = rng = random.Random(seed)
        found = list(tables)
        rng.shuffle(found)
        self.kind = random_mixture(rng, found)
        self.batch = rng.choice([12, 24, 6, 30, 7])
        if self.kind.unit > 1 or "length" in self.kind.options:
            self.batch = rng.choice([12, 24, 6])
        self.remainder = rng.choice(battery.REMAINDERS)
        self.epoch = self.counter = 0
        self.begun, self.then = False, None
        self.iterator: Any = None
        self.loader: Any = None
        self.log: list[Any] = [seed, self.kind, self.batch, self.remainder]
        self.open()

    def open(self) -> None:
        """Another process, of another world."""
        rng = self.rng
        if self.loader is not None:
            self.loader.close()
        sizes = [s for s in (1, 2, 3, 4, 6) if self.batch % s == 0]
        self.size = rng.choice(battery.sharing(self.kind, self.batch, sizes))
        self.rank = rng.randrange(self.size)
        self.format = rng.choice(FORMATS)
        dataset = self.kind.make(columns=["id"], rank=self.rank, world_size=self.size)
        self.loader = StreamingDataLoader(
            dataset,
            global_batch_size=self.batch,
            remainder=self.remainder,
            with_index=True,
            format=self.format,
            prefetch_bytes=rng.choice([1, 4000, 1 << 28]),
        )
        self.iterator = None
        self.log.append(("open", self.rank, self.size, self.format, self.batch))

    def left(self) -> list[battery.Batch]:
        """The batches that are left of the epoch."""
        return battery.expected(
            self.kind,
            self.loader.state_dict(),
            epoch=self.epoch,
            batch=self.batch,
            start=self.counter,
            rank=self.rank,
            size=self.size,
            remainder="drop" if self.kind.most else self.remainder,
        )

    @property
    def count(self) -> int:
        state = self.loader.state_dict()
        return self.kind.course(state).samples(self.epoch) or ENDLESS

    def begin(self) -> None:
        if self.then is not None:
            self.epoch, self.counter = self.then, 0
        elif self.begun:
            self.epoch, self.counter = self.epoch + 1, 0
        self.begun, self.then = True, None

    def got(self, batch: Any) -> battery.Batch:
        """What a batch is, from any format."""
        if self.format == "arrow":
            columns = batch.to_pydict()
        elif self.format == "rows":
            names = ("id", "sample_index", "row_offset", "source", "mask")
            columns = {n: [row[n] for row in batch] for n in names if not batch or n in batch[0]}
            if not batch and self.remainder != "pad":
                del columns["mask"]
        else:
            columns = {name: list(map(self._plain, value)) for name, value in batch.items()}
        rows = [self.kind._rows[i] for i in columns["id"]]
        assert columns["row_offset"] == [offset for _, offset in rows]
        assert columns["source"] == [name.partition("/")[0] for name, _ in rows]
        mask = tuple(columns["mask"]) if "mask" in columns and not self.kind.most else None
        return battery.Batch(tuple(columns["sample_index"]), tuple(rows), mask)

    @staticmethod
    def _plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else value

    # ---- what is done -------------------------------------------------------------------------

    def read(self, most: int | None = None) -> None:
        if self.iterator is None:
            self.iterator = iter(self.loader)
            self.begin()
        left = self.left()
        most = self.rng.randint(0, 5) if most is None else most
        if self.kind.most:
            most = min(most, len(left) - 2)
        for number in range(most):
            if number == len(left):
                with pytest.raises(StopIteration):
                    next(self.iterator)
                self.iterator = None
                self.epoch = self.epoch + 1 if self.then is None else self.then
                self.counter, self.begun, self.then = 0, False, None
                return
            assert self.got(next(self.iterator)) == left[number]
            self.counter = min(self.count, self.counter + self.batch)

    def finish(self) -> None:
        if not self.kind.most:
            self.read(10_000)

    def leave(self) -> None:
        self.iterator = None

    def resume(self) -> None:
        state = json.loads(json.dumps(self.loader.state_dict()))
        if self.kind.any_batch and self.rng.random() < 0.5 and "length" not in self.kind.options:
            sizes = [size for size in (6, 12, 24) if size <= self.count]
            self.batch = self.rng.choice(sizes or [self.batch])
        self.open()
        if self.rng.random() < 0.3:
            next(iter(self.loader), None)  # it had begun something else
        self.loader.load_state_dict(state)
        assert self.loader.state_dict() == state
        self.begun, self.then = False, None

    def reweight(self) -> None:
        epoch, counter = self.epoch, self.counter
        if self.iterator is None and self.begun:
            epoch, counter = (epoch + 1 if self.then is None else self.then), 0
        before = self.loader.state_dict()
        course = self.kind.course(before)
        at: int | None = None
        if self.rng.random() < 0.6:
            rest = min(course.samples(epoch) or 300, 300) - counter
            at = counter + max(0, rest) * self.rng.randint(0, 4) // 4
            at -= at % before["unit"]
            at = max(at, counter)
        weights = random_weights(self.rng, len(self.kind.parts))
        self.log.append((weights, at))
        try:
            self.loader.dataset.reweight(dict(zip(self.kind.parts, weights, strict=True)), at=at)
        except (ArgumentError, EmptyError) as error:
            self.log.append(str(error))  # its frames would hold the iterator
            assert self.loader.state_dict() == before
            return
        change = (epoch, counter if at is None else at, weights)
        self.kind = replace(self.kind, changes=(*self.kind.changes, change))
        if self.iterator is None and self.begun:
            self.epoch, self.counter, self.begun, self.then = epoch, counter, False, None

    def set_epoch(self) -> None:
        epoch = self.epoch + self.rng.randint(0, 2)
        if self.begun:
            epoch += 1
            self.then = epoch
        elif epoch != self.epoch:
            self.epoch, self.counter = epoch, 0
        self.loader.set_epoch(epoch)

    def skip(self) -> None:
        n = self.rng.randint(0, 4)
        if self.iterator is None and (self.begun or self.then is not None):
            self.begin()
            self.begun = False
        n = min(n, len(self.left()))
        self.loader.skip(n)
        self.counter = min(self.count, self.counter + n * self.batch)

    def length(self) -> None:
        if not self.kind.most:
            rest = divmod(self.count, self.batch)
            wanted = rest[0] + bool(rest[1] and self.remainder != "drop")
            assert len(self.loader) == wanted

    def run(self, most: int = 14) -> None:
        rng = self.rng
        try:
            self.loader.state_dict()
            next(iter(self.loader), None)
        except (ArgumentError, EmptyError) as error:
            self.log.append(str(error))
            self.loader.close()
            return
        self.loader.close()
        if not self.kind.most and self.count > MOST:
            return
        self.open()
        does = [self.read] * 5 + [self.finish, self.leave, self.resume, self.resume]
        does += [self.reweight, self.set_epoch, self.skip, self.length]
        for _ in range(most):
            what = rng.choice(does)
            self.log.append(what.__name__)
            what()
            state = self.loader.state_dict()
            assert (state["epoch"], state["counter"]) == (self.epoch, self.counter)
            if self.kind.most and self.counter > self.kind.most // 2:
                break
        self.loader.close()


@pytest.mark.filterwarnings("ignore::destrier.DestrierWarning")
@pytest.mark.parametrize("seed", range(30))
def test_any_mixture_used_in_any_way(
    seed: int, tables_of: list[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("destrier.holding._LEAST_OWN", (0.25, math.inf)[seed % 2])
    machine = Machine(seed, tables_of)
    try:
        machine.run()
    except (AssertionError, DestrierError):
        print(*machine.log, sep="\n")
        raise


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}], ids=["rows", "batches"])
@pytest.mark.parametrize("left", [False, True], ids=["whole", "left"])
def test_a_dataset_that_was_read_is_reweighted(
    tables_of: list[Kind], options: dict[str, Any], left: bool
) -> None:
    sources = {"a": tables_of[7].path, "b": tables_of[8].path}

    def make() -> Mixture:
        settings = {"window": 4, "length": 40, "columns": ["id"], **options}
        return Mixture(sources, weights={"a": 1, "b": 1}, **settings)

    def ids(mixture: Mixture) -> list[int]:
        return [int(i) for item in mixture for i in np.ravel(item["id"])]

    mixture, other = make(), make()
    if left:
        iterator = iter(mixture)
        next(iterator)
        del iterator
    else:
        ids(mixture)
    mixture.reweight({"a": 3, "b": 1})
    other.load_state_dict(mixture.state_dict())
    read = ids(mixture)
    assert sum(7000 <= i < 8000 for i in read) == 30
    assert read == ids(other)
    mixture.close()
    other.close()
