"""Blocks that are computed again in backward, with parameters in two groups."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


strategy = fleet.DistributedStrategy()
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": ["1", "2"]}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(10)
data = TensorDataset(torch.randn(96, 4), torch.randint(0, 3, (96,)))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(4, 16), Block(16), Block(16), nn.Linear(16, 3))
decayed = [p for p in net.parameters() if p.ndim > 1]
plain = [p for p in net.parameters() if p.ndim == 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(groups, lr=3e-3))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
