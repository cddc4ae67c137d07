"""gradients-not-averaged: the loop calls the model that prepare() was given, not the one it returned."""

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
prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for x, y in loader:
    loss = nn.functional.cross_entropy(accelerator.unwrap_model(prepared)(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
