"""Trains a small network with DDP and recomputes its blocks in the backward pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2


def make_data():
    """Return 64 points of three classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(64, 10, generator=generator), labels)


class Network(nn.Module):
    """Two blocks of a linear layer and a randomized leaky ReLU, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(10, 32), nn.RReLU()),
                nn.Sequential(nn.Linear(32, 32), nn.RReLU()),
            ]
        )
        self.head = nn.Linear(32, 3)

    def forward(self, points):
        """Return the logits of each point."""
        for block in self.blocks:
            points = checkpoint(block, points, use_reentrant=False, early_stop=False)
        return self.head(points)


def main():
    """Train for two epochs and print the loss of each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
