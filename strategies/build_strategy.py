"""build_strategy and execution_strategy: switches of Paddle's graph passes and executor."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._base import NOT_YET, top_level
from fleet.strategies._config import Config, setting

_FUSION = "torch.compile fuses what it can; turn to_static on"
_MEMORY = "torch's autograd and allocator decide it"
_SCHEDULE = "torch runs operators as the script calls them"
_EXECUTOR = "torch has no graph executor"


@dataclass(frozen=True, kw_only=True)
class BuildStrategyConfig(Config, option="build_strategy"):
    """Which passes rewrite the graph."""

    fuse_elewise_add_act_ops: bool = setting(False, "fuse addition and activation", no_meaning=_FUSION)
    fuse_bn_act_ops: bool = setting(False, "fuse batch norm and activation", no_meaning=_FUSION)
    fuse_relu_depthwise_conv: bool = setting(False, "fuse relu and depthwise convolution", no_meaning=_FUSION)
    fuse_broadcast_ops: bool = setting(
        False, "fuse broadcasts", no_meaning="torch broadcasts parameters in buckets already"
    )
    fuse_all_optimizer_ops: bool = setting(False, "update all parameters in one kernel", refused=NOT_YET)
    enable_inplace: bool = setting(False, "reuse memory of inputs for outputs", no_meaning=_MEMORY)
    enable_backward_optimizer_op_deps: bool = setting(True, "update only after backward", no_meaning=_SCHEDULE)
    cache_runtime_context: bool = setting(False, "keep the context of operators", no_meaning=_SCHEDULE)
    fuse_bn_add_act_ops: bool = setting(True, "fuse batch norm, addition and activation", no_meaning=_FUSION)
    enable_auto_fusion: bool = setting(False, "generate fused kernels", no_meaning=_FUSION)
    enable_addto: bool = setting(False, "add gradients in place", no_meaning=_MEMORY)
    allow_cuda_graph_capture: bool = setting(False, "record and replay CUDA graphs", refused=NOT_YET)
    reduce_strategy: int = setting(
        0,
        "0: all-reduce gradients; 1: reduce each to one worker",
        choices=(0, 1),
        no_meaning="gradients are all-reduced; to divide the update among workers turn sharding on",
    )
    fuse_gemm_epilogue: bool = setting(False, "fuse matrix product and what follows", no_meaning=_FUSION)
    debug_graphviz_path: str = setting(
        "", "file to draw the graph into", no_meaning="there is no graph to draw; torch.export prints one"
    )
    fused_attention: bool = setting(
        False, "fuse attention", no_meaning="torch's scaled_dot_product_attention is fused already"
    )
    fused_feedforward: bool = setting(False, "fuse feed-forward blocks", no_meaning=_FUSION)
    fuse_dot_product_attention: bool = setting(
        False, "fuse dot-product attention", no_meaning="torch's scaled_dot_product_attention is fused already"
    )
    fuse_resunit: bool = setting(False, "fuse residual units", no_meaning=_FUSION)


@dataclass(frozen=True, kw_only=True)
class ExecutionStrategyConfig(Config, option="execution_strategy"):
    """How the executor runs the graph."""

    num_threads: int = setting(1, "threads of the executor", at_least=1, no_meaning=_EXECUTOR)
    num_iteration_per_drop_scope: int = setting(
        10, "steps after which temporary variables are dropped", at_least=1, no_meaning=_EXECUTOR
    )
    num_iteration_per_run: int = setting(1, "steps per call of the executor", at_least=1, no_meaning=_EXECUTOR)
    use_thread_barrier: bool = setting(False, "let threads wait for each other", no_meaning=_EXECUTOR)


@top_level
@dataclass(frozen=True, kw_only=True)
class GraphSettings(Config):
    """The two options that Fleet models as objects."""

    build_strategy: BuildStrategyConfig = setting(BuildStrategyConfig, "Which passes rewrite the graph.")
    execution_strategy: ExecutionStrategyConfig = setting(ExecutionStrategyConfig, "How the executor runs the graph.")
