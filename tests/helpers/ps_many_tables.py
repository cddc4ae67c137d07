"""A model with 26 tables for jobs whose processes are killed; it counts gradients, or shows every wrong row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fleet
from tests.helpers.ps_fault_job import Task

ALONE, TOGETHER = 13, 13
DIM, SAMPLES, NUM_IDS = 2, 8, 30
IDS = torch.arange(NUM_IDS) * 10**12 + 7


class ManyTables(nn.Module):
    """Modules of their own, and a collection, one of whose features has bags.

    Args:
        counts: the gradient of every row and parameter is 1 for each sample; or the rows of the sample decide it. Both
            are whole numbers, so no order of sums changes a bit, and one wrong row changes all that follow.
    """

    def __init__(self, counts: bool) -> None:
        super().__init__()
        start = fleet.ps.Initializer("constant", 0.0)
        self.counts = counts
        self.alone = nn.ModuleList(fleet.SparseEmbedding(DIM, initializer=start) for _ in range(ALONE))
        tables: dict[str, Any] = {f"f{number}": DIM for number in range(TOGETHER - 1)}
        self.fields = fleet.SparseEmbeddings({**tables, "words": {"dim": DIM, "combiner": "sum"}}, initializer=start)
        self.out = nn.Linear(DIM * (ALONE + TOGETHER), 1)
        with torch.no_grad():
            self.out.weight.copy_(torch.arange(self.out.weight.numel(), dtype=torch.float32)[None])
            self.out.bias.zero_()

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Returns the loss."""
        rows = torch.cat([table(batch["alone"][:, number]) for number, table in enumerate(self.alone)], 1)
        rows = torch.cat([rows, *self.fields(batch["fields"]).values()], 1)
        parameters = self.out.weight.sum() + self.out.bias.sum()
        if self.counts:
            total: Tensor = rows.sum() + parameters
            return total
        factors = factors_of(rows.detach().sum(1), parameters.detach())
        return (rows.sum(1) * factors).sum() + parameters * factors.sum()


def factors_of(totals: Tensor, parameters: Tensor) -> Tensor:
    """Returns the gradients of samples whose rows have these sums: even, so the mean over two workers is whole, too."""
    return 2 * ((totals + parameters).remainder(5) - 2)


def batch_of(rank: int, step: int) -> dict[str, Any]:
    """Returns ids; those of "words" are flat, with offsets."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    ids = IDS[torch.randint(0, NUM_IDS, (SAMPLES, ALONE + TOGETHER + 1), generator=draw)]
    fields: dict[str, Any] = {f"f{number}": ids[:, ALONE + number].clone() for number in range(TOGETHER - 1)}
    words = ids[:, -2:].reshape(-1)[: SAMPLES + step % SAMPLES]
    fields["words"] = (words, torch.arange(SAMPLES))
    return {"alone": ids[:, :ALONE].clone(), "fields": fields}


def tables_of(model: Any) -> dict[str, Tensor]:
    """Returns the rows of all ids, and the parameters."""
    net = model.module
    state = model.state_dict()
    found = {f"alone.{number}": table.lookup_rows(IDS) for number, table in enumerate(net.alone)}
    found |= {f"fields.{name}": net.fields[name].lookup_rows(IDS) for name in net.fields}
    return {**found, "weight": state["out.weight"], "bias": state["out.bias"]}


COUNTS = Task(partial(ManyTables, True), batch_of, tables_of)
VALUES = Task(partial(ManyTables, False), batch_of, tables_of)


def expected_of(task: Task, num_workers: int, steps: int, *, mean: bool) -> dict[str, Tensor]:
    """Returns what the tables hold when every gradient was applied once, by SGD with rate 1.

    Args:
        task: :data:`COUNTS`, or :data:`VALUES`, of steps that all workers do together.
        num_workers, steps: of the job.
        mean: the gradients of the workers are averaged.
    """
    net = ManyTables(False)
    names = [*(f"alone.{number}" for number in range(ALONE)), *(f"fields.{name}" for name in net.fields)]
    found = {name: torch.zeros(NUM_IDS, DIM) for name in names}
    found |= {"weight": net.out.weight.detach().clone(), "bias": net.out.bias.detach().clone()}
    scale = 1 / num_workers if mean else 1
    for step in range(steps):
        before = {name: values.clone() for name, values in found.items()}
        for rank in range(num_workers):
            places = _places(batch_of(rank, step))
            factors = torch.ones(SAMPLES) if task is COUNTS else _factors(before, places)
            for name, (ids, samples) in places.items():
                found[name].index_add_(0, ids, -scale * factors[samples][:, None].expand(-1, DIM))
            for name in ("weight", "bias"):
                found[name] -= scale * (1 if task is COUNTS else factors.sum())
    return found


def _places(batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each table the places of the ids among :data:`IDS`, and the sample of each."""
    every = torch.arange(SAMPLES)
    each = {f"alone.{number}": (batch["alone"][:, number], every) for number in range(ALONE)}
    for name, ids in batch["fields"].items():
        if name == "words":  # one a sample; the last has the rest
            each[f"fields.{name}"] = (ids[0], torch.arange(len(ids[0])).clamp(max=SAMPLES - 1))
        else:
            each[f"fields.{name}"] = (ids, every)
    return {name: (torch.searchsorted(IDS, ids.contiguous()), samples) for name, (ids, samples) in each.items()}


def _factors(tables: Mapping[str, Tensor], places: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    totals = torch.zeros(SAMPLES)
    for name, (ids, samples) in places.items():
        totals.index_add_(0, samples, tables[name][ids].sum(1))
    return factors_of(totals, tables["weight"].sum() + tables["bias"].sum())
