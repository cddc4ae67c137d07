# Made by `make docs`; a change belongs into the code that it is made from.
"""Models divided over workers: layers with divided weights, their random streams, pipelines and segments.

The layers ask the running job for their workers when they are created, so ``fleet.init`` comes first. Names are
resolved at first use.
"""

from fleet.meta_parallel.context_parallel import ring_attention as ring_attention
from fleet.meta_parallel.context_parallel import sequence_positions as sequence_positions
from fleet.meta_parallel.context_parallel import (
    split_inputs_sequence_dim_load_balance as split_inputs_sequence_dim_load_balance,
)
from fleet.meta_parallel.layer_spec import LayerSpec as LayerSpec
from fleet.meta_parallel.layer_spec import build_spec_layer as build_spec_layer
from fleet.meta_parallel.layer_spec import get_spec_layer as get_spec_layer
from fleet.meta_parallel.layer_spec import import_spec_layer as import_spec_layer
from fleet.meta_parallel.pipeline_layer import PipelineLayer as PipelineLayer
from fleet.meta_parallel.seeds import model_parallel_random_seed as model_parallel_random_seed
from fleet.meta_parallel.segment_parallel import ReshardLayer as ReshardLayer
from fleet.meta_parallel.segment_parallel import sep_attention as sep_attention
from fleet.meta_parallel.segment_parallel import split_inputs_sequence_dim as split_inputs_sequence_dim
from fleet.meta_parallel.wrapper_names import DualPipeVParallel as DualPipeVParallel
from fleet.meta_parallel.wrapper_names import NoPipelineParallel as NoPipelineParallel
from fleet.meta_parallel.wrapper_names import PipelineParallelWithInterleave as PipelineParallelWithInterleave
from fleet.meta_parallel.wrapper_names import (
    PipelineParallelWithInterleaveFthenB as PipelineParallelWithInterleaveFthenB,
)
from fleet.meta_parallel.wrapper_names import SegmentParallel as SegmentParallel
from fleet.meta_parallel.wrapper_names import ShardingParallel as ShardingParallel
from fleet.meta_parallel.wrapper_names import TensorParallel as TensorParallel
from fleet.meta_parallel.wrapper_names import VPPFhenBInBalancedMemory as VPPFhenBInBalancedMemory
from fleet.strategies._shared.random_streams import RNGStatesTracker as RNGStatesTracker
from fleet.strategies.pipeline.descriptions import LayerDesc as LayerDesc
from fleet.strategies.pipeline.descriptions import LocalSharedLayerDesc as LocalSharedLayerDesc
from fleet.strategies.pipeline.descriptions import SharedLayerDesc as SharedLayerDesc
from fleet.strategies.pipeline.hooks import PipelineParallelMicroStepLocations as PipelineParallelMicroStepLocations
from fleet.strategies.pipeline.hooks import (
    register_global_pipeline_parallel_hook as register_global_pipeline_parallel_hook,
)
from fleet.strategies.pipeline.micro_batches import PipelineDatasetPreprocessor as PipelineDatasetPreprocessor
from fleet.strategies.tensor_parallel.cross_entropy import ParallelCrossEntropy as ParallelCrossEntropy
from fleet.strategies.tensor_parallel.cross_entropy import (
    ParallelMultiLabelCrossEntropy as ParallelMultiLabelCrossEntropy,
)
from fleet.strategies.tensor_parallel.layers import ColumnParallelLinear as ColumnParallelLinear
from fleet.strategies.tensor_parallel.layers import RowParallelLinear as RowParallelLinear
from fleet.strategies.tensor_parallel.layers import VocabParallelEmbedding as VocabParallelEmbedding
from fleet.strategies.tensor_parallel.streams import get_rng_state_tracker as get_rng_state_tracker
from fleet.training.pipeline_model import PipelineParallel as PipelineParallel

__all__ = [
    "ColumnParallelLinear",
    "DualPipeVParallel",
    "LayerDesc",
    "LayerSpec",
    "LocalSharedLayerDesc",
    "NoPipelineParallel",
    "ParallelCrossEntropy",
    "ParallelMultiLabelCrossEntropy",
    "PipelineDatasetPreprocessor",
    "PipelineLayer",
    "PipelineParallel",
    "PipelineParallelMicroStepLocations",
    "PipelineParallelWithInterleave",
    "PipelineParallelWithInterleaveFthenB",
    "RNGStatesTracker",
    "ReshardLayer",
    "RowParallelLinear",
    "SegmentParallel",
    "ShardingParallel",
    "SharedLayerDesc",
    "TensorParallel",
    "VPPFhenBInBalancedMemory",
    "VocabParallelEmbedding",
    "build_spec_layer",
    "get_rng_state_tracker",
    "get_spec_layer",
    "import_spec_layer",
    "model_parallel_random_seed",
    "register_global_pipeline_parallel_hook",
    "ring_attention",
    "sep_attention",
    "sequence_positions",
    "split_inputs_sequence_dim",
    "split_inputs_sequence_dim_load_balance",
]
