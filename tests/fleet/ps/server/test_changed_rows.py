"""What a server tells workers with rows of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet.ps.client.client import Client
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import SPARSE, gradient, serving


def pushed(client: Client, *keys: int, value: float = 1.0) -> None:
    client.wait(client.push({0: gradient(keys, value)}))


def test_a_watch_tells_of_pushes_and_additions_of_everybody_once() -> None:
    with serving(num_servers=2, num_workers=2) as service:
        a, b = service.client(0, tables={0: SPARSE}), service.client(1, tables={0: SPARSE})
        pushed(b, 1)
        lacks, found = a.watch([0])
        assert lacks  # what was pushed before it watched
        assert not len(found[0][0])
        pushed(a, 1, 2)
        pushed(b, 2, 5)
        b.wait(b.add({0: gradient([6], 4.0)}))
        lacks, found = a.watch([0])
        order = np.argsort(found[0][0])
        assert not lacks
        assert found[0][0][order].tolist() == [1, 2, 5, 6]
        assert found[0][1][order, 0].tolist() == [-2, -2, -1, 4]
        assert a.watch([0])[1][0][0].tolist() == []
        pushed(a, 3)
        assert len(b.pull_changes([0])[0][0]) == 0  # who does not watch is told of the additions of others alone


def test_an_answer_that_was_lost_is_given_again() -> None:
    with serving() as service:
        a = service.client(0, tables={0: SPARSE}, answer_timeout_s=0.3)
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "drop"))
        assert a.watch([0])[0]  # again, although the question was asked before
        pushed(a, 4)
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "drop"))
        lacks, found = a.watch([0])
        assert not lacks
        assert found[0][0].tolist() == [4]


def test_changes_of_one_that_left_are_not_kept() -> None:
    with serving(num_workers=2) as service:
        a, b = service.client(0, tables={0: SPARSE}), service.client(1, tables={0: SPARSE})
        a.watch([0])
        pushed(b, 1)
        job = service.servers[0].state.job
        assert job.recorder.count(0) == 1
        assert job.recorder.capture() == {}  # a snapshot does not keep who watches
        again = service.client(0, tables={0: SPARSE})  # a new process
        assert job.recorder.count(0) == 0
        assert again.watch([0])[0]
        pushed(b, 1)
        again.goodbye()
        pushed(b, 2)
        assert job.recorder.count(0) == 0


def test_more_than_one_message_holds_is_read_anew() -> None:
    with serving(max_body_bytes=2048) as service:
        a = service.client(0, tables={0: SPARSE}, max_body_bytes=2048)
        a.watch([0])
        for first in range(0, 400, 50):
            pushed(a, *range(first, first + 50))
        lacks, found = a.watch([0])
        assert lacks
        assert not len(found[0][0])
        pushed(a, 1)
        assert a.watch([0])[1][0][0].tolist() == [1]


@pytest.mark.parametrize("change", ["push", "add"])
def test_rows_that_are_read_before_they_change_are_told_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls do not wait for changes that are being applied."""
    with serving(num_workers=2) as service:
        a, b = service.client(0, tables={0: SPARSE}), service.client(1, tables={0: SPARSE})
        ask = (lambda: a.watch([0])[1]) if change == "push" else (lambda: a.pull_changes([0]))
        ask()
        table = service.servers[0].state.tables[0]
        early = []
        apply = getattr(table, change)

        def slowly(*args: Any) -> None:
            if not early:
                early.append(ask()[0])
            apply(*args)

        monkeypatch.setattr(table, change, slowly)
        b.wait(getattr(b, change)({0: gradient([4])}))
        assert early[0][0].tolist() == [4]
        assert early[0][1].tolist() == [[0, 0]]
        keys, rows = ask()[0]
        assert keys.tolist() == [4]
        assert abs(rows).tolist() == [[1, 1]]
