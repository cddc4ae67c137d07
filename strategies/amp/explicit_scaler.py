"""An explicit GradScaler in a job of many workers: all of them skip the same steps, and merging counts as one step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.strategies._declare.strategy import Strategy
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies.amp.amp_optimizer import agreed

if TYPE_CHECKING:
    from fleet.job.job import Job


def share_scaler(scaler: Any, job: Job, strategies: Sequence[Strategy]) -> Any:
    """Returns ``scaler``, which now skips a step when any worker has found an inf or nan.

    Between the updates of gradient_merge there is nothing to unscale; ``step`` then counts the batch and ``update``
    leaves the scale as it is, so that all gradients of a window carry the same one.

    Raises ConfigError when ``scaler`` is no GradScaler, or when gradient_merge is on and amp is not.
    """
    if not all(callable(getattr(scaler, name, None)) for name in ("_unscale_grads_", "unscale_", "step", "update")):
        raise ConfigError(f"fleet.distributed_scaler() takes a torch.amp.GradScaler, got {scaler!r}.")
    merges = job.options["gradient_merge"] and job.options["gradient_merge_configs"].k_steps > 1
    if merges and not job.options["amp"]:
        raise ConfigError(
            "fleet.distributed_scaler() was called with gradient_merge on and amp off: a step that the scaler skips "
            "would not be counted, and the window would never end. Set strategy.amp = True as well; "
            "amp then leaves the scaling to the scaler."
        )
    if "fleet_shared" not in scaler.__dict__:
        _share(scaler, job)
    for strategy in strategies:
        strategy.use_scaler(scaler)
    return scaler


def _share(scaler: Any, job: Job) -> None:
    unscale, update = scaler._unscale_grads_, scaler.update
    scaler.fleet_shared = True
    waits = False

    @wraps(unscale)
    def unscale_and_agree(optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        nonlocal waits
        found: dict[torch.device, Tensor] = unscale(optimizer, *args, **kwargs)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        waits = isinstance(optimizer, OptimizerWrapper) and optimizer.only_counts()
        mine = torch.zeros((), device=job.device)
        for value in found.values():
            mine = torch.maximum(mine, value.to(job.device))
        return {job.device: agreed(mine, parameters, job)}

    @wraps(update)
    def update_unless_waiting(new_scale: Any = None) -> None:
        nonlocal waits
        # Setting the scale to itself only closes the step.
        update(scaler._scale if waits and new_scale is None else new_scale)
        waits = False

    scaler._unscale_grads_, scaler.update = unscale_and_agree, update_unless_waiting
