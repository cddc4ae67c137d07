"""Autocast and a GradScaler in the script, with clipping of the gradients that were scaled back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


def train_one_epoch(model, optimizer, scaler, loader):
    model.train()
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


fleet.init(is_collective=True)
torch.manual_seed(12)
data = TensorDataset(torch.randn(64, 1, 6, 6), torch.randint(0, 2, (64,)))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), seed=12)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=0)
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
model = fleet.distributed_model(net)
scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu"))
for epoch in range(2):
    sampler.set_epoch(epoch)
    train_one_epoch(model, optimizer, scaler, loader)
