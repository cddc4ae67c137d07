"""A data set without a length, of which the Trainer takes a batch ahead to find the last one."""

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset


class Rows(IterableDataset):
    def __init__(self, number):
        self.rows = torch.randn(number, 8)

    def __iter__(self):
        workers, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        yield from self.rows[rank::workers]


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, rows, index):
        return functional.mse_loss(self.net(rows), rows.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, enable_progress_bar=False)
    trainer.fit(Regression(), DataLoader(Rows(80), batch_size=8))


if __name__ == "__main__":
    main()
