"""The gate between pushes and snapshots (study 2d)."""

from __future__ import annotations

import threading
import time

from fleet.ps.table.gate import Gate


def _run(*targets: object) -> None:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_exclusive_overlaps_nothing() -> None:
    """Shared holders overlap each other and never an exclusive one; exclusive ones never overlap."""
    gate, inside, wrong, most = Gate(), [0, 0], [], [0]
    lock = threading.Lock()

    def hold(kind: int) -> None:
        for _ in range(200):
            with gate.exclusive() if kind else gate.shared():
                with lock:
                    inside[kind] += 1
                    most[0] = max(most[0], inside[0])
                    if inside[1] and sum(inside) > 1:
                        wrong.append(tuple(inside))
                time.sleep(0.0001)
                with lock:
                    inside[kind] -= 1

    _run(*[lambda: hold(0)] * 4, *[lambda: hold(1)] * 2)
    assert not wrong
    assert most[0] > 1


def test_a_busy_copier_does_not_shut_pushes_out() -> None:
    """A snapshot takes the gate thousands of times in a row; pushes pass between."""
    gate, stop, passed = Gate(), threading.Event(), [0]

    def copy() -> None:
        while not stop.is_set():
            with gate.exclusive():
                pass

    def push() -> None:
        for _ in range(300):
            with gate.shared():
                passed[0] += 1
        stop.set()

    _run(copy, push)
    assert passed[0] == 300


def test_busy_pushes_do_not_shut_the_copier_out() -> None:
    """Overlapping pushes never end as a group; the copier still gets its turn."""
    gate, stop, passed = Gate(), threading.Event(), [0]

    def push() -> None:
        while not stop.is_set():
            with gate.shared():
                time.sleep(0.0005)

    def copy() -> None:
        for _ in range(100):
            with gate.exclusive():
                passed[0] += 1
        stop.set()

    _run(push, push, push, copy)
    assert passed[0] == 100
