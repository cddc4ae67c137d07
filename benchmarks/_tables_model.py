"""The model of ``ps.py --only tables``, its samples, and blocks of its steps: what all of its peers share.

A model of clicks with one table a feature, as most are written: the rows of all features side by side, two layers of
400, one logit, Adagrad. Imports torch and numpy only, because TorchRec has an environment of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import torch
from _recommender_clicks import draw_ranks, spread_ids
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

DIM, WIDTHS = 12, (400, 400)
SAMPLES = 32_768
RATE = 0.01
START_STD = 0.01  # of the normal distribution that rows begin with
# Steps at the start of a block that are not counted: caches are warm then. After more of them the queues of an async
# worker are as full as they stay.
UNCOUNTED, UNCOUNTED_ASYNC = 3, 20
Ids = dict[str, Tensor]
Batch = tuple[Any, Tensor]
Gauges = Mapping[str, Callable[[], float]]
Measured = dict[str, float]


class Separate(nn.Module):
    """A module for each feature, and their rows side by side: ids (batch,) by name -> (batch, features * DIM)."""

    def __init__(self, names: list[str], make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: make() for name in names})

    def forward(self, ids: Ids) -> Tensor:
        """Returns the rows of a batch."""
        return torch.cat([table(ids[name]) for name, table in self.tables.items()], 1)


class Clicks(nn.Module):
    """Logits (batch,) of what ``rows`` makes of a batch's ids."""

    def __init__(self, rows: nn.Module, num_tables: int) -> None:
        super().__init__()
        self.rows = rows
        self.deep = layers(num_tables * DIM)

    def forward(self, ids: Any) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.deep(self.rows(ids)).squeeze(1)
        return logits


def layers(width: int, *widths: int) -> nn.Sequential:
    """Returns linear layers of these widths with ReLU between them; without any, WIDTHS and a logit."""
    chain = (width, *(widths or (*WIDTHS, 1)))
    made: list[nn.Module] = []
    for i in range(len(chain) - 1):
        made += [nn.Linear(chain[i], chain[i + 1]), nn.ReLU()]
    return nn.Sequential(*made[:-1])


def small_embedding(num_ids: int) -> nn.Embedding:
    """Returns the table of a feature in plain torch, which begins as the tables of its peers do."""
    table = nn.Embedding(num_ids, DIM, sparse=True)
    nn.init.normal_(table.weight, std=START_STD)
    return table


def names_of(num_tables: int) -> list[str]:
    """Returns the names of the features."""
    return [f"c{i}" for i in range(num_tables)]


def plain_torch(
    num_tables: int,
    num_ids: int,
    rule: type[torch.optim.Optimizer],
    make: Callable[[nn.Module, int], nn.Module] = Clicks,
) -> Callable[[Batch], None]:
    """Returns a step of the model in one process of plain torch."""
    model = make(Separate(names_of(num_tables), lambda: small_embedding(num_ids)), num_tables)
    return step_of(model, rule(model.parameters(), lr=RATE))  # type: ignore[call-arg]


def step_of(model: Any, optimizer: Any) -> Callable[[Batch], None]:
    """Returns a step of the plain loop."""

    def step(batch: Batch) -> None:
        ids, labels = batch
        loss = binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def draw(num_tables: int, num_ids: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns ids (tables, samples) that follow Zipf's law in each table, popular ones anywhere in it, and labels."""
    rng = np.random.default_rng(seed)
    ranks = draw_ranks(rng, num_tables, num_ids, SAMPLES)
    labels = (rng.random(SAMPLES) < 0.25).astype(np.float32)
    return torch.from_numpy(spread_ids(ranks, num_ids)), torch.from_numpy(labels)


def batches_of(samples: tuple[Tensor, Tensor], size: int, form: Callable[[Tensor], Any]) -> Iterator[Batch]:
    """Yields the same batches over and over; ``form`` makes the model's input of ids (tables, batch), before timing."""
    ids, labels = samples
    starts = range(0, len(labels) - size + 1, size)
    return cycle([(form(ids[:, i : i + size].contiguous()), labels[i : i + size]) for i in starts])


def by_name(ids: Tensor) -> Ids:
    """Returns the ids of each feature, by name."""
    return dict(zip(names_of(len(ids)), ids.unbind(), strict=True))


def block(
    step: Callable[[Batch], None],
    loader: Iterable[Batch],
    gauges: Gauges,
    seconds: float = float("inf"),
    steps: float = float("inf"),
    uncounted: int = UNCOUNTED,
) -> Measured:
    """Trains for a time or for a number of steps; returns steps, seconds, and by how much each gauge has grown."""
    done = 0
    start = limit = 0.0
    before: Measured = {}
    for number, batch in enumerate(loader, 1):
        step(batch)
        if number > uncounted:
            done += 1
            if done >= steps or time.perf_counter() >= limit:
                break
        # Before the loader is asked for the next batch, whose rows it may request.
        elif number == uncounted:
            before = {name: read() for name, read in gauges.items()}
            start = time.perf_counter()
            limit = start + seconds
    taken = time.perf_counter() - start
    return {"steps": done, "wall_s": taken, **{name: read() - before[name] for name, read in gauges.items()}}


def in_turn(kinds: Iterable[str], count: int, measured: Callable[[str], Measured]) -> dict[str, list[Measured]]:
    """Returns ``count`` blocks of each kind, measured in turn; a block of each before them warms up."""
    found: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    for number in range(count + 1):
        for kind in sorted(found, reverse=bool(number % 2)):
            one = measured(kind)
            if number:
                found[kind].append(one)
    return found
