"""A GAN with a Wasserstein loss and a gradient penalty left out: critic and generator sharded, several critic steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT, CRITIC_STEPS, CLIP = 6, 2, 0.05


def generator():
    return nn.Sequential(
        nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Unflatten(1, (4, 4, 4)),
        nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic():
    return nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 16), nn.LeakyReLU(0.2),
        nn.Linear(16, 1),
    )  # fmt: skip


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    dataset = TensorDataset(torch.rand(192, 1, 8, 8) * 2 - 1)
    sampler = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler)
    G, D = generator(), critic()
    fully_shard(G)
    fully_shard(D)
    opt_G = torch.optim.RMSprop(G.parameters(), lr=1e-3)
    opt_D = torch.optim.RMSprop(D.parameters(), lr=1e-3)
    torch.manual_seed(5 + rank)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            z = torch.randn(len(real), LATENT)
            with torch.no_grad():
                fake = G(z)
            opt_D.zero_grad()
            loss_D = D(fake).mean() - D(real).mean()
            loss_D.backward()
            opt_D.step()
            with torch.no_grad():
                for p in D.parameters():
                    p.clamp_(-CLIP, CLIP)
            if (i + 1) % CRITIC_STEPS == 0:
                opt_G.zero_grad()
                loss_G = -D(G(torch.randn(len(real), LATENT))).mean()
                loss_G.backward()
                opt_G.step()
                if rank == 0:
                    print(f"batch {i}: critic {loss_D.item():.4f}, generator {loss_G.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
