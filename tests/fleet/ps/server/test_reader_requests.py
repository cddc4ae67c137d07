"""What a server does for a reader: it shows rows, and nothing of the job changes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.wire.messages import Op, TablePart, encode_parts
from tests.fleet.ps.service import DENSE, SGD, ZEROS, gradient, ids, rows, serving
from tests.fleet.ps.serving.test_server_rows import endpoints_of, reading
from tests.fleet.ps.standby.test_pair import FIRST, duo


def test_a_lookup_changes_nothing() -> None:
    """No row, no count of use, no lease, no wait, and no worker at the end of the job."""
    bounded = SparseTableConfig("ads", 2, SGD, initializer=ZEROS, bounds=Bounds(evict="lru", max_rows=2))
    with serving(mode="sync", num_workers=2) as service:
        workers = [service.client(rank, tables={0: bounded, 1: DENSE}) for rank in range(2)]
        server = service.servers[0]
        with reading(service.transport, *endpoints_of(service)) as reader:
            tickets = [worker.push({0: gradient([1])}) for worker in workers]
            for worker, ticket in zip(workers, tickets, strict=True):
                worker.wait(ticket)
            ticket = workers[0].push({0: gradient([2])})  # one worker has pushed the next step: held
            assert reader.lookup("ads", ids(1, 2, 9))[1].tolist() == [True, False, False]
            for _ in range(5):
                reader.lookup("ads", ids(1, 9))
            assert server.state.table(0).describe()["rows"] == 1
            assert server.state.job.active() == server.state.job.workers
            workers[1].wait(workers[1].push({0: gradient([2])}))
            workers[0].wait(ticket)
            reader.lookup("ads", ids(1))
            for worker, ticket in [(one, one.push({0: gradient([3])})) for one in workers]:
                worker.wait(ticket)
            assert reader.lookup("ads", ids(1, 2, 3))[1].tolist() == [False, True, True]  # 1 was pushed first
            for worker in workers:
                worker.goodbye()
            assert server.wait(5.0)
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 0.9


@pytest.mark.parametrize(("wire", "error"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 1 / 250)])
def test_wires(wire: str, error: float) -> None:
    with serving() as service:
        client = service.client()
        values = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
        pushed = gradient(range(50))
        pushed.rows = -values
        client.wait(client.push({0: pushed}))
        with reading(service.transport, *endpoints_of(service), wire=wire) as reader:
            got, found = reader.lookup("ads", np.arange(60))
            assert found[:50].all()
            assert not found[50:].any()
            assert not got[50:].any()
            assert np.abs(got[:50] - values).max() <= error * np.abs(values).max()
            assert (wire == "float32") is np.array_equal(got[:50], values)


def test_a_reader_sends_nothing_else() -> None:
    """The connection of a reader takes no change."""
    with serving() as service:
        service.client()
        with reading(service.transport, *endpoints_of(service)) as reader:
            line = reader._lines[0]
            part = TablePart(0, 1, 2, ids(1), np.ones((1, 2), np.float32))
            for op in (Op.PUSH, Op.STOP, Op.GOODBYE, Op.ALTER, Op.CREATE):
                with pytest.raises(PSError, match="a reader looks rows up"):
                    line.finish(op, encode_parts([part]) if op is Op.PUSH else [], int(op is Op.PUSH))
            with pytest.raises(PSError, match="is dense"):
                line.finish(Op.PULL, encode_parts([TablePart(1, 5, 1)]), 1)
            assert not reader.lookup("ads", ids(1))[1].any()


def test_rows_that_a_failover_may_lose_are_not_shown(tmp_path: Path) -> None:
    """A server whose standby lacks the newest rows does not show them: the standby might take over without them."""
    with duo(tmp_path) as pair:
        client = pair.client()
        client.wait(client.push({0: gradient([1])}))
        client.flush()
        with reading(pair.transport, FIRST) as reader:
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1
            pair.cut()
            client.wait(client.push({0: gradient([1])}))
            assert rows(client, [1])[0, 0] == -2
            assert reader.lookup("ads", ids(1))[0][0, 0] == -1  # of the standby
            assert reader.positions[0].watermark < pair.leader._journal.last_lsn
