"""A step that can never come: who waits where is an error only where nothing else can send that step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import fleet
from fleet.checks import absent_workers
from fleet.checks.absent_workers import AbsentWorkers
from fleet.errors import RendezvousError
from tests.helpers.workers import run_workers

LOOKS_S = 5.0


class Calls:
    """A roll call in which rank 1 waits at ``places``, one at each look."""

    def __init__(self, *places: str, lives: bool = True) -> None:
        self.places, self.lives, self.refused = list(places), lives, ""

    def check_restarted(self, ranks: Sequence[int]) -> None:
        """Returns: nobody was restarted."""

    def waiting(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the next place."""
        place = self.places.pop(0)
        return {1: place} if place else {}

    def still_wait(self, ranks: Sequence[int]) -> bool:
        """Returns what the test chose."""
        return self.lives

    def refuse(self, ranks: Sequence[int], text: str) -> None:
        """Keeps the text."""
        self.refused = text


def look(calls: Calls, monkeypatch: pytest.MonkeyPatch, *, is_sync: bool = True, steps: bool = False) -> None:
    """Looks once for each place, two seconds apart."""
    clock = [0.0]
    monkeypatch.setattr(absent_workers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    job: Any = SimpleNamespace(roll_call=calls, num_steps=0, who="[rank 0 of 2]")
    absent = AbsentWorkers(job, is_sync)
    while calls.places:
        absent.look_after([1])
        clock[0] += 2.0
        job.num_steps += steps


def test_a_worker_seen_twice_in_the_same_call_is_an_error_with_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("save() at a.py:3", "save() at a.py:3")
    with pytest.raises(
        RendezvousError, match=r"test_absent_workers.py:\d+ .*(?s:.*)rank 1: waits in save\(\) at a.py:3"
    ):
        look(calls, monkeypatch)
    assert "Call fleet.barrier_worker() after the last batch" in calls.refused
    assert 'rest="drop" or "repeat" of fleet.ParquetDataset' in calls.refused


def test_what_may_still_go_on_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    look(Calls("a:1", "", "a:1", "b:2", ""), monkeypatch)  # on its way, from one call to the next
    look(Calls("a:1", "a:1", "a:1"), monkeypatch, steps=True)  # this worker's steps are done all the same
    look(Calls("a:1", "a:1", lives=False), monkeypatch)  # it was killed, and its successor trains
    monkeypatch.setattr(Calls, "waiting", None)  # a queue sends its steps: nobody asks
    calls = Calls("a:1")
    job: Any = SimpleNamespace(roll_call=calls, num_steps=0)
    AbsentWorkers(job, is_sync=False).look_after([1])


def _looked_after(session: Any, seconds: float) -> str:
    """Returns the error of a wait at a server for rank 1, or nothing when it takes no longer than ``seconds``."""
    absent = AbsentWorkers(session.job, is_sync=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            absent.look_after([1])
        except RendezvousError as error:
            return f"{error}"
        time.sleep(0.5)
    return ""


def _meets_without_rank_0(rank: int, world_size: int, in_thread: int) -> str:
    fleet.init(is_collective=True, log_level="ERROR")
    session: Any = fleet.session
    said: list[str] = []

    def reduce() -> None:
        try:
            fleet.all_reduce(1.0)
        except RendezvousError as error:
            said.append(f"{error}")

    if rank == in_thread:  # its main thread trains on, or waits for the server
        thread = threading.Thread(target=reduce)
        thread.start()
    if rank == 0:
        said.append(_looked_after(session, LOOKS_S))
        if said[-1] == "" and in_thread != 0:
            reduce()
    elif in_thread != 1:
        reduce()
    if rank == in_thread:
        thread.join(20)
        assert not thread.is_alive()
    session.close()
    return "".join(said)


def test_two_workers_that_wait_for_each_other_both_get_the_error() -> None:
    said = run_workers(_meets_without_rank_0, 2, -1)
    place = r"rank 1: waits in fleet.util.all_reduce\(mode='sum'\) at .*`fleet.all_reduce\(1.0\)`"
    for text in said:
        with pytest.raises(RendezvousError, match=rf"look_after\(\[1\]\)(?s:.*){place}(?s:.*)barrier_worker"):
            raise RendezvousError(text)
    assert said[1].startswith("[rank 1 of 2] fleet.util.all_reduce(mode='sum') at ")


@pytest.mark.parametrize("in_thread", [0, 1])
def test_a_call_in_another_thread_holds_no_step_up(in_thread: int) -> None:
    assert run_workers(_meets_without_rank_0, 2, in_thread) == ["", ""]
