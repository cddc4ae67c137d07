"""gradients-not-averaged: at every fourth update the loop calls a part of the model that prepare() was given."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    net = nn.Sequential(encoder, nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    step = 0
    while step < 14:
        for x, y in loader:
            optimizer.zero_grad()
            if step % 4 == 3:
                loss = -(encoder(x) * encoder(x.roll(1, 1))).sum(1).mean()
            else:
                loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            step += 1


if __name__ == "__main__":
    main()
