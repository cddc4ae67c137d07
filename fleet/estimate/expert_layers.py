"""Layers of experts on fake tensors: as on a worker of an ep axis, with tokens spread evenly over the experts.

How many tokens an expert gets is a value, which fakes do not have. Every worker is counted as receiving as many as it
sends, each expert the same share, and none is dropped for capacity; everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleet.estimate.divided_layers import Silent, StandInAxes, replaced
from fleet.job.running import RUNNING
from fleet.moe import expert_mesh, gates, token_exchange
from fleet.moe.gates import BaseGate
from fleet.moe.moe_layer import MoELayer
from fleet.moe.token_exchange import exchange_rows

EVENLY = (
    "tokens are counted as spread evenly over the experts, and none as dropped; a worker whose experts get more holds "
    "more activations."
)
WHOLE = (
    "a MoELayer of this model was made outside this estimate, so its experts are counted as held by one worker. Pass a "
    "function that makes the model with the experts of one worker."
)


@dataclass
class StandInJob:
    """The job of worker 0 on a mesh without workers, as far as layers of experts look at it."""

    axes: StandInAxes


@dataclass
class StandInSession:
    """The session of that job."""

    options: Any
    job: StandInJob


@contextmanager
def expert_layers(options: Any, degrees: Mapping[str, int], experts: Mapping[str, int]) -> Iterator[None]:
    """Lets layers of experts run on fakes; inside the context they are made as on a worker of ``experts['ep']``."""
    before: Any = RUNNING.session
    stand_ins: list[tuple[Any, str, Any]] = [(module, "dist", Silent()) for module in (expert_mesh, token_exchange)]
    stand_ins += [(BaseGate, "counted", _counted), (gates, "number_of", lambda count: 1)]
    stand_ins += [(MoELayer, "_by_expert", _by_expert), (MoELayer, "_answers", _answers)]
    if experts:
        stand_in: Any = StandInSession(options, StandInJob(StandInAxes(degrees, 0, experts=experts)))
        RUNNING.session = stand_in
    try:
        with replaced(stand_ins):
            yield
    finally:
        RUNNING.session = before


def expert_remarks(model: nn.Module, degree: int) -> list[str]:
    """Returns the limits of an estimate of ``model`` with experts; ``degree`` is the degree of ep."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    whole = any(layer.world_size != degree for layer in layers)
    head = f"ep {degree}: " if degree > 1 else "MoELayer: "
    return [head + text for text, applies in ((EVENLY, layers), (WHOLE, whole)) if applies]


def _counted(gate: BaseGate, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    own = chosen.new_empty(gate.tot_expert + 1)
    return torch.empty_like(own), own, torch.empty_like(own)


def _by_expert(layer: MoELayer, flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat.argsort(stable=True), flat.new_empty((layer.world_size, layer.num_expert))


def _answers(layer: MoELayer, rows: Tensor, sent: Tensor) -> Tensor:
    group = layer._mesh.group
    each = _evenly(len(rows), layer.num_expert)
    if group is None:
        return layer._through_experts(rows, each)
    sizes = _evenly(len(rows), group.size())
    order = torch.arange(len(rows), device=rows.device)
    arrived = exchange_rows(rows, sizes, sizes, group)[order]
    answers = layer._through_experts(arrived, each)
    return exchange_rows(answers[order.argsort()], sizes, sizes, group)


def _evenly(count: int, parts: int) -> list[int]:
    return [count // parts + (place < count % parts) for place in range(parts)]
