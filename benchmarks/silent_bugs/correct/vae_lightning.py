"""A variational autoencoder as a LightningModule: noise drawn in the step, every worker seeded for itself."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(L.LightningModule):
    def __init__(self, pixels=64, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 48), nn.ReLU(), nn.Linear(48, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 48), nn.ReLU(), nn.Linear(48, pixels))

    def on_train_start(self):
        torch.manual_seed(100 + self.global_rank)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(1)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1)
        loss = (reconstruction + divergence).mean()
        self.log("elbo", -loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(2)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    images = (torch.rand(128, 64) > 0.6).float()
    loader = DataLoader(TensorDataset(images), batch_size=32 // world_size, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp", max_epochs=2, enable_progress_bar=False, logger=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(VAE(), loader)


if __name__ == "__main__":
    main()
