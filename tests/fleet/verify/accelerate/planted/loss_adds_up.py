"""loss-sum-instead-of-mean: each worker adds up its samples, and the exchange takes the mean."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y, reduction="sum")
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
