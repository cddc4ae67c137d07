"""Which questions of workers promote a standby."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fleet.ps.standby.follower import QUIET_S
from tests.fleet.ps.service import in_threads, until
from tests.fleet.ps.standby.test_pair import duo


def test_one_worker_that_knows_more_stops_the_promotion(tmp_path: Path) -> None:
    """The server went on alone and only one of two workers has heard of it: the other one's voice promotes nothing."""
    with duo(tmp_path, num_workers=2) as pair:
        pair.client(0)
        pair.client(1)
        pair.kill(0)
        follower = pair.follower
        until(lambda: not follower._line)
        until(lambda: time.monotonic() - follower._broken_since > QUIET_S)
        answers: list[Any] = [None, None]

        def ask(rank: int, known: int) -> None:
            answers[rank] = follower.ask(rank, known)

        in_threads(lambda: ask(0, 1), lambda: ask(1, 2))
        assert {"standby": "the server went on without it"} in answers
        assert None not in answers
        in_threads(lambda: ask(0, 1), lambda: ask(1, 1))  # it stays given up
        assert not follower.promoted
        assert pair.epoch(1) == 1
