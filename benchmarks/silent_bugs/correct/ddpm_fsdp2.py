"""A diffusion model whose loop draws timesteps and noise itself, sharded, trained over an endless loader."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, NOISES, BATCH = 8, 40, 16


class Residual(nn.Module):
    def __init__(self, width, time_width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale_shift = nn.Linear(time_width, 2 * width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, time):
        scale, shift = self.scale_shift(time).chunk(2, dim=-1)
        return x + self.net(self.norm(x) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self, points=2, width=24):
        super().__init__()
        self.time = nn.Embedding(NOISES, width)
        self.enter = nn.Linear(points, width)
        self.blocks = nn.ModuleList([Residual(width, width) for _ in range(2)])
        self.leave = nn.Linear(width, points)

    def forward(self, x, t):
        time = self.time(t)
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, time)
        return self.leave(h)


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    angle = 6.28 * torch.rand(64)
    dataset = TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    batches = cycle(DataLoader(dataset, batch_size=BATCH // world_size, sampler=sampler, drop_last=True), sampler)
    model = Denoiser()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.05, NOISES), dim=0)
    torch.manual_seed(rank)
    for step in range(STEPS):
        (x0,) = next(batches)
        t = torch.randint(NOISES, (len(x0),))
        noise = torch.randn(x0.shape)
        signal = alpha_bar[t].sqrt().unsqueeze(1)
        x_t = signal * x0 + (1 - signal**2).sqrt() * noise
        loss = (model(x_t, t) - noise).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"[{step}/{STEPS}] loss: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
