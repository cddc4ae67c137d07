"""Trains a mixture of experts with FSDP2 whose experts are divided over the workers."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64
WIDTH = 16
EXPERTS = 4


class Experts(nn.Module):
    """Experts of one matrix each; a token is sent to the worker that holds its expert, and back."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3, mesh, [Shard(0)]))

    def forward(self, tokens, choice):
        """Returns the output of the chosen expert for each token."""
        world = self.mesh.size()
        group = self.mesh.get_group()
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent = counts.view(world, -1).sum(1).tolist()
        received = arriving.view(world, -1).sum(1).tolist()
        inputs = collectives.all_to_all_single(
            tokens.new_empty(sum(received), WIDTH), tokens[order], received, sent, group=group
        )
        expert = torch.arange(EXPERTS // world).repeat(world).repeat_interleave(arriving)
        outputs = torch.bmm(inputs.unsqueeze(1), self.weight.to_local()[expert]).squeeze(1)
        returned = collectives.all_to_all_single(tokens.new_empty(len(tokens), WIDTH), outputs, sent, received, group)
        return returned[order.argsort()]


class Mixture(nn.Module):
    """A dense layer, a router with one expert for each token, and a dense head."""

    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(mesh)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        """Returns one number for each sample."""
        hidden = torch.tanh(self.embed(inputs))
        gate, choice = self.router(hidden).softmax(-1).max(-1)
        return self.head(hidden + gate.unsqueeze(1) * torch.tanh(self.experts(hidden, choice)))


def make_data():
    """Returns inputs and targets of a noisy function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 1, generator=generator)).sin() + inputs[:, :1]
    return TensorDataset(inputs, targets)


def main():
    """Trains for two passes and prints the loss of each."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(1)
    # All workers share the experts, so each expert has one worker and no replica.
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "experts"))
    model = Mixture(mesh["experts"])
    fully_shard(model.experts, mesh=mesh["replicas"])
    model.experts.set_gradient_divide_factor(world)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
