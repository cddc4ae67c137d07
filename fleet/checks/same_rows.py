"""SameRows: whether the workers that hold one copy of the model together were given the same rows."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fleet.checks.comparison import checksums, digest
from fleet.checks.whereabouts import named
from fleet.errors import ConfigError
from fleet.strategies._shared.axes import MODEL_AXES, Axes
from fleet.strategies._shared.exchanged_texts import gather_texts

_BATCHES = 3  # a sampler with the wrong rank is wrong from the first batch


class SameRows:
    """Compares the first batches of the workers along ``mp`` and ``pp``.

    Args:
        axes: the place of this worker.
        device: where the workers can exchange numbers.
        batches: how many batches are compared.
    """

    def __init__(self, axes: Axes, device: torch.device, batches: int = _BATCHES) -> None:
        self._axes, self._device, self._left = axes, device, batches

    def check(self, data: Any, call: str) -> None:
        """Raises ConfigError on all of them where ``data``, which ``call`` was given, differs; a collective call.

        What a worker does not have (a stage in the middle may be given ``None``) is not compared.
        """
        group = self._axes.group(*MODEL_AXES)
        if group is None or not self._left:
            return
        self._left -= 1
        texts = gather_texts(json.dumps(_digests(data)), group, self._device)
        said = dict(zip(self._axes.ranks(*MODEL_AXES), map(json.loads, texts), strict=True))
        for place in dict.fromkeys(place for found in said.values() for place in found):
            by_digest: dict[str, list[int]] = {}
            for rank, found in said.items():
                if place in found:
                    by_digest.setdefault(found[place], []).append(rank)
            if len(by_digest) > 1:
                raise ConfigError(different_rows(call, list(by_digest.values()), self._axes))


def different_rows(call: str, groups: list[list[int]], axes: Axes) -> str:
    """Returns what to say of workers that must see the same rows and were given others; ``groups`` got equal ones."""
    listed = "; other rows on ".join(named(ranks, axes.described) for ranks in groups)
    return (
        f"{call} was given different rows on workers that hold one copy of the model together: some on {listed}. "
        "They must get the same rows. Use fleet.elastic.ElasticSampler, or torch's DistributedSampler(data, "
        "num_replicas=fleet.data_replicas(), rank=fleet.data_rank()); the rank and the number of all workers are "
        "right only without mp, pp, sep and cp. Draw random augmentations alike on these workers."
    )


def _digests(data: Any) -> dict[str, str]:
    """Returns a short text for each tensor of ``data`` by its place, which differs where shapes or bits do."""
    tensors = {f"{at}": leaf for at, leaf in enumerate(tree_leaves(data)) if isinstance(leaf, Tensor)}
    sums = checksums(tensors)
    return {at: digest({"shape": list(t.shape), "type": f"{t.dtype}", "sum": sums[at]}) for at, t in tensors.items()}
