"""gradients-changed-by-worker: each worker adds noise of its own to the gradients after they are averaged."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(4)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
noise = torch.Generator().manual_seed(fleet.worker_index())
sampler.set_epoch(0)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad += 0.1 * torch.randn(parameter.grad.shape, generator=noise)
    optimizer.step()
    optimizer.zero_grad()
