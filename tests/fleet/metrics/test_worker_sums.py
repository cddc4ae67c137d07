"""Sums of one worker: states, and which are refused."""

from __future__ import annotations

import pytest

from fleet.errors import CheckpointError
from fleet.metrics.worker_sums import WorkerSums


def test_sums_are_kept_and_go_on() -> None:
    one, other = WorkerSums(2, "k=3"), WorkerSums(2, "k=3")
    one.sums += (1, 2)
    state = one.state_dict()
    one.sums += (1, 2)
    other.load_state_dict(state)  # a copy, which later batches do not change
    assert other.sums.tolist() == [1, 2]
    one.reset()
    assert one.sums.tolist() == [0, 0]


def test_sums_of_another_setting_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"WorkerSums\(k=3\) cannot load sums of WorkerSums\(k=4\) and shape"):
        WorkerSums(2, "k=3").load_state_dict(WorkerSums(2, "k=4").state_dict())
    with pytest.raises(CheckpointError, match="loads its own state_dict"):
        WorkerSums(2).load_state_dict({})
