"""Layers whose weights are divided over the mp axis; the names of :mod:`fleet.meta_parallel`."""

from __future__ import annotations

from fleet.strategies.tensor_parallel.cross_entropy import ParallelCrossEntropy as ParallelCrossEntropy
from fleet.strategies.tensor_parallel.cross_entropy import (
    ParallelMultiLabelCrossEntropy as ParallelMultiLabelCrossEntropy,
)
from fleet.strategies.tensor_parallel.layers import ColumnParallelLinear as ColumnParallelLinear
from fleet.strategies.tensor_parallel.layers import RowParallelLinear as RowParallelLinear
from fleet.strategies.tensor_parallel.layers import VocabParallelEmbedding as VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "ParallelMultiLabelCrossEntropy",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]
