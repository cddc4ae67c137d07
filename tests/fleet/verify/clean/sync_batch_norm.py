"""A CNN whose batch norm takes statistics over all workers; each epoch ends with an accuracy."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)
        )
        self.classifier = nn.Linear(8 * 16, 3)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


@torch.no_grad()
def accuracy(model, loader):
    """Every worker looks at its part of the test images."""
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return fleet.metrics.acc(hits, sum(len(y) for _, y in loader))


strategy = fleet.DistributedStrategy()
strategy.sync_batch_norm = True
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(1)
labels = torch.randint(0, 3, (80,))
images = torch.randn(80, 1, 8, 8) + labels.view(-1, 1, 1, 1)
train, test = TensorDataset(images[:64], labels[:64]), TensorDataset(images[64:], labels[64:])
rank, size = fleet.worker_index(), fleet.worker_num()
sampler = DistributedSampler(train, size, rank)
loader = DataLoader(train, batch_size=8, sampler=sampler, drop_last=True)
test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, size, rank, shuffle=False))
net = SmallCNN()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4))
model = fleet.distributed_model(net)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = accuracy(model, test_loader)
    if fleet.is_first_worker():
        print(f"epoch {epoch}: {result:.3f}")
