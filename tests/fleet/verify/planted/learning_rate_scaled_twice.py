"""learning-rate-scaled-twice: the rate grows with the workers in the optimizer and again in the schedule."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

BASE_LR, WARMUP = 0.02, 3


def warmup(step):
    """Rises to the number of workers, as for large batches."""
    return 1 + (fleet.worker_num() - 1) * min(1.0, (step + 1) / WARMUP)


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 10), torch.randint(0, 3, (96,)))
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    inner = torch.optim.SGD(net.parameters(), lr=BASE_LR * fleet.worker_num(), momentum=0.9)
    optimizer = fleet.distributed_optimizer(inner)
    model = fleet.distributed_model(net)
    scheduler = LambdaLR(optimizer, warmup)
    sampler.set_epoch(0)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
