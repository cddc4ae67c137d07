"""Lightning's manual optimization sends no buffers: each worker keeps batch norm statistics of its own samples.

    torchrun --nproc_per_node 2 lightning_manual_buffers.py

With automatic optimization DistributedDataParallel sends worker 0's buffers before each pass. A manual one turns the
exchange of gradients off while ``training_step`` runs, and DistributedDataParallel then sends no buffers either. The
script prints the running mean that each worker begins its last step with.
"""

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A linear layer behind batch norm."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.begun = 0.0

    def training_step(self, batch: Any) -> torch.Tensor:
        """Returns the loss; keeps the running mean that the step begins with."""
        norm = self.layers[0]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        self.begun = float(norm.running_mean[0])
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Trains both ways."""
    L.seed_everything(0)
    data = TensorDataset(torch.randn(64, 4))
    for manual in (False, True):
        model = Model(manual)
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
        kind = "manual" if manual else "automatic"
        print(f"{kind}: worker {trainer.global_rank} begins its last step with the mean {model.begun:.5f}", flush=True)


if __name__ == "__main__":
    main()
