"""Models divided over workers: layers with divided weights, their random streams, pipelines and segments.

The layers ask the running job for their workers when they are created, so ``fleet.init`` comes first. Names are
resolved at first use.
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

# The module that holds each name.
_NAMES = {
    "fleet.meta_parallel.layer_spec": "build_spec_layer get_spec_layer import_spec_layer LayerSpec",
    "fleet.strategies.tensor_parallel.layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "fleet.meta_parallel.wrapper_names": (
        "DualPipeVParallel NoPipelineParallel PipelineParallelWithInterleave "
        "PipelineParallelWithInterleaveFthenB SegmentParallel ShardingParallel TensorParallel "
        "VPPFhenBInBalancedMemory"
    ),
    "fleet.strategies.tensor_parallel.streams": "get_rng_state_tracker",
    "fleet.strategies.pipeline.descriptions": "LayerDesc LocalSharedLayerDesc SharedLayerDesc",
    "fleet.meta_parallel.seeds": "model_parallel_random_seed",
    "fleet.strategies.tensor_parallel.cross_entropy": "ParallelCrossEntropy ParallelMultiLabelCrossEntropy",
    "fleet.strategies.pipeline.micro_batches": "PipelineDatasetPreprocessor",
    "fleet.meta_parallel.pipeline_layer": "PipelineLayer",
    "fleet.training.pipeline_model": "PipelineParallel",
    "fleet.strategies.pipeline.hooks": "PipelineParallelMicroStepLocations register_global_pipeline_parallel_hook",
    "fleet.meta_parallel.segment_parallel": "ReshardLayer sep_attention split_inputs_sequence_dim",
    "fleet.meta_parallel.context_parallel": "ring_attention sequence_positions split_inputs_sequence_dim_load_balance",
    "fleet.strategies._shared.random_streams": "RNGStatesTracker",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

_MODULES = ("parallel_layers",)

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _MODULES)
