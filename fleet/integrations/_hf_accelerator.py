"""FleetAccelerator: Accelerate's answers to Trainer, taken from Fleet: wrapped model, optimizer, ranks, norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.job.axes import DATA_AXES
from fleet.job.session import Session
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer


class FleetAccelerator(Accelerator):  # type: ignore[misc]
    """Prepares models and optimizers through one session of Fleet; loaders, gathers and trackers stay Accelerate's.

    ``num_processes`` and ``process_index`` say how rows are divided: they count the workers that train on different
    rows, which with divided layers are fewer than all.
    """

    session: Session
    _counts_one = False

    @classmethod
    def take_over(cls, accelerator: Any, session: Session) -> FleetAccelerator:
        """Turns a new ``accelerator`` into one of this class; computing in 16 bits is then left to Fleet's amp."""
        accelerator.__class__ = cls
        accelerator.session = session
        accelerator.native_amp = False
        accelerator.scaler = None
        accelerator.state._mixed_precision = "no"
        return accelerator  # type: ignore[no-any-return]

    @property
    def num_processes(self) -> int:
        """Number of workers that train on different rows."""
        return 1 if self._counts_one else self.session.job.data_replicas

    @property
    def process_index(self) -> int:
        """Index of this worker among :attr:`num_processes`; workers that hold one copy of the model share it."""
        return self.session.job.data_rank

    @contextmanager
    def counting_one(self) -> Iterator[None]:
        """Returns a context in which :attr:`num_processes` is 1, for code that would multiply by it."""
        self._counts_one = True
        try:
            yield
        finally:
            self._counts_one = False

    def fleet_model(self, model: nn.Module) -> FleetModel:
        """Returns ``model`` as Fleet wraps it, the same for every call."""
        if isinstance(model, FleetModel):
            return model
        found = next((wrapped for wrapped in self.session.models if wrapped.module is model), None)
        if found is None:
            found = self.session.wrap_model(model)
            if divides(found) and hasattr(model, "save_pretrained"):
                model.__dict__["save_pretrained"] = WholeOnly(model)
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> FleetModel:
        """Returns ``model`` as Fleet wraps it; Fleet has placed it on the device."""
        wrapped = self.fleet_model(model)
        if not any(known is wrapped for known in self._models):
            self._models.append(wrapped)
        return wrapped

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> FleetAcceleratedOptimizer:
        """Returns ``optimizer`` as Fleet wraps it, in the form that Trainer expects."""
        if not isinstance(optimizer, FleetAcceleratedOptimizer):
            if isinstance(optimizer, AcceleratedOptimizer):
                raise ConfigError("FleetTrainer got an optimizer that another Accelerator prepared; pass your own.")
            wrapped = optimizer if isinstance(optimizer, FleetOptimizer) else self.session.wrap_optimizer(optimizer)
            optimizer = FleetAcceleratedOptimizer(wrapped, may_skip=self.session.options["amp"])
        self._optimizers.append(optimizer)
        return optimizer

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the user's model inside ``model``."""
        inner = model.module if isinstance(model, FleetModel) else model
        found: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return found

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients by their norm over all workers, and returns it."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def gather(self, tensor: Any) -> Any:
        """Returns the rows of all workers; rows of workers that hold one copy of the model count once."""
        gathered = super().gather(tensor)
        session = self.session
        if session.job.data_replicas == session.job.world_size:
            return gathered
        ranks = session.job.axes.all_ranks(*DATA_AXES)[0]  # one worker of each copy, in the order of their rows

        def first_of_each(rows: Tensor) -> Tensor:
            parts = rows.chunk(session.job.world_size)
            return torch.cat([parts[rank] for rank in ranks])

        return recursively_apply(first_of_each, gathered)

    def end_training(self) -> None:
        """Ends Accelerate's trackers; the process group ends with the process, as Fleet's other groups do."""
        for tracker in self.trackers:
            tracker.finish()


def divides(model: FleetModel) -> bool:
    """Returns whether an option divides ``model``, so that a worker's module holds a part of it."""
    return bool(model._states.is_part or model._states.is_collective())


class WholeOnly:
    """The ``save_pretrained`` of a divided model: writes a state that it is given, not the part that it holds."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        """Writes ``state_dict``; raises ConfigError without it."""
        if state_dict is None:
            raise ConfigError(
                "model.save_pretrained(): a worker holds a part of this model, which sharding stage 3 or "
                "tensor_parallel divided. Call trainer.save_model(folder) on every worker, which writes the whole "
                "model, or pass state_dict=trainer.model_wrapped.full_state_dict(), called on every worker."
            )
        kind: Any = type(self._model)
        return kind.save_pretrained(self._model, *args, state_dict=state_dict, **kwargs)


class FleetAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A FleetOptimizer as Accelerate hands out optimizers; its state is on the device already.

    Args:
        optimizer: what Fleet made of the user's optimizer.
        may_skip: whether amp may skip a step, after which Trainer keeps the learning rate.
    """

    def __init__(self, optimizer: FleetOptimizer, *, may_skip: bool) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._may_skip = may_skip
        self._has_stepped = True
        if may_skip:
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def step(self, closure: Any = None) -> None:
        """Steps the optimizer inside."""
        self._has_stepped = False
        super().step(closure)
        self._is_overflow = self._may_skip and not self._has_stepped
