"""Watched: what the checks of one job share: the models and optimizers that they watch, and how workers compare."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer

from fleet.checks.watches import ModelWatch, OptimizerWatch
from fleet.errors import RendezvousError
from fleet.job.axes import COPY_AXES
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper


class Watched(Listener):
    """The models and optimizers of ``job`` that the checks watch.

    Attributes:
        registered: how many parameters and submodules modules have registered so far.
        compares: whether the workers compare with each other.
        said: what all workers said last; empty when one was absent.
        absence: the error about a worker that was absent last.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.models: dict[WrappedModel, ModelWatch] = {}
        self.optimizers: dict[Optimizer, OptimizerWatch] = {}
        self.registered = 0
        self.compares = job.collective and job.process_group is not None and job.world_size > 1
        self.said: list[Any] = []
        self.absence: RendezvousError | None = None
        self._handles: list[Any] = []

    def model_wrapped(self, model: WrappedModel) -> None:
        """Watches ``model`` from now on, where an option or another worker makes it differ from its module."""
        if not self.job.collective or not self.job.strategies:
            return
        self._count_registrations()
        if model in self.models:
            self.models[model].handle.remove()
        self.models[model] = ModelWatch(model, self.registered)

    def optimizer_wrapped(self, optimizer: Optimizer, user_optimizer: Optimizer) -> None:
        """Watches ``optimizer`` from now on."""
        assert isinstance(optimizer, OptimizerWrapper)
        self.optimizers[optimizer] = OptimizerWatch(optimizer, user_optimizer)
        self._count_registrations()

    def optimizer_unwrapped(self, optimizer: Optimizer) -> None:
        """Removes the hooks from the user's ``optimizer``."""
        for watch in self.optimizers.values():
            if watch.user_optimizer is optimizer:
                while watch.handles:
                    watch.handles.pop().remove()

    def before_forward(self, model: WrappedModel) -> None:
        """Counts the forwards that record gradients."""
        if (watch := self.recording(model)) is not None:
            watch.forwards += 1

    def close(self) -> None:
        """Removes every hook."""
        for watch in self.models.values():
            watch.handle.remove()
        for watched in self.optimizers.values():
            self.optimizer_unwrapped(watched.user_optimizer)
        for handle in self._handles:
            handle.remove()
        self.models = {}
        self.optimizers = {}
        self._handles = []
        self.compares = False

    def recording(self, model: WrappedModel) -> ModelWatch | None:
        """Returns the watch of ``model`` in a forward that records gradients, ``None`` in others."""
        return self.models.get(model) if torch.is_grad_enabled() and self.job.collective else None

    def stepped(self, optimizer: Optimizer) -> OptimizerWatch | None:
        """Returns the watch of ``optimizer``; ``None`` where no model is watched, now or later."""
        return self.optimizers.get(optimizer) if self.models or self.job.collective else None

    @property
    def peers(self) -> tuple[int, ...]:
        """The workers that hold the same part of the model as this one, itself included."""
        return self.job.axes.ranks(*COPY_AXES)

    @property
    def trains_locally(self) -> bool:
        """Whether parameters differ between workers, because gradients stay on their worker."""
        return any(optimizer.trains_locally for optimizer in self.job.optimizers)

    def gather(self, subject: str, said: Any, perhaps_alone: bool = False) -> list[Any]:
        """Returns each worker's entry about ``subject``; ``None`` for a worker that does not post one.

        A worker that is no peer counts as saying what this one says. Raises RendezvousError for an absent worker unless
        ``perhaps_alone``.
        """
        job = self.job
        roll_call = job.roll_call
        assert roll_call is not None
        job.beat(pause=True)  # the others may arrive late
        try:
            self.said = [json.loads(text) for text in roll_call.meet(subject, json.dumps(said))]
            mine, peers = self.said[job.global_rank], self.peers
            return [other if rank in peers else mine for rank, other in enumerate(self.said)]
        except RendezvousError as error:
            if not perhaps_alone:
                raise
            self.absence = error
            self.said = []
            return [said if rank == job.global_rank else None for rank in range(job.world_size)]
        finally:
            job.beat()

    def post(self, subject: str, said: Any) -> list[Any]:
        """Returns each worker's entry about ``subject``, of peers and others."""
        self.gather(subject, said)
        return self.said

    def number(self, watch: ModelWatch) -> int:
        """Returns the number of a watched model, as messages name it."""
        return list(self.models.values()).index(watch)

    def _count_registrations(self) -> None:
        if not self._handles:
            self._handles = [
                torch_modules.register_module_parameter_registration_hook(self._count),
                torch_modules.register_module_module_registration_hook(self._count),
            ]

    def _count(self, *_: Any) -> None:
        self.registered += 1


def missed(job: Job) -> str:
    """Returns what a step or a forward misses that goes past the wrapped objects of ``job``."""
    return ", ".join(strategy.name for strategy in job.strategies) or "what the job does at a step"
