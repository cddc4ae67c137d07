"""AmpModel: the wrapped model under autocast, and the border at which types and the backward signal change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.strategies._shared.casts import cast_floating, map_tensors
from fleet.strategies.amp.backward_signal import Signal, enter_model, leave_model
from fleet.strategies.amp.loss_scale import LossScale
from fleet.strategies.amp.policy import Region, Treatment, run_treated


class AmpModel(nn.Module):
    """Runs ``chain`` under autocast; floating results leave in float32.

    It stands for ``chain`` in every other respect. A call inside a call, of a model that is part of another one, adds
    nothing.

    Args:
        chain: the user's module with what earlier strategies put around it.
        root: the user's module; its own treatment is applied here, around everything.
        treatment: how ``root`` is run, if not as it is.
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
        # The name by which torch.compile's module holds what it wraps: whoever looks through that one looks through us.
        self._modules["_orig_mod"] = chain
        self.__dict__.update(
            _root=root, _treatment=treatment, _region=region, _scale=scale, _signal=signal,
            _converts=pure and not guarded, _guarded=guarded,
        )  # fmt: skip

    @property
    def chain(self) -> nn.Module:
        """What this module runs."""
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
        """Returns what the wrapped module returns, floating tensors in float32."""
        region: Region = self._region
        if region.depth or region.off:
            return self.chain(*args, **kwargs)
        had_input = False
        if self._signal is not None and self._scale.in_use:
            self._signal.before_forward()

            def enter(value: Tensor) -> Tensor:
                nonlocal had_input
                entered = enter_model(value, self._scale)
                had_input = had_input or entered is not value
                return entered

            args, kwargs = map_tensors(args, enter), map_tensors(kwargs, enter)
        if self._converts:
            args, kwargs = cast_floating(args, region.dtype), cast_floating(kwargs, region.dtype)
        region.depth, region.guarded = 1, self._guarded
        try:
            with nullcontext() if self._guarded else region.autocast():
                result = self._run(args, kwargs)
        finally:
            region.depth, region.guarded = 0, False
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
