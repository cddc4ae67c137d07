"""A denoising diffusion model on small images: random timesteps and noise in the loop, an average of the weights."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TIMESTEPS, SIZE, BATCH, EPOCHS = 50, 8, 32, 2


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.proj = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        freqs = torch.exp(-torch.arange(self.dim // 2) * 4.0 / (self.dim // 2))
        angles = t[:, None].float() * freqs[None]
        return self.proj(torch.cat([angles.sin(), angles.cos()], dim=1))


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = TimeEmbedding(width)
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 4, stride=2, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.up = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.out = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 1, 3, padding=1))

    def forward(self, x, t):
        h0 = self.inp(x) + self.time(t)[:, :, None, None]
        h = self.down(h0)
        h = h + self.mid(h)
        return self.out(torch.cat([self.up(h), h0], dim=1))


class GaussianDiffusion(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        betas = torch.linspace(1e-4, 0.02, TIMESTEPS)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1.0 - alphas_cumprod).sqrt())

    def q_sample(self, x_start, t, noise):
        scale = self.sqrt_alphas_cumprod[t][:, None, None, None]
        sigma = self.sqrt_one_minus_alphas_cumprod[t][:, None, None, None]
        return scale * x_start + sigma * noise

    def forward(self, x_start):
        t = torch.randint(0, TIMESTEPS, (x_start.shape[0],))
        noise = torch.randn_like(x_start)
        return F.mse_loss(self.model(self.q_sample(x_start, t, noise), t), noise)


class EMA:
    def __init__(self, model, beta=0.95):
        self.beta, self.model = beta, copy.deepcopy(model)

    def update(self, current):
        with torch.no_grad():
            for ema_p, p in zip(self.model.parameters(), current.parameters(), strict=True):
                ema_p.lerp_(p, 1 - self.beta)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    images = torch.rand(128, 1, SIZE, SIZE).round() * 2 - 1
    diffusion = GaussianDiffusion(UNet())
    ema = EMA(diffusion)
    model = DistributedDataParallel(diffusion)
    dataset = TensorDataset(images)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // world_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    torch.manual_seed(1000 + rank)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ema.update(diffusion)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f}")
    if rank == 0:
        torch.save({"step": step, "ema": ema.model.state_dict()}, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
