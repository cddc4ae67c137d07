"""tensor_parallel: the weights of large layers are divided among workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._declare.degrees import degrees_or_none
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.optimizer_kinds import check_parts_of_model
from fleet.strategies._declare.strategy import Guide, Stage, StepCounter, top_level
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._shared.parameter_layout import layout_of, layouts_in, mark_parts
from fleet.strategies._shared.parts import local
from fleet.strategies._shared.random_streams import TRACKER

if TYPE_CHECKING:
    from fleet.job.job import Job
    from fleet.strategies.tensor_parallel.plan import ResolvedPlan

# Layers and checks are imported where a model is divided: every job imports this module, and most divide no layer.

_EVERY_NAME = ("embedding", "layer_norm", ".b_")  # Paddle's generated names, which torch's modules do not have


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(Config, option="tensor_parallel_configs"):
    """How many workers share a layer, and their random numbers."""

    tensor_parallel_degree: int = setting(1, "workers that share the weights of a layer", at_least=1)
    tensor_init_seed: int = setting(
        -1, "seed of the shared layers; -1 takes that of rank 0: torch.manual_seed's, else a random one", at_least=-1
    )
    plan: dict[str, Any] = setting(
        {},
        "how a plain model is divided: patterns of module names and styles ({'blocks.*.attn.[qkv]': 'column', "
        "'blocks.*.attn.o': 'row', 'wte': 'vocab'}), or 'auto' for a Hugging Face model's own",
    )

    def __post_init__(self) -> None:
        """Reads ``"auto"`` as a plan, too."""
        asked: object = self.plan
        if isinstance(asked, str):
            from fleet.strategies.tensor_parallel.plan import read_plan

            object.__setattr__(self, "plan", read_plan(asked))
        super().__post_init__()


@top_level
@dataclass(frozen=True, kw_only=True)
class TensorParallelSettings(Config, owner="tensor_parallel"):
    """Which parameters the workers of a layer keep equal."""

    sync_param_name: tuple[str, ...] = setting(
        list(_EVERY_NAME),
        "undivided parameters whose names, as in model.named_parameters(), contain one of these are kept equal as "
        "hybrid_configs['mp_configs'] asks; the default stands for all of them",
        shows="hybrid_configs.mp_configs.sync_param_name",
    )


class TensorParallel(StepCounter):
    """Divides the weights of layers among workers."""

    name = "tensor_parallel"
    meaning = "Divide the weights of large layers among workers."
    stage = Stage.MODULE
    Config = TensorParallelConfig
    conflicts = {
        "localsgd": "localsgd averages whole models, and these workers hold different parts of one",
        "adaptive_localsgd": "adaptive_localsgd averages whole models, and these workers hold different parts of one",
        "dgc": "dgc exchanges gradients of whole models, and these workers hold different parts of one",
    }
    model_effect = "keeps this worker's part of each divided layer"
    guide = Guide(
        when="A layer does not fit into the memory of one worker, or must be computed faster, and the workers of one "
        "machine have fast links.",
        cost="Per block of a transformer two sums of the activations forward and two backward, which wait for the "
        "network. The workers of the axis read the same rows: deal data out by fleet.data_rank() of "
        "fleet.data_replicas(). The example divides a plain model by a plan; the layers of fleet.meta_parallel are "
        "divided as they are made.",
        formula="y = f(x A) B with A divided by columns and B by rows: worker r computes f(x A_r) B_r, and their "
        "sum is y; parameters per worker = divided ones / mp + whole ones",
        source="Shoeybi et al., 2019, Megatron-LM, arXiv 1909.08053",
        example={
            "tensor_parallel": True,
            "hybrid_configs": {"mp_degree": 2},
            "tensor_parallel_configs": {"plan": {"head": "column_gather"}},
        },
    )

    def __init__(self, config: Any, job: Job) -> None:
        """Tells layers which workers share them, and seeds the random streams."""
        super().__init__(config, job)
        self._axes = job.axes
        self._resolved: ResolvedPlan | None = None
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        if job.axes.size("mp") > 1:
            from fleet.strategies.tensor_parallel.place import CurrentJob
            from fleet.strategies.tensor_parallel.streams import seed_streams

            CurrentJob.axes = job.axes
            CurrentJob.recompute_allgather = job.options["hybrid_configs"].mp_configs.recompute_allgather
            seed_streams(None if config.tensor_init_seed < 0 else config.tensor_init_seed, job.axes, job.device)

    def close(self) -> None:
        """Forgets the workers and the streams: layers that are made afterwards are whole."""
        if self._axes.size("mp") == 1:
            return
        from fleet.strategies.tensor_parallel.place import CurrentJob

        if CurrentJob.axes is self._axes:
            CurrentJob.axes = None
            CurrentJob.recompute_allgather = False
            TRACKER.reset()

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the switch is on or a tensor-parallel degree is above 1."""
        return bool(options["tensor_parallel"] or options["hybrid_configs"].mp_degree > 1)

    @classmethod
    def effects(cls, options: Values, world_size: int) -> tuple[str, str]:
        """Returns the effects on the model and on the optimizer; none with a degree of 1."""
        if cls.notes(options, world_size):
            return "keeps all weights: mp_degree is 1", ""
        return cls.model_effect, cls.optimizer_effect

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that a degree of 1 divides no layer."""
        degrees = degrees_or_none(options, world_size)
        if degrees is None or degrees["mp"] > 1:
            return ()
        return (
            "tensor_parallel changes nothing: hybrid_configs['mp_degree'] is 1, so every worker holds all weights.",
        )

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when several workers are to share a model in which nothing is divided."""
        if self._axes.size("mp") == 1:
            return
        if self.config.plan:
            from fleet.strategies.tensor_parallel.plan import resolve_plan

            self._resolved = resolve_plan(model, self.config.plan, self._axes)
            self._check_optimizers(model, self._resolved)
            return
        divided = int(any(layout.axis == "mp" for layout in layouts_in(model).values()))
        if self._axes.size("pp") > 1:  # a stage without divided layers is right when another stage has some
            total = torch.tensor([divided], dtype=torch.int32, device=self.job.device)
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._axes.group("pp"))
            divided = int(total)
        if not divided:
            raise ConfigError(_nothing_divided(model, self._axes.size("mp")))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Remembers ``optimizer``: a plan may divide its parameters later. Raises ConfigError for states of wholes."""
        for parameter, state in optimizer.state.items():
            layout = layout_of(parameter) if isinstance(parameter, torch.Tensor) else None
            if layout is not None and layout.parts > 1:
                _refuse_whole_state(optimizer, state, layout.whole)
        self._optimizers.add(optimizer)

    def _check_optimizers(self, model: nn.Module, resolved: ResolvedPlan) -> None:
        """Raises ConfigError for an optimizer that needs whole parameters, and would hold parts of them."""
        divided = {
            model.get_submodule(path).get_parameter(name) for path, names in resolved.layouts.items() for name in names
        }
        for optimizer in self._optimizers:
            held = (p for group in optimizer.param_groups for p in group["params"])
            check_parts_of_model(optimizer, has_parts=not divided.isdisjoint(held))
            for parameter, state in optimizer.state.items():
                if parameter in divided:
                    _refuse_whole_state(optimizer, state, parameter.shape)

    def prepare_model(self, model: nn.Module) -> None:
        """Divides the layers that the plan names."""
        if self._resolved is not None:
            from fleet.strategies.tensor_parallel.plan import apply_plan

            apply_plan(model, self._resolved, self._axes)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; undivided parameters are now equal on the mp axis, and its inputs will be."""
        group = self._axes.group("mp")
        if group is None:
            return model
        from fleet.strategies.tensor_parallel.equal_inputs import EqualInputs
        from fleet.strategies.tensor_parallel.plan_check import FirstForward
        from fleet.strategies.tensor_parallel.sequence import sum_marked_gradients
        from fleet.strategies.tensor_parallel.whole_parameters import whole_tensors

        _mark_again(model)
        _call_every_layer(model)
        broadcast_from_rank_0([local(tensor.detach()) for tensor in whole_tensors(model)], group)
        sum_marked_gradients(model.named_parameters(), group)
        if self._axes.size("pp") == 1:
            copies = self.job.options["hybrid_configs"].mp_configs.need_broadcast_data
            model.register_forward_pre_hook(EqualInputs(group, copies), with_kwargs=True)
        if self._resolved is not None and not self.job.options["to_static"]:
            for compared in [model] if self._axes.size("pp") == 1 else model.children():
                FirstForward(group, self._resolved).watch(compared)
        return model

    def wrap_steps(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that checks undivided parameters and keeps them equal on the mp axis."""
        group = self._axes.group("mp")
        if group is None:
            return optimizer
        from fleet.strategies.tensor_parallel.whole_parameters import EqualOptimizer, Upkeep

        asked = self.job.options["hybrid_configs"].mp_configs
        parts = tuple(asked.sync_param_name) or tuple(self.job.options["sync_param_name"])
        upkeep = Upkeep(
            gradients=asked.sync_grad,
            parameters=asked.sync_param,
            moments=asked.sync_moment,
            averages=asked.sync_mode == "average",
            parts_of_names=() if parts == _EVERY_NAME else parts,
        )
        return EqualOptimizer(optimizer, group, upkeep, self.job.parameter_names)


def _mark_again(model: nn.Module) -> None:
    """Marks parameters again from the notes of their modules; a deep copy drops attributes of parameters."""
    from fleet.strategies.tensor_parallel.sequence import RowSequenceParallelLinear, mark_as_sequence_parallel_parameter

    mark_parts(model)
    for module in model.modules():
        if isinstance(module, RowSequenceParallelLinear) and module.bias is not None and not module.fuse_matmul_bias:
            mark_as_sequence_parallel_parameter(module.bias)


def _call_every_layer(model: nn.Module) -> None:
    """Makes torch's encoder layers call their divided layers in evaluation, too.

    There they take a short way that reads the weights, and would compute with this worker's parts alone.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and layouts_in(module):
            module.activation_relu_or_gelu = 0


def _nothing_divided(model: nn.Module, degree: int) -> str:
    from fleet.strategies.tensor_parallel.place import LayerPlace

    alone = [name for name, module in model.named_modules() if isinstance(getattr(module, "place", None), LayerPlace)]
    if alone:
        return (
            f"mp_degree is {degree}, and {alone[0]!r} ({type(model.get_submodule(alone[0])).__name__}) was created "
            "before fleet.init(), so it is whole on every worker. Call fleet.init() first, then create the model."
        )
    large = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    shown = ", ".join(repr(name) for name in large[:6]) or "none"
    return (
        f"mp_degree is {degree}, and the model has no divided parameter: {degree} workers would compute the same. Use "
        "ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding of fleet.meta_parallel in place of large "
        f"layers (here: {shown}), or name layers in tensor_parallel_configs['plan'], or set "
        "mp_degree to 1."
    )


def _refuse_whole_state(optimizer: Optimizer, state: Any, shape: Sequence[int]) -> None:
    """Raises ConfigError where ``state`` has a tensor of ``shape``, the shape of a whole parameter."""
    kept = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]
    if any(tuple(state[name].shape) == tuple(shape) for name in kept):
        raise ConfigError(
            f"tensor_parallel: the {type(optimizer).__name__} has a state ({', '.join(kept)}) of whole parameters of "
            f"shape {list(shape)}, which mp_degree divides. Load the optimizer after distributed_model() and "
            "distributed_optimizer(): fleet.checkpoint.load() and load_state_dict() take each worker's part then. "
            "The model may be loaded before."
        )
