"""FleetStrategy for Lightning Fabric: ``Fabric(strategy=FleetStrategy(strategy))``; needs the extra ``lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleet.errors import UnsupportedOptionError
from fleet.integrations._lightning_workers import FleetWorkers, caller_names
from fleet.options import DistributedStrategy
from fleet.training.fleet_model import FleetModel

# isort: split
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl

__all__ = ["FleetStrategy"]

_SUPPORTED = (MixedPrecision, HalfPrecision, DoublePrecision)


class FleetStrategy(FleetWorkers, ParallelStrategy):
    """Trains a Fabric script with the options of a DistributedStrategy.

    The workers are those of the launcher, torchrun or srun; a plain ``python train.py`` is one process.
    ``fabric.launch()`` calls ``fleet.init``, or takes the session of a script that has called it. ``fabric.setup``
    passes the optimizers through ``fleet.distributed_optimizer`` and the module through ``fleet.distributed_model``.

    Args:
        strategy: the options: a ``fleet.DistributedStrategy``, a dictionary of options, or ``None``.

    Raises:
        ConfigError: an option is wrong, or differs from those of the session that runs.
        UnsupportedOptionError: an option that Fabric's loops have no place for; the message says why.

    Example:
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(strategy=FleetStrategy({"sharding": True}))
        >>> fabric.world_size
        1
    """

    def __init__(self, strategy: DistributedStrategy | Mapping[str, Any] | None = None) -> None:
        FleetWorkers.__init__(self, "Fabric", strategy)
        ParallelStrategy.__init__(self, **self._lightning_arguments())
        self._backward_sync_control = FleetBackwardSync()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Which rows this worker trains on; ``None`` where all train on the same."""
        rank, replicas = self._replicas()
        return {"num_replicas": replicas, "rank": rank} if replicas > 1 else None

    def setup_environment(self) -> None:
        """Joins the job."""
        self._start()
        super().setup_environment()
        self._check_precision(self.precision, _SUPPORTED)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Returns module and optimizers as Fleet wraps them, in Fleet's order: the optimizers first."""
        optimizers = [self.setup_optimizer(optimizer) for optimizer in optimizers]
        return self.setup_module(module), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Returns ``module`` with the options around it; raises UnsupportedOptionError for a compiled one."""
        if caller_names("setup", "setup_module").get("compile_kwargs") is not None:  # Fabric has taken it off
            raise UnsupportedOptionError(
                f"fabric.setup(torch.compile({type(module).__name__})) would compile Fleet's own parts around the "
                "module. Pass the module as it is; strategy.to_static = True compiles it."
            )
        return self._wrapped(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns ``optimizer`` with the options around it."""
        return self._wrapped_optimizer(optimizer)

    def module_to_device(self, module: nn.Module) -> None:
        """Moves ``module`` to the device of this worker; a model that Fleet has wrapped is there."""
        if self._found(module) is None:
            module.to(self.root_device)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the whole state under the names of the plain module; every worker calls it."""
        return self._whole_model_state(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state; every worker calls it."""
        return self._whole_optimizer_state(optimizer)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads a whole state; every worker calls it."""
        self._load_model_state(module, state_dict, strict)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint without running code from it; returns what no object in ``state`` has taken."""
        return super().load_checkpoint(path, state, strict, weights_only=self._safely(weights_only))

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Limits the magnitude of every element of the gradients."""
        self.precision.unscale_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(self.precision.main_params(optimizer), clip_value=clip_val)


class FleetBackwardSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``: gradients stay on their worker."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Returns the context of ``model.no_sync()``, where it is ``enabled``."""
        if not enabled:
            return nullcontext()
        if not isinstance(module, FleetModel):
            raise UnsupportedOptionError(
                f"fabric.no_backward_sync() takes a model that fabric.setup() returned, got {type(module).__name__}."
            )
        return module.no_sync()
