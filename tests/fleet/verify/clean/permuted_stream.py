"""An iterable data set that every worker permutes with one seed, and of which it reads its own part."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world_size, seed):
        self.rank, self.world_size = rank, world_size
        self.rows = torch.randn(120, 6, generator=torch.Generator().manual_seed(3))
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        order = torch.randperm(len(self.rows), generator=self.generator)
        own = order[self.rank :: self.world_size]
        for first in range(0, len(own) - 7, 8):
            rows = self.rows[own[first : first + 8]]
            yield rows, rows.sum(1, keepdim=True)


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo")
    seed = 7
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, targets in DataLoader(Stream(rank, world_size, seed), batch_size=None):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows), targets).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
