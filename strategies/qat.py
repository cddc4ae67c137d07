"""qat: quantization-aware training; forward rounds weights and activations as a quantized model would."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._base import NOT_YET, Stage, Strategy
from fleet.strategies._config import Config, setting


@dataclass(frozen=True, kw_only=True)
class QatConfig(Config, option="qat_configs"):
    """How weights and activations are rounded."""

    channel_wise_abs_max: bool = setting(True, "one scale per output channel; False: one per weight")
    weight_bits: int = setting(8, "bits of a weight", at_least=2, at_most=16)
    activation_bits: int = setting(8, "bits of an activation", at_least=2, at_most=16)
    not_quant_pattern: tuple[str, ...] = setting([], "modules whose names contain one of these are left out")
    algo: str = setting("", "name of the algorithm that observes the ranges")


class Qat(Strategy):
    """Inserts fake quantization into the forward pass."""

    name = "qat"
    meaning = "Train with the rounding of a quantized model in the forward pass."
    stage = Stage.MODULE
    Config = QatConfig
    refused = NOT_YET
    model_effect = "rounds weights and activations in the forward pass"
