"""Trains a small regression with Accelerate on a shuffled data set that is split over the processes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

BATCH = 4
EPOCHS = 2


class ShardedBatches:
    """Gives each process every n-th batch of a shuffled data set, n being the number of processes."""

    def __init__(self, accelerator, batches):
        self.accelerator = accelerator
        self.batches = batches

    def __iter__(self):
        for index, batch in enumerate(self.batches):
            if index % self.accelerator.num_processes == self.accelerator.process_index:
                yield batch

    def __len__(self):
        return len(self.batches) // self.accelerator.num_processes


def make_data():
    """Return 96 points of a noisy plane, which a fixed generator draws."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(96, 8, generator=generator)
    targets = points @ torch.randn(8, 1, generator=generator)
    return TensorDataset(points, targets + 0.3 * torch.randn(96, 1, generator=generator))


def main():
    """Train for two epochs and print the loss of each."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    set_seed(0, device_specific=True)
    data = make_data()
    order = RandomSampler(data)
    loader = DataLoader(data, batch_sampler=ShardedBatches(accelerator, BatchSampler(order, BATCH, drop_last=True)))
    for epoch in range(EPOCHS):
        total = 0.0
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
