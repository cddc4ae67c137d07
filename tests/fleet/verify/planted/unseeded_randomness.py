"""unseeded-randomness: the noise of the augmentation comes from a generator that the system seeds."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fleet import fleet


class Noisy(Dataset):
    def __init__(self, count):
        self.x = np.linspace(-1, 1, count, dtype=np.float32)
        self.noise = np.random.default_rng()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i : i + 1] + 0.1 * self.noise.standard_normal(1).astype(np.float32)
        return torch.from_numpy(x), torch.from_numpy(np.sin(3 * self.x[i : i + 1]))


fleet.init(is_collective=True)
torch.manual_seed(0)
data = Noisy(96)
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
