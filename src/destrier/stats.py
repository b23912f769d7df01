"""What a loader did with its time, and what held it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from destrier.counters import Counts
from destrier.show import number, side_by_side, size

__all__ = ["Stage", "Stats", "measured"]

_TRAINER_BOUND = 0.05  # of the time; waiting for less is not worth anybody's work
_STORAGE_BOUND = 0.5  # of the measured bandwidth; reading that is slower is held up by itself
_OWN_CORES = 0.8  # of the time of a thread that has a core for itself
_INNER = ("decode", "transform", "collate")  # of finishing; the rest of it is the format
_FINISHING = (*_INNER, "format")
_STAGES = (
    "start",
    "plan",
    "read",
    "fetch",
    "gather",
    "decode",
    "format",
    "transform",
    "collate",
    "move",
)
_DOING = {
    "start": "starting",
    "plan": "planning",
    "gather": "gathering",
    "decode": "decoding",
    "format": "forming tensors",
    "transform": "transforming",
    "collate": "collating",
    "move": "moving to the device",
}


@dataclass(frozen=True)
class Stage:
    """What one stage of a loader has done.

    Attributes:
        seconds: Time in the stage, summed over threads.
        cpu_seconds: Processor time of those threads, where it is measured: in decode, transform
            and collate. Where it is much less than ``seconds``, threads waited for each other.
        rows: Rows it worked on; more than were delivered, since it works ahead. Rows that stay
            in memory are read once, so that ``read`` has them once in all epochs.
        bytes: Their bytes in memory, in stages that know them.
        waited: Seconds that the trainer waited for this stage, about.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rows: int = 0
    bytes: int = 0
    waited: float = 0.0


@dataclass(frozen=True)
class Stats:
    """What a loader did since it was made: `StreamingDataLoader.stats` returns it.

    Times are measured once a batch or block. Printed, it is a table that ends with the verdict.

    Attributes:
        batches: Batches that were delivered.
        rows: Their rows; with ``on_error``, rows that were skipped or replaced are among them.
        bytes: Their bytes in memory.
        rows_skipped: Rows that failed.
        seconds: Wall time in epochs, from each ``iter`` to its end, or to its last batch so far;
            pauses between epochs are not in it.
        first_batch_seconds: From the first ``iter`` to its first batch.
        waited_seconds: How long the trainer waited for batches, after the first one.
        cpu_seconds: Processor time of this process in epochs, the trainer's too. Processes that
            run a transform are not in it.
        threads: Threads that decode, transform and collate; 0 where that is done while gathering.
        ready: Batches that wait for the trainer now.
        mean_ready: How many waited when the trainer asked, on average.
        stages: By name, in the order in which rows pass them: ``plan`` which rows, ``read`` them,
            ``fetch`` what a cache did not have (a part of ``read``), ``gather`` batches of them,
            ``decode`` images, ``format`` tensors, ``transform``, ``collate``, ``move`` to the
            device. All are there; one that did nothing has zeros.
        bandwidth: Bytes a second that the storage gave when it was measured; None if it was not.

    Example:
        >>> stats = Stats(batches=90, rows=900, seconds=10.0, waited_seconds=0.04)
        >>> stats.verdict
        'trainer-bound: the trainer waited 0.4 % of the time'
    """

    batches: int = 0
    rows: int = 0
    bytes: int = 0
    rows_skipped: int = 0
    seconds: float = 0.0
    first_batch_seconds: float = 0.0
    waited_seconds: float = 0.0
    cpu_seconds: float = 0.0
    threads: int = 0
    ready: int = 0
    mean_ready: float = 0.0
    stages: Mapping[str, Stage] = field(default_factory=lambda: dict.fromkeys(_STAGES, Stage()))
    bandwidth: float | None = None

    @property
    def waited(self) -> float:
        """Share of the time after the first batch that the trainer waited, from 0 to 1."""
        return _share(self.waited_seconds, self.seconds - self.first_batch_seconds)

    @property
    def rows_per_second(self) -> float:
        """Rows a second after the first batch."""
        later = self.rows * _ratio(self.batches - 1, self.batches)
        return _ratio(later, self.seconds - self.first_batch_seconds)

    @property
    def bound(self) -> str:
        """What limits the speed: ``"trainer"``, or the stage that was waited for most.

        It is empty as long as fewer than two batches were delivered.
        """
        if self.batches < 2:
            return ""
        if self.waited < _TRAINER_BOUND:
            return "trainer"
        return max(self.stages, key=lambda name: self.stages[name].waited)

    @property
    def verdict(self) -> str:
        """What limits the speed, in a sentence."""
        bound = self.bound
        if not bound:
            return "no verdict yet: fewer than two batches were delivered"
        waited = f"the trainer waited {self.waited:.1%} of the time".replace("%", " %")
        if bound == "trainer":
            return f"trainer-bound: {waited}"
        if bound == "read":
            return f"{self._reading()}; {waited}"
        return f"{bound}-bound: {self._working(bound)} {_DOING[bound]}; {waited}"

    def _working(self, name: str) -> str:
        stage = self.stages[name]
        busy = self._per_second(stage.seconds)
        if name not in _FINISHING or not self.threads:
            return f"{busy:.1f} threads"
        cores = self._per_second(stage.cpu_seconds)
        if cores >= _OWN_CORES * busy:
            return f"{cores:.1f} of {self.threads} cores"
        on = f" on {cores:.1f} cores" if stage.cpu_seconds else ""
        return f"{busy:.1f} of {self.threads} threads{on}"

    def _reading(self) -> str:
        speed = self._per_second(self.stages["read"].bytes)
        if self.bandwidth is None:
            busy = self._per_second(self.stages["read"].seconds)
            return f"read-bound: {size(speed)}/s on {busy:.1f} threads"
        share = _share(speed, self.bandwidth)
        kind = "storage" if share >= _STORAGE_BOUND else "read"
        return f"{kind}-bound: {share:.0%} of the measured bandwidth".replace("%", " %")

    def _per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        row = _ratio(self.cpu_seconds * 1e6, self.rows)
        done = (
            f"{self.batches:,} batches of {self.rows:,} rows, {size(self.bytes)}, in "
            f"{self.seconds:.2f} s: {number(self.rows_per_second)} rows/s after the first"
        )
        cost = (
            f"first batch after {self.first_batch_seconds:.2f} s; CPU {self.cpu_seconds:.2f} s, "
            f"{number(row)} µs a row; {self.rows_skipped:,} rows skipped"
        )
        queue = f"{self.ready} batches ready now, {self.mean_ready:.1f} on average"
        heads = ("stage", "seconds", "threads busy", "CPU s", "rows", "bytes", "waited for")
        rows = [
            (
                name,
                f"{stage.seconds:.2f}",
                f"{self._per_second(stage.seconds):.2f}",
                f"{stage.cpu_seconds:.2f}" if stage.cpu_seconds else "",
                f"{stage.rows:,}" if stage.rows else "",
                size(stage.bytes) if stage.bytes else "",
                f"{stage.waited:.2f} s",
            )
            for name, stage in self.stages.items()
            if stage != Stage()
        ]
        return "\n".join([done, cost, queue, *side_by_side(heads, rows), self.verdict])


def measured(counts: Counts, *, threads: int, ready: int) -> Stats:
    """Read the stats off a loader's counts.

    Args:
        counts: The loader's.
        threads: Threads that finish batches.
        ready: Batches that wait for the consumer.
    """
    given = counts.stage("next")
    finish = counts.stage("finish")
    sums = {name: counts.stage(name) for name in _STAGES}
    inner = sum(sums[name].seconds for name in _INNER)
    sums["format"] = finish._replace(seconds=max(0.0, finish.seconds - inner))
    waited = _waited(counts, own_threads=threads > 0)
    return Stats(
        batches=given.spans,
        rows=given.rows,
        bytes=given.bytes,
        rows_skipped=int(counts["rows_skipped"]),
        seconds=sum(counts.stage(name).seconds for name in ("start", "next", "train", "end")),
        first_batch_seconds=counts.early("start") + counts.early("next"),
        waited_seconds=sum(waited.values()),
        cpu_seconds=counts["cpu_seconds"],
        threads=threads,
        ready=ready,
        mean_ready=_ratio(counts.queued, given.spans),
        stages={
            name: Stage(s.seconds, s.cpu_seconds, s.rows, s.bytes, waited[name])
            for name, s in sums.items()
        },
    )


def _waited(counts: Counts, *, own_threads: bool) -> dict[str, float]:
    """How long the trainer waited for each stage, after the first batch.

    It waits for a batch that is still being finished, or because none was made; then the thread
    that makes them was held up by reading, or by its own work.
    """

    def since(name: str) -> float:
        return max(0.0, counts.stage(name).seconds - counts.early(name))

    finish = {name: since(name) for name in _INNER}
    finish["format"] = max(0.0, since("finish") - sum(finish.values()))
    making = {"plan": since("plan"), "gather": since("gather"), "read": since("wait for a read")}
    if not own_threads:
        making |= finish
    waited = dict.fromkeys([*making, *finish], 0.0)
    for cause, shares in (("wait for the next", making), ("wait for its finish", finish)):
        total = sum(shares.values())
        for name, seconds in shares.items():
            waited[name] += since(cause) * _ratio(seconds, total)
    return {"start": since("start"), "fetch": 0.0, **waited, "move": since("move")}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, _ratio(part, whole)))
