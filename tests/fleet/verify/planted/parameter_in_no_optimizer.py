"""parameter-in-no-optimizer: two groups with rates of their own, and the positions are in neither."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.randn(5, 16) * 0.02)
        self.classifier = nn.Linear(16, 4)

    def forward(self, ids):
        return self.classifier(torch.relu(self.words(ids) + self.positions))


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (80, 5))
    dataset = TensorDataset(ids, ids % 4)
    sampler = DistributedSampler(dataset, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    net = Tagger()
    groups = [
        {"params": net.words.parameters(), "lr": 0.01},
        {"params": net.classifier.parameters(), "lr": 0.003, "weight_decay": 0.01},
    ]
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(groups))
    model = fleet.distributed_model(net)
    sampler.set_epoch(0)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
