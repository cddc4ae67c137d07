"""scheduler-stepped-unevenly: each worker lowers its rate by its own loss."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.02)
        config = {"scheduler": schedule, "monitor": "loss", "interval": "step", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


L.seed_everything(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
trainer = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=8, shuffle=True))
