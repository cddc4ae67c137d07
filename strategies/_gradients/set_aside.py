"""Several batches, one update: gradients are summed outside ``.grad`` until the batch that completes it.

[Note: Where the sum is kept]
A batch adds to the sum the gradients that ``.grad`` would hold at ``step()`` in a loop that updates each time. They are
set aside at the end of its backward pass, because code between ``backward()`` and ``step()`` (clipping, above all)
would change an incomplete sum. ``zero_grad()`` before ``step()`` drops them, as it would drop ``.grad``, and never
drops those of earlier batches. When the backward pass that completes the window begins, the sums are put into
``.grad``: that pass exchanges the whole merged gradient, and clipping then sees it. The sums are kept until the update,
in case gradients are cleared and another pass follows.

Between the passes the smallest parameter has a gradient of zeros: code that clips finds something to clip, and a script
that clears ``.grad`` by hand is noticed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fleet.errors import CheckpointError, ConfigError
from fleet.strategies._gradients.accumulator import Accumulator, refuse_disagreement
from fleet.strategies._gradients.arrivals import accumulator_of
from fleet.strategies._gradients.passes import Passes
from fleet.strategies._shared.parts import is_part


class SetAside(Accumulator):
    """The gradients of the batches since the last update of one optimizer; see [Note: Where the sum is kept].

    An incomplete window of batches stays open across epochs, and is part of the optimizer's state: the sums differ
    between workers, so each worker saves its optimizer state to resume inside a window. A state that was saved between
    windows fits every worker.

    Args:
        option: the option, which names the entry in the optimizer's state.
        everyone: the accumulators of all optimizers.
        per_update: batches per update.
        average: divide gradients by their number.
        models: the passes of the models that exchange gradients, also of those that come later.
        global_rank: rank of this worker.

    Attributes:
        sums: the gradients of the batches that are done.
        pending: the gradients of the present batch.
    """

    takes_unseen = True

    def __init__(
        self,
        option: str,
        everyone: Sequence[Accumulator] = (),
        *,
        per_update: int,
        average: bool = True,
        models: Sequence[Passes] = (),
        global_rank: int = 0,
    ) -> None:
        super().__init__(option, everyone, per_update=per_update)
        self.sums: dict[Tensor, Tensor] = {}
        self.pending: dict[Tensor, Tensor] = {}
        self.notes = {}
        self._average = average
        self._models = models
        self._global_rank = global_rank
        # The nodes, kept alive, and the handles of their hooks.
        self._accumulators: dict[Tensor, tuple[Any, Any]] = {}
        self._frozen: list[Tensor] = []
        self._restored = False
        self._running = False
        self._zeros: Tensor | None = None  # the parameter with a gradient of zeros
        self._leftover: set[Tensor] = set()

    def take(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Merges the gradients of ``parameters``, in place of any other accumulator.

        Raises ConfigError where a parameter has no shape before the first forward of its layer.
        """
        if any(is_lazy(parameter) for parameter in parameters()):
            raise ConfigError(
                f"distributed_optimizer(): a parameter of a lazy layer has no shape before its first forward, and "
                f"{self.option} keeps gradients of several batches. Run the model on a batch first."
            )
        super().take(parameters)
        self._watch(parameters())

    def _watch(self, parameters: Sequence[Tensor]) -> None:
        """Merges the gradients of ``parameters`` from now on, of frozen ones once they are unfrozen."""
        self._frozen = [p for p in parameters if not p.requires_grad]
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._accumulators:
                node = accumulator_of(parameter)
                hook = node.register_prehook(partial(_arrive, weakref.ref(self), weakref.ref(parameter)))
                self._accumulators[parameter] = node, hook

    def give(self, parameters: Iterable[Tensor]) -> None:
        """Releases ``parameters``, which another optimizer has now."""
        given = set(parameters).intersection([*self._accumulators, *self._frozen])
        if not given:
            return
        if self.sums:
            warnings.warn(
                f"The previous optimizer had merged {self.steps} of {self.per_update} batches when another one was "
                "made for the same parameters; they are dropped. Make the new one right after an update.",
                stacklevel=2,
            )
        self.lost = True
        if self._zeros is not None and self._zeros in given:
            self._unmark()
        self._frozen = [p for p in self._frozen if p not in given]
        for parameter in given:
            self.sums.pop(parameter, None)
            self.pending.pop(parameter, None)
            _, hook = self._accumulators.pop(parameter, (None, None))
            if hook is not None:
                hook.remove()

    def follow(self) -> None:
        """Finds the parameters again whose data ``distributed_model`` replaced, as a plan that divides them does."""
        moved = [p for p, (node, _) in self._accumulators.items() if accumulator_of(p) is not node]
        for parameter in moved:
            self._accumulators.pop(parameter)[1].remove()
        self._watch([*moved, *self._frozen])

    def note_parameters(self) -> None:
        """Merges the gradients of parameters that were unfrozen, too."""
        self._watch(self._frozen)

    def is_in(self, model: Passes) -> bool:
        """Returns whether gradients of parameters of ``model`` are merged here."""
        return any(parameter in model.parameters for parameter in self._accumulators)

    def check_agreement(self) -> None:
        """Raises ConfigError in stage 2 of sharding, where the other's shards would be set aside as whole gradients."""
        if any(model.reducer is None and model.local_gradients is not None for model in self._models):
            refuse_disagreement()

    def begin_pass(self) -> None:
        """Begins a backward pass: with the sums in ``.grad`` when it completes the window."""
        if self._running:
            return
        self._running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._set_aside)
        # The zeros are still there: where somebody has cleared them, the script has dropped this batch.
        self._notice_clear()
        self._unmark()
        if self.is_last:
            self._check_frozen()
            self._restore()
        else:
            self._leftover = {p for p in self._accumulators if p.grad is not None}

    def end_pass(self) -> None:
        """Leaves the count to ``step()``."""

    def arrived(self, parameter: Tensor, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the ``gradients`` to add to ``.grad`` of ``parameter``: with ``average`` this batch's share."""
        self.begin_pass()
        return tuple(g if g is None or not self._average else g / self.per_update for g in gradients)

    def run(self, closure: Callable[[], float]) -> float:
        """Returns the loss of a ``closure`` given to ``step()``."""
        return closure()

    def clear(self) -> None:
        """Drops the gradients of the present batch; called when ``.grad`` was cleared."""
        self.pending.clear()
        self._restored = self._running = False
        self._watch(self._frozen)

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Calls :meth:`clear` when gradients of this window were cleared by other means."""
        if any(parameter in self._accumulators for parameter in parameters):
            self.clear()

    def end_batch(self) -> bool:
        """Ends a batch; returns whether it was the last, and the merged gradients are in ``.grad``.

        Raises ConfigError when a gradient was written that no update would see, and when the window ends without a
        backward pass that exchanges gradients.
        """
        is_last = super().end_batch()
        self._running = False
        self._watch(self._frozen)
        self._notice_clear()
        if not is_last:
            for parameter, gradient in self.pending.items():
                kept = self.sums.get(parameter)
                self.sums[parameter] = gradient if kept is None else kept.add_(gradient)
            self.pending = {}
        elif not self._restored or any(p.grad is None for p in self.sums):
            if self.sums and any(self.is_in(model) for model in self._models):
                raise ConfigError(
                    f"step() ends a window of {self.per_update} batches, and its last batch has no gradients: there "
                    "was no backward pass that could exchange the merged ones, or they were cleared. Call backward() "
                    "before step(), or leave out both for a batch that is skipped."
                )
            self._restore()
        return is_last

    def end_update(self) -> None:
        """Starts a new window, after the update."""
        super().end_update()
        self.sums = {}
        self.notes = {}
        self._restored = False

    def _check_frozen(self) -> None:
        """Raises ConfigError when the exchange omits a parameter for which earlier batches have gradients."""
        if any(not parameter.requires_grad for parameter in self.sums):
            raise ConfigError(
                f"A parameter was frozen after {self.steps} of {self.per_update} batches of an update, with gradients "
                "of these that are not exchanged yet. Freeze parameters right after an update."
            )

    def _is_written(self, parameter: Tensor) -> bool:
        # A write over the zeros is no gradient: a penalty is added to the merged gradients later.
        return parameter in self._accumulators and parameter is not self._zeros

    def _restore(self) -> None:
        for parameter, total in self.sums.items():
            if parameter.grad is None:
                parameter.grad = total.clone()
            elif not self._restored:
                parameter.grad = parameter.grad + total
        self._restored = True

    @torch.no_grad()
    def _set_aside(self, exchanged: bool = False) -> None:
        """Ends a backward pass: sets its gradients aside, unless it completes the window."""
        # A second time in a later callback: the pass may complete another window, whose exchange ends in between.
        if not exchanged:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._set_aside, exchanged=True))
            return
        self._running = False
        if self.is_last:
            return
        for parameter in self._accumulators:
            if is_part(parameter.grad):
                continue  # exchanged, in an earlier window
            gradient = parameter.grad
            parameter.grad = None
            if gradient is not None:
                kept = self.pending.get(parameter)
                # A gradient that was there before may share memory with a buffer of the exchange.
                shared = parameter in self._leftover or gradient._is_view()
                own = gradient.clone() if shared else gradient
                self.pending[parameter] = own if kept is None else kept.add_(own)
        self._leftover = set()
        self._mark()

    def _mark(self) -> None:
        """Gives the smallest parameter a gradient of zeros, for code that clips."""
        self._zeros = min(self._accumulators, key=Tensor.numel)
        self._zeros.grad = torch.zeros_like(self._zeros)

    def _unmark(self) -> None:
        """Drops the zeros, or a gradient that code between ``backward()`` and ``step()`` has written over them."""
        if self._zeros is not None:
            self._zeros.grad = None
            self._zeros = None

    def _notice_clear(self) -> None:
        if self._zeros is not None and self._zeros.grad is None:
            self._zeros = None
            self.pending.clear()

    @property
    def is_out_of_step(self) -> bool:
        """Whether the window is open, so that its sums differ between workers."""
        return bool(self.steps)

    def held(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the gradients of ``parameters`` that are set aside."""
        for parameter in parameters:
            for kept in (self.sums, self.pending):
                if parameter in kept:
                    yield kept[parameter]

    def has_new_gradients(self) -> bool:
        """Returns whether the present batch has gradients that are set aside."""
        return bool(self.pending)

    def saving_note(self) -> str | None:
        """Returns None: the state holds the window."""
        return None

    def state(self) -> dict[str, Any]:
        """Returns the open window, under the name of its option."""
        places = {p: place for place, p in enumerate(self._parameters())}
        sums = {places[p]: total.clone() for p, total in self.sums.items() if p in places}
        notes = dict(self.notes or {})
        window = {
            "batch": self.steps, "sums": sums, "notes": notes, "k_steps": self.per_update, "rank": self._global_rank,
        }  # fmt: skip
        return {self.option: window}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when ``state`` has an open window of another worker or another number of batches."""
        saved = self._window_in(state)
        mine = {"k_steps": self.per_update, "rank": self._global_rank}
        for name, value in mine.items() if saved["batch"] else ():
            if saved[name] != value:
                raise CheckpointError(
                    f"The optimizer state was saved in the middle of a {self.option} window with {name} "
                    f"{saved[name]}, and this worker has {value}. Save at an update, or one file for each worker."
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Opens the window again that ``state`` was saved in."""
        saved = self._window_in(state)
        parameters = self._parameters()
        self.clear()
        self.steps = saved["batch"]
        self.notes = dict(saved["notes"])
        # end_batch() adds to the sums in place, and the caller may keep the state: so these are copies.
        self.sums = {
            parameters[place]: total.to(parameters[place].device, copy=True) for place, total in saved["sums"].items()
        }

    def _window_in(self, state: Mapping[str, Any]) -> Any:
        return state.get(self.option, {"batch": 0, "sums": {}, "notes": {}})


def _arrive(window: weakref.ref[SetAside], parameter: weakref.ref[Tensor], gradients: tuple[Any, ...]) -> Any:
    """Runs before ``gradients`` are added to ``.grad``, and not for ``torch.autograd.grad``, unlike a tensor's hook."""
    found = window()
    target = parameter()
    return None if found is None or target is None else found.arrived(target, gradients)
