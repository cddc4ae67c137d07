"""scheduler-stepped-unevenly: the line that lowers the rate slid into the block of the worker that prints."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(6)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for step, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if fleet.is_first_worker():
        print(f"step {step}: {loss.item():.4f}, rate {scheduler.get_last_lr()[0]}")
        scheduler.step()
