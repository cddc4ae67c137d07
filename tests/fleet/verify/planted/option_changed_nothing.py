"""option-changed-nothing: gradient_merge is on and merges one batch, because k_steps was left out."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet

strategy = fleet.DistributedStrategy()
strategy.gradient_merge = True
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(9)
x = torch.rand(96, 6)
data = TensorDataset(x, (x @ torch.rand(6, 1)).sigmoid())
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 1), nn.Sigmoid())
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.02))
sampler.set_epoch(0)
for features, target in loader:
    loss = nn.functional.binary_cross_entropy(model(features), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
