"""gradients-not-averaged: the encoder is wrapped, the decoder is forgotten and each worker trains its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 12))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    encoder = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12))
    optimizers = [
        fleet.distributed_optimizer(torch.optim.Adam(encoder.parameters(), 0.01)),
        torch.optim.Adam(decoder.parameters(), 0.01),
    ]
    encoder = fleet.distributed_model(encoder)
    sampler.set_epoch(0)
    for (x,) in loader:
        loss = nn.functional.mse_loss(decoder(encoder(x)), x)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
