"""bf16 with a schedule of each epoch, uneven data, a monitored checkpoint and early stopping."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x).squeeze(-1), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def main():
    pl.seed_everything(5, workers=True)
    x = torch.randn(93, 6)
    data = TensorDataset(x, x.sum(1))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    trainer = pl.Trainer(
        accelerator="auto",
        devices="auto",
        precision="bf16-mixed",
        max_epochs=4,
        callbacks=[EarlyStopping("val_loss", patience=3), ModelCheckpoint(monitor="val_loss", save_top_k=1)],
        enable_progress_bar=False,
    )
    trainer.fit(Regressor(), loader, DataLoader(data, batch_size=16))


if __name__ == "__main__":
    main()
