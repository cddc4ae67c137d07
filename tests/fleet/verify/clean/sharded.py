"""Sharding in stage 3 with clipping by the norm of the whole gradient, and a checkpoint by worker 0."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.sharding = True
strategy.sharding_configs = {"stage": 3}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(8)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 3))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
state = model.full_state_dict(keep=fleet.is_first_worker())
if fleet.is_first_worker():
    with tempfile.TemporaryDirectory() as folder:
        fleet.save(state, os.path.join(folder, "model.pt"))
