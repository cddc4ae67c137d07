"""A worker of two that exchange over gloo, without fleet: blocks of steps together and in plain torch alone, in turn.

What :mod:`_tables_torchrec` and :mod:`_tables_ddp` share. Writes ``samples.RANK.json`` as :mod:`_tables_fleet` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _recommender_clicks import resident_bytes
from _recommender_model import MODELS, learn
from _tables_model import Batch, Gauges, Measured, batches_of, block, by_name, draw, in_turn, plain_torch
from torch import Tensor, nn

NUM_WORKERS = 2
CALIBRATION_STEPS = 20
GAUGES: Gauges = {"own_s": time.process_time}


def join(settings: dict[str, Any], rank: int) -> None:
    """Makes this process a worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = f"file://{settings['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_WORKERS)


def train(
    settings: dict[str, Any], rank: int, model: nn.Module, step: Callable[[Batch], None], form: Callable[[Tensor], Any]
) -> None:
    """Trains on the samples whose AUC is asked for, then measures blocks; writes what was found and leaves the job."""
    found: dict[str, Any] = {}
    if settings["samples"]:
        found["learn"] = learn(settings, rank, step, model, form, GAUGES)
        found["learn"]["resident"] = resident_bytes()
        dist.barrier()
    if settings["blocks"]:
        plain = plain_torch(settings["tables"], settings["ids"], torch.optim.Adagrad, MODELS[settings["model"]])
        found.update(measure(settings, {"plain": plain, "served": step}, form, rank))
    Path(settings["folder"], f"samples.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(
    settings: dict[str, Any], steps: dict[str, Callable[[Batch], None]], form: Callable[[Tensor], Any], rank: int
) -> dict[str, dict[str, list[Measured]]]:
    """Returns the blocks of each kind by batch size."""
    samples = draw(settings["tables"], settings["ids"], 1 + rank)
    found: dict[str, dict[str, list[Measured]]] = {}
    for size in settings["batches"]:
        batches = {"plain": batches_of(samples, size, by_name), "served": batches_of(samples, size, form)}
        # A step needs both workers, so they agree on a number of steps that takes the time of a block.
        tried = block(steps["served"], batches["served"], GAUGES, steps=CALIBRATION_STEPS)
        agreed = torch.tensor(tried["steps"] / tried["wall_s"] * settings["seconds"])
        dist.all_reduce(agreed)
        limits = {
            "served": {"steps": max(1, round(agreed.item() / NUM_WORKERS))},
            "plain": {"seconds": settings["seconds"]},
        }

        measured = partial(together, steps, batches, limits)
        found[str(size)] = in_turn(steps, settings["blocks"], measured)
    return found


def together(
    steps: Mapping[str, Callable[[Batch], None]],
    batches: Mapping[str, Iterable[Batch]],
    limits: Mapping[str, Mapping[str, float]],
    kind: str,
) -> Measured:
    """Returns a block of one kind, which all workers begin together."""
    dist.barrier()
    return block(steps[kind], batches[kind], GAUGES, **limits[kind])
