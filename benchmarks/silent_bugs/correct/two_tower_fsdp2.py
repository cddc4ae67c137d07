"""Two towers with in-batch negatives over all workers: item vectors are gathered with their gradients."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tower(nn.Module):
    def __init__(self, features, dim=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    taste = torch.randn(128, 6)
    data = TensorDataset(taste + 0.1 * torch.randn(128, 6), taste @ torch.randn(6, 10))
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=32 // world_size, sampler=sampler, drop_last=True)
    query, item = Tower(6), Tower(10)
    fully_shard(query)
    fully_shard(item)
    optimizer = torch.optim.AdamW([*query.parameters(), *item.parameters()], lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            q, k = query(x), item(y)
            candidates = torch.cat(dist_fn.all_gather(k))
            targets = torch.arange(len(q)) + rank * len(q)
            loss = F.cross_entropy(q @ candidates.T / 0.1, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
