"""Trains with DDP and a learning rate that warms up and decays, saves in the middle and goes on from the file."""

import math
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 4
WARMUP = 6
STEPS = 32


def make_data():
    """Return 64 points of three classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(64, 10, generator=generator), labels)


def factor(step):
    """Return the learning rate of a step as a part of the highest one."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


class CheckpointManager:
    """Saves and loads the model, the optimizer and the schedule of a training."""

    def __init__(self, model, optimizer, scheduler, use_checkpoint_scheduler=True):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.use_checkpoint_scheduler = use_checkpoint_scheduler

    def save(self, path):
        """Write the states from the first worker."""
        if dist.get_rank() == 0:
            states = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            states["scheduler"] = self.scheduler.state_dict()
            torch.save(states, path)
        dist.barrier()

    def load(self, path):
        """Read the states on every worker."""
        states = torch.load(path, weights_only=True)
        self.model.module.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        if self.use_checkpoint_scheduler:
            self.scheduler.load_state_dict(states["scheduler"])


def build():
    """Return a new model, optimizer and schedule."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, epochs):
    """Train for the given epochs and print the loss of each."""
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, learning rate {scheduler.get_last_lr()[0]:.4f}")


def main():
    """Train two epochs, save, build everything anew, load and train two more."""
    dist.init_process_group("gloo")
    folder = os.path.join(tempfile.gettempdir(), f"schedule-{os.environ['MASTER_PORT']}")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "checkpoint.pt")

    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, range(EPOCHS // 2))
    CheckpointManager(model, optimizer, scheduler).save(path)

    model, optimizer, scheduler = build()
    CheckpointManager(model, optimizer, scheduler).load(path)
    train(model, optimizer, scheduler, range(EPOCHS // 2, EPOCHS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
