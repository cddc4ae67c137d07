"""The training of the contract tests as a script: a large weight, a norm, dropout and a block, under any strategy.

The strategy comes from ``--strategy`` of ``python -m fleet verify``. ``--adam`` and ``--pipeline`` say what lamb and a
pipeline want of the script; for a pipeline the model has no dropout, whose masks one process cannot be given.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet


class PairNet(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(16, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(rate))
        self.head = nn.Linear(1024, 4)

    def forward(self, x):
        return self.head(self.layer1(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else None
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    net = PairNet(0.0 if args.pipeline else 0.1)
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    torch.manual_seed(1 + fleet.data_rank())  # masks of its own for each copy of the model
    model = fleet.distributed_model(net, nn.functional.cross_entropy) if args.pipeline else net
    inner = torch.optim.Adam(model.parameters()) if args.adam else torch.optim.SGD(model.parameters(), 0.05, 0.9)
    optimizer = fleet.distributed_optimizer(inner)
    model = model if args.pipeline else fleet.distributed_model(net)
    sampler = DistributedSampler(data, fleet.data_replicas(), fleet.data_rank())
    sampler.set_epoch(0)
    for x, labels in DataLoader(data, batch_size=8, sampler=sampler):
        if args.pipeline:
            model.train_batch([x, labels], optimizer)
            continue
        loss = nn.functional.cross_entropy(model(x).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
