"""A small convolutional network on digits with Fabric: an unchanged loop, losses reduced for the log."""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 36, 32), nn.Linear(32, 10)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(self.dropout(x)))), dim=1)


def run(fabric, batch_size, epochs, lr, gamma):
    seed_everything(1)
    labels = torch.randint(10, (160,))
    images = torch.randn(160, 1, 14, 14) + labels.view(-1, 1, 1, 1) / 10
    train_set, test_set = TensorDataset(images[:128], labels[:128]), TensorDataset(images[128:], labels[128:])
    train_loader = DataLoader(train_set, batch_size=batch_size // fabric.world_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=16)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=gamma)
    torch.manual_seed(1 + fabric.global_rank)
    for epoch in range(1, epochs + 1):
        model.train()
        if fabric.world_size > 1:
            train_loader.sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for data, target in test_loader:
                right += torch.tensor([(model(data).argmax(1) == target).sum(), len(data)])
        right = fabric.all_reduce(right, reduce_op="sum")
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right[0] / right[1]:.1%}")


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    run(fabric, batch_size=32, epochs=2, lr=0.5, gamma=0.7)
