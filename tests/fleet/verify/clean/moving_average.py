"""An MLP with a moving average of its weights, which is what it is evaluated with."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(2)
x = torch.randn(96, 6)
data = TensorDataset(x, x.prod(1, keepdim=True))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
model = fleet.distributed_model(net)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
sampler.set_epoch(0)
for features, target in loader:
    loss = nn.functional.huber_loss(model(features), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(net)
average.eval()
with torch.no_grad():
    print(f"worker {fleet.worker_index()}: {nn.functional.huber_loss(average(x), data.tensors[1]).item():.5f}")
