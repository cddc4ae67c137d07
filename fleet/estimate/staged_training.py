"""One stage of a pipeline on fake tensors: the order of its forwards and backwards, and the state between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fleet.errors import ConfigError
from fleet.estimate.modelled_strategies import Application
from fleet.estimate.storage_tracker import StorageTracker
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.order import plan_order


class _RealSeeds(TorchFunctionMode):
    """Lets layers draw the numbers of their seeds, for which fakes have no value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.randint:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return int(func(*args, **(kwargs or {})))  # layers make a number of it in any case


def layers_of(model: Any) -> list[Any] | None:
    """Returns the layers of a PipelineLayer, a list or an nn.Sequential; ``None`` for other models."""
    if isinstance(model, StagedLayers):
        return list(model._layers_desc)
    if isinstance(model, nn.Sequential):
        return list(model.children())
    return list(model) if isinstance(model, list | tuple) else None


def make_stage(model: Any, stages: int, stage: int) -> StagedLayers:
    """Returns the layers of ``stage``; to be called where tensors are fakes."""
    if not isinstance(model, nn.Module | list | tuple) and callable(model):
        with _RealSeeds():
            model = model()
    layers = layers_of(model)
    if layers is None:
        raise ConfigError(
            f"estimate_memory() with {stages} stages takes a PipelineLayer, the list that it is made of, or a function "
            f"that makes one; got {type(model).__name__}."
        )
    losses = model.loss_functions if isinstance(model, StagedLayers) else []
    with _RealSeeds():
        return StagedLayers(
            layers, stages, stage, loss_fn=losses or None, seg_method=getattr(model, "seg_method", "uniform")
        )


class StageOnFakes:
    """Trains one stage as the engine of pipelines does.

    Args:
        stages: number of stages.
        stage: index of this stage.
        num_micro: micro-batches of a step.
        mode: the schedule.
        before: the stages before this one, which give the shape of its input.
        loss: the loss of the last stage's output.
    """

    def __init__(
        self, stages: int, stage: int, num_micro: int, mode: str, before: Sequence[nn.Module],
        loss: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        self._order = plan_order(stages, stage, num_micro, mode=mode)
        self._is_first = stage == 0
        self._is_last = stage == stages - 1
        self.is_end = self._is_first or self._is_last  # they are given the batch
        self._num_micro = num_micro
        self._before = before
        self._loss = loss

    def received(self, batch: Any) -> Any:
        """Returns this stage's input for one micro-batch of ``batch``, the argument of the first stage."""
        value = tree_map_only(Tensor, self._cut, batch)
        with torch.no_grad():
            for stage in self._before:
                value = stage(value)
        return value

    def _cut(self, rows: Tensor) -> Tensor:
        if rows.shape[0] % self._num_micro:
            raise ConfigError(
                f"estimate_memory(): the batch has {rows.shape[0]} rows, and pipeline_configs['accumulate_steps'] "
                f"cuts it into {self._num_micro} micro-batches. Choose a multiple."
            )
        return rows[: rows.shape[0] // self._num_micro]

    def run(self, applied: Application, batch: Any, like: Any, tracker: StorageTracker) -> None:
        """Runs the micro-batches of one step; ``like`` is the result of :meth:`received`."""
        kept: dict[int, tuple[list[Any], list[Any]]] = {}
        applied.exchange.begin_batch(True)
        for action in self._order:
            if action.what == "f":
                tracker.phase = "forward"
                value = tree_map_only(Tensor, self._cut, batch) if self._is_first else _arrived(like)
                output = applied.model(value)
                if self._is_last:
                    output = self._loss(output) / self._num_micro
                leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
                # The engine sends the output away: only its place in autograd's graph stays until backward.
                kept[action.micro] = (
                    [get_gradient_edge(t) for t in leaves],
                    [(t.shape, t.dtype, t.device) for t in leaves],
                )
                del value, output, leaves
                continue
            tracker.phase = "backward"
            edges, shapes = kept.pop(action.micro)
            gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
            torch.autograd.backward(edges, gradients)
            del edges, gradients
        applied.exchange.end_backward()


def _arrived(like: Any) -> Any:
    def arrive(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, requires_grad=tensor.is_floating_point())

    return tree_map_only(Tensor, arrive, like)


def one_argument(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Returns the first layer's argument: the only one, or all in a tuple; raises ConfigError for named ones."""
    args, named = arguments
    if named:
        raise ConfigError("estimate_memory(): the first layer of a pipeline takes one argument; give no named ones.")
    return args[0] if len(args) == 1 else args
