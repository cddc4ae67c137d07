"""Trains with Lightning Fabric, stops after some epochs, and goes on from the checkpoint."""

import os
import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
STOP = 2
BATCH = 8
SAMPLES = 48


def make_data():
    """Returns inputs and targets of a noisy function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 2, generator=generator)).sin() + inputs[:, :2]
    return TensorDataset(inputs, targets)


def fit(fabric, path, epochs, resume):
    """Trains until ``epochs`` epochs are done and writes a checkpoint at the end of each."""
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH, shuffle=False))
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "step": 0}
    if resume:
        fabric.load(path, state)
    for epoch in range(state["epoch"], epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            state["step"] += 1
        fabric.print(f"epoch {epoch}, step {state['step']}: loss {loss.item():.4f}")
        state["epoch"] = epoch + 1
        fabric.save(path, state)


def main():
    """Trains two epochs, and then, as after an interruption, the other two."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    path = os.path.join(fabric.broadcast(tempfile.mkdtemp()), "last.ckpt")
    fit(fabric, path, STOP, resume=False)
    fit(fabric, path, EPOCHS, resume=True)


if __name__ == "__main__":
    main()
