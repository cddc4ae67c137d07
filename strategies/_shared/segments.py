"""Activation checkpointing of one module or function: what recompute and ``fleet.recompute`` run on.

The inputs of a segment are kept by a :class:`SegmentInputs`, which can hold them in pinned host memory between forward
and backward; everything else a segment saves for backward is dropped and computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fleet.errors import ConfigError
from fleet.strategies._shared.segment_state import BothRuns, SegmentState, is_new, modules_of


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    offload_indices: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Returns ``function(*args, **kwargs)``, whose activations are computed again in backward.

    The second run finds the buffers and the random generators of the first (also those of ``get_rng_state_tracker()``
    and those that modules hold), and what the first run changed stays. Inputs need no gradient.

    Args:
        function: a module or a function.
        args: its inputs.
        preserve_rng_state: False saves the time of restoring random generators; only for functions without dropout.
        use_reentrant: Paddle's and torch's older form; accepted, and changes nothing: the newer one gives the same
            numbers, also where no input needs a gradient.
        offload_indices: places in ``args`` of the tensors that wait for backward in pinned host memory.
        kwargs: handed to ``function``.

    Raises:
        ConfigError: an offload index is out of range; or, in one of the first backward passes, the second run gives
            another output, as one that draws from numpy does.

    Example:
        >>> y = fleet.recompute(block, x)
    """
    wrong = [index for index in offload_indices if not 0 <= index < len(args)]
    if wrong:
        raise ConfigError(
            f"recompute(offload_indices={list(offload_indices)!r}): there are {len(args)} inputs, counted from 0."
        )
    return run_segment(function, args, kwargs, None, set(offload_indices), preserve_rng_state)


def recompute_sequential(
    ctx: dict[str, Any], functions: nn.Sequential | Sequence[Callable[..., Any]], *args: Any
) -> Any:
    """Returns the result of calling ``functions`` one after the other, all segments but the last recomputed.

    Args:
        ctx: ``{"segments": 1, "preserve_rng_state": True}``; ``segments`` is the number of pieces.
        functions: modules or functions; each gets what the one before returned.
        args: inputs of the first.

    Raises:
        ConfigError: a key of ``ctx`` is unknown or ``segments`` is not between 1 and the number of functions.
    """
    unknown = set(ctx) - {"segments", "preserve_rng_state"}
    if unknown:
        raise ConfigError(
            f"recompute_sequential: ctx has no key {sorted(unknown)[0]!r}. Keys: segments, preserve_rng_state."
        )
    steps: list[Callable[..., Any]] = list(functions)
    num_segments = ctx.get("segments", 1)
    if isinstance(num_segments, bool) or not isinstance(num_segments, int) or not 1 <= num_segments <= len(steps):
        raise ConfigError(f"recompute_sequential: segments is {num_segments!r}; it must be 1 to {len(steps)}.")
    size = len(steps) // num_segments
    for start in range(0, size * (num_segments - 1), size):
        piece = _Chain(steps[start : start + size])
        result = recompute(piece, *args, preserve_rng_state=ctx.get("preserve_rng_state", True))
        args = result if isinstance(result, tuple) else (result,)
    return _Chain(steps[size * (num_segments - 1) :])(*args)


class _Chain(nn.Module):
    """Calls functions one after the other; those that are modules are its own, so that their buffers are found."""

    def __init__(self, steps: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self._steps = list(steps)
        self._own = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, *args: Any) -> Any:
        for step in self._steps:
            result = step(*args)
            args = result if isinstance(result, tuple) else (result,)
        return result


def run_segment(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: Sequence[nn.Module] | None = None,
    offloaded: set[int] | None = None,
    preserve_rng_state: bool = True,
    inputs: SegmentInputs | None = None,
    name: str = "",
) -> Any:
    """Returns ``function(*args, **kwargs)`` as one segment; ``offloaded`` are places in ``args``, ``None`` is all.

    ``modules`` run in it; ``None`` are those that the function takes. ``inputs`` keeps the inputs until backward in
    another way than on the device or on the host.

    Raises ConfigError in backward, the first times, when the second run gives another output.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    modules = modules_of(function) if modules is None else modules
    if torch.compiler.is_compiling():
        return _run_traced(function, args, kwargs, SegmentState(modules, preserve_rng_state), preserve_rng_state)
    # torch looks for devices in what it is given, and finds none in a SegmentInputs.
    state = SegmentState(modules, preserve_rng_state, gpu_states((args, kwargs)) if preserve_rng_state else {})
    name = name or getattr(function, "__qualname__", type(function).__name__)
    both = BothRuns(name, modules, (args, kwargs)) if is_new(function, modules) else None
    inputs = SegmentInputs(args, kwargs, offloaded) if inputs is None else inputs

    def run(held: SegmentInputs) -> Any:
        is_first = not state.has_run
        own_args, own_kwargs = held.take()
        with state.first() if is_first else state.again():
            output = function(*own_args, **own_kwargs)
        if both is not None:
            both.note(output) if is_first else both.compare(output)
        return output

    # Compared runs go on to their end; torch stops others at the last tensor that backward needs.
    with nullcontext() if both is None else set_checkpoint_early_stop(False):
        result = checkpoint(run, inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    inputs.set_aside()
    return result


def _run_traced(function: Any, args: Any, kwargs: Any, state: SegmentState, preserve_rng_state: bool) -> Any:
    """Does what ``run_segment`` does while the compiler reads it."""

    # The compiler makes the update of buffers part of forward alone, and moves no memory to the host.
    def compiled(*own_args: Any, **own_kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*own_args, **own_kwargs)
        # It gave the segment up (a unit of sharding in it, or a line that cannot be compiled).
        with state.again() if state.has_run else state.first():
            return function(*own_args, **own_kwargs)

    return checkpoint(compiled, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def gpu_states(values: Any) -> dict[int, Tensor]:
    """Returns the states of the random generators of the current GPU and of those that hold tensors of ``values``."""
    if not torch.cuda.is_initialized():
        return {}
    devices = {t.get_device() for t in tree_leaves(values) if isinstance(t, Tensor) and t.device.type == "cuda"}
    return {index: torch.cuda.get_rng_state(index) for index in sorted({torch.cuda.current_device(), *devices})}


class SegmentInputs:
    """The inputs of a segment: the originals in forward, and in backward the same or copies that waited on the host.

    Args:
        args: positional inputs.
        kwargs: named inputs.
        offloaded: places in ``args`` of what waits on the host; ``None`` for everything, an empty set for nothing.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], offloaded: set[int] | None) -> None:
        self._args, self._kwargs = args, kwargs
        self._offloaded = set(range(len(args))) if offloaded is None else offloaded
        self._with_kwargs = offloaded is None

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs, on the device they came from."""
        return tree_map_only(OnHost, OnHost.back, (self._args, self._kwargs))  # type: ignore[no-any-return]

    def set_aside(self) -> None:
        """Moves to the host what is to wait there; the device's memory is free when nobody else holds it."""

        def move(value: Any) -> Any:
            return tree_map_only(Tensor, lambda t: OnHost(t) if worth_moving(t) else t, value)

        self._args = tuple(move(a) if place in self._offloaded else a for place, a in enumerate(self._args))
        if self._with_kwargs:
            self._kwargs = {name: move(value) for name, value in self._kwargs.items()}


def worth_moving(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is an activation on a device with memory of its own; parameters stay in any case."""
    return tensor.device.type != "cpu" and not isinstance(tensor, nn.Parameter)


class OnHost:
    """A tensor's copy in pinned host memory, made and brought back without stopping the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._requires_grad = tensor.device, tensor.requires_grad
        # In the strides of the original, channels_last for one: another layout would take other kernels.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._ready: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            side = _side_stream(tensor.device)
            side.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(side):
                self._copy.copy_(tensor.detach(), non_blocking=True)
                # The allocator must not hand the memory out before the copy has read it.
                tensor.detach().record_stream(side)
                self._ready = side.record_event()
        else:
            self._copy.copy_(tensor.detach())

    def back(self) -> Tensor:
        """Returns the tensor on its device; whether it needs a gradient is as it was."""
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)
        return self._copy.to(self._device, non_blocking=True).requires_grad_(self._requires_grad)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of copies to the host, one for each device."""
    return torch.cuda.Stream(device)
