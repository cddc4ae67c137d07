"""A Fleet of a test's own in the place of the process's one."""

from __future__ import annotations

import pytest

import fleet
from fleet.facade import Fleet
from fleet.job.running import RUNNING


def own_fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Returns a Fleet without a session, which ``fleet`` stands for until the test ends."""
    monkeypatch.setattr(RUNNING, "session", None)
    made = Fleet(RUNNING)
    monkeypatch.setitem(vars(fleet), "_fleet", made)
    return made
