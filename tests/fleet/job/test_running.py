"""The session of this process: absent before ``fleet.init``, and there after it."""

from __future__ import annotations

import pytest

from fleet.job.running import RUNNING, running_job, running_session
from tests.helpers.fleets import own_fleet


def test_the_session_is_there_from_init_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_fleet(monkeypatch)
    assert running_session() is running_job() is None
    own.init(is_collective=True)
    assert running_session() is RUNNING.session is own.session
    assert running_job() is own.session.job
