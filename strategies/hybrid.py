"""hybrid_configs: the number of workers along each axis of the mesh, and the settings of each axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError
from fleet.job.axes import AXES, EXPERT_AXES
from fleet.strategies._declare.degrees import asked_degrees, degrees_or_none, plan_degrees, plan_experts
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import top_level

_REASON = "torch tunes NCCL for the whole process; set NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS"


def _knob(default: Any, meaning: str, **rules: Any) -> Any:
    return setting(default, meaning, no_meaning=_REASON, **rules)


@dataclass(frozen=True, kw_only=True)
class NcclConfig(Config, option="nccl_config"):
    """Tuning of one NCCL communicator; -1 and empty text leave the choice to NCCL."""

    commName: str = _knob("", "name of the communicator in NCCL's log")
    ll_buffsize: int = _knob(-1, "bytes of a buffer of the LL protocol", at_least=-1)
    ll128_buffsize: int = _knob(-1, "bytes of a buffer of the LL128 protocol", at_least=-1)
    simple_buffsize: int = _knob(-1, "bytes of a buffer of the Simple protocol", at_least=-1)
    buffsize_align: int = _knob(-1, "alignment of the buffers in bytes", at_least=-1)
    nchannels: int = _knob(-1, "channels of the communicator", at_least=-1)
    algoStr: str = _knob("", "algorithm: Ring or Tree")
    protoStr: str = _knob("", "protocol: LL, LL128 or Simple")


@dataclass(frozen=True, kw_only=True)
class NcclOnlyConfig(Config, option="hybrid_configs[...]"):
    """Settings of one communicator."""

    nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator")


@dataclass(frozen=True, kw_only=True)
class NcclAndCheckConfig(Config, option="hybrid_configs[...]"):
    """Settings of a communicator and of the communicator that checks for inf and nan."""

    nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator")
    check_nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator that checks for inf and nan")


@dataclass(frozen=True, kw_only=True)
class NcclTwiceConfig(Config, option="hybrid_configs[...]"):
    """Settings of the communicators of the expert axis."""

    nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator")
    grad_nccl_config: NcclConfig = setting(NcclConfig, "tuning of the communicator of the gradients")


_COMPILER = "torch overlaps such pairs by itself when the model is compiled"
_TIMERS = "torch.profiler shows the same; nothing here measures by itself"
_FUSED = "torch groups parameters by module and fuses by itself"
_SYNC_MODES = "'broadcast' copies from the first worker of the axis; 'average' takes the mean"


@dataclass(frozen=True, kw_only=True)
class HybridMpConfig(Config, option="hybrid_configs['mp_configs']"):
    """Settings of the tensor-parallel axis; they act when mp_degree is above 1."""

    sync_param: bool = setting(True, "after each step make equal the parameters that every worker of the axis holds")
    sync_grad: bool = setting(False, "before each step make their gradients equal")
    sync_moment: bool = setting(False, "after each step make their optimizer state equal")
    sync_mode: str = setting("broadcast", _SYNC_MODES, choices=("broadcast", "average"))
    sync_param_name: tuple[str, ...] = setting([], "as the top-level option of that name; [] means its value")
    need_broadcast_data: bool = setting(
        True,
        "copy the inputs of forward from the first worker of the axis, and warn where they differed; False raises then",
    )
    mp_async_allreduce: bool = setting(False, "overlap gradient all-reduce and product", no_meaning=_COMPILER)
    mp_fused_linear_param_grad_add: bool = setting(False, "fuse gradient product and sum", no_meaning=_COMPILER)
    sp_async_reduce_scatter: bool = setting(False, "overlap reduce-scatter and product", no_meaning=_COMPILER)
    mp_skip_c_identity: bool = setting(
        False, "leave an operator out that does nothing forward", no_meaning="torch has no such operator"
    )
    recompute_allgather: bool = setting(
        False, "gather the input of ColumnSequenceParallelLinear again in backward in place of keeping it"
    )


@dataclass(frozen=True, kw_only=True)
class HybridPpConfig(Config, option="hybrid_configs['pp_configs']"):
    """Settings of the pipeline axis; they act when pp_degree is above 1."""

    dp_comm_overlap: bool = setting(False, "average over copies during the last micro-batch, not after it")
    sharding_comm_overlap: bool = setting(False, "the same, for copies along the sharding axis")
    delay_scale_loss: bool = setting(False, "divide the gradients once per step and not the losses")
    enable_timer: bool = setting(False, "measure the phases of a step", no_meaning=_TIMERS)
    profiling: bool = setting(False, "write a profile of the schedule", no_meaning=_TIMERS)
    release_gradients: bool = setting(
        False, "free the gradients between steps", no_meaning="train_batch() frees them after each step already"
    )
    overlap_p2p_comm: bool = setting(
        False, "send and receive while computing", no_meaning="every transfer runs beside the computation already"
    )
    clear_every_step_cache: bool = setting(False, "give cached device memory back after each step")
    use_batch_p2p_comm: bool = setting(
        True,
        "send and receive in one batch of operations",
        no_meaning="each direction has a stream of its own, so transfers need no batch that keeps them apart",
    )
    best_unbalanced_scheduler: bool = setting(
        False,
        "schedule unequal stages",
        refused="with few micro-batches it saves memory of an interleaved order that runs all forwards first here; "
        "cut unequal layers with seg_method or pipeline_configs['split']",
    )
    forward_backward_overlap_scheduler: bool = setting(
        False,
        "run the forward of one micro-batch inside the backward of another",
        refused="a layer would have to be written as a list of parts that take turns, and torch's layers are not",
    )
    enable_offload_queue: bool = setting(
        False,
        "keep activations in host memory",
        refused="activations belong to autograd; recompute_ctx={'offload': True} keeps inputs of layers in host memory",
    )
    enable_dynamic_shape: bool = setting(
        False, "send the shape with every activation, for shapes that depend on values and not on those of the data"
    )
    use_dualpipev: bool = setting(
        False, "use the DualPipeV schedule", refused="its stages hold two ends of the model; use 1F1B or chunks"
    )
    coll_nccl_config: NcclConfig = setting(NcclConfig, "NCCL settings of collectives")
    p2p_nccl_config: NcclConfig = setting(NcclConfig, "NCCL settings of transfers between stages")
    shared_nccl_config: NcclConfig = setting(NcclConfig, "NCCL settings of shared parameters")
    sync_param: bool = setting(False, "after each step make equal the parameters that stages share")
    sync_moment: bool = setting(False, "after each step make their optimizer state equal")
    sync_mode: str = setting("broadcast", _SYNC_MODES, choices=("broadcast", "average"))


@dataclass(frozen=True, kw_only=True)
class HybridShardingConfig(Config, option="hybrid_configs['sharding_configs']"):
    """Settings of the sharding axis; they act when sharding_degree is above 1."""

    tensor_fusion: bool = setting(False, "keep parameters and gradients in flat buffers", no_meaning=_FUSED)
    accumulate_steps: int = setting(1, "backward passes per exchange, and per step()", at_least=1)
    comm_overlap: bool = setting(False, "exchange while backward runs; always so here")
    split_param: bool = setting(
        False,
        "True divides gradients and state inside each tensor, as stage 2; False in stage 1 gives workers whole tensors",
    )
    fuse_optimizer: bool = setting(True, "update all parameters in one kernel", no_meaning=_FUSED)
    enable_fuse_optimizer_states: bool = setting(False, "keep the states in one buffer", no_meaning=_FUSED)
    use_reduce_avg: bool = setting(True, "average in the reduction; False sums and divides afterwards")
    comm_buffer_size_MB: int = setting(256, "largest unit or buffer, in MiB", at_least=1)
    release_gradients: bool = setting(
        False, "free gradient buffers after the exchange", no_meaning="zero_grad() frees the gradients already"
    )
    free_grads_in_comm: bool = setting(
        False, "free whole gradients once reduced", no_meaning="torch frees them once they are reduced"
    )
    offload_opt_buffer_size: int = setting(
        -1,
        "GB of optimizer state in host memory; -1 is none",
        at_least=-1,
        no_meaning="torch moves all of the optimizer state or none; use sharding_configs['optimize_offload']",
    )
    nccl_config: NcclConfig = setting(NcclConfig, "NCCL settings of the axis")
    check_nccl_config: NcclConfig = setting(NcclConfig, "NCCL settings of the check for inf and nan")


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
        1, "sharding_degree / cp_degree, with ep_degree above 1; 1 leaves it to be computed", at_least=1
    )
    enable_optimizer_timer: bool = setting(False, "measure the phases of step()", no_meaning=_TIMERS)
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
        list(AXES),
        "Axes of the mesh from the outermost to the innermost; ranks are neighbours along the last.",
        shows="hybrid_configs.order",
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

    @classmethod
    def notes(cls, options: Any, world_size: int) -> tuple[str, ...]:
        """Returns a remark for each key of the settings of an axis whose degree is 1."""
        degrees = degrees_or_none(options, world_size) or {}
        hybrid: HybridConfig = options["hybrid_configs"]
        idle = [axis for axis, degree in degrees.items() if degree == 1]
        settings = {axis: getattr(hybrid, f"{axis}_configs") for axis in idle}
        return tuple(
            f"{config.label(key)} was set and changes nothing: {axis}_degree is 1."
            for axis, config in settings.items()
            for key in config.changes()
            if config.rule(key).outcome == "implemented" and not isinstance(getattr(config, key), Config)
        )


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
    degrees = degrees_or_none(options, world_size)
    if degrees is None:
        return None
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
    needed = set(AXES) - {"sep", "cp"}
    known = {*AXES, *EXPERT_AXES}
    if len(set(order)) < len(order) or not needed <= set(order) <= known:
        names = ", ".join(AXES)
        raise ConfigError(f"{label} is {list(order)!r}; it names each of {names} once ('sep', 'cp' may be left out).")
    if [axis for axis in order if axis in EXPERT_AXES] == ["ep", "moe_sharding"]:
        raise ConfigError(f"{label} is {list(order)!r}; 'moe_sharding' stands before 'ep'.")
