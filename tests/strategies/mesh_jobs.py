"""Trains the toy model with one option after another on one mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fleet
from fleet.job.axes import Axes
from tests.helpers.toy_mesh import WIDTH, Toy, batch, own_rows, whole_parameters
from tests.strategies._shared.norm_jobs import init

STEPS = 4
# switch -> (what goes with it, optimizer, tolerance of losses and weights)
CASES: dict[str, tuple[dict[str, Any], str, float]] = {
    "amp": ({"amp_configs": {"dtype": "bfloat16"}}, "sgd", 3e-2),
    "asp": ({}, "sgd", 1e-5),
    "check_nan_inf": ({}, "sgd", 1e-5),
    "cudnn_exhaustive_search": ({}, "sgd", 1e-5),
    "fp16_allreduce": ({}, "sgd", 2e-3),
    "gradient_merge": ({"gradient_merge_configs": {"k_steps": 2}}, "sgd", 1e-5),
    "lamb": ({}, "adam", 1e-5),
    "lars": ({"lars_configs": {"lars_coeff": 0.5}}, "sgd", 1e-5),
    "qat": ({}, "sgd", 1e-2),
    "recompute": ({"recompute_configs": {"checkpoints": ["up", "head"]}}, "sgd", 1e-5),
    "sync_batch_norm": ({}, "sgd", 1e-5),
    "to_static": ({}, "sgd", 1e-5),
    "use_hierarchical_allreduce": ({"hierarchical_allreduce_inter_nranks": 2}, "sgd", 1e-5),
    # no switch, or a switch with a degree of its own
    "build_strategy": ({"build_strategy": {"fuse_all_optimizer_ops": True}}, "adam", 1e-5),
    "muon": ({}, "muon", 1e-5),
    "merged sharding": ({"sharding_configs": {"gradient_merge_acc_step": 2}}, "adam", 1e-5),
    "sharding stage 3": ({"sharding_configs": {"stage": 3}}, "adam", 1e-5),
}
SLOW = ("qat", "to_static")  # torchao and the compiler take their time
NO_SWITCH = ("build_strategy", "muon", "merged sharding", "sharding stage 3")


def optimizer_of(kind: str, model: nn.Module) -> Any:
    """Returns an optimizer of ``kind`` for ``model``."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    if kind == "muon":
        names = dict(model.named_parameters())
        head = {"params": [names.pop("head.weight")], "use_muon": False}
        return fleet.optimizer.Muon(
            [{"params": list(names.values())}, head], weight_decay=0.1, ns_dtype=torch.float32, adamw_eps=1e-4
        )
    return torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)


def train(axes: Axes, switch: str) -> dict[str, Any]:
    """Returns losses of this worker, as parts of those of all rows, and whole parameters."""
    norm = nn.BatchNorm1d(WIDTH) if switch == "sync_batch_norm" else None
    net = Toy(axes, norm)
    optimizer: Any = fleet.distributed_optimizer(optimizer_of(CASES[switch][1], net))
    model: Any = fleet.distributed_model(net)
    losses = []
    for step in range(STEPS):
        tensors = [own_rows(tensor, axes) for tensor in batch(step)]
        parts = axes.size("sep", "cp")
        x, y = (tensor.chunk(parts)[axes.rank("sep", "cp")] for tensor in tensors)
        loss = fleet.mean(cross_entropy(model(x), y, reduction="sum"), len(x))  # as for tokens of one sequence
        loss.backward()
        losses.append(float(loss.detach()) / parts / axes.data_replicas)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(torch.tensor(losses)).all()
    return {"losses": losses, "weights": whole_parameters(model.module, axes)}


def on_mesh(rank: int, world_size: int, jobs: list[tuple[dict[str, int], list[str]]]) -> list[dict[str, Any]]:
    """Trains with each switch of each job on the mesh of its degrees."""
    return [{switch: train(_init(world_size, degrees, switch), switch) for switch in on} for degrees, on in jobs]


def _init(world_size: int, degrees: dict[str, int], switch: str) -> Axes:
    options = {} if switch in NO_SWITCH else {switch: True}
    options |= CASES[switch][0]
    if "sharding" in switch:
        options["sharding"] = True
        if "sharding_degree" not in degrees:
            degrees = {axis.replace("dp", "sharding"): degree for axis, degree in degrees.items()}
    if switch == "use_hierarchical_allreduce" and world_size == 1:
        options = {}  # one worker is in no group of two
    return init(hybrid_configs=degrees, **options)
