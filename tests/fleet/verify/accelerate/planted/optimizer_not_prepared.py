"""gradients-not-averaged: accumulate() cannot hold back an optimizer that was left out of prepare()."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, loader = accelerator.prepare(model, DataLoader(data, batch_size=8, shuffle=True))
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
