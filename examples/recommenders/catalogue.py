"""The items of a shop: their columns, how often each was shown, and draws of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: the examples need `pip install '.[parquet]'`, run in the clone.") from None


def column_names(path: Path) -> list[str]:
    """Returns the names of the columns of a Parquet file."""
    return list(pq.read_schema(path).names)


class Catalogue:
    """Items in the order of their ids.

    Args:
        columns: those of ``items.parquet``; ``shown`` and ``clicked`` count the days before the test.
        last_day: the day of the test.
        power: of the counts, to which the probability to be drawn is proportional.
    """

    def __init__(self, columns: dict[str, Any], last_day: int, power: float = 0.75) -> None:
        self.last_day = last_day
        order = np.argsort(columns["item"])
        self._columns = {name: torch.from_numpy(np.array(values)[order]) for name, values in columns.items()}
        self.item = self._columns["item"]
        shown = self._columns["shown"].double().clamp(min=1)
        self._log_shown = (shown / shown.sum()).log().float()
        weights = shown.numpy() ** power
        self._weights = weights / weights.sum()
        self._sums = self._weights.cumsum()

    @classmethod
    def read(cls, folder: Path, power: float = 0.75) -> Catalogue:
        """Returns the items of a shop's folder."""
        table = pq.read_table(folder / "items.parquet")
        days = json.loads((folder / "shop.json").read_text(encoding="utf-8"))["days"]
        return cls({name: table[name].to_numpy() for name in table.column_names}, days - 1, power)

    def columns(self, places: Tensor) -> dict[str, Tensor]:
        """Returns item, category, brand and price of the items at these places."""
        return {name: self._columns[name][places] for name in ("item", "category", "brand", "price")}

    def log_shown(self, items: Tensor) -> Tensor:
        """Returns the logarithm of each item's share of the impressions, float32."""
        return self._log_shown[torch.searchsorted(self.item, items).clamp(max=len(self.item) - 1)]

    def drawn(self, draw: np.random.Generator, count: int) -> Tensor:
        """Returns places of items, drawn by their counts to that power; int64 [count]."""
        places = np.searchsorted(self._sums, draw.random(count), side="right")
        return torch.from_numpy(np.minimum(places, len(self._sums) - 1))

    def log_drawn(self, places: Tensor) -> Tensor:
        """Returns the logarithm of the probability of each place to be drawn, float32."""
        return torch.from_numpy(np.log(self._weights)).float()[places]

    def on_sale(self, day: int) -> Tensor:
        """Returns the places of the items that are on sale on a day."""
        first, last = self._columns["first_day"], self._columns["last_day"]
        return torch.nonzero((first <= day) & (last >= day)).flatten()

    def clicked(self, places: Tensor) -> Tensor:
        """Returns how often these items were clicked, int64."""
        return self._columns["clicked"][places]

    def click_rate(self, items: Tensor) -> Tensor:
        """Returns clicks per impression of each item, drawn towards the mean of all where there are few; float32."""
        places = torch.searchsorted(self.item, items).clamp(max=len(self.item) - 1)
        shown, clicked = self._columns["shown"].float(), self._columns["clicked"].float()
        mean = clicked.sum() / shown.sum()
        return ((clicked + 20 * mean) / (shown + 20))[places]
