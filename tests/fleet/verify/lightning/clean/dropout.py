"""Dropout with masks of each worker's own, a frozen backbone, and two groups of learning rates."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tuned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).requires_grad_(False)
        self.neck = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 3)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def on_train_start(self):
        torch.manual_seed(100 + self.trainer.global_rank)

    def training_step(self, batch, index):
        x, y = batch
        return self.loss(self.head(self.neck(self.backbone(x))), y)

    def configure_optimizers(self):
        groups = [{"params": self.neck.parameters(), "lr": 1e-3}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[1e-3, 1e-2], total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(1)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
trainer = L.Trainer(
    max_steps=12,
    devices=2,
    accelerator="gpu",
    strategy="auto",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Tuned(), DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True))
