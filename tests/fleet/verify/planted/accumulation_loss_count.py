"""accumulation-loss-count: each loss is divided by micro-batches and workers; the exchange divides by workers, too."""

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

ACCUMULATE = 2

fleet.init(is_collective=True)
rank, world_size = fleet.worker_index(), fleet.worker_num()
torch.manual_seed(7)
data = TensorDataset(torch.randn(96, 12), torch.randn(96, 4))
sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9))
model = fleet.distributed_model(net)

sampler.set_epoch(0)
for i, (x, y) in enumerate(loader):
    last = (i + 1) % ACCUMULATE == 0
    with contextlib.nullcontext() if last else model.no_sync():
        loss = nn.functional.mse_loss(model(x), y) / (ACCUMULATE * world_size)
        loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
