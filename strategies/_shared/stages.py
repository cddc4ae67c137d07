"""What a worker must know of the other stages of a pipeline: whether what it misses is on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fleet.job.job import Job


def on_some_stage(found: Sequence[bool], job: Job | None) -> list[bool]:
    """Returns which of ``found`` hold on this stage of the pipeline or on another; every stage must call it.

    Patterns of module names are written for the whole model, and a stage holds some of its modules. Without a job
    there is one stage.
    """
    group = None if job is None else job.axes.group("pp")
    if job is None or group is None or not found:
        return list(found)
    flags = torch.tensor(found, dtype=torch.int32, device=job.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]
