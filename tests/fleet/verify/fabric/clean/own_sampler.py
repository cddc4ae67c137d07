"""Started by `fabric run`, so without launch(); a sampler of the script's own, and masks of each worker's own."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank, seed=4)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    torch.manual_seed(9 + fabric.global_rank)
    for _ in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
