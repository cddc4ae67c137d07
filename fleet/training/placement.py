"""On which device a wrapped model lies, and the state of its optimizers with it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._shared.casts import map_tensors


def check_placement(module: nn.Module, device: torch.device) -> None:
    """Raises ConfigError where ``module`` cannot train on ``device``, the device of this worker."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"distributed_model(): {name!r} is on the device 'meta', which has no memory for numbers. Call "
                "module.to_empty(device=...) and initialise the module before, and make the optimizer after it."
            )
        if tensor.device.type == "cuda" and device.type == "cpu":
            raise ConfigError(
                f"distributed_model(): {name!r} is on {tensor.device}, and fleet.init() gave this worker the CPU: it "
                "was started with gloo and without a card. Start the workers with --gpus=0,1 (or set "
                "FLAGS_selected_gpus for each), or leave the model on the CPU; fleet.distributed_model() moves it to "
                "the GPU of a worker that has one."
            )


def move_model(module: nn.Module, device: torch.device, optimizers: Iterable[Optimizer]) -> set[Tensor]:
    """Moves ``module``, with its state in ``optimizers``, to ``device`` if that is a GPU.

    Returns the parameters that were elsewhere. They are the same objects, which optimizers made before still hold.
    """
    if device.type != "cuda":
        return set()
    moved: set[Tensor] = {parameter for parameter in module.parameters() if parameter.device != device}
    module.to(device)
    for optimizer in optimizers:
        move_state(optimizer, moved)
    return moved


def move_state(optimizer: Optimizer, moved: Set[Tensor]) -> None:
    """Moves the state of the parameters ``moved`` to their device, as ``load_state_dict`` places it.

    Adagrad has a state from the start; other optimizers may have loaded one, or trained on the CPU. Counts of steps
    stay on the host, where torch keeps them unless its kernels count.
    """
    for group in optimizer.param_groups:
        counts_there = group.get("fused") or group.get("capturable")
        for parameter in moved & set(group["params"]):
            state = optimizer.state.get(parameter, {})
            for name in [name for name in state if name != "step" or counts_there]:
                state[name] = map_tensors(state[name], partial(_moved, device=parameter.device))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)
