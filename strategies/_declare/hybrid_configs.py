"""The settings of the tensor-parallel, pipeline and sharding axes inside hybrid_configs."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.nccl import NcclConfig

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
        False, "True divides inside each tensor, as stage 2 does; False in stage 1 gives whole tensors to workers"
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
