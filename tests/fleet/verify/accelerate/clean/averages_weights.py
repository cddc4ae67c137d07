"""Manual accumulation under no_sync(), an average of the weights, a batch size that is found, a reduced loss."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)


@find_executable_batch_size(starting_batch_size=4)
def train(batch_size):
    accelerator.free_memory()
    set_seed(2)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            last = i % 3 == 2
            with nullcontext() if last else accelerator.no_sync(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss / 3)
            if last:
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(accelerator.unwrap_model(model))
                accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()})


train()
