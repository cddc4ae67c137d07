"""gradients-clipped-per-part: a home-made clip takes the norm of this worker's shard for that of all gradients."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

MAX_NORM = 0.05


def clip_gradients(model):
    """Scales the local shards when their norm is above the limit."""
    shards = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    norm = torch.sqrt(sum(shard.square().sum() for shard in shards))
    if norm > MAX_NORM:
        for shard in shards:
            shard.mul_(MAX_NORM / (norm + 1e-6))


strategy = fleet.DistributedStrategy()
strategy.sharding = True
strategy.sharding_configs = {"stage": 2}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(3)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.3))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    clip_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
