"""Refuses Fleet's wrappers for 16-bit parameters whose gradients add up in float32: amp does the same by itself."""

from __future__ import annotations

from typing import Any

from fleet.errors import UnsupportedOptionError

__all__ = ["MixPrecisionLayer", "MixPrecisionOptimizer", "MixPrecisionScaler"]


def _refuse(call: str, instead: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{call}(...) would add gradients up in param.main_grad, which neither the exchange between workers reads nor "
        f"torch's optimizers and clip_grad_norm_. {instead}"
    )


class MixPrecisionLayer:
    """Refused: strategy.amp keeps parameters in float32, and their gradients add up in float32."""

    def __init__(self, layers: Any, dtype: str = "float16") -> None:
        raise _refuse(
            "MixPrecisionLayer",
            f"Leave the model as it is and set strategy.amp = True and strategy.amp_configs = {{'dtype': {dtype!r}}}: "
            "parameters stay in float32, and so do the sums of their gradients.",
        )


class MixPrecisionOptimizer:
    """Refused, as :class:`MixPrecisionLayer`."""

    def __init__(self, optimizer: Any) -> None:
        raise _refuse(
            "MixPrecisionOptimizer", "Hand the optimizer to fleet.distributed_optimizer(), with strategy.amp = True."
        )


class MixPrecisionScaler:
    """Refused, as :class:`MixPrecisionLayer`."""

    def __init__(self, scaler: Any) -> None:
        raise _refuse(
            "MixPrecisionScaler",
            "Hand the torch.amp.GradScaler to fleet.distributed_scaler(), or let strategy.amp = True scale the loss.",
        )
