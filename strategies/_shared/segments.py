"""Activation checkpointing of one module or function: the base of recompute and ``fleet.recompute``.

The inputs of a segment are kept by a :class:`SegmentInputs`, which can hold them in pinned host memory between forward
and backward; everything else a segment saves for backward is dropped and computed again.

Backward computes a segment again. That run finds the buffers and random generators that forward found, and afterwards
they are as forward has left them (:class:`SegmentState`). Buffers are exchanged as objects and never written: backward
may have saved them.

[Note: Both outputs]
State outside torch (numpy's generator, a counter in Python) is not put back. The outputs of both runs tell: a segment
compares them by a few sums in its first runs, with room for kernels that round differently.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.weak import TensorWeakRef

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

    The second run finds the buffers and the random generators of the first (also those of ``get_rng_state_tracker()``
    and those that modules hold), and the changes of the first run stay. Inputs need no gradient.

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
            another output, for example because it draws from numpy.

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
        functions: modules or functions; each gets the result of the function before it.
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
    """Calls functions one after the other; modules among them are submodules, so that their buffers are found."""

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

    ``modules`` run in it; by default those that the function refers to. ``inputs`` keeps the inputs until backward in
    another way than on the device or on the host.

    Raises ConfigError in backward, the first times, when the second run gives another output.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    modules = modules_of(function) if modules is None else modules
    if torch.compiler.is_compiling():
        return _run_traced(function, args, kwargs, SegmentState(modules, preserve_rng_state), preserve_rng_state)
    # torch looks for devices in the arguments of checkpoint(), and finds none in a SegmentInputs.
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
    """Returns the result of :func:`run_segment` while the compiler reads it."""

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
        offloaded: places in ``args`` of values that wait on the host; ``None`` for all, an empty set for none.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], offloaded: set[int] | None) -> None:
        self._args = args
        self._kwargs = kwargs
        self._offloaded = set(range(len(args))) if offloaded is None else offloaded
        self._with_kwargs = offloaded is None

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs, on the device they came from."""
        return tree_map_only(OnHost, OnHost.back, (self._args, self._kwargs))  # type: ignore[no-any-return]

    def set_aside(self) -> None:
        """Moves offloaded inputs to the host; the device's memory is free when nobody else holds it."""

        def move(value: Any) -> Any:
            return tree_map_only(Tensor, lambda t: OnHost(t) if worth_moving(t) else t, value)

        self._args = tuple(move(a) if place in self._offloaded else a for place, a in enumerate(self._args))
        if self._with_kwargs:
            self._kwargs = {name: move(value) for name, value in self._kwargs.items()}


def worth_moving(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is an activation in the memory of a GPU; parameters stay in any case."""
    return tensor.device.type != "cpu" and not isinstance(tensor, nn.Parameter)


class OnHost:
    """A tensor's copy in pinned host memory, made and brought back without stopping the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
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


_COMPARED_RUNS = 24  # one function often runs all blocks of a model
_ROOM = 1e-5  # of the sum of magnitudes: what kernels in 16 bit round differently
_runs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by module or code

_ABSENT = torch.empty(0)  # stands for a buffer that the first run registered


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Returns the modules that ``function`` is, belongs to, or takes from the function around it."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, partial):
        given = [*function.args, *function.keywords.values()]
        return [*modules_of(function.func), *(one for one in given if isinstance(one, nn.Module))]
    around = [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            around.append(cell.cell_contents)
        except ValueError:  # it is assigned later
            continue
    return [one for one in around if isinstance(one, nn.Module)]


class SegmentState:
    """The buffers and random generators of a segment: :meth:`first` runs it, and :meth:`again` runs it in backward.

    Several backward passes through one forward enter ``again`` one after the other.

    Args:
        modules: the modules that run in it; those inside them count, too.
        draws: whether random generators are put back.
        gpus: the states of the generators of GPUs; torch itself restores the CPU's.
    """

    def __init__(
        self, modules: Sequence[nn.Module], draws: bool = True, gpus: Mapping[int, Tensor] | None = None
    ) -> None:
        self._roots = modules
        self._draws = draws
        self._gpus = gpus or {}
        self._modules: list[nn.Module] = []
        self._found: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._generators: dict[torch.Generator, Tensor] = {}
        self._streams: dict[str, StreamState] = {}
        self.has_run = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """Returns a context for the run of forward, which keeps the buffers and generators from before the run."""
        self.has_run = True
        self._modules = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
        before = [
            (module, {name: (buffer, _version(buffer), _copied(buffer)) for name, buffer in module._buffers.items()})
            for module in self._modules
        ]
        if self._draws:
            held = (one for module in self._modules for one in vars(module).values())
            self._generators = {one: one.get_state() for one in held if isinstance(one, torch.Generator)}
            self._streams = TRACKER.get_states_tracker()
        yield
        for module, buffers in before:
            found: dict[str, Tensor | None] = {name: _ABSENT for name in module._buffers if name not in buffers}
            for name, (buffer, version, copy) in buffers.items():
                if _version(buffer) != version:
                    found[name] = copy
                elif module._buffers.get(name) is not buffer:
                    found[name] = buffer
            if found:
                self._found[module] = found

    @contextmanager
    def again(self) -> Iterator[None]:
        """Returns a context for a run of backward, which starts as :meth:`first` did and leaves nothing behind."""
        live = [(module, dict(module._buffers)) for module in self._modules if module._buffers or module in self._found]
        states = (
            {generator: generator.get_state() for generator in self._generators},
            TRACKER.get_states_tracker() if self._streams else {},
            {index: torch.cuda.get_rng_state(index) for index in self._gpus},
        )
        # Copies of all: a later backward pass finds them, too, and batch norm changes buffers without a new version.
        for module, buffers in live:
            found = {**buffers, **self._found.get(module, {})}
            module._buffers.clear()
            module._buffers.update({name: _copied(b) for name, b in found.items() if b is not _ABSENT})
        _set(self._generators, self._streams, self._gpus)
        try:
            yield
        finally:
            for module, buffers in live:
                module._buffers.clear()
                module._buffers.update(buffers)
            _set(*states)


def is_new(function: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Counts a run of ``function``; returns whether it is one of the first."""
    key = modules[0] if modules else getattr(function, "__code__", type(function))
    _runs[key] = _runs.get(key, 0) + 1
    return _runs[key] <= _COMPARED_RUNS


class BothRuns:
    """Compares the outputs of both runs of a segment; see [Note: Both outputs].

    Args:
        name: the name of the segment, for messages.
        modules: the modules that run in it.
        inputs: its inputs.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], inputs: Any) -> None:
        self._name = name
        self._modules = [module for root in modules for module in root.modules()]
        tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        self._inputs = [(TensorWeakRef(tensor), _version(tensor)) for tensor in tensors]
        self._before = self._elsewhere()
        self._sums: list[Tensor] = []
        self._changed: list[str] = []

    def note(self, output: Any) -> None:
        """Notes the output of the first run."""
        self._sums = _sums(output)
        now = self._elsewhere()
        self._changed = [what for what, value in self._before.items() if now.get(what) != value]
        self._before = {}

    def compare(self, output: Any) -> None:
        """Raises ConfigError where the ``output`` of the second run differs from the first."""
        now = _sums(output)
        if len(now) == len(self._sums) and all(map(_is_close, self._sums, now)):
            return
        if any((tensor := ref()) is not None and _version(tensor) != version for ref, version in self._inputs):
            self._changed.insert(0, "its inputs were changed in place between forward and backward")
        reason = "; ".join(self._changed) or "it takes something from outside its inputs, its buffers and torch"
        raise ConfigError(
            f"recompute: {self._name} gave another output when backward ran it again ({reason}), and its gradients "
            "would be those of that run. Draw random numbers with torch, keep counters and averages in buffers "
            "(register_buffer), or leave the module out of recompute."
        )

    def _elsewhere(self) -> dict[str, Any]:
        """Returns state outside buffers and torch's generators that a forward may change, by a message for it."""
        found: dict[str, Any] = {"it draws from the module random": random.getstate()}
        if numpy := sys.modules.get("numpy"):
            state = tree_leaves(numpy.random.get_state(legacy=False))
            found["it draws from numpy.random"] = [one.tobytes() if hasattr(one, "tobytes") else one for one in state]
        for module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, int | float | str):
                    found[f"it changes {name!r} of {type(module).__name__}, which is no buffer"] = value
        return found


def _set(generators: Mapping[Any, Tensor], streams: dict[str, StreamState], gpus: Mapping[int, Tensor]) -> None:
    for generator, state in generators.items():
        generator.set_state(state)
    if streams:
        TRACKER.set_states_tracker(streams)
    for index, state in gpus.items():
        torch.cuda.set_rng_state(state, index)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _copied(buffer: Tensor | None) -> Tensor | None:
    # A copy and not a switch: backward saves buffers too, and must save as many tensors as forward did.
    if buffer is None or is_lazy(buffer):
        return buffer
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


def _sums(output: Any) -> list[Tensor]:
    """Returns the sum, a sum by position and the sum of magnitudes of each tensor of ``output``, shape [3]."""
    leaves = [leaf.detach().flatten() for leaf in tree_leaves(output) if type(leaf) is Tensor]
    found = []
    for values in leaves:
        if values.is_floating_point() and values.device.type in ("cpu", "cuda"):
            exact = values.double()
            places = torch.linspace(1, 2, values.numel(), dtype=exact.dtype, device=exact.device)
            found.append(torch.stack([exact.sum(), (exact * places).sum(), exact.abs().sum()]))
    return found


def _is_close(one: Tensor, other: Tensor) -> bool:
    room = float(one[2].nan_to_num()) * _ROOM
    return torch.allclose(one, other, rtol=0, atol=room, equal_nan=True)
