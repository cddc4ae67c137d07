"""Trains with Accelerate, stops in the middle of the second epoch and goes on from the checkpoint."""

import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
EPOCHS = 3
STOP_EPOCH = 1
STOP_STEP = 3


def make_data():
    """Return 64 points of three classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(64, 10, generator=generator), labels)


def build(accelerator):
    """Return a new model, optimizer and loader, prepared."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def train_step(accelerator, model, optimizer, batch):
    """Train on one batch and return its loss."""
    points, labels = batch
    loss = nn.functional.cross_entropy(model(points), labels)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    return loss.item()


def train_until_stopped(accelerator, folder):
    """Train from the start and save in the middle of an epoch."""
    model, optimizer, loader = build(accelerator)
    for epoch in range(STOP_EPOCH + 1):
        for step, batch in enumerate(loader):
            if epoch == STOP_EPOCH and step == STOP_STEP:
                accelerator.save_state(folder)
                return
            train_step(accelerator, model, optimizer, batch)


def main():
    """Train, stop, build everything anew, load the checkpoint and train to the end."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    folder = os.path.join(tempfile.gettempdir(), f"resume-{os.environ['MASTER_PORT']}")
    train_until_stopped(accelerator, folder)
    accelerator.free_memory()

    model, optimizer, loader = build(accelerator)
    accelerator.load_state(folder)
    for epoch in range(STOP_EPOCH, EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == STOP_EPOCH:
            batches = accelerator.skip_first_batches(loader, STOP_STEP)
        for batch in batches:
            loss = train_step(accelerator, model, optimizer, batch)
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
