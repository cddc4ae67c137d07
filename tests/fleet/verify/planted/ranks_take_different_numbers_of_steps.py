"""ranks-take-different-numbers-of-steps: of 5 files worker 0 reads 3 and worker 1 reads 2."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fleet import fleet


class Files(IterableDataset):
    """Reads every n-th file."""

    def __iter__(self):
        for number in range(fleet.worker_index(), 5, fleet.worker_num()):
            generator = torch.Generator().manual_seed(number)
            for _ in range(8):
                x = torch.randn(8, generator=generator)
                yield x, x[:2]


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    loader = DataLoader(Files(), batch_size=8)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
