"""A small model that exists on any mesh, and whose gradients are a function of its values, element by element.

It has divided layers (mp), stages with layers of their own (pp), one layer on the first and the last stage, a buffer of
whole numbers and two parameter groups. Every mesh must give the numbers of one process, bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fleet
from fleet.checks.watched import Watched
from fleet.job.running import running_session
from fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from fleet.strategies._shared.random_streams import TRACKER

SHARED = "embed"


def same(x: Tensor) -> Tensor:
    """Returns ``x``: an entry of the list without parameters."""
    return x


def staged() -> PipelineLayer:
    """Returns the layers of this worker's stage, under the names of the whole model."""
    ends = SharedLayerDesc(SHARED, VocabParallelEmbedding, None, "weight", 8, 4)
    columns, rows = LayerDesc(ColumnParallelLinear, 4, 8, has_bias=True), LayerDesc(RowParallelLinear, 8, 4)
    return PipelineLayer(
        [ends, columns, LayerDesc(nn.BatchNorm1d, 8), rows, *[same] * 8, LayerDesc(nn.LayerNorm, 4), ends],
        loss_fn=nn.functional.mse_loss,
    )


def started(degrees: dict[str, int], stage: int = 1) -> tuple[Any, Any]:
    """Starts a job on a mesh; returns its distributed model and optimizer, without checks of gradients' origin."""
    TRACKER.reset()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    strategy.sharding_configs = {"stage": stage}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    session = running_session()
    assert session is not None
    session.job.listeners.get(Watched).close()
    torch.manual_seed(session.job.axes.data_rank + 7)
    net = staged()
    model: Any = fleet.distributed_model(net)
    named = [(p, p.dim() > 1) for p in model.parameters()]
    groups = [
        {"params": [p for p, is_matrix in named if is_matrix], "weight_decay": 0.1},
        {"params": [p for p, is_matrix in named if not is_matrix], "weight_decay": 0.0},
    ]
    optimizer: Any = fleet.distributed_optimizer(torch.optim.AdamW(groups, lr=0.05))
    session.job.listeners.get(Watched).close()
    return model, optimizer


def step(model: Any, optimizer: Any, count: int) -> None:
    """Makes ``count`` steps with gradients that depend on the values alone."""
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.sin(parameter.detach() * 5)
        for name, buffer in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer.add_(1)
        optimizer.step()
        optimizer.zero_grad()


def whole_start() -> dict[str, Tensor]:
    """Returns the whole state that every mesh begins with; made without a job."""
    torch.manual_seed(3)
    return {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in staged().state_dict().items()}


def reference(steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns model and optimizer state of one process after ``steps`` steps, with plain torch."""
    net = staged()
    net.load_state_dict(whole_start())
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    step(net, optimizer, steps)
    return net.state_dict(), optimizer.state_dict()


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Returns where two states first differ, or an empty string."""
    if isinstance(expected, Tensor):
        same = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
        return "" if same and torch.equal(found, expected) else f"{path}: {found} is not {expected}"
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return f"{path}: {list(found)} are not {list(expected)}"
        return next((d for k in expected if (d := difference(found[k], expected[k], f"{path}.{k}"))), "")
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{path}: {len(found)} and {len(expected)} entries"
        pairs = zip(found, expected, strict=True)
        return next((d for i, (f, e) in enumerate(pairs) if (d := difference(f, e, f"{path}[{i}]"))), "")
    return "" if found == expected else f"{path}: {found!r} is not {expected!r}"
