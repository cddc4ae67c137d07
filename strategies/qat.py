"""qat: quantization-aware training; forward rounds weights and activations as a quantized model would.

It needs torchao (the extra ``qat``). Each ``nn.Linear`` becomes torchao's ``FakeQuantizedLinear`` in place: parameters,
names and hooks stay, and torchao's convert step makes the trained model an integer one. Weights are rounded
symmetrically, activations asymmetrically with the range of each row of the batch; gradients pass the rounding as if it
were not there (straight-through estimator). torchao has no convolution of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fleet.common.extras import install_line
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy

_MOST_BITS = 8


@dataclass(frozen=True, kw_only=True)
class QatConfig(Config, option="qat_configs"):
    """How weights and activations are rounded."""

    channel_wise_abs_max: bool = setting(True, "one scale per output channel; False: one per weight")
    weight_bits: int = setting(8, "bits of a weight; 9 to 16 are refused", at_least=2, at_most=16)
    activation_bits: int = setting(8, "bits of an activation; 9 to 16 are refused", at_least=2, at_most=16)
    not_quant_pattern: tuple[str, ...] = setting([], "modules whose names contain one of these are left out")
    algo: str = setting(
        "",
        "name of the algorithm that observes the ranges",
        refused="torchao takes the range of each row of a batch when it rounds it, and has no observer to choose",
    )


class Qat(Strategy):
    """Inserts fake quantization into the forward pass."""

    name = "qat"
    meaning = "Train with the rounding of a quantized model in the forward pass of nn.Linear; needs the extra 'qat'."
    stage = Stage.MODULE
    Config = QatConfig
    after = ("tensor_parallel",)
    conflicts = {
        "tensor_parallel": "a scale is taken from a whole row of a weight, and these workers hold parts of rows",
        "pipeline": "qat looks for the layers that it rounds in a whole model, and a stage holds some of them",
    }
    model_effect = "rounds weights and activations of nn.Linear in the forward pass"
    guide = Guide(
        when="The model will be served with integer weights, and rounding it after training costs too much accuracy.",
        cost="The ranges of each weight and each input of a linear layer, and their rounding, in each forward.",
        formula="w rounded to s round(w / s), s = max |w| of a row / (2^(bits - 1) - 0.5); gradients pass unchanged",
        source="Jacob et al., 2018, arXiv 1712.05877; torchao",
        example={"qat": True},
    )

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when a width is asked for that torchao does not have; raises where torchao is absent."""
        if find_spec("torchao") is None:
            raise UnsupportedOptionError(
                f"'qat' cannot be honoured: it needs torchao, which is not installed; {install_line('qat')}."
            )
        config: QatConfig = options["qat_configs"]
        for key in ("weight_bits", "activation_bits"):
            bits = getattr(config, key)
            if bits > _MOST_BITS:
                return f"qat_configs[{key!r}] is {bits}; torchao rounds to 2 to {_MOST_BITS} bits. Set one of these."
        return None

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when a pattern leaves nothing out, or nothing is left to be rounded."""
        patterns: tuple[str, ...] = self.config.not_quant_pattern
        names = [name for name, _ in model.named_modules()]
        for pattern in patterns:
            if not any(pattern in name for name in names):
                raise ConfigError(
                    f"qat_configs['not_quant_pattern'] has {pattern!r}, which is part of no module's name. "
                    f"Modules: {', '.join(name for name in names[:12] if name)}."
                )
        if not linear_modules(model, patterns):
            raise ConfigError(
                f"qat finds no nn.Linear in {type(model).__name__} that it could round, and torchao rounds no other "
                f"layer; {list(patterns)!r} is left out. Turn qat off for this model."
            )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; its linear layers round their weights and inputs."""
        for module in linear_modules(model, self.config.not_quant_pattern):
            quantize_linear(module, self.config)
        return model

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Raises ConfigError for new parameters, whose layers do not round."""
        if added:
            raise ConfigError(
                f"{next(iter(added))!r} was added to the model after distributed_model(), and qat prepared the layers "
                "that were there then. Complete the model first, then call distributed_model()."
            )


class OneScale(nn.Module):
    """Rounds a weight with one scale, by a quantizer that has one for each row."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the rounded weight, of the same shape."""
        rounded: Tensor = self.rows(weight.reshape(1, -1))
        return rounded.view_as(weight)


def linear_modules(model: nn.Module, left_out: tuple[str, ...]) -> list[nn.Linear]:
    """Returns the plain ``nn.Linear`` modules of ``model`` whose names contain none of ``left_out``.

    Subclasses are left alone: they compute in another way, as the projection inside ``nn.MultiheadAttention`` does. So
    is a layer of one input, whose rows have no range.
    """
    modules = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m.in_features > 1]
    return [module for name, module in modules if not any(part in name for part in left_out)]


def quantize_linear(module: nn.Linear, config: QatConfig) -> None:
    """Makes ``module`` a FakeQuantizedLinear in place, so that its hooks and holders keep their module."""
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig, IntxFakeQuantizer

    activations = IntxFakeQuantizeConfig(_integer(config.activation_bits), "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(_integer(config.weight_bits), "per_channel", is_symmetric=True)
    module.__class__ = FakeQuantizedLinear
    module.activation_fake_quantizer = IntxFakeQuantizer(activations)
    rows = IntxFakeQuantizer(weights)
    module.weight_fake_quantizer = rows if config.channel_wise_abs_max else OneScale(rows)
    module.train(module.training)


def _integer(bits: int) -> Any:
    return getattr(torch, f"int{bits}")
