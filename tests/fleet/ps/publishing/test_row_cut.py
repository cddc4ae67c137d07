"""A cut holds exactly the records up to its watermark, while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fleet.ps.publishing.rig import publishing
from tests.fleet.ps.service import gradient
from tests.helpers.memory_sink import MemorySink


def test_pushes_go_on_while_a_cut_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes between the first reading and the second is in the delta as it is at the watermark."""
    from fleet.ps.publishing import row_cut as module

    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1, 2, 3)
        service.publish()
        service.push(client, 1, 2)
        plain = module._read
        first = []

        def read(table: Any, touched: Any, gone: Any) -> Any:
            found = plain(table, touched, gone)
            if not first:
                first.append(True)
                service.push(client, 2, 7)
                client.alter(0, "shrink", threshold=2)
                service.push(client, 3)
            return found

        monkeypatch.setattr(module, "_read", read)
        service.publish()
        assert len(sink.deltas) == 2
        assert sink.rows == service.served()
        assert sink.deltas[-1].watermark == service.servers[0].state.journal.last_lsn
        assert sorted(sink.rows["ads"]) == [1, 2, 3]


def test_a_change_that_is_noted_and_not_applied_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1)
        service.publish()
        table = service.servers[0].state.tables[0]
        plain = table.push
        noted, apply = threading.Event(), threading.Event()

        def push(part: Any, lsn: int) -> None:
            noted.set()
            assert apply.wait(30)
            plain(part, lsn)

        monkeypatch.setattr(table, "push", push)
        ticket = client.push({0: gradient([1])})
        assert noted.wait(30)
        publishing_ = threading.Thread(target=service.publish)
        publishing_.start()
        while not table.gate._exclusive_waiting:
            assert publishing_.is_alive()
        apply.set()
        client.wait(ticket)
        publishing_.join(30)
        assert sink.rows == service.served()


def test_a_row_that_was_only_pulled_is_not_in_a_delta(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.publish()
        client.wait(client.pull({0: np.array([9])}))
        service.push(client, 1)
        service.publish()
        assert set(sink.rows["ads"]) == {1}
