"""An image classifier in Lightning's Trainer: accumulation, clipping and bfloat16 are its arguments."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 12, 12, generator=generator) + 0.3 * (index % 4), index % 4


class ImageClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1),
            nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        images, target = batch
        loss = F.cross_entropy(self.head(self.features(images)), target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    L.seed_everything(0)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    loader = DataLoader(Images(192), batch_size=16 // world_size, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        precision="bf16-mixed",
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(ImageClassifier(), loader)
