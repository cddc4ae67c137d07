"""Accumulation by hand: the mean over two micro-batches, exchanged with the second one."""

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

ACCUMULATE = 2


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(96, 12), torch.randn(96, 4))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True))
    model = fleet.distributed_model(net)
    sampler.set_epoch(0)
    for i, (x, y) in enumerate(loader, start=1):
        update = i % ACCUMULATE == 0
        with contextlib.nullcontext() if update else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
            loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()


main()
