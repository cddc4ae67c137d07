"""scheduler-stepped-unevenly: the schedule follows the evaluation of each worker's own samples."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader, evaluation = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, mode="max", factor=0.5, patience=0)
for _ in range(6):
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in evaluation)
    scheduler.step(right)
