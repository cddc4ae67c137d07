"""BothWrapped: a job that trains has wrapped its model and its optimizer."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fleet.errors import ConfigError, OptionWarning
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._declare.strategy import Strategy


class BothWrapped(Listener):
    """Looks, where ``job`` begins to train, for the call that the script has left out."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def before_wrap(self, module: nn.Module) -> None:
        """Raises ConfigError where another wrapper in ``module`` exchanges its gradients already."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import
        kinds = (DistributedDataParallel,) if fsdp is None else (DistributedDataParallel, *_kinds_of(fsdp))
        own = {id(part) for model in self._job.models for part in model.module.modules()}
        for name, part in module.named_modules():
            if isinstance(part, kinds) and id(part) not in own:
                kind = next(kind.__name__ for kind in kinds if isinstance(part, kind))
                raise ConfigError(
                    f"fleet.distributed_model(): {repr(name) if name else 'the module'} is torch's {kind}, whose "
                    "exchange of gradients and Fleet's would be in each other's way. Pass the plain module: "
                    "fleet.distributed_model() does what DistributedDataParallel does, and strategy.sharding with "
                    "sharding_configs['stage'] = 3 does what FSDP does."
                )

    def before_forward(self, model: WrappedModel) -> None:
        """Raises ConfigError when training starts with an option that acts in the optimizer, and there is none."""
        job = self._job
        if job.optimizers or not torch.is_grad_enabled():
            return
        waiting = [strategy.name for strategy in job.strategies if wraps_optimizers(strategy)]
        if waiting and any(known.training for known in job.models):
            acts = "acts" if len(waiting) == 1 else "act"
            raise ConfigError(
                f"{', '.join(waiting)} {acts} in the optimizer, and fleet.distributed_optimizer(optimizer) "
                "was not called. Call it before training."
            )

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Warns once when an optimizer steps although no model exchanges gradients."""
        self._job.listeners.put_to_sleep(self)
        if self._job.world_size > 1 and not self._job.models:
            warnings.warn(
                "fleet.distributed_optimizer() was called without fleet.distributed_model(): the workers do not "
                "exchange gradients. Call model = fleet.distributed_model(model) as well.",
                OptionWarning,
                stacklevel=4,
            )


def wraps_optimizers(strategy: Strategy) -> bool:
    """Returns whether ``strategy`` acts in the optimizer."""
    return type(strategy).wrap_optimizer is not Strategy.wrap_optimizer


def _kinds_of(fsdp: Any) -> tuple[type, ...]:
    return fsdp.FullyShardedDataParallel, fsdp.FSDPModule
