"""estimate_memory: the memory of one worker while it trains, on the user's own module, without allocating it.

The model is copied onto fake tensors, which have shapes and no memory. Some steps of the user's loop then run on
them: forward, loss, backward, ``step()``, ``zero_grad()``. A tracker sees every storage from its making to the moment
when nothing holds it any more, so the peak follows from the real order of events, recomputation and mixed precision
included. It does not see the inside of one operation (a kernel's workspace).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves

from fleet.errors import ConfigError, FleetError
from fleet.estimate.divided_layers import divided_layers
from fleet.estimate.expert_layers import expert_layers, expert_remarks
from fleet.estimate.fake_training import Fakes, StageOnFakes, make_stage, mean_of_outputs, one_argument
from fleet.estimate.modelled_strategies import Application, apply_strategies
from fleet.estimate.storage_tracker import StorageTracker
from fleet.options import DistributedStrategy
from fleet.strategies._declare.strategy_plan import Plan, plan
from fleet.strategies._shared.experts import expert_names
from fleet.strategies._shared.mesh import plan_axes, plan_expert_axes
from fleet.strategies._shared.parameter_layout import layouts_in

DEVICES = ("cpu", "cuda")
_MIB = 1024 * 1024
# torch's CUDA allocator hands out multiples of 512 bytes.
_CUDA_ROUNDING_BYTES = 512
_SEQUENCES = (
    "not modelled: what attention exchanges and keeps of the other workers' tokens is left out. The batch is counted "
    "as it is given, so give the tokens of one worker."
)
_VALUE_IS_MISSING = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_ELSEWHERE = (
    "This machine has no CUDA device: the sizes are those of the CPU's operations, rounded as on a GPU. Dropout and "
    "attention may keep other tensors there; run the estimate on a machine with a GPU for its own operations."
)
_SPARSE = "Sparse tensors, such as the gradients of a sparse embedding."
_OUTSIDE = "What lies outside torch's allocator: the CUDA context, NCCL's buffers, workspaces of cuBLAS and cuDNN."
_Batch = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of one worker while it trains, in bytes.

    Each kind is the most that it takes at any time. The kinds are not largest at the same moment, so ``total_bytes``,
    the peak, is below their sum; ``at_peak`` divides the peak by kind.

    Attributes:
        parameters_bytes: this worker's parameters, and those it gathers from others for a while.
        buffers_bytes: buffers such as the running statistics of batch norm.
        gradients_bytes: gradients; with data parallel the buckets, which are the gradients.
        optimizer_state_bytes: momentum and the like, and tensors that strategies keep from step to step.
        activations_bytes: the batch and the tensors of forward, results and the loss included.
        communication_bytes: buffers of gathering, reducing and converting between workers.
        temporary_bytes: tensors that backward and step() make and free.
        total_bytes: the peak of the sum.
        at_peak: kind (``"parameters"`` and so on) to bytes at the moment of the peak; the values add up to the total.
        peak_phase: ``"setup"``, ``"forward"``, ``"backward"`` or ``"step"``.
        device: ``"cpu"`` or ``"cuda"``.
        world_size: number of workers.
        not_modelled: omissions and possible errors of the numbers, in sentences.
    """

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    communication_bytes: int
    temporary_bytes: int
    total_bytes: int
    at_peak: dict[str, int]
    peak_phase: str
    device: str
    world_size: int
    not_modelled: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """Returns the table, in MiB, with the omissions under it."""
        who = "the only worker" if self.world_size == 1 else f"one of {self.world_size} workers"
        lines = [f"Memory of {who} ({self.device}), in MiB", "", f"{'':<16}{'largest':>12}{'at the peak':>14}"]
        for kind, size in self.at_peak.items():
            largest = getattr(self, f"{kind}_bytes")
            lines.append(f"{kind.replace('_', ' '):<16}{largest / _MIB:>12.1f}{size / _MIB:>14.1f}")
        lines.append(f"{'peak':<16}{'':>12}{self.total_bytes / _MIB:>14.1f}  in {self.peak_phase}")
        if self.not_modelled:
            lines += ["", "Not in these numbers:", *(f"- {sentence}" for sentence in self.not_modelled)]
        return "\n".join(lines)


def estimate_memory(
    model: nn.Module | Callable[[], nn.Module] | Sequence[Any], batch: Any,
    strategy: DistributedStrategy | None = None, *, optimizer: Any = "momentum", world_size: int = 2,
    loss: Callable[[Any], Tensor] | None = None, device: str = "cpu", file: TextIO | None = None,
) -> MemoryEstimate:  # fmt: skip
    """Returns how much memory one worker takes to train ``model``; nothing of that size is allocated.

    Args:
        model: a module (it is not changed, and may lie on the meta device), or a function or class without arguments
            that makes one; it is called with fake tensors, so a model that fits on no machine can be estimated. Give
            a function where layers are divided (mp) or hold experts (ep): they are divided where they are made, and the
            function gives a MoELayer the experts of one worker. With a pipeline: a PipelineLayer, its list, or a
            function that makes one; the result belongs to the largest stage.
        batch: the model's input of one worker per step, with a pipeline the rows of all its micro-batches: a shape
            ``(32, 3, 224, 224)`` (float32), a pair ``(shape, dtype)``, a tensor, a list of these for several arguments,
            or a dict of them for named ones.
        strategy: the options; ``None`` is plain data parallelism.
        optimizer: "sgd", "momentum", "adam", "adamw", a class or function that takes parameters, or an optimizer over
            the parameters of ``model``.
        world_size: number of workers.
        loss: function of the model's output; by default the mean of every floating output.
        device: "cpu" or "cuda".
        file: where to print the table; ``None`` prints nothing.

    Raises:
        ConfigError: an argument is wrong, the strategy cannot run, or the model decides by the values of tensors,
            which fakes do not have.

    Example:
        >>> estimate = fleet.estimate_memory(torch.nn.Linear(1024, 1024), (8, 1024), optimizer="adam", world_size=1)
        >>> estimate.parameters_bytes, estimate.optimizer_state_bytes >= 2 * estimate.parameters_bytes
        (4198400, True)
    """
    options = _checked(device, world_size, strategy)
    chosen = plan(options, world_size)
    degrees = plan_axes(options, world_size)
    asked = _Asked(model, batch, optimizer, loss or mean_of_outputs, device, world_size, options, chosen)
    # Layers are divided where they are made, so a function that makes the model must run inside.
    with divided_layers(degrees), expert_layers(options, degrees, plan_expert_axes(options, world_size)):
        if degrees["pp"] == 1:
            estimate = _estimate(asked, 0, 1)
        else:
            stages = [_estimate(asked, stage, degrees["pp"]) for stage in range(degrees["pp"])]
            estimate = max(stages, key=lambda found: found.total_bytes)
    if file is not None:
        print(estimate, file=file)
    return estimate


@dataclass(frozen=True)
class _Asked:
    """The arguments of an estimate, checked, and the plan of the strategies."""

    model: Any
    batch: Any
    optimizer: Any
    loss: Callable[[Any], Tensor]
    device: str
    world_size: int
    options: DistributedStrategy
    plan: Plan


def _estimate(asked: _Asked, stage: int, stages: int) -> MemoryEstimate:
    """Returns the memory of a worker that holds ``stage`` of ``stages``."""
    device = asked.device
    on_host = device == "cpu"
    # Without a GPU the CPU's operations stand in; _ELSEWHERE tells the user.
    fake_device = torch.device("cuda", 0) if device == "cuda" and torch.cuda.is_available() else torch.device("cpu")
    tracker = StorageTracker(fake_device.type, _CUDA_ROUNDING_BYTES if device == "cuda" else 1)
    with FakeTensorMode(allow_non_fake_inputs=True), _values_are_missing():
        fakes = Fakes(fake_device)
        own = make_stage(asked.model, stages, stage) if stages > 1 else asked.model
        copied = fakes.model(own)
        expert_names(copied)  # copies lack the mark that tells an expert's parameters
        before = [fakes.model(make_stage(asked.model, stages, other)) for other in range(stage)]
        fake_optimizer = fakes.optimizer(asked.optimizer, copied)
        _step_as_on(device, fake_optimizer)
        config = asked.options["pipeline_configs"]
        schedule = (config.accumulate_steps, config.schedule_mode)
        job = StageOnFakes(stages, stage, *schedule, before, asked.loss) if stages > 1 else None
        like = None if job is None else job.received(one_argument(fakes.batch(asked.batch)))
        with tracker:
            tracker.mark(copied.parameters(), "parameters")
            tracker.mark([*fakes.buffers, *copied.buffers()], "buffers")
            applied = apply_strategies(asked.plan, asked.options, copied, fake_optimizer, tracker, fake_device, on_host)
            try:
                with _forward_accepts(asked.batch, tracker):
                    if job is None:
                        _run(applied, copied, lambda: fakes.batch(asked.batch), asked.loss, tracker, on_host)
                    else:
                        _run_stage(applied, copied, job, lambda: fakes.batch(asked.batch), like, tracker, on_host)
            finally:
                applied.close()
    remarks = [*applied.not_modelled, *_remarks(copied, asked, stage, stages), *_limits(device, fake_device, tracker)]
    return _record(tracker, device, asked.world_size, remarks)


def _remarks(model: nn.Module, asked: _Asked, stage: int, stages: int) -> list[str]:
    """Returns the limits of an estimate of a part of a model, in sentences."""
    degrees = plan_axes(asked.options, asked.world_size)
    remarks = []
    if stages > 1:
        remarks.append(
            f"These are the numbers of stage {stage}, which takes the most of {stages}; layers are cut as "
            "PipelineLayer cuts them, in one chunk per stage, and received activations that wait are not counted."
        )
    if degrees["mp"] > 1 and not layouts_in(model):
        remarks.append(
            "mp: no layer of this model is divided, so it is counted whole. Pass a function that makes it; layers of "
            "fleet.meta_parallel are divided where they are made."
        )
    remarks += expert_remarks(model, plan_expert_axes(asked.options, asked.world_size).get("ep", 1))
    divided = [axis for axis in ("sep", "cp") if degrees.get(axis, 1) > 1]
    return remarks + [f"{axis} {degrees[axis]}: {_SEQUENCES}" for axis in divided]


def _run_stage(
    applied: Application, model: nn.Module, job: StageOnFakes, make_batch: _Batch, like: Any, tracker: StorageTracker,
    on_host: bool,
) -> None:  # fmt: skip
    """Runs two steps of one stage of a pipeline."""
    applied.model.train()
    for _ in range(2):
        tracker.phase = "forward"
        # A stage in the middle is given no rows.
        batch = one_argument(make_batch()) if job.is_end else None
        job.run(applied, batch, like, tracker)
        tracker.phase = "step"
        applied.optimizer.step()
        _mark_state(applied.optimizer, tracker, counts_too=on_host)
        applied.optimizer.zero_grad()
        # zero_grad() does not reach parameters that the optimizer does not hold.
        for parameter in model.parameters():
            parameter.grad = None
        del batch
    tracker.phase = "setup"


def _checked(device: str, world_size: int, strategy: DistributedStrategy | None) -> DistributedStrategy:
    """Returns the options; raises ConfigError when an argument is of the wrong kind."""
    if device not in DEVICES:
        raise ConfigError(f"estimate_memory(device={device!r}): it is 'cpu' or 'cuda'.")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"estimate_memory(world_size={world_size!r}): it is the number of workers, at least 1.")
    if strategy is None:
        return DistributedStrategy()
    if not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"estimate_memory(): strategy is {strategy!r}; it is a fleet.DistributedStrategy.")
    return strategy


def _limits(device: str, fake_device: torch.device, tracker: StorageTracker) -> list[str]:
    """Returns the limits of every estimate on this machine, in sentences."""
    sparse = [_SPARSE] if tracker.saw_sparse else []
    if device == "cpu":
        return sparse
    return [*sparse, _OUTSIDE] if fake_device.type == "cuda" else [*sparse, _ELSEWHERE, _OUTSIDE]


def _record(tracker: StorageTracker, device: str, world_size: int, remarks: list[str]) -> MemoryEstimate:
    usage = tracker.usage()
    sizes: dict[str, Any] = {f"{kind}_bytes": size for kind, size in usage.largest.items()}
    return MemoryEstimate(
        **sizes,
        total_bytes=usage.peak_bytes,
        at_peak=usage.at_peak,
        peak_phase=usage.peak_phase,
        device=device,
        world_size=world_size,
        not_modelled=tuple(remarks),
    )


def _run(
    applied: Application, model: nn.Module, make_batch: _Batch, loss: Callable[[Any], Tensor], tracker: StorageTracker,
    on_host: bool,
) -> None:  # fmt: skip
    """Runs two updates: the first makes the optimizer's state, the second finds it there."""
    applied.model.train()
    for batch in range(2 * applied.batches_per_update):
        is_last = (batch + 1) % applied.batches_per_update == 0
        tracker.phase = "forward"
        args, kwargs = make_batch()
        applied.exchange.begin_batch(is_last)
        value = loss(applied.model(*args, **kwargs))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ConfigError(f"estimate_memory(loss=...) returned {value!r}; it returns one number to train on.")
        tracker.phase = "backward"
        value.backward()
        # A name holds its storage: the loss must be gone before the exchange is counted.
        del value
        applied.exchange.end_backward()
        if is_last or applied.steps_every_batch:
            tracker.phase = "step"
            applied.exchange.begin_step()
            applied.optimizer.step()
            _mark_state(applied.optimizer, tracker, counts_too=on_host)
            applied.exchange.end_step()
            applied.optimizer.zero_grad()
        # zero_grad() does not reach parameters that the optimizer does not hold, such as those of other owners.
        if is_last:
            for parameter in model.parameters():
                parameter.grad = None
        del args, kwargs
    tracker.phase = "setup"


def _mark_state(optimizer: torch.optim.Optimizer, tracker: StorageTracker, *, counts_too: bool) -> None:
    """Marks the state of ``optimizer``; in a job on GPUs its counts (tensors of one number) are on the host."""
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    tracker.mark(state, "optimizer_state")
    if not counts_too:
        tracker.leave_out(tensor for tensor in state if tensor.dim() == 0)


def _step_as_on(device: str, optimizer: torch.optim.Optimizer) -> None:
    """Makes ``optimizer`` update many parameters at once on "cuda", as it does by itself on a real GPU only."""
    for group in optimizer.param_groups if device == "cuda" else ():
        # A choice that the script has made stays.
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


@contextmanager
def _values_are_missing() -> Iterator[None]:
    """Raises ConfigError, with a way out, where a model asks a fake tensor for its value."""
    try:
        yield
    except _VALUE_IS_MISSING as error:
        raise ConfigError(
            f"estimate_memory() runs the model on tensors that have shapes and no values, and it asks for a value "
            f"({error}): .item(), a tensor in an 'if', or indexing by a mask. Estimate a model without it."
        ) from error


@contextmanager
def _forward_accepts(batch: Any, tracker: StorageTracker) -> Iterator[None]:
    """Raises ConfigError that shows the batch where a forward fails on its shapes, types or number."""
    # torch would print the traceback before this error.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    # These name their cause themselves; missing values are explained further out.
    except (FleetError, *_VALUE_IS_MISSING):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        # An error in backward or step() is not about the batch.
        if tracker.phase != "forward":
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"estimate_memory(): the forward of the model, or the loss, failed on the batch {batch!r} with "
            f"{type(error).__name__}: {reason}. Give the shape and type of each input as the model takes them."
        ) from error
    finally:
        log.disabled = before
