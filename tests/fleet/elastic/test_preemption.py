"""Stopping together: every worker at the same step, none waiting for another for ever."""

from __future__ import annotations

import os
import random
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.elastic import health
from fleet.elastic.health import Agreement, TerminationNotice


class MemoryStore:
    """The store of all workers, without a network."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def may_meet(step: int, every: int, others: int, other_stopped: bool) -> bool:
    """Whether a worker can finish ``step``: where it ends in an exchange, the other has to have come as far."""
    return bool(step % every) or others >= step or (others == step - 1 and not other_stopped)


def train_until_stopped(workers: int, every: int, told_after: list[int], seed: int) -> list[int]:
    """Runs workers in a random order, as far as exchanges allow it; returns the step at which each stopped.

    Each hears of the request ``told_after[rank]`` events after the first, for itself.
    """
    store, source = MemoryStore(), random.Random(seed)
    agreements = [Agreement(store, rank, workers) for rank in range(workers)]
    done, stopped, events = [0] * workers, [False] * workers, 0
    while not all(stopped):
        able = [
            rank
            for rank in range(workers)
            if not stopped[rank] and all(may_meet(done[rank] + 1, every, done[o], stopped[o]) for o in range(workers))
        ]
        assert able, f"deadlock: done {done}, stopped {stopped}"
        rank = source.choice(able)
        done[rank] += 1
        events += 1
        step = done[rank]
        stopped[rank] = agreements[rank].after_step(
            step, events > told_after[rank], lambda step=step: step % every == 0
        )
        assert events < 5000
    return done


@settings(max_examples=200, deadline=None)
@given(
    told_after=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    every=st.sampled_from([1, 1, 2, 5]),
    seed=st.integers(0, 10**6),
)
def test_all_stop_at_one_step_whoever_hears_first(told_after: list[int], every: int, seed: int) -> None:
    """Ranks one step apart (or more, with local steps), told at different moments, in any order of events."""
    ends = train_until_stopped(len(told_after), every, told_after, seed)
    assert len(set(ends)) == 1
    assert ends[0] % every == 0


def test_a_worker_alone_stops_at_once() -> None:
    agreement = Agreement(None, 0, 1)
    assert not agreement.after_step(1, False, lambda: True)
    assert agreement.after_step(2, True, lambda: False)
    assert agreement.after_step(3, False, lambda: True)


def test_a_node_that_got_no_signal_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LISTEN_PERIOD_S", 0.0)
    store = MemoryStore()
    told, other = Agreement(store, 0, 2), Agreement(store, 1, 2)
    assert not told.after_step(4, True, lambda: True)
    assert not other.after_step(4, False, lambda: True)  # says that it has heard
    assert not told.after_step(5, False, lambda: True)  # decides: 6
    assert not other.after_step(5, False, lambda: True)
    assert told.after_step(6, False, lambda: True)
    assert other.after_step(6, False, lambda: True)


def test_sigterm_is_noted_once_and_not_by_forked_children() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    notice = TerminationNotice()
    try:
        child = os.fork()
        if child == 0:  # a data-loader process
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not notice.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.received
        child = os.fork()
        if child == 0:
            notice._pid = os.getpid()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    finally:
        notice.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_program_stays() -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    own = signal.getsignal(signal.SIGTERM)
    TerminationNotice().close()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, before)
