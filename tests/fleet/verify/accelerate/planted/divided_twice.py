"""samples-left-out: a loader with a DistributedSampler is divided once more by prepare()."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = torch.utils.data.DistributedSampler(data, accelerator.num_processes, accelerator.process_index)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, sampler=sampler))
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
