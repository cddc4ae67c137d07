"""samples-left-out: the script divides the samples among the workers, and the sampler divides that part again."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
rank, size = fleet.worker_index(), fleet.worker_num()
torch.manual_seed(13)
x, y = torch.randn(64, 5), torch.randn(64, 1)
data = TensorDataset(x[rank::size], y[rank::size])  # this worker's share
sampler = DistributedSampler(data, size, rank, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for features, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), target).backward()
        optimizer.step()
