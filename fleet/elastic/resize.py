"""A changed number of workers: keep the global batch, or scale the learning rate, as the user declares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from fleet.elastic.places import replicas_of
from fleet.errors import ConfigError, OptionWarning
from fleet.job.running import running_job
from fleet.options import DistributedStrategy
from fleet.strategies._shared.optimizer_wrapper import LR_SCALE
from fleet.strategies.reproducible.reproducible import SCALED_RATE

if TYPE_CHECKING:
    from fleet.job.job import Job

# Learning rates that schedulers store in a parameter group.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def plan_k_steps(k_steps: int, planned_workers: int, workers: int) -> int:
    """Returns the batches per update with which ``workers`` workers keep the global batch of ``planned_workers``.

    Raises ConfigError when no integer does.

    Example:
        >>> plan_k_steps(1, planned_workers=8, workers=2)
        4
    """
    total = k_steps * planned_workers
    if total % workers:
        fitting = [count for count in range(1, total + 1) if total % count == 0]
        raise ConfigError(
            f"keep_global_batch(workers={planned_workers}): an update takes {total} batches of one worker each "
            f"({planned_workers} workers, k_steps {k_steps}), and {workers} workers cannot share them evenly. Numbers "
            f"that can: {fitting}. Or use fleet.elastic.scale_lr(optimizer, workers={planned_workers})."
        )
    return total // workers


def keep_global_batch(strategy: DistributedStrategy, workers: int) -> int:
    """Makes each update use as many samples as with ``workers`` workers, and returns ``k_steps``.

    ``gradient_merge_configs['k_steps']`` of ``strategy`` is read as the value for ``workers`` workers, and set to the
    value for the current number. Call it with the same ``workers`` in every start of the job, before ``fleet.init`` or
    ``fleet.distributed_optimizer`` copies the strategy; a later call warns. The batch of one worker, and so its memory,
    does not change. With ``strategy.reproducible`` nothing changes: an update has a batch of each logical worker on any
    number of processes.

    Args:
        strategy: changed in place.
        workers: the number of workers for which batch size and learning rate were chosen.

    Raises:
        ConfigError: the current number of workers cannot share the batches evenly, or the gradients are summed
            without being averaged; nothing was changed.

    Example:
        >>> strategy = fleet.DistributedStrategy()
        >>> fleet.elastic.keep_global_batch(strategy, workers=4)
        4
    """
    from fleet.parallel import get_world_size

    if not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"keep_global_batch(strategy={strategy!r}) takes a fleet.DistributedStrategy.")
    _check_workers("keep_global_batch", workers)
    copy_size = _workers_per_copy(strategy)
    configs = strategy.gradient_merge_configs
    merged = int(configs["k_steps"]) if strategy.gradient_merge else 1
    if strategy.reproducible:
        return merged
    _check_mesh(strategy, copy_size, workers, get_world_size())
    k_steps = plan_k_steps(merged, workers // copy_size, get_world_size() // copy_size)
    if k_steps != merged and not configs["avg"]:
        raise ConfigError(
            "keep_global_batch() needs gradient_merge_configs['avg'] True: the workers average their gradients, so a "
            f"sum over {k_steps} batches instead of {merged} would change the size of every update."
        )
    if k_steps != merged:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": k_steps}
    return k_steps


def scale_lr(optimizer: Optimizer, workers: int, rule: str = "linear") -> float:
    """Scales the learning rate to the current number of workers and returns the factor.

    Call it before creating schedulers, with the same ``workers`` in every start of the job. ``Checkpoint.resume()``
    then applies the same rule to the rates, and the scheduler, of a checkpoint from a different number of workers.

    Args:
        optimizer: its parameter groups are changed.
        workers: the number of workers for which the learning rate was chosen.
        rule: "linear", the factor is now/workers (Goyal et al. 2017), or "sqrt", its square root.

    Raises:
        ConfigError: an unknown rule, a wrong number, a second call for the same optimizer, or a reproducible job, whose
            global batch and learning rate do not depend on the number of workers.

    Example:
        >>> fleet.elastic.scale_lr(torch.optim.SGD(model.parameters(), 0.4), workers=4)
        0.25
    """
    from fleet.parallel import get_world_size

    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"scale_lr(optimizer={optimizer!r}) takes a torch.optim.Optimizer.")
    _check_workers("scale_lr", workers)
    if rule not in ("linear", "sqrt"):
        raise ConfigError(f"scale_lr(rule={rule!r}) takes 'linear' or 'sqrt'.")
    job = running_job()
    if job is not None and job.logical is not None:
        raise ConfigError(SCALED_RATE)
    if any(LR_SCALE in group for group in optimizer.param_groups):
        raise ConfigError("scale_lr() was called twice for one optimizer; the second call would scale again.")
    ratio = get_world_size() / workers
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    for group in optimizer.param_groups:
        _scale_group(group, factor)
        group[LR_SCALE] = factor
    return factor


def _workers_per_copy(strategy: DistributedStrategy) -> int:
    """Returns how many workers hold one copy of the model and see the same rows: mp x pp x sep x cp."""
    hybrid = strategy.hybrid_configs
    return math.prod([hybrid["mp_degree"], hybrid["pp_degree"], hybrid["sep_degree"], hybrid["cp_degree"]])


def _check_mesh(strategy: DistributedStrategy, copy_size: int, workers: int, now: int) -> None:
    """Raises ConfigError where the numbers of workers are no multiple of those of one copy of the model."""
    if strategy.pipeline or int(strategy.hybrid_configs["pp_degree"]) > 1:
        raise ConfigError(
            "keep_global_batch(): a pipeline adds up its micro-batches itself. Set pipeline_configs"
            "['accumulate_steps'] and the loader's batch for the number of workers, or use fleet.elastic.scale_lr()."
        )
    if workers % copy_size or now % copy_size:
        raise ConfigError(
            f"keep_global_batch(workers={workers}): {copy_size} workers hold one copy of the model (mp x sep x cp), "
            f"and {workers if workers % copy_size else now} workers make no whole number of copies. A changed number "
            f"of workers changes dp only: use multiples of {copy_size}."
        )


def declared_scales(optimizer: Optimizer | None) -> list[float | None]:
    """Returns the factor of each parameter group; None where :func:`scale_lr` was not called."""
    return [] if optimizer is None else [group.get(LR_SCALE) for group in optimizer.param_groups]


def rescale(optimizer: Optimizer, scheduler: Any, declared: list[float | None]) -> None:
    """Scales the rates from a checkpoint by the rule that this job declared before loading it."""
    for place, (group, scale) in enumerate(zip(optimizer.param_groups, declared, strict=True)):
        saved = float(group.get(LR_SCALE) or 1.0)
        if scale is None or scale == saved:
            continue
        _scale_group(group, scale / saved)
        group[LR_SCALE] = scale
        # Schedulers keep the rates apart from the groups, and would write the unscaled ones back at their next step.
        for inner in _schedulers(scheduler):
            for name in ("base_lrs", "_last_lr"):
                rates = getattr(inner, name, None)
                if isinstance(rates, list) and len(rates) > place:
                    rates[place] = rates[place] * (scale / saved)


def warn_of_resize(saved: dict[str, Any], job: Job, k_steps: int, declared: list[float | None]) -> None:
    """Warns when the global batch differs from the checkpoint's and no rule was declared."""
    if job.logical is not None:
        return  # an update has the batches of all logical workers, whose number stays
    before = replicas_of(saved) * saved["k_steps"]
    after = job.data_replicas * k_steps
    if before == after or (declared and None not in declared):
        return
    warnings.warn(
        f"Checkpoint.resume(): saved by {saved['world_size']} workers, resumed by {job.world_size}; an update now "
        f"takes {after} batches instead of {before}, with the same learning rate. Declare what you want: "
        "fleet.elastic.keep_global_batch(strategy, workers=...) or fleet.elastic.scale_lr(optimizer, workers=...).",
        OptionWarning,
        stacklevel=3,
    )


def _check_workers(call: str, workers: object) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"{call}(workers={workers!r}) takes the number of workers the job was planned for, from 1.")


def _scale_group(group: dict[str, Any], factor: float) -> None:
    for name in _RATES:
        value = group.get(name)
        if isinstance(value, Tensor):
            value.mul_(factor)
        elif value is not None:
            group[name] = value * factor


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """Yields a scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", ()):
            yield from _schedulers(inner)
