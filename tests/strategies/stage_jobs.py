"""Trains a small pipeline, with layers divided over mp and a tied weight, with one option after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import fleet
from fleet.errors import NanInfError
from fleet.job.axes import Axes
from fleet.job.running import running_session
from fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.helpers.toy_mesh import ROWS, WIDTH, Toy, batch, whole_parameters
from tests.strategies._shared.norm_jobs import ClippingSGD, init
from tests.strategies.mesh_jobs import CASES, NO_SWITCH, optimizer_of

STEPS, MICRO, LIMIT = 3, 2, 0.05
CLIPS = ("hook", "subclass", "scaler", "global", "each")


class Begin(nn.Module):
    """A norm, over the batch or not."""

    def __init__(self, over_batch: bool) -> None:
        super().__init__()
        self.layer1 = nn.BatchNorm1d(WIDTH) if over_batch else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` in another scale."""
        return self.layer1(x)


class Divided(Toy):
    """The toy model of one worker as a layer, divided over mp, with as many outputs as inputs."""

    def __init__(self) -> None:
        session = running_session()
        assert session is not None
        super().__init__(session.job.axes)
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``."""
        self.head = lambda value: value
        return super().forward(x)


class Tied(nn.Module):
    """A weight that is used at the begin and at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` times the weight."""
        return functional.linear(x, self.weight)


def at_the_end(layer: Tied, x: Tensor) -> Tensor:
    """Returns the scores."""
    return functional.linear(x, layer.weight.T)


def layers_of(switch: str) -> PipelineLayer:
    """Returns the stage of this worker."""
    descriptions = [
        SharedLayerDesc("tied", Tied),
        LayerDesc(Begin, switch == "sync_batch_norm"),
        LayerDesc(Divided),
        LayerDesc(Divided),
        SharedLayerDesc("tied", Tied, at_the_end),
    ]
    return PipelineLayer(
        descriptions, loss_fn=functional.cross_entropy, seg_method=[0, 3, 5] if _stages() == 2 else [0]
    )


def _stages() -> int:
    session = running_session()
    return 1 if session is None else session.job.axes.size("pp")


def clipping(kind: str, model: nn.Module, seen: list[float]) -> Any:
    """Returns an optimizer that clips in the way of ``kind``."""
    parameters: Any = model.parameters()
    if kind == "global":
        return fleet.optimizer.Momentum(0.5, 0.9, parameters, grad_clip=fleet.ClipGradByGlobalNorm(LIMIT))
    if kind == "each":
        return fleet.optimizer.Momentum(0.5, 0.9, parameters, grad_clip=fleet.ClipGradByNorm(LIMIT))
    if kind == "subclass":
        optimizer = ClippingSGD(parameters, 0.5, momentum=0.9)
        optimizer.seen = seen
        return optimizer
    made = torch.optim.SGD(parameters, 0.5, momentum=0.9)

    def clip(stepping: Any, args: Any, kwargs: Any) -> None:
        seen.append(float(clip_grad_norm_([p for g in stepping.param_groups for p in g["params"]], LIMIT)))

    made.register_step_pre_hook(clip)
    return made


def train(axes: Axes, switch: str) -> dict[str, Any]:
    """Returns losses, norms and whole parameters of this stage."""
    seen: list[float] = []
    net: Any = layers_of(switch)
    if switch in CLIPS:
        inner = clipping(switch, net, seen)
    else:
        inner = optimizer_of(CASES[switch][1], net) if switch != "muon" else muon(net)
    optimizer = fleet.distributed_optimizer(inner)
    model: Any = fleet.distributed_model(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if switch == "scaler" else None
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        rows = [part.chunk(axes.data_replicas)[axes.data_rank] for part in torch.arange(ROWS).chunk(MICRO)]
        own = torch.cat(rows)  # so that a micro-batch holds the same rows on every mesh
        losses.append(float(model.train_batch([x[own], y[own]], optimizer, scaler=scaler)))
    return {"losses": losses, "norms": seen, "weights": whole_parameters(net, axes), "replica": axes.data_rank}


def muon(net: nn.Module) -> Any:
    """Returns Muon for all matrices."""
    return fleet.optimizer.Muon(net.parameters(), weight_decay=0.1, ns_dtype=torch.float32, adamw_eps=1e-4)


def on_mesh(rank: int, world_size: int, jobs: list[tuple[dict[str, int], list[str]]]) -> list[dict[str, Any]]:
    """Trains with each switch of each job on the mesh of its degrees."""
    found = []
    for degrees, switches in jobs:
        results = {}
        for switch in switches:
            options: dict[str, Any] = {} if switch in (*CLIPS, *NO_SWITCH) else {switch: True}
            options |= CASES[switch][0] if switch in CASES else {}
            if switch == "use_hierarchical_allreduce" and world_size == 1:
                options = {}
            if switch == "recompute":
                options["recompute_configs"] = {"checkpoints": ["*.layer1"]}  # on one stage of two
            rows = ROWS // MICRO // (degrees.get("dp_degree", 1) * degrees.get("sharding_degree", 1))
            pipeline = {"accumulate_steps": MICRO, "micro_batch_size": rows}
            results[switch] = train(init(hybrid_configs=degrees, pipeline_configs=pipeline, **options), switch)
        found.append(results)
    return found


def spoiled(rank: int, world_size: int) -> list[str]:
    """Returns the messages of check_nan_inf for a NaN in forward and one in backward."""
    return [spoil_once(kind) for kind in ("forward", "backward")]


def spoil_once(kind: str) -> str:
    """Trains with check_nan_inf until a NaN comes up in stage 1, in micro-batch 1 of step 2; returns the message."""
    axes = init(
        hybrid_configs={"pp_degree": 2, "mp_degree": 2},
        pipeline_configs={"accumulate_steps": MICRO, "micro_batch_size": ROWS // MICRO},
        check_nan_inf=True,
    )
    net: Any = layers_of("lars")
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    calls = 0

    def spoil(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != MICRO + 2:
            return output
        if kind == "backward":
            output.register_hook(lambda gradient: gradient * torch.nan)
            return output
        return output * torch.nan

    if axes.rank("pp") == 1 and axes.rank("mp") == 1:
        net.get_submodule("3.down").register_forward_hook(spoil)
    model: Any = fleet.distributed_model(net)
    try:
        for step in range(STEPS):
            model.train_batch(list(batch(step)), optimizer)
    except NanInfError as error:
        return str(error)
    return "nothing"
