"""What torch's helpers do once for each batch, and must do once an update: schedulers and averages of a model.

A loop of plain torch calls ``scheduler.step()`` and ``averaged.update_parameters(model)`` in each batch. A process that
hosts several logical workers makes several such calls for one update; in the middle of it they are without effect. They
have no hook for that, so their methods are replaced while a reproducible job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._shared.optimizer_wrapper import innermost


class OnceAnUpdate:
    """Lets schedulers of the job's optimizers, and averages of its models, act at the end of an update alone.

    Args:
        logical: the logical workers.
        optimizers: returns the optimizers of the job.
        models: returns its models.
    """

    def __init__(
        self,
        logical: LogicalWorkers,
        optimizers: Callable[[], Sequence[Optimizer]],
        models: Callable[[], Sequence[nn.Module]],
    ) -> None:
        self._logical = logical
        self._optimizers = optimizers
        self._models = models
        self._replaced: dict[Any, tuple[str, Any]] = {}
        self._replace(AveragedModel, "update_parameters", lambda averaged, *args: self._is_model_of_job(*args))
        self._replace_schedulers(0)
        logical.begins.append(self._replace_schedulers)

    def _replace_schedulers(self, rank: int) -> None:
        """Replaces ``step`` in every class of schedulers, also in those that were declared since."""
        for kind in _with_subclasses(LRScheduler):
            if "step" in vars(kind) and kind not in self._replaced:
                self._replace(kind, "step", self._is_scheduler_of_job)

    def _replace(self, kind: Any, name: str, is_of_job: Callable[..., bool]) -> None:
        original = kind.__dict__[name]

        @wraps(original)
        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            is_made = getattr(self_, "_is_initial", False)  # a scheduler's first step sets the first rate
            if self._logical.is_amid_update and not is_made and is_of_job(self_, *args):
                if name == "step" and (args or kwargs):
                    raise ConfigError(_counted(type(self_).__name__, [*args, *kwargs.values()][0]))
                return None
            self._logical.is_scheduled = True
            return original(self_, *args, **kwargs)

        setattr(kind, name, call)
        self._replaced[kind] = name, call
        call.__dict__["fleet_original"] = original

    def _is_scheduler_of_job(self, scheduler: Any, *args: Any) -> bool:
        stepped = innermost(scheduler.optimizer)
        return any(innermost(optimizer) is stepped for optimizer in self._optimizers())

    def _is_model_of_job(self, *args: Any) -> bool:
        # Any part of a model: it stays as it is until the update.
        own = {parameter for model in self._models() for parameter in model.parameters()}
        return any(not own.isdisjoint(given.parameters()) for given in args)

    def close(self) -> None:
        """Gives the methods back; another library's wrapper around one of them stays."""
        self._logical.begins.remove(self._replace_schedulers)
        for kind, (name, call) in self._replaced.items():
            if kind.__dict__[name] is call:
                setattr(kind, name, call.__dict__["fleet_original"])


def _counted(scheduler: str, value: object) -> str:
    return (
        f"{scheduler}.step({value!r}) was called in a batch that completes no update. With 'reproducible' a process "
        "has as many batches of an update as it hosts logical workers, so a count of batches, or the loss of one of "
        "them, depends on the number of processes. Call it where fleet.update_loss(loss) has returned a number, with "
        "that number or with a count of updates."
    )


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    """Returns ``kind`` and every class derived from it that is known by now, the script's own too."""
    found = [kind]
    for one in found:
        found += [derived for derived in one.__subclasses__() if derived not in found]
    return found
