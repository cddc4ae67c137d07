"""Trains an epoch, saves, and goes on from the checkpoint."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(5, 2)
        self.up = nn.Linear(2, 5)

    def forward(self, x):
        return self.up(torch.tanh(self.down(x)))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self(batch), batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer(epochs):
    return L.Trainer(
        max_epochs=epochs,
        devices=2,
        strategy="ddp_spawn",
        default_root_dir="out",
        enable_progress_bar=False,
        log_every_n_steps=1,
    )


def main():
    L.seed_everything(2)
    data = torch.randn(80, 5)
    first = trainer(1)
    first.fit(AutoEncoder(), DataLoader(data, batch_size=8, shuffle=True))
    first.save_checkpoint("out/last.ckpt")
    trainer(3).fit(AutoEncoder(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path="out/last.ckpt")


if __name__ == "__main__":
    main()
