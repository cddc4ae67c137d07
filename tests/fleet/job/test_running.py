"""The session of this process: absent before ``fleet.init``, and after the end of a Fleet."""

from __future__ import annotations

from fleet import fleet
from fleet.job.running import RUNNING, running_session


def test_the_session_is_there_from_init_on() -> None:
    assert running_session() is None
    fleet.init(is_collective=True)
    assert running_session() is RUNNING.session is not None
