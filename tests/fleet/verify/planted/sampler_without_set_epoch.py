"""sampler-without-set-epoch: each epoch of this MLP has the order of the first."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

EPOCHS, BATCH = 3, 8


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    x = torch.randn(32, 10)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), shuffle=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05))
    model = fleet.distributed_model(net)
    for epoch in range(EPOCHS):
        total = 0.0
        for features, target in loader:
            loss = nn.functional.mse_loss(model(features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if fleet.is_first_worker():
            print(f"epoch {epoch}: {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
