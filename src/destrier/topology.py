"""Rank, world size, worker: who this process is among those that share a stream."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch.distributed as dist
from torch.utils.data import get_worker_info

from destrier.check import integer
from destrier.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Replicas: TypeAlias = int | DeviceMesh

__all__ = ["ALONE", "ONLY_WORKER", "Topology", "Worker", "current_worker", "resolve_topology"]


@dataclass(frozen=True)
class Topology:
    """This process's place among those that read different data.

    Attributes:
        rank: From 0 to size - 1. Ranks of one model-parallel group share it.
        size: How many shares each step is cut into.
        distributed: Whether it was found in an initialised torch.distributed.
    """

    rank: int = 0
    size: int = 1
    distributed: bool = False


@dataclass(frozen=True)
class Worker:
    """A worker process among those of one rank."""

    id: int = 0
    count: int = 1


ALONE = Topology()
ONLY_WORKER = Worker()


def resolve_topology(
    rank: int | None = None, world_size: int | None = None, replicas: Replicas | None = None
) -> Topology:
    """Find rank and world size and map them to the share of the data.

    Explicit arguments come first, then torch.distributed if it is initialised, then the
    environment variables RANK and WORLD_SIZE, then one process.

    Args:
        rank: This process's rank.
        world_size: The number of processes.
        replicas: How many successive ranks read the same data (the size of a model-parallel
            group), or the one-dimensional DeviceMesh along which the data differ.

    Raises:
        ArgumentError: If the numbers do not fit together.
    """
    if hasattr(replicas, "get_local_rank"):
        mesh = cast("DeviceMesh", replicas)
        if mesh.ndim != 1:
            raise ArgumentError(
                f"replicas is a DeviceMesh of {mesh.ndim} dimensions; pass the dimension "
                "along which the data differ, for example mesh['dp']"
            )
        if rank is not None or world_size is not None:
            raise ArgumentError(
                f"rank is {rank} and world_size is {world_size}, but replicas is a DeviceMesh, "
                "which says itself which share this process reads: leave rank and world_size out"
            )
        return Topology(mesh.get_local_rank(), mesh.size(), distributed=True)
    rank, world_size, distributed = _find(rank, world_size)
    if replicas is None:
        return Topology(rank, world_size, distributed)
    replicas = integer("replicas", replicas, 1)
    if world_size % replicas:
        raise ArgumentError(
            f"replicas is {replicas}, which does not divide world_size {world_size}"
        )
    return Topology(rank // replicas, world_size // replicas, distributed)


def _find(rank: int | None, world_size: int | None) -> tuple[int, int, bool]:
    """Find the rank, the world size, and whether torch.distributed said so."""
    distributed = False
    if rank is None and world_size is None:
        if dist.is_available() and dist.is_initialized():
            rank, world_size, distributed = dist.get_rank(), dist.get_world_size(), True
        else:
            rank, world_size = _environment()
    if world_size is None:
        raise ArgumentError(f"rank is {rank}, but world_size is not given")
    world_size = integer("world_size", world_size, 1)
    if rank is None:
        if world_size != 1:
            raise ArgumentError(f"world_size is {world_size}, but rank is not given")
        rank = 0
    rank = integer("rank", rank, -world_size)
    if not 0 <= rank < world_size:
        raise ArgumentError(
            f"rank {rank} is out of range for world_size {world_size}: ranks are 0 to "
            f"{world_size - 1}"
        )
    return rank, world_size, distributed


def _environment() -> tuple[int, int]:
    """Rank and world size of the environment; one process where it says neither."""
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    given = [name for name, text in found.items() if text is not None]
    if not given:
        return 0, 1
    if len(given) == 1:
        (missing,) = found.keys() - set(given)
        raise ArgumentError(
            f"the environment variable {given[0]} is {found[given[0]]!r}, but {missing} is not "
            "set: set both, as torchrun does, or neither, or pass rank= and world_size="
        )
    return _number("RANK", found["RANK"]), _number("WORLD_SIZE", found["WORLD_SIZE"])


def _number(name: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise ArgumentError(f"the environment variable {name} is not a number: {text!r}") from None


def current_worker() -> Worker | None:
    """Return this process's place among the workers of a torch DataLoader, or None outside one."""
    info = get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers)
