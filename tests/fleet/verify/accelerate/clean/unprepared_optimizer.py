"""Without accumulation, an optimizer and a schedule that nobody prepared train as they would alone; uneven batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    set_seed(9)
    data = TensorDataset(torch.randn(45, 8), torch.randint(0, 3, (45,)))
    model, loader = accelerator.prepare(nn.Linear(8, 3), DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()


main()
