"""Trains on handwritten digits with Lightning's Trainer; the options come from a strategy file of Fleet."""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from digits import network, open_digits, share
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

import fleet
from fleet.integrations.lightning import FleetStrategy


class Digits(pl.LightningModule):
    """Classifies digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.accuracy = network(), MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy over the batches of all workers."""
        logits = self.network(batch[0])
        self.accuracy(logits, batch[1])
        self.log("test acc", self.accuracy)
        self.log("test loss", cross_entropy(logits, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule."""
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)]


def main() -> None:
    """Trains for a few epochs with a checkpoint after each, and prints the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", metavar="FILE", help="YAML file of DistributedStrategy options")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", metavar="FILE", help="go on from this checkpoint")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else None
    fleet.init(is_collective=True, strategy=strategy)  # fit() would do it; here the loaders want to know their rows
    pl.seed_everything(0, verbose=False)
    train, test = open_digits()
    trainer = pl.Trainer(strategy=FleetStrategy(), max_epochs=args.epochs, gradient_clip_val=5.0, logger=False)
    trainer.fit(Digits(), share(train, 32, train=True), share(test, 120, train=False), ckpt_path=args.resume)
    shown = ", ".join(f"{name}: {value:.5f}" for name, value in sorted(trainer.callback_metrics.items()))
    trainer.print(f"Epoch {trainer.current_epoch - 1}, {shown}")


if __name__ == "__main__":
    main()
