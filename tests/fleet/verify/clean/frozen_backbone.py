"""A frozen backbone in evaluation mode with a head that learns, in the optimizer alone."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(80, 1, 8, 8), torch.randint(0, 3, (80,)))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = FineTuned()
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2))
    model = fleet.distributed_model(net)
    model.train()
    sampler.set_epoch(0)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
