"""LAMB in place of Adam, with no decay of the biases."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.lamb = True
strategy.lamb_configs = {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": ["bias"]}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(6)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
