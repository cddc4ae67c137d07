"""Accelerate's scripts: loaders that take a batch ahead or send batches out, and calls of all workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from fleet.env import export
from fleet.verify.engines.late_imports import when_imported
from fleet.verify.engines.torch_engine import TorchEngine
from fleet.verify.engines.training_engine import EngineJob, EngineListener, RunPlan, TrainingEngine

_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
_COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "wait_for_everyone", "save_state", "pad_across_processes")


class AccelerateEngine(TrainingEngine):
    """The loaders, the models and the calls of an ``Accelerator``; its workers are a job of ``torch.distributed``."""

    def __init__(self) -> None:
        self._plan: list[str] = []

    def install(self, listener: EngineListener, plan: RunPlan) -> None:
        """Makes loaders report their batches to the listener; one process is a group of one, as in any job on CPUs."""
        export({"ACCELERATE_USE_CPU": "true"})  # else workers without a GPU are no job to Accelerate

        def watch_loaders(module: ModuleType) -> None:
            for name in _LOADERS:
                kind = getattr(module, name)
                own = name != "DataLoaderDispatcher"  # which joins batches on worker 0 and sends out their parts
                kind.__iter__ = listener.around_loop(kind.__iter__, _base_of, _is_last, own_batches=own)

        def watch_calls(module: ModuleType) -> None:
            kind = module.Accelerator
            for name in _COLLECTIVES:
                setattr(kind, name, _watched(listener, name, getattr(kind, name)))

        def watch_state(module: ModuleType) -> None:
            module.AcceleratorState.__init__ = _sharding_on_cpu(module, listener)

        def watch_averages(module: ModuleType) -> None:
            module.LocalSGD.__init__ = self._noted(module.LocalSGD.__init__)

        when_imported("accelerate.data_loader", watch_loaders)
        when_imported("accelerate.accelerator", watch_calls)
        when_imported("accelerate.state", watch_state)
        when_imported("accelerate.local_sgd", watch_averages)

    def job(self, model: nn.Module | None) -> EngineJob | None:
        """Returns the job of ``torch.distributed`` where a ``LocalSGD`` lets its workers train apart for a while."""
        job = TorchEngine().job(model) if self._plan else None
        return None if job is None else dataclasses.replace(job, engine="accelerate", plan=tuple(self._plan))

    def _noted(self, build: Callable[..., None]) -> Callable[..., None]:
        @wraps(build)
        def built(made: Any, *args: Any, **kwargs: Any) -> None:
            build(made, *args, **kwargs)  # hands on
            if made.enabled:
                self._plan = ["localsgd"]

        return built


def _base_of(loader: Any) -> Any:
    """Returns the DataLoader that one of Accelerate's takes its batches from."""
    return loader.base_dataloader


def _is_last(loader: Any) -> bool:
    """Returns whether the batch that a loader has given is its last one."""
    return bool(loader.end_of_dataloader)


def _watched(listener: EngineListener, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with listener.collective(f"accelerator.{name}", (args[1:], kwargs)):
            return call(*args, **kwargs)  # hands on

    return called


def _sharding_on_cpu(states: ModuleType, listener: EngineListener) -> Callable[..., None]:
    """Returns the making of Accelerate's state, with which an FSDP2 plugin is used on the CPU, too.

    Accelerate uses it on accelerators alone, and trains on CPUs with DistributedDataParallel.
    """
    build = states.AcceleratorState.__init__
    types = states.DistributedType

    @wraps(build)
    def built(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        build(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)  # hands on
        if fsdp_plugin is None or self.distributed_type != types.MULTI_CPU:
            return
        if fsdp_plugin.fsdp_version != 2:
            listener.note("On the CPU Accelerate trained with DistributedDataParallel in place of FSDP version 1.")
            return
        # Accelerate sets the plugin's precision where it takes the plugin, which it does not on a CPU.
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = states.PartialState._shared_state["distributed_type"] = types.FSDP

    return built
