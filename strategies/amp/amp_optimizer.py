"""AmpOptimizer: a step that has an inf or nan in its gradients is skipped, by all workers or by none.

LossScale, the factor on the backward signal of a float16 model, moves with these steps. It is a number of the host: a
step decides once, on the host, whether it happens, and nothing else waits. With a GradScaler of the user's all workers
skip the same steps, too (``explicit_scaler``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import CheckpointError, ConfigError
from fleet.job.axes import MODEL_AXES
from fleet.strategies._shared.norm import any_nonfinite, everywhere
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, loss_of

if TYPE_CHECKING:
    from fleet.job.job import Job


_LARGEST = torch.finfo(torch.float32).max


class LossScale:
    """The loss scale of one job, with the counters of Paddle's ``update_loss_scaling``.

    A finite step: ``good`` rises by 1 and ``bad`` is 0; at ``incr_every_n_steps`` the scale is multiplied by
    ``incr_ratio``, unless that is not finite in float32, and ``good`` starts again. A step with an inf or nan: ``bad``
    rises by 1 and ``good`` is 0; at ``decr_every_n_nan_or_inf`` the scale is multiplied by ``decr_ratio``, not below
    1, and ``bad`` starts again.

    Args:
        config: the values of ``amp_configs``.
        enabled: False for bfloat16, whose range is that of float32; the factor is then 1 for good.

    Attributes:
        in_use: whether the backward signal is scaled here: enabled, and no explicit scaler has taken over.
    """

    def __init__(self, config: Any, *, enabled: bool) -> None:
        self._config = config
        self.in_use = enabled
        self.scale: float = config.init_loss_scaling if enabled else 1.0
        self.good = self.bad = 0
        self._stepped: dict[int, bool] = {}
        self.scaler: Any = None

    @property
    def factor(self) -> float:
        """The factor of the backward signal at this moment."""
        return self.scale if self.in_use else 1.0

    def give_way(self, scaler: Any = None) -> None:
        """Leaves scaling to ``scaler`` (a GradScaler, or ``None`` when it is not known) from now on."""
        self.in_use = False
        self.scaler = scaler if scaler is not None else self.scaler

    def current(self) -> float:
        """Returns the scale in force: the explicit scaler's when there is one, 1.0 without scaling."""
        return float(self.scaler.get_scale()) if self.scaler is not None else self.factor

    def count(self, optimizer: int, *, finite: bool, num_optimizers: int) -> None:
        """Counts a step of one optimizer; the scale moves once for each round of all of them.

        A round ends when each has stepped, or when one steps again (a discriminator that steps more often). It is
        finite when all its steps were.
        """
        # All optimizers share one scale, and one overflow seen by several of them must not shrink it several times.
        if optimizer in self._stepped:
            self._end_round()
        self._stepped[optimizer] = finite
        if len(self._stepped) >= num_optimizers:
            self._end_round()

    def _end_round(self) -> None:
        finite = all(self._stepped.values())
        self._stepped = {}
        self.update(finite=finite)

    def update(self, *, finite: bool) -> None:
        """Counts a round of steps and moves the scale."""
        config = self._config
        if not self.in_use or not config.use_dynamic_loss_scaling:
            return
        if finite:
            self.good += 1
            self.bad = 0
            if self.good == config.incr_every_n_steps:
                grown = self.scale * config.incr_ratio
                self.scale = grown if grown <= _LARGEST else self.scale
                self.good = 0
        else:
            self.good = 0
            self.bad += 1
            if self.bad == config.decr_every_n_nan_or_inf:
                self.scale = max(1.0, self.scale * config.decr_ratio)
                self.bad = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries for :meth:`load_state_dict`."""
        return {"scale": self.scale, "good": self.good, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``; does nothing without scaling.

        Raises CheckpointError when an entry is missing or the scale is not a positive number.
        """
        if not self.in_use:
            return
        try:
            scale = float(state["scale"])
            good = int(state["good"])
            bad = int(state["bad"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"The optimizer state holds {state!r} as the state of amp; scale, good and bad are "
                                  "numbers. Save it again with optimizer.state_dict().") from error  # fmt: skip
        if not 0 < scale <= _LARGEST:
            raise CheckpointError(f"The optimizer state holds the loss scale {scale!r}; it must be above 0 and finite.")
        self.scale = scale
        self.good = good
        self.bad = bad


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
        self._is_stage = job.axes.size("pp") > 1
        self._non_finite: Tensor | None = None
        self._grad_scale: Any = None
        self._found_inf: Any = None

    def note_backward(self) -> None:
        """Looks at the gradients, without waiting for the answer.

        Those of a pipeline come from several backward passes and are exchanged after the last: ``step()`` looks.
        """
        if not self._is_stage:
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
        loss = loss_of(closure)
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
        found = self._non_finite
        self._non_finite = None
        assert found is not None
        return bool(agreed(found, self.parameters(), self._job))

    def _step_for_scaler(self) -> None:
        """Steps or skips as a GradScaler says; from now on it alone scales."""
        self._scale.give_way()
        self._non_finite = None
        if bool(self._found_inf):
            self.note_step()
            return
        # As GradScaler does: the reciprocal in float64, for division in float32 may be imprecise on a GPU.
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

    Data parallel has added every worker's gradients to every other's, so an inf or nan of one worker is in all of them,
    and no message is needed; where gradients differ between workers, as those of parts of a model do, all answers are
    compared.
    """
    if job.process_group is None or not job.collective:
        return found
    if job.has_equal_gradients(parameters) and job.axes.size(*MODEL_AXES) == 1:
        return found
    return everywhere(found, job.process_group)
