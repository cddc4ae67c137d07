"""Two networks, each with an optimizer, trained in turns on noise of each worker's own."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    maker, for_maker = fabric.setup(maker, torch.optim.Adam(maker.parameters(), lr=1e-3))
    critic, for_critic = fabric.setup(critic, torch.optim.Adam(critic.parameters(), lr=1e-3))
    torch.manual_seed(5 + fabric.global_rank)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    for _epoch in range(3):
        for x, _ in loader:
            made = maker(torch.randn(len(x), 4))
            for_critic.zero_grad()
            fabric.backward(critic(made.detach()).mean() - critic(x).mean() + critic(x).square().mean())
            for_critic.step()
            for_maker.zero_grad()
            fabric.backward(-critic(made).mean())
            for_maker.step()


if __name__ == "__main__":
    main()
