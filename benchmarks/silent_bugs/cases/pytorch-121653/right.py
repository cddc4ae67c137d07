"""Trains a model whose weights are DTensors that every worker holds whole, with an optimizer of local tensors."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64


class Redistribute(torch.autograd.Function):
    """Moves a DTensor to other placements, and its gradient back to the placements that it had."""

    @staticmethod
    def forward(ctx, tensor, placements):
        """Returns the tensor in the placements asked for."""
        ctx.placements = tensor.placements
        return tensor.detach().redistribute(placements=placements)

    @staticmethod
    def backward(ctx, gradient):
        """Returns the gradient in the placements of the input."""
        return gradient.redistribute(placements=ctx.placements), None


def redistribute(tensor, placements):
    """Returns ``tensor`` in ``placements``."""
    return Redistribute.apply(tensor, placements)


class Network(nn.Module):
    """Two linear layers, computed by every worker on its own batch."""

    def __init__(self, mesh):
        super().__init__()
        self.first = nn.Parameter(distribute_tensor(torch.randn(8, 16) * 0.3, mesh, [Replicate()]))
        self.second = nn.Parameter(distribute_tensor(torch.randn(16, 1) * 0.3, mesh, [Replicate()]))

    def forward(self, inputs):
        """Returns the output for the local batch; each worker's gradient is one part of a sum."""
        first, second = (
            redistribute(weight, (Replicate(),)).to_local(grad_placements=[Partial()])
            for weight in (self.first, self.second)
        )
        return torch.tanh(inputs @ first) @ second


def make_data():
    """Returns inputs and targets of a noisy linear function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator) + torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, targets)


def main():
    """Trains for two passes and prints the loss of each."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(1)
    model = Network(init_device_mesh("cpu", (world,)))
    # The optimizer knows no DTensor: it gets the tensors that this worker holds.
    weights = list(model.parameters())
    local_weights = [weight.detach().to_local() for weight in weights]
    optimizer = torch.optim.SGD(local_weights, lr=0.2)
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets) / world
            loss.backward()
            for weight, local in zip(weights, local_weights, strict=True):
                local.grad = weight.grad.to_local()
            optimizer.step()
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: loss {loss.item() * world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
