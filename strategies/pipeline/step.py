"""PipelineStep: one batch through the stages, from their agreement on it to the losses and gradients they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fleet.errors import ConfigError
from fleet.strategies._shared.parts import local
from fleet.strategies.pipeline.counted_loss import CountedLoss
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.hooks import StepHooks
from fleet.strategies.pipeline.micro_batches import cut_data, described_shapes, different_numbers, plan_weights
from fleet.strategies.pipeline.order import MicroStep
from fleet.strategies.pipeline.stage import PipelineStage
from fleet.strategies.pipeline.stage_run import StagePlace, StageRun, Work
from fleet.strategies.pipeline.wire import dtype_code, dtype_of, number_of

_TRAIN, _EVAL, _OUTPUTS = range(3)
_MODES = ("train_batch(...)", "eval_batch(compute_loss=True)", "eval_batch(compute_loss=False)")


@dataclass
class PipelineStep(Work):
    """One step of a pipeline of one stage or more, on this worker.

    Args:
        layers: the layers of this stage.
        run: ``run(chunk, value, is_last)`` runs a chunk as the strategies wrap it.
        stage: links and exchanges, ``None`` where one worker has all layers.
        num_micro: accumulate_steps, ``size`` micro_batch_size.
        scale: multiplies the loss before backward; a GradScaler's ``scale``.
        hooks: the user's.
        delays: divide gradients after the step, not losses before backward.
        counted: the sums of a loss function that returns (sum, count).
    """

    layers: StagedLayers
    run_chunk: Callable[[int, Any, bool], Any]
    stage: PipelineStage | None
    num_micro: int
    size: int
    mode: int = _TRAIN
    loss_index: int = 0
    scale: Callable[[Tensor], Tensor] | None = None
    hooks: StepHooks = field(default_factory=StepHooks)
    delays: bool = False
    counted: CountedLoss = field(default_factory=CountedLoss)

    def __post_init__(self) -> None:
        self._inputs: list[Any] | None = None
        self._labels: list[Any] | None = None
        self._weights: list[float] = []
        self._losses: list[list[Tensor]] = []
        self.outputs: list[Any] = []
        self._counts = False  # the loss function returns (sum, count)
        self._divisor = torch.ones(())  # of the gradients, after the step
        self.counted.begin()

    @property
    def _is_first(self) -> bool:
        return self.layers.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.layers.stage == self.layers.num_stages - 1

    @property
    def trains(self) -> bool:
        """Whether backward runs too."""
        return self.mode == _TRAIN

    def compute(self, data: Any) -> None:
        """Runs forward, and backward where it trains, of all micro-batches; every stage calls it."""
        signature = self._agree(data)
        place = StagePlace(1, 0) if self.stage is None else self.stage.place
        dynamic = self.stage is not None and self.stage.sends_headers
        run = StageRun(
            place, self, self.num_micro,
            signature=None if dynamic else signature, trains=self.trains, keeps_values=bool(self.hooks.of_location),
        )  # fmt: skip
        run.run()

    # ---- before the step ------------------------------------------------------------------------------------------

    def _agree(self, data: Any) -> int:
        """Cuts the data and returns the signature of the step; raises ConfigError on all stages where one cannot."""
        problem: ConfigError | None = None
        try:
            if self.mode != _OUTPUTS and not self.layers.loss_functions:
                raise ConfigError("PipelineLayer was created without loss_fn, which train_batch and losses need.")
            if not 0 <= self.loss_index < max(1, len(self.layers.loss_functions)):
                raise ConfigError(f"loss_fn_idx is {self.loss_index}; there are {len(self.layers.loss_functions)}.")
            needs_labels = self._is_last and self.mode != _OUTPUTS
            self._inputs, self._labels = cut_data(
                data, self.num_micro, self.size, inputs=self._is_first, labels=needs_labels
            )
        except ConfigError as error:
            problem = error
        # One row for each stage, also from a stage that refuses its data: the others would wait for its activations.
        own = [
            self.mode if problem is None else -1,
            -1 if self._inputs is None else len(self._inputs),
            -1 if self._labels is None else len(self._labels),
            number_of(self._state()),
        ]
        said = [own] if self.stage is None else gathered(own, self.stage)
        if problem is not None:
            raise problem
        failed = [stage for stage, row in enumerate(said) if row[0] == -1]
        if failed:
            raise ConfigError(f"Stage {failed[0]} of the pipeline refused its data; its own message says why.")
        if len({row[0] for row in said}) > 1:
            calls = "; ".join(f"stage {stage}: {_MODES[row[0]]}" for stage, row in enumerate(said))
            raise ConfigError(
                f"The stages of the pipeline run different calls: {calls}. Call the same on every worker."
            )
        # The first stage has counted its inputs; the others hold none to count.
        self.num_micro = said[0][1]
        if self.mode != _OUTPUTS:
            if said[-1][2] != self.num_micro:
                raise ConfigError(different_numbers(self.num_micro, said[-1][2]))
            if self._labels is not None:
                self._weights = plan_weights(self._labels)
                self.layers.mean_loss.begin(self.layers.loss_functions, self._labels, self._weights)
        return number_of(repr([row[1:] for row in said]))

    def _state(self) -> str:
        """Returns a text that differs where this stage may send other shapes or flags than before."""
        trained = "".join("01"[p.requires_grad] for p in self.layers.parameters())
        kind = self.stage.device.type if self.stage is not None else "cpu"
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return f"{trained} {self.layers.training} {narrow} {described_shapes(self._inputs)}"

    # ---- callbacks of StageRun ------------------------------------------------------------------------------------

    def input(self, micro: int) -> Any:
        """Returns the data of a micro-batch."""
        assert self._inputs is not None
        value = self._inputs[micro]
        self._inputs[micro] = None  # or the data of all micro-batches would live through the step
        return value

    def run(self, chunk: int, micro: int, value: Any) -> Any:
        """Returns the output of ``chunk`` for ``value``."""
        return self.run_chunk(chunk, value, micro == self.num_micro - 1)

    def loss(self, micro: int, output: Any) -> Tensor | None:
        """Receives an output of the model; returns where backward begins."""
        if self.mode == _OUTPUTS:
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, output))
            return None
        assert self._labels is not None
        losses: list[Any] = [loss(output, self._labels[micro]) for loss in self.layers.loss_functions]
        started = None
        for at, value in enumerate(losses):
            if isinstance(value, tuple | list) and len(value) == 2:
                self._check_counts()
                started, losses[at] = self.counted.take(*value)
            elif not isinstance(value, Tensor) or value.numel() != 1:
                raise ConfigError(
                    "loss_fn(output, label) of the PipelineLayer must return a tensor of one element, or the sum of "
                    "the loss and its count, got "
                    f"{list(value.shape) if isinstance(value, Tensor) else type(value).__name__}."
                )
        values = [value.detach().reshape(()) for value in losses]
        self._losses.append(values)
        if started is not None:
            self._counts = True
            if not self.trains:
                return None
            return started if self.scale is None else self.scale(started)
        self.layers.mean_loss.look_at(self.layers.loss_functions, micro, output, self._labels[micro], values)
        if not self.trains:
            return None
        chosen = losses[self.loss_index].reshape(())
        weight = self._weights[micro] * (self.num_micro if self.delays else 1)
        scaled = chosen if weight == 1 else chosen * weight
        return scaled if self.scale is None else self.scale(scaled)

    def _check_counts(self) -> None:
        if len(self.layers.loss_functions) > 1:
            raise ConfigError(
                "PipelineLayer(loss_fn=[...]): one of several loss functions returned (sum, count). The mean over what "
                "counts is for one function: give it alone, or let each return its own mean."
            )

    def hook(self, location: str, action: MicroStep, **tensors: Any) -> None:
        """Runs the user's hooks."""
        self.hooks.run(location, action, tensors)

    def last_backward(self, chunk: int) -> AbstractContextManager[Any]:
        """Returns the context of the last backward of ``chunk``."""
        return nullcontext() if self.stage is None else self.stage.reducer.last_backward(chunk)

    # ---- after the step -------------------------------------------------------------------------------------------

    def losses(self) -> list[tuple[Tensor, Tensor]]:
        """Returns for each loss function the mean of the batch and the values of the micro-batches, on every stage."""
        # One broadcast for everything: the type of the loss, its mean, the divisor of the gradients, and the values.
        rows = torch.zeros(len(self.layers.loss_functions), self.num_micro + 3, dtype=torch.float64, device=self._where)
        if self._is_last:
            weights = torch.tensor(self._weights, dtype=torch.float64, device=self._where)
            for at, row in enumerate(rows):
                values = torch.stack([losses[at] for losses in self._losses])
                row[0] = dtype_code(values.dtype)
                row[3:] = values.double()
                row[1] = row[3:] @ weights
                row[2] = self.num_micro if self.delays else 1
            if self._counts:
                rows[0, 1], factor = self.counted.finish()
                rows[0, 2] = 1 / factor
        if self.stage is not None:
            dist.broadcast(rows, self.stage.axes.ranks("pp")[-1], group=self.stage.group)
        self._divisor = rows[self.loss_index, 2]
        return [(row[1].to(dtype), row[3:].to(dtype)) for row in rows for dtype in [dtype_of(int(row[0]))]]

    @property
    def _where(self) -> torch.device:
        if self.stage is not None:
            return self.stage.device
        return self._losses[0][0].device if self._losses else torch.device("cpu")

    def divide_gradients(self) -> None:
        """Divides the gradients by the divisor that :meth:`losses` broadcast, where the losses were not divided."""
        for parameter in self.layers.parameters() if float(self._divisor) != 1 else ():
            if parameter.grad is not None:
                local(parameter.grad).div_(self._divisor.to(parameter.grad.device))


def gathered(row: Sequence[int], stage: PipelineStage) -> list[list[int]]:
    """Returns the ``row`` of every stage."""
    mine = torch.tensor(row, dtype=torch.int64, device=stage.device)
    rows = [torch.empty_like(mine) for _ in range(stage.place.num_stages)]
    dist.all_gather(rows, mine, group=stage.group)
    return [found.tolist() for found in rows]
