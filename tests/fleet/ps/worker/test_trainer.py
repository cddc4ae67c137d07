"""A worker's trainer and the modes below the facade; what a pull may see of a step (D.7)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigError, NotInitializedError
from fleet.ps.worker.connection import TrainerConfig, WorkerConnection
from fleet.ps.worker.exchange_modes import MODES, check_mode
from fleet.ps.worker.served_model import ServedModel
from fleet.ps.worker.table_plan import TablePlan
from fleet.ps.worker.trainer import Trainer
from tests.fleet.ps.service import DENSE, SPARSE, gradient, ids, serving


def test_a_pull_never_sees_half_a_step() -> None:
    """D.7 sync: the step counts as done when it is applied, not when it is about to be."""
    with serving(mode="sync", num_workers=1) as service:
        client = service.client(tables={0: SPARSE, 1: DENSE})
        state = service.servers[0].state
        table, entered, leave = state.tables[0], threading.Event(), threading.Event()
        push = table.push

        def slow(part: Any, lsn: int = 0) -> None:
            entered.set()
            assert leave.wait(5)
            push(part, lsn)

        table.push = slow  # type: ignore[method-assign]
        found: list[Any] = []
        pushing = threading.Thread(target=lambda: client.wait(client.push({0: gradient([3])})), daemon=True)
        pushing.start()
        assert entered.wait(5)
        assert state.job.applied_step == 1
        assert state.visible_step == 0
        pulling = threading.Thread(
            target=lambda: found.append(client.wait(client.pull({0: ids(3)}, step=1))[0]), daemon=True
        )
        pulling.start()
        pulling.join(0.1)
        assert not found
        leave.set()
        for thread in (pushing, pulling):
            thread.join(5)
        assert state.visible_step == 1
        np.testing.assert_array_equal(found[0], [[-1, -1]])


def test_a_worker_at_a_barrier_is_not_waited_for() -> None:
    """A worker without batches left stands at a barrier; the steps of the others are applied without it."""
    with serving(mode="sync", num_workers=2) as service:
        first, second = service.client(0), service.client(1)
        waiting = threading.Thread(target=first.barrier, daemon=True)
        waiting.start()
        for _ in range(3):
            second.wait(second.push({0: gradient([1])}))
            rows = second.wait(second.pull({0: ids(1)}))[0]
        np.testing.assert_array_equal(rows, [[-3, -3]])
        second.barrier()
        waiting.join(5)
        assert not waiting.is_alive()


def test_calls_before_and_after_training_say_so() -> None:
    connection = WorkerConnection(TablePlan(), TrainerConfig(), lambda channel: pytest.fail("no client is needed"))
    trainer = Trainer(ServedModel(connection))
    for call in (trainer.step, trainer.connection.flush, lambda: trainer.connection.client):
        with pytest.raises(NotInitializedError, match="init_worker"):
            call()
    trainer.load_state_dict({"step": 3, "barriers": {}, "questions": 0})
    assert trainer.state_dict()["step"] == 3
    trainer.abandon()
    with pytest.raises(NotInitializedError, match="stop_worker"):
        trainer.step()


def test_modes() -> None:
    for mode in MODES:
        check_mode(mode)
    with pytest.raises(ConfigError, match="one of"):
        TrainerConfig(mode="psync")
