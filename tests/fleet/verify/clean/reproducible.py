"""A reproducible job: three logical workers on two processes; noise, dropout, batch norm, clipping and a schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleet

strategy = fleet.DistributedStrategy()
strategy.reproducible = True
strategy.reproducible_configs = {"logical_workers": 3}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(5)
data = TensorDataset(torch.randn(44, 1, 8, 8), torch.randint(0, 4, (44,)))
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 64), nn.Tanh(),
    nn.Linear(64, 4),
)  # fmt: skip
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
model = fleet.distributed_model(net)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
sampler = fleet.elastic.ElasticSampler(data, batch_size=4, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, labels in sampler.batches(loader):
        loss = nn.functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (value := fleet.update_loss(loss)) is not None:
            print(f"loss {value:.5f}, rate {optimizer.get_lr():.5f}")
