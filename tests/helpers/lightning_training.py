"""A LightningModule, and loops of Fabric, of the Trainer and of Fleet that train the same network on the same rows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet
from fleet.integrations.fabric import FleetStrategy as FabricStrategy
from fleet.integrations.lightning import FleetStrategy as TrainerStrategy
from fleet.job.running import RUNNING

Weights = dict[str, Tensor]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
ROWS, CLASSES = 48, 3
for name in ("lightning.pytorch", "lightning.fabric", "fleet"):
    logging.getLogger(name).setLevel(logging.ERROR)


def rows() -> TensorDataset:
    """Returns the rows, equal in all processes."""
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 6, generator=draw), torch.randint(CLASSES, (ROWS,), generator=draw))


def network(norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Returns the network, equal in all processes."""
    torch.manual_seed(3)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


class Classifier(pl.LightningModule):
    """Trains the network; ``optimizers_of`` makes what ``configure_optimizers`` returns from the parameters."""

    def __init__(self, optimizers_of: Callable[[Any], Any] | None = None, **network_options: Any) -> None:
        super().__init__()
        self.net: Any = network(**network_options)
        self.batch = 4
        self.optimizers_of = optimizers_of or (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        return loader(self.batch, shared=RUNNING.session is not None)  # Lightning's own sampler would shuffle

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self.parameters())


class Scored(nn.Module):
    """The network with the loss in its forward, as a training_step computes it, for loops that are not Lightning's."""

    def __init__(self, **network_options: Any) -> None:
        super().__init__()
        self.net = network(**network_options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


def forget_session() -> None:
    """Ends the session of this process; its process group stays, for the next one."""
    if RUNNING.session is not None:
        RUNNING.session.close()
        RUNNING.session = None


def weights_of(model: Any) -> Weights:
    """Returns copies of the parameters and buffers by their names inside ``net``, gathered where they are divided."""
    state = model.state_dict()
    whole = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in state.items()}
    return {name.removeprefix("net."): tensor for name, tensor in whole.items() if name.startswith("net.")}


def loader(batch: int, *, shared: bool = False) -> DataLoader[Any]:
    """Returns the rows in order; with ``shared``, those of this worker."""
    sampler: Any = None
    if shared:
        sampler = DistributedSampler(rows(), fleet.data_replicas(), fleet.data_rank(), shuffle=False)
    return DataLoader(rows(), batch_size=batch, sampler=sampler)


def by_trainer(
    options: Mapping[str, Any] | None, module: Classifier, batch: int = 4, **trainer_options: Any
) -> pl.Trainer:
    """Trains ``module`` for two epochs with FleetStrategy, or without it where ``options`` is None; the Trainer."""
    forget_session()
    strategy: Any = "auto" if options is None else TrainerStrategy(options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = pl.Trainer(**{**QUIET, "max_epochs": 2, **trainer_options}, strategy=strategy)
        module.batch = batch
        trainer.fit(module)
    return trainer


def by_fabric(
    options: Mapping[str, Any] | None,
    optimizer_of: Callable[[Any], Any],
    batch: int = 4,
    clip: Mapping[str, Any] | None = None,
    fabric_options: Mapping[str, Any] | None = None,
    **network_options: Any,
) -> Weights:
    """Returns the weights after two epochs of a Fabric loop, with FleetStrategy or without it."""
    forget_session()
    strategy: Any = "auto" if options is None else FabricStrategy(options)
    fabric = Fabric(accelerator="cpu", strategy=strategy, **(fabric_options or {}))
    fabric.launch()
    scored = Scored(**network_options)
    model, optimizer = fabric.setup(scored, optimizer_of(scored.parameters()))
    data = fabric.setup_dataloaders(loader(batch))
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            fabric.backward(model(x, y))
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
    return weights_of(scored)


def by_fleet(
    options: Mapping[str, Any],
    optimizer_of: Callable[[Any], Any],
    batch: int = 4,
    clip: float | None = None,
    **network_options: Any,
) -> Weights:
    """Returns the weights after two epochs of Fleet's own loop."""
    forget_session()
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy)
    scored = Scored(**network_options)
    optimizer = fleet.distributed_optimizer(optimizer_of(scored.parameters()))
    model = fleet.distributed_model(scored)
    for _ in range(2):
        for x, y in loader(batch, shared=True):
            optimizer.zero_grad()
            model(x, y).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
            optimizer.step()
    return weights_of(scored)


def by_torch(optimizer_of: Callable[[Any], Any], batch: int = 8, clip: float | None = None, **options: Any) -> Weights:
    """Returns the weights after two epochs of plain torch in one process on all rows."""
    scored = Scored(**options)
    optimizer = optimizer_of(scored.parameters())
    for _ in range(2):
        for x, y in loader(batch):
            optimizer.zero_grad()
            scored(x, y).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(scored.parameters(), clip)
            optimizer.step()
    return weights_of(scored)
