"""Trains a small classifier with Accelerate, two batches for each update."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
EPOCHS = 2


def make_data():
    """Return 96 points of three classes, which a fixed generator draws."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (96,), generator=generator)
    points = centres[labels] + 0.5 * torch.randn(96, 10, generator=generator)
    return TensorDataset(points, labels)


def main():
    """Train for two epochs and print the loss of each."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=order)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loss_function = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        total = 0.0
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
