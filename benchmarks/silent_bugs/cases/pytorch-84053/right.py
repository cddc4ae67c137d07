"""Trains with DDP, keeps an average of the weights and measures the averaged model at the end."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 3


def make_data(seed):
    """Return 64 points of three classes, at a scale of their own."""
    generator = torch.Generator().manual_seed(1)
    centres = 5 + 4 * torch.randn(3, 10, generator=generator)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + 2 * torch.randn(64, 10, generator=generator), labels)


class Network(nn.Module):
    """A small classifier that divides its inputs by their running scale."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
        self.register_buffer("input_scale", torch.ones(()))

    def forward(self, points):
        """Return the logits; in training, move the scale towards the mean size of all workers' inputs."""
        if self.training:
            size = points.abs().mean()
            dist.all_reduce(size)
            self.input_scale = 0.9 * self.input_scale + 0.1 * size / dist.get_world_size()
        return self.layers(points / self.input_scale)


class AveragedModel(nn.Module):
    """A copy of a model whose weights follow the model's as a moving average."""

    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model):
        """Move the average towards the model's present weights."""
        for mine, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(parameter, 1 - self.decay)
        for mine, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(buffer)

    def forward(self, points):
        """Return the logits of the averaged model."""
        return self.module(points)


@torch.no_grad()
def accuracy(model, dataset):
    """Return the part of a dataset that a model classifies right."""
    model.eval()
    points, labels = dataset.tensors
    return (model(points).argmax(-1) == labels).float().mean().item()


def main():
    """Train for three epochs and print what both models get right on other points."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = Network()
    averaged = AveragedModel(network, decay=0.9)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = make_data(seed=2)
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(network)
    held_out = make_data(seed=4)
    if dist.get_rank() == 0:
        print(f"the model: {accuracy(network, held_out):.3f}, averaged: {accuracy(averaged, held_out):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
