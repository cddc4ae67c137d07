"""The days of a shop, one after the other: what a job trains on, and the clicks that it has not seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from catalogue import Catalogue
from feeds import with_candidates
from models.dssm import DSSM, ITEM_COLUMNS
from torch import Tensor

import fleet

Batch = dict[str, Tensor]
USER_COLUMNS = tuple(name for name in DSSM.USER_INPUTS if not name.endswith(".offsets"))


class Days:
    """The impressions of a shop by day.

    Args:
        folder: of a shop.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = int(json.loads((folder / "shop.json").read_text(encoding="utf-8"))["days"])
        self.catalogue = Catalogue.read(folder)

    def batches(
        self, day: int, batch_size: int, negatives: int, *, seed: int = 0, broken: bool = False
    ) -> Iterator[Batch]:
        """Yields a day in time order, each worker its share; negatives are items of that day.

        Args:
            day: from 0.
            batch_size: impressions.
            negatives: items that are drawn for a batch.
            seed: of the draws.
            broken: credits each impression to the next item in the order of ids, as a join does that is off by a row.
        """
        shown = self._shown(day)
        draw = np.random.default_rng([day, seed])
        columns = [*USER_COLUMNS, *ITEM_COLUMNS, "click"]
        for batch in fleet.ParquetDataset(self._path(day), columns=columns, batch_size=batch_size, rest="drop"):
            if broken:
                places = torch.searchsorted(shown.item, batch["item"])
                batch |= shown.columns((places + 1) % len(shown.item))
            yield with_candidates(batch, shown, draw, negatives)

    def clicks(self, day: int, most: int) -> Batch:
        """Returns the columns of the user and the item of a day's clicks: ``most`` of them, evenly chosen."""
        table = pq.read_table(self._path(day), columns=[*USER_COLUMNS, "item", "click"])
        places = np.flatnonzero(table["click"].to_numpy())
        table = table.take(places[np.linspace(0, len(places) - 1, min(most, len(places))).astype(np.int64)])
        history = table["history"].to_pylist()
        lengths = torch.tensor([len(one) for one in history])
        return {
            **{name: torch.from_numpy(table[name].to_numpy().copy()) for name in ("user", "age", "item")},
            "history": torch.tensor([one for row in history for one in row], dtype=torch.int64),
            "history.offsets": lengths.cumsum(0) - lengths,
        }

    def on_sale(self, day: int) -> Batch:
        """Returns the columns of the items that are on sale on a day."""
        return self.catalogue.columns(self.catalogue.on_sale(day))

    def _path(self, day: int) -> Path:
        part = "test" if day == self.count - 1 else "train"
        return self.folder / "impressions" / part / f"day-{day:02d}.parquet"

    def _shown(self, day: int) -> Catalogue:
        """Returns the items of a day, with how often each was shown on it."""
        items, counts = np.unique(pq.read_table(self._path(day), columns=["item"])["item"], return_counts=True)
        places = torch.searchsorted(self.catalogue.item, torch.from_numpy(items))
        columns = self.catalogue.columns(places)
        return Catalogue({**{name: values.numpy() for name, values in columns.items()}, "shown": counts}, day)
