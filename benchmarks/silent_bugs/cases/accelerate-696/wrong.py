"""Trains with Accelerate on batches that a batch sampler of its own makes up."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
EPOCHS = 3


def make_data():
    """Return 64 points of three classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(64, 10, generator=generator), labels)


class ShuffledBatches:
    """Lists of indices, in a new order in every epoch."""

    def __init__(self, size, batch_size):
        self.size = size
        self.batch_size = batch_size
        self.drop_last = True

    def __len__(self):
        return self.size // self.batch_size

    def __iter__(self):
        order = torch.randperm(self.size)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size].tolist()


def main():
    """Train for three epochs and print the loss of each."""
    accelerator = Accelerator(cpu=True)
    # Each worker draws numbers of its own, as its augmentations should.
    set_seed(0, device_specific=True)
    dataset = make_data()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset, batch_sampler=ShuffledBatches(len(dataset), BATCH))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
