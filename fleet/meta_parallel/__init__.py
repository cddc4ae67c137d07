"""Models divided over workers: layers with divided weights, their random streams, pipelines and segments.

The layers ask the running job for their workers when they are created, so ``fleet.init`` comes first. Names are
resolved at first use.
"""

from __future__ import annotations

from fleet._lazy_names import lazy_names

_TENSOR = "fleet.strategies.tensor_parallel"
_SEGMENT = "fleet.meta_parallel.segment_parallel"
_PIPELINE = "fleet.strategies.pipeline"
_SPEC = "fleet.meta_parallel.layer_spec"
_WRAPPER = "fleet.meta_parallel.wrapper_names"
_HOMES = {
    "build_spec_layer": _SPEC,
    "ColumnParallelLinear": f"{_TENSOR}.layers",
    "DualPipeVParallel": _WRAPPER,
    "get_rng_state_tracker": f"{_TENSOR}.streams",
    "get_spec_layer": _SPEC,
    "import_spec_layer": _SPEC,
    "LayerDesc": f"{_PIPELINE}.descriptions",
    "LayerSpec": _SPEC,
    "LocalSharedLayerDesc": f"{_PIPELINE}.descriptions",
    "model_parallel_random_seed": "fleet.meta_parallel.seeds",
    "NoPipelineParallel": _WRAPPER,
    "ParallelCrossEntropy": f"{_TENSOR}.cross_entropy",
    "ParallelMultiLabelCrossEntropy": f"{_TENSOR}.cross_entropy",
    "PipelineDatasetPreprocessor": f"{_PIPELINE}.micro_batches",
    "PipelineLayer": "fleet.meta_parallel.pipeline_layer",
    "PipelineParallel": "fleet.training.pipeline_model",
    "PipelineParallelMicroStepLocations": f"{_PIPELINE}.hooks",
    "PipelineParallelWithInterleave": _WRAPPER,
    "PipelineParallelWithInterleaveFthenB": _WRAPPER,
    "register_global_pipeline_parallel_hook": f"{_PIPELINE}.hooks",
    "ReshardLayer": _SEGMENT,
    "ring_attention": "fleet.meta_parallel.context_parallel",
    "RNGStatesTracker": "fleet.strategies._shared.random_streams",
    "RowParallelLinear": f"{_TENSOR}.layers",
    "SegmentParallel": _WRAPPER,
    "sep_attention": _SEGMENT,
    "sequence_mean": _SEGMENT,
    "sequence_positions": "fleet.meta_parallel.context_parallel",
    "ShardingParallel": _WRAPPER,
    "SharedLayerDesc": f"{_PIPELINE}.descriptions",
    "split_inputs_sequence_dim": _SEGMENT,
    "split_inputs_sequence_dim_load_balance": "fleet.meta_parallel.context_parallel",
    "TensorParallel": _WRAPPER,
    "VocabParallelEmbedding": f"{_TENSOR}.layers",
    "VPPFhenBInBalancedMemory": _WRAPPER,
}

_MODULES = ("parallel_layers",)

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _MODULES)
