# Made by `make docs`; a change belongs into the code that it is made from.
"""Models divided over workers: layers with divided weights, their random streams, pipelines and segments.

The layers ask the running job for their workers when they are created, so ``fleet.init`` comes first. Names are
resolved at first use.

Example:
    >>> strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 2}
    >>> fleet.init(is_collective=True, strategy=strategy)
    >>> up = fleet.meta_parallel.ColumnParallelLinear(1024, 4096, has_bias=True, gather_output=False)
"""

from fleet.meta_parallel.pipeline_layer import PipelineLayer as PipelineLayer
from fleet.meta_parallel.seeds import model_parallel_random_seed as model_parallel_random_seed
from fleet.runtime.pipeline_model import PipelineParallel as PipelineParallel
from fleet.strategies._shared.random_streams import RNGStatesTracker as RNGStatesTracker
from fleet.strategies.pipeline.descriptions import LayerDesc as LayerDesc
from fleet.strategies.pipeline.descriptions import LocalSharedLayerDesc as LocalSharedLayerDesc
from fleet.strategies.pipeline.descriptions import SharedLayerDesc as SharedLayerDesc
from fleet.strategies.pipeline.micro_batches import PipelineDatasetPreprocessor as PipelineDatasetPreprocessor
from fleet.strategies.tensor_parallel.cross_entropy import ParallelCrossEntropy as ParallelCrossEntropy
from fleet.strategies.tensor_parallel.cross_entropy import (
    ParallelMultiLabelCrossEntropy as ParallelMultiLabelCrossEntropy,
)
from fleet.strategies.tensor_parallel.layers import ColumnParallelLinear as ColumnParallelLinear
from fleet.strategies.tensor_parallel.layers import RowParallelLinear as RowParallelLinear
from fleet.strategies.tensor_parallel.layers import VocabParallelEmbedding as VocabParallelEmbedding
from fleet.strategies.tensor_parallel.streams import get_rng_state_tracker as get_rng_state_tracker

__all__ = [
    "ColumnParallelLinear",
    "LayerDesc",
    "LocalSharedLayerDesc",
    "ParallelCrossEntropy",
    "ParallelMultiLabelCrossEntropy",
    "PipelineDatasetPreprocessor",
    "PipelineLayer",
    "PipelineParallel",
    "RNGStatesTracker",
    "RowParallelLinear",
    "SharedLayerDesc",
    "VocabParallelEmbedding",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
