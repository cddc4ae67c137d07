"""An image loop with Fabric: mixup by a permutation, one share for all workers, an average of the weights, bfloat16."""

import copy
import os
import random

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


def main():
    fabric = Fabric(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp", precision="bf16-mixed"
    )
    fabric.launch()
    fabric.seed_everything(3)
    labels = torch.arange(128) % CLASSES
    data = TensorDataset(torch.randn(128, 3, 8, 8) + labels.view(-1, 1, 1, 1) / 3, labels)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32 // fabric.world_size, shuffle=True))
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.ReLU(), nn.Flatten(), nn.Linear(432, CLASSES))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    torch.manual_seed(3 + fabric.global_rank)
    for epoch in range(2):
        for images, target in loader:
            share = random.betavariate(0.4, 0.4)
            order = torch.randperm(len(images))
            soft = F.one_hot(target, CLASSES).float()
            output = model(share * images + (1 - share) * images[order])
            loss = F.cross_entropy(output, share * soft + (1 - share) * soft[order])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(p, 0.05)
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
