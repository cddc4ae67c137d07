from __future__ import annotations

import logging
import threading

import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.serving.follow_thread import FollowThread, check_interval


@pytest.mark.parametrize("every_s", [0, -1, True, "1", None, float("nan"), float("inf")])
def test_intervals_that_are_none(every_s: object) -> None:
    check_interval("reader.follow", 0.5)
    with pytest.raises(ConfigError, match=r"^index.follow\(every_s=.*takes a number of seconds above 0"):
        check_interval("index.follow", every_s)


def test_an_error_is_said_once_until_a_round_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([PSError("away"), PSError("away"), None, PSError("away"), OSError("disk"), ValueError("odd")])
    ended = threading.Event()

    def refresh() -> None:
        outcome = next(outcomes, ended)
        if outcome is ended:
            ended.set()
        elif outcome is not None:
            raise outcome

    follower = FollowThread(refresh, "the shop keeps its rows", "fleet-shop")
    with caplog.at_level(logging.WARNING, "FLEET"):
        follower.start(0.001)
        assert ended.wait(30)
        follower.stop()
    said = [record.getMessage().removeprefix("the shop keeps its rows: ") for record in caplog.records]
    assert said == ["away", "away", "disk", "ValueError: odd"]
    assert not any(thread.name == "fleet-shop" for thread in threading.enumerate())
    follower.stop()
    follower.check()


def test_a_second_start_ends_the_first_thread() -> None:
    follower = FollowThread(lambda: None, "rows stay", "fleet-shop")
    for _ in range(3):
        follower.start(60)
        assert [thread.name for thread in threading.enumerate()].count("fleet-shop") == 1
    follower.stop()
