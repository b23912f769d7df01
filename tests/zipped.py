"""A zip for the battery, and a slow plan of it, from the definition alone."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from battery import COLUMNS, Kind, Plan
from destrier import Zip
from destrier.state import expanded

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("zip of the longest", "zip of the shortest")


@dataclass(frozen=True)
class Zipped:
    """A kind of zip, of tables.

    Attributes:
        parts: Its sources.
        options: What Zip is given.
    """

    parts: Mapping[str, Kind]
    options: dict[str, Any]
    unit = 1
    any_batch = True

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [f"{name}.{column}" for name in self.parts for column in COLUMNS]

    def make(self, **options: Any) -> Zip:
        """Make such a stream."""
        sources = {name: part.make() for name, part in self.parts.items()}
        return Zip(sources, **{**self.options, **options})

    def samples(self, state: dict[str, Any]) -> int:
        """Samples in an epoch."""
        sizes = [part.samples(state) for part in self.parts.values()]
        return min(sizes) if self.options["stop"] == "shortest" else max(sizes)

    def plan(self, state: dict[str, Any], epoch: int) -> Plan:
        """Write down an epoch; sizes that were chosen are taken from a state."""
        count, briefs, each, ids = self.samples(state), json.loads(state["sources"]), [], []
        for name, part in self.parts.items():
            times = -(-count // part.samples(state))
            passes = [part.plan(expanded(briefs[name]), epoch * times + p) for p in range(times)]
            each.append(list(itertools.chain(*(plan.rows for plan in passes)))[:count])
            ids.append(list(itertools.chain(*(plan.ids for plan in passes)))[:count])
        return Plan(list(zip(*each, strict=True)), ids[0], lambda g: g % state["num_splits"])

    def repeats(self, state: dict[str, Any]) -> bool:  # noqa: ARG002 - of tables it says so
        """Whether every epoch is the same."""
        return False

    def locate(self, batch: dict[str, Any]) -> list[Any]:
        """The rows of a batch, one of each source, of which each is the one that its id says."""
        rows = []
        for name, part in self.parts.items():
            own = {key[len(name) + 1 :]: batch[key] for key in batch if key.startswith(f"{name}.")}
            rows.append(part.locate(own))
        return list(zip(*rows, strict=True))

    def check_coverage(self, rows: list[Any], state: Any, epoch: int) -> None:  # noqa: ARG002
        """Raise unless no row of a source comes twice more often than another one of it."""
        assert len(rows) == self.samples(state)
        for part, own in zip(self.parts.values(), zip(*rows, strict=True), strict=True):
            times = Counter(own)
            counts = {times[offset] for offset in part.listed.tolist()}
            assert max(counts) - min(counts) <= 1


def make_kinds(long: Kind, short: Kind) -> dict[str, Zipped]:
    """Make `KINDS` over two tables."""
    parts = {"long": long, "short": short}
    return {
        "zip of the longest": Zipped(parts, {"stop": "longest", "num_splits": 16, "seed": 3}),
        "zip of the shortest": Zipped(parts, {"stop": "shortest"}),
    }
