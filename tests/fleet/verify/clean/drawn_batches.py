"""nanoGPT's loop: batches drawn from an array, one ahead of the loop, with a seed and micro-batches of each worker."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BLOCK, BATCH, VOCAB = 8, 4, 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, tokens, targets):
        logits = self.head(nn.functional.dropout(self.tokens(tokens), 0.1, self.training))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_batch(data):
    starts = torch.randint(len(data) - BLOCK, (BATCH,))
    rows = [torch.from_numpy(data[i : i + BLOCK + 1].astype(np.int64)) for i in starts]
    return torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    accumulate = 4 // world_size
    torch.manual_seed(1337 + rank)
    data = np.random.RandomState(0).randint(0, VOCAB, 2000).astype(np.uint16)
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = DistributedDataParallel(plain) if world_size > 1 else plain
    batch = draw_batch(data)
    for step in range(8):
        if step % 4 == 0 and rank == 0:
            model.eval()
            with torch.no_grad():
                print(step, plain(*draw_batch(data)).item())
            model.train()
        for micro in range(accumulate):
            model.require_backward_grad_sync = micro == accumulate - 1
            loss = model(*batch) / accumulate
            batch = draw_batch(data)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if world_size > 1:
        dist.destroy_process_group()


main()
