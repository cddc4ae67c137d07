"""Batch norm over four rows and a high rate: a rounding error is a percent of the gradients after two updates."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(3)
generator = torch.Generator().manual_seed(0)
x = torch.randn(96, 8, generator=generator)
data = TensorDataset(x, x.sum(1, keepdim=True))
layers = [nn.Linear(8, 32)]
for _ in range(7):
    layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(32, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9))
model = fleet.distributed_model(model)
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
