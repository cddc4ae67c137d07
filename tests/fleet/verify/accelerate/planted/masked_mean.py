"""loss-over-own-batch: each worker divides by its own tokens."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
labels = torch.randint(0, 20, (96, 12))
labels[torch.rand(96, 12) < torch.rand(96, 1)] = -100
data = TensorDataset(labels.clamp(min=0), labels)
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
