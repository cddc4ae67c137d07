"""bits-depend-on-processes: noise comes from a generator of each process, in place of that of the logical workers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleet

strategy = fleet.DistributedStrategy()
strategy.reproducible = True
strategy.reproducible_configs = {"logical_workers": 4}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(3)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
sampler = fleet.elastic.ElasticSampler(data, batch_size=4)
loader = DataLoader(data, batch_size=4, sampler=sampler)
noise = torch.Generator().manual_seed(fleet.worker_index())
for x, y in sampler.batches(loader):
    nn.functional.mse_loss(model(x + 0.1 * torch.randn(x.shape, generator=noise)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
