"""fp16_allreduce: float32 gradients cross the wire as float16 or bfloat16, half the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._gradients.gradient_exchange import exchange_in


@dataclass(frozen=True, kw_only=True)
class Fp16AllreduceConfig(Config, option="fp16_allreduce_configs"):
    """The type on the wire; an addition to Fleet's options."""

    dtype: str = setting(
        "float16",
        "'float16' keeps three decimal digits, 'bfloat16' two, with the range of float32",
        choices=("float16", "bfloat16"),
    )


class Fp16Allreduce(Strategy):
    """Casts float32 gradients to float16 (or bfloat16) for the exchange and back afterwards.

    Each worker divides by the number of workers before the sum, so that the sum does not overflow earlier than the
    gradients themselves. Gradients of other types are sent as they are.
    """

    name = "fp16_allreduce"
    meaning = "Send float32 gradients as float16 or bfloat16: half the bytes, two to three decimal digits."
    stage = Stage.COMM
    Config = Fp16AllreduceConfig
    model_effect = "casts float32 gradients to float16 (or bfloat16) for the exchange and back"
    guide = Guide(
        when="The network is the bottleneck. Take bfloat16 where gradients overflow float16.",
        cost="Half the bytes; two casts per bucket; the rounding of the narrow type.",
        formula="g = sum over workers of cast(g_i / N)",
        example={"fp16_allreduce": True},
    )

    @classmethod
    def notes(cls, options: object, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one worker exchanges nothing."""
        return ("fp16_allreduce changes nothing with one worker: nothing is exchanged.",) if world_size == 1 else ()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model`` with its exchange in the narrow type."""
        exchange = exchange_in(model)
        if exchange is not None:
            exchange.wire_dtype = getattr(torch, self.config.dtype)
            exchange.use(self.name)
        return model
