"""Trains one body with two heads, and averages the gradients over the workers through one bucket."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64
TASKS = 2


class TwoHeads(nn.Module):
    """A body, and one head for each task; a head runs if its task is in the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(16, 3) for _ in range(TASKS)])

    def forward(self, inputs, tasks):
        """Returns the output of the head of each sample's task."""
        hidden = self.body(inputs)
        outputs = hidden.new_zeros(len(inputs), 3)
        for task in tasks.unique().tolist():
            rows = tasks == task
            outputs[rows] = self.heads[task](hidden[rows])
        return outputs


class GradientBucket:
    """Puts gradients into one flat tensor, so that one collective averages all of them."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def average(self):
        """Leaves the mean of all workers in the gradients."""
        members = self.parameters
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in members])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, part in zip(members, flat.split([each.numel() for each in members]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))


def make_data():
    """Returns inputs, targets and tasks; the two tasks take turns in the data set."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    tasks = torch.arange(SAMPLES) % TASKS
    weights = torch.randn(TASKS, 8, 3, generator=generator)
    targets = torch.einsum("si,sio->so", inputs, weights[tasks])
    return TensorDataset(inputs, targets, tasks)


def main():
    """Trains for two passes and prints the loss of each."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = TwoHeads()
    bucket = GradientBucket(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(EPOCHS):
        for inputs, targets, tasks in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs, tasks), targets)
            loss.backward()
            bucket.average()
            optimizer.step()
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
