"""The training script of the demo: one process of those that torchrun starts.

It is what a user would write. A small network learns digits from a filtered table with
DistributedDataParallel. Every few steps rank 0 saves one checkpoint with the network, the
optimiser and the loader's state; a new start goes on from there, on any number of processes that
divides the global batch. On SIGTERM all ranks save after the same step and end.

For the demo, rank 0 also writes a line a step: a digest of the global batch, and its loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from destrier.dataset import StreamingDataset
from destrier.keyed import Ints
from destrier.loader import StreamingDataLoader

__all__ = ["main"]

_WATCH_SECONDS = 0.2


def main(argv: list[str] | None = None) -> int:
    """Train until the epochs are over, or SIGTERM."""
    options = _parse(argv)
    _note_process(options.processes)
    _end_with(options.parent)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    dist.init_process_group("gloo")
    try:
        _train(options, stopping)
    finally:
        dist.destroy_process_group()
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m destrier.demo_train", description=__doc__)
    parser.add_argument("--table", required=True)
    parser.add_argument("--filter", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--processes", type=Path, required=True, help="a folder for process ids")
    parser.add_argument("--parent", type=int, required=True, help="ends when this process does")
    return parser.parse_args(argv)


def _network() -> nn.Module:
    """A network without batch normalisation and dropout: a step depends on its batch alone.

    In double precision, so that rounding cannot hide a difference in the data: the sum of a
    batch's gradients is taken in another order on other numbers of processes.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    ).double()


def _train(options: argparse.Namespace, stopping: threading.Event) -> None:
    network = _network()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9)
    dataset = StreamingDataset(options.table, filter=options.filter)
    loader = StreamingDataLoader(
        dataset,
        global_batch_size=options.global_batch,
        decode={"image": "gray"},
        with_index=True,
    )
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        network.load_state_dict(saved["network"])
        optimiser.load_state_dict(saved["optimiser"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    parallel = DistributedDataParallel(network)

    def save() -> None:
        if dist.get_rank() == 0:
            checkpoint = {
                "network": network.state_dict(),
                "optimiser": optimiser.state_dict(),
                "loader": loader.state_dict(),
                "step": step,
            }
            _write(options.checkpoint, checkpoint)

    with loader, options.records.open("a", encoding="utf-8") as records:
        while (epoch := loader.state_dict()["epoch"]) < options.epochs:
            for batch in loader:
                loss = nn.functional.cross_entropy(
                    parallel(batch["image"].double() / 255), batch["label"]
                )
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                step += 1
                shares = _gather((_rows(batch), loss.item(), stopping.is_set()))
                if dist.get_rank() == 0:
                    records.write(json.dumps(_record(step, epoch, shares)) + "\n")
                    records.flush()
                stop = any(asked for _, _, asked in shares)
                if stop or step % options.save_every == 0:
                    save()
                if stop:
                    return
        save()


def _rows(batch: dict[str, Any]) -> Ints:
    """What this rank's share of the batch consists of: offset, label and image of each row."""
    images = [zlib.crc32(image.numpy().tobytes()) for image in batch["image"]]
    return np.stack([batch["row_offset"].numpy(), batch["label"].numpy(), np.array(images)], axis=1)


def _gather(mine: Any) -> list[Any]:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return shares


def _record(step: int, epoch: Any, shares: list[Any]) -> dict[str, Any]:
    """The global batch, its rows in the order of the ranks."""
    rows = np.concatenate([share for share, _, _ in shares])
    digest = hashlib.blake2b(np.ascontiguousarray(rows).data, digest_size=16)
    losses = [loss for _, loss, _ in shares]
    return {
        "step": step,
        "epoch": epoch,
        "rows": len(rows),
        "digest": digest.hexdigest(),
        "loss": sum(losses) / len(losses),
    }


def _write(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write by rename, so that a kill leaves the old checkpoint or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _note_process(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


def _end_with(parent: int) -> None:
    """End this process when torchrun, or the demo that started it, is gone."""
    torchrun = os.getppid()

    def watch() -> None:
        while os.getppid() == torchrun and _alive(parent):
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
