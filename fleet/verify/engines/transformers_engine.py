"""Scripts of transformers' Trainer, which trains with Accelerate: it seeds workers, and takes batches ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn

from fleet.verify.engines.late_imports import when_imported
from fleet.verify.engines.training_engine import EngineJob, EngineListener, RunPlan, TrainingEngine


class TransformersEngine(TrainingEngine):
    """The batches and the seeds of a Trainer, which leaves the rest to Accelerate."""

    def __init__(self) -> None:
        self._trains = False

    def install(self, listener: EngineListener, plan: RunPlan) -> None:
        """Makes a Trainer tell that it trains, and of the batches that it takes to accumulate their gradients."""

        def watch(module: Any) -> None:
            kind = module.Trainer
            kind.train = self._training(kind.train)
            kind.get_batch_samples = listener.around_batches(kind.get_batch_samples)

        def train_on_cpu(module: Any) -> None:
            kind = module.TrainingArguments
            kind.__post_init__ = _on_cpu(kind.__post_init__, listener)

        when_imported("transformers.trainer", watch)
        when_imported("transformers.training_args", train_on_cpu)

    def _training(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def trained(*args: Any, **kwargs: Any) -> Any:
            self._trains = True
            return train(*args, **kwargs)  # hands on

        return trained

    def job(self, model: nn.Module | None) -> EngineJob | None:
        """Returns a job of ``torch.distributed`` that a Trainer trains in, whose workers it has seeded alike."""
        # A script may import transformers for its models alone, and seed the workers itself.
        if not self._trains or not dist.is_initialized():
            return None
        return EngineJob(engine="torch", seeded_by="transformers' Trainer")


def _on_cpu(check: Callable[..., None], listener: EngineListener) -> Callable[..., None]:
    """Returns the check of a Trainer's settings, which are those of a CPU then: bfloat16 in place of float16."""

    @wraps(check)
    def checked(self: Any) -> None:
        self.use_cpu = True
        if self.fp16:
            self.fp16 = False
            self.bf16 = True
            listener.note("On the CPU the Trainer trained in bfloat16 in place of float16.")
        check(self)

    return checked
