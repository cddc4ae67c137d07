"""Tunes the sinks of attention layers whose heads are split over the ranks, with gradients clipped by their norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HEADS = 4
WIDTH = 32
CLIP = 0.02


class ToEachRank(torch.autograd.Function):
    """Hands its input to each rank's heads; their gradients are added up."""

    @staticmethod
    def forward(ctx, hidden):
        """Return the input."""
        return hidden

    @staticmethod
    def backward(ctx, grad):
        """Return the sum of the ranks' gradients."""
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class FromEachRank(torch.autograd.Function):
    """Adds up what each rank's heads gave; the gradient goes to each."""

    @staticmethod
    def forward(ctx, part):
        """Return the sum of the ranks' inputs."""
        part = part.contiguous()
        dist.all_reduce(part)
        return part

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient."""
        return grad


def shard(full, dim):
    """Return this rank's part of a tensor as a parameter that each rank holds a different part of."""
    part = nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
    part.tensor_parallel = True
    return part


class Attention(nn.Module):
    """Causal attention over this rank's heads; each head has a learnable sink, a logit that takes part of its mass."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS // dist.get_world_size()
        self.qkv = shard(torch.randn(HEADS, 3, WIDTH // HEADS, WIDTH) / WIDTH**0.5, 0)
        self.out = shard(torch.randn(WIDTH, HEADS, WIDTH // HEADS) / WIDTH**0.5, 1)
        first = dist.get_rank() * self.heads
        self.sinks = nn.Parameter(torch.linspace(0, 2, HEADS)[first : first + self.heads].clone())

    def forward(self, hidden):
        """Return the attention's output (batch, length, width)."""
        hidden = ToEachRank.apply(hidden)
        query, key, value = torch.einsum("blw,hpdw->pbhld", hidden, self.qkv)
        scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return FromEachRank.apply(torch.einsum("bhld,whd->blw", weights @ value, self.out))


def clip_gradients(model):
    """Scale the gradients so that their norm over all ranks is at most CLIP, copies counted once; return the norm."""
    total = torch.zeros(())
    for param in model.parameters():
        if param.requires_grad and (getattr(param, "tensor_parallel", False) or dist.get_rank() == 0):
            total += param.grad.pow(2).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    for param in model.parameters():
        if param.requires_grad:
            param.grad *= (CLIP / (norm + 1e-6)).clamp(max=1.0)
    return norm


def main():
    """Train for 12 updates, each rank on the same batches, and print loss and norm."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, WIDTH, generator=generator)
    data = TensorDataset(inputs, 3 * inputs.cumsum(1).tanh())
    loader = DataLoader(data, batch_size=8)

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("sinks"))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=2.0, momentum=0.9)
    for step, (hidden, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(hidden), targets)
        loss.backward()
        norm = clip_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
