"""Skips the first batches of an epoch, saves its state and loads it again; a seedable sampler."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(5)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state("state")
    for epoch in range(2):
        batches = accelerator.skip_first_batches(loader, 5) if epoch == 0 else loader
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            accelerator.wait_for_everyone()
            accelerator.load_state("state")


main()
