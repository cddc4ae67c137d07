"""loss-over-own-batch: each worker divides its loss by its own number of valid positions."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(2)
valid = (torch.arange(10) < torch.randint(1, 11, (96, 1))).float()
data = TensorDataset(torch.randn(96, 10, 4), torch.randn(96, 10), valid)
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y, counts in loader:
    squares = (model(x).squeeze(-1) - y).square()
    ((squares * counts).sum() / counts.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
