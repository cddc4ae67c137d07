"""Several batches, one update: the count of batches, and the backward pass that exchanges their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from fleet.errors import ConfigError
from fleet.strategies._gradients.passes import Passes
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, shared_by_two
from fleet.strategies._shared.parts import is_part, part_of


class Accumulator:
    """Counts the batches of one optimizer, whose gradients add up in ``.grad``; subclasses keep them elsewhere.

    Args:
        option: the option that merges batches, for messages.
        everyone: the accumulators of all optimizers; a parameter belongs to one of them.
        per_update: calls of ``step()`` for one update.
        per_exchange: backward passes before one call of ``step()``.

    Attributes:
        steps: calls of ``step()`` since the last update.
        passes: backward passes since the last step or clear.
        lost: whether a later optimizer has parameters of this one.
        notes: numbers that belong to the gradients in its state; ``None`` where the state has no gradients.
    """

    takes_unseen: ClassVar[bool] = False  # counts passes that bypass the outputs of their model

    def __init__(
        self, option: str, everyone: Sequence[Accumulator] = (), *, per_update: int = 1, per_exchange: int = 1
    ) -> None:
        self.option = option
        self.per_update = per_update
        self.per_exchange = per_exchange
        self.steps = 0
        self.passes = 0
        self.lost = False
        self.notes: dict[str, Tensor] | None = None
        self._everyone = everyone
        self._parameters: Callable[[], Sequence[Tensor]] = tuple
        # The gradients of the last update, if nobody clears them.
        self._left: dict[Tensor, TensorWeakRef] = {}

    # ---- whose parameters -----------------------------------------------------------------------------------------

    def take(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Counts for the optimizer of ``parameters``, in place of any other accumulator."""
        # A parameter counts with one optimizer, the latest that was given it.
        for other in self._everyone:
            if other is not self:
                other.give(parameters())
        self._parameters = parameters

    def give(self, parameters: Iterable[Tensor]) -> None:
        """Stops counting when another optimizer gets some of ``parameters``."""
        if self._has_some(parameters):
            self.lost = True
            self._parameters = tuple

    def check_give(self, parameters: Iterable[Tensor]) -> None:
        """Raises ConfigError when another optimizer cannot take ``parameters`` now."""

    def follow(self) -> None:
        """Called when a model was wrapped, which may have replaced the data of parameters."""

    def note_parameters(self) -> None:
        """Called when parameters were unfrozen."""

    def is_in(self, model: Passes) -> bool:
        """Returns whether parameters of ``model`` train and count here."""
        return any(p in model.parameters and p.requires_grad for p in self._parameters())

    def _has_some(self, parameters: Iterable[Tensor]) -> bool:
        given, mine = ({part_of(cast(nn.Parameter, p)) for p in some} for some in (parameters, self._parameters()))
        return not given.isdisjoint(mine)

    # ---- a backward pass ------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether the next backward pass exchanges."""
        return self.steps == self.per_update - 1 and self.passes >= self.per_exchange - 1

    def begin_pass(self) -> None:
        """Called when a backward pass begins."""

    def end_pass(self) -> None:
        """Counts a backward pass that has ended."""
        self.passes += 1

    def check_agreement(self) -> None:
        """Raises ConfigError where the accumulators of one model cannot disagree about the pass that exchanges."""

    # ---- the calls of the user's loop -----------------------------------------------------------------------------

    def only_counts(self) -> bool:
        """Returns whether the next ``step()`` ends a batch and updates nothing."""
        return self.steps < self.per_update - 1 or bool(self.passes % self.per_exchange)

    def run(self, closure: Callable[[], float]) -> float:
        """Returns the loss of a ``closure`` given to ``step()``; raises ConfigError where it would run batches."""
        raise ConfigError(
            f"step(closure) runs the closure as often as it likes, and {self.option} counts batches here. Call "
            "backward before step(), or leave gradient_merge_acc_step and accumulate_steps at 1."
        )

    def exchange_missing(self) -> None:
        """Called before ``step()``, where other workers may wait for the exchange of a batch without backward."""

    def end_batch(self) -> bool:
        """Ends a batch; returns whether it completes an update, and the gradients of all its batches are in ``.grad``.

        Raises ConfigError when a backward pass is missing, or a gradient was written that no update would see.
        """
        if self.passes % self.per_exchange:
            raise ConfigError(
                f"hybrid_configs['sharding_configs']['accumulate_steps'] is {self.per_exchange}, and step() came after "
                f"{self.passes} backward passes, before the gradients were exchanged. Call step() after every "
                f"{self.per_exchange} backward passes, or set accumulate_steps to 1."
            )
        self.passes = 0
        if not self.only_counts():
            return True
        if any(self._written()):
            raise ConfigError(
                "step() found a gradient that was written after backward(), in a batch that completes no update: what "
                f"this batch adds is set aside at the end of backward() ({self._merged_by}). Change gradients in the "
                "batch that completes an update, where .grad holds the merged ones, or change the loss."
            )
        self.steps += 1
        return False

    def end_update(self) -> None:
        """Begins to count again after an update."""
        self.steps = 0
        self._left = {p: TensorWeakRef(p.grad) for p in self._parameters() if p.grad is not None}

    @property
    def _merged_by(self) -> str:
        return self.option

    def _written(self) -> Iterator[bool]:
        """Yields for each gradient that came since the last update whether it was written outside of backward."""
        for p in self._parameters():
            if p.grad is not None and not (p in self._left and self._left[p]() is p.grad):
                yield self._is_written(p)

    def _is_written(self, parameter: Tensor) -> bool:
        return False

    def check_clear(self) -> None:
        """Raises ConfigError when gradients are to be cleared that nothing can reach now."""

    def clear(self) -> None:
        """Drops the present batch; called when ``.grad`` was cleared."""
        self.passes = 0

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Called when the gradients of ``parameters`` were cleared by another call than the optimizer's."""

    # ---- state ----------------------------------------------------------------------------------------------------

    @property
    def is_out_of_step(self) -> bool:
        """Whether gradients wait that only this worker has, and that its state holds."""
        return False

    def held(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Returns the gradients of ``parameters`` that are kept out of ``.grad``."""
        return ()

    def has_new_gradients(self) -> bool:
        """Returns whether gradients of the present batch are kept out of ``.grad``."""
        return False

    def saving_note(self) -> str | None:
        """Returns a note for a user who saves between two updates, or ``None``."""
        waiting = self.steps + self.passes
        if not waiting:
            return None
        return (
            f"{self.option}: {waiting} batches wait for their update, and their gradients are not part of the state. "
            "Save right after an update."
        )

    def state(self) -> dict[str, Any]:
        """Returns the entries of the optimizer's state."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when the entries of ``state`` cannot be loaded here."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`state` returned, from the state of the optimizer."""


class InModel(Accumulator):
    """Counts batches whose gradients add up inside a divided model until the exchange; nothing can clear them there."""

    def check_give(self, parameters: Iterable[Tensor]) -> None:
        """Raises ConfigError when batches wait inside the divided model and ``parameters`` get another optimizer."""
        if (self.steps or self.passes) and self._has_some(parameters):
            raise ConfigError(
                f"distributed_optimizer() was called for parameters of which {self.steps or self.passes} of "
                f"{max(self.per_update, self.per_exchange)} batches wait for an update inside the sharded model "
                "(sharding_configs['gradient_merge_acc_step'], ['accumulate_steps']), where they cannot be dropped. "
                "Call it right after an update."
            )

    def check_agreement(self) -> None:
        """Raises ConfigError: the units of a divided model exchange together."""
        refuse_disagreement()

    def check_clear(self) -> None:
        """Raises ConfigError when gradients are cleared that wait inside the divided model among others."""
        if self.passes % self.per_exchange:
            raise ConfigError(
                f"zero_grad() came after {self.passes} of {self.per_exchange} backward passes "
                "(hybrid_configs['sharding_configs']['accumulate_steps']), whose gradients wait inside the sharded "
                "model and cannot be dropped. Call it after step()."
            )
        if self.per_update > 1 and self.passes:
            raise ConfigError(
                "zero_grad() came between backward() and step(). With sharding_configs['gradient_merge_acc_step'] "
                f"{self.per_update} in stage 3 gradients wait inside the sharded model and cannot be dropped. "
                "Call zero_grad() before backward() or after step(), keep losses of other models from passing through "
                "this one (requires_grad_(False), detach()), or use stage 1 or 2."
            )

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Raises ConfigError when the gradients of ``parameters`` cannot be cleared now."""
        if not set(parameters).isdisjoint(self._parameters()):
            self.check_clear()

    @property
    def _merged_by(self) -> str:
        return "sharding_configs['gradient_merge_acc_step']"

    def _is_written(self, parameter: Tensor) -> bool:
        return is_part(parameter)


def refuse_disagreement() -> NoReturn:
    """Raises ConfigError: only one of two optimizers waits for the exchange of a sharded model."""
    raise ConfigError(
        "Two optimizers hold parameters of one sharded model, and only one of them is at its last batch "
        "(sharding_configs['gradient_merge_acc_step'], ['accumulate_steps']). Step both after each batch, or "
        "use stage 1."
    )


def accumulate(model: Passes, accumulators: Sequence[Accumulator]) -> None:
    """Makes ``model`` exchange only in passes that one of its ``accumulators`` waits for.

    The list may grow later; it is read in each pass.
    """

    def own() -> list[Accumulator]:
        return [accumulator for accumulator in accumulators if accumulator.is_in(model)]

    def begin() -> None:
        for accumulator in own():
            accumulator.begin_pass()

    def is_last() -> bool:
        found = own()
        last = {accumulator.is_last for accumulator in found}
        if len(last) > 1:
            found[0].check_agreement()
        # A pass through a frozen model adds nothing, and gradients of earlier batches may wait in it.
        return True in last if last else any(p.requires_grad for p in model.parameters)

    def end() -> None:
        for accumulator in own():
            accumulator.end_pass()

    model.takes_unseen = lambda: any(accumulator.takes_unseen for accumulator in own())
    model.starts.append(begin)
    model.gates.append(is_last)
    model.ends.append(end)


class AccumulatingOptimizer(OptimizerWrapper):
    """Counts the calls of ``step()`` and updates at the one that completes an update.

    Args:
        optimizer: the optimizer inside.
        accumulator: counts its batches.
    """

    def __init__(self, optimizer: Optimizer, accumulator: Accumulator) -> None:
        super().__init__(optimizer)
        self._accumulator = accumulator
        accumulator.take(self.parameters)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a batch; updates when it completes an update. Returns the closure's loss.

        Raises ConfigError when a later optimizer has parameters of this one, and for a batch that cannot end here.
        """
        accumulator = self._accumulator
        loss = None
        if accumulator.lost:
            raise ConfigError(shared_by_two(accumulator.option))
        if closure is not None:
            with torch.enable_grad():
                loss = accumulator.run(closure)
        if accumulator.end_batch():
            super().step()
            accumulator.end_update()
        else:
            self.note_step()
        return loss

    def exchange_missing(self) -> None:
        """Takes part in the exchange that a batch without a backward pass has left out."""
        self._accumulator.exchange_missing()
        super().exchange_missing()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the present batch; those of earlier batches stay where they wait."""
        self._accumulator.check_clear()
        super().zero_grad(set_to_none=set_to_none)
        self._accumulator.clear()

    def has_new_gradients(self) -> bool:
        """Returns whether gradients of the present batch are kept out of ``.grad``."""
        return self._accumulator.has_new_gradients() or super().has_new_gradients()

    def merges(self) -> bool:
        """Returns whether an update takes the gradients of several steps."""
        return self._accumulator.per_update > 1 or super().merges()

    def window_notes(self) -> dict[str, Tensor] | None:
        """Returns the numbers saved with the gradients of an open window of batches; ``None`` without a window."""
        notes = self._accumulator.notes
        return super().window_notes() if notes is None else notes

    def only_counts(self) -> bool:
        """Returns whether the next ``step()`` ends a batch and updates nothing."""
        return self._accumulator.only_counts()

    @property
    def is_out_of_step(self) -> bool:
        """Whether gradients wait that only this worker has, and that its state holds."""
        return self._accumulator.is_out_of_step or super().is_out_of_step

    def saving_note(self) -> str | None:
        """Returns a note for a user who saves between two updates, or ``None``."""
        return self._accumulator.saving_note() or super().saving_note()

    def note_groups(self) -> None:
        """Counts the batches of new parameter groups too."""
        self._accumulator.take(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside, and the gradients that wait outside of ``.grad``."""
        return {**super().state_dict(), **self._accumulator.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; gradients that waited in it wait again.

        Raises CheckpointError when they are those of another worker, or of another number of batches per update.
        """
        # The check comes first, so that a refused state leaves the optimizer inside as it was.
        self._accumulator.check_state(state_dict)
        super().load_state_dict({name: v for name, v in state_dict.items() if name != self._accumulator.option})
        self._accumulator.load(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_accumulator": None}
