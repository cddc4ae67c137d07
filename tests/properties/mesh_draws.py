"""Meshes drawn at random, many of them trained one after the other in the same worker processes."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fleet.common.notes import add_note
from fleet.errors import ConfigError
from tests.helpers.mesh_results import check_results
from tests.helpers.meshes import BLOCKS, Mesh, train_on
from tests.helpers.workers import run_workers
from tests.properties.pool import end_of_draw

AXES = ("dp", "mp", "pp", "sharding", "sep", "cp")
RULES = ("sgd", "plain_sgd", "adamw")


def draw(number: int, seed: int, worlds: tuple[int, ...]) -> Mesh:
    """Returns mesh ``number`` of ``seed``, a pure function of both, with one of these numbers of workers."""
    draws = random.Random(f"mesh {seed}/{number}")
    degrees = dict.fromkeys(AXES, 1)
    for _ in range(draws.choice(worlds).bit_length() - 1):
        # Sequences are divided by one axis; there are four blocks for stages and four heads.
        taken = {"cp"} if degrees["sep"] > 1 else {"sep"} if degrees["cp"] > 1 else set()
        free = [axis for axis in AXES if axis not in taken and degrees[axis] < 4]
        degrees[draws.choice(free)] *= 2
    experts = draws.random() < 0.3
    if experts:
        divide_experts(degrees, draws)
    pp = degrees["pp"]
    options: dict[str, Any] = {}
    if degrees["sharding"] > 1 and draws.random() < (0.1 if pp > 1 else 0.5):
        options = {"sharding": True, "sharding_configs": {"stage": draws.choice((2, 3))}}
    merge = draws.choice((2, 3)) if draws.random() < (0.05 if pp * degrees["sharding"] > 1 else 0.3) else 1
    micro_batches, size = draws.randint(1, 9), draws.choice((1, 2))
    last = draws.choice((0, 1)) if size > 1 and micro_batches > 1 else 0
    made = Mesh(
        degrees={axis: degree for axis, degree in degrees.items() if degree > 1},
        micro_batches=micro_batches,
        tied=draws.random() < 0.4,
        clip=draws.choice((None, 0.5)),
        options=options,
        virtual=2 if pp > 1 and 2 * pp <= BLOCKS and draws.random() < 0.4 else 1,
        plain_loop=pp == 1 and draws.random() < 0.5,
        rule=draws.choice(RULES),
        norm=draws.choice(("layer", "rms")),
        experts=experts,
        recompute=draws.choice((0, 0, 1, 2)),
        merge=merge,
        schedule=draws.choice(("1F1B", "F-then-B")),
        rows=0,
    )
    object.__setattr__(made, "rows", made.replicas * merge * (micro_batches * size - last))
    return made


def divide_experts(degrees: dict[str, int], draws: random.Random) -> None:
    """Divides the experts among the workers of sharding and mp, where dp and sep leave them all; cp lies in them."""
    if draws.random() < 0.9:  # the others are refused
        degrees["sharding"] *= degrees.pop("dp") * degrees.pop("sep")
    degrees["sharding"] *= degrees["cp"]
    workers = degrees["sharding"] * degrees["mp"]
    fits = [ep for ep in (1, 2, 4) if workers % ep == 0]
    degrees["ep"] = draws.choice(fits)
    if degrees["ep"] == 1:
        degrees["sharding"] //= degrees["cp"]
    else:
        degrees["moe_sharding"] = workers // degrees["ep"]


def train_many(rank: int, world_size: int, meshes: list[Mesh]) -> list[dict[str, Any]]:
    """Trains on each mesh in turn; a worker function. A refusal is a result."""
    found = []
    for place, mesh in enumerate(meshes):
        torch.manual_seed(0)
        try:
            found.append(train_on(rank, world_size, mesh))
        except ConfigError as error:
            found.append({"refused": str(error)})
        except Exception as error:
            add_note(error, f"at place {place}: {mesh!r}")
            raise
        end_of_draw()
    return found


@dataclass
class Report:
    """How many meshes were trained, the sentences of the refusals, and what was wrong with which mesh."""

    trained: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        refused = "\n".join(f"  {count} x {text}" for text, count in self.refusals.most_common())
        return f"{self.trained} trained, {sum(self.refusals.values())} refused\n{refused}\n" + "\n".join(self.faults)


def run(meshes: Iterable[Mesh], timeout_s: float | None = None) -> Report:
    """Trains on all meshes, those of one number of workers in the same processes, and judges the results."""
    report = Report()
    by_world: dict[int, list[Mesh]] = {}
    for mesh in meshes:
        by_world.setdefault(mesh.world_size, []).append(mesh)
    for world_size, same in by_world.items():
        found = run_workers(train_many, world_size, same, backend=None, timeout_s=timeout_s or 60 + 30 * len(same))
        for mesh, results in zip(same, zip(*found, strict=True), strict=True):
            judge(mesh, results, report)
    return report


def judge(mesh: Mesh, results: tuple[dict[str, Any], ...], report: Report) -> None:
    """Adds one mesh to ``report``: trained as one process, or refused by all with an option that the user set."""
    refused = [result["refused"] for result in results if "refused" in result]
    try:
        if refused:
            assert len(refused) == len(results), f"{len(refused)} of {len(results)} workers refused"
            assert names_an_option(mesh, refused[0]), "the refusal names none of the options"
            report.refusals[refused[0]] += 1
        else:
            check_results(mesh, results)
            report.trained += 1
    except AssertionError as error:
        report.faults.append(f"FAULT {mesh!r}\n  {str(error)[:600]}\n  {refused[:1]}")


def names_an_option(mesh: Mesh, text: str) -> bool:
    """Returns whether a refusal speaks of something that this mesh has set."""
    asked = [f"{axis}_degree" for axis, degree in mesh.degrees.items() if degree > 1]
    asked += [*mesh.options, *(["gradient_merge"] if mesh.merge > 1 else [])]
    asked += ["accumulate_steps", "micro_batch_size"]
    asked += ["num_virtual_pipeline_stages"] if mesh.virtual > 1 else []
    return any(re.search(rf"\b{name}\b", text) for name in asked)
