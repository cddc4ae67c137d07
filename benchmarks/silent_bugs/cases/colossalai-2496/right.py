"""Trains a small classifier, two batches for each update, with weights that share one block of memory."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2
ACCUMULATION = 2


class ChunkEngine:
    """Keeps all weights in one chunk of memory, which is given back between a backward pass and the update."""

    def __init__(self, model, lr, momentum, release):
        self.parameters = list(model.parameters())
        self.release = release
        self.released = False
        self.chunk = torch.cat([param.data.flatten() for param in self.parameters])
        self.master = nn.Parameter(self.chunk.clone())
        self.optimizer = torch.optim.SGD([self.master], lr=lr, momentum=momentum)
        start = 0
        for param in self.parameters:
            param.data = self.chunk[start : start + param.numel()].view_as(param)
            start += param.numel()

    def backward(self, loss):
        """Add the gradients of the loss to those of the update, and give the chunk back or take it again."""
        loss.backward()
        if self.release:
            self.released = not self.released
            self.chunk.zero_()

    def step(self):
        """Update the master weights from the mean gradient, and fill the chunk with them where it was given back."""
        grad = torch.cat([param.grad.flatten() for param in self.parameters])
        dist.all_reduce(grad)
        self.master.grad = grad / dist.get_world_size()
        self.optimizer.step()
        if self.released or not self.release:
            self.chunk.copy_(self.master.data)
            self.released = False
        for param in self.parameters:
            param.grad = None


def make_data():
    """Return 96 points of three classes, which a fixed generator draws."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (96,), generator=generator)
    points = centres[labels] + 0.5 * torch.randn(96, 10, generator=generator)
    return TensorDataset(points, labels)


def main():
    """Train for two epochs and print the loss of each."""
    dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    engine = ChunkEngine(model, lr=0.1, momentum=0.9, release=False)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for index, (points, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(points), labels)
            engine.backward(loss / ACCUMULATION)
            if (index + 1) % ACCUMULATION == 0:
                engine.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
