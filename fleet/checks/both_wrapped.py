"""BothWrapped: a job that trains has wrapped its model and its optimizer."""

from __future__ import annotations

import json
import sys
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleet.checks.comparison import checksums, digest
from fleet.checks.said_once import SaidOnce
from fleet.checks.same_rows import first_rows
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.whereabouts import user_line
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._declare.strategy import Strategy


class BothWrapped(Listener):
    """Looks, where ``job`` begins to train, for the call that the script has left out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first: weakref.ref[Optimizer] | None = None
        self._steps = SaidOnce(job, "plain step")
        self._batch: Any = None
        self._handle: Any = None
        if job.collective and job.world_size > 1:
            self._handle = register_optimizer_step_pre_hook(self._look_at_raw_step)

    def model_wrapped(self, model: WrappedModel) -> None:
        """The job trains with Fleet."""
        self.close()

    def optimizer_wrapped(self, optimizer: Optimizer, user_optimizer: Optimizer) -> None:
        """The job trains with Fleet."""
        self.close()

    def batch_given(self, batches: Any, batch: Any) -> None:
        """Keeps the batch of the first step, where nothing is wrapped."""
        if self._handle is not None and self._first is None:
            self._batch = batch

    def close(self) -> None:
        """Stops looking at steps of plain optimizers."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self._batch = None

    def before_wrap(self, module: nn.Module) -> None:
        """Raises ConfigError where another wrapper in ``module`` exchanges its gradients already."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import
        kinds = (DistributedDataParallel,) if fsdp is None else (DistributedDataParallel, *_kinds_of(fsdp))
        own = {id(part) for model in self._job.models for part in model.module.modules()}
        for name, part in module.named_modules():
            if isinstance(part, kinds) and id(part) not in own:
                kind = next(kind.__name__ for kind in kinds if isinstance(part, kind))
                raise ConfigError(
                    f"fleet.distributed_model(): {repr(name) if name else 'the module'} is torch's {kind}, whose "
                    "exchange of gradients and Fleet's would be in each other's way. Pass the plain module: "
                    "fleet.distributed_model() does what DistributedDataParallel does, and strategy.sharding with "
                    "sharding_configs['stage'] = 3 does what FSDP does."
                )

    def before_forward(self, model: WrappedModel) -> None:
        """Raises ConfigError when training starts without an optimizer and an option acts in it."""
        job = self._job
        if job.optimizers or not torch.is_grad_enabled():
            return
        waiting = [strategy.name for strategy in job.strategies if wraps_optimizers(strategy)]
        if waiting and any(known.training for known in job.models):
            acts = "acts" if len(waiting) == 1 else "act"
            raise ConfigError(
                f"{', '.join(waiting)} {acts} in the optimizer, and fleet.distributed_optimizer(optimizer) "
                "was not called. Call it before training."
            )

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Warns once when an optimizer steps although no model exchanges gradients.

        With parameter servers the step does it; rows alone need their model, and NotInitializedError says so.
        """
        # The first step decides; later steps pay nothing for the check.
        self._job.listeners.put_to_sleep(self)
        if self._job.models:
            return
        if not self._job.collective:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if any(p.grad is not None and p.grad.is_sparse for p in held):
                raise NotInitializedError(
                    "optimizer.step(): the model has an nn.Embedding(sparse=True), whose rows train as a table, and "
                    "fleet.distributed_model() was not called. Call it before fleet.init_worker()."
                )
        elif self._job.world_size > 1:
            warnings.warn(
                "fleet.distributed_optimizer() was called without fleet.distributed_model(): the workers do not "
                "exchange gradients. Call model = fleet.distributed_model(model) as well.",
                OptionWarning,
                stacklevel=4,
            )

    def _look_at_raw_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Warns, where nothing is wrapped, that the workers train alone: with other gradients, or with the same rows.

        Nobody waits: the first step of the first optimizer posts its gradients, and later steps look at the others'. A
        script that exchanges gradients itself has equal gradients of different rows. Parameters of another class, such
        as another library's shards, are not compared.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if self._job.roll_call is None or any(type(p) not in (Tensor, nn.Parameter) for p in held):
            self.close()
        elif self._first is None:
            gradients = {f"{at}": p.grad for at, p in enumerate(held) if p.grad is not None and not p.grad.is_sparse}
            said = [[list(p.shape) for p in held], digest(checksums(gradients)), first_rows(self._batch)]
            # Weak: the check must not keep the script's optimizer alive. The batch has given its digest, and would hold
            # memory until the second step.
            self._first = weakref.ref(optimizer)
            self._batch = None
            self._steps.say(json.dumps(said))
        elif self._first() is optimizer:
            found = self._steps.heard(range(self._job.world_size))
            if self._steps.is_over:
                self.close()
            if found:
                self._judge([json.loads(text) for text in found.values()])

    def _judge(self, said: list[Any]) -> None:
        """Warns where workers with equal shapes of parameters ``said`` different gradients, or equal rows."""
        shapes, sums, rows = zip(*said, strict=True)
        apart = len(set(sums)) > 1
        alike = len(set(rows)) == 1 and rows[0]
        # Workers that train different models have nothing to compare.
        if any(shape != shapes[0] for shape in shapes) or not (apart or alike):
            return
        what = "step with different gradients" if apart else "train on the same rows"
        warnings.warn(
            f"{user_line()}: the workers {what}, and neither fleet.distributed_model() nor "
            "fleet.distributed_optimizer() was called: each trains a model of its own. Call model = "
            "fleet.distributed_model(model) and optimizer = fleet.distributed_optimizer(optimizer), and divide the "
            "rows with torch's DistributedSampler.",
            OptionWarning,
            stacklevel=4,
        )


def wraps_optimizers(strategy: Strategy) -> bool:
    """Returns whether ``strategy`` acts in the optimizer."""
    return type(strategy).wrap_optimizer is not Strategy.wrap_optimizer


def _kinds_of(fsdp: Any) -> tuple[type, ...]:
    return fsdp.FullyShardedDataParallel, fsdp.FSDPModule
