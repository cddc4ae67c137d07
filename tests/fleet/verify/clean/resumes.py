"""Saves a checkpoint after every epoch and resumes from it; seeds torch at the start of each epoch."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()
fleet.init(is_collective=True, log_level="ERROR")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
first = 0
if args.checkpoint.exists():
    state = torch.load(args.checkpoint, weights_only=True)
    net.load_state_dict(state["model"])
    first = state["epoch"] + 1
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.05))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(first, args.epochs):
    torch.manual_seed(epoch)
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if fleet.is_first_worker():
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": net.state_dict(), "epoch": epoch}, args.checkpoint)
    fleet.barrier_worker()
