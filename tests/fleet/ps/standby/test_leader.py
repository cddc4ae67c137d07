"""What a server says about its standby, and how it hands over to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.ps.standby.follower import Follower
from tests.fleet.ps.service import gradient, rows, until
from tests.fleet.ps.standby.test_pair import SECOND, duo


def test_a_silent_standby_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen standby keeps its line; the server says for whom its workers wait."""
    monkeypatch.setattr("fleet.ps.standby.follower.BEAT_S", 3.0)
    monkeypatch.setattr("fleet.ps.standby.leader.LINE_S", 1.0)  # the line ends after ten times that
    with duo(tmp_path) as pair:
        pair.client()
        feed = pair.leader._feed
        assert feed is not None
        until(lambda: any(f"its standby at {SECOND} is silent for 1 s" in line for line in pair.lines))


def test_a_standby_that_comes_after_the_end_of_the_job_is_told(tmp_path: Path) -> None:
    """It would follow a server that waits for nothing any more."""
    with duo(tmp_path) as pair:
        pair.client()
        pair.kill(1)
        pair.leader.end()
        pair.start(1)
        until(lambda: pair.follower.ended)


def test_a_server_without_a_standby_does_not_hand_over(tmp_path: Path) -> None:
    """It says so and goes on."""
    with duo(tmp_path) as pair:
        client = pair.client()
        pair.cut()
        assert "has not joined it" in pair.switch(0)["error"]
        pair.leader.peer = ""  # as of a shard that nobody follows
        assert "nobody follows it. Shards of --server_shards" in pair.switch(0)["error"]
        client.wait(client.push({0: gradient([1])}))
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-1])


@pytest.mark.parametrize("standby_dies", [False, True])
def test_a_standby_that_does_not_obey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standby_dies: bool) -> None:
    """The server serves nobody until it is certain that the standby never will, and goes on then."""
    monkeypatch.setattr("fleet.ps.standby.leader._SWITCH_S", 0.2)
    monkeypatch.setattr("fleet.ps.standby.leader.GRACE_S", 0.3)
    with duo(tmp_path, lease_s=1.0) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        follower = pair.follower
        orders = []

        def ignore(line: Any) -> None:
            orders.append(line)
            if standby_dies:
                pair.kill(1)
                pair.start(1)

        follower._take_over = ignore  # type: ignore[method-assign]
        assert "was lost before it took over; this server goes on" in pair.switch(0)["error"]
        assert orders
        assert not follower.promoted
        Follower._take_over(follower, orders[0])  # the order comes late
        assert not follower.promoted
        client.wait(client.push({0: gradient([1])}))
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-2])
        del follower._take_over
        monkeypatch.undo()  # a busy machine may take longer than the limits above
        until(lambda: pair.leader.joined)
        assert pair.switch(0) == {"leads": SECOND}
        np.testing.assert_array_equal(rows(client, [1])[:, 0], [-2])
