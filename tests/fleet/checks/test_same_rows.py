"""Rows that differ on workers of one model copy raise, and the message names the sampler (surface trap P6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleet.checks.same_rows import SameRows, check_rows
from fleet.errors import ConfigError
from fleet.job.axes import Axes, make_axes
from fleet.job.wrapped_model import WrappedModel
from tests.helpers.workers import run_workers

HOST = torch.device("cpu")


def compare(rank: int, world_size: int) -> str:
    """Compares batches on dp 2 x mp 2."""
    axes = make_axes({"dp": 2, "mp": 2}, rank, torch.distributed.group.WORLD, 60)
    rows: Any = torch.full((2, 3), axes.data_rank)
    check_rows({"x": rows, "y": [rows.float(), 3, None]}, "model(...)", axes, HOST)
    check_rows([rows, None] if axes.rank("mp") else [None, rows + rank], "train_batch()", axes, HOST)
    here: Any = SimpleNamespace(axes=axes, device=HOST)
    SameRows(here, batches=0).rows_given(WrappedModel(), torch.tensor(rank), "model(...)")
    with pytest.raises(ConfigError) as found:
        check_rows([rows, torch.tensor([rank])], "train_batch()", axes, HOST)
    turned = torch.arange(4).flip(0) if rank % 2 else torch.arange(4)
    with pytest.raises(ConfigError):
        check_rows([turned], "train_batch()", axes, HOST)  # the same rows in another order
    return f"{found.value}"


def test_other_rows() -> None:
    """Replicas may differ; what a worker was not given is not compared."""
    said = run_workers(compare, 4)
    assert "some on rank 0 (dp 0, mp 0); other rows on rank 1 (dp 0, mp 1)" in said[0]
    assert "rank 2 (dp 1, mp 0)" in said[3]
    for text in said:
        assert "DistributedSampler(data, num_replicas=fleet.data_replicas(), rank=fleet.data_rank())" in text


def test_one_worker() -> None:
    """Nothing to compare with."""
    check_rows(torch.ones(1), "model(...)", Axes({"dp": 1}, 0), HOST)
