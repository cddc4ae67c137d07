"""RuleWrapper: replaces the update rule of the optimizer inside; the base of lars and lamb.

The wrapper works on the parameter groups of the user's optimizer, so a learning-rate scheduler made before or after
wrapping drives it, and it keeps its state where the optimizer keeps its own, so ``state_dict`` holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, loss_of, step_hooks_around
from fleet.strategies._shared.parts import part_of

if TYPE_CHECKING:
    from fleet.job.job import Job


class RuleWrapper(OptimizerWrapper):
    """Updates each parameter group by :meth:`update_group` and never by the optimizer inside.

    Args:
        optimizer: the user's optimizer; its groups and state are used, its rule is not.
        option: the option, for messages.
        job: knows the names of the parameters.
        is_excluded: whether a qualified name is left out of weight decay; ``None`` when nothing is.
    """

    def __init__(self, optimizer: Optimizer, option: str, job: Job, is_excluded: Callable[[str], bool] | None) -> None:
        super().__init__(optimizer)
        self._option = option
        self._job = job
        self._is_excluded = is_excluded
        self._excluded: dict[Tensor, bool] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        # The rule inside does not run, but its hooks do: clipping, above all.
        with step_hooks_around(self.optimizer):
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                if any(p.grad.is_sparse for p in parameters):
                    raise ConfigError(f"{self._option} needs dense gradients, and a parameter has a sparse one.")
                if parameters:
                    self.update_group(group, parameters, [p.grad for p in parameters])
        self.note_step()
        return loss

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates ``parameters`` in place with ``gradients``; ``group`` holds the hyper-parameters.

        With sharding both are parts: work on :func:`~fleet.strategies._shared.parts.local` of them, and take norms by
        :func:`~fleet.strategies._shared.norm.norms`, which count the whole, over mp too.
        """
        raise NotImplementedError

    def decays(self, parameters: Sequence[Tensor], decay: float) -> list[float]:
        """Returns ``decay`` for each parameter, 0 for an excluded one.

        Raises ConfigError when names are needed and a parameter belongs to no wrapped model.
        """
        if self._is_excluded is None:
            return [decay] * len(parameters)
        parameters = [part_of(cast(Any, p)) for p in parameters]
        if any(p not in self._excluded for p in parameters):
            names = self._job.parameter_names()
            missing = [tuple(p.shape) for p in parameters if p not in names]
            if missing:
                raise ConfigError(
                    f"{self._option}_configs['exclude_from_weight_decay'] goes by parameter names, and a parameter of "
                    f"shape {missing[0]} belongs to no model. Call fleet.distributed_model(model) first."
                )
            self._excluded = {p: self._is_excluded(name) for p, name in names.items()}
        return [0.0 if self._excluded[p] else decay for p in parameters]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_job": None, "_is_excluded": None, "_excluded": {}}
