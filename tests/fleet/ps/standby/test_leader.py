"""What a server says about its standby."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.ps.service import until
from tests.fleet.ps.standby.test_pair import SECOND, duo


def test_a_silent_standby_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen standby keeps its line; the server says for whom its workers wait."""
    monkeypatch.setattr("fleet.ps.standby.leader.LINE_S", 0.2)
    with duo(tmp_path) as pair:
        pair.client()
        feed = pair.leader._feed
        assert feed is not None
        until(lambda: any(f"its standby at {SECOND} is silent for 0.2 s" in line for line in pair.lines))
