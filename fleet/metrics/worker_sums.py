"""Sums of one worker, which are added over all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleet.common.host_array import host_array
from fleet.errors import CheckpointError
from fleet.metrics.metric_values import check_state, reduced, util_of

if TYPE_CHECKING:
    from fleet.job.util import UtilBase

Array = np.ndarray[Any, np.dtype[Any]]


class WorkerSums:
    """A metric that is a function of a few sums over all samples, float64.

    Args:
        count: number of sums.
        setting: what sums must share to be added, for example ``"k=10"``.
        default: the setting of a state that names none, as 1.0.0rc1 wrote it.
    """

    def __init__(self, count: int, setting: str = "", default: str = "") -> None:
        self.sums: Array = np.zeros(count, np.float64)
        own = type(self).__name__
        self._name, self._unnamed = (f"{own}({text})" if text else own for text in (setting, default))

    def totals(self, util: UtilBase | None) -> Array:
        """Returns the sums over all workers; every worker must call it."""
        return np.asarray(reduced(util_of(util), self.sums))

    def reset(self) -> None:
        """Resets all sums."""
        self.sums[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's sums and the metric's name, for ``fleet.save`` and ``fleet.checkpoint``."""
        return {"metric": self._name, "sums": torch.from_numpy(self.sums.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads sums; raises CheckpointError for the sums of another metric."""
        check_state(self, state_dict, "metric", "sums")
        sums = np.array(host_array(state_dict["sums"]), np.float64)
        writer = state_dict["metric"]
        writer = self._unnamed if writer == type(self).__name__ else writer
        if writer != self._name or sums.shape != self.sums.shape:
            raise CheckpointError(f"{self._name} cannot load sums of {writer} and shape {sums.shape}.")
        self.sums = sums

    set_state_dict = load_state_dict
