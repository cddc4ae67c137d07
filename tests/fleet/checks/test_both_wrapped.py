"""Who counts as acting in the optimizer."""

from __future__ import annotations

import torch

from fleet.checks.both_wrapped import wraps_optimizers
from fleet.job.job import Job
from fleet.options import DistributedStrategy
from fleet.role_maker.record import RoleRecord
from fleet.strategies.gradient_merge import GradientMerge
from fleet.strategies.sync_batch_norm import SyncBatchNorm


def test_a_strategy_acts_in_the_optimizer_where_it_wraps_one() -> None:
    options = DistributedStrategy()
    job = Job(record=RoleRecord(), device=torch.device("cpu"), options=options, say=print)
    assert wraps_optimizers(GradientMerge(options["gradient_merge_configs"], job))
    assert not wraps_optimizers(SyncBatchNorm(None, job))
