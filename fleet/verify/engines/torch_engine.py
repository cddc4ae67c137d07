"""torch's own engines: DistributedDataParallel, ``fully_shard``, and layers that ``parallelize_module`` divides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fleet.verify.engines.training_engine import EngineJob, EngineListener, RunPlan, TrainingEngine


class TorchEngine(TrainingEngine):
    """Sees through DistributedDataParallel; the modules of the others are the user's own."""

    wrappers = (DistributedDataParallel,)

    def install(self, listener: EngineListener, plan: RunPlan) -> None:
        """Refuses workers that the script starts itself: what they train would not be seen."""
        processes.spawn = processes.start_processes = _refuse_processes

    def job(self, model: nn.Module | None) -> EngineJob | None:
        """Returns what ``init_process_group`` began; ``parallelize_module`` gives each worker a part of one model."""
        if not dist.is_initialized():
            return None
        divided = model is not None and _is_divided(model)
        return EngineJob(engine="torch", data_rank=0 if divided else None, parts=divided)

    def parameters(self, models: list[nn.Module]) -> Mapping[str, Tensor] | None:
        """Returns the whole parameters of divided models."""
        if not any(_is_divided(model) for model in models):
            return None
        named = {name: value for model in models for name, value in model.named_parameters()}
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def _refuse_processes(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "torch.multiprocessing starts processes of the script's own, and fleet verify has started the workers. Call "
        "the function of a worker in this process where os.environ has RANK, as a script for torchrun does"
    )


def _is_divided(model: nn.Module) -> bool:
    """Returns whether the layers of a model are divided; ``fully_shard`` only stores the parameters in parts."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    places = [place for one in model.parameters() if isinstance(one, DTensor) for place in one.placements]
    return any(place.is_shard() for place in places)  # with copies alone each worker takes samples of its own
