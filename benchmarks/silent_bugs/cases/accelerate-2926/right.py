"""Trains a small regression with Accelerate: a warm-up, then a decay of the learning rate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
EPOCHS = 2


def make_data():
    """Return 96 points of a noisy plane, which a fixed generator draws."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(96, 8, generator=generator)
    targets = points @ torch.randn(8, 1, generator=generator)
    return TensorDataset(points, targets + 0.1 * torch.randn(96, 1, generator=generator))


def main():
    """Train for two epochs: four updates of warm-up, a tenth of the learning rate after sixteen more."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    decay = StepLR(optimizer, step_size=16, gamma=0.1)
    scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[4])
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(EPOCHS):
        total = 0.0
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.item()
        rate = optimizer.param_groups[0]["lr"]
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}, learning rate {rate:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
