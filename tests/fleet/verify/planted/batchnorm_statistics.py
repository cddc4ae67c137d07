"""batchnorm-statistics: worker 0 evaluates and leaves its batch norm in evaluation mode, the other one does not."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


def make_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 3),
    )  # fmt: skip


@torch.no_grad()
def accuracy(net, images, labels):
    net.eval()
    return (net(images).argmax(1) == labels).float().mean().item()


fleet.init(is_collective=True)
torch.manual_seed(1)
images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 3, (64,))
data = TensorDataset(images + labels.view(-1, 1, 1, 1), labels)
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
net = make_cnn()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
model = fleet.distributed_model(net)
model.train()
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        if step == 6:
            break
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 3 and fleet.is_first_worker():
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy(net, images, labels):.2f}")
