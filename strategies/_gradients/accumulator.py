"""Several batches for one exchange: gradients are exchanged in the backward pass that completes an update only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from fleet.errors import ConfigError
from fleet.strategies._shared.optimizer_wrapper import (
    OptimizerWrapper,
    came_since,
    gradients_left,
    shared_by_two,
    written_too_early,
)
from fleet.strategies._shared.parts import is_part, part_of


class Batches:
    """How many batches make an update or an exchange of one optimizer, and how many of them are done.

    Args:
        per_update: calls of ``step()`` for one update.
        per_exchange: backward passes before one call of ``step()``.
        parameters: returns the parameters of the optimizer.
    """

    def __init__(
        self, per_update: int = 1, per_exchange: int = 1, parameters: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        self.per_update, self.per_exchange, self.parameters = per_update, per_exchange, parameters
        self.done = 0  # steps without an update since the last one
        self.backwards = 0  # backward passes since the last step or clear
        self.lost = False  # parameters were given to a later optimizer

    def give(self, parameters: Iterable[Tensor]) -> None:
        """Stops counting when another optimizer takes some of ``parameters``."""
        if self.has_some(parameters):
            self.lost, self.parameters = True, tuple

    def has_some(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether some of ``parameters`` are those of the optimizer."""
        given, mine = ({part_of(cast(nn.Parameter, p)) for p in some} for some in (parameters, self.parameters()))
        return not given.isdisjoint(mine)

    def check_give(self, parameters: Iterable[Tensor]) -> None:
        """Raises ConfigError when batches wait inside a divided model and ``parameters`` get another optimizer."""
        if (self.done or self.backwards) and self.has_some(parameters):
            raise ConfigError(
                f"distributed_optimizer() was called for parameters of which {self.done or self.backwards} of "
                f"{max(self.per_update, self.per_exchange)} batches wait for an update inside the sharded model "
                "(sharding_configs['gradient_merge_acc_step'], ['accumulate_steps']), where they cannot be dropped. "
                "Call it right after an update."
            )

    @property
    def is_last(self) -> bool:
        """Whether the next backward pass exchanges."""
        return self.done == self.per_update - 1 and self.backwards >= self.per_exchange - 1

    def check_complete(self) -> None:
        """Raises ConfigError when ``step()`` comes before the backward pass that exchanges."""
        if self.backwards % self.per_exchange:
            raise ConfigError(
                f"hybrid_configs['sharding_configs']['accumulate_steps'] is {self.per_exchange}, and step() came after "
                f"{self.backwards} backward passes, before the gradients were exchanged. Call step() after every "
                f"{self.per_exchange} backward passes, or set accumulate_steps to 1."
            )

    def check_clear(self) -> None:
        """Raises ConfigError when gradients are cleared that wait inside a divided model among others."""
        if self.backwards % self.per_exchange:
            raise ConfigError(
                f"zero_grad() came after {self.backwards} of {self.per_exchange} backward passes "
                "(hybrid_configs['sharding_configs']['accumulate_steps']), whose gradients wait inside the sharded "
                "model and cannot be dropped. Call it after step()."
            )
        if self.per_update > 1 and self.backwards:
            raise ConfigError(
                "zero_grad() came between backward() and step(). With sharding_configs['gradient_merge_acc_step'] "
                f"{self.per_update} in stages 2 and 3 gradients wait inside the sharded model and cannot be dropped. "
                "Call zero_grad() before backward() or after step(), keep losses of other models from passing through "
                "this one (requires_grad_(False), detach()), or use stage 1."
            )


class ModelBatches:
    """The backward passes of one model, as the optimizers that hold its parameters count them.

    Args:
        model: the model.
        known: what the optimizers count, also of those that come later.
        set_exchanges: told at the start of each pass whether it exchanges; ``None`` where nobody has to be told.
    """

    def __init__(
        self, model: nn.Module, known: Sequence[Batches], set_exchanges: Callable[[bool], None] | None = None
    ) -> None:
        self._model, self._known, self._set_exchanges = model, known, set_exchanges
        self._in_backward = False

    def exchanges(self) -> bool:
        """Returns whether the next backward pass exchanges; raises ConfigError when optimizers disagree."""
        last = {batches.is_last for batches in self._mine()}
        if len(last) > 1 and self._set_exchanges is not None:
            raise ConfigError(
                "Two optimizers hold parameters of one sharded model, and only one of them is at its last batch "
                "(sharding_configs['gradient_merge_acc_step'], ['accumulate_steps']). Step both after each batch, or "
                "use stage 1."
            )
        # What passes through a frozen model adds nothing, and gradients of earlier batches may wait in it.
        return True in last if last else any(p.requires_grad for p in self._model.parameters())

    def watch(self, output: Any, *, held: bool = False) -> None:
        """Decides and counts when a backward pass comes through ``output``, which ``held`` keeps local."""
        if torch._C._current_graph_task_id() == -1:
            self._in_backward = False  # a pass that failed has no end
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._begin, held))

    def check_clear(self, parameters: Sequence[Tensor]) -> None:
        """Raises ConfigError when the gradients of ``parameters`` cannot be cleared now."""
        for batches in self._mine():
            if not set(parameters).isdisjoint(batches.parameters()):
                batches.check_clear()

    def _mine(self) -> list[Batches]:
        """Returns what those optimizers count that train something of the model at this moment."""
        mine = {part_of(parameter) for parameter in self._model.parameters()}  # gathered ones before backward
        return [b for b in self._known if any(p in mine and p.requires_grad for p in b.parameters())]

    def _begin(self, held: bool, gradient: Tensor) -> None:
        if self._in_backward:  # several outputs make one backward pass
            return
        if self._set_exchanges is not None:
            self._set_exchanges(not held and self.exchanges())
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._in_backward = False
        for batches in self._mine():
            batches.backwards += 1


class CountingOptimizer(OptimizerWrapper):
    """Updates at the step that completes an update, and makes sure that gradients were exchanged by then.

    Args:
        optimizer: the optimizer inside.
        batches: what is counted.
        in_model: whether gradients that are not exchanged yet wait inside the model, where nothing can clear them.
    """

    def __init__(self, optimizer: Optimizer, batches: Batches, in_model: bool) -> None:
        super().__init__(optimizer)
        self._batches, self._in_model = batches, in_model
        self._left: dict[Tensor, TensorWeakRef] = {}  # the gradients of the last update, if nobody clears them
        batches.parameters = self.parameters

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a batch; updates when it is the last one.

        Raises ConfigError for a closure, which runs batches by itself, and when a backward pass is missing.
        """
        batches = self._batches
        if batches.lost:
            raise ConfigError(shared_by_two("sharding"))
        if closure is not None:
            raise ConfigError(
                "step(closure) runs the closure as often as it likes, and sharding counts batches here. Call backward "
                "before step(), or leave gradient_merge_acc_step and accumulate_steps at 1."
            )
        batches.check_complete()
        batches.backwards = 0
        if self._in_model:
            self._check_gradients()
        if self.only_counts():
            batches.done += 1
            self.note_step()
            return None
        batches.done = 0
        loss = super().step()
        self._left = gradients_left(self.parameters())
        return loss

    def _check_gradients(self) -> None:
        """Raises ConfigError for gradients written in a batch that completes no update: they would be lost."""
        if self.only_counts() and any(map(is_part, came_since(self.parameters(), self._left))):
            raise ConfigError(written_too_early("sharding_configs['gradient_merge_acc_step']"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; raises ConfigError where some wait inside the model for an exchange."""
        if self._in_model:
            self._batches.check_clear()
        self._batches.backwards = 0
        super().zero_grad(set_to_none=set_to_none)

    def merges(self) -> bool:
        """Returns whether an update takes the gradients of several steps."""
        return self._batches.per_update > 1 or super().merges()

    def only_counts(self) -> bool:
        """Returns whether the next ``step()`` ends a batch and updates nothing."""
        batches = self._batches
        return batches.done < batches.per_update - 1 or bool(batches.backwards % batches.per_exchange)

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
