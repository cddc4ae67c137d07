"""Warm-up and one cycle of the rate, stepped by every worker, and the mean loss of all workers in the log."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

STEPS = 6


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 10), torch.randn(96, 1))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
    model = fleet.distributed_model(net)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    sampler.set_epoch(0)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < STEPS - 1:
            scheduler.step()
        mean = fleet.all_reduce(loss.item()) / fleet.worker_num()
        if fleet.is_first_worker():
            print(f"{step}: {mean:.5f}, rate {optimizer.param_groups[0]['lr']:.4f}")


if __name__ == "__main__":
    main()
