"""Modules and functions that draw inside torch, one of them in a block that is computed again in backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 16), nn.RReLU(), nn.Linear(16, 16), nn.RReLU())
        self.filters = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.FeatureAlphaDropout(0.2), nn.RReLU(inplace=True))
        self.drop = nn.AlphaDropout(0.2)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False, early_stop=False)
        x = x + 0.1 * torch.poisson(x.detach().abs())
        x = self.drop(self.filters(x[:, None]).flatten(1))
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(3)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
model = DistributedDataParallel(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data, seed=3)
torch.manual_seed(3 + dist.get_rank())
sampler.set_epoch(0)
for x, y in DataLoader(data, batch_size=4, sampler=sampler):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
