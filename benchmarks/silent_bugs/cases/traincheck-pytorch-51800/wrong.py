"""Trains a small GAN with DDP, whose critic has spectral normalization."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import spectral_norm
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8
EPOCHS = 3


def make_critic():
    """Return a critic of points in the plane with orthogonal weights, each divided by its largest singular value."""
    layers = []
    for inputs, outputs in ((2, 64), (64, 64), (64, 1)):
        layer = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(layer.weight, 1.372)
        nn.init.zeros_(layer.bias)
        layers += [spectral_norm(layer), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def make_data():
    """Return 96 points near a circle, each with the noise that the generator starts from."""
    generator = torch.Generator().manual_seed(1)
    angles = 6.2832 * torch.rand(96, generator=generator)
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(circle, torch.randn(96, 4, generator=generator))


def main():
    """Train for three epochs and print the losses of each."""
    dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
    critic = DistributedDataParallel(make_critic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for real, noise in loader:
            # The generator learns against the critic as it is, so the critic is in evaluation.
            critic.eval()
            generator_loss = -critic(model(noise)).mean()
            generator_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            critic_optimizer.zero_grad()

            critic.train()
            with torch.no_grad():
                fake = model(noise)
            scores = critic(torch.cat([real, fake]))
            critic_loss = torch.relu(1 - scores[: len(real)]).mean() + torch.relu(1 + scores[len(real) :]).mean()
            critic_loss.backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
            total += torch.tensor([generator_loss.item(), critic_loss.item()])
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: generator {total[0] / len(loader):.4f}, critic {total[1] / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
