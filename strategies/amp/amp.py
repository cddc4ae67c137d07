"""amp: the forward pass computes in a narrow floating type where that is safe, and the loss is scaled for float16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleet.errors import ConfigError
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._gradients.gradient_exchange import exchange_in
from fleet.strategies._shared.casts import narrow_type
from fleet.strategies._shared.parts import is_part
from fleet.strategies.amp.amp_model import AmpModel, Region, TreatedForward, Treatment, guard
from fleet.strategies.amp.amp_optimizer import AmpOptimizer, LossScale
from fleet.strategies.amp.backward_signal import Signal
from fleet.strategies.amp.policy import check_stages, has_guard, plan_treatments

if TYPE_CHECKING:
    from fleet.job.job import Job


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
        False,
        "compute everything but normalisation in float16, with float16 copies of the parameters; the parameters "
        "themselves stay in float32, as master weights",
    )
    use_pure_bf16: bool = setting(False, "the same with bfloat16, and no loss scaling")
    use_fp16_guard: bool = setting(
        True,
        "with use_pure_fp16 or use_pure_bf16, in models that use fleet.fp16_guard(), compute in 16 bit only inside it",
    )
    use_optimizer_fp16: bool = setting(
        False, "keep no float32 master weights: with use_pure_fp16 or use_pure_bf16 the parameters are 16-bit"
    )
    dtype: str = setting(
        "auto",
        "the 16-bit type without use_pure_fp16 and use_pure_bf16; 'auto' is float16 on a GPU and bfloat16 on the CPU",
        choices=("auto", "float16", "bfloat16"),
    )

    def __post_init__(self) -> None:
        """Checks each key, and that at most one narrow type is asked for."""
        super().__post_init__()
        if self.use_pure_fp16 and self.use_pure_bf16:
            raise ConfigError(
                "amp_configs['use_pure_fp16'] and ['use_pure_bf16'] are both True; the parameters have one type. "
                "Set one of them to False."
            )
        for key, other in (("use_pure_fp16", "bfloat16"), ("use_pure_bf16", "float16")):
            if getattr(self, key) and self.dtype == other:
                raise ConfigError(
                    f"amp_configs[{key!r}] is True and ['dtype'] is {other!r}; both name the 16-bit type. "
                    f"Leave dtype 'auto', or set {key} to False."
                )

    @property
    def is_pure(self) -> bool:
        """Whether everything but normalisation computes in 16 bit."""
        return self.use_pure_fp16 or self.use_pure_bf16


_TREATED = "fleet_amp_treated"
_SMALLEST = torch.finfo(torch.float16).smallest_normal


class Amp(Strategy):
    """Runs the forward pass under autocast and scales the backward signal where float16 needs it."""

    name = "amp"
    meaning = "Mixed precision: compute in float16 or bfloat16 where that is safe, with dynamic loss scaling."
    stage = Stage.STEP
    Config = AmpConfig
    in_ps_job = True
    conflicts = {
        "dgc": "dgc keeps unsent gradients from step to step, and amp would scale them differently at each step"
    }
    in_place = True
    model_effect = "runs the forward pass in 16 bit where that is safe; results leave in float32"
    optimizer_effect = "with float16: skips a step that has an inf or nan on any worker, and adapts the loss scale"

    guide = Guide(
        when="The device multiplies matrices faster in 16 bit: GPUs with tensor cores, CPUs with bfloat16 units. "
        "Activations take half the memory. bfloat16 where the device has it needs no loss scale.",
        cost="Three (float16) or two (bfloat16) decimal digits. With float16 one look at the gradients and a wait for "
        "the device per step.",
        formula="float16, scale S: dL/dw = (1/S) * backward(S * dL/dy); S *= incr_ratio after incr_every_n_steps good "
        "steps in a row, S = max(1, S * decr_ratio) after decr_every_n_nan_or_inf bad ones, which are skipped",
        source="Micikevicius et al., 2018, Mixed Precision Training, arXiv 1710.03740",
        example={"amp": True, "amp_configs": {"dtype": "float16"}},
    )

    def __init__(self, config: Any, job: Job) -> None:
        """Chooses the type for the device of ``job`` and starts with the initial loss scale."""
        super().__init__(config, job)
        self.dtype = narrow_type(config, job.device.type)
        self.region = Region(job.device.type, self.dtype)
        self.scale = LossScale(config, enabled=self.dtype == torch.float16)
        self._optimizers: list[AmpOptimizer] = []
        self._signal = Signal(self.scale, self._optimizers) if self.scale.in_use else None
        self._plans: dict[nn.Module, tuple[dict[str, Treatment], bool]] = {}

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when sharding would divide parameters of different types."""
        config: AmpConfig = options["amp_configs"]
        hybrid = options["hybrid_configs"]
        divides = options["sharding_configs"].stage == 3
        sharded = world_size > 1 and (options["sharding"] or hybrid.sharding_degree > 1)
        if not (sharded and divides and config.is_pure and config.use_optimizer_fp16):
            return None
        return (
            "amp_configs['use_optimizer_fp16'] keeps norm layers in float32 and others in 16 bit, and sharding "
            "in stage 3 divides parameters of one type only. Set use_optimizer_fp16 to False, or "
            "sharding_configs['stage'] to 1 or 2."
        )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns remarks on keys that the other keys leave without effect."""
        config: AmpConfig = options["amp_configs"]
        return tuple(
            f"amp_configs[{key!r}] changes nothing: {why}."
            for keys, why in _without_effect(config)
            for key in keys
            if key in config.changes()
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError for an optimizer that computes gradients itself, several times for one step."""
        if self.scale.in_use and isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "amp scales float16 gradients and skips steps that overflow; torch.optim.LBFGS runs backward inside "
                "its step. Use another optimizer, or amp_configs = {'dtype': 'bfloat16'}."
            )
        no_masters = self.config.use_optimizer_fp16 and self.config.use_pure_fp16
        for group in optimizer.param_groups if no_masters else ():
            if 0 < group.get("eps", 1) < _SMALLEST:
                raise ConfigError(
                    f"amp_configs['use_optimizer_fp16'] updates in float16, where the optimizer's eps {group['eps']!r} "
                    f"is 0 or nearly so, and steps divide by it. Give it an eps of at least {_SMALLEST:.0e}, "
                    "or set use_optimizer_fp16 to False."
                )

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when a list names nothing in ``model``, or asks for a type that a module cannot have."""
        if self.job.axes.size("pp") > 1:
            check_stages(model, self.config, self.job)
        treatments = plan_treatments(model, self.config, self.dtype, pure=self.config.is_pure)
        recurrent = [name for name, m in model.named_modules() if isinstance(m, nn.RNNBase) and name in treatments]
        if self.config.use_optimizer_fp16 and self._is_guarded(model) and recurrent:
            raise ConfigError(
                f"amp_configs['use_optimizer_fp16'] keeps {recurrent[0]!r} in 16 bit, and outside fp16_guard() it "
                "would compute in float32, which torch's recurrent modules cannot. Set use_fp16_guard or "
                "use_optimizer_fp16 to False."
            )

    def prepare_model(self, model: nn.Module) -> None:
        """Puts the treatment of each module around its forward; drops the master weights if asked to."""
        treatments = plan_treatments(model, self.config, self.dtype, pure=self.config.is_pure)
        self._plans[model] = treatments, self._is_guarded(model)
        self._treat(model, treatments)
        if self.config.use_optimizer_fp16 and self.config.is_pure:
            for name, treatment in treatments.items():
                if self.dtype in (treatment.inputs, treatment.outputs):
                    for parameter in model.get_submodule(name)._parameters.values():
                        if parameter is not None and parameter.dtype == torch.float32:
                            parameter.data = parameter.data.to(self.dtype)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model`` under autocast."""
        root, (treatments, guarded) = self._plans.popitem()
        if all(module is not root for module in model.modules()):
            root = user_module(model)  # another strategy has replaced the user's module
        self._treat(root, treatments)  # replaced submodules have no treatment yet
        own = treatments.get("")
        # Sharding gathers the module's own parameters in a hook of the module, so the treatment that converts them
        # must run inside it.
        if own is not None and any(is_part(p) for p in root._parameters.values()):
            self._treated(root, own)
            own = None
        if self._signal is not None:
            self._signal.watch(root.parameters())
            exchange = exchange_in(model)
            if exchange is not None:
                exchange.wire_factor = lambda: self.scale.factor
        return AmpModel(
            model, root, own, self.region, self.scale, self._signal,
            pure=self.config.is_pure, guarded=guarded,
        )  # fmt: skip

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns an optimizer that skips a step with an inf or nan."""
        return AmpOptimizer(optimizer, self.scale, self.job, is_pure=self.config.is_pure, others=self._optimizers)

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Unscales the gradients of new parameters too; raises ConfigError where modules would need copies."""
        if added and self.config.is_pure:
            raise ConfigError(
                f"{next(iter(added))!r} was added to the model after distributed_model(), and pure 16-bit amp prepares "
                "the modules that are there then. Complete the model first, then call distributed_model()."
            )
        if self._signal is not None:
            self._signal.watch(p for p in model.parameters() if not is_part(p))

    def use_scaler(self, scaler: Any) -> None:
        """Leaves scaling to ``scaler`` from now on."""
        self.scale.give_way(scaler)

    def guard(self) -> AbstractContextManager[Any]:
        """Returns the context of ``fleet.fp16_guard()``."""
        return guard(self.region, pure=self.config.is_pure and self.config.use_fp16_guard)

    def close(self) -> None:
        """Removes the hooks; the models compute in float32 again."""
        self.region.off = True
        self.scale.in_use = False
        self._optimizers.clear()
        if self._signal is not None:
            self._signal.close()

    def _is_guarded(self, model: nn.Module) -> bool:
        return bool(self.config.is_pure and self.config.use_fp16_guard and has_guard(model))

    def _treat(self, root: nn.Module, treatments: dict[str, Treatment]) -> None:
        for name, module in root.named_modules():
            if name and name in treatments:
                self._treated(module, treatments[name])

    def _treated(self, module: nn.Module, treatment: Treatment) -> None:
        """Gives ``module`` a treated forward, unless it has one; other strategies may wrap it."""
        found = module.__dict__.get(_TREATED)
        if not isinstance(found, TreatedForward) or found.region is not self.region:
            module.__dict__["forward"] = module.__dict__[_TREATED] = TreatedForward(module, treatment, self.region)


def user_module(chain: nn.Module) -> nn.Module:
    """Returns the innermost module of ``chain``: inside data parallel and the compiler's module."""
    while True:
        inner = chain._modules.get("_orig_mod") or chain.__dict__.get("_orig_mod")
        if inner is None and isinstance(chain, DistributedDataParallel):
            inner = chain.module
        if not isinstance(inner, nn.Module):
            return chain
        chain = inner


def _without_effect(config: AmpConfig) -> list[tuple[tuple[str, ...], str]]:
    moving = ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")
    found: list[tuple[tuple[str, ...], str]] = []
    if config.use_pure_bf16 or config.dtype == "bfloat16":
        why = "bfloat16 has the range of float32, and nothing is scaled"
        found.append((("init_loss_scaling", *moving, "use_dynamic_loss_scaling"), why))
    elif not config.use_dynamic_loss_scaling:
        found.append((moving, "use_dynamic_loss_scaling is False, and the scale stays"))
    if not config.is_pure:
        found.append((("use_optimizer_fp16",), "the parameters are in float32 without use_pure_fp16 or use_pure_bf16"))
    return found
