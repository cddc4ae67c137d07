"""The trainers of a hybrid job as threads of one process: what torch's process group is between processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["thread_trainers"]

_LIMIT_S = 30.0


class ThreadTrainers:
    """One trainer; sums are taken in the order of ranks."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Sums when it is waited for."""

        def wait() -> None:
            first, *others = self._given(tensor)
            tensor.copy_(sum(others, first))

        return wait

    def copy_from_0(self, tensor: Tensor) -> None:
        """Copies."""
        tensor.copy_(self._given(tensor)[0])

    def _given(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self.rank] = tensor.detach().clone()
        self._barrier.wait(_LIMIT_S)
        found = list(self._slots)
        self._barrier.wait(_LIMIT_S)
        return found


def thread_trainers(size: int) -> list[ThreadTrainers]:
    """Returns one for each of ``size`` threads."""
    barrier, slots = threading.Barrier(size), [None] * size
    return [ThreadTrainers(rank, size, barrier, slots) for rank in range(size)]
