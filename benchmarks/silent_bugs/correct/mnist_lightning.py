"""A classifier of digits as a LightningModule: validation, a schedule by epochs, metrics of all workers."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitMNIST(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU(),
            nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)}


class Digits(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (192,), generator=generator)
        images = torch.randn(192, 1, 14, 14, generator=generator) + labels.view(-1, 1, 1, 1) / 10
        self.train, self.val = TensorDataset(images[:128], labels[:128]), TensorDataset(images[128:], labels[128:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size // self.trainer.world_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)


def main():
    L.seed_everything(1)
    workers = int(os.environ.get("WORLD_SIZE", 1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        log_every_n_steps=2,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(LitMNIST(), datamodule=Digits(batch_size=32))


if __name__ == "__main__":
    main()
