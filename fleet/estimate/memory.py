"""estimate_memory: the memory of one worker while it trains, on the user's own module, without allocating it.

The model is copied onto fake tensors, which have shapes and no memory. Some steps of the user's loop then run on
them: forward, loss, backward, ``step()``, ``zero_grad()``. A tracker sees every storage from its making to the moment
when nothing holds it any more, so the peak is that of the real order of events, recomputation and mixed precision
included. What goes on inside one operation (a kernel's workspace) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from fleet.errors import ConfigError
from fleet.estimate.fake_training import Fakes, mean_of_outputs
from fleet.estimate.memory_estimate import MemoryEstimate
from fleet.estimate.modelled_strategies import Application, apply_strategies
from fleet.estimate.storage_tracker import StorageTracker
from fleet.options import DistributedStrategy
from fleet.strategies._declare.strategy_plan import plan

DEVICES = ("cpu", "cuda")
# torch's CUDA allocator hands out multiples of 512 bytes.
_CUDA_ROUNDING_BYTES = 512
_ELSEWHERE = (
    "This machine has no CUDA device: the sizes are those of the CPU's operations, rounded as on a GPU. Dropout and "
    "attention may keep other tensors there; run the estimate on a machine with a GPU for its own operations."
)
_SPARSE = "Sparse tensors, such as the gradients of a sparse embedding."
_OUTSIDE = "What lies outside torch's allocator: the CUDA context, NCCL's buffers, workspaces of cuBLAS and cuDNN."


def estimate_memory(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    strategy: DistributedStrategy | None = None,
    *,
    optimizer: Any = "momentum",
    world_size: int = 2,
    loss: Callable[[Any], Tensor] | None = None,
    device: str = "cpu",
    file: TextIO | None = None,
) -> MemoryEstimate:
    """Returns how much memory one worker takes to train ``model``; nothing of that size is allocated.

    Args:
        model: a module (it is not changed, and may lie on the meta device), or a function or class without arguments
            that makes one; that is called with fake tensors, so a model that fits on no machine can be estimated.
        batch: what one worker gives the model per step: a shape ``(32, 3, 224, 224)`` (float32), a pair ``(shape,
            dtype)``, a tensor, a list of these for several arguments, or a dict of them for named ones.
        strategy: the options; ``None`` is plain data parallelism.
        optimizer: "sgd", "momentum", "adam", "adamw", a class or function that takes parameters, or an optimizer over
            the parameters of ``model``.
        world_size: number of workers.
        loss: function of what the model returns; by default the mean of every floating output.
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
    fake_device = torch.device("cuda", 0) if device == "cuda" and torch.cuda.is_available() else torch.device("cpu")
    tracker = StorageTracker(fake_device.type, _CUDA_ROUNDING_BYTES if device == "cuda" else 1)
    with FakeTensorMode(allow_non_fake_inputs=True), _values_are_missing():
        fakes = Fakes(fake_device)
        copied = fakes.model(model)
        fake_optimizer = fakes.optimizer(optimizer, copied)
        _step_as_on(device, fake_optimizer)
        with tracker:
            tracker.mark(copied.parameters(), "parameters")
            tracker.mark([*fakes.buffers, *copied.buffers()], "buffers")
            applied = apply_strategies(chosen, options, copied, fake_optimizer, tracker, fake_device, device == "cpu")
            try:
                _run(applied, copied, lambda: fakes.batch(batch), loss or mean_of_outputs, tracker, device == "cpu")
            finally:
                applied.close()
    estimate = _record(tracker, device, world_size, [*applied.not_modelled, *_limits(device, fake_device, tracker)])
    if file is not None:
        print(estimate, file=file)
    return estimate


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
    """Returns what holds for every estimate on this machine."""
    found = [_SPARSE] if tracker.saw_sparse else []
    if device == "cpu":
        return found
    return [*found, _OUTSIDE] if fake_device.type == "cuda" else [*found, _ELSEWHERE, _OUTSIDE]


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
    applied: Application,
    model: nn.Module,
    make_batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    loss: Callable[[Any], Tensor],
    tracker: StorageTracker,
    on_host: bool,
) -> None:
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
        del value
        applied.exchange.end_backward()
        if is_last or applied.steps_every_batch:
            tracker.phase = "step"
            applied.exchange.begin_step()
            applied.optimizer.step()
            _mark_state(applied.optimizer, tracker, counts_too=on_host)
            applied.exchange.end_step()
            applied.optimizer.zero_grad()
        if is_last:
            for parameter in model.parameters():
                parameter.grad = None
        del args, kwargs
    tracker.phase = "setup"


def _mark_state(optimizer: torch.optim.Optimizer, tracker: StorageTracker, *, counts_too: bool) -> None:
    """Says what the state of ``optimizer`` is; in a job on GPUs its counts (tensors of one number) are on the host."""
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    tracker.mark(state, "optimizer_state")
    if not counts_too:
        tracker.leave_out(tensor for tensor in state if tensor.dim() == 0)


def _step_as_on(device: str, optimizer: torch.optim.Optimizer) -> None:
    """Makes ``optimizer`` update many parameters at once on "cuda", as it does by itself on a real GPU only."""
    for group in optimizer.param_groups if device == "cuda" else ():
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


@contextmanager
def _values_are_missing() -> Iterator[None]:
    """Says what the user can do where a model asks a fake tensor for its value."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        raise ConfigError(
            f"estimate_memory() runs the model on tensors that have shapes and no values, and it asks for a value "
            f"({error}): .item(), a tensor in an 'if', or indexing by a mask. Estimate a model without it."
        ) from error
