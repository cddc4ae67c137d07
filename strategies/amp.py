"""amp: the forward pass computes in a narrow floating type where that is safe, and the loss is scaled for float16."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.strategies._base import NOT_YET, Stage, Strategy
from fleet.strategies._config import Config, setting


@dataclass(frozen=True, kw_only=True)
class AmpConfig(Config, option="amp_configs"):
    """Loss scaling, and what is computed in which type."""

    init_loss_scaling: float = setting(32768.0, "loss scale at the start", above=0)
    incr_every_n_steps: int = setting(1000, "finite steps in a row before the scale grows", at_least=1)
    decr_every_n_nan_or_inf: int = setting(
        2, "steps with an inf or nan, since the last finite one, before the scale shrinks", at_least=1
    )
    incr_ratio: float = setting(2.0, "factor by which the scale grows", above=1)
    decr_ratio: float = setting(
        0.8, "factor by which the scale shrinks; the scale never falls below 1", above=0, below=1
    )
    use_dynamic_loss_scaling: bool = setting(True, "let the scale grow and shrink; False keeps init_loss_scaling")
    custom_white_list: tuple[str, ...] = setting(
        [], "modules (class names or qualified names) that compute in the narrow type in any case"
    )
    custom_black_list: tuple[str, ...] = setting(
        [], "modules (class names or qualified names) that compute in float32 in any case"
    )
    custom_black_varnames: tuple[str, ...] = setting(
        [], "qualified names of parameters whose modules compute in float32"
    )
    use_pure_fp16: bool = setting(
        False, "store the parameters in float16 too, batch and layer norm excepted, with float32 master weights"
    )
    use_pure_bf16: bool = setting(False, "the same with bfloat16, and no loss scaling")
    use_fp16_guard: bool = setting(
        True, "with use_pure_fp16, compute in float16 only inside fleet's fp16_guard(), where a script has one"
    )
    use_optimizer_fp16: bool = setting(False, "keep no float32 master weights")

    def __post_init__(self) -> None:
        """Checks each key, and that at most one narrow type is asked for."""
        super().__post_init__()
        if self.use_pure_fp16 and self.use_pure_bf16:
            raise ConfigError(
                "amp_configs['use_pure_fp16'] and ['use_pure_bf16'] are both True; the parameters have one type. "
                "Set one of them to False."
            )


class Amp(Strategy):
    """Runs the forward pass under autocast and scales the loss where float16 needs it."""

    name = "amp"
    meaning = "Mixed precision: compute in float16 or bfloat16 where that is safe, with dynamic loss scaling."
    stage = Stage.STEP
    Config = AmpConfig
    in_ps_job = True
    conflicts = {
        "dgc": "dgc keeps unsent gradients from step to step, and amp would scale them differently at each step"
    }
    refused = NOT_YET
    model_effect = "runs the forward pass under autocast"
    optimizer_effect = "unscales the gradients, skips a step that has an inf or nan, and adapts the loss scale"
