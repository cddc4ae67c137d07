"""build_strategy and execution_strategy: switches of Paddle's graph passes and executor.

Two of them act here. ``fuse_all_optimizer_ops`` makes torch's own optimizer update all parameters of a group in one
kernel (its ``fused`` form, else its ``foreach`` form); in Paddle it and ``fuse_all_reduce_ops`` excluded each other,
here they are independent. ``allow_cuda_graph_capture`` makes to_static record CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer

from fleet.errors import ConfigError
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import REGISTRY, Guide, Stage, Strategy, top_level
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, innermost, loss_of

_FUSION = "torch.compile fuses what it can; turn to_static on"
_MEMORY = "torch's autograd and allocator decide it"
_SCHEDULE = "torch runs operators as the script calls them"
_EXECUTOR = "torch has no graph executor"
_CHANNELS = "NCCL uses several channels by itself"
_ROLE = "fleet.init knows it from the launcher or the role maker"


@dataclass(frozen=True, kw_only=True)
class BuildStrategyConfig(Config, option="build_strategy"):
    """Which passes rewrite the graph."""

    fuse_elewise_add_act_ops: bool = setting(False, "fuse addition and activation", no_meaning=_FUSION)
    fuse_bn_act_ops: bool = setting(False, "fuse batch norm and activation", no_meaning=_FUSION)
    fuse_relu_depthwise_conv: bool = setting(False, "fuse relu and depthwise convolution", no_meaning=_FUSION)
    fuse_broadcast_ops: bool = setting(
        False, "fuse broadcasts", no_meaning="torch broadcasts parameters in buckets already"
    )
    fuse_all_optimizer_ops: bool = setting(False, "update all parameters in one kernel (fused, else foreach)")
    enable_inplace: bool = setting(False, "reuse memory of inputs for outputs", no_meaning=_MEMORY)
    enable_backward_optimizer_op_deps: bool = setting(True, "update only after backward", no_meaning=_SCHEDULE)
    cache_runtime_context: bool = setting(False, "keep the context of operators", no_meaning=_SCHEDULE)
    fuse_bn_add_act_ops: bool = setting(True, "fuse batch norm, addition and activation", no_meaning=_FUSION)
    enable_auto_fusion: bool = setting(False, "generate fused kernels", no_meaning=_FUSION)
    enable_addto: bool = setting(False, "add gradients in place", no_meaning=_MEMORY)
    allow_cuda_graph_capture: bool = setting(False, "record and replay CUDA graphs; needs to_static")
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
    # The rest of Paddle's class; where DistributedStrategy has the same option, write that one.
    fuse_adamw: bool = setting(False, "fuse AdamW", no_meaning="set fuse_all_optimizer_ops, which takes AdamW too")
    fuse_all_reduce_ops: bool = setting(
        True, "send gradients in buckets", refused="write strategy.fuse_all_reduce_ops = False"
    )
    sync_batch_norm: bool = setting(
        False, "batch norm over all workers", refused="write strategy.sync_batch_norm = True"
    )
    use_hierarchical_allreduce: bool = setting(
        False, "sum inside each node first", refused="write strategy.use_hierarchical_allreduce = True"
    )
    hierarchical_allreduce_inter_nranks: int = setting(
        1, "workers in an inner group", at_least=1, refused="write strategy.hierarchical_allreduce_inter_nranks"
    )
    gradient_scale_strategy: int = setting(
        0,
        "0: divide by the number of workers; 1: do not; 2: the script does",
        choices=(0, 1, 2),
        refused="write strategy.gradient_scale_configs = {'scale_strategy': 'sum'} or 'customized'",
    )
    async_mode: bool = setting(
        False, "train asynchronously", refused="write strategy.a_sync = True, for a job with parameter servers"
    )
    nccl_comm_num: int = setting(1, "communicators that take turns", at_least=1, no_meaning=_CHANNELS)
    bkcl_comm_num: int = setting(1, "communicators that take turns", at_least=1, no_meaning=_CHANNELS)
    num_trainers: int = setting(1, "number of workers", at_least=1, no_meaning=_ROLE)
    trainer_id: int = setting(0, "rank", at_least=0, no_meaning=_ROLE)
    trainers_endpoints: tuple[str, ...] = setting([], "addresses of the workers", no_meaning=_ROLE)
    is_distribution: bool = setting(False, "train on several machines", no_meaning=_ROLE)
    memory_optimize: bool = setting(False, "reuse memory of what is not needed any more", no_meaning=_MEMORY)
    enable_sequential_execution: bool = setting(False, "run in the order of the program", no_meaning=_SCHEDULE)
    fix_op_run_order: bool = setting(False, "run in a fixed order", no_meaning=_SCHEDULE)
    remove_unnecessary_lock: bool = setting(True, "leave a lock of the executor out", no_meaning=_EXECUTOR)
    cache_expected_kernel: bool = setting(True, "keep the choice of kernels", no_meaning=_SCHEDULE)
    mkldnn_enabled_op_types: tuple[str, ...] = setting(
        [], "operators that oneDNN runs", no_meaning="torch uses oneDNN wherever it can"
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionStrategyConfig(Config, option="execution_strategy"):
    """How the executor runs the graph."""

    num_threads: int = setting(1, "threads of the executor", at_least=1, no_meaning=_EXECUTOR)
    num_iteration_per_drop_scope: int = setting(
        10, "steps after which temporary variables are dropped", at_least=1, no_meaning=_EXECUTOR
    )
    num_iteration_per_run: int = setting(1, "steps per call of the executor", at_least=1, no_meaning=_EXECUTOR)
    use_thread_barrier: bool = setting(False, "let threads wait for each other", no_meaning=_EXECUTOR)
    allow_op_delay: bool = setting(False, "let operators wait", no_meaning=_EXECUTOR)
    use_experimental_executor: bool = setting(False, "use another executor", no_meaning=_EXECUTOR)
    use_cuda: bool = setting(False, "run on GPUs", no_meaning="fleet.init chooses the device of each worker")


@top_level
@dataclass(frozen=True, kw_only=True)
class GraphSettings(Config):
    """The two options that Fleet models as objects."""

    build_strategy: BuildStrategyConfig = setting(BuildStrategyConfig, "Which passes rewrite the graph.")
    execution_strategy: ExecutionStrategyConfig = setting(ExecutionStrategyConfig, "How the executor runs the graph.")

    @classmethod
    def problem(cls, options: Any, world_size: int) -> str | None:
        """Returns the reason when CUDA graphs are asked for and to_static cannot record them."""
        if not options["build_strategy"].allow_cuda_graph_capture:
            return None
        if not options["to_static"]:
            return (
                "build_strategy.allow_cuda_graph_capture is True and to_static is off; torch's compiler records the "
                "graphs. Set to_static to True as well."
            )
        mode = options["to_static_configs"].mode
        if mode == "max-autotune-no-cudagraphs":
            return (
                f"build_strategy.allow_cuda_graph_capture is True and to_static_configs['mode'] is {mode!r}, which "
                "records none. Change one of them."
            )
        return None


class FusedUpdate(Strategy):
    """Sets the ``fused`` or ``foreach`` form of the user's optimizer; chosen by ``fuse_all_optimizer_ops``."""

    name = "build_strategy"
    meaning = "Update all parameters in one kernel."
    stage = Stage.UPDATE
    default = None
    optimizer_effect = "updates all parameters of a group in one kernel, where the optimizer has such a form"
    guide = Guide(
        when="A model of many small parameters, whose update is bound by the number of kernels.",
        cost="Nothing; sums may round in another order, so numbers may differ in the last digit.",
        source="torch.optim, fused and foreach",
        example={"build_strategy": {"fuse_all_optimizer_ops": True}},
    )

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether ``fuse_all_optimizer_ops`` is on."""
        return bool(options["build_strategy"].fuse_all_optimizer_ops)

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that lars and lamb bring their own update."""
        return tuple(
            f"build_strategy.fuse_all_optimizer_ops changes nothing while '{name}' is on: its update takes all "
            "parameters together anyway."
            for name in ("lars", "lamb")
            if options[name]
        )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError when the optimizer has no such form, or was told to use none."""
        option = "build_strategy.fuse_all_optimizer_ops"
        key = self._form_of(optimizer)
        if key is None:
            raise ConfigError(
                f"{option} is True, and {type(optimizer).__name__} has neither a fused nor a foreach form. Use an "
                "optimizer of torch.optim that has one, or set it to False."
            )
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                raise ConfigError(f"{option} is True, and the optimizer is differentiable, which needs single updates.")
            if group[key] is False:
                raise ConfigError(
                    f"{option} is True, and the optimizer was made with {key}=False. Omit {key}, or set the "
                    "option to False."
                )

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer whose groups use the fused or foreach form, also after a state was loaded."""
        return FusedOptimizer(optimizer, self._form_of(optimizer))

    def _form_of(self, optimizer: Optimizer) -> str | None:
        # torch's fused kernels of SGD and Adagrad do not take parameters that sharding has divided (DTensors), and
        # that of Adagrad takes those of a GPU from torch 2.13 on.
        if REGISTRY["sharding"].chosen(self.job.options):
            return form_of(optimizer, ())
        return form_of(optimizer, (SGD, Adam) if self.job.device.type == "cuda" else (SGD, Adam, Adagrad))


class FusedOptimizer(OptimizerWrapper):
    """Keeps the optimizer inside in the form ``key``, ``"fused"`` or ``"foreach"``."""

    def __init__(self, optimizer: Optimizer, key: str | None) -> None:
        super().__init__(optimizer)
        self._key = key
        self.note_groups()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates in one kernel; returns the closure's loss."""
        loss = loss_of(closure)
        # torch's fused SGD takes the momentum of all parameters or of none; its foreach form makes missing ones.
        late = [group for group in self.param_groups if group.get("fused") and self._lacks_momentum(group)]
        for group in late:
            group.update(fused=None, foreach=True)
        try:
            super().step()
        finally:
            for group in late:
                group.update(fused=True, foreach=None)
        return loss

    def _lacks_momentum(self, group: dict[str, Any]) -> bool:
        """Returns whether some of the parameters to update, and not all, have no momentum yet."""
        if not group.get("momentum"):
            return False
        updated = (p for p in group["params"] if p.grad is not None)
        return len({self.state.get(p, {}).get("momentum_buffer") is None for p in updated}) > 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; a state that was saved in another form continues in this form."""
        super().load_state_dict(state_dict)
        self.note_groups()

    def note_groups(self) -> None:
        """Gives every parameter group the form."""
        for settings in (self.defaults, *self.param_groups):
            settings["foreach"] = self._key == "foreach" or None
            if "fused" in settings:
                settings["fused"] = self._key == "fused" or None
        if self._key != "fused":
            return
        for parameter, state in self.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                # The kernel counts steps on the device, in float32; the other forms count on the host.
                state["step"] = step.to(device=parameter.device, dtype=torch.float32)


def form_of(optimizer: Optimizer, kinds: tuple[type[Optimizer], ...] = (SGD, Adam, Adagrad)) -> str | None:
    """Returns ``"fused"`` or ``"foreach"``, the better form that ``optimizer`` has, or ``None``.

    A subclass of torch's optimizer counts when it kept torch's ``step``. Only ``kinds`` have a fused form.
    """
    inner = innermost(optimizer)
    fusible = any(_steps_like(inner, kind) for kind in kinds)
    groups = inner.param_groups
    dense = all(p.is_floating_point() for group in groups for p in group["params"])
    if fusible and dense and all("fused" in group for group in groups):
        return "fused"
    return "foreach" if all("foreach" in group for group in groups) else None


def _steps_like(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    # torch puts its profiling around the step() of a class when it first makes one; the original is inside.
    return isinstance(optimizer, kind) and unwrap(type(optimizer).step) is unwrap(kind.step)
