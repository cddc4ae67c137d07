"""gradients-summed: the exchange adds up gradients of mean losses and divides by nothing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.gradient_scale_configs = {"scale_strategy": "sum"}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(30)
images = torch.rand(48, 3, 8, 8)
data = TensorDataset(images, images.mean((1, 2, 3)).gt(0.5).long())
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=4, sampler=sampler)
net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
