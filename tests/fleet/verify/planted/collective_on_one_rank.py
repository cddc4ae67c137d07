"""collective-on-one-rank: only the worker that prints takes part in the mean of the loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for step, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2 and fleet.worker_index() == 0:
        mean = fleet.all_reduce(loss.item()) / fleet.worker_num()
        print(f"step {step}: {mean:.4f}")
