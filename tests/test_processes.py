"""Real processes: torch's workers, other ranks, our own workers; and those that die."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import battery
from battery import Kind, expected, make_kind, read
from destrier import (
    ArgumentError,
    IterationError,
    StreamingDataLoader,
    StreamingDataset,
    TransformError,
    WorkerError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 100
COLUMNS = battery.COLUMNS


@pytest.fixture
def kind(shared_table: Any, tmp_path: Path) -> Kind:
    return make_kind("filtered clumps", str(shared_table.path), shared_table.ids, tmp_path)


@pytest.fixture
def plain_kind(shared_table: Any, tmp_path: Path) -> Kind:
    return make_kind("plain", str(shared_table.path), shared_table.ids, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def quick_forkserver() -> None:
    """Let the fork server import once what its processes need, if it does not run already."""
    multiprocessing.set_forkserver_preload(["torch", "destrier", "torch.utils.data"])


def processes() -> set[int]:
    """Processes below this one, without the two helpers that multiprocessing keeps."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            parent = process.ppid()
            status = process.status()
        except psutil.NoSuchProcess:
            continue
        helper = "resource_tracker" in words or ("forkserver" in words and parent == os.getpid())
        if not helper and status != psutil.STATUS_ZOMBIE:
            found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = processes()
    yield
    gc.collect()  # torch's iterators end their workers when they are collected
    until = time.monotonic() + 15
    while processes() - before:
        assert time.monotonic() < until, "a process was left behind"
        time.sleep(0.05)


def in_batches(kind: Kind, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        kind.path,
        columns=COLUMNS,
        global_batch_size=BATCH,
        with_index=True,
        **{**kind.options, **options},
    )


# ---- torch's DataLoader -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["batches", "rows"])
def test_fork_is_refused_at_once(kind: Kind, mode: str) -> None:
    options = {"global_batch_size": 10} if mode == "batches" else {}
    dataset = StreamingDataset(kind.path, columns=["id"], **options, **kind.options)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    iterator = iter(loader)
    with pytest.raises(IterationError, match=r"(?s)fork.*multiprocessing_context='spawn'"):
        next(iterator)
    iterator._shutdown_workers()  # quicker than when it is collected


def test_a_loader_in_a_forked_process_is_refused(kind: Kind) -> None:
    loader = StreamingDataLoader(in_batches(kind))
    next(iter(loader))
    child = os.fork()
    if not child:
        code = 1
        try:
            next(iter(loader))
        except IterationError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    loader.close()


def test_persistent_workers_by_spawn_in_batch_mode(kind: Kind) -> None:
    dataset = in_batches(kind, remainder="keep")
    state = dataset.state_dict()
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )

    def of(epoch: int) -> list[battery.Batch]:
        return expected(kind, state, epoch=epoch, batch=BATCH, remainder="keep")

    assert len(loader) == len(dataset) == len(of(0))
    assert read(kind, loader) == of(0)
    assert read(kind, loader) == of(1)
    dataset.set_epoch(7)
    assert read(kind, loader) == of(7)
    assert read(kind, loader, 2) == of(8)[:2]
    assert read(kind, loader) == of(9)
    with pytest.raises(IterationError, match="StreamingDataLoader"):
        dataset.state_dict()
    assert dataset.bytes_loaded > 0
    dataset.load_state_dict({**state, "epoch": 3, "counter": 2 * BATCH})
    assert dataset.state_dict()["epoch"] == 3
    assert read(kind, loader) == of(3)[2:]
    assert read(kind, loader) == of(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is dropped: workers took up what was loaded
        dataset.set_epoch(3)
    assert read(kind, loader) == of(3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_new_workers_by_forkserver_in_batch_mode(plain_kind: Kind) -> None:
    kind = plain_kind
    state = {**in_batches(kind).state_dict(), "epoch": 2, "counter": 3 * BATCH}
    dataset = in_batches(kind, rank=1, world_size=2)
    dataset.load_state_dict(state)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=3, multiprocessing_context="forkserver"
    )
    how = {"batch": BATCH, "rank": 1, "size": 2}
    torch.manual_seed(0)
    assert read(kind, loader) == expected(kind, state, epoch=2, **how)[3:]
    torch.manual_seed(0)  # workers must not take the epoch from a seed that repeats
    assert read(kind, loader) == expected(kind, state, epoch=3, **how)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_in_row_mode(kind: Kind, persistent: bool) -> None:
    dataset = StreamingDataset(kind.path, columns=["id"], rank=0, world_size=2, **kind.options)
    state = dataset.state_dict()
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="spawn" if persistent else "forkserver",
        persistent_workers=persistent,
    )
    for epoch in range(2):
        parts = [
            battery.rows_of(kind, state, epoch=epoch, size=2, worker=w, workers=2) for w in (0, 1)
        ]
        assert [row["id"] for row in loader] == battery.in_turn(parts)
    with pytest.raises(IterationError, match="StreamingDataLoader"):
        dataset.state_dict()
    assert dataset.consumed_rows == len(dataset)


def test_splits_that_workers_cannot_share_are_an_error(kind: Kind) -> None:
    options = {**kind.options, "num_splits": 9}
    dataset = StreamingDataset(kind.path, columns=["id"], **options)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="forkserver"
    )
    iterator = iter(loader)
    with pytest.raises(ValueError, match=r"num_splits \(9\) must be divisible by .*\(2\)"):
        next(iterator)
    iterator._shutdown_workers()


# ---- torchdata's StatefulDataLoader -----------------------------------------------------------

ignoring = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def stateful(dataset: StreamingDataset, workers: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if workers:
        options["multiprocessing_context"] = "forkserver"
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)


@ignoring
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader(kind: Kind, workers: int) -> None:
    dataset = in_batches(kind, epoch=4)
    whole = [expected(kind, dataset.state_dict(), epoch=e, batch=BATCH) for e in range(7)]
    loader = stateful(dataset, workers)
    assert read(kind, loader, 3) == whole[4][:3]
    state = loader.state_dict()
    del loader
    fresh = stateful(in_batches(kind), workers)
    fresh.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert read(kind, fresh) == whole[4][3:]
    assert read(kind, fresh) == whole[5]
    assert read(kind, fresh) == whole[6]


@ignoring
def test_stateful_data_loader_in_row_mode(kind: Kind) -> None:
    def made() -> StreamingDataset:
        return StreamingDataset(kind.path, columns=["id"], **kind.options)

    whole = battery.rows_of(kind, made().state_dict(), epoch=0)
    loader = stateful(made(), 0)
    iterator = iter(loader)
    head = [next(iterator)["id"] for _ in range(80)]  # whole cycles of 8 splits
    state = loader.state_dict()
    fresh = stateful(made(), 0)
    fresh.load_state_dict(state)
    assert head + [row["id"] for row in fresh] == whole


# ---- ranks ------------------------------------------------------------------------------------

RANK = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
import os
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import battery
from destrier import StateError, StreamingDataLoader, StreamingDataset

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
table, folder = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)


def loader(**options):
    dataset = StreamingDataset(table, columns=["id"], filter="label < 7", **options)
    return StreamingDataLoader(dataset, global_batch_size=100, with_index=True)


with loader(num_splits=8, shuffle_clump_size=3) as first:
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    saved = first.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"loader": first}, checkpoint_id=f"{folder}/checkpoint")
    tail = [batch["sample_index"].tolist() for batch in iterator]
with loader() as second:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"loader": second}, checkpoint_id=f"{folder}/checkpoint")
    assert second.state_dict() == saved, (second.state_dict(), saved)
    assert [batch["sample_index"].tolist() for batch in second] == tail
    assert len(tail) == len(second) - 2
states = [None] * size
dist.all_gather_object(states, saved)
assert all(state == saved for state in states)

with loader(shuffle_seed=rank) as third:
    try:
        next(iter(third))
    except StateError as error:
        assert "disagree" in str(error), error
    else:
        raise AssertionError("ranks with different seeds were not noticed")
dist.destroy_process_group()
print("done")
"""


def test_two_ranks_checkpoint_together_and_must_agree(kind: Kind, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    here = str(Path(__file__).parent)
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": here}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script), kind.path, str(tmp_path)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=150)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    # what two ranks saved, one process loads
    import torch.distributed.checkpoint as dcp

    dataset = StreamingDataset(kind.path, columns=COLUMNS)
    with StreamingDataLoader(dataset, global_batch_size=BATCH, with_index=True) as loader:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"loader": loader}, checkpoint_id=str(tmp_path / "checkpoint"))
        state = loader.state_dict()
        assert (state["counter"], state["num_splits"], state["clump_size"]) == (2 * BATCH, 8, 3)
        assert read(kind, loader) == expected(kind, state, epoch=0, batch=BATCH)[2:]


def test_a_dataset_pickles_small_to_any_process(kind: Kind, tmp_path: Path) -> None:
    dataset = in_batches(kind, epoch=3)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 20_000
    target = tmp_path / "dataset.pickle"
    target.write_bytes(pickled)
    code = (
        "import pickle, sys\n"
        "dataset = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(next(iter(dataset))['row_offset'].tolist())\n"
        "dataset.close()\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True
    )
    first = expected(kind, dataset.state_dict(), epoch=3, batch=BATCH)[0]
    assert said.stdout.strip() == str(list(first.rows))


# ---- our own workers --------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "workers"), [("spawn", 2), ("forkserver", 1)])
def test_transform_workers_give_what_threads_give(kind: Kind, method: str, workers: int) -> None:
    with StreamingDataLoader(in_batches(kind), transform=battery.doubled) as loader:
        state = loader.state_dict()
        threads = [list(loader), list(loader)]
    with StreamingDataLoader(
        in_batches(kind),
        transform=battery.doubled,
        num_workers=workers,
        multiprocessing_context=method,
    ) as loader:
        for epoch in range(2):
            batches = list(loader)
            plan = expected(kind, state, epoch=epoch, batch=BATCH)
            assert [battery.check(kind, batch) for batch in batches] == plan
            for batch, other in zip(batches, threads[epoch], strict=True):
                assert batch.keys() == other.keys()
                for name in ("double", "seed"):
                    assert torch.equal(batch[name], other[name])
                assert os.getpid() not in batch["pid"].tolist()
        assert len({batch["pid"][0].item() for batch in batches}) <= workers
        batches[0]["id"] += 1  # what was delivered can be written to
        loader.load_state_dict({**state, "counter": 3 * BATCH})
        assert read(kind, loader) == expected(kind, state, epoch=0, batch=BATCH)[3:]


def test_a_worker_that_is_killed_is_an_error(kind: Kind) -> None:
    with StreamingDataLoader(
        in_batches(kind), transform=battery.odd_only, num_workers=2, on_error="skip"
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader._workers is not None
        for process in loader._workers._processes:
            assert process.process.pid is not None
            os.kill(process.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="signal 9"):
            for _ in iterator:
                pass
        counter = loader.state_dict()["counter"]
        # the next iterator starts workers anew, and goes on where it failed
        assert len(list(loader)) == len(loader) - counter // BATCH
        assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("transform", "message"), [(battery.dies, "signal 9"), (battery.leaves, "exit code 3")]
)
def test_a_transform_that_ends_its_process_is_an_error(
    kind: Kind, transform: Any, message: str
) -> None:
    with (
        StreamingDataLoader(
            in_batches(kind), transform=transform, num_workers=1, on_error="skip"
        ) as loader,
        pytest.raises(WorkerError, match=message),
    ):
        list(loader)


def test_errors_cross_from_a_worker(kind: Kind) -> None:
    with StreamingDataLoader(in_batches(kind), transform=battery.odd_only, num_workers=1) as loader:
        with pytest.raises(TransformError, match="ValueError: a row that is a multiple of 50") as e:
            list(loader)
        assert kind.ids[e.value.offset] % 50 == 0
    with (
        StreamingDataLoader(in_batches(kind), transform=battery.hopeless, num_workers=1) as loader,
        pytest.raises(TransformError, match="cannot be pickled"),
    ):
        list(loader)


def test_a_transform_that_cannot_be_sent_is_refused(kind: Kind) -> None:
    loader = StreamingDataLoader(in_batches(kind), transform=lambda batch: batch, num_workers=1)
    with loader, pytest.raises(ArgumentError, match="top of a module"):
        next(iter(loader))


def test_fork_is_no_method_for_workers(kind: Kind) -> None:
    for method, message in (("fork", "spawn"), ("nonsense", "nonsense")):
        with pytest.raises(ArgumentError, match=message):
            StreamingDataLoader(
                in_batches(kind),
                transform=battery.odd_only,
                num_workers=1,
                multiprocessing_context=method,
            )


def test_workers_are_not_fewer_than_none(kind: Kind) -> None:
    with pytest.raises(ArgumentError, match="-1"):
        StreamingDataLoader(in_batches(kind), transform=battery.odd_only, num_workers=-1)


def test_workers_without_a_transform_are_not_started(kind: Kind) -> None:
    with StreamingDataLoader(in_batches(kind), num_workers=2) as loader:
        assert next(iter(loader))
        assert not multiprocessing.active_children()


def test_a_parent_that_is_killed_leaves_no_worker(kind: Kind, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys\n"
        "import battery\n"
        "from destrier import StreamingDataLoader, StreamingDataset\n"
        "if __name__ == '__main__':\n"
        "    dataset = StreamingDataset(sys.argv[1], columns=['id'])\n"
        "    loader = StreamingDataLoader(dataset, batch_size=9, transform=battery.odd_only,\n"
        "                                 num_workers=1, on_error='skip')\n"
        "    next(iter(loader))\n"
        "    print(loader._workers._processes[0].process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    said = subprocess.run(
        [sys.executable, str(script), kind.path],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == -signal.SIGKILL
    worker = int(said.stdout)
    until = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the worker lives on without its parent"
        time.sleep(0.05)


def test_numpy_crosses_too(kind: Kind) -> None:
    with StreamingDataLoader(
        in_batches(kind), format="numpy", transform=battery.numbers, num_workers=1
    ) as loader:
        state = loader.state_dict()
        for batch, plan in zip(loader, expected(kind, state, epoch=0, batch=BATCH), strict=True):
            ids = kind.ids[list(plan.rows)]
            assert batch["id"].tolist() == ids.tolist()
            assert batch["vector"].dtype == np.float64
