"""One small training with a checkpoint, for tests that interrupt it and go on; every number in it is deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fleet

DATA = torch.arange(24, dtype=torch.float32)


class Training:
    """Model, optimizer, scheduler, data and checkpoint in ``folder``; ``seen`` holds the samples it trained on."""

    def __init__(self, folder: Path | str, options: dict[str, Any] | None = None, **arguments: Any) -> None:
        strategy = fleet.DistributedStrategy()
        strategy.update(options or {})
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))
        self.model = fleet.distributed_model(net)
        self.optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 9], gamma=0.5)
        self.sampler = fleet.elastic.ElasticSampler(DATA, seed=5)
        self.loader = DataLoader(DATA, batch_size=2, sampler=self.sampler)
        self.checkpoint = fleet.elastic.Checkpoint(
            folder, self.model, self.optimizer, self.scheduler, data=self.sampler, **arguments
        )
        self.seen: list[float] = []

    def run(self, epochs: int, stop_at: int = -1) -> Training:
        """Trains up to ``epochs``, or saves after step ``stop_at`` and returns."""
        for epoch in range(self.checkpoint.epoch, epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.sampler.batches(self.loader):
                self.step(batch)
                if self.checkpoint.step == stop_at:
                    self.checkpoint.save()
                    return self
        return self

    def step(self, batch: Tensor) -> None:
        """Trains on one batch."""
        self.seen += batch.tolist()
        self.model(torch.sin(batch[:, None] * torch.arange(1, 5))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def numbers(self) -> list[Tensor]:
        """Everything that must be as in a run that was not interrupted."""
        momentum = [entry["momentum_buffer"].clone() for entry in self.optimizer.state.values()]
        rate = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return [*(p.detach().clone() for p in self.model.parameters()), *momentum, rate, torch.get_rng_state()]
