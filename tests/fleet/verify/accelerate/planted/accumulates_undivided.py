"""accumulation-loss-count: more workers take fewer batches for an update, and the loss is divided by no count."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
data = TensorDataset(torch.randn(192, 8), torch.randint(0, 3, (192,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
rounds = 4 // accelerator.num_processes
for i, (x, y) in enumerate(loader, 1):
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    if i % rounds == 0:
        optimizer.step()
        optimizer.zero_grad()
