"""A residual network with group norm, sharded by stages in bfloat16; metrics are reduced over the workers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, count, classes=4):
        self.count, self.classes = count, classes

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        pixels = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(index))
        return pixels + index % self.classes, index % self.classes


class Block(nn.Module):
    def __init__(self, width_in, width, stride=1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.GroupNorm(4, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width)
        self.shortcut = nn.Identity() if width_in == width else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList([Block(8, 8), Block(8, 16, stride=2)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = torch.zeros(2)
    for images, labels in loader:
        right += torch.stack([(model(images).argmax(1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ResNet()
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for stage in model.stages:
        fully_shard(stage, mp_policy=MixedPrecisionPolicy(**half))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**half, output_dtype=torch.float32))
    data, held_out = Images(128), Images(32)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world_size, sampler=sampler)
    test_loader = DataLoader(held_out, batch_size=16, sampler=DistributedSampler(held_out, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=3, power=2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
