"""Whether something holds on another worker: on a stage of a pipeline, or in a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fleet.common.outside_graphs import outside_graphs

if TYPE_CHECKING:
    from fleet.job.axes import Axes


def on_some_stage(found: Sequence[bool], axes: Axes | None) -> list[bool]:
    """Returns which of ``found`` hold on this stage of the pipeline or on another; every stage must call it.

    Patterns of module names are written for the whole model, and a stage holds some of its modules. Without axes
    there is one stage.
    """
    group = None if axes is None else axes.group("pp")
    if group is None or not found:
        return list(found)
    return on_any(found, group)


@outside_graphs
def on_any(found: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """Returns which of ``found`` hold on a worker of ``group``; every one must call it."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    flags = torch.tensor(found, dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]
