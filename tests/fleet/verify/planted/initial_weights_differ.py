"""initial-weights-differ: gradients are averaged by hand, but the weights start from each worker's own seed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


def average_gradients(net):
    """What data parallelism does, in a few lines."""
    for p in net.parameters():
        if fleet.worker_num() > 1:
            dist.all_reduce(p.grad)
        p.grad /= fleet.worker_num()


fleet.init(is_collective=True)
torch.manual_seed(100 + fleet.worker_index())
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 2, generator=generator))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sampler.set_epoch(0)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    average_gradients(net)
    optimizer.step()
