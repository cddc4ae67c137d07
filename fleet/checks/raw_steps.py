"""RawSteps: a script steps the optimizer that Fleet returned, not the user's inside it, nor one unknown to Fleet."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleet.checks.both_wrapped import wraps_optimizers
from fleet.checks.watched import Watched, missed
from fleet.errors import ConfigError
from fleet.job.broken_exchange import listed
from fleet.job.listener import Listener
from fleet.job.whereabouts import user_line
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper


class RawSteps(Listener):
    """Looks at every step of an optimizer in this process, once something is ``watched``."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._job = watched.job
        self._handle: Any = None
        # How many parameters the optimizers have that are known to train other models.
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def model_wrapped(self, model: WrappedModel) -> None:
        """Looks at steps from now on, where the model is watched."""
        if self._watched.models:
            self._look()

    def optimizer_wrapped(self, optimizer: Optimizer, user_optimizer: Optimizer) -> None:
        """Looks at steps from now on."""
        self._look()

    def close(self) -> None:
        """Stops looking at steps."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self) -> None:
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self.check_raw_step)

    def check_raw_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Runs before every step of an optimizer; raises ConfigError where the wrapped one should have stepped."""
        # Steps inside a step of Fleet's, and of its wrappers, are in order.
        if self._job.updating or isinstance(optimizer, OptimizerWrapper):
            return
        if not self._job.collective:
            self._check_step_past_servers(optimizer)
            return
        wrapped = next((w for w in self._watched.optimizers.values() if w.user_optimizer is optimizer), None)
        if wrapped is not None and (wrapped.optimizer.optimizer is not optimizer or self._watched.compares):
            raise ConfigError(
                f"{user_line()}: step() was called on the optimizer that was passed to distributed_optimizer(). Call "
                "it on the optimizer that distributed_optimizer() returned (GradScaler.step too); the other one "
                f"bypasses {missed(self._job)}."
            )
        acting = any(wraps_optimizers(strategy) for strategy in self._job.strategies)
        if wrapped is None and acting and self._holds_watched(optimizer):
            raise ConfigError(
                f"{user_line()}: step() was called on an optimizer that distributed_optimizer() has not seen, and that "
                f"has parameters of a model that distributed_model() returned. It bypasses {missed(self._job)}. "
                "Pass it to distributed_optimizer(), and step the result."
            )

    def _check_step_past_servers(self, optimizer: Optimizer) -> None:
        """Raises ConfigError where ``optimizer`` trains parameters of the servers, or for this worker alone."""
        job = self._job
        if not job.is_between_served_steps():
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._strangers.get(optimizer) == count:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        served = {id(p) for wrapped in job.optimizers for g in wrapped.param_groups for p in g["params"]}
        if held & served:
            raise ConfigError(
                f"{user_line()}: step() was called on an optimizer that distributed_optimizer() did not return, and "
                "that has parameters of the job with parameter servers. It would change them in this worker alone. "
                "Call step() on the optimizer that distributed_optimizer() returned."
            )
        trained = {id(p): name for model in job.models for name, p in model.module.named_parameters()}
        own = [trained[one] for one in held if one in trained]
        if own and job.world_size > 1:
            raise ConfigError(
                f"{user_line()}: step() was called on an optimizer that distributed_optimizer() has not seen, and that "
                f"has {listed(sorted(own))} of the model. Each worker would train them alone. Put them "
                "into a group of the optimizer for distributed_optimizer(); a job with parameter servers has one."
            )
        self._strangers[optimizer] = count

    def _holds_watched(self, optimizer: Optimizer) -> bool:
        watched = {id(p) for watch in self._watched.models.values() for p in watch.named.values()}
        return any(id(p) in watched for group in optimizer.param_groups for p in group["params"])
