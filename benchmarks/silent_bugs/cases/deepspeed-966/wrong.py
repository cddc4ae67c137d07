"""Trains an autoencoder whose first and last layer share their weights; each parameter has one rank that updates it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 3


def make_model():
    """Return a narrow autoencoder; the last layer uses the first one's weight and bias."""
    first = nn.Linear(16, 16)
    last = nn.Linear(16, 16)
    last.weight = first.weight
    last.bias = first.bias
    return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), last)


class StageOne:
    """A first stage of ZeRO: a parameter's owner gets its mean gradient, updates it and sends it to the others."""

    def __init__(self, model, lr):
        self.layers = [module for module in model if isinstance(module, nn.Linear)]
        self.parameters = list(model.parameters())
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.owner = {param: index % self.world for index, param in enumerate(self.parameters)}
        mine = [param for param in self.parameters if self.owner[param] == self.rank]
        self.optimizer = torch.optim.Adam(mine, lr=lr)

    def reduce_gradients(self):
        """Add up each gradient on the owner of its parameter, layer by layer as the backward pass made them."""
        for layer in reversed(self.layers):
            for param in layer.parameters():
                dist.reduce(param.grad, dst=self.owner[param])
                param.grad /= self.world

    def step(self):
        """Update the parameters of this rank and receive the others."""
        self.reduce_gradients()
        self.optimizer.step()
        for param in self.parameters:
            dist.broadcast(param.data, src=self.owner[param])
            param.grad = None


def main():
    """Train for three epochs and print the loss of each."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(64, 4, generator=generator) @ torch.randn(4, 16, generator=generator)
    data = TensorDataset(points)
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    model = make_model()
    optimizer = StageOne(model, lr=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for (inputs,) in loader:
            loss = nn.functional.mse_loss(model(inputs), inputs)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
