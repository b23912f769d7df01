"""Train a small GPT on a mixture of packed documents, on any number of processes.

    torchrun --nproc-per-node=2 train.py --until 6
    torchrun --nproc-per-node=3 train.py --until 12

The second call goes on at step 7. Each step is the same 12 blocks, whatever the number of
processes; log.jsonl has a digest of them, and the loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from destrier import Mixture, Packed, StreamingDataLoader

BLOCK, PAD, VOCABULARY = 128, 257, 258
WEIGHTS = {"manual": 3, "code": 1}
COLUMNS = ["input_ids", "labels", "position_ids", "document_ids"]


class Layer(nn.Module):
    """Attention within documents, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return what comes of x, where mask says which tokens see which."""
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class GPT(nn.Module):
    """Two layers, enough to learn what English and Python look like."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.layers = nn.ModuleList([Layer(width, 4) for _ in range(2)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        """Return the logits of the token after each."""
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()
        x = self.token(ids) + self.place(places)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def make_loader() -> StreamingDataLoader:
    """Three blocks of the manual for each one of code, 12 in a step over all processes."""
    sources = {
        name: Packed(
            f"{name}.lance",
            block_size=BLOCK,
            how="best_fit",
            pad_id=PAD,
            labels=True,
            documents=True,
        )
        for name in WEIGHTS
    }
    mixture = Mixture(sources, weights=WEIGHTS, columns=COLUMNS)
    return StreamingDataLoader(mixture, global_batch_size=12)


def digest_of(batch: dict[str, Tensor]) -> str:
    """Return what names the blocks of all processes, in their order."""
    mine = torch.stack([batch[name].long() for name in COLUMNS])
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    return hashlib.sha256(torch.cat(shares, dim=1).numpy().tobytes()).hexdigest()[:16]


def train(until: int) -> None:
    """Train until a step, from the checkpoint if there is one."""
    torch.manual_seed(0)
    model = GPT().double()  # so that rounding hides no difference in the data
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = make_loader()
    step = 0
    if os.path.exists("checkpoint.pt"):
        saved = torch.load("checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # of any number of processes
        step = saved["step"]
    parallel = DistributedDataParallel(model)

    with loader, open("log.jsonl", "a", encoding="utf-8") as log:
        while step < until:
            for batch in loader:
                logits = parallel(batch["input_ids"], batch["position_ids"], batch["document_ids"])
                labels = batch["labels"]
                # The mean over the labels of all processes: they have pads in other numbers.
                total = functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), reduction="sum"
                )
                sums = torch.stack([total.detach(), (labels >= 0).sum()])
                dist.all_reduce(sums)
                optimizer.zero_grad()
                (total * dist.get_world_size() / sums[1]).backward()
                optimizer.step()
                step += 1
                line = {"step": step, "digest": digest_of(batch), "loss": float(sums[0] / sums[1])}
                if dist.get_rank() == 0:
                    print(json.dumps(line), file=log, flush=True)
                if step == until:
                    break
        if dist.get_rank() == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "loader": loader.state_dict(), "step": step}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")  # never half a file


def main() -> None:
    """Train as one of the processes that torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until", type=int, default=100, metavar="STEP")
    until = parser.parse_args().until
    dist.init_process_group("gloo")
    try:
        train(until)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
