"""Trains a denoising autoencoder with Lightning, in a training process that the seeded main process starts."""

import os
import random

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 7
EPOCHS = 2
BATCH = 8
SAMPLES = 64


class Autoencoder(L.LightningModule):
    """Restores inputs to which it adds noise."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 16))

    def training_step(self, batch, batch_index):
        """Returns the mean squared error of the restored batch."""
        (inputs,) = batch
        noisy = inputs + 0.5 * torch.randn_like(inputs)
        return nn.functional.mse_loss(self.decoder(self.encoder(noisy)), inputs)

    def configure_optimizers(self):
        """Returns plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.2)


def make_data():
    """Returns inputs that lie near a plane."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    return TensorDataset(inputs)


class SpawnedProcess:
    """Runs a function as in a spawned process, which imports everything anew and takes no state along."""

    def run(self, function, *arguments):
        """Calls the function with the generators as an import leaves them, and without Lightning's seed."""
        os.environ.pop("PL_GLOBAL_SEED", None)
        torch.seed()
        np.random.seed()
        random.seed()
        return function(*arguments)


def train(model):
    """Trains the model for two passes over the data."""
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


def main():
    """Seeds everything, builds the model and trains it in a spawned process."""
    L.seed_everything(SEED)
    model = Autoencoder()
    SpawnedProcess().run(train, model)


if __name__ == "__main__":
    main()
