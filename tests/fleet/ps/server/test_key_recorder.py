"""KeyRecorder: what a reader has not confirmed is kept, in little memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.ps.server.key_recorder import GONE, TOUCHED, KeyRecorder
from tests.fleet.ps.service import ids


def test_ids_that_repeat_take_little_memory() -> None:
    recorder = KeyRecorder()
    for _ in range(5000):
        recorder.mark([1], 1, np.arange(100))
    assert recorder.count(1) <= 2 * (1 << 16) + 100
    assert recorder.take(1, 1, 1).tolist() == list(range(100))


def test_ids_come_sorted_and_once_whatever_their_arrays_hold() -> None:
    recorder = KeyRecorder()
    recorder.mark([1], 1, ids(5, -1, 5))
    recorder.mark([1], 1, ids(3, 5, 1))
    assert recorder.take(1, 1, 1).tolist() == [-1, 1, 3, 5]
    assert recorder.take(1, 1, 1).tolist() == [-1, 1, 3, 5]
    recorder.mark([1], 1, ids(9, 2))
    assert recorder.take(1, 1, 2).tolist() == [2, 9]


def test_what_was_not_received_comes_again() -> None:
    recorder = KeyRecorder()
    recorder.mark([TOUCHED], 1, ids(1, 2))
    assert recorder.move(TOUCHED, 1).tolist() == [1, 2]
    recorder.mark([TOUCHED], 1, ids(3))
    assert recorder.move(TOUCHED, 1).tolist() == [3]
    assert recorder.move(TOUCHED, 1).tolist() == []
    recorder.mark([TOUCHED], 1, ids(2))
    recorder.put_back(TOUCHED)
    assert recorder.move(TOUCHED, 1).tolist() == [1, 2, 3]
    recorder.forget(TOUCHED)
    assert recorder.count(TOUCHED) == 0


def test_readers_do_not_share() -> None:
    recorder = KeyRecorder()
    recorder.mark([TOUCHED], 1, ids(1))
    recorder.mark([GONE], 1, ids(2))
    recorder.mark([0], 2, ids(3))
    recorder.drop(TOUCHED)
    assert recorder.capture().keys() == {(GONE, 1), (0, 2)}
    recorder.drop(GONE)
    assert recorder.count(0) == 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("mark"), st.integers(0, 9)), st.sampled_from([("move",), ("back",), ("got",), ("save",)])
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_nothing_is_forgotten_before_it_was_received(actions: list[tuple]) -> None:
    recorder = KeyRecorder()
    pending: set[int] = set()
    held: set[int] = set()
    for action, *rest in actions:
        if action == "mark":
            recorder.mark([TOUCHED], 1, ids(*rest))
            pending |= {*rest}
        elif action == "move":
            assert recorder.move(TOUCHED, 1).tolist() == sorted(pending)
            held, pending = held | pending, set()
        elif action == "back":
            recorder.put_back(TOUCHED)
            held, pending = set(), held | pending
        elif action == "got":
            recorder.forget(TOUCHED)
            held = set()
        else:
            captured = recorder.capture()
            recorder = KeyRecorder()
            recorder.restore(captured)
            held, pending = set(), held | pending
