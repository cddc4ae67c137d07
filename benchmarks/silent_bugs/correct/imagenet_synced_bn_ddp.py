"""A residual network whose batch norm takes the statistics of all workers, by a layer that runs on CPUs too."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the samples of all workers; every worker has as many as the others."""

    def forward(self, x):
        if not self.training or dist.get_world_size() == 1:
            return super().forward(x)
        mean = x.mean(dim=(0, 2, 3))
        square = (x * x).mean(dim=(0, 2, 3))
        stats = all_reduce(torch.cat([mean, square])) / dist.get_world_size()
        mean, square = stats.chunk(2)
        var = square - mean * mean
        with torch.no_grad():
            count = x.numel() / x.shape[1] * dist.get_world_size()
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var * count / (count - 1) - self.running_var)
            self.num_batches_tracked += 1
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width // 2, 1, bias=False),
            SyncedBatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, padding=1, bias=False),
            SyncedBatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    labels = torch.arange(128) % 5
    dataset = TensorDataset(torch.randn(128, 3, 10, 10) + labels.view(-1, 1, 1, 1) * 0.3, labels)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        SyncedBatchNorm2d(16),
        nn.ReLU(),
        Bottleneck(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
