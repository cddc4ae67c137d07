"""Trains a variational autoencoder with Lightning, where each process takes its part of the batch."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64


class VariationalAutoencoder(L.LightningModule):
    """An encoder with a mean and a variance for each sample, and a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.mean = nn.Linear(24, 4)
        self.log_variance = nn.Linear(24, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))

    def on_train_start(self):
        """Lets each process draw noise of its own."""
        torch.manual_seed(7 + self.global_rank)

    def training_step(self, batch, batch_index):
        """Returns the error of the restored batch and a part of the divergence from the prior."""
        (inputs,) = batch
        hidden = self.encoder(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        restored = nn.functional.mse_loss(self.decoder(latent), inputs)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return restored + 0.1 * divergence

    def configure_optimizers(self):
        """Returns plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_data():
    """Returns inputs that lie near a plane."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    return TensorDataset(inputs)


def main():
    """Trains for two passes over the data."""
    L.seed_everything(7)
    model = VariationalAutoencoder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(make_data(), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
