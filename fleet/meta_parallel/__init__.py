"""Models divided over workers: layers with divided weights, their random streams, pipelines and segments.

The layers ask the running job for their workers when they are created, so ``fleet.init`` comes first. Names are
resolved at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PIPELINE = "fleet.strategies.pipeline"
_TENSOR = "fleet.strategies.tensor_parallel"
_HOMES = {
    "ColumnParallelLinear": f"{_TENSOR}.layers",
    "ParallelCrossEntropy": f"{_TENSOR}.cross_entropy",
    "ParallelMultiLabelCrossEntropy": f"{_TENSOR}.cross_entropy",
    "RNGStatesTracker": "fleet.strategies._shared.random_streams",
    "RowParallelLinear": f"{_TENSOR}.layers",
    "VocabParallelEmbedding": f"{_TENSOR}.layers",
    "get_rng_state_tracker": f"{_TENSOR}.streams",
    "model_parallel_random_seed": "fleet.meta_parallel.seeds",
    "LayerDesc": f"{_PIPELINE}.descriptions",
    "LocalSharedLayerDesc": f"{_PIPELINE}.descriptions",
    "PipelineDatasetPreprocessor": f"{_PIPELINE}.micro_batches",
    "PipelineLayer": "fleet.meta_parallel.pipeline_layer",
    "PipelineParallel": "fleet.runtime.pipeline_model",
    "PipelineParallelMicroStepLocations": f"{_PIPELINE}.hooks",
    "SharedLayerDesc": f"{_PIPELINE}.descriptions",
    "register_global_pipeline_parallel_hook": f"{_PIPELINE}.hooks",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
