from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from destrier.errors import ArgumentError
from destrier.topology import Topology, Worker, current_worker, resolve_topology


class FakeMesh:
    """As much of a DeviceMesh as is asked for."""

    def __init__(self, rank: int, size: int, ndim: int = 1) -> None:
        self.rank, self.count, self.ndim = rank, size, ndim

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.count


@pytest.fixture
def initialised(monkeypatch):
    """torch.distributed as rank 2 of 6."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)


def environment(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_a_process_by_itself():
    assert resolve_topology() == Topology(0, 1, distributed=False)


def test_environment(monkeypatch):
    environment(monkeypatch, 3, 4)
    assert resolve_topology() == Topology(3, 4)


@pytest.mark.parametrize(("name", "other"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_an_environment_is_an_error(monkeypatch, name, other):
    monkeypatch.setenv(name, "3")
    with pytest.raises(ArgumentError, match=f"variable {name} is '3', but {other} is not set"):
        resolve_topology()
    assert resolve_topology(rank=1, world_size=2) == Topology(1, 2)


def test_torch_distributed_before_environment(monkeypatch, initialised):
    environment(monkeypatch, 3, 4)
    assert resolve_topology() == Topology(2, 6, distributed=True)


def test_arguments_before_all(monkeypatch, initialised):
    environment(monkeypatch, 3, 4)
    assert resolve_topology(rank=1, world_size=2) == Topology(1, 2)
    assert resolve_topology(world_size=1) == Topology(0, 1)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 .* world_size 2"),
        ({"rank": -1, "world_size": 2}, "rank -1 .* world_size 2"),
        ({"rank": 0, "world_size": 0}, "at least 1, got 0"),
        ({"rank": 0, "world_size": -3}, "at least 1, got -3"),
        ({"rank": 1}, "rank is 1, but world_size is not given"),
        ({"world_size": 4}, "world_size is 4, but rank is not given"),
        ({"rank": 0, "world_size": 6, "replicas": 4}, "replicas is 4, .* world_size 6"),
        ({"rank": 0, "world_size": 6, "replicas": 0}, "replicas must be at least 1, got 0"),
        ({"replicas": FakeMesh(0, 2, ndim=2)}, "2 dimensions"),
        (
            {"rank": 1, "world_size": 4, "replicas": FakeMesh(0, 2)},
            "rank is 1 and world_size is 4, but replicas is a DeviceMesh",
        ),
        ({"world_size": 4, "replicas": FakeMesh(0, 2)}, "leave rank and world_size out"),
    ],
)
def test_errors_name_the_values(arguments, shown):
    with pytest.raises(ArgumentError, match=shown):
        resolve_topology(**arguments)


def test_environment_that_is_no_number(monkeypatch):
    environment(monkeypatch, "one", 4)
    with pytest.raises(ArgumentError, match="RANK is not a number: 'one'"):
        resolve_topology()


def test_environment_out_of_range(monkeypatch):
    environment(monkeypatch, 4, 4)
    with pytest.raises(ArgumentError, match="rank 4 is out of range for world_size 4"):
        resolve_topology()


def test_replicas_share_their_data():
    found = [resolve_topology(rank, 6, replicas=2) for rank in range(6)]
    assert [place.rank for place in found] == [0, 0, 1, 1, 2, 2]
    assert {place.size for place in found} == {3}


def test_replicas_of_torch_distributed(initialised):
    assert resolve_topology(replicas=3) == Topology(0, 2, distributed=True)


def test_mesh_dimension():
    assert resolve_topology(replicas=FakeMesh(3, 4)) == Topology(3, 4, distributed=True)


class _Workers(IterableDataset):
    def __iter__(self):
        yield current_worker()


def test_workers_of_a_torch_loader():
    assert current_worker() is None
    loader = DataLoader(_Workers(), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert list(loader) == [Worker(0, 2), Worker(1, 2)]


RANK_PROGRAM = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from destrier.topology import resolve_topology

rank, file = int(sys.argv[1]), sys.argv[2]
before = resolve_topology()
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
places = [before, resolve_topology(), resolve_topology(replicas=2)]
places += [resolve_topology(replicas=mesh[name]) for name in ("dp", "tp")]
print([(place.rank, place.size, place.distributed) for place in places], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_gloo_processes(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK_PROGRAM, str(rank), str(tmp_path / "init")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for rank in range(2):
        assert said[rank].split("\n")[0] == str(
            [(0, 1, False), (rank, 2, True), (0, 1, True), (rank, 2, True), (0, 1, True)]
        )
