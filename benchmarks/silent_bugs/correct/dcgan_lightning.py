"""A GAN as a LightningModule with manual optimization: two optimizers, toggled in turn."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self, latent=8):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def on_train_start(self):
        torch.manual_seed(7 + self.global_rank)

    def training_step(self, batch, batch_idx):
        (images,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(images), self.latent)

        self.toggle_optimizer(optimizer_g)
        scores = self.discriminator(self.generator(z))
        g_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real, fake = self.discriminator(images), self.discriminator(self.generator(z).detach())
        d_loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        d_loss = (d_loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))) / 2
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)) for part in parts]


def main():
    L.seed_everything(7)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    loader = DataLoader(TensorDataset(torch.rand(128, 64) * 2 - 1), batch_size=32 // world_size, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp_find_unused_parameters_true", max_epochs=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GAN(), loader)


if __name__ == "__main__":
    main()
