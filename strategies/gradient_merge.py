"""gradient_merge: gradients of several batches are added up, exchanged once and applied once.

[Note: Where the sum is kept]
Between two updates the sum is not in ``.grad`` but aside: code that stands between ``backward()`` and ``step()`` in the
user's loop (clipping, above all) would change a sum that is not complete, and ``zero_grad()`` would lose it. Each
gradient is set aside the moment it has been accumulated; before the backward pass that completes the window it is put
back, so that pass exchanges, and clipping then sees, the whole merged gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import CheckpointError
from fleet.strategies._base import Guide, Stage, Strategy, Values
from fleet.strategies._config import Config, setting
from fleet.strategies._exchange import data_parallel_in
from fleet.strategies._optimizer import OptimizerWrapper


@dataclass(frozen=True, kw_only=True)
class GradientMergeConfig(Config, option="gradient_merge_configs"):
    """How many batches make an update."""

    k_steps: int = setting(1, "batches per update; 1 changes nothing", at_least=1)
    avg: bool = setting(True, "divide the sum of the gradients by k_steps")


class GradientMerge(Strategy):
    """Updates at every k-th step with the gradients of k batches."""

    name = "gradient_merge"
    meaning = "Add up the gradients of k batches, then exchange and update once: a larger batch in the same memory."
    stage = Stage.STEP
    Config = GradientMergeConfig
    after = ("amp",)
    model_effect = "exchanges gradients only in the backward pass of every k-th batch"
    optimizer_effect = "adds up gradients; every k-th step() updates and the next zero_grad() clears"
    guide = Guide(
        when="The batch you want does not fit into memory, or the network is slow.",
        cost="One copy of the gradients between updates; one exchange per k batches.",
        formula="g = (g_1 + ... + g_k) / k, or the sum when avg is False; update at every k-th step()",
        example={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one batch per update is what happens anyway."""
        if options["gradient_merge_configs"].k_steps > 1:
            return ()
        return ("gradient_merge changes nothing: gradient_merge_configs['k_steps'] is 1, one batch per update.",)

    def __init__(self, config: Any, session: Any) -> None:
        """Starts a window of ``k_steps`` batches."""
        super().__init__(config, session)
        self.window = Window(config.k_steps, config.avg)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; its backward passes exchange gradients in the last batch of a window only."""
        reducer = data_parallel_in(model)

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                if reducer is not None:
                    reducer.require_backward_grad_sync = self.window.is_last
                self.window.restore()

        if self.config.k_steps > 1:
            model.register_forward_pre_hook(before_forward)
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates at every ``k_steps``-th call."""
        if self.config.k_steps == 1:
            return optimizer
        return MergingOptimizer(optimizer, self.window, self.session)


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
    """

    def __init__(self, optimizer: Optimizer, window: Window, session: Any) -> None:
        super().__init__(optimizer)
        self._window, self._session = window, session
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
        merged = {"batch": window.batch, "sums": sums, "k_steps": window.k_steps, "rank": self._session.global_rank}
        return {**super().state_dict(), "gradient_merge": merged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; a window that was open is open again.

        Raises CheckpointError when the state holds an open window of another worker or another ``k_steps``.
        """
        saved = state_dict.get("gradient_merge", {"batch": 0, "sums": {}})
        if saved["batch"]:
            mine = {"k_steps": self._window.k_steps, "rank": self._session.global_rank}
            for name, value in mine.items():
                if saved[name] != value:
                    raise CheckpointError(
                        f"The optimizer state was saved in the middle of a gradient_merge window with {name} "
                        f"{saved[name]}, and this worker has {value}. Save at an update, or one file for each worker."
                    )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "gradient_merge"})
        parameters = self.parameters()
        self._window.batch = saved["batch"]
        self._window.sums = {
            parameters[place]: total.to(parameters[place].device, copy=True) for place, total in saved["sums"].items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_session": None, "_window": None}
