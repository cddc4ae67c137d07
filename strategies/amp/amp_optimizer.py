"""AmpOptimizer: a step that has an inf or nan in its gradients is skipped, by all workers or by none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.job.axes import MODEL_AXES
from fleet.strategies._shared.norm import any_nonfinite, everywhere
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies.amp.loss_scale import LossScale

if TYPE_CHECKING:
    from fleet.job.job import Job


class AmpOptimizer(OptimizerWrapper):
    """Steps the optimizer inside when every gradient of every worker is finite, and moves the loss scale.

    Gradients are looked at when a backward pass has ended, before the user's loop can clip an inf away; ``step()``
    reads the answer, the only time that it waits for the device. An explicit ``GradScaler`` speaks to this class
    in the way torch's fused optimizers are spoken to: it sets ``grad_scale`` and ``found_inf`` and calls ``step()``.
    """

    _step_supports_amp_scaling = True  # tells a GradScaler so

    def __init__(
        self,
        optimizer: Optimizer,
        scale: LossScale,
        job: Job,
        *,
        is_pure: bool = False,
        others: list[AmpOptimizer] | None = None,
    ) -> None:
        super().__init__(optimizer)
        # All optimizers with this scale, this one included, also those that come later.
        self._all: list[AmpOptimizer] = [] if others is None else others
        self._all.append(self)
        self._place = len(self._all)
        self.is_pure = is_pure
        self._scale = scale
        self._job = job
        self._non_finite: Tensor | None = None
        self._grad_scale: Any = None
        self._found_inf: Any = None

    def note_backward(self) -> None:
        """Looks at the gradients, without waiting for the answer.

        Those of a pipeline come from several backward passes and are exchanged after the last: ``step()`` looks.
        """
        if self._job.axes.size("pp") == 1:
            self._look()

    def _look(self) -> None:
        self._non_finite = any_nonfinite(self.parameters(), self._job.device)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters, or skips the update; returns the closure's loss."""
        if self._found_inf is not None:
            self._step_for_scaler()
            return None
        if not self._scale.in_use:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        finite = not self._found_by_any()
        if finite:
            super().step()
        else:
            self.note_step()
        self._scale.count(self._place, finite=finite, num_optimizers=len(self._all))
        return loss

    def _found_by_any(self) -> bool:
        """Returns whether this step is to be skipped, the same answer on every worker."""
        if self._non_finite is None:
            self._look()
        found, self._non_finite = self._non_finite, None
        assert found is not None
        return bool(agreed(found, self.parameters(), self._job))

    def _step_for_scaler(self) -> None:
        """Steps or skips as a GradScaler says; from now on it alone scales."""
        self._scale.give_way()
        self._non_finite = None
        if bool(self._found_inf):
            self.note_step()
            return
        if self._grad_scale is not None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            inverse = torch.as_tensor(self._grad_scale).double().reciprocal().float()
            for gradient in gradients:
                (gradient._values() if gradient.is_sparse else gradient).mul_(inverse.to(gradient.device))
        super().step()

    @property
    def grad_scale(self) -> Any:
        """The scale that a GradScaler has left in the gradients."""
        if self._grad_scale is None:
            raise AttributeError("grad_scale")
        return self._grad_scale

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        self.check_scaler()
        self._grad_scale = value

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._grad_scale = None

    @property
    def found_inf(self) -> Any:
        """Whether a GradScaler has found an inf or nan."""
        if self._found_inf is None:
            raise AttributeError("found_inf")
        return self._found_inf

    @found_inf.setter
    def found_inf(self, value: Any) -> None:
        self.check_scaler()
        self._found_inf = value

    @found_inf.deleter
    def found_inf(self) -> None:
        self._found_inf = None

    def check_place(self, place: object) -> None:
        """Raises ConfigError unless ``place`` is ``None`` or names the device of this worker."""
        device = self._job.device
        if place is None:
            return
        named = torch.device(place) if isinstance(place, str | torch.device) else None
        if named is None or named.type != device.type or named.index not in (None, device.index):
            raise ConfigError(
                f"optimizer.amp_init(place={place!r}): this worker computes on {str(device)!r}, which fleet.init() "
                "chose. Leave place out, or pass that device."
            )

    def get_loss_scaling(self) -> float:
        """Returns the loss scale in force; 1.0 where nothing is scaled."""
        return self._scale.current()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside, the loss scale and its counters."""
        state = super().state_dict()
        return {**state, "amp": self._scale.state_dict()} if self._scale.in_use else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; one without a loss scale leaves the scale as it is."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "amp"})
        if "amp" in state_dict:
            self._scale.load_state_dict(state_dict["amp"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_job": None, "_non_finite": None, "_all": []}


def agreed(found: Tensor, parameters: list[Any], job: Job) -> Tensor:
    """Returns whether any worker has found an inf or nan.

    Data parallel has added every worker's gradients to every other's, so an inf or nan of one is in all of them, and
    no message is needed; where gradients differ between workers, as those of parts of a model do, all answers are
    compared.
    """
    if job.process_group is None or not job.collective:
        return found
    if job.axes.size(*MODEL_AXES) == 1 and job.has_equal_gradients(parameters):
        return found
    return everywhere(found, job.process_group)
