"""Sync mode, bounded staleness, barriers, leases and geo (D.1, D.7, G11, G12; PS design 3)."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.server.key_recorder import KeyRecorder
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.worker.exchange_modes import SyncExchange
from fleet.ps.worker.table_plan import SparsePart, TablePlan
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import SPARSE, Gradient, gradient, ids, in_threads, rows, serving

# -- sync --------------------------------------------------------------------------------------------------------


def test_sync_averages_over_workers_and_applies_once():
    """G11: sync PS averages at the barrier, for sparse and dense; an id of one worker counts as zero at the other."""
    with serving(2, mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        a.wait(a.push({0: gradient([1, 2], 4.0), 1: np.full(5, 2.0, np.float32)}))
        assert rows(a, [1, 2, 3])[:, 0].tolist() == [0, 0, 0]  # held: b has not pushed
        b.wait(b.push({0: gradient([2, 3], 8.0), 1: np.full(5, 6.0, np.float32)}))
        result = a.wait(a.pull({0: ids(1, 2, 3), 1: None}))
        assert result[0][:, 0].tolist() == [-2, -6, -4]
        assert (result[1] == -4).all()


@pytest.mark.parametrize("num_servers", [1, 2, 6])  # 6: one has no dense values
def test_the_answer_to_a_push_brings_the_values_after_the_step(num_servers):
    with serving(num_servers, mode="sync", num_workers=2) as service:
        workers = service.client(0), service.client(1)
        taken = [np.full(5, -1, np.float32) for _ in workers]
        before = service.transport.sent["client"]

        def train(rank: int) -> None:
            def take(values, start=0):
                taken[rank][start : start + len(values)] = values

            for step in (1, 2, 3):
                gradients = {0: gradient(range(40)), 1: np.full(5, step + 2 * rank, np.float32)}
                workers[rank].wait(workers[rank].push(gradients, out={1: take}))
                assert (taken[rank] == -sum(range(2, step + 2))).all()

        in_threads(lambda: train(0), lambda: train(1))
        assert service.transport.sent["client"] == before + 2 * 3 * num_servers


@pytest.mark.parametrize("kind", ["cut", "cut_after", "drop"])
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_a_lost_answer_with_values_comes_again(side, kind, offset):
    with serving(mode="sync") as service:
        client = service.client(answer_timeout_s=0.3)
        taken = np.full(5, -1, np.float32)
        service.transport.faults.append(Fault(side, service.transport.sent[side] + offset, kind))
        for step in range(1, 5):

            def take(values, start=0):
                taken[start : start + len(values)] = values

            client.wait(client.push({0: gradient([1]), 1: np.ones(5, np.float32)}, out={1: take}))
            assert (taken == -step).all()


def test_gradients_that_are_held_stay_as_they_came():
    """The server keeps the memory that it received them in."""
    with serving(mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        for step in (1, 2, 3):
            a.wait(a.push({0: gradient(range(100), step), 1: np.full(5, step, np.float32)}))
        a.stat()
        for step in (1, 2, 3):
            b.wait(b.push({0: gradient(range(100), 2 * step), 1: np.full(5, 2 * step, np.float32)}))
            result = b.wait(b.pull({0: ids(*range(100)), 1: None}))
            assert (result[0] == -1.5 * sum(range(1, step + 1))).all()
            assert (result[1] == -1.5 * sum(range(1, step + 1))).all()


def test_who_waits_says_for_whom_and_where(monkeypatch):
    """D.8: a save that worker 0 alone calls, as in scripts of Paddle, does not stand there in silence."""
    monkeypatch.setattr("fleet.ps.server.operations.BEAT_S", 0.02)
    with serving(mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        lines: list[str] = []
        a._links[0]._notify = lines.append

        def later() -> None:
            while not lines:
                time.sleep(0.01)
            b.barrier("fleet.save")

        in_threads(lambda: a.barrier("fleet.save"), later)
    (line,) = lines
    assert "waits for workers [1] at barrier 'fleet.save': they must call it, too" in line


def test_a_pull_waits_for_the_step_of_all_workers():
    with serving(mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        a.wait(a.push({0: gradient([1])}))
        seen = []
        reader = threading.Thread(target=lambda: seen.append(a.wait(a.pull({0: ids(1)}))[0][0, 0]), daemon=True)
        reader.start()
        reader.join(0.4)
        assert not seen
        b.wait(b.push({0: gradient([1], 3.0)}))
        reader.join(5)
        assert seen == [-2.0]


def test_a_new_rate_waits_for_the_steps_before_it_on_every_server():
    """D.3, G11: a server from which this step pulled nothing may still hold the step before."""
    with serving(2, mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        plan = TablePlan(sparse=[SparsePart(0, SPARSE, [], None)])
        a.wait(a.push({0: gradient([1])}))
        settling = threading.Thread(target=SyncExchange(a, plan).settle, daemon=True)
        settling.start()
        settling.join(0.1)
        assert settling.is_alive()
        b.wait(b.push({0: gradient([1])}))
        settling.join(5)
        assert not settling.is_alive()
        assert sum(fact["tables"]["0"]["rows"] for fact in a.stat()) == 1  # what settling asks for gets no row


def run_sync(order_seed):
    rng = random.Random(order_seed)
    config = SparseTableConfig("ads", 4, Rule("adam", {"learning_rate": 0.1}), initializer=Initializer("normal", 0, 1))
    with serving(2, mode="sync", num_workers=4) as service:
        clients = [service.client(rank, tables={0: config}) for rank in range(4)]

        def work(client, data):
            for step in range(5):
                keys = np.unique(data.integers(0, 40, 25))
                got = client.wait(client.pull({0: keys}))[0]
                time.sleep(rng.random() * 0.01)
                grads = (got * data.standard_normal() + data.standard_normal(got.shape)).astype(np.float32)
                client.wait(client.push({0: Gradient(keys, grads)}))
                assert client.step == step + 1

        jobs = [
            (lambda client=client, rank=rank: work(client, np.random.default_rng(rank)))
            for rank, client in enumerate(clients)
        ]
        rng.shuffle(jobs)
        in_threads(*jobs)
        return clients[0].wait(clients[0].pull({0: np.arange(40)}))[0].tobytes()


def test_sync_is_bit_equal_whatever_the_order_of_arrival():
    """Reproducible sync mode: five runs, four workers, random delays, Adam."""
    assert len({run_sync(seed) for seed in range(5)}) == 1


def test_a_worker_may_run_ahead_a_little_and_not_more():
    with serving(mode="sync", num_workers=2) as service:
        a, b = service.client(0, deadline_s=2), service.client(1)
        for _ in range(4):
            a.wait(a.push({0: gradient([1])}))
        done = []
        fifth = threading.Thread(target=lambda: done.append(a.wait(a.push({0: gradient([1])}))), daemon=True)
        fifth.start()
        fifth.join(0.4)
        assert not done
        for _ in range(5):
            b.wait(b.push({0: gradient([1])}))
        fifth.join(5)
        assert done
        assert rows(a, [1])[0, 0] == -5


def test_sync_continues_when_a_worker_says_goodbye():
    with serving(mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        a.wait(a.push({0: gradient([1], 6.0)}))
        b.goodbye()
        assert a.wait(a.pull({0: ids(1)}))[0][0, 0] == -6  # the average over the one worker there is


def test_sync_continues_when_a_worker_dies_and_takes_it_back():
    with serving(mode="sync", num_workers=2, lease_s=0.3) as service:
        a, b = service.client(0, heartbeat=True), service.client(1)
        in_threads(lambda: a.wait(a.push({0: gradient([1], 2.0)})), lambda: b.wait(b.push({0: gradient([1], 2.0)})))
        checkpoint = b.state_dict()
        b.close()
        a.wait(a.push({0: gradient([1], 2.0)}))
        assert a.wait(a.pull({0: ids(1)}))[0][0, 0] == -4
        again = service.client(1)
        again.load_state_dict(checkpoint)
        late = again.push({0: gradient([1], 100.0)})  # step 2 was applied without it
        again.wait(late)
        assert rows(again, [1])[0, 0] == -4
        again.wait(again.push({0: gradient([1], 4.0)}))
        a.wait(a.push({0: gradient([1], 2.0)}))
        assert a.wait(a.pull({0: ids(1)}))[0][0, 0] == -7


def test_a_replayed_step_is_not_averaged_twice():
    with serving(mode="sync", num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        checkpoint = a.state_dict()
        a.wait(a.push({0: gradient([1], 2.0)}))
        a.close()
        again = service.client(0)
        again.load_state_dict(checkpoint)
        again.wait(again.push({0: gradient([1], 2.0)}))
        b.wait(b.push({0: gradient([1], 4.0)}))
        assert b.wait(b.pull({0: ids(1)}))[0][0, 0] == -3


# -- staleness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_pull_is_staler_than_the_bound(staleness):
    """Bounded staleness: pull of step t only after the slowest worker's clock is at least t - s."""
    with serving(2, num_workers=3, staleness=staleness) as service:
        clients = [service.client(rank) for rank in range(3)]
        clocks = [0, 0, 0]

        def work(rank):
            client, rng = clients[rank], random.Random(rank)
            for step in range(12):
                client.wait(client.pull({0: ids(*range(10))}))
                assert min(clocks) >= step - staleness
                time.sleep(rng.random() * (0.02 if rank == 2 else 0.002))
                clocks[rank] = step + 1  # before the push: the server may count it from now on
                client.wait(client.push({0: gradient(range(10))}))

        in_threads(*(lambda rank=rank: work(rank) for rank in range(3)))
        assert (rows(clients[0], range(10)) == -36).all()


def test_workers_do_run_ahead_within_the_bound():
    with serving(num_workers=2, staleness=2) as service:
        a, _ = service.client(0), service.client(1)
        for _ in range(2):
            a.wait(a.pull({0: ids(1)}))
            a.wait(a.push({0: gradient([1])}))
        a.wait(a.pull({0: ids(1)}))
        a.wait(a.push({0: gradient([1])}))
        blocked = threading.Thread(target=lambda: a.wait(a.pull({0: ids(1)})), daemon=True)
        blocked.start()
        blocked.join(0.3)
        assert blocked.is_alive()
        service.servers[0].state.leave(service.servers[0].state.job.workers[1])
        blocked.join(5)
        assert not blocked.is_alive()


def test_a_pull_that_could_never_be_answered_is_refused():
    with serving(num_workers=2, staleness=1) as service:
        client = service.client(0)
        client.pull({0: ids(1)}, step=1)
        with pytest.raises(ConfigError, match="must push step 1 first"):
            client.pull({0: ids(1)}, step=2)


def test_the_next_batch_is_pulled_while_this_one_is_computed():
    with serving(2, num_workers=1, staleness=1) as service:
        client = service.client(0)
        ticket = client.pull({0: ids(*range(10))})
        for step in range(5):
            client.wait(ticket)
            ticket = client.pull({0: ids(*range(10))}, step=step + 1)
            client.wait(client.push({0: gradient(range(10))}))
        client.wait(ticket)
        assert (rows(client, range(10)) == -5).all()


# -- barriers ----------------------------------------------------------------------------------------------------


def test_a_barrier_holds_until_all_are_there():
    with serving(2, num_workers=3) as service:
        clients = [service.client(rank) for rank in range(3)]
        passed = []

        def come(client, delay):
            time.sleep(delay)
            client.barrier()
            passed.append(time.monotonic())

        began = time.monotonic()
        in_threads(*(lambda c=c, d=d: come(c, d) for c, d in zip(clients, (0, 0.1, 0.4), strict=True)))
        assert min(passed) - began >= 0.4
        in_threads(*(client.barrier for client in clients))


@pytest.mark.parametrize("how", ["goodbye", "death"])
def test_a_barrier_does_not_hang_on_a_worker_that_ends(how):
    """D.1: a worker dying must not hang the others for ever."""
    with serving(num_workers=3, lease_s=0.4) as service:
        a, b, c = (service.client(rank, heartbeat=True) for rank in range(3))
        if how == "goodbye":
            c.goodbye()
        else:
            c.close()
        in_threads(a.barrier, b.barrier, timeout_s=8)


def test_a_barrier_survives_a_cut_and_a_restarted_worker_passes_old_ones():
    from tests.fleet.ps.local_transport import Fault

    with serving(num_workers=2) as service:
        a, b = service.client(0), service.client(1)
        service.transport.faults.append(Fault("server", service.transport.sent["server"] + 1, "cut"))
        in_threads(a.barrier, b.barrier)
        a.close()
        again = service.client(0)
        again.barrier()  # its first: the others have passed it
        in_threads(again.barrier, b.barrier)


@pytest.mark.parametrize("ending", ["barrier", "goodbye"])
def test_a_barrier_opens_when_what_was_pushed_before_it_is_applied(ending, tmp_path):
    """D.7, D.8: a save or load after it finds nothing held, also of a worker that is a step ahead of the others."""
    with serving(2, mode="sync", num_workers=2, folder=tmp_path) as service:
        tables = {0: SPARSE}  # without dense values no worker waits for its own step
        a, b = service.client(0, tables=tables), service.client(1, tables=tables)
        for client in (a, b):
            client.wait(client.push({0: gradient([1, 2], 2.0)}))
        a.wait(a.push({0: gradient([1, 2], 4.0)}))
        sessions = [server.state.job for server in service.servers]
        waiting = threading.Thread(target=a.barrier, daemon=True)
        waiting.start()
        deadline = time.monotonic() + 10
        while ending == "barrier" and not all(session.arrived for session in sessions):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        b.barrier() if ending == "barrier" else b.goodbye()
        waiting.join(10)
        assert not waiting.is_alive()
        assert not any(session.held for session in sessions)
        assert rows(a, [1, 2])[:, 0].tolist() == [-6, -6]
        assert a.step == 2
        if ending == "barrier":
            assert b.step == 2
        for index, server in enumerate(list(service.servers)):  # the journal has the two in this order
            server.stop()
            service.start(index)
        assert rows(a, [1, 2])[:, 0].tolist() == [-6, -6]
        assert [server.state.job.barriers for server in service.servers] == [{"worker": 1}] * 2


def test_a_load_drops_what_an_open_step_holds_for_its_tables(tmp_path):
    """D.7, D.8: the tables after a load are those of the save; the step stays known, so a retry changes nothing."""
    with serving(mode="sync", num_workers=2, folder=tmp_path / "state") as service:
        a, b = service.client(0), service.client(1)
        a.save(str(tmp_path / "save"))
        a.wait(a.push({0: gradient([1], 4.0), 1: np.full(5, 4.0, np.float32)}))
        b.load(str(tmp_path / "save"), tables=[0])
        a.close()
        again = service.client(0)
        again.step = 0  # it goes back to before this step
        again.wait(again.push({0: gradient([1], 4.0), 1: np.full(5, 4.0, np.float32)}))
        b.close()
        service.servers[0].stop()
        service.start(0)
        b = service.client(1)
        assert service.servers[0].state.job.held[1].keys() == {0}
        b.wait(b.push({0: gradient([1], 2.0), 1: np.full(5, 2.0, np.float32)}))
        found = b.wait(b.pull({0: ids(1), 1: None}))
        assert found[0][:, 0].tolist() == [-1]  # only the other worker's
        assert (found[1] == -3).all()  # this table was not loaded


# -- geo ---------------------------------------------------------------------------------------------------------


def test_the_recorder_gives_what_others_changed_once_and_again_when_asked_again():
    """D.7: pull returns rows changed by others since the last pull."""
    recorder = KeyRecorder()
    recorder.mark([1, 2], 7, ids(5, 3))
    recorder.mark([0, 2], 7, ids(3, 9))
    assert recorder.take(2, 7, 1).tolist() == [3, 5, 9]
    assert recorder.take(2, 7, 1).tolist() == [3, 5, 9]  # the answer was lost
    assert recorder.take(2, 7, 2).tolist() == []
    assert recorder.take(0, 7, 1).tolist() == [3, 9]
    assert recorder.take(0, 8, 1).tolist() == []
    other = KeyRecorder()
    other.restore(recorder.capture())
    assert other.take(1, 7, 1).tolist() == [3, 5]
    assert other.take(0, 7, 1).tolist() == [3, 9]  # may have been lost on its way: given again


def test_a_push_without_a_step_is_refused_in_sync_mode():
    from fleet.ps.wire.messages import Op

    with serving(mode="sync") as service:
        client = service.client()
        with pytest.raises(PSError, match="number of its step"):
            client.wait(client._change(Op.PUSH, {0: gradient([1])}, 0))
