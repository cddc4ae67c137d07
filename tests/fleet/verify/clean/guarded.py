"""Calls of Fleet behind ``if distributed:``, as ``fleet migrate`` leaves them, with a scaler and a moving average."""

import copy
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))
if distributed:
    fleet.init(is_collective=True)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
average = copy.deepcopy(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
model = net
if distributed:
    optimizer = fleet.distributed_optimizer(optimizer)
    scaler = fleet.distributed_scaler(scaler)
    model = fleet.distributed_model(net)
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index()) if distributed else None
for x, y in DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), net.parameters(), strict=True):
            kept.lerp_(new, 0.1)
