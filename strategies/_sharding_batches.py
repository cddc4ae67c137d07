"""Several batches for one exchange: gradients are exchanged in the backward pass that completes an update only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.errors import ConfigError
from fleet.strategies._optimizer import OptimizerWrapper


class Batches:
    """How many batches make an update or an exchange, and how many of them are done.

    Args:
        per_update: calls of ``step()`` for one update.
        per_exchange: backward passes before one call of ``step()``.
    """

    def __init__(self, per_update: int = 1, per_exchange: int = 1) -> None:
        self.per_update, self.per_exchange = per_update, per_exchange
        self.done = 0  # steps without an update since the last one
        self.backwards = 0  # backward passes since the last step
        self.has_new_gradients = False
        self._in_backward = False

    @property
    def is_last(self) -> bool:
        """Whether the next backward pass exchanges."""
        return self.done == self.per_update - 1 and self.backwards >= self.per_exchange - 1

    @property
    def one_by_one(self) -> bool:
        """Whether every backward pass exchanges and every step updates."""
        return self.per_update == self.per_exchange == 1

    def watch(self, output: Any) -> None:
        """Counts a backward pass when one comes through ``output``."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._note_backward)

    def check_complete(self) -> None:
        """Raises ConfigError when ``step()`` comes before the backward pass that exchanges."""
        if self.backwards % self.per_exchange:
            raise ConfigError(
                f"hybrid_configs['sharding_configs']['accumulate_steps'] is {self.per_exchange}, and step() came after "
                f"{self.backwards} backward passes, before the gradients were exchanged. Call step() after every "
                f"{self.per_exchange} backward passes, or set accumulate_steps to 1."
            )

    def _note_backward(self, gradient: Tensor) -> None:
        self.has_new_gradients = True
        if not self._in_backward:  # several outputs make one backward pass
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self.backwards += 1


class CountingOptimizer(OptimizerWrapper):
    """Updates at the step that completes an update, and makes sure that gradients were exchanged by then.

    Args:
        optimizer: the optimizer inside.
        batches: what the model and the optimizers count together.
        in_model: whether gradients that are not exchanged yet wait inside the model, where nothing can clear them.
    """

    def __init__(self, optimizer: Optimizer, batches: Batches, in_model: bool) -> None:
        super().__init__(optimizer)
        self._batches, self._in_model = batches, in_model

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a batch; updates when it is the last one.

        Raises ConfigError for a closure, which runs batches by itself, and when a backward pass is missing.
        """
        batches = self._batches
        if closure is not None:
            raise ConfigError(
                "step(closure) runs the closure as often as it likes, and sharding counts batches here. Call backward "
                "before step(), or leave gradient_merge_acc_step and accumulate_steps at 1."
            )
        batches.check_complete()
        batches.backwards = 0
        batches.has_new_gradients = False
        if batches.done < batches.per_update - 1:
            batches.done += 1
            self.note_step()
            return None
        batches.done = 0
        return super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; raises ConfigError where some wait inside the model for an exchange."""
        batches = self._batches
        if batches.backwards % batches.per_exchange and self._in_model:
            raise ConfigError(
                f"zero_grad() came after {batches.backwards} of {batches.per_exchange} backward passes "
                "(hybrid_configs['sharding_configs']['accumulate_steps']), whose gradients wait inside the sharded "
                "model and cannot be dropped. Call it after step()."
            )
        batches.backwards = 0
        super().zero_grad(set_to_none=set_to_none)

    def has_new_gradients(self) -> bool:
        """Returns whether a backward pass ran since the last step, also when its gradients are not in ``.grad`` yet."""
        return self._batches.has_new_gradients or super().has_new_gradients()

    def saving_note(self) -> str | None:
        """Returns what a user who saves between two updates should know."""
        batches = self._batches
        waiting = batches.done + batches.backwards
        if not waiting:
            return super().saving_note()
        return (
            f"sharding: {waiting} batches wait for their update, and their gradients are not part of the state. Save "
            "right after an update."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_batches": None}
