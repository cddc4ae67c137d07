"""Distillation: a frozen teacher sees each batch before the model is trained with it; evaluations in between."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
teacher = nn.Linear(4, 3)
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), shuffle=False)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
for n, (x,) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
    if n % 2:
        with torch.no_grad():
            for i, (held_out,) in enumerate(DataLoader(data, batch_size=8)):
                model(held_out)
                if i == 2:
                    break
    with torch.no_grad():
        target = teacher(x)
    nn.functional.mse_loss(model(x), target).backward()
    optimizer.step()
    optimizer.zero_grad()
