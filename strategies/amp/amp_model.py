"""AmpModel: the wrapped model under autocast, its treated modules, and the border of types and of the backward signal.

``policy.py`` plans the treatment of each module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.strategies._shared.casts import cast_floating, cast_tensor, map_tensors, nested_tensors
from fleet.strategies.amp.amp_optimizer import LossScale
from fleet.strategies.amp.backward_signal import Signal, enter_model, leave_model

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """The types around the forward of one module; ``None`` changes nothing.

    Attributes:
        autocast: whether torch.autocast is on inside.
        inputs: type of the floating inputs.
        parameters: type of the module's own parameters (not of its submodules').
        outputs: type of the floating outputs; ``"input"`` is the type of the first floating input.
        always: also where the surrounding code computes in float32.
        resumes: also inside a module whose own operations alone compute in float32.
    """

    autocast: bool | None = None
    inputs: torch.dtype | None = None
    parameters: torch.dtype | None = None
    outputs: torch.dtype | str | None = None
    always: bool = False
    resumes: bool = False


@dataclass(eq=False)
class Region:
    """The state that the modules of one model share: the type, and whether the model runs right now.

    Attributes:
        device_type: ``"cuda"`` or ``"cpu"``.
        dtype: the 16-bit type.
        depth: 1 while a wrapped model runs.
        guarded: whether the running model computes in 16 bit only inside ``fp16_guard()``.
        suspended: number of running modules inside which autocast was turned off.
        off: True after the session has ended; modules then compute as if never treated.
    """

    device_type: str
    dtype: torch.dtype
    depth: int = 0
    guarded: bool = False
    suspended: int = 0
    off: bool = False

    def __deepcopy__(self, memo: Any) -> Region:
        return self

    def autocast(self, enabled: bool = True) -> torch.autocast:
        """Returns a context in which operations that are safe in 16 bit compute in it, or none do."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=enabled)

    @contextmanager
    def suspending(self, is_off: bool) -> Iterator[None]:
        """Counts a module inside which autocast is off."""
        self.suspended += is_off
        try:
            yield
        finally:
            self.suspended -= is_off

    def applies(self, treatment: Treatment) -> bool:
        """Returns whether a module that is called at this moment gets ``treatment``."""
        if self.off:
            return False
        if torch.is_autocast_enabled(self.device_type):
            return True
        if not treatment.always and not treatment.resumes:
            return False
        # In backward only recomputed modules run, which ran inside the model the first time.
        return bool((self.depth if treatment.always else self.suspended) or torch._C._current_graph_task_id() != -1)


class TreatedForward:
    """The forward of a module with its treatment around it; it takes the place of ``module.forward``."""

    def __init__(self, module: nn.Module, treatment: Treatment, region: Region) -> None:
        self._module = module
        self._treatment = treatment
        self.region = region
        self._inner: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward."""
        return run_treated(self._module, self._own_forward, self._treatment, self.region, args, kwargs)

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def run_treated(
    module: nn.Module,
    forward: Callable[..., Any],
    treatment: Treatment,
    region: Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Returns ``forward(*args, **kwargs)``, run as ``treatment`` says for ``module``."""
    if not region.applies(treatment):
        if not region.off:
            args = _widened(args)
            kwargs = _widened(kwargs)
        return _run_outside(module, forward, args, kwargs)
    outputs = treatment.outputs
    if outputs == "input":
        outputs = next((t.dtype for t in nested_tensors((args, kwargs)) if t.is_floating_point()), None)
    if treatment.inputs is not None:
        args = cast_floating(args, treatment.inputs)
        kwargs = cast_floating(kwargs, treatment.inputs)
    # The copies take the parameters' place for this call; autograd leads their gradients to the originals.
    kept = module._parameters
    if treatment.parameters is not None:
        module._parameters = {name: cast_tensor(p, treatment.parameters) for name, p in kept.items()}
    try:
        if treatment.autocast is None:
            result = forward(*args, **kwargs)
        else:
            with region.autocast(treatment.autocast), region.suspending(not treatment.autocast):
                result = forward(*args, **kwargs)
    finally:
        if treatment.parameters is not None:
            module._parameters = kept
    return result if outputs is None else cast_floating(result, outputs)  # type: ignore[arg-type]


def _widened(tree: Any) -> Any:
    """Returns nested inputs with 16-bit tensors, as they come from a guarded part, as float32."""
    narrow = any(tensor.dtype in _NARROW for tensor in nested_tensors(tree))
    return cast_floating(tree, torch.float32) if narrow else tree


def _run_outside(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``forward`` where the surrounding code is in float32; 16-bit parameters are widened for it."""
    kept = module._parameters
    if not any(p is not None and p.dtype in _NARROW for p in kept.values()):
        return forward(*args, **kwargs)
    module._parameters = {name: cast_tensor(p, torch.float32) for name, p in kept.items()}
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters = kept


class AmpModel(nn.Module):
    """Runs ``chain`` under autocast; floating results leave in float32.

    It stands for ``chain`` in every other respect. A call inside a call, of a model that is part of another one, adds
    nothing.

    Args:
        chain: the user's module with the wrappers of earlier strategies.
        root: the user's module; its own treatment is applied here, around everything.
        treatment: the treatment of ``root``, if it has one.
        region: the type and the state that the modules of the model share.
        scale: the loss scale.
        signal: scales and unscales; ``None`` where nothing is ever scaled.
        pure: convert floating inputs.
        guarded: compute in 16 bit only inside ``fp16_guard()``.
    """

    def __init__(
        self,
        chain: nn.Module,
        root: nn.Module,
        treatment: Treatment | None,
        region: Region,
        scale: LossScale,
        signal: Signal | None,
        *,
        pure: bool,
        guarded: bool,
    ) -> None:
        super().__init__()
        # The name under which torch.compile's module holds the module inside: code that looks through the compiler's
        # wrapper looks through this one too.
        self._modules["_orig_mod"] = chain
        self.__dict__.update(
            _root=root, _treatment=treatment, _region=region, _scale=scale, _signal=signal,
            _converts=pure and not guarded, _guarded=guarded,
        )  # fmt: skip

    @property
    def chain(self) -> nn.Module:
        """The module inside."""
        return cast(nn.Module, self._modules["_orig_mod"])

    @property
    def keeps_size(self) -> bool:
        """Whether gradients have their true size without hooks on the parameters."""
        return self._signal is None

    def around(self, chain: nn.Module, root: nn.Module) -> AmpModel:
        """Returns the same around another chain, with the user's module ``root`` in it."""
        return AmpModel(
            chain, root, self._treatment, self._region, self._scale, self._signal,
            pure=self._converts, guarded=self._guarded,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the wrapped module, floating tensors in float32."""
        region: Region = self._region
        if region.depth or region.off:
            return self.chain(*args, **kwargs)
        # The signal enters a float16 model scaled, so an input that needs a gradient gets its share unscaled.
        had_input = False
        if self._signal is not None and self._scale.in_use:
            self._signal.before_forward()

            def enter(value: Tensor) -> Tensor:
                nonlocal had_input
                entered = enter_model(value, self._scale)
                had_input = had_input or entered is not value
                return entered

            args = map_tensors(args, enter)
            kwargs = map_tensors(kwargs, enter)
        if self._converts:
            args = cast_floating(args, region.dtype)
            kwargs = cast_floating(kwargs, region.dtype)
        region.depth = 1
        region.guarded = self._guarded
        try:
            with nullcontext() if self._guarded else region.autocast():
                result = self._run(args, kwargs)
        finally:
            region.depth = 0
            region.guarded = False
        return map_tensors(result, lambda output: leave_model(output, self._scale, had_input=had_input))

    def leave(self, loss: Tensor) -> Tensor:
        """Returns ``loss``, computed by the wrapped module, as one of its results."""
        return leave_model(loss, self._scale)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._treatment is None:
            return self.chain(*args, **kwargs)
        return run_treated(self._root, self.chain, self._treatment, self._region, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_orig_mod"], name)


def guard(region: Region, *, pure: bool) -> AbstractContextManager[Any]:
    """Returns the context of ``fp16_guard()``: 16 bit inside it, in a model that computes in float32 around it.

    Raises ConfigError inside a model whose code was searched for the guard in vain: its other parts already compute
    in 16 bit, and the guard would have no effect.
    """
    if not pure or region.off:
        return nullcontext()
    if region.depth and not region.guarded and not torch.compiler.is_compiling():
        raise ConfigError(
            "fp16_guard() was entered while a model runs whose modules do not mention it, so all of the model computes "
            "in 16 bit. Write 'with fleet.fp16_guard():' in a method of one of its modules, or omit it."
        )
    return region.autocast()
