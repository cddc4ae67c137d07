"""Sequence parallelism between layers whose weights are divided; the sequence is dimension 0 of activations.

Example:
    >>> class Block(torch.nn.Module):
    ...     def __init__(self, h):
    ...         super().__init__()
    ...         self.norm = torch.nn.LayerNorm(h)
    ...         for parameter in self.norm.parameters():
    ...             mark_as_sequence_parallel_parameter(parameter)
    ...         self.up = ColumnSequenceParallelLinear(h, 4 * h, has_bias=True, gather_output=False)
    ...         self.down = RowSequenceParallelLinear(4 * h, h, input_is_parallel=True)
"""

from __future__ import annotations

from fleet.strategies.tensor_parallel.sequence import AllGatherOp as AllGatherOp
from fleet.strategies.tensor_parallel.sequence import ColumnSequenceParallelLinear as ColumnSequenceParallelLinear
from fleet.strategies.tensor_parallel.sequence import GatherOp as GatherOp
from fleet.strategies.tensor_parallel.sequence import ReduceScatterOp as ReduceScatterOp
from fleet.strategies.tensor_parallel.sequence import RowSequenceParallelLinear as RowSequenceParallelLinear
from fleet.strategies.tensor_parallel.sequence import ScatterOp as ScatterOp
from fleet.strategies.tensor_parallel.sequence import is_sequence_parallel_parameter as is_sequence_parallel_parameter
from fleet.strategies.tensor_parallel.sequence import (
    mark_as_sequence_parallel_parameter as mark_as_sequence_parallel_parameter,
)
from fleet.strategies.tensor_parallel.sequence import (
    register_sequence_parallel_allreduce_hooks as register_sequence_parallel_allreduce_hooks,
)

__all__ = [
    "AllGatherOp",
    "ColumnSequenceParallelLinear",
    "GatherOp",
    "ReduceScatterOp",
    "RowSequenceParallelLinear",
    "ScatterOp",
    "is_sequence_parallel_parameter",
    "mark_as_sequence_parallel_parameter",
    "register_sequence_parallel_allreduce_hooks",
]
