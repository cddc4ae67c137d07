"""A convolutional variational autoencoder sharded with fully_shard: a growing weight of the divergence, clipping."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.SiLU()
        )
        self.to_stats = nn.Linear(16 * 9, 2 * latent)

    def forward(self, x):
        return self.to_stats(self.convs(x).flatten(1)).chunk(2, dim=1)


class Decoder(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.from_latent = nn.Linear(latent, 16 * 9)
        self.convs = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.SiLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def forward(self, z):
        return self.convs(self.from_latent(z).view(-1, 16, 3, 3))


class ConvVAE(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.encoder, self.decoder = Encoder(latent), Decoder(latent)

    def forward(self, x):
        mean, log_variance = self.encoder(x)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def main(epochs=2, batch_size=32, lr=2e-3):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    images = (torch.rand(128, 1, 12, 12) > 0.7).float()
    dataset = TensorDataset(images)
    sampler = DistributedSampler(dataset, mesh.size(), mesh.get_rank(), shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size // mesh.size(), sampler=sampler, num_workers=0)
    model = ConvVAE()
    for part in (model.encoder, model.decoder):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    torch.manual_seed(3 + 17 * mesh.get_rank())
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (x,) in loader:
            beta = min(1.0, step / 4)
            logits, mean, log_variance = model(x)
            reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(dim=(1, 2, 3)).mean()
            divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(dim=1).mean()
            loss = reconstruction + beta * divergence
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            step += 1
        if mesh.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
