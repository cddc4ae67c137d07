"""Trains a small classifier with DDP; an engine makes the loader from the data set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 3


class Engine:
    """Holds the model, its optimizer and the loader of the training data."""

    def __init__(self, model, data):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sampler = DistributedSampler(data, shuffle=False)
        self.loader = DataLoader(data, batch_size=BATCH, sampler=self.sampler)

    def train_epoch(self, epoch):
        """Train on each sample once and return the mean loss."""
        self.sampler.set_epoch(epoch)
        total = 0.0
        for points, labels in self.loader:
            loss = nn.functional.cross_entropy(self.model(points), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.item()
        return total / len(self.loader)


def make_data():
    """Return 96 points of three classes, class by class as they lie on the disk."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.arange(3).repeat_interleave(32)
    points = centres[labels] + 0.5 * torch.randn(96, 10, generator=generator)
    return TensorDataset(points, labels)


def main():
    """Train for three epochs and print the loss of each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    engine = Engine(model, make_data())
    for epoch in range(EPOCHS):
        loss = engine.train_epoch(epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
