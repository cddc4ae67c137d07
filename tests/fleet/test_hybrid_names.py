"""Every name, argument and key of Fleet's hybrid parallelism works, warns or is refused with the reason."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet import meta_parallel as mp
from fleet.errors import ConfigError, NotInitializedError, OptionWarning, UnsupportedOptionError
from fleet.incubate.distributed import fleet as incubated
from fleet.job.axes import Axes
from fleet.meta_parallel import layer_spec, wrapper_names
from fleet.meta_parallel.parallel_layers import mp_layers, pp_layers, random
from fleet.scaler import distributed_scaler
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.training.fleet_model import FleetModel
from fleet.training.pipeline_model import PipelineModel
from fleet.utils import mix_precision_utils, moe_utils, timer_helper
from tests.helpers.workers import run_workers


def words(text: str) -> list[str]:
    """Returns the names in ``text``."""
    return text.split()


WORKS: dict[str, str] = {
    "fleet": "init distributed_model distributed_optimizer distributed_scaler get_hybrid_communicate_group "
    "CommunicateTopology HybridCommunicateGroup ParallelMode DistributedStrategy group_sharded_parallel "
    "save_group_sharded_model recompute recompute_sequential",
    "fleet.meta_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding ParallelCrossEntropy "
    "RNGStatesTracker get_rng_state_tracker model_parallel_random_seed LayerDesc SharedLayerDesc PipelineLayer "
    "LayerSpec build_spec_layer get_spec_layer import_spec_layer PipelineDatasetPreprocessor PipelineParallel "
    "PipelineParallelMicroStepLocations register_global_pipeline_parallel_hook ReshardLayer "
    "split_inputs_sequence_dim split_inputs_sequence_dim_load_balance",
    "fleet.meta_parallel.parallel_layers.mp_layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding "
    "ParallelCrossEntropy",
    "fleet.meta_parallel.parallel_layers.pp_layers": "LayerDesc SharedLayerDesc PipelineLayer",
    "fleet.meta_parallel.parallel_layers.random": "RNGStatesTracker get_rng_state_tracker model_parallel_random_seed "
    "dropout determinate_seed MODEL_PARALLEL_RNG",
    "fleet.layers.mpu": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding ParallelCrossEntropy "
    "RNGStatesTracker get_rng_state_tracker model_parallel_random_seed",
    "fleet.layers.mpu.random": "dropout RNGStatesTracker get_rng_state_tracker model_parallel_random_seed",
    "fleet.layers.mpu.mp_ops": "_c_identity _mp_allreduce _c_split _c_concat",
    "fleet.utils.sequence_parallel_utils": "ScatterOp GatherOp AllGatherOp ReduceScatterOp "
    "ColumnSequenceParallelLinear RowSequenceParallelLinear mark_as_sequence_parallel_parameter "
    "is_sequence_parallel_parameter register_sequence_parallel_allreduce_hooks",
    "fleet.utils.hybrid_parallel_util": "fused_allreduce_gradients fused_allreduce_gradients_with_group "
    "broadcast_mp_parameters broadcast_dp_parameters broadcast_sharding_parameters broadcast_sep_parameters "
    "broadcast_moe_sharding_parameters broadcast_input_data obtain_optimizer_parameters_list unwrap_optimizer",
    "fleet.utils": "recompute recompute_hybrid recompute_sequential",
    "fleet.recompute": "recompute recompute_hybrid recompute_sequential",
    "fleet.incubate.distributed.fleet": "recompute_hybrid recompute_sequential",
    "fleet.scaler": "distributed_scaler",
    "fleet.incubate.distributed.models.moe": "MoELayer BaseGate NaiveGate GShardGate SwitchGate "
    "ClipGradForMOEByGlobalNorm",
    "fleet.utils.moe_utils": "global_scatter global_gather",
}
# Called with these arguments, each says why it is refused and what to write instead.
REFUSED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("fleet", "split", (None, (8, 8), "linear"), "ColumnParallelLinear"),
    ("fleet.layers.mpu", "split", (None, (8, 8), "linear"), "VocabParallelEmbedding"),
    ("fleet.meta_parallel", "ParallelMultiLabelCrossEntropy", (), "ParallelCrossEntropy"),
    ("fleet.layers.mpu", "ParallelMultiLabelCrossEntropy", (), "ParallelCrossEntropy"),
    ("fleet.meta_parallel", "LocalSharedLayerDesc", ("key", nn.Linear), "SharedLayerDesc"),
    *(
        ("fleet.meta_parallel", name, (nn.Linear(2, 2),), r"fleet\.distributed_model\(model\)")
        for name in (
            "NoPipelineParallel",
            "PipelineParallelWithInterleave",
            "PipelineParallelWithInterleaveFthenB",
            "TensorParallel",
            "SegmentParallel",
            "ShardingParallel",
        )
    ),
    ("fleet.meta_parallel", "VPPFhenBInBalancedMemory", (), "best_unbalanced_scheduler"),
    ("fleet.meta_parallel", "DualPipeVParallel", (), "num_virtual_pipeline_stages=2"),
    ("fleet.utils.mix_precision_utils", "MixPrecisionLayer", (nn.Linear(2, 2), "bfloat16"), r"'dtype': 'bfloat16'"),
    ("fleet.utils.mix_precision_utils", "MixPrecisionOptimizer", (None,), r"fleet\.distributed_optimizer\(\)"),
    ("fleet.utils.mix_precision_utils", "MixPrecisionScaler", (None,), r"fleet\.distributed_scaler\(\)"),
    ("fleet.utils.timer_helper", "get_timers", (), r"torch\.profiler"),
    ("fleet.utils.timer_helper", "set_timers", (), r"torch\.profiler"),
]
NOT_IMPORTED = {
    "fleet.meta_parallel.pp_utils": "batch_isend_irecv",
    "fleet.utils.tensor_fusion_helper": "fused_allreduce_gradients_with_group",
    "fleet.utils.pp_parallel_adaptor": "full_state_dict",
    "fleet.utils.tensor_parallel_utils": "sync_param",
}
_LINEAR = "weight_attr=None, has_bias={}, {}, fuse_matmul_bias=False, mp_group=None, name=None"
_COLUMN = "in_features, out_features, " + _LINEAR.format("None", "gather_output=True")
_ROW = "in_features, out_features, " + _LINEAR.format("True", "input_is_parallel=False")
# Arguments in Fleet's order with its defaults. What stands after '|' is in addition here.
SIGNATURES = {
    "fleet.CommunicateTopology": "hybrid_group_names=('data', 'pipe', 'sharding', 'sep', 'context', 'model'), "
    "dims=(1, 1, 1, 1, 1, 1)",
    "fleet.HybridCommunicateGroup": "topology, hybrid_configs=None | session=None",
    "fleet.meta_parallel.ColumnParallelLinear": _COLUMN,
    "fleet.meta_parallel.RowParallelLinear": _ROW,
    "fleet.meta_parallel.VocabParallelEmbedding": "num_embeddings, embedding_dim, weight_attr=None, mp_group=None, "
    "name=None",
    "fleet.meta_parallel.ParallelCrossEntropy": "mp_group=None, name=None, ignore_index=-100",
    "fleet.meta_parallel.RNGStatesTracker.add": "self, name, seed",
    "fleet.meta_parallel.RNGStatesTracker.rng_state": "self, name='model_parallel_rng'",
    "fleet.meta_parallel.RNGStatesTracker.set_states_tracker": "self, states",
    "fleet.meta_parallel.model_parallel_random_seed": "seed=None",
    "fleet.layers.mpu.random.dropout": "x, p=0.5, axis=None, rng_name=None, training=True, mode='upscale_in_train', "
    "name=None",
    "fleet.layers.mpu.mp_ops._c_identity": "tensor, group=None, skip_c_identity_dynamic=False",
    "fleet.layers.mpu.mp_ops._c_split": "tensor, group=None",
    "fleet.layers.mpu.mp_ops._c_concat": "tensor, group=None",
    "fleet.utils.sequence_parallel_utils.ColumnSequenceParallelLinear": _COLUMN,
    "fleet.utils.sequence_parallel_utils.RowSequenceParallelLinear": _ROW,
    "fleet.utils.sequence_parallel_utils.register_sequence_parallel_allreduce_hooks": "model, accumulation_steps=1, "
    "fuse_sequence_parallel_allreduce=False",
    "fleet.meta_parallel.LayerDesc": "layer_func, *inputs, **kwargs",
    "fleet.meta_parallel.SharedLayerDesc": "key, layer_func, forward_func=None, shared_weight_attr='weight', *inputs, "
    "**kwargs",
    "fleet.meta_parallel.PipelineLayer": "layers, num_stages=None, topology=None, loss_fn=None, seg_method='uniform', "
    "recompute_interval=0, recompute_ctx=None, num_virtual_pipeline_stages=None, use_cudagraph=False, "
    "use_dualpipev=False",
    "fleet.meta_parallel.PipelineLayer.forward": "self, input, chunk_id=None",
    "fleet.meta_parallel.PipelineLayer.get_stage_from_index": "self, layer_idx",
    "fleet.meta_parallel.PipelineParallel.train_batch": "self, data, optimizer, lr_scheduler=None, scaler=None, "
    "loss_fn_idx=0, return_micro_batch_loss=False",
    "fleet.meta_parallel.PipelineParallel.eval_batch": "self, data, compute_loss=False, loss_fn_idx=0, "
    "return_host_tensor=False",
    "fleet.meta_parallel.PipelineParallel.register_hook": "self, location, hook",
    "fleet.meta_parallel.register_global_pipeline_parallel_hook": "location, hook",
    "fleet.meta_parallel.ReshardLayer": "sep_group=None",
    "fleet.meta_parallel.ReshardLayer.forward": "self, x, split_axis=1, concat_axis=2",
    "fleet.utils.hybrid_parallel_util.fused_allreduce_gradients": "parameter_list, hcg=None",
    "fleet.utils.hybrid_parallel_util.fused_allreduce_gradients_with_group": "parameter_list, group, "
    f"bucket_size={128 * 1024 * 1024}, scale=None",
    "fleet.utils.hybrid_parallel_util.broadcast_mp_parameters": "model, hcg=None, fuse_params=True",
    "fleet.utils.hybrid_parallel_util.broadcast_input_data": "hcg, *inputs, **kwargs",
    # The reentrant form of torch silently trains nothing where no input needs a gradient.
    "fleet.utils.recompute": "function, *args, preserve_rng_state=True, use_reentrant=False, offload_indices=(), "
    "**kwargs",
    "fleet.utils.recompute_hybrid": "ctx, function, *args, **kwargs",
    "fleet.utils.recompute_sequential": "ctx, functions, *args",
    "fleet.moe.MoELayer": "d_model, experts, gate=None, moe_group=None, mp_group=None, recompute_interval=0, "
    "recompute_ctx=None",
    "fleet.moe.NaiveGate": "d_model, num_expert, world_size, topk=2",
    "fleet.moe.GShardGate": "d_model, num_expert, world_size, topk=2, capacity=(1.2, 2.4), random_routing=True, "
    "group=None",
    "fleet.moe.SwitchGate": "d_model, num_expert, world_size, topk=1, switch_eps=0.1, capacity=(1.2, 2.4), group=None",
    "fleet.moe.ClipGradForMOEByGlobalNorm": "clip_norm=1.0, is_expert_param_func=None, moe_group=None, "
    "group_name='default_moe_group'",
    "fleet.utils.moe_utils.global_scatter": "x, local_count, global_count, group=None",
    "fleet.utils.moe_utils.global_gather": "x, local_count, global_count, group=None",
}
METHODS = {
    "fleet.CommunicateTopology": "get_hybrid_group_names get_dim get_dim_size world_size get_rank get_coord "
    "get_axis_list get_comm_list get_fused_ranks get_rank_from_stage",
    "fleet.HybridCommunicateGroup": "get_stage_id get_parallel_mode get_check_parallel_group create_fuse_group "
    "get_rank_from_stage get_p2p_groups topology get_global_rank get_dp_sep_parallel_group get_pp_mp_parallel_group "
    + " ".join(
        f"get_{axis}_parallel_{what}"
        for axis in words("data model pipe sharding sep context expert moe_sharding cp_sharding cp_mp")
        for what in ("rank", "world_size", "group", "group_src_rank")
    ),
    "fleet.meta_parallel.RNGStatesTracker": "reset add rng_state get_states_tracker set_states_tracker",
    "fleet.meta_parallel.PipelineLayer": "get_stage_from_index get_num_virtual_stages get_model_chunks run_function "
    "_start_pos _end_pos parameters save_state_dict set_state_dir forward",
    "fleet.meta_parallel.PipelineParallel": "train_batch eval_batch forward register_hook get_static_scheduler "
    "register_forward_pipeline_parallel_hook register_backward_pipeline_parallel_hook "
    "register_bubble_pipeline_parallel_hook is_pipeline_first_stage is_pipeline_last_stage",
    "fleet.meta_parallel.PipelineParallelMicroStepLocations": "FORWARD_BEGIN FORWARD_END BACKWARD_BEGIN BACKWARD_END",
    "fleet.ParallelMode": "DATA_PARALLEL TENSOR_PARALLEL PIPELINE_PARALLEL SHARDING_PARALLEL SEGMENT_PARALLEL",
    "fleet.moe.GShardGate": "get_loss set_loss",
}
_OFF = dict.fromkeys(
    words(
        "sync_grad sync_moment mp_async_allreduce mp_skip_c_identity mp_fused_linear_param_grad_add "
        "recompute_allgather sp_async_reduce_scatter"
    ),
    False,
)
_PP_OFF = dict.fromkeys(
    words(
        "dp_comm_overlap sharding_comm_overlap delay_scale_loss enable_timer profiling release_gradients "
        "overlap_p2p_comm clear_every_step_cache best_unbalanced_scheduler enable_offload_queue enable_dynamic_shape "
        "use_dualpipev forward_backward_overlap_scheduler sync_param sync_moment"
    ),
    False,
)
_SHARDING_OFF = dict.fromkeys(
    words("tensor_fusion comm_overlap split_param release_gradients free_grads_in_comm enable_fuse_optimizer_states"),
    False,
)
_ONES = dict.fromkeys(words("mp pp sharding sep cp cp_sharding ep moe_sharding"), 1)
KEYS: dict[str, dict[str, Any]] = {
    "hybrid_configs": {
        "dp_degree": -1,
        **{f"{axis}_degree": degree for axis, degree in _ONES.items()},
        "enable_optimizer_timer": False,
        "split_norm_comm": False,
    },
    "hybrid_configs.mp_configs": {"sync_param": True, "sync_mode": "broadcast", "need_broadcast_data": True, **_OFF},
    "hybrid_configs.pp_configs": {"use_batch_p2p_comm": True, "sync_mode": "broadcast", **_PP_OFF},
    "hybrid_configs.sharding_configs": {
        "fuse_optimizer": True,
        "use_reduce_avg": True,
        "accumulate_steps": 1,
        "comm_buffer_size_MB": 256,
        "offload_opt_buffer_size": -1,
        **_SHARDING_OFF,
    },
    "pipeline_configs": {
        "micro_batch_size": 1,
        "accumulate_steps": 1,
        "schedule_mode": "1F1B",
        "p2p_cache_shape": True,
        "enable_partial_send_recv": True,
    },
    "tensor_parallel_configs": {"tensor_parallel_degree": 1, "tensor_init_seed": -1},
}
COMM_GROUPS = [
    f"{axes}_configs"
    for axes in words("dp sep dp_sep pp_tp ep moe_sharding cp cp_sharding dp_cp cp_mp default_comm_group")
]
REFUSED_KEYS = [
    "best_unbalanced_scheduler",
    "enable_offload_queue",
    "use_dualpipev",
    "forward_backward_overlap_scheduler",
]
# These have no counterpart in torch: the value is kept, and a warning says why it has no effect.
WITHOUT_EFFECT = {
    "mp_configs": "mp_async_allreduce mp_skip_c_identity mp_fused_linear_param_grad_add sp_async_reduce_scatter",
    "pp_configs": "enable_timer profiling release_gradients overlap_p2p_comm",
    "sharding_configs": "tensor_fusion release_gradients free_grads_in_comm enable_fuse_optimizer_states",
}


def found(path: str) -> Any:
    """Returns what ``path`` names: the longest module of it, then attributes."""
    module, _, rest = path.partition(".")
    value: Any = importlib.import_module(module)
    for name in rest.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(f"{value.__name__}.{name}")
    return value


@pytest.mark.parametrize("path", WORKS)
def test_every_name_is_there(path: str) -> None:
    """Surface 1 to 12."""
    module = importlib.import_module(path)
    assert [name for name in WORKS[path].split() if getattr(module, name, None) is None] == []


@pytest.mark.parametrize(("path", "name", "arguments", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refused_name_says_what_to_write(path: str, name: str, arguments: tuple[Any, ...], why: str) -> None:
    """Surface 1.3, 3, 6, 8.4 and 9."""
    with pytest.raises(UnsupportedOptionError, match=why):
        getattr(importlib.import_module(path), name)(*arguments)


def test_a_refused_module_says_what_to_write() -> None:
    """Surface 9: also where the import names it after 'import'."""
    for path, why in NOT_IMPORTED.items():
        with pytest.raises(ImportError, match=why):
            importlib.import_module(path)
    with pytest.raises(ImportError, match="batch_isend_irecv"):
        from fleet.meta_parallel import pp_utils  # noqa: F401
    with pytest.raises(ImportError, match="fused_allreduce"):
        from fleet.utils import tensor_fusion_helper  # noqa: F401
    with pytest.raises(ImportError, match="full_state_dict"):
        from fleet.utils import pp_parallel_adaptor  # noqa: F401
    with pytest.raises(ImportError, match="sync_param"):
        from fleet.utils import tensor_parallel_utils  # noqa: F401


def as_written(value: Any) -> str:
    """Returns the arguments of ``value`` with their defaults."""
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{mark}{parameter.name}{default}")
    return ", ".join(shown)


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_are_those_of_fleet(path: str) -> None:
    """Surface 2 to 12: names, order and defaults."""
    assert as_written(found(path)) == SIGNATURES[path].replace(" |", ",")


@pytest.mark.parametrize("path", METHODS)
def test_members_are_those_of_fleet(path: str) -> None:
    """Surface 2, 4, 6, 7 and 12."""
    owner = found(path)
    assert [name for name in METHODS[path].split() if not hasattr(owner, name)] == []


@pytest.mark.parametrize("path", KEYS)
def test_keys_and_defaults_are_those_of_fleet(path: str) -> None:
    """Surface 1.2."""
    option, _, inner = path.partition(".")
    value = getattr(fleet.DistributedStrategy(), option)
    value = value[inner] if inner else value
    assert {key: value[key] for key in KEYS[path]} == KEYS[path]


def test_orders_names_and_groups_are_there() -> None:
    """Surface 1.2."""
    strategy = fleet.DistributedStrategy()
    assert list(strategy.hybrid_parallel_order) == ["dp", "pp", "sharding", "sep", "cp", "mp"]
    assert list(strategy.sync_param_name) == ["embedding", "layer_norm", ".b_"]
    strategy.hybrid_configs = {"order": ["pp", "dp", "sharding", "sep", "cp", "mp"]}
    assert list(strategy.hybrid_configs["order"])[:2] == ["pp", "dp"]
    assert set(COMM_GROUPS) <= set(strategy.hybrid_configs)


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_refused_key_gives_the_reason(key: str) -> None:
    """Surface 1.2 and 7.5."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2, "pp_configs": {key: True}}
    assert re.search(rf"Refused:\n.*'{key}'\] = True cannot be honoured: \w", fleet.explain(strategy, world_size=2))
    strategy.hybrid_configs = {"pp_degree": 1}
    with pytest.raises(UnsupportedOptionError, match=key):
        fleet.init(is_collective=True, strategy=strategy)


@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_a_key_without_effect_warns(option: str) -> None:
    """Surface 1.2."""
    for key in WITHOUT_EFFECT[option].split():
        strategy = fleet.DistributedStrategy()
        with pytest.warns(OptionWarning, match=key):
            strategy.hybrid_configs = {option: {key: True}}


# ---- thin paths ------------------------------------------------------------------------------------------------------


def test_paths_give_the_same_objects() -> None:
    """Surface 1.1, 9, 10 and 12: one function under all its paths, and fleet.recompute stays callable."""
    before = fleet.recompute
    recompute = importlib.import_module("fleet.recompute")
    assert before is fleet.recompute is recompute is fleet.utils.recompute
    assert recompute.recompute_hybrid is incubated.recompute_hybrid is fleet.utils.recompute_hybrid
    assert recompute.recompute_sequential is incubated.recompute_sequential is fleet.recompute_sequential
    assert moe_utils.global_scatter is fleet.moe.global_scatter
    assert mp_layers.ColumnParallelLinear is mp.ColumnParallelLinear
    assert pp_layers.PipelineLayer is mp.PipelineLayer
    assert random.get_rng_state_tracker is mp.get_rng_state_tracker
    assert fleet.utils.timer_helper is timer_helper
    assert fleet.utils.mix_precision_utils is mix_precision_utils


def test_the_scaler_has_its_path() -> None:
    """Surface 8.3."""
    with pytest.raises((ConfigError, NotInitializedError), match="distributed_scaler"):
        distributed_scaler(object())


def test_a_group_has_the_attributes_of_fleet() -> None:
    """Surface 2; also that of one worker alone."""
    fleet.init(is_collective=True)
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    assert (group.nranks, int(group.rank), group.ranks, group.world_size) == (1, 0, [0], 1)
    assert group.get_group_rank(0) == 0
    assert group.process_group.size() == 1
    assert group.id == fleet.get_hybrid_communicate_group().get_data_parallel_group().id


def test_parts_in_the_form_of_paddle_are_refused() -> None:
    """Surface 3: sharded_state_dict."""
    for layer in (mp.ColumnParallelLinear(4, 4), mp.RowParallelLinear(4, 4), mp.VocabParallelEmbedding(4, 4)):
        with pytest.raises(UnsupportedOptionError, match="full_state_dict"):
            layer.sharded_state_dict("prefix")


class Inner(nn.Module):
    """Keeps what it was built with."""

    def __init__(self, width: int, bias: bool = True, sublayers_spec: Any = None) -> None:
        super().__init__()
        self.given = (width, bias, sublayers_spec)


def test_a_layer_is_built_from_its_specification() -> None:
    """Surface 6: from a class, from where it is, and a function as it is."""
    assert mp.build_spec_layer(Inner, 3).given == (3, True, None)
    assert mp.build_spec_layer(mp.LayerSpec(Inner, {"bias": False}, "inner"), 3).given == (3, False, "inner")
    assert mp.build_spec_layer(mp.LayerSpec(("torch.nn", "Linear")), 3, 2, bias=False).bias is None
    assert mp.build_spec_layer(torch.relu) is mp.build_spec_layer(mp.LayerSpec(torch.relu)) is torch.relu
    assert mp.get_spec_layer(mp.LayerSpec(("torch.nn", "Linear"))) is nn.Linear
    with pytest.warns(OptionWarning, match="'bias'"):
        assert mp.build_spec_layer(mp.LayerSpec(Inner, {"bias": False}), 3, bias=True).given[1] is False


@pytest.mark.parametrize("path", [("torch.nn", "Absent"), ("absent_module", "Linear"), ("torch.nn.Linear",), "torch"])
def test_a_layer_that_is_nowhere_is_named(path: Any) -> None:
    """Surface 6; Fleet prints a line and returns None."""
    with pytest.raises(ConfigError, match="LayerSpec"):
        layer_spec.import_spec_layer(path)


# ---- what distributed_model returns ----------------------------------------------------------------------------------

WRAPPERS = [name for name, value in vars(wrapper_names).items() if type(value).__name__ == "_WrapperName"]


def model_on(num_chunks: int | None = None, micro_batches: int = 4, **degrees: int) -> FleetModel:
    """Returns a wrapped model of a job with ``degrees``; with ``num_chunks`` it is a pipeline."""
    axes = Axes({"dp": 1, "pp": 1, "sharding": 1, "sep": 1, "cp": 1, "mp": 1} | degrees, 0)
    config = SimpleNamespace(accumulate_steps=micro_batches, schedule_mode="1F1B")
    session: Any = SimpleNamespace(axes=axes, options={"pipeline_configs": config}, parameters=list)
    if num_chunks is None:
        plain = nn.Linear(2, 2)
        return FleetModel(plain, plain, session)
    stages = degrees.get("pp", 1)
    layers = StagedLayers([torch.relu] * stages * num_chunks, stages, 0, num_chunks=num_chunks)
    return PipelineModel(layers, layers, session)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: model_on(dp=4), []),
        (lambda: model_on(mp=2, sep=2, sharding=2), ["TensorParallel"]),
        (lambda: model_on(sep=2, sharding=2), ["SegmentParallel"]),
        (lambda: model_on(sharding=2, dp=2), ["ShardingParallel"]),
        (lambda: model_on(1, mp=2), ["NoPipelineParallel"]),
        (lambda: model_on(1, pp=2, mp=2), []),
        (lambda: model_on(2, pp=2), ["PipelineParallelWithInterleave"]),
        (lambda: model_on(2, 3, pp=2), ["PipelineParallelWithInterleave", "PipelineParallelWithInterleaveFthenB"]),
    ],
)
def test_isinstance_says_which_wrapper_the_mesh_asks_for(build: Callable[[], FleetModel], names: list[str]) -> None:
    """Surface 1.3."""
    model = build()
    assert [name for name in WRAPPERS if isinstance(model, getattr(mp, name))] == names
    assert isinstance(model, mp.PipelineParallel) == isinstance(model, PipelineModel)


def test_a_plain_module_is_no_wrapper() -> None:
    """Surface 1.3."""
    assert [name for name in WRAPPERS if isinstance(nn.Linear(2, 2), getattr(mp, name))] == []


def interleaved_job(rank: int, world_size: int) -> list[Any]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)
    topology = fleet.get_hybrid_communicate_group().topology()
    layers = [mp.LayerDesc(nn.Linear, 2, 2) for _ in range(4)]
    loss = nn.functional.mse_loss
    model = fleet.distributed_model(mp.PipelineLayer(layers, loss_fn=loss, num_virtual_pipeline_stages=2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    model.train_batch([torch.ones(4, 2), torch.zeros(4, 2)], optimizer)
    other = fleet.CommunicateTopology(["data", "model"], [1, 2])
    with pytest.raises(ConfigError, match="laid out as"):
        fleet.HybridCommunicateGroup(other)
    return [
        isinstance(model, mp.PipelineParallelWithInterleave),
        isinstance(model, mp.PipelineParallelWithInterleaveFthenB),
        isinstance(model, mp.NoPipelineParallel),
        fleet.HybridCommunicateGroup(topology).get_stage_id(),
    ]


def test_names_hold_in_a_job() -> None:
    """Surface 1.3 and 2: on two stages with two chunks each, and a group made by hand."""
    assert run_workers(interleaved_job, 2, backend=None) == [[True, False, False, 0], [True, False, False, 1]]
