"""Pipelines that train beside plain torch: each gradient, loss and weight equals that of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.job.running import running_session
from fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from fleet.strategies.pipeline.descriptions import StagedLayers

Loss = Callable[[Any, Any], Tensor]
CE: Loss = nn.functional.cross_entropy


class Doubled(nn.Module):
    """Takes and returns a dictionary with a number, an integer tensor and a mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "x": (self.linear(given["x"]) * given["mask"] * given["factor"]).tanh()}


def tagged(given: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"x": given[0], "mask": given[1], "factor": 2, "ids": torch.arange(2)}


def untagged(given: dict[str, Any]) -> Tensor:
    assert given["mask"].dtype == torch.bool
    assert given["ids"].tolist() == [0, 1]
    x: Tensor = given["x"]
    return x


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def layers_of(kind: str) -> list[Any]:
    """Returns nine or ten layers from 6 numbers, or ids, to 5 logits."""
    if kind == "tied":
        tied = ("emb", nn.Embedding)
        middle = [LayerDesc(nn.Linear, 4, 4), torch.tanh, LayerDesc(nn.LayerNorm, 4), LayerDesc(nn.Linear, 4, 4)]
        return [
            SharedLayerDesc(*tied, None, "weight", 5, 4),
            *middle,
            SharedLayerDesc(*tied, logits, "weight", 5, 4),
        ]
    if kind == "structures":
        return [tagged, *(LayerDesc(Doubled, 6) for _ in range(4)), untagged, LayerDesc(nn.Linear, 6, 5)]
    blocks = [layer for _ in range(4) for layer in (LayerDesc(nn.Linear, 8, 8), torch.tanh)]
    if kind == "dropout":
        blocks = [layer for _ in range(3) for layer in (LayerDesc(nn.Linear, 8, 8), LayerDesc(nn.BatchNorm1d, 8))]
    if kind == "in place":  # each stage may begin with one of these
        blocks = [layer for _ in range(3) for layer in (LayerDesc(nn.ReLU, inplace=True), LayerDesc(nn.Linear, 8, 8))]
    return [LayerDesc(nn.Linear, 6, 8), *blocks, LayerDesc(nn.Linear, 8, 5)]


def batch_of(kind: str, rows: int) -> tuple[Any, Any]:
    """Returns a batch from torch's stream."""
    labels = torch.randint(0, 5, (rows,))
    if kind == "tied":
        return torch.randint(0, 5, (rows,)), labels
    x = torch.randn(rows, 6)
    return ((x, x[:, :1] > -1) if kind == "structures" else x), labels


@dataclass
class Case:
    """One job and how it is trained."""

    degrees: dict[str, int]
    kind: str = "plain"
    num_micro: int = 4
    size: int = 2
    rows: int = 8
    chunks: int = 1
    steps: int = 3
    rate: float = 0.5
    scale: float = 1.0  # of the gradients
    tolerance: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    pp_configs: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    feed: Callable[[Any, Any], Any] = lambda x, y: [x, y]
    freeze: Sequence[str] = ()
    takes: Callable[..., Any] = lambda model, data, optimizer: model.train_batch(data, optimizer)


def start(case: Case) -> None:
    """Starts the job of ``case``."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {**case.degrees, "pp_configs": case.pp_configs}
    strategy.pipeline_configs = {"accumulate_steps": case.num_micro, "micro_batch_size": case.size, **case.pipeline}
    for name, value in case.options.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)


def check_case(case: Case) -> None:
    """Trains a pipeline and plain torch, and raises where a gradient, a loss or a weight differs."""
    start(case)
    torch.manual_seed(3)
    whole = StagedLayers(layers_of(case.kind), 1, 0)
    torch.manual_seed(3)
    layers = PipelineLayer(layers_of(case.kind), loss_fn=CE, num_virtual_pipeline_stages=case.chunks, **case.model)
    reference = dict(whole.named_parameters())
    own = dict(layers.named_parameters())
    for name in own:
        assert torch.equal(own[name], reference[name]), f"{name} starts elsewhere"
    for name in case.freeze:
        for parameters in (own, reference):
            for found in (p for n, p in parameters.items() if n.startswith(name)):
                found.requires_grad_(False)
    inner = torch.optim.SGD(layers.parameters(), lr=case.rate)
    gradients: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        gradients.update({name: p.grad.clone() for name, p in own.items() if p.grad is not None})

    inner.register_step_pre_hook(note)
    model, optimizer = fleet.distributed_model(layers), fleet.distributed_optimizer(inner)
    trainer = Beside(case, model, optimizer, whole, gradients)
    torch.manual_seed(7)
    for step in range(case.steps):
        trainer.train(step)
        assert set(gradients) == {name for name, p in own.items() if p.requires_grad}
        assert all(p.grad is None for p in own.values())
    for name, p in own.items():
        close(p.detach(), reference[name].detach(), name, case.tolerance)


class Beside:
    """Trains the pipeline and the whole model, step by step."""

    def __init__(self, case: Case, model: Any, optimizer: Any, whole: nn.Module, gradients: dict[str, Tensor]) -> None:
        self.case, self.model, self.optimizer, self.whole, self.gradients = case, model, optimizer, whole, gradients
        self.plain = torch.optim.SGD(whole.parameters(), lr=case.rate)
        session = running_session()
        assert session is not None
        self.axes = session.job.axes

    def train(self, step: int) -> None:
        """Compares the loss and the gradients of one step."""
        case, axes = self.case, self.axes
        batches = [batch_of(case.kind, case.rows) for _ in range(axes.data_replicas)]
        losses = [CE(self.whole(x), y) for x, y in batches]
        torch.stack(losses).mean().backward()
        self.gradients.clear()
        loss = case.takes(self.model, case.feed(*batches[axes.data_rank]), self.optimizer)
        assert loss.shape == ()
        assert loss.dtype == losses[0].dtype
        close(loss, losses[axes.data_rank].detach(), f"loss of step {step}", case.tolerance)
        for name, p in self.whole.named_parameters():
            if p.grad is not None:
                p.grad.mul_(case.scale)
                if name in self.gradients:
                    close(self.gradients[name], p.grad, f"gradient of {name} in step {step}", case.tolerance)
        self.plain.step()
        self.plain.zero_grad()


def close(found: Tensor, wanted: Tensor, what: str, tolerance: float) -> None:
    """Raises unless two tensors differ by ``tolerance`` of the largest number at most."""
    error = (found - wanted).abs().max().item() / max(wanted.abs().max().item(), 1e-6)
    assert error <= tolerance, f"{what} is off by {error:.1e} of the largest"


def micro_batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields a batch by micro-batches of two rows."""
    yield from zip(x.split(2), y.split(2), strict=True)
