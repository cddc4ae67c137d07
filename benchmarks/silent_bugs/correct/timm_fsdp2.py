"""A small vision transformer sharded by blocks: an average of the sharded weights, accumulation, a layer-wise decay."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, PATCHES, CLASSES, ACCUMULATION = 24, 16, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.patch_embed = nn.Linear(12, WIDTH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, PATCHES, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        patches = F.unfold(images, kernel_size=2, stride=2).transpose(1, 2)
        x = self.patch_embed(patches) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def layer_groups(model, lr, decay=0.75):
    groups = [{"params": [model.pos_embed, *model.patch_embed.parameters()], "lr": lr * decay ** len(model.blocks)}]
    for i, block in enumerate(model.blocks):
        groups.append({"params": list(block.parameters()), "lr": lr * decay ** (len(model.blocks) - 1 - i)})
    groups.append({"params": [*model.norm.parameters(), *model.head.parameters()], "lr": lr})
    return groups


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(8)
    labels = torch.arange(192) % CLASSES
    dataset = TensorDataset(torch.randn(192, 3, 8, 8) + 0.5 * labels.view(-1, 1, 1, 1), labels)
    sampler = DistributedSampler(dataset, seed=8)
    loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler, drop_last=True)
    model = ViT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(layer_groups(model, 2e-3), weight_decay=0.05)
    average = [p.detach().clone() for p in model.parameters()]
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for i, (images, target) in enumerate(loader):
            is_last = (i + 1) % ACCUMULATION == 0
            model.set_requires_gradient_sync(is_last)
            loss = F.cross_entropy(model(images), target) / ACCUMULATION
            loss.backward()
            if not is_last:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for kept, p in zip(average, model.parameters(), strict=True):
                    kept.lerp_(p, 0.1)
            if rank == 0:
                print(f"update {(i + 1) // ACCUMULATION}: loss {ACCUMULATION * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
