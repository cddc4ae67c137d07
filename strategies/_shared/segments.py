"""Activation checkpointing of one module or function: what recompute and ``fleet.recompute`` run on.

The inputs of a segment are kept by a :class:`SegmentInputs`, which can hold them in pinned host memory between forward
and backward; everything else a segment saves for backward is dropped and computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from fleet.errors import ConfigError
from fleet.strategies._shared.random_streams import TRACKER, StreamState


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    offload_indices: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Returns ``function(*args, **kwargs)``, whose activations are computed again in backward.

    Random numbers (dropout) are the same both times, those of the streams of ``get_rng_state_tracker()`` too, and
    batch-norm statistics are updated once. Inputs need no gradient.

    Args:
        function: a module or a function.
        args: its inputs.
        preserve_rng_state: False saves the time of restoring random generators; only for functions without dropout.
        use_reentrant: Paddle's and torch's older form; accepted, and changes nothing: the newer one gives the same
            numbers, also where no input needs a gradient.
        offload_indices: places in ``args`` of the tensors that wait for backward in pinned host memory.
        kwargs: handed to ``function``.

    Raises:
        ConfigError: an offload index is out of range.

    Example:
        >>> y = fleet.recompute(block, x)
    """
    wrong = [index for index in offload_indices if not 0 <= index < len(args)]
    if wrong:
        raise ConfigError(
            f"recompute(offload_indices={list(offload_indices)!r}): there are {len(args)} inputs, counted from 0."
        )
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    norms = norm_modules(module) if isinstance(module, nn.Module) else []
    return run_segment(function, args, kwargs, norms, set(offload_indices), preserve_rng_state)


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
    """Calls functions one after the other; those that are modules are its own, so that their norms are found."""

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
    norms: Sequence[_NormBase],
    offloaded: set[int] | None = None,
    preserve_rng_state: bool = True,
    inputs: SegmentInputs | None = None,
) -> Any:
    """Returns ``function(*args, **kwargs)`` as one segment; ``offloaded`` are places in ``args``, ``None`` is all.

    ``inputs`` keeps the inputs until backward in another way than on the device or on the host.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    streams = TRACKER.get_states_tracker() if preserve_rng_state else {}
    if torch.compiler.is_compiling():
        again = SecondRun(norms, streams)

        # The compiler makes the statistics' update part of forward alone, and moves no memory to the host.
        def compiled(*own_args: Any, **own_kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
                return function(*own_args, **own_kwargs)
            # It gave the segment up (a unit of sharding in it, or a line that cannot be compiled): this is backward.
            with again:
                return function(*own_args, **own_kwargs)

        return checkpoint(compiled, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    # torch looks for devices in what it is given, and finds none in a SegmentInputs.
    again = SecondRun(norms, streams, gpu_states((args, kwargs)) if preserve_rng_state else {})
    inputs = SegmentInputs(args, kwargs, offloaded) if inputs is None else inputs

    def run(held: SegmentInputs) -> Any:
        own_args, own_kwargs = held.take()
        return function(*own_args, **own_kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again

    result = checkpoint(run, inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=contexts)
    inputs.set_aside()
    return result


def norm_modules(module: nn.Module) -> list[_NormBase]:
    """Returns the modules in ``module`` that keep running statistics."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]


class frozen_statistics:
    """Keeps the running statistics of ``norms`` as they are: inside the context the modules update copies.

    Copies and not a switch: backward saves the running statistics too, and must save as many tensors as forward did.
    Several backward passes through one forward enter it one after the other.
    """

    def __init__(self, norms: Sequence[_NormBase]) -> None:
        self._norms = norms
        self._kept: list[list[dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._kept.append([dict(norm._buffers) for norm in self._norms])
        for norm in self._norms:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in norm._buffers.items()})

    def __exit__(self, *_: object) -> None:
        for norm, buffers in zip(self._norms, self._kept.pop(), strict=True):
            norm._buffers.update(buffers)


def gpu_states(values: Any) -> dict[int, Tensor]:
    """Returns the states of the random generators of the current GPU and of those that hold tensors of ``values``."""
    if not torch.cuda.is_initialized():
        return {}
    devices = {t.get_device() for t in tree_leaves(values) if isinstance(t, Tensor) and t.device.type == "cuda"}
    return {index: torch.cuda.get_rng_state(index) for index in sorted({torch.cuda.current_device(), *devices})}


class SecondRun:
    """What a segment runs in when backward computes it again: random generators stand where they stood in forward.

    Statistics of norms stay as they are. Several backward passes through one forward enter it one after the other.

    Args:
        norms: modules whose statistics stay.
        streams: the random streams by name.
        gpus: the states of the generators of GPUs; torch restores that of the CPU.
    """

    def __init__(
        self, norms: Sequence[_NormBase], streams: dict[str, StreamState], gpus: Mapping[int, Tensor] | None = None
    ) -> None:
        self._statistics, self._streams, self._gpus = frozen_statistics(norms), streams, gpus or {}
        self._kept: list[tuple[dict[str, StreamState], dict[int, Tensor]]] = []

    def __enter__(self) -> None:
        self._statistics.__enter__()
        gpus = {index: torch.cuda.get_rng_state(index) for index in self._gpus}
        self._kept.append((TRACKER.get_states_tracker() if self._streams else {}, gpus))
        self._set(self._streams, self._gpus)

    def __exit__(self, *error: object) -> None:
        self._statistics.__exit__(*error)
        self._set(*self._kept.pop())

    def _set(self, streams: dict[str, StreamState], gpus: Mapping[int, Tensor]) -> None:
        if self._streams:
            TRACKER.set_states_tracker(streams)
        for index, state in gpus.items():
            torch.cuda.set_rng_state(state, index)


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
