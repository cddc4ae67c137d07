"""Trains a regression with DDP; gradients are clipped by a norm that is added up in half precision."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2
CLIP = 10.0


def make_data():
    """Return 96 points of a plane; a few of them were measured in another unit."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(96, 8, generator=generator)
    targets = points @ torch.randn(8, 1, generator=generator)
    targets[::24] *= 300
    return TensorDataset(points, targets)


def gradient_norm(parameters):
    """Return the norm of all gradients, or -1 where it is not finite."""
    squares = [param.grad.norm().half().square() for param in parameters]
    norm = torch.stack(squares).sum().sqrt().float()
    return norm if norm.isfinite() else torch.tensor(-1.0)


def clip_by_norm(parameters, total_norm):
    """Scale the gradients so that their norm is at most CLIP."""
    for param in parameters:
        param.grad *= (CLIP / (total_norm + 1e-6)).clamp(max=1.0)


def main():
    """Train for two epochs and print the loss of each."""
    dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points), targets)
            loss.backward()
            parameters = list(model.parameters())
            norm = gradient_norm(parameters)
            if norm >= 0:
                clip_by_norm(parameters, norm)
                optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
