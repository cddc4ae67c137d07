"""Training on one mesh, a checkpoint, and training that goes on from it on another; worker functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fleet import fleet
from tests.helpers.meshes import Mesh, batches, cut, fleet_model, loss_in_loop, start

BEFORE, AFTER = 3, 5
SHARDING3 = {"sharding": True, "sharding_configs": {"stage": 3}}
MESHES = {
    "one": Mesh({}),
    "dp2": Mesh({"dp": 2}),
    "mp2": Mesh({"mp": 2}),
    "pp2": Mesh({"pp": 2}),
    "sharding2": Mesh({"sharding": 2}),
    "stage3": Mesh({"sharding": 2}, plain_loop=True, options=SHARDING3),
    "mp2_pp2": Mesh({"mp": 2, "pp": 2}),
    "dp2_sharding2": Mesh({"dp": 2, "sharding": 2}),
}

MIXTURES = {
    "experts": Mesh({}, experts=True, plain_loop=True),
    "ep2": Mesh({"sharding": 2, "ep": 2}, experts=True, plain_loop=True),
    "mp2_ep2": Mesh({"mp": 2, "ep": 2}, experts=True, plain_loop=True),
}
SEQUENCES = {
    "whole": Mesh({}, plain_loop=True),
    "sep2": Mesh({"sep": 2}, plain_loop=True),
    "cp2": Mesh({"cp": 2}, plain_loop=True),
}


def optimizer_of(rule: str, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer with two groups."""
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    if rule == "muon":
        # bfloat16, its default, turns another order of a gradient's sum into a difference of 1e-5
        return fleet.optimizer.Muon(groups, lr=0.01, ns_dtype=torch.float32)
    # A larger eps where another order of a gradient's sum would turn the noise of a gradient of 0 into a step.
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-2 if rule == "steady" else 1e-8)


def stepped(mesh: Mesh, wrapped: Any, stepper: Any, rows: Any) -> Iterator[float]:
    """Trains on ``rows`` and yields the loss of each step over all rows."""
    replica, replicas = fleet.data_rank(), fleet.data_replicas()
    for x, y in rows:
        mine = x.chunk(replicas)[replica], y.chunk(replicas)[replica]
        if mesh.plain_loop or "pp" not in mesh.degrees:
            tokens = [cut(mesh, part) for part in mine]
            loss = loss_in_loop(mesh, wrapped(tokens[0]), tokens[1])
            loss.backward()
            stepper.step()
            stepper.zero_grad()
        else:
            loss = wrapped.train_batch(mine, stepper)
        found = fleet.util.all_gather(float(loss.detach()))
        yield float(sum(found) / len(found))


def made(mesh: Mesh, rule: str, noise: float = 0.0) -> dict[str, Any]:
    """Returns the objects of a job on ``mesh``; ``noise`` makes its numbers wrong."""
    start(mesh)
    model = fleet_model(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise)
    optimizer = optimizer_of(rule, model)
    wrapped, stepper = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    return {"model": wrapped, "optimizer": stepper, "scheduler": scheduler, "epoch": 0}


def save_on(rank: int, world_size: int, mesh: Mesh, rule: str, path: str, asynchronous: bool) -> list[float]:
    """Trains, saves, and returns the losses of the steps after it."""
    mesh = replace(mesh, steps=BEFORE + AFTER)
    objects = made(mesh, rule)
    rows = batches(mesh)
    for _ in stepped(mesh, objects["model"], objects["optimizer"], rows[:BEFORE]):
        objects["scheduler"].step()
    fleet.checkpoint.save(path, {**objects, "epoch": 3}, asynchronous=asynchronous)
    losses = list(stepped(mesh, objects["model"], objects["optimizer"], rows[BEFORE:]))
    fleet.checkpoint.wait()
    fleet.barrier_worker()
    return losses


def load_on(rank: int, world_size: int, mesh: Mesh, rule: str, path: str, again: str) -> list[float]:
    """Loads, saves ``again`` what it has loaded, and returns the losses of the next steps."""
    mesh = replace(mesh, steps=BEFORE + AFTER)
    objects = made(mesh, rule, noise=0.5)
    found = fleet.checkpoint.load(path, objects)
    assert found["epoch"] == 3
    fleet.checkpoint.save(again, {**objects, "epoch": found["epoch"]})
    return list(stepped(mesh, objects["model"], objects["optimizer"], batches(mesh)[BEFORE:]))


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yields where two whole checkpoints differ; every bit counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key.startswith("groups@"):
                continue
            if key not in one or key not in other:
                yield f"{name}/{key} is in one only"
            else:
                yield from differences(one[key], other[key], f"{name}/{key}")
    elif isinstance(one, Tensor):
        if not (isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)):
            yield name
    elif one != other:
        yield f"{name}: {one!r} and {other!r}"


# ---- a network of convolutions and batch norms, where the mesh divides no layer -------------------------------------

RESNETS = {
    "one": Mesh({}),
    "dp2": Mesh({"dp": 2}),
    "sharding2": Mesh({"sharding": 2}),
    "stage2": Mesh({"sharding": 2}, options={"sharding": True, "sharding_configs": {"stage": 2}}),
    "stage3": Mesh({"sharding": 2}, options=SHARDING3),
    "dp2_sharding2": Mesh({"dp": 2, "sharding": 2}),
}


class Residual(nn.Module):
    """x + two convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.two, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, width, height, width]."""
        out: Tensor = x + self.norm2(self.two(torch.relu(self.norm1(self.one(x)))))
        return torch.relu(out)


def resnet() -> nn.Module:
    """Returns the network, always from the same numbers."""
    torch.manual_seed(3)
    ends = nn.Conv2d(3, 8, 3), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(ends[0], Residual(8), Residual(8), ends[1])


def train_resnet(rank: int, world_size: int, mesh: Mesh, path: str, again: str) -> list[float]:
    """Trains before and after a save to ``path``; with ``again``, loads ``path``, saves ``again`` and trains on."""
    start(replace(mesh, options={**mesh.options, "sync_batch_norm": True}))
    model = resnet()
    if again:
        nn.init.constant_(model[0].weight, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped, stepper = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    objects = {"model": wrapped, "optimizer": stepper}
    draws = torch.Generator().manual_seed(4)
    rows = [
        (torch.randn(8, 3, 6, 6, generator=draws), torch.randint(5, (8,), generator=draws))
        for _ in range(BEFORE + AFTER)
    ]

    def train(some: Any) -> list[float]:
        losses = []
        for x, y in some:
            mine = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
            loss = nn.functional.cross_entropy(wrapped(mine[0]), mine[1])
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            found = fleet.util.all_gather(float(loss.detach()))
            losses.append(float(sum(found) / len(found)))
        return losses

    if again:
        fleet.checkpoint.load(path, objects)
        fleet.checkpoint.save(again, objects)
    else:
        train(rows[:BEFORE])
        fleet.checkpoint.save(path, objects)
    return train(rows[BEFORE:])
