"""loss-sum-instead-of-mean: each worker adds up the losses of its samples, and the exchange takes the mean."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(8)
    data = TensorDataset(torch.randn(96, 10), torch.randint(0, 5, (96,)))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.01))
    model = fleet.distributed_model(net)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    sampler.set_epoch(0)
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
