"""optimizer-of-other-parameters: the optimizer updates the teacher's copy, and the student stays as it is."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(4)
data = TensorDataset(torch.randn(96, 8))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
teacher = copy.deepcopy(student)
with torch.no_grad():
    for p in teacher.parameters():
        p.add_(torch.randn_like(p) * 0.1)
optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
model = fleet.distributed_model(student)
sampler.set_epoch(0)
for (x,) in loader:
    with torch.no_grad():
        target = teacher(x)
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
