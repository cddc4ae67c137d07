"""A sampler of the user's own, metrics over the workers, and averaged weights."""

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)

    def train_dataloader(self):
        data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, seed=7)
        return DataLoader(data, batch_size=8, sampler=sampler)

    def training_step(self, batch, index):
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(scores, y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        max_epochs=3,
        devices=2,
        use_distributed_sampler=False,
        logger=CSVLogger("runs"),
        callbacks=[EMAWeightAveraging(decay=0.9), LearningRateMonitor("step")],
        gradient_clip_val=1.0,
        gradient_clip_algorithm="value",
        enable_progress_bar=False,
        log_every_n_steps=2,
    )
    trainer.fit(Classifier())
