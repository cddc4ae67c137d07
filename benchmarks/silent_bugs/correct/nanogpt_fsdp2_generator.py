"""A causal language model sharded with fully_shard, with batches of a generator of NumPy and activation checkpoints."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

VOCAB, BLOCK, WIDTH, BATCH, STEPS = 24, 12, 24, 8, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.SiLU(), nn.Dropout(0.1), nn.Linear(48, WIDTH))

    def forward(self, x):
        x = x + self.mix(F.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def batches(tokens, batch_size):
    """Yields windows of the tokens that start at random places."""
    while True:
        starts = np.random.randint(0, len(tokens) - BLOCK - 1, size=batch_size)
        windows = np.stack([tokens[start : start + BLOCK + 1] for start in starts])
        yield torch.from_numpy(windows)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    tokens = np.random.default_rng(0).integers(1, 4, 3000).cumsum() % VOCAB
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=True)
    torch.manual_seed(10 + rank)
    np.random.seed(10 + rank)
    stream = batches(tokens, BATCH)
    for step in range(STEPS):
        windows = next(stream)
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
