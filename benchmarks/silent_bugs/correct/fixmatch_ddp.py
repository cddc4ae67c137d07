"""Semi-supervised learning from two loaders: labelled images, and others with the labels that the model gives them."""

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, MU, THRESHOLD, STEPS = 3, 2, 0.4, 8


def strong(images):
    """Noise and a shift of the brightness of every image."""
    noise = torch.from_numpy(np.random.normal(0, 0.3, size=tuple(images.shape))).float()
    shift = torch.from_numpy(np.random.uniform(-0.2, 0.2, size=(len(images), 1))).float()
    return images + noise + shift


def forever(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def loader_of(dataset, batch_size, world_size):
    return DataLoader(dataset, batch_size=batch_size // world_size, sampler=DistributedSampler(dataset), drop_last=True)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    labels = torch.arange(192) % CLASSES
    images = torch.randn(192, 20) + 0.5 * labels[:, None]
    labelled = forever(loader_of(TensorDataset(images[:64], labels[:64]), 16, world_size))
    unlabelled = forever(loader_of(TensorDataset(images[64:]), 16 * MU, world_size))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(7 * np.pi * step / (16 * STEPS)))
    np.random.seed(rank)
    for step in range(STEPS):
        x, y = next(labelled)
        (u,) = next(unlabelled)
        with torch.no_grad():
            confidence, guessed = model.module(u).softmax(1).max(1)
        logits = model(torch.cat([x, strong(u)]))
        supervised = F.cross_entropy(logits[: len(x)], y)
        per_sample = F.cross_entropy(logits[len(x) :], guessed, reduction="none")
        loss = supervised + (per_sample * (confidence >= THRESHOLD)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
