"""A LightningModule whose step is called through the wrapper, and an optimizer that takes a closure."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    model = Classifier()
    optimizer = model.configure_optimizers()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    for _ in range(3):
        for index, batch in enumerate(loader):

            def closure():
                optimizer.zero_grad()
                loss = model.training_step(batch, index)  # noqa: B023
                fabric.backward(loss)
                return loss

            optimizer.step(closure)


if __name__ == "__main__":
    main()
