"""hybrid_configs: how many workers lie along each axis of the mesh, and the settings of each axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError
from fleet.job.axes import AXES, EXPERT_AXES
from fleet.strategies._declare.degrees import asked_degrees, plan_degrees, plan_experts
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.hybrid_configs import HybridMpConfig, HybridPpConfig, HybridShardingConfig
from fleet.strategies._declare.nccl import NcclAndCheckConfig, NcclOnlyConfig, NcclTwiceConfig
from fleet.strategies._declare.strategy import top_level

_WITHOUT_TIMERS = "torch.profiler shows the same; nothing here measures by itself"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(Config, option="hybrid_configs"):
    """Degrees by axis and the settings of each axis; the product of the degrees is the number of workers."""

    dp_degree: int = setting(
        -1,
        "copies of the model; -1 takes what the other degrees leave. With parameter servers the number of workers "
        "makes the job hybrid: they average dense gradients among themselves",
        at_least=-1,
    )
    mp_degree: int = setting(1, "workers that share the weights of a layer", at_least=1)
    pp_degree: int = setting(1, "stages of the pipeline", at_least=1)
    sharding_degree: int = setting(1, "workers that share one copy of the state; above 1 turns sharding on", at_least=1)
    sep_degree: int = setting(1, "workers that share a sequence by segments", at_least=1)
    cp_degree: int = setting(
        1,
        "workers that share a sequence by ring attention; an axis of its own, and with ep_degree above 1 a part of the "
        "sharding axis",
        at_least=1,
    )
    ep_degree: int = setting(
        1,
        "workers among which the experts of a MoELayer are divided; above 1, dp_degree and sep_degree are 1 and "
        "moe_sharding_degree * ep_degree is sharding_degree * mp_degree",
        at_least=1,
    )
    moe_sharding_degree: int = setting(1, "workers that hold the same experts, with ep_degree above 1", at_least=1)
    cp_sharding_degree: int = setting(
        1,
        "sharding_degree / cp_degree, with ep_degree above 1; 1 leaves it to be computed",
        at_least=1,
    )
    enable_optimizer_timer: bool = setting(False, "measure the phases of step()", no_meaning=_WITHOUT_TIMERS)
    split_norm_comm: bool = setting(
        False,
        "sum the gradient norm group by group",
        no_meaning="it only splits one small all-reduce of the gradient norm into several",
    )
    order: tuple[str, ...] = setting([], "axes from the outermost to the innermost; [] means hybrid_parallel_order")
    mp_configs: HybridMpConfig = setting(HybridMpConfig, "settings of the tensor-parallel axis")
    pp_configs: HybridPpConfig = setting(HybridPpConfig, "settings of the pipeline axis")
    sharding_configs: HybridShardingConfig = setting(HybridShardingConfig, "settings of the sharding axis")
    default_comm_group_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of the default group")
    dp_configs: NcclAndCheckConfig = setting(NcclAndCheckConfig, "NCCL settings of the data-parallel axis")
    sep_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of the segment axis")
    dp_sep_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of data-parallel and segment axis")
    pp_tp_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of pipeline and tensor-parallel axis")
    ep_configs: NcclTwiceConfig = setting(NcclTwiceConfig, "NCCL settings of the expert axis")
    moe_sharding_configs: NcclAndCheckConfig = setting(NcclAndCheckConfig, "NCCL settings of the expert sharding axis")
    cp_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of the context axis")
    cp_sharding_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of context and sharding axis")
    dp_cp_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of data-parallel and context axis")
    cp_mp_configs: NcclOnlyConfig = setting(NcclOnlyConfig, "NCCL settings of context and tensor-parallel axis")

    def __post_init__(self) -> None:
        """Checks each key, that dp_degree is -1 or positive, and that the order names every axis once."""
        super().__post_init__()
        if self.dp_degree == 0:
            raise ConfigError("hybrid_configs['dp_degree'] is 0; it must be -1 or at least 1.")
        if self.order:
            check_order("hybrid_configs['order']", self.order)


@top_level
@dataclass(frozen=True, kw_only=True)
class HybridSettings(Config):
    """The options that lay the workers out as a mesh."""

    in_ps_job = False
    hybrid_configs: HybridConfig = setting(HybridConfig, "Number of workers along each axis of the mesh.")
    hybrid_parallel_order: tuple[str, ...] = setting(
        list(AXES), "Axes of the mesh from the outermost to the innermost; ranks are neighbours along the last."
    )

    def __post_init__(self) -> None:
        """Checks each option, and that the order names every axis once."""
        super().__post_init__()
        check_order("DistributedStrategy.hybrid_parallel_order", self.hybrid_parallel_order)

    @classmethod
    def problem(cls, options: Any, world_size: int) -> str | None:
        """Returns the reason when the degrees do not multiply to ``world_size``, or two orders disagree."""
        config: HybridConfig = options["hybrid_configs"]
        order = options["hybrid_parallel_order"]
        if config.order and options.is_set("hybrid_parallel_order") and config.order != order:
            return (
                f"hybrid_configs['order'] is {list(config.order)!r} and hybrid_parallel_order is {list(order)!r}. "
                f"Set one of them."
            )
        option, degrees = asked_degrees(options)
        reason = _problem_of_overlap(options, world_size)
        if reason is not None:
            return reason
        try:
            planned = plan_degrees(option, degrees, world_size)
        except ConfigError as error:
            return str(error) if option == "hybrid_configs" else None  # 'sharding' is on and says it
        return _problem_of_experts(options, planned)


def _problem_of_experts(options: Any, planned: Mapping[str, int]) -> str | None:
    """Returns the reason when the expert grid does not fit, or an option takes every worker to hold every parameter."""
    try:
        plan_experts(options, planned)
    except ConfigError as error:
        return str(error)
    ep = options["hybrid_configs"].ep_degree
    others = ("localsgd", "adaptive_localsgd", "dgc")
    if ep > 1 and (on := [name for name in others if options[name]]):
        return (
            f"hybrid_configs['ep_degree'] is {ep} and {on[0]!r} is on, which exchanges whole models among workers that "
            f"hold different experts. Turn {on[0]} off, or set ep_degree to 1."
        )
    return None


def _problem_of_overlap(options: Any, world_size: int) -> str | None:
    """Returns the reason when the exchange of a pipeline is to overlap, and there is no pipeline or no exchange."""
    config: HybridPpConfig = options["hybrid_configs"].pp_configs
    on = {"dp": config.dp_comm_overlap, "sharding": config.sharding_comm_overlap}
    try:
        degrees = plan_degrees(*asked_degrees(options), world_size)
    except ConfigError:
        return None  # said elsewhere
    for axis in (axis for axis, is_on in on.items() if is_on):
        low = next((name for name in ("pp", axis) if degrees[name] == 1), None)
        if low is not None:
            return (
                f"hybrid_configs['pp_configs']['{axis}_comm_overlap'] is True and {low}_degree is 1; it hides the "
                f"exchange over {axis} behind the last micro-batch of a pipeline. Turn it off, or raise {low}_degree."
            )
    return None


def check_order(label: str, order: tuple[str, ...]) -> None:
    """Raises ConfigError unless ``order`` names every axis exactly once; some may be left out.

    Only the order of the expert axes among themselves could matter, and it is fixed, as in Fleet.
    """
    needed, known = set(AXES) - {"sep", "cp"}, {*AXES, *EXPERT_AXES}
    if len(set(order)) < len(order) or not needed <= set(order) <= known:
        names = ", ".join(AXES)
        raise ConfigError(f"{label} is {list(order)!r}; it names each of {names} once ('sep', 'cp' may be left out).")
    if [axis for axis in order if axis in EXPERT_AXES] == ["ep", "moe_sharding"]:
        raise ConfigError(f"{label} is {list(order)!r}; 'moe_sharding' stands before 'ep'.")
