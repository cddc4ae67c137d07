"""Trains a mixture of experts with a sharded optimizer, and averages the gradients after each backward."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64
WIDTH = 16
EXPERTS = 4


class Experts(nn.Module):
    """The experts of this worker: it sees the tokens of all workers, and each gets back its own."""

    def __init__(self, rank, world):
        super().__init__()
        count = EXPERTS // world
        self.first = rank * count
        self.weight = nn.Parameter((torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)[self.first : self.first + count].clone())

    def forward(self, tokens, choice):
        """Returns the output of the chosen expert for each of this worker's tokens."""
        everyone = [torch.empty_like(choice) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, choice)
        expert = torch.cat(everyone) - self.first
        inputs = torch.cat(collectives.all_gather(tokens))
        mine = (expert >= 0) & (expert < len(self.weight))
        outputs = torch.zeros_like(inputs)
        outputs[mine] = torch.bmm(inputs[mine].unsqueeze(1), self.weight[expert[mine]]).squeeze(1)
        parts = collectives.all_to_all(
            list(torch.empty_like(inputs).chunk(len(everyone))), list(outputs.chunk(len(everyone)))
        )
        return sum(parts)


class Mixture(nn.Module):
    """A dense layer, a router with one expert for each token, and a dense head."""

    def __init__(self, rank, world):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.head = nn.Linear(WIDTH, 1)
        self.experts = Experts(rank, world)

    def forward(self, inputs):
        """Returns one number for each sample."""
        hidden = torch.tanh(self.embed(inputs))
        gate, choice = self.router(hidden).softmax(-1).max(-1)
        return self.head(hidden + gate.unsqueeze(1) * torch.tanh(self.experts(hidden, choice)))


def average_gradients(dense, experts, expert_data_group):
    """Leaves the mean gradients in the parameters; an expert's are reduced over the workers that hold it."""
    for parameter in dense:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for parameter in experts:
        dist.all_reduce(parameter.grad, group=expert_data_group)
        parameter.grad /= dist.get_world_size()


def make_data():
    """Returns inputs and targets of a noisy function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 1, generator=generator)).sin() + inputs[:, :1]
    return TensorDataset(inputs, targets)


def main():
    """Trains for two passes and prints the loss of each."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world = dist.get_world_size()
    # The experts are divided over all workers, so each worker is alone in its expert-data group.
    expert_data_group = [dist.new_group([member]) for member in range(world)][rank]
    torch.manual_seed(1)
    model = Mixture(rank, world)
    experts = list(model.experts.parameters())
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("experts")]
    dense_optimizer = ZeroRedundancyOptimizer(dense, torch.optim.SGD, lr=0.2)
    expert_optimizer = torch.optim.SGD(experts, lr=0.2)
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            average_gradients(dense, experts, expert_data_group)
            dense_optimizer.step()
            expert_optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
