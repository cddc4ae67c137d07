"""Sequence parallelism on one worker; tests/strategies/tensor_parallel trains with it on several."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import ConfigError
from fleet.utils import sequence_parallel_utils


def test_sequence_layers_are_plain_alone() -> None:
    """Surface section 5: with m = 1 nothing is divided, and the defaults work."""
    utils = sequence_parallel_utils
    x = torch.randn(4, 2, 8)
    for operation in (utils.ScatterOp, utils.GatherOp, utils.AllGatherOp, utils.ReduceScatterOp):
        assert operation.apply(x) is x
    column, row = utils.ColumnSequenceParallelLinear(8, 6), utils.RowSequenceParallelLinear(6, 8)
    assert torch.equal(row(column(x)), x @ column.weight.T @ row.weight.T + row.bias)
    assert utils.is_sequence_parallel_parameter(row.bias)
    assert not utils.is_sequence_parallel_parameter(row.weight)
    utils.register_sequence_parallel_allreduce_hooks(row, 2)
    with pytest.raises(ConfigError, match="accumulation_steps"):
        utils.register_sequence_parallel_allreduce_hooks(row, None)  # type: ignore[arg-type]
