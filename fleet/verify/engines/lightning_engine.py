"""Lightning's scripts, of its Trainer and of Fabric: the processes that verify starts are their devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fleet.env import Environment
from fleet.verify.engines.late_imports import when_imported
from fleet.verify.engines.training_engine import EngineListener, RunPlan, TrainingEngine

_TRAINERS = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = ("lightning.fabric", "lightning_fabric")  # a Trainer of either package uses its own
_COLLECTIVES = ("all_gather", "all_reduce", "reduce", "barrier", "broadcast", "reduce_boolean_decision")
_STARTING = ("ddp_spawn", "ddp_fork", "ddp_notebook")  # as "ddp", in processes that they start


class LightningEngine(TrainingEngine):
    """The processes, the loaders and the calls of Lightning; its workers are a job of ``torch.distributed``."""

    def install(self, listener: EngineListener, plan: RunPlan) -> None:
        """Makes each process one device of Lightning's on the CPU, and loaders keep the line that made them."""
        for package in _FABRICS:
            when_imported(f"{package}.connector", lambda module: _take_processes(module._Connector))
            when_imported(f"{package}.plugins.environments.torchelastic", _be_started)
            when_imported(f"{package}.fabric", _name_loaders)
            when_imported(f"{package}.fabric", lambda module: _launch_first(module.Fabric))
            when_imported(f"{package}.strategies.ddp", lambda module: _watch_calls(listener, module.DDPStrategy))
        for package in _TRAINERS:
            connectors = f"{package}.trainer.connectors"
            when_imported(
                f"{connectors}.accelerator_connector", lambda module: _take_processes(module._AcceleratorConnector)
            )
            when_imported(f"{connectors}.data_connector", _name_loaders)
            when_imported(f"{package}.loops.fetchers", _mark_looking_ahead)
            when_imported(f"{package}.strategies.ddp", lambda module: _watch_calls(listener, module.DDPStrategy))

    def is_wrapper(self, module: nn.Module) -> bool:
        """Returns whether ``module`` is what ``fabric.setup`` made of a model."""
        kind = type(module)
        return kind.__name__ == "_FabricModule" and kind.__module__.startswith(_FABRICS)


def _be_started(module: ModuleType) -> None:
    """Makes Lightning take its processes for started, as those of torchrun are."""
    module.TorchElasticEnvironment.detect = staticmethod(lambda: True)


def _launch_first(fabric: Any) -> None:
    """Makes Fabric join its job before the first setup; a script for ``fabric run`` does not call ``launch()``."""
    # `fabric run` starts the processes itself and forbids launch(); scripts that call it are left as they are.
    validate = fabric._validate_launched

    @wraps(validate)
    def launched(self: Any) -> None:
        if not self._launched:
            self.launch()
        validate(self)

    fabric._validate_launched = launched


def _take_processes(connector: Any) -> None:
    """Makes the settings of a Trainer or of Fabric those of the processes that run; one process is a group of one."""
    build = connector.__init__

    @wraps(build)
    def built(self: Any, *, accelerator: Any = "auto", strategy: Any = "auto", **kwargs: Any) -> None:
        if isinstance(strategy, str):
            strategy = "ddp" if strategy == "auto" else _started(strategy.lower())
        if isinstance(accelerator, str):
            accelerator = "cpu"
        kwargs |= {"devices": Environment().int("WORLD_SIZE") or 1, "num_nodes": 1}
        build(self, accelerator=accelerator, strategy=strategy, **kwargs)  # hands on

    connector.__init__ = built


def _started(strategy: str) -> str:
    """Returns the name of a strategy of processes that are started already."""
    for name in _STARTING:
        strategy = strategy.replace(name, "ddp")
    return strategy


def _name_loaders(module: Any) -> None:
    """Makes a loader that Lightning makes of the user's, with another sampler, keep the name of that."""
    update = module._update_dataloader

    @wraps(update)
    def updated(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        made = update(dataloader, *args, **kwargs)
        if "_fleet_key" in dataloader.__dict__:
            made.__dict__["_fleet_key"] = dataloader.__dict__["_fleet_key"]
        return made

    module._update_dataloader = updated


def _mark_looking_ahead(module: Any) -> None:
    """Makes loaders without a length say that a Trainer takes a batch ahead of training, to find the last one."""
    begin = module._PrefetchDataFetcher.__iter__

    @wraps(begin)
    def begun(fetcher: Any) -> Any:
        for loader in fetcher.combined_loader.flattened:
            if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
                with suppress(TypeError):
                    len(loader)
                    continue
                loader.__dict__["_fleet_looks_ahead"] = True
        return begin(fetcher)

    module._PrefetchDataFetcher.__iter__ = begun


def _watch_calls(listener: EngineListener, strategy: Any) -> None:
    """Makes the calls of all workers tell of themselves; ``self.log(sync_dist=True)`` makes one, too."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            with listener.collective(f"Lightning's {name}"):
                return call(*args, **kwargs)  # hands on

        return called

    for name in _COLLECTIVES:
        if hasattr(strategy, name):
            setattr(strategy, name, watched(name, getattr(strategy, name)))
