"""The computations of each logical worker of a reproducible job, with digests that tell every bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fleet.verify.tensor_digest import exact_digest, whole_digest

_MOST_CALLS = 2000  # of modules, written down for one turn


class TurnRecords:
    """The turns since the last update, by round and logical rank; none in a job without logical workers."""

    def __init__(self) -> None:
        self._key = ""
        self._turns: dict[str, dict[str, Any]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a logical worker has had a turn."""
        return bool(self._key)

    def begin(self, number: int, rank: int, drawn: int) -> None:
        """Begins the turn of logical worker ``rank`` in round ``number``; ``drawn`` draws precede it in this update."""
        self._key = f"{number} {rank}"
        self._turn["drawn"] = drawn

    def note_call(self, module: str, kind: str, inputs: Any, output: Any) -> None:
        """Writes down a call of ``module``, whose class is ``kind``, once a turn has begun."""
        if self.has_begun and len(calls := self._turn["forward"]) < _MOST_CALLS:
            calls.append({"module": module, "type": kind, "ins": _digests(inputs), "outs": _digests(output)})

    def note_losses(self, losses: Sequence[float]) -> None:
        """Writes down the losses of a backward pass, once a turn has begun."""
        if self.has_begun:
            self._turn["losses"] += losses

    def take(self) -> dict[str, dict[str, Any]]:
        """Returns the turns, and begins anew after an update."""
        found = self._turns
        self._turns = {}
        return found

    def digest(self, tensor: Tensor) -> dict[str, Any]:
        """Returns the digest of ``tensor``; with its bits once a turn has begun."""
        return exact_digest(tensor) if self.has_begun else whole_digest(tensor)

    @property
    def _turn(self) -> dict[str, Any]:
        # Two optimizers of one batch make two updates, and what lies between them belongs to the second.
        return self._turns.setdefault(self._key, {"drawn": 0, "forward": [], "losses": []})


def _digests(value: Any) -> list[dict[str, Any]]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    return [exact_digest(leaf) for leaf in leaves if not leaf.is_meta]
