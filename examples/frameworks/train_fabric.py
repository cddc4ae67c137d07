"""Trains on handwritten digits with Lightning Fabric; the options come from a strategy file of Fleet."""

from __future__ import annotations

import argparse

import torch
from digits import network, open_digits, share
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

import fleet
from fleet.integrations.fabric import FleetStrategy


def main() -> None:
    """Trains for a few epochs, saves a checkpoint, and prints the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", metavar="FILE", help="YAML file of DistributedStrategy options")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", metavar="FILE", help="write the trained state here")
    args = parser.parse_args()

    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else None
    fabric = Fabric(strategy=FleetStrategy(strategy))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model = network()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 1e-3))
    train, test = open_digits()
    train_loader, test_loader = fabric.setup_dataloaders(share(train, 32, train=True), share(test, 120, train=False))

    loss = torch.zeros(())
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = cross_entropy(model(images), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        accuracy = MulticlassAccuracy(10, average="micro").to(fabric.device)
        with torch.no_grad():
            for images, labels in test_loader:
                accuracy.update(model(images), labels)
        fabric.print(
            f"[Epoch {epoch}] mean loss: {fabric.all_reduce(loss.detach()):.5f}, test acc: {accuracy.compute():.5f}"
        )
    if args.checkpoint:
        fabric.save(args.checkpoint, {"model": model, "optimizer": optimizer, "epoch": args.epochs})


if __name__ == "__main__":
    main()
