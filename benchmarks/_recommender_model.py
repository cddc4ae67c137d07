"""The models of ``recommenders.py``, and how well they learn the clicks of :mod:`_recommender_clicks`.

Imports torch and numpy only, because TorchRec has an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from _recommender_clicks import auc, clicks, held_out
from _tables_model import DIM, Batch, Clicks, Gauges, Measured, batches_of, block, layers
from torch import Tensor, nn

TOWER_WIDTHS = (128, 32)
SCORED_TOGETHER = 1000


class DeepFM(nn.Module):
    """Guo et al., IJCAI 2017: column 0 of a row is its weight of first order, the others are its factors."""

    def __init__(self, rows: nn.Module, num_tables: int) -> None:
        super().__init__()
        self.rows = rows
        self.deep = layers(num_tables * DIM)

    def forward(self, ids: Any) -> Tensor:
        """Returns the logits (batch,)."""
        rows = self.rows(ids)
        fields = rows.view(len(rows), -1, DIM)
        weights, factors = fields[..., 0], fields[..., 1:]
        pairs = factors.sum(1).square() - factors.square().sum(1)
        logits: Tensor = weights.sum(1) + pairs.sum(1) / 2 + self.deep(rows).squeeze(1)
        return logits


class TwoTowers(nn.Module):
    """The first half of the features is the user, the other the item; the logit is the product of their vectors."""

    def __init__(self, rows: nn.Module, num_tables: int) -> None:
        super().__init__()
        self.rows = rows
        self.width = num_tables // 2 * DIM
        self.user = layers(self.width, *TOWER_WIDTHS)
        self.item = layers(num_tables * DIM - self.width, *TOWER_WIDTHS)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Any) -> Tensor:
        """Returns the logits (batch,)."""
        rows = self.rows(ids)
        logits: Tensor = (self.user(rows[:, : self.width]) * self.item(rows[:, self.width :])).sum(1) + self.bias
        return logits


MODELS: dict[str, Callable[[nn.Module, int], nn.Module]] = {"clicks": Clicks, "deepfm": DeepFM, "towers": TwoTowers}


def learn(
    settings: dict[str, Any],
    rank: int,
    step: Callable[[Batch], None],
    model: nn.Module,
    form: Callable[[Tensor], Any],
    gauges: Gauges,
    *,
    around: Callable[[Iterator[Batch]], Iterable[Batch]] = lambda batches: batches,
    finish: Callable[[], None] = lambda: None,
) -> Measured:
    """Trains once on this worker's samples, and scores samples that no worker has seen.

    Args:
        settings: of the job: ``tables``, ``ids``, ``samples`` of both workers, ``batches``, whose first size is taken.
        rank: of this worker, 0 or 1.
        step: trains on a batch.
        model: the model that ``step`` trains.
        form: makes its input of ids (tables, batch).
        gauges: what is measured, see :func:`_tables_model.block`.
        around: makes the loop's batches of the loader's.
        finish: returns when the model has what all workers have trained.

    Returns:
        What :func:`_tables_model.block` measures, ``auc``, and ``best_auc`` of the true probabilities.
    """
    size, count = settings["batches"][0], settings["samples"] // 2
    ids, labels, _ = clicks(settings["tables"], settings["ids"], count, 1 + rank)
    samples = (torch.from_numpy(ids), torch.from_numpy(labels))
    batches = islice(batches_of(samples, size, form), count // size)
    found = block(step, around(batches), gauges)
    finish()
    held, labels, probabilities = held_out(settings["tables"], settings["ids"])
    model.eval()
    with torch.no_grad():
        scores = [model(form(part.contiguous())) for part in torch.from_numpy(held).split(SCORED_TOGETHER, 1)]
    model.train()
    return {**found, "auc": auc(torch.cat(scores).numpy(), labels), "best_auc": auc(probabilities, labels)}
