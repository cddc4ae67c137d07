"""Trains a small regression with DDP on a data set that the workers divide by a sampler of this script."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

EPOCHS = 3
BATCH = 3
SAMPLES = 37


class PaddedSampler(Sampler):
    """Gives every worker as many samples of the shuffled data set, and fills up with samples from its start."""

    def __init__(self, dataset, rank, world):
        self.dataset = dataset
        self.rank = rank
        self.world = world
        self.epoch = 0
        self.per_worker = -(-len(dataset) // world)

    def set_epoch(self, epoch):
        """Shuffles the next pass in another order."""
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        indices = torch.randperm(len(self.dataset), generator=generator).tolist()
        indices += indices[: self.per_worker * self.world - len(indices)]
        start = self.rank * self.per_worker
        return iter(indices[start : start + self.per_worker])

    def __len__(self):
        return self.per_worker


def make_data():
    """Returns inputs and targets of a noisy linear function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = inputs @ torch.randn(6, 1, generator=generator) + torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, targets)


def main():
    """Trains for three passes and prints the loss of each."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = make_data()
    sampler = PaddedSampler(dataset, rank, dist.get_world_size())
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
