"""Kinds of mixture for the battery, and slow plans of them, from the definition alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa

import tables
from battery import COLUMNS, Kind, Plan
from destrier import Mixture
from slow_mixture import SlowCourse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KINDS = (
    "mixture",
    "mixture of every row",
    "mixture that repeats",
    "mixture of all sorts",
    "mixture of a length",
    "mixture of a mixture",
    "stratified",
    "one source a batch",
    "units of a source",
)
CLUMPS = {"num_splits": 8, "shuffle_clump_size": 3, "shuffle_window": 4}
_BRIEF = ("shuffle_seed", "num_splits", "clump_size", "window", "shuffle")


@lru_cache(maxsize=64)
def _course(
    sizes: tuple[int, ...],
    weights: tuple[float, ...],
    changes: tuple[tuple[int, int, tuple[float, ...]], ...],
    **settings: Any,
) -> SlowCourse:
    course = SlowCourse(sizes, weights, **settings)
    for epoch, at, changed in changes:
        course.reweight(epoch, at, changed)
    return course


@dataclass(frozen=True)
class Mixed:
    """A kind of mixture; no two of its tables have an id in common.

    Attributes:
        parts: Its sources.
        options: What Mixture is given.
        unit: Samples that no share cuts apart.
        any_batch: Whether a run can go on with another batch size.
        named: Whether rows say of which source they are.
        changes: The epoch, the sample and the weights of every reweighting, in turn.
        most: Samples of an epoch without end that are written down.
    """

    parts: Mapping[str, Kind | Mixed]
    options: dict[str, Any]
    unit: int = 1
    any_batch: bool = True
    named: bool = True
    changes: tuple[tuple[int, int, tuple[float, ...]], ...] = ()
    most: int | None = None

    def make(self, **options: Any) -> Mixture:
        """Make such a stream."""
        sources = {name: part.make() for name, part in self.parts.items()}
        column = {"source_column": "source"} if self.named else {}
        return Mixture(sources, **{**column, **self.options, **options})

    def course(self, state: Mapping[str, Any]) -> SlowCourse:
        """The schedule, with the sizes that a state names."""
        inner = self._inner(state)
        sizes = tuple(part.samples(inner[name]) for name, part in self.parts.items())
        weights = self.options.get("weights")
        if weights is None:
            stop, shares = "every_row_once", sizes
        else:
            stop, shares = "first_exhausted", tuple(weights[name] for name in self.parts)
        stop = "length" if "length" in self.options else self.options.get("stop", stop)
        return _course(
            sizes,
            shares,
            self.changes,
            window=state["slots"],
            stop=stop,
            seed=state.get("shuffle_seed", state.get("seed")),
            unit=state["unit"],
            length=self.options.get("length"),
        )

    def _inner(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a state says of each source."""
        sources = state["sources"]
        sources = json.loads(sources) if isinstance(sources, str) else sources
        return {
            name: brief if isinstance(brief, dict) else dict(zip(_BRIEF, brief, strict=False))
            for name, brief in sources.items()
        }

    def samples(self, state: Mapping[str, Any]) -> int:
        """Samples in an epoch."""
        count = self.course(state).samples(0)
        assert count is not None
        return count

    def plan(self, state: Mapping[str, Any], epoch: int) -> Plan:
        """Write down an epoch; sizes that were chosen are taken from a state."""
        inner, names = self._inner(state), list(self.parts)
        plans: dict[tuple[int, int], Plan] = {}
        leaves = [0]
        for part in self.parts.values():
            leaves.append(leaves[-1] + (part.leaves if isinstance(part, Mixed) else 1))
        rows, ids, lanes = [], [], []
        for source, passes, index in self.course(state).epoch(epoch, self.most):
            name = names[source]
            part = self.parts[name]
            if (source, passes) not in plans:
                plans[source, passes] = part.plan(inner[name], passes)
            plan = plans[source, passes]
            row, lane = plan.rows[index], plan.place(index)
            if isinstance(part, Mixed):  # its own places are (unit, lane, table)
                rows.append((f"{name}/{row[0]}", row[1]))
                lanes.append((lane[1], leaves[source] + lane[2]))
            else:
                rows.append((name, row))
                lanes.append((lane, leaves[source]))
            ids.append(plan.ids[index])
        count, unit = len(rows), state["unit"]
        return Plan(rows, ids, lambda g: (g // unit if unit > 1 else 0, *lanes[g % count]))

    @property
    def leaves(self) -> int:
        """How many tables it has."""
        parts = self.parts.values()
        return sum(part.leaves if isinstance(part, Mixed) else 1 for part in parts)

    def repeats(self, state: Mapping[str, Any]) -> bool:  # noqa: ARG002 - of tables it says so
        """Whether every epoch is the same."""
        return False

    @cached_property
    def _rows(self) -> dict[int, tuple[str, int]]:
        """From id to row."""
        rows: dict[int, tuple[str, int]] = {}
        for name, part in self.parts.items():
            if isinstance(part, Mixed):
                rows.update({i: (f"{name}/{leaf}", o) for i, (leaf, o) in part._rows.items()})
            else:
                rows.update({i: (name, offset) for offset, i in enumerate(part.ids.tolist())})
        return rows

    def locate(self, batch: dict[str, Any]) -> list[Any]:
        """The rows of a batch, of which each is the one that its id says."""
        rows = [self._rows[i] for i in batch["id"].tolist()]
        assert batch["row_offset"].tolist() == [offset for _, offset in rows]
        if self.named:
            assert batch["source"] == [name.partition("/")[0] for name, _ in rows]
        return rows

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return COLUMNS

    def check_coverage(self, rows: list[Any], state: Any, epoch: int) -> None:  # noqa: ARG002
        """Raise unless no row of a table comes twice more often than another one of it."""
        times = Counter(rows)
        if "weights" not in self.options:
            assert set(times) == {(name, o) for name, p in self.parts.items() for o in p.listed}
            assert set(times.values()) == {1}
            return
        for name, part in self.parts.items():
            if isinstance(part, Kind) and len(set(part.listed.tolist())) == len(part.listed):
                counts = {times[name, offset] for offset in part.listed.tolist()}
                # An epoch that goes on where the last stopped has parts of two of the source's.
                assert max(counts) - min(counts) <= (2 if "length" in self.options else 1)


def small_table(folder: Path, name: str, rows: int, first: int, **options: Any) -> Kind:
    """Write a table of such ids, and make a kind over it."""
    path = str(folder / f"{name}.lance")
    lance.write_dataset(tables.columns(rows, first), path, max_rows_per_file=rows // 2 + 1)
    return Kind(path, np.arange(first, first + rows), options, np.arange(rows))


def make_kinds(filtered: Kind, folder: Path) -> dict[str, Mixed]:
    """Make `KINDS` over a filtered table and small ones, which are written into a folder.

    Args:
        filtered: Of a table with ids below 5,000.
    """
    clumps = small_table(folder, "clumps", 331, 5000, shuffle_seed=5, **CLUMPS)
    single = small_table(folder, "single", 97, 6000, shuffle_clump_size=1, num_splits=16)
    plain = small_table(folder, "plain", 210, 7000)
    few = small_table(folder, "few", 7, 7900)
    one = small_table(folder, "one", 1, 8000)
    listing = np.concatenate([np.arange(40), np.arange(10, 30), np.arange(99, 0, -3)])
    listed = small_table(folder, "listed", 100, 9000)
    given = pa.table({"row_offset": listing})
    listed = Kind(listed.path, listed.ids, {"permutation": given}, listing, fixed=True)
    inner = Mixed(
        {"single": single, "listed": listed},
        {"weights": {"single": 1, "listed": 2}, "window": 8, "stop": "all_exhausted", "seed": 3},
    )
    three = {"weights": {"web": 3, "code": 1}}
    return {
        "mixture": Mixed({"web": filtered, "code": clumps}, {**three, "window": 40, "seed": 7}),
        "mixture of every row": Mixed(
            {"clumps": clumps, "few": few, "single": single, "plain": plain},
            {"window": 100},
            named=False,
        ),
        "mixture that repeats": Mixed(
            {"clumps": clumps, "single": single, "one": one},
            {"weights": {"clumps": 2.5, "single": 1, "one": 0.25}, "window": 16}
            | {"stop": "all_exhausted"},
        ),
        "mixture of all sorts": Mixed(
            {"filtered": filtered, "clumps": clumps, "single": single, "listed": listed},
            {"weights": {"filtered": 5, "clumps": 4, "single": 1, "listed": 1}, "window": 29},
        ),
        "mixture of a length": Mixed(
            {"clumps": clumps, "single": single},
            {"weights": {"clumps": 3, "single": 2}} | {"window": 16, "length": 507},
        ),
        "mixture of a mixture": Mixed(
            {"inner": inner, "clumps": clumps},
            {"weights": {"inner": 1, "clumps": 1}, "window": 10, "stop": "all_exhausted"},
        ),
        "stratified": Mixed(
            {"web": filtered, "code": clumps}, {**three, "batching": "stratified"}, any_batch=False
        ),
        "one source a batch": Mixed(
            {"clumps": clumps, "single": single},
            {"weights": {"clumps": 2, "single": 1}, "batching": "per_source", "window": 6}
            | {"stop": "all_exhausted"},
            any_batch=False,
        ),
        "units of a source": Mixed(
            {"clumps": clumps, "inner": inner},
            {"weights": {"clumps": 2, "inner": 1}, "batching": "per_source", "unit": 2}
            | {"window": 15, "stop": "all_exhausted"},
            unit=2,
        ),
    }
