"""DeepFM as a LightningModule with two parameter groups and an early stop on the reduced loss of a validation."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZES, DIM = (20, 15, 10), 6


class DeepFM(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, DIM) for size in SIZES])
        self.linears = nn.ModuleList([nn.Embedding(size, 1) for size in SIZES])
        self.deep = nn.Sequential(nn.Linear(DIM * len(SIZES), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, fields):
        columns = fields.unbind(1)
        vectors = torch.stack([table(column) for table, column in zip(self.tables, columns, strict=True)], 1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        linear = sum(table(column).squeeze(1) for table, column in zip(self.linears, columns, strict=True))
        return linear + pairs + self.deep(vectors.flatten(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        fields, clicked = batch
        return F.binary_cross_entropy_with_logits(self(fields), clicked)

    def validation_step(self, batch, batch_idx):
        fields, clicked = batch
        self.log("val_loss", F.binary_cross_entropy_with_logits(self(fields), clicked), sync_dist=True)

    def configure_optimizers(self):
        sparse = [*self.tables.parameters(), *self.linears.parameters()]
        groups = [{"params": sparse, "lr": 2e-2}, {"params": self.deep.parameters(), "lr": 2e-3}]
        return torch.optim.Adam(groups)


def main():
    L.seed_everything(9)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    fields = torch.stack([torch.randint(size, (192,)) for size in SIZES], dim=1)
    clicked = (fields.sum(1) % 2).float()
    train, val = TensorDataset(fields[:128], clicked[:128]), TensorDataset(fields[128:], clicked[128:])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=2,
        callbacks=[EarlyStopping("val_loss", patience=2), LearningRateMonitor()],
        logger=CSVLogger("logs"),
        enable_progress_bar=False,
        log_every_n_steps=2,
    )
    batch_size = 32 // world_size
    trainer.fit(
        DeepFM(), DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=batch_size)
    )


if __name__ == "__main__":
    main()
