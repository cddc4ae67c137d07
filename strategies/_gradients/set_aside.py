"""Several batches, one update: gradients are summed outside ``.grad`` until the batch that completes the window.

[Note: Where the sum is kept]
A batch adds to the sum what ``.grad`` would hold at ``step()`` in a loop that updates each time. It is set aside at the
end of its backward pass, because code between ``backward()`` and ``step()`` (clipping, above all) would change an
incomplete sum. ``zero_grad()`` before ``step()`` drops it, as it would drop ``.grad``, and never drops what earlier
batches have added. When the backward pass that completes the window begins, the sums are put into ``.grad``: that pass
exchanges the whole merged gradient, and clipping then sees it. The sums are kept until the update, in case gradients
are cleared and another pass follows.

Meanwhile the smallest parameter has a gradient of zeros: code that clips finds something to clip, and a script that
clears ``.grad`` by hand is noticed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from fleet.errors import CheckpointError, ConfigError
from fleet.strategies._gradients.passes import Passes, accumulator_of
from fleet.strategies._shared.optimizer_wrapper import (
    OptimizerWrapper,
    came_since,
    gradients_left,
    shared_by_two,
    written_too_early,
)


class Window:
    """The gradients of the batches since the last update of one optimizer; see [Note: Where the sum is kept].

    Args:
        k_steps: batches per update.
        average: divide gradients by ``k_steps``.
        models: the passes of the models that exchange gradients, also of those that come later.
        windows: all windows; a parameter is in one of them, and a later optimizer takes it from an earlier one's.

    Attributes:
        batch: the batches of this window that are done, 0 to ``k_steps`` - 1.
        lost: whether parameters of this window are in another optimizer's now.
        sums: what these have added up.
        pending: what the present batch will add.
    """

    def __init__(
        self, k_steps: int, average: bool, models: Sequence[Passes] = (), windows: Sequence[Window] = ()
    ) -> None:
        self.k_steps, self.average = k_steps, average
        self.batch, self.lost = 0, False
        self.sums: dict[Tensor, Tensor] = {}
        self.pending: dict[Tensor, Tensor] = {}
        self._models, self._windows = models, windows
        self._accumulators: dict[Tensor, tuple[Any, Any]] = {}  # the nodes, kept alive, and the handles of their hooks
        self._frozen: list[Tensor] = []
        self._restored = False
        self._running = False
        self._zeros: Tensor | None = None  # the parameter with a gradient of zeros
        self._leftover: set[Tensor] = set()
        self._left: dict[Tensor, TensorWeakRef] = {}  # the gradients of the last update, if nobody clears them

    @property
    def is_last(self) -> bool:
        """Whether the next backward pass completes the window."""
        return self.batch == self.k_steps - 1

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Merges the gradients of ``parameters``; no other window does so any longer."""
        for window in self._windows:
            if window is not self:
                window._give(set(parameters))
        self.watch(parameters)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Merges the gradients of ``parameters`` from now on, of frozen ones once they are unfrozen."""
        self._frozen = [p for p in parameters if not p.requires_grad]
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._accumulators:
                node = accumulator_of(parameter)
                hook = node.register_prehook(partial(_arrive, weakref.ref(self), weakref.ref(parameter)))
                self._accumulators[parameter] = node, hook

    def _give(self, parameters: set[Tensor]) -> None:
        """Releases ``parameters``, which another optimizer has now."""
        given = parameters.intersection([*self._accumulators, *self._frozen])
        if not given:
            return
        if self.sums:
            warnings.warn(
                f"The previous optimizer had merged {self.batch} of {self.k_steps} batches when another one was made "
                "for the same parameters; they are dropped. Make the new one right after an update.",
                stacklevel=2,
            )
        self.lost = True
        if self._zeros is not None and self._zeros in given:
            self._zeros.grad = None
            self._zeros = None
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
        self.watch([*moved, *self._frozen])

    def note_parameters(self) -> None:
        """Merges the gradients of parameters that were unfrozen, too."""
        self.watch(self._frozen)

    def in_model(self, model: Passes) -> bool:
        """Returns whether parameters of ``model`` are in this window."""
        return any(parameter in model.parameters for parameter in self._accumulators)

    def begin(self) -> None:
        """Begins a backward pass: with the sums in ``.grad`` when it completes the window."""
        if self._running:
            return
        self._running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._notice_clear()
        if self._zeros is not None:  # or what code between backward() and step() has made of it
            self._zeros.grad = None
            self._zeros = None
        if self.is_last:
            self._check_frozen()
            self._restore()
        else:
            self._leftover = {p for p in self._accumulators if p.grad is not None}

    def arrived(self, parameter: Tensor, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns what is to be added to the gradient of ``parameter``."""
        self.begin()
        models = [model for model in self._models if parameter in model.parameters]
        if not any(model.running for model in models):  # one that runs exchanges what it shares with others
            for model in models:
                model.begin()  # the graph bypasses the output
        return tuple(g if g is None or not self.average else g / self.k_steps for g in gradients)

    def clear(self) -> None:
        """Drops what the present batch has added so far; called when ``.grad`` was cleared."""
        self.pending.clear()
        self._restored = self._running = False
        self.watch(self._frozen)

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Calls :meth:`clear` when gradients of this window were cleared by other means."""
        if any(parameter in self._accumulators for parameter in parameters):
            self.clear()

    def end_batch(self) -> bool:
        """Ends a batch; returns whether it was the last, and the merged gradients are in ``.grad``.

        Raises ConfigError when the window ends without a backward pass that exchanges gradients.
        """
        self._running = False
        self.watch(self._frozen)
        self._notice_clear()
        if not self.is_last:
            for parameter, gradient in self.pending.items():
                kept = self.sums.get(parameter)
                self.sums[parameter] = gradient if kept is None else kept.add_(gradient)
            self.pending = {}
            self.batch += 1
            return False
        if not self._restored or any(p.grad is None for p in self.sums):
            if self.sums and any(self.in_model(model) for model in self._models):
                raise ConfigError(
                    f"step() ends a window of {self.k_steps} batches, and its last batch has no gradients: there was "
                    "no backward pass that could exchange the merged ones, or they were cleared. Call backward() "
                    "before step(), or leave out both for a batch that is skipped."
                )
            self._restore()
        return True

    def end(self) -> None:
        """Starts a new window, after the update."""
        self.batch, self.sums, self._restored = 0, {}, False
        self._left = gradients_left(self._accumulators)

    def _check_frozen(self) -> None:
        """Raises ConfigError when the exchange omits a parameter for which earlier batches have gradients."""
        if any(not parameter.requires_grad for parameter in self.sums):
            raise ConfigError(
                f"A parameter was frozen after {self.batch} of {self.k_steps} batches of an update, with gradients of "
                "these that are not exchanged yet. Freeze parameters right after an update."
            )

    def was_written(self) -> bool:
        """Returns whether gradients came after the backward passes of a batch before the last.

        What code makes of the zeros it finds is no gradient of its own: a penalty is added to the merged ones later.
        """
        return not self.is_last and any(p is not self._zeros for p in came_since(self._accumulators, self._left))

    def _restore(self) -> None:
        for parameter, total in self.sums.items():
            if parameter.grad is None:
                parameter.grad = total.clone()
            elif not self._restored:
                parameter.grad = parameter.grad + total
        self._restored = True

    @torch.no_grad()
    def _end(self, exchanged: bool = False) -> None:
        """Ends a backward pass: what it added is set aside, unless it completes the window."""
        if not exchanged:  # another window may be completed, and the exchange ends in a callback that was queued later
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, exchanged=True))
            return
        self._running = False
        if self.is_last:
            return
        for parameter in self._accumulators:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                kept = self.pending.get(parameter)
                # A gradient that was there before may share memory with a buffer of the exchange.
                shared = parameter in self._leftover or gradient._is_view()
                own = gradient.clone() if shared else gradient
                self.pending[parameter] = own if kept is None else kept.add_(own)
        self._leftover = set()
        self._zeros = min(self._accumulators, key=Tensor.numel)
        self._zeros.grad = torch.zeros_like(self._zeros)

    def _notice_clear(self) -> None:
        if self._zeros is not None and self._zeros.grad is None:
            self._zeros = None
            self.pending.clear()


def _arrive(window: weakref.ref[Window], parameter: weakref.ref[Tensor], gradients: tuple[Any, ...]) -> Any:
    """Runs before ``gradients`` are added to ``.grad``, and not for ``torch.autograd.grad``, unlike a tensor's hook."""
    found, target = window(), parameter()
    return None if found is None or target is None else found.arrived(target, gradients)


def merge_passes(model: Passes, windows: Sequence[Window]) -> None:
    """Makes ``model`` exchange gradients only when one of its ``windows``, also of later ones, is completed."""

    def begin() -> None:
        for window in windows:
            if window.in_model(model):
                window.begin()

    def any_last() -> bool:
        found = [window for window in windows if window.in_model(model)]
        return not found or any(window.is_last for window in found)

    model.starts.append(begin)
    model.gates.append(any_last)


class MergingOptimizer(OptimizerWrapper):
    """Counts the calls of ``step()`` and updates at every k-th with the merged gradients.

    An incomplete window stays open across epochs, and is part of ``state_dict()``: each worker's sums are its own, so
    each worker saves its own optimizer state to resume inside a window. A state that was saved between windows fits
    every worker.

    Args:
        optimizer: the optimizer inside.
        window: the window of this optimizer.
        global_rank: rank of this worker.
        option: the option, which names the entry in ``state_dict``.
    """

    def __init__(self, optimizer: Optimizer, window: Window, global_rank: int, option: str) -> None:
        super().__init__(optimizer)
        self._window, self._global_rank, self._option = window, global_rank, option
        window.take(self.parameters())

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a batch; updates when it is the last one of the window. Returns the closure's loss.

        Raises ConfigError when a later optimizer has parameters of this one.
        """
        if self._window.lost:
            raise ConfigError(shared_by_two(self._option))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._window.was_written():
            raise ConfigError(written_too_early(self._option))
        if self._window.end_batch():
            super().step()
            self._window.end()
        else:
            self.note_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the present batch; those of earlier batches stay in the window."""
        super().zero_grad(set_to_none=set_to_none)
        self._window.clear()

    def has_new_gradients(self) -> bool:
        """Returns whether the present batch has gradients that are set aside."""
        return bool(self._window.pending) or super().has_new_gradients()

    def merges(self) -> bool:
        """Returns True."""
        return True

    def only_counts(self) -> bool:
        """Returns whether the next ``step()`` ends a batch and updates nothing."""
        return not self._window.is_last

    @property
    def is_out_of_step(self) -> bool:
        """Whether the window is open: its sums are this worker's own."""
        return bool(self._window.batch) or super().is_out_of_step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, whose gradients are merged too."""
        super().add_param_group(param_group)
        self._window.take(self.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside and of the open window."""
        window = self._window
        places: dict[Tensor, int] = {p: place for place, p in enumerate(self.parameters())}
        sums = {places[p]: total.clone() for p, total in window.sums.items() if p in places}
        merged = {"batch": window.batch, "sums": sums, "k_steps": window.k_steps, "rank": self._global_rank}
        return {**super().state_dict(), self._option: merged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; a window that was open is open again.

        Raises CheckpointError when the state holds an open window of another worker or another ``k_steps``.
        """
        saved = state_dict.get(self._option, {"batch": 0, "sums": {}})
        if saved["batch"]:
            mine = {"k_steps": self._window.k_steps, "rank": self._global_rank}
            for name, value in mine.items():
                if saved[name] != value:
                    raise CheckpointError(
                        f"The optimizer state was saved in the middle of a {self._option} window with {name} "
                        f"{saved[name]}, and this worker has {value}. Save at an update, or one file for each worker."
                    )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != self._option})
        parameters = self.parameters()
        self._window.clear()
        self._window.batch = saved["batch"]
        self._window.sums = {
            parameters[place]: total.to(parameters[place].device, copy=True) for place, total in saved["sums"].items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_window": None}
