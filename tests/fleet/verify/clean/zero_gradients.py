"""Statistics of all workers' rows: the gradient of the last bias is a rounding error, which Adam makes a whole step."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 8))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for first, second in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
    a, b = model(first), model(second)
    count = dist.nn.all_reduce(torch.tensor(float(len(a))))
    mean = dist.nn.all_reduce(a.sum(0)) / count
    alike = dist.nn.all_reduce((a - mean).T @ b) / count
    optimizer.zero_grad()
    ((alike - torch.eye(6)) ** 2).sum().backward()
    optimizer.step()
