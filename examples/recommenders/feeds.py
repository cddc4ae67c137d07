"""Batches as the models take them: samples from Parquet files, with what a loss needs beside them.

Clicks: rows of ``impressions``. word2vec: pairs of items of a session. SASRec: the items of a user. Models that rank
all items take sampled ones as negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from catalogue import Catalogue, column_names
from models.parts import owners, padded
from torch import Tensor

import fleet

Batch = dict[str, Tensor]
LABELS = ("click", "purchase")
TRUTHS = ("p_click", "p_purchase")
SOURCES = {"word2vec": "sessions", "sasrec": "sequences/train"}


class Sampling(NamedTuple):
    """What is drawn for a batch.

    Args:
        negatives: items; for word2vec, of each pair.
        power: of the number of times that an item was shown, to which its probability to be drawn is proportional.
        window: word2vec's pairs are at most so many items apart.
        length: SASRec's longest sequence.
    """

    negatives: int = 0
    power: float = 0.75
    window: int = 3
    length: int = 50


class Feed:
    """The batches of one worker.

    Args:
        name: the model's.
        folder: of a shop.
        inputs: columns of the impressions that the model takes.
        sampling: what is drawn.
        batch_size: rows of a batch.
        seed: decides the order and what is drawn.
        most: batches of a pass, at most.
        share: ``(number, of)``: the rows that worker ``number`` gets; ``None`` in a job, where the data set knows.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        inputs: Sequence[str],
        sampling: Sampling,
        batch_size: int,
        seed: int,
        most: int | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        source = folder / SOURCES.get(name, "impressions/train")
        columns = ["items"] if name in SOURCES else _asked(source, inputs)
        self.dataset = fleet.ParquetDataset(
            source, columns=columns, batch_size=batch_size, shuffle_seed=seed, rest="drop"
        )
        self.sampling = sampling
        adds = {"dssm": self._with_log_q, "word2vec": self._pairs, "sasrec": self._sequences}
        self.prepare: Callable[[Batch], Batch] = adds.get(name, _unchanged)
        if name in adds:
            self.catalogue = Catalogue.read(folder, sampling.power)
        self.most = most
        self.share = share
        self.draw = np.random.default_rng([seed, fleet.data_rank() if share is None else share[0]])

    def begin(self, epoch: int) -> None:
        """Begins a pass, in an order of its own."""
        self.dataset.set_epoch(epoch)
        if self.share is not None:
            number, of = self.share
            state = self.dataset.state_dict()
            each = sum(state["rows"]) // of
            self.dataset.load_state_dict({**state, "remaining": [[number * each, (number + 1) * each]]})

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of a pass."""
        for batch in islice(self.dataset, self.most):
            yield self.prepare(batch)

    def _with_log_q(self, batch: Batch) -> Batch:
        return with_candidates(batch, self.catalogue, self.draw, self.sampling.negatives)

    def _pairs(self, batch: Batch) -> Batch:
        centre, context = pairs(batch["items"], batch["items.offsets"], self.sampling.window)
        drawn = self.catalogue.drawn(self.draw, len(centre) * self.sampling.negatives)
        negative = self.catalogue.item[drawn].view(len(centre), -1)
        return {"centre": centre, "context": context, "negative": negative}

    def _sequences(self, batch: Batch) -> Batch:
        items = padded(batch["items"], batch["items.offsets"], self.sampling.length)
        drawn = self.catalogue.drawn(self.draw, self.sampling.negatives)
        return {"items": items, "negative": self.catalogue.item[drawn]}


def with_candidates(batch: Batch, catalogue: Catalogue, draw: np.random.Generator, negatives: int) -> Batch:
    """Returns the batch with what DSSM's loss takes: the shares of its items, and so many items that are drawn."""
    found = {**batch, "log_q": catalogue.log_shown(batch["item"])}
    if negatives:
        drawn = catalogue.drawn(draw, negatives)
        found |= {f"negative.{name}": values for name, values in catalogue.columns(drawn).items()}
        found["negative.log_q"] = catalogue.log_drawn(drawn)
    return found


def pairs(items: Tensor, offsets: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Returns centres and contexts: all pairs of different places of one sample, at most ``window`` apart.

    Example:
        >>> pairs(torch.tensor([1, 2, 3, 9]), torch.tensor([0, 3]), 1)
        (tensor([1, 2, 2, 3]), tensor([2, 3, 1, 2]))
    """
    owner = owners(items, offsets)
    centres, contexts = [], []
    for apart in range(1, window + 1):
        same = owner[:-apart] == owner[apart:]
        earlier, later = items[:-apart][same], items[apart:][same]
        centres += [earlier, later]
        contexts += [later, earlier]
    return torch.cat(centres), torch.cat(contexts)


def inputs_of(net: Any) -> tuple[str, ...]:
    """Returns the columns of the impressions that a model takes."""
    return (*net.USER_INPUTS, *net.ITEM_INPUTS) if hasattr(net, "USER_INPUTS") else net.INPUTS


def held_out(folder: Path, inputs: Sequence[str], batch_size: int = 2048) -> fleet.ParquetDataset:
    """Returns this worker's share of the impressions of the test, with the true probabilities where they are known."""
    source = folder / "impressions/test"
    columns = _asked(source, inputs, (*LABELS, *TRUTHS))
    return fleet.ParquetDataset(source, columns=list(dict.fromkeys(columns)), batch_size=batch_size)


def check_data(name: str, net: Any, folder: Path) -> None:
    """Checks that a folder has what a model trains on.

    Args:
        name: the model's.
        net: the model.
        folder: what ``sources.open_data`` returned.

    Raises:
        ValueError: a column or a file is missing; the message names them.
    """
    known = _columns(folder / "impressions/train")
    wanted = dict.fromkeys([*_named(inputs_of(net)), *getattr(net, "TASKS", ("click",))])
    if missing := [column for column in wanted if column not in known]:
        hint = (
            "name fields and numbers of the data under model in a configuration"
            if hasattr(net, "numbers")
            else ("deepfm and dcn take the fields and numbers that a configuration names")
        )
        raise ValueError(f"{name} takes the columns {missing}, which the data does not have. It has {known}; {hint}.")
    paths = [SOURCES[name]] if name in SOURCES else []
    paths += ["items.parquet", "shop.json"] if hasattr(net, "of_users") else []
    if absent := [path for path in paths if not (folder / path).exists()]:
        raise ValueError(f"{name} takes {absent}, which the data does not have; a shop and MovieLens do.")


def moved(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on a device."""
    return {name: values.to(device) for name, values in batch.items()}


def _unchanged(batch: Batch) -> Batch:
    return batch


def _columns(source: Path) -> list[str]:
    """Returns the columns of a folder of Parquet files."""
    return column_names(min(source.glob("*.parquet")))


def _asked(source: Path, inputs: Sequence[str], more: Sequence[str] = LABELS) -> list[str]:
    """Returns the columns of the inputs, and those of ``more`` that the files have."""
    known = _columns(source)
    return [*_named(inputs), *(name for name in more if name in known)]


def _named(inputs: Sequence[str]) -> list[str]:
    return [name for name in inputs if not name.endswith(".offsets")]
