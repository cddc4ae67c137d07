"""Trains a classifier with dropout by Lightning on two workers, with a validation after each epoch."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
DROPOUT = 0.5


def make_data(seed):
    """Return 64 points of three classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(64, 10, generator=generator), labels)


class Classifier(L.LightningModule):
    """A small network that also prints what it gets right of its last training batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(64, 3))

    def training_step(self, batch, batch_index):
        """Return the loss of a batch."""
        points, labels = batch
        return nn.functional.cross_entropy(self.layers(points), labels)

    def on_train_batch_end(self, outputs, batch, batch_index):
        """Measure the last batch of an epoch without dropout; the validation comes next."""
        if batch_index + 1 < self.trainer.num_training_batches:
            return
        self.eval()
        points, labels = batch
        with torch.no_grad():
            right = (self.layers(points).argmax(-1) == labels).float().mean()
        self.print(f"epoch {self.current_epoch}: loss {outputs['loss']:.4f}, {right:.2f} of the last batch right")

    def on_validation_model_train(self):
        """Train with dropout again after the validation."""
        self.train()

    def validation_step(self, batch, batch_index):
        """Log the loss on other points."""
        points, labels = batch
        loss = nn.functional.cross_entropy(self.layers(points), labels)
        self.log("validation_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    """Train for three epochs."""
    L.seed_everything(0)
    model = Classifier()
    train = DataLoader(make_data(seed=2), batch_size=BATCH, shuffle=True)
    validation = DataLoader(make_data(seed=4), batch_size=16)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, validation)


if __name__ == "__main__":
    main()
