"""Every engine is asked, and one that runs no job describes none."""

import pytest
from torch import nn

from fleet.job.running import RUNNING
from fleet.verify.engines.registry import ENGINES
from fleet.verify.engines.training_engine import TrainingEngine


def test_an_engine_that_runs_no_job_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNNING, "session", None)
    assert all(issubclass(engine, TrainingEngine) for engine in ENGINES)
    for engine in (*(made() for made in ENGINES), TrainingEngine()):
        assert engine.job(nn.Linear(2, 2)) is engine.initial_state() is None
        assert not engine.is_wrapper(nn.Linear(2, 2))
