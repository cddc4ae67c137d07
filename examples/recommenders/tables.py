"""Where the rows of a model are: on parameter servers, or in this process for plain torch.

Both begin as ``fleet.SparseEmbedding`` says, whose new rows depend on the seed, the id and the column alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fleet

_MADE_OF: dict[str, Callable[[Any], Any]] = {
    "initializer": lambda words: fleet.ps.Initializer(*words),
    "accessor": lambda words: fleet.ps.Accessor(**words),
    "entry": lambda words: getattr(fleet, words[0])(*words[1:]),
}


class Tables:
    """Makes the tables of a model from the ``tables`` of its configuration.

    Args:
        settings: under ``all`` the arguments of every table's ``fleet.SparseEmbedding``, under a table's name its own.
        local: whether the rows lie in this process.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], *, local: bool) -> None:
        self.settings = settings
        self.local = local
        self.asked: set[str] = {"all"}

    def __call__(self, name: str, dim: int) -> nn.Module:
        """Returns the module of a table."""
        self.asked.add(name)
        found = {**self.settings.get("all", {}), **self.settings.get(name, {})}
        made = {key: _MADE_OF[key](value) if key in _MADE_OF else value for key, value in found.items()}
        if not self.local:
            return fleet.SparseEmbedding(dim, name=name, **made)
        if more := sorted(made.keys() - {"initializer", "seed"}):
            raise SystemExit(f"Plain torch has no {', '.join(more)} for table {name!r}; run it on parameter servers.")
        return LocalTable(dim, **made)

    def check(self) -> None:
        """Ends the script where the configuration names a table that the model has not made."""
        if unknown := sorted(self.settings.keys() - self.asked):
            raise SystemExit(f"The configuration names the tables {unknown}; the model has {sorted(self.asked)}.")


class LocalTable(nn.Embedding):
    """Rows for 64-bit ids in this process: an ``nn.Embedding`` whose next free row goes to each new id.

    Args:
        dim: values of a row.
        capacity: the most ids.
        start: arguments of the ``fleet.SparseEmbedding`` that says how rows begin.
    """

    def __init__(self, dim: int, *, capacity: int = 1 << 17, **start: Any) -> None:
        super().__init__(capacity, dim, sparse=True, _weight=torch.zeros(capacity, dim))
        self.places: dict[int, int] = {}
        self.start_rows = fleet.SparseEmbedding(dim, **start).lookup_rows

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of int64 ids (...), float32 (..., dim); gradients are sparse."""
        ids, inverse = torch.unique(input, return_inverse=True)
        new = torch.tensor([number for number in ids.tolist() if number not in self.places], dtype=torch.int64)
        if len(new):
            self._add(new)
        places = torch.tensor([self.places[number] for number in ids.tolist()], dtype=torch.int64).to(input.device)
        return super().forward(places[inverse])

    def _add(self, new: Tensor) -> None:
        first = len(self.places)
        if first + len(new) > self.num_embeddings:
            raise ValueError(f"a table of {self.num_embeddings} rows has no room for {first + len(new)} ids.")
        self.places.update((number, first + place) for place, number in enumerate(new.tolist()))
        with torch.no_grad():
            self.weight[first : first + len(new)] = self.start_rows(new).to(self.weight.device)
