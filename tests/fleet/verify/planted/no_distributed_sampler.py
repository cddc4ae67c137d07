"""no-distributed-sampler: both workers of this classifier shuffle all samples with the same seed."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fleet import fleet


class Rings(Dataset):
    """Points on two circles."""

    def __init__(self, n):
        angle = torch.rand(n, generator=torch.Generator().manual_seed(5)) * 6.28
        self.label = torch.arange(n) % 2
        radius = 1.0 + self.label
        self.point = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.point[i], self.label[i]


fleet.init(is_collective=True)
torch.manual_seed(42)
loader = DataLoader(Rings(96), batch_size=16, shuffle=True, drop_last=True)
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=1e-2))
for step, (points, labels) in enumerate(loader):
    loss = F.cross_entropy(model(points), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if fleet.is_first_worker():
        print(step, loss.item())
