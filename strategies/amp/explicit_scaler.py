"""GradScalers of the user's loop: the strategies of a job know each one that looks at the job's gradients.

[Note: Scalers that nobody told of]
A plain ``GradScaler`` looks at the gradients of one worker at each ``step()``. Where gradients of several batches add
up it would move its scale between them; where workers hold different gradients it would skip a step on one of them and
step on the others. ``fleet.distributed_scaler`` mends both, and strategies refuse there what no scaler can do. A script
may leave the call out, so while a session is open torch's look at the gradients is replaced, and makes that call for a
scaler that meets gradients of the job for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from fleet.errors import ConfigError
from fleet.strategies._declare.strategy import Strategy
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies.amp.amp_optimizer import agreed

if TYPE_CHECKING:
    from fleet.job.job import Job

_LOOK = "_unscale_grads_"
_followed: list[Job] = []  # the open ones, the newest last


def share_scaler(scaler: Any, job: Job, strategies: Sequence[Strategy]) -> Any:
    """Returns ``scaler``, which now skips a step when any worker has found an inf or nan.

    Between the updates of merged batches there is nothing to unscale; ``step`` then counts the batch and ``update``
    leaves the scale as it is, so that all gradients of a window have one scale.

    Raises ConfigError when ``scaler`` is no GradScaler, and where a strategy cannot work with one.
    """
    if not all(callable(getattr(scaler, name, None)) for name in (_LOOK, "unscale_", "step", "update")):
        raise ConfigError(f"fleet.distributed_scaler() takes a torch.amp.GradScaler, got {scaler!r}.")
    for strategy in strategies:
        strategy.use_scaler(scaler)
    # A script may pass one scaler several times, once for each optimizer, and to a later job.
    if not hasattr(scaler, "fleet_job"):
        _share(scaler)
    scaler.fleet_job = job
    return scaler


def follow_scalers(job: Job) -> Callable[[], None]:
    """Shares each GradScaler that looks at gradients of ``job``; returns a function that ends it.

    See [Note: Scalers that nobody told of].
    """
    _followed.append(job)
    if len(_followed) == 1:
        _replace_look()

    def end() -> None:
        if job not in _followed:
            return  # a session may be closed twice
        _followed.remove(job)
        if not _followed:
            setattr(GradScaler, _LOOK, vars(GradScaler)[_LOOK].__wrapped__)

    return end


def _replace_look() -> None:
    look = vars(GradScaler)[_LOOK]

    @wraps(look)
    def share_and_look(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # A new job begins before the old one ends.
        job = next((job for job in reversed(_followed) if _concerns(job, optimizer)), None)
        if job is None or getattr(scaler, "fleet_job", None) is job:
            return look(scaler, optimizer, *args, **kwargs)
        share_scaler(scaler, job, job.strategies)
        return getattr(scaler, _LOOK)(optimizer, *args, **kwargs)

    setattr(GradScaler, _LOOK, share_and_look)


def _share(scaler: Any) -> None:
    look = getattr(scaler, _LOOK)
    update = scaler.update
    waits = False

    @wraps(look)
    def look_and_agree(optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        nonlocal waits
        job = scaler.fleet_job
        found: dict[torch.device, Tensor] = look(optimizer, *args, **kwargs)
        if not _concerns(job, optimizer):
            return found
        waits = isinstance(optimizer, OptimizerWrapper) and optimizer.only_counts()
        mine = torch.zeros((), device=job.device)
        for value in found.values():
            mine = torch.maximum(mine, value.to(job.device))
        # Processes that host several logical workers come here more often than others, with nothing to agree on.
        return {job.device: mine if waits else agreed(mine, _parameters(optimizer), job)}

    @wraps(update)
    def update_unless_waiting(new_scale: Any = None) -> None:
        nonlocal waits
        # Setting the scale to itself only closes the step.
        update(scaler._scale if waits and new_scale is None else new_scale)
        waits = False

    setattr(scaler, _LOOK, look_and_agree)
    scaler.update = update_unless_waiting


def _concerns(job: Job, optimizer: Any) -> bool:
    """Returns whether ``optimizer`` steps parameters of ``job``."""
    if any(optimizer is one for one in job.optimizers):
        return True
    known = {id(p) for parameters in job.parameter_sets() for p in parameters}
    return any(id(p) in known for p in _parameters(optimizer))


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
