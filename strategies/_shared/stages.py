"""What a worker must know of the other stages of a pipeline: whether what it misses is on one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fleet.strategies._declare.strategy import Workers


def on_some_stage(found: Sequence[bool], session: Workers | None) -> list[bool]:
    """Returns which of ``found`` hold on this stage of the pipeline or on another; every stage must call it.

    Patterns of module names are written for the whole model, and a stage holds some of its modules. Without a session
    there is one stage.
    """
    group = None if session is None else session.axes.group("pp")
    if session is None or group is None or not found:
        return list(found)
    flags = torch.tensor(found, dtype=torch.int32, device=session.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]
