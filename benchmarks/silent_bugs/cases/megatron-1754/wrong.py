"""Trains a small language model whose vocabulary is divided over the workers by tensor parallelism."""

import os

import torch
import torch.distributed as dist
from torch import nn

STEPS = 10
VOCABULARY = 33
WIDTH = 16
LENGTH = 12


class Copy(torch.autograd.Function):
    """Hands the same tensor to all parts of a layer, and sums their gradients."""

    @staticmethod
    def forward(ctx, tensor):
        """Returns the tensor."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        """Returns the sum of all workers' gradients."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Reduce(torch.autograd.Function):
    """Sums the parts of a layer's output, and hands the gradient to each of them."""

    @staticmethod
    def forward(ctx, tensor):
        """Returns the sum of all workers' tensors."""
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        """Returns the gradient."""
        return gradient


class VocabularyParallelLoss(nn.Module):
    """The output layer and the cross entropy; each worker holds as many rows of the vocabulary."""

    def __init__(self, rank, world):
        super().__init__()
        weight = torch.randn(VOCABULARY, WIDTH) * 0.3
        rows = -(-VOCABULARY // world)
        padded = nn.functional.pad(weight, (0, 0, 0, rows * world - VOCABULARY))
        self.start = rank * rows
        self.weight = nn.Parameter(padded[self.start : self.start + rows].clone())
        self.register_buffer("rows", torch.arange(self.start, self.start + rows))

    def forward(self, hidden, targets):
        """Returns the mean cross entropy."""
        logits = Copy.apply(hidden) @ self.weight.T
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        total = Reduce.apply(logits.exp().sum(-1))
        chosen = Reduce.apply(torch.where(targets.unsqueeze(-1) == self.rows, logits, 0.0).sum(-1))
        return (total.log() - chosen).mean()


class LanguageModel(nn.Module):
    """An embedding and a recurrent layer, the same on every worker, and the divided output layer."""

    def __init__(self, rank, world):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.loss = VocabularyParallelLoss(rank, world)

    def forward(self, tokens):
        """Returns the loss of the next tokens."""
        hidden, _ = self.recurrent(self.embedding(tokens[:, :-1]))
        return self.loss(hidden, tokens[:, 1:])


def main():
    """Trains for ten steps and prints their losses; every worker reads the same batches."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = LanguageModel(rank, dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        start = torch.randint(VOCABULARY, (8, 1), generator=generator)
        tokens = (start + 3 * torch.arange(LENGTH)) % VOCABULARY
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
