"""Several batches, one update: gradients are added up aside until the batch that completes the window.

[Note: Where the sum is kept]
Between two updates the sum is not in ``.grad`` but aside: code that stands between ``backward()`` and ``step()`` in the
user's loop (clipping, above all) would change a sum that is not complete, and ``zero_grad()`` would lose it. Each
gradient is set aside the moment it has been accumulated; before the backward pass that completes the window it is put
back, so that pass exchanges, and clipping then sees, the whole merged gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import CheckpointError
from fleet.strategies._optimizer import OptimizerWrapper


class Window:
    """The gradients of the batches since the last update; see [Note: Where the sum is kept].

    ``batch`` counts the batches of this window that are done, 0 to ``k_steps`` - 1.
    """

    def __init__(self, k_steps: int, average: bool) -> None:
        self.k_steps, self.average = k_steps, average
        self.batch = 0
        self.sums: dict[Tensor, Tensor] = {}
        self.has_new_gradients = False
        self._watched: dict[Tensor, None] = {}

    @property
    def is_last(self) -> bool:
        """Whether the next backward pass completes the window."""
        return self.batch == self.k_steps - 1

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Sets the gradients of ``parameters`` aside from now on."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = None
                parameter.register_hook(self._scale)
                parameter.register_post_accumulate_grad_hook(self._set_aside)

    def restore(self) -> None:
        """Puts the sums back into ``.grad`` when the next backward pass completes the window."""
        if self.is_last:
            for parameter, total in self.sums.items():
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
            self.sums.clear()

    def _scale(self, gradient: Tensor) -> Tensor:
        return gradient / self.k_steps if self.average else gradient

    def _set_aside(self, parameter: Tensor) -> None:
        self.has_new_gradients = True
        if self.is_last or parameter.grad is None:
            return
        # Without a wrapped model nothing restores before backward; step() does then.
        kept = self.sums.get(parameter)
        self.sums[parameter] = parameter.grad if kept is None else kept.add_(parameter.grad)
        parameter.grad = None


class MergingOptimizer(OptimizerWrapper):
    """Counts the calls of ``step()`` and updates at every k-th with the merged gradients.

    Between updates ``zero_grad()`` has nothing to clear. An incomplete window stays open across epochs, and is part of
    ``state_dict()``: each worker's sums are its own, so each worker saves its own optimizer state to resume inside a
    window. A state that was saved between windows fits every worker.

    Args:
        optimizer: the optimizer inside.
        window: what the model and the optimizer share.
        global_rank: rank of this worker.
        option: the option, which names the entry in ``state_dict``.
    """

    def __init__(self, optimizer: Optimizer, window: Window, global_rank: int, option: str) -> None:
        super().__init__(optimizer)
        self._window, self._global_rank, self._option = window, global_rank, option
        window.watch(self.parameters())

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a batch; updates when it is the last one of the window. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        window = self._window
        window.has_new_gradients = False
        if not window.is_last:
            window.batch += 1
            self.note_step()
            return loss
        window.restore()
        super().step()
        window.batch = 0
        return loss

    def has_new_gradients(self) -> bool:
        """Returns whether a backward pass ran since the last step; its gradients may be set aside."""
        return self._window.has_new_gradients

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, whose gradients are merged too."""
        super().add_param_group(param_group)
        self._window.watch(self.parameters())

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
        self._window.batch = saved["batch"]
        self._window.sums = {
            parameters[place]: total.to(parameters[place].device, copy=True) for place, total in saved["sums"].items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_window": None}
