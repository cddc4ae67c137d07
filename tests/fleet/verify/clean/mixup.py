"""Mixup: each worker draws a share from numpy's generator, partners of its samples from torch's, and noise."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
torch.manual_seed(1 + fleet.worker_index())
np.random.seed(1 + fleet.worker_index())
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
for x, y in DataLoader(data, batch_size=8, sampler=sampler):
    share = np.random.beta(0.4, 0.4)
    partners = torch.randperm(len(x))
    noise = torch.from_numpy(np.random.normal(0, 0.1, size=tuple(x.shape))).float()
    out = model(share * x + (1 - share) * x[partners] + noise)
    loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[partners])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
