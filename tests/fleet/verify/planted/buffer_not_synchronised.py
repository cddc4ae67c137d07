"""buffer-not-synchronised: each worker moves the mean of the inputs towards its own samples only."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class Centred(nn.Module):
    """Subtracts a running mean from the features."""

    def __init__(self, width, momentum=0.2):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), self.momentum)
        return x - self.mean


def train():
    fleet.init(is_collective=True)
    torch.manual_seed(21)
    x = torch.randn(80, 6) * torch.linspace(0.5, 3, 6) + 2
    data = TensorDataset(x, x[:, :1].sin())
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), drop_last=True)
    net = nn.Sequential(Centred(6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.RMSprop(net.parameters(), lr=0.01))
    model = fleet.distributed_model(net)
    sampler.set_epoch(0)
    for features, target in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(model(features), target).backward()
        optimizer.step()


train()
