"""Client and server over queues: what is pushed arrives once, whatever the line does (D.1, D.7, D.10)."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.wire.messages import Op
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import DENSE, SGD, SPARSE, Gradient, gradient, ids, rows, serving


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_pull_and_push_of_many_tables(num_servers, wire):
    with serving(num_servers) as service:
        client = service.client(wire=wire)
        client.wait(client.set_dense({1: np.arange(5, dtype=np.float32)}))
        keys = ids(*range(-50, 50))
        grads = np.repeat(np.arange(100, dtype=np.float32)[:, None], 2, 1)
        client.wait(client.push({0: Gradient(keys, grads), 1: np.ones(5, np.float32)}))
        result = client.wait(client.pull({0: keys[::-1], 1: None}))
        np.testing.assert_array_equal(result[0], -grads[::-1])
        np.testing.assert_array_equal(result[1], np.arange(5) - 1)
        repeated = client.wait(client.pull({0: ids(7, 7, -50)}))[0]
        np.testing.assert_array_equal(repeated[:, 0], [-57, -57, 0])
        held = sum(facts["tables"]["0"]["rows"] for facts in client.stat())
        assert held == 100


def test_one_message_per_server_and_step():
    """PS design 2c: one message per server per step for all tables."""
    with serving(2) as service:
        client = service.client(tables={0: SPARSE, 1: DENSE, 2: SparseTableConfig("b", 3, SGD)})
        before = service.transport.sent["client"]
        keys = ids(*range(100))
        client.wait(client.pull({0: keys, 1: None, 2: keys}))
        assert service.transport.sent["client"] == before + 2
        push = {0: gradient(range(100)), 1: np.ones(5, np.float32), 2: gradient(range(100), dim=3)}
        client.wait(client.push(push))
        assert service.transport.sent["client"] == before + 4


def test_out_arrays_and_no_create():
    with serving(2) as service:
        client = service.client()
        out = np.full((3, 2), 9, np.float32)
        result = client.wait(client.pull({0: ids(1, 2, 3)}, out={0: out}, create=False))
        assert result[0] is out
        assert not out.any()
        assert sum(facts["tables"]["0"]["rows"] for facts in client.stat()) == 0


def test_dense_values_are_taken_as_they_arrive_from_each_server():
    with serving(2) as service:
        client = service.client()
        client.wait(client.set_dense({1: np.arange(5, dtype=np.float32)}))
        taken = np.full(5, -1, np.float32)

        def take(values, start=0):
            taken[start : start + len(values)] = values

        client.wait(client.pull({1: None}, out={1: take}))
        assert taken.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ConfigError, match="out takes an array"):
            client.pull({0: ids(1)}, out={0: take})


@pytest.mark.parametrize("kind", ["cut", "cut_after", "drop"])
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_every_push_is_applied_once_whatever_is_lost(side, kind, offset):
    """The request, or the acknowledgement, of a push is lost: it is sent again and applied once."""
    with serving() as service:
        client = service.client(answer_timeout_s=0.3)
        service.transport.faults.append(Fault(side, service.transport.sent[side] + offset, kind))
        for step in range(4):
            client.wait(client.push({0: gradient([1, 2], step + 1)}))
        assert rows(client, [1, 2]).tolist() == [[-10, -10]] * 2
        assert client.stat()[0]["applied"] == 4


def test_many_cuts_in_a_row():
    with serving(2) as service:
        client = service.client(answer_timeout_s=0.3)
        start = dict(service.transport.sent)
        for number in range(5, 200, 7):
            service.transport.faults.append(Fault("server", start["server"] + number, "cut"))
            service.transport.faults.append(Fault("client", start["client"] + number + 3, "cut_after"))
        for _ in range(30):
            client.wait(client.push({0: gradient(range(20))}))
            client.wait(client.pull({0: ids(*range(20))}))
        assert (rows(client, range(20)) == -30).all()


def test_a_prefetched_pull_and_a_push_survive_a_cut():
    with serving() as service:
        client = service.client()
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "cut"))
        pulled = client.pull({0: ids(1)})
        pushed = client.push({0: gradient([1])})
        client.wait(pushed)
        client.wait(pulled)
        assert rows(client, [1]).tolist() == [[-1, -1]]


def test_a_duplicate_is_acknowledged_and_not_applied():
    with serving() as service:
        client = service.client()
        ticket = client.push({0: gradient([5])})
        client.wait(ticket)
        link, request = ticket.requests[0]
        with link.lock:
            for _ in range(2):
                request.done = False
                link._pending.append(request)
                link._transmit(request)
                link.finish(request)
        assert rows(client, [5]).tolist() == [[-1, -1]]
        assert client.stat()[0]["duplicates"] == 2


@pytest.mark.parametrize("level", [0, 1, 2])
def test_four_workers_at_once_equal_one_after_another(level, tmp_path):
    folder = tmp_path if level else None
    with serving(2, num_workers=4, folder=folder, level=level) as service:
        clients = [service.client(rank) for rank in range(4)]
        keys = range(300)

        def work(client):
            for _ in range(10):
                client.wait(client.push({0: gradient(keys), 1: np.ones(5, np.float32)}))
                client.wait(client.pull({0: ids(*keys)}))

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert (rows(clients[0], keys) == -40).all()
        assert (clients[0].wait(clients[0].pull({1: None}))[1] == -40).all()


def test_one_client_shared_by_threads():
    with serving(2) as service:
        client = service.client()
        link_step = threading.Lock()

        def work(table):
            for _ in range(20):
                with link_step:
                    ticket = client.push({0: gradient([table])})
                client.wait(ticket)
                client.wait(client.pull({0: ids(table)}))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert (rows(client, range(4)) == -20).all()


def test_a_restarted_worker_replays_from_its_checkpoint():
    """Its steps up to the crash are known to the server: applied once."""
    with serving() as service:
        client = service.client()
        for step in range(1, 4):
            client.wait(client.push({0: gradient([1], step)}))
            if step == 2:
                checkpoint = client.state_dict()
        client.close()
        again = service.client()
        again.load_state_dict(checkpoint)
        for step in (3, 4):
            again.wait(again.push({0: gradient([1], step)}))
        assert rows(again, [1])[0, 0] == -(1 + 2 + 3 + 4)


def test_a_new_process_without_a_checkpoint_goes_on():
    with serving() as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}))
        client.wait(client.push({0: gradient([1])}))
        client.close()
        again = service.client()
        assert again.step == 2
        again.wait(again.push({0: gradient([1])}))
        assert rows(again, [1])[0, 0] == -3


def test_the_older_process_of_a_rank_is_shut_out():
    with serving() as service:
        old, new = service.client(), service.client()
        with pytest.raises(PSError, match="taken over"):
            old.wait(old.push({0: gradient([1])}))
        with pytest.raises(PSError, match="taken over"):
            rows(old, [1])
        new.wait(new.push({0: gradient([1])}))
        assert rows(new, [1])[0, 0] == -1


def test_tables_are_made_once_and_must_agree():
    with serving(num_workers=2) as service:
        service.client(0)
        service.client(1)
        with pytest.raises(PSError, match=r"dim is 2 there and 7 here"):
            service.client(1, tables={0: SparseTableConfig("ads", 7, SGD)})


def test_two_tables_of_one_name_are_refused():
    """A save has one folder for a name: the second table's rows would replace those of the first."""
    other = replace(SPARSE, name="other")
    with serving() as service:
        client = service.client()
        for configs in ({5: SPARSE}, {5: other, 6: other}):
            with pytest.raises(ConfigError, match="are both called .* Give them different names"):
                client.create_tables(configs)
        client.create_tables({5: other, 0: SPARSE})


def test_wrong_calls_raise_before_anything_is_sent():
    with serving() as service:
        client = service.client()
        sent = service.transport.sent["client"]
        one = np.ones((1, 2), np.float32)
        for call in (
            lambda: client.pull({9: ids(1)}),
            lambda: client.pull({0: None}),
            lambda: client.pull({1: ids(1)}),
            lambda: client.pull({0: np.array([1.0])}),
            lambda: client.pull({0: [1]}),
            lambda: client.push({0: Gradient(ids(1), np.ones((2, 2), np.float32))}),
            lambda: client.push({0: Gradient(ids(1), np.ones((1, 2)))}),
            lambda: client.push({0: Gradient(ids(1), one, shows=np.ones(2, np.float32))}),
            lambda: client.push({0: one}),
            lambda: client.push({1: np.ones(4, np.float32)}),
            lambda: client.push({0: gradient([1])}, step=0),
            lambda: client.pull({0: ids(1)}, out={0: np.zeros((1, 3), np.float32)}),
        ):
            with pytest.raises(ConfigError):
                call()
        assert service.transport.sent["client"] == sent
        assert client.step == 0


def test_a_request_the_server_refuses_changes_nothing_and_keeps_the_line():
    with serving() as service:
        client = service.client()
        client.tables[0].config = SparseTableConfig("ads", 3, SGD)
        client.tables[0].dim = client.tables[0].push_dim = 3
        with pytest.raises(PSError, match=r"parameter server 0 .*takes rows of dim 2"):
            client.wait(client.push({0: gradient([1], dim=3)}))
        with pytest.raises(PSError, match="dim 2"):
            client.wait(client.pull({0: ids(1)}))
        client.tables[0].dim = client.tables[0].push_dim = 2
        assert rows(client, [1]).tolist() == [[0, 0]]


def test_a_lost_server_is_named_after_the_deadline():
    """001-12: the worker reports the lost server."""
    with serving(2) as service:
        lines = []
        client = service.client(deadline_s=0.8, retry_interval_s=0.3)
        for link in client._links:
            link._notify = lines.append
        service.servers[1].stop()
        began = time.monotonic()
        with pytest.raises(PSError, match=r"parameter server 1 \(127.0.0.1:9001\) did not answer for 0.8 s") as found:
            client.wait(client.push({0: gradient(range(50))}))
        assert str(found.value).endswith("Look at its log and restart it.")  # it has no folder
        assert time.monotonic() - began < 5
        assert "server not ready, wait 0.3 sec to retry..." in lines
        assert "not ready endpoints:['127.0.0.1:9001']" in lines


def test_other_servers_serve_while_one_is_away():
    with serving(2) as service:
        client = service.client(deadline_s=0.5, retry_interval_s=0.2)
        service.servers[1].stop()
        from fleet.ps.table.partition import servers_of_keys

        keys = np.arange(100)
        mine = keys[servers_of_keys(keys, 2) == 0]
        client.wait(client.push({0: gradient(mine.tolist())}))
        assert (rows(client, mine.tolist()) == -1).all()


def test_a_server_that_lost_its_tables_is_not_trusted():
    with serving() as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}))
        service.servers[0].stop()
        service.start(0)
        with pytest.raises(PSError, match="without tables"):
            client.wait(client.push({0: gradient([1])}))


def test_shrink_and_learning_rate_are_done_once():
    with serving(2) as service:
        client = service.client(answer_timeout_s=0.5)
        client.wait(client.push({0: gradient(range(10))}))
        client.wait(client.push({0: gradient(range(5))}))
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 2, "cut"))
        client.alter(0, "shrink", threshold=2.0)
        assert sum(facts["tables"]["0"]["rows"] for facts in client.stat()) == 5
        client.alter(0, "learning_rate", value=0.5)
        client.wait(client.push({0: gradient([0])}))
        assert rows(client, [0])[0, 0] == -2.5
        with pytest.raises(PSError, match="not an action of sparse tables"):
            client.alter(0, "explode")


def test_goodbye_of_all_ends_the_server():
    with serving(num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        a.goodbye()
        assert not service.servers[0].wait(0.2)
        b.goodbye()
        assert service.servers[0].wait(5)


def test_stop_ends_the_server_at_once():
    with serving(2, num_workers=2) as service:
        service.client(0).stop_servers()
        assert all(server.wait(5) for server in service.servers)


def test_the_secret_is_required_when_the_server_has_one():
    with serving(secret=b"s") as service:
        with pytest.raises(PSError, match="secret"):
            service.client(0, secret=b"wrong")
        for missing in (None, b""):
            with pytest.raises(ConfigError, match="without a job secret"):
                service.client(0, secret=missing)
        client = service.client(0, secret=b"s")
        assert rows(client, [1]).tolist() == [[0, 0]]


def test_a_worker_of_another_job_is_refused():
    with serving(num_workers=2, job="a") as service:
        with pytest.raises(PSError, match="job 'b'"):
            service.client(0, job="b")
        service.num_workers = 3
        with pytest.raises(PSError, match="3 workers"):
            service.client(0, job="a")


def test_over_real_sockets():
    with serving(2, transport=SocketTransport(), num_workers=2, secret=b"k") as service:
        clients = [service.client(rank, secret=b"k") for rank in range(2)]
        keys = ids(*range(20_000))
        big = Gradient(keys, np.ones((20_000, 2), np.float32))
        for client in clients:
            ticket = client.pull({0: keys})
            client.wait(client.push({0: big}))
            client.wait(ticket)
        assert (rows(clients[0], range(20_000)) == -2).all()


def test_the_heartbeat_keeps_the_lease():
    with serving(num_workers=2, lease_s=0.4) as service:
        service.client(0, heartbeat=True)
        service.client(1)
        time.sleep(1.2)
        states = [worker.state for worker in service.servers[0].state.job.workers]
        assert states == ["active", "expired"]


def test_the_wire_knows_every_operation():
    from fleet.ps.server.operations import Operations

    with serving() as service:
        operations = service.servers[0]._operations
        assert isinstance(operations, Operations)
        assert set(operations._handlers) == set(Op) - {Op.HELLO, Op.FOLLOW}


@pytest.mark.parametrize("config", [{"mode": "sync"}, {"staleness": 0}])
def test_a_worker_killed_between_two_servers_goes_on(config):
    """Its last step reached server 0 alone: server 1 would wait for the step, and the next process for server 1."""
    with serving(2, **config) as service:
        first = service.client()
        keys = np.arange(64)
        ones = np.ones((64, 2), np.float32)
        first.wait(first.push({0: Gradient(keys, ones)}))
        first._links = first._links[:1]
        first.wait(first.push({}))
        again = service.client()
        assert again.step == 1
        again.wait(again.pull({0: keys}))
        again.wait(again.push({0: Gradient(keys, ones)}))
        again.wait(again.pull({0: keys}))
        assert again.step == 2
