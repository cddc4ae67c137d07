"""SegmentState: what a segment changes beside its output, so that its second run leaves no trace.

Backward computes a segment again. That run finds the buffers and random generators that forward found, and afterwards
they are as forward has left them. Buffers are exchanged as objects and never written: backward may have saved them.

[Note: Both outputs]
What a forward takes from elsewhere (numpy, a counter in Python) is not put back. The outputs of both runs tell: a
segment compares them by a few sums in its first runs, with room for kernels that round differently.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from fleet.errors import ConfigError
from fleet.strategies._shared.random_streams import TRACKER, StreamState

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
        gpus: the states of the generators of GPUs; torch puts that of the CPU back.
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
        """Returns a context for the run of forward, which keeps what that run changes as it was before."""
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
        """Returns a context for a run of backward, which finds what :meth:`first` found and leaves nothing behind."""
        live = [(module, dict(module._buffers)) for module in self._modules if module._buffers or module in self._found]
        states = (
            {generator: generator.get_state() for generator in self._generators},
            TRACKER.get_states_tracker() if self._streams else {},
            {index: torch.cuda.get_rng_state(index) for index in self._gpus},
        )
        # Copies of all: a later backward pass finds them, too, and batch norm changes its own without a new version.
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
        name: of the segment, for messages.
        modules: the modules that run in it.
        inputs: what it is given.
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
        self._sums, now = _sums(output), self._elsewhere()
        self._changed = [what for what, value in self._before.items() if now.get(what) != value]
        self._before = {}

    def compare(self, output: Any) -> None:
        """Raises ConfigError where the ``output`` of the second run is not that of the first."""
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
        """Returns what a forward may change beside buffers and torch's generators, by what a change of it means."""
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
