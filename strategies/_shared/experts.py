"""Experts: parameters that only some of the workers hold, where the experts of a layer are divided over ``ep``.

Their gradients are complete without data parallel (see [Note: Who holds what] of axes.py), so every exchange over
``COPY_AXES`` leaves them out. The mark stands on the parameter, for what looks at parameters, and on the module,
because a deep copy drops attributes of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from fleet.job.axes import Axes

_ON_PARAMETER = "fleet_expert"
_ON_MODULE = "fleet_experts"


def mark_experts(module: nn.Module) -> None:
    """Records that the parameters of ``module`` are experts of this worker; Fleet's attributes say so too."""
    module.__dict__[_ON_MODULE] = True
    for parameter in module.parameters():
        parameter.__dict__.update({_ON_PARAMETER: True, "expert": True, "no_sync": True})


def is_expert(parameter: Tensor) -> bool:
    """Returns whether only some of the workers hold ``parameter``."""
    return bool(parameter.__dict__.get(_ON_PARAMETER, False))


def expert_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules inside ``module`` that hold experts, with their names; their parameters are marked then."""
    for name, submodule in module.named_modules(remove_duplicate=False):
        if submodule.__dict__.get(_ON_MODULE):
            mark_experts(submodule)
            yield name, submodule


def expert_names(module: nn.Module) -> list[str]:
    """Returns the qualified names of the parameters and buffers of experts in ``module``."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in expert_modules(module)
        for name, _ in (*submodule.named_parameters(), *submodule.named_buffers())
    ]


def share_experts(module: nn.Module, axes: Axes) -> None:
    """Marks the experts in ``module``; workers that hold the same experts get the values of the first of them."""
    held = [t for _, experts in expert_modules(module) for t in (*experts.parameters(), *experts.buffers())]
    group = axes.group("moe_sharding")
    # Every worker of the group holds the same experts in the same order.
    for tensor in held if group is not None else ():
        dist.broadcast(tensor.detach(), group=group, group_src=0)
