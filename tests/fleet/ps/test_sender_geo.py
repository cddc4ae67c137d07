"""The background sender honours a_sync_configs; geo follows its formulas (A.2 a_sync_configs, D.7, G12)."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from fleet.errors import ConfigError, OptionWarning, PSError
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.worker.geo import GeoCommunicator, GeoRows
from fleet.ps.worker.sender import AsyncSender, HalfAsyncSender, SenderConfig
from tests.fleet.ps.local_transport import Fault
from tests.fleet.ps.service import DENSE, SGD, SPARSE, ZEROS, Gradient, gradient, ids, rows, serving, until

TWO = {0: SPARSE, 1: DENSE, 2: SparseTableConfig("b", 2, SGD, initializer=ZEROS)}


def shared_clients(service, count, **settings):
    """Clients of one worker process: the same client id, a channel each."""
    first = service.client(0, tables=TWO, channel=1, **settings)
    return [
        first,
        *(
            service.client(0, tables=TWO, channel=n + 2, client_id=first.client_id, **settings)
            for n in range(count - 1)
        ),
    ]


def sending(service, config, receive=None, additive=(), **settings):
    count = config.thread_pool_size if receive is None else config.num_clients
    clients, pushes = shared_clients(service, count, **settings), []
    for number, client in enumerate(clients):

        def push(gradients, *, step=None, ends_step=True, positions=None, number=number, push=client.push):
            pushes.append((number, step, sorted(gradients)))
            return push(gradients, step=step, ends_step=ends_step, positions=positions)

        client.push = push
    return AsyncSender(clients, config, receive, additive), clients, pushes


def test_everything_that_was_put_arrives_once():
    with serving(2) as service:
        sender, clients, _ = sending(service, SenderConfig(max_merge_var_num=4))
        for number in range(1, 26, 5):
            service.transport.faults.append(Fault("server", service.transport.sent["server"] + number, "cut"))
        for step in range(1, 31):
            sender.put({0: gradient([1, 2, 2 + step]), 1: np.ones(5, np.float32)}, step=step)
        sender.flush()
        assert rows(clients[0], [1, 2, 20])[:, 0].tolist() == [-30, -30, -1]
        assert (clients[0].wait(clients[0].pull({1: None}))[1] == -30).all()
        sender.stop()
        with pytest.raises(PSError, match="stopped"):
            sender.put({0: gradient([1])}, step=31)


@pytest.mark.parametrize("merge", [1, 3, 5])
def test_max_merge_var_num_bounds_what_one_push_carries(merge):
    with serving() as service:
        sender, clients, pushes = sending(
            service, SenderConfig(max_merge_var_num=merge, send_wait_times=20, send_queue_size=16)
        )
        for step in range(1, 16):
            sender.put({0: gradient([1])}, step=step)
        sender.flush()
        assert [step for _, step, _ in pushes] == list(range(merge, 16, merge))
        assert rows(clients[0], [1])[0, 0] == -15
        sender.stop()


def test_one_message_carries_the_tables_of_a_step():
    with serving() as service:
        sender, _, pushes = sending(service, SenderConfig(max_merge_var_num=2, send_wait_times=50))
        for step in range(1, 5):
            sender.put({0: gradient([1]), 1: np.ones(5, np.float32), 2: gradient([3])}, step=step)
        sender.flush()
        assert pushes == [(0, 2, [0, 1, 2]), (0, 4, [0, 1, 2])]
        sender.stop()


@pytest.mark.parametrize(("wait_times", "expected"), [(1, 1), (30, 2)])
def test_send_wait_times_is_the_patience_for_a_partial_batch(wait_times, expected):
    with serving() as service:
        sender, _, pushes = sending(service, SenderConfig(max_merge_var_num=2, send_wait_times=wait_times))
        sender.put({0: gradient([1])}, step=1)
        time.sleep(0.12)
        sender.put({0: gradient([1])}, step=2)
        deadline = time.monotonic() + 5
        while not pushes or pushes[-1][1] != 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert pushes[0][1] == expected
        sender.stop()


def test_send_queue_size_blocks_the_trainer():
    with serving(num_workers=2) as service:
        sender, clients, _ = sending(service, SenderConfig(send_queue_size=3))
        table = service.servers[0].state.tables[0]
        with table.order, table.gate.exclusive():  # the server cannot apply anything
            done = []

            def train():
                for step in range(1, 11):
                    sender.put({0: gradient([1])}, step=step)
                    done.append(step)

            trainer = threading.Thread(target=train, daemon=True)
            trainer.start()
            trainer.join(0.5)
            assert trainer.is_alive()
            assert 3 <= len(done) <= 4  # three wait, one is on its way
        trainer.join(5)
        sender.flush()
        assert rows(clients[0], [1])[0, 0] == -10
        sender.stop()


def test_thread_pool_size_shares_the_tables():
    with serving() as service:
        sender, clients, pushes = sending(service, SenderConfig(thread_pool_size=2))
        for step in range(1, 6):
            sender.put({0: gradient([1]), 1: np.ones(5, np.float32), 2: gradient([3])}, step=step)
        sender.flush()
        threads = {}
        for number, _, tables in pushes:
            for table in tables:
                threads.setdefault(table, set()).add(number)
        assert threads == {0: {0}, 1: {1}, 2: {0}}
        assert rows(clients[1], [3], table=2)[0, 0] == -5
        sender.stop()


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("least", [1, 4])
def test_parameters_are_received_after_enough_sends(independent, least):
    """independent_recv_thread and min_send_grad_num_before_recv."""
    with serving() as service:
        received = []

        def receive(client):
            received.append((threading.current_thread().name, client.wait(client.pull({1: None}))[1][0]))

        config = SenderConfig(independent_recv_thread=independent, min_send_grad_num_before_recv=least)
        sender, _, _ = sending(service, config, receive)
        for step in range(1, 9):
            sender.put({1: np.ones(5, np.float32)}, step=step)
            sender.flush()
            time.sleep(0.02)
        sender.stop()
        assert {name for name, _ in received} == {"receiver" if independent else "sender 0"}
        assert len(received) == 8 // least
        assert received[-1][1] == -8


def test_threads_count_what_all_of_them_have_sent():
    """Two tables and two threads: each sends one gradient of a step, and the second one makes the fetch due."""
    with serving() as service:
        received, together = [], threading.Barrier(2)
        config = SenderConfig(thread_pool_size=2, min_send_grad_num_before_recv=2)
        sender, clients, _ = sending(service, config, lambda client: received.append(client))
        for client in clients:

            def push(*args, push=client.push, **how):
                together.wait(10)  # both have looked at the count, if they do so before
                return push(*args, **how)

            client.push = push
        for step in range(1, 6):
            sender.put({0: gradient([1]), 1: np.ones(5, np.float32)}, step=step)
            sender.flush()
            assert len(received) == step
        sender.stop()


def test_a_lost_server_is_said_and_raised_where_the_worker_trains(caplog):
    with serving() as service:
        sender, _, _ = sending(service, SenderConfig(), deadline_s=0.5)
        service.servers[0].stop()
        sender.put({0: gradient([1])}, step=1)
        with pytest.raises(PSError, match="did not answer"):
            sender.flush()
        with pytest.raises(PSError, match="did not answer"):
            sender.put({0: gradient([1])}, step=2)
        sender.stop()
    assert caplog.text.count("The thread 'sender 0' has ended, and nothing does its work any more: PSError") == 1


def test_a_sender_that_is_ended_while_it_waits_says_nothing(caplog):
    with serving() as service:
        sender, _, _ = sending(service, SenderConfig(), deadline_s=60.0)
        service.servers[0].stop()
        sender.put({0: gradient([1])}, step=1)
        until(lambda: not sender.waiting()[0])
        began = time.monotonic()
        sender.abort()
        assert time.monotonic() - began < 20
        with pytest.raises(PSError, match="has been stopped"):
            sender.put({0: gradient([1])}, step=2)
    assert caplog.text == ""


def test_a_restarted_worker_replays_merged_steps_once():
    """Merges of its life before and of now differ; no step counts twice, none is lost."""
    with serving() as service:
        sender, clients, _ = sending(service, SenderConfig(max_merge_var_num=4, send_wait_times=20))
        for step in range(1, 7):
            sender.put({0: gradient([1], step)}, step=step)
        sender.stop()
        for client in clients:
            client.close()
        sender, clients, _ = sending(service, SenderConfig(max_merge_var_num=4, send_wait_times=20))
        for step in range(3, 12):  # its checkpoint was that of step 2
            sender.put({0: gradient([1], step)}, step=step)
        sender.stop()
        assert rows(clients[0], [1])[0, 0] == -sum(range(12))


class Late:
    """A dense gradient of ones, as the parameters of a model give it."""

    def gradients(self):
        return np.ones(5, np.float32)

    def add_gradients(self, total):
        total += 1


@contextmanager
def busy_sender(service, sender, first):
    """While inside, the server cannot apply ``first``, so what is put waits."""
    table = service.servers[0].state.tables[0]
    with table.order, table.gate.exclusive():
        sender.put(first, step=1)
        wait_until(lambda: not any(sender.waiting().values()))
        yield


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ones(client):
    return client.wait(client.pull({1: None}))[1]


def test_what_waits_for_plain_sgd_is_one_push():
    """max_merge_var_num = 1: a sum changes such a table as its parts do, one by one."""
    with serving() as service:
        sender, clients, pushes = sending(service, SenderConfig(send_queue_size=4), additive=(0, 1, 2))
        with busy_sender(service, sender, {0: gradient([1]), 1: Late()}):
            for step in range(2, 6):
                sender.put({0: gradient([1, 1, step]), 1: Late(), 2: gradient([3])}, step=step)
        sender.flush()
        assert pushes == [(0, 1, [0, 1]), (0, 5, [0, 1, 2])]
        assert rows(clients[0], [1, 5])[:, 0].tolist() == [-9, -1]
        assert (ones(clients[0]) == -5).all()
        sender.stop()


def test_rules_with_state_see_each_gradient():
    with serving() as service:
        sender, clients, pushes = sending(service, SenderConfig(), additive=(1,))
        with busy_sender(service, sender, {0: gradient([1]), 1: Late()}):
            for step in range(2, 6):
                sender.put({0: gradient([1]), 1: Late()}, step=step)
        sender.flush()
        assert [step for _, step, tables in pushes if 0 in tables] == [1, 2, 3, 4, 5]
        assert sum(1 in tables for _, _, tables in pushes) == 2
        assert (ones(clients[0]) == -5).all()
        sender.stop()


def test_a_longer_max_merge_var_num_bounds_plain_sgd_too():
    with serving() as service:
        sender, clients, pushes = sending(service, SenderConfig(max_merge_var_num=3), additive=(0, 1))
        with busy_sender(service, sender, {0: gradient([1]), 1: Late()}):
            for step in range(2, 9):
                sender.put({0: gradient([1]), 1: Late()}, step=step)
        sender.flush()
        assert [step for _, step, _ in pushes] == [1, 4, 7, 8]
        assert (ones(clients[0]) == -8).all()
        sender.stop()


@pytest.mark.parametrize("least", [1, 1000])
def test_the_sender_rests_after_a_large_push_only(monkeypatch, least):
    """What comes while it rests is one push; the rest ends when a queue is full, with a flush, or by itself."""
    monkeypatch.setattr("fleet.ps.worker.sender._REST_BYTES", least)
    monkeypatch.setattr("fleet.ps.worker.sender._REST_TIMES", 1e6)
    monkeypatch.setattr("fleet.ps.worker.sender._REST_AT_MOST_S", 1e6)
    with serving() as service:
        sender, clients, pushes = sending(service, SenderConfig(send_queue_size=4), additive=(1,))
        for step in range(1, 8):
            sender.put({1: Late()}, step=step)
            if least > 1 or step in (1, 5):
                wait_until(lambda step=step: pushes and pushes[-1][1] == step and not sender.waiting()[1])
        sender.flush()
        assert [step for _, step, _ in pushes] == ([1, 2, 3, 4, 5, 6, 7] if least > 1 else [1, 5, 7])
        assert (ones(clients[0]) == -7).all()
        sender.stop()


def test_a_restarted_worker_replays_what_was_added_up_once():
    with serving() as service:
        for first in (1, 3):  # its checkpoint was that of step 2, and it had come to step 6
            sender, clients, pushes = sending(service, SenderConfig(), additive=(0, 1))
            with busy_sender(service, sender, {}):
                for step in range(first, 4 * first + 3):
                    sender.put({0: gradient([1], step), 1: Late()}, step=step)
            sender.flush()
            table = clients[0].wait(clients[0].pull({0: ids(1), 1: None}))
            sender.stop()
            for client in clients:
                client.close()
        assert table[0][0, 0] == -sum(range(15))
        assert (table[1] == -14).all()
        assert len(pushes) < 12  # the steps from 7 on are new and some were added up


def test_half_async_sums_batches_and_waits():
    """G12: the sum of the merged batches, no average."""
    with serving() as service:
        client, seen = service.client(tables=TWO), []
        sender = HalfAsyncSender(client, 2, lambda c: seen.append(rows(c, [1])[0, 0]))
        for _ in range(5):
            sender.put({0: gradient([1, 1]), 1: np.ones(5, np.float32)})
        assert seen == [-4, -8]
        sender.flush()
        assert seen == [-4, -8, -10]


@pytest.mark.parametrize(
    "name",
    [
        "max_merge_var_num",
        "send_queue_size",
        "send_wait_times",
        "thread_pool_size",
        "min_send_grad_num_before_recv",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        SenderConfig(**{name: value})


def test_threads_without_a_table_are_not_started():
    """Each takes a connection: 2,000 of them filled a server, which turned the other workers away."""
    config = SenderConfig(thread_pool_size=2000, send_queue_size=3)
    with pytest.warns(OptionWarning, match=r"thread_pool_size'\] is 2000, and a table has one thread: 2 of them send"):
        assert config.for_tables(2) == SenderConfig(thread_pool_size=2, send_queue_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SenderConfig(thread_pool_size=2).for_tables(2).num_clients == 2


# -- geo ---------------------------------------------------------------------------------------------------------


def test_geo_of_two_workers_by_hand():
    """D.7: delta = (local - old) / trainers; old += delta; then local += server - old; old = server."""
    with serving(2, num_workers=2) as service:
        a, b = (service.client(rank, tables={0: SPARSE, 1: DENSE}) for rank in range(2))
        dense = [np.zeros(5, np.float32), np.zeros(5, np.float32)]
        geo = [GeoCommunicator(c, 2, [0], {1: d}) for c, d in zip((a, b), dense, strict=True)]
        geo[0].apply_sgd(0, gradient([1, 2], 8.0), 1.0)  # a: 1, 2 -> -8
        geo[1].apply_sgd(0, gradient([2, 3], 4.0), 1.0)  # b: 2, 3 -> -4
        dense[0] -= 2
        assert not geo[0].step()
        assert geo[0].step()  # a adds -4 to 1 and 2, -1 to the dense values
        assert rows(b, [1, 2, 3])[:, 0].tolist() == [-4, -4, 0]
        assert geo[0].rows(0, ids(1, 2))[:, 0].tolist() == [-8, -8]  # its own progress stays
        geo[1].exchange()  # b adds -2 to 2 and 3; a's changes of 2 come
        assert rows(a, [1, 2, 3])[:, 0].tolist() == [-4, -6, -2]
        assert geo[1].rows(0, ids(2, 3))[:, 0].tolist() == [-4 + (-6 - -2), -4]
        assert dense[1].tolist() == [-1] * 5
        geo[0].exchange()  # a still has -4 of its own on 1 and 2: half of it goes; b's -2 on 2 and 3 come
        # 3 is unknown to a; 2: local -8 + (server - old)
        assert rows(a, [1, 2])[:, 0].tolist() == [-4, -6]
        assert geo[0].rows(0, ids(2))[0, 0] == -10


def test_geo_rows_that_were_fetched_are_read_as_they_are_then():
    with serving() as service:
        geo = GeoCommunicator(service.client(0, tables={0: SPARSE}), 2, [0])
        places = geo.fetch({0: ids(1, 2, 3, 2)})[0]
        geo.apply_sgd(0, gradient([2, 4], 8.0), 1.0)
        assert geo.rows_at(0, places)[:, 0].tolist() == [0, -8, 0, -8]
        assert geo.rows_at(0, places[2:])[:, 0].tolist() == [0, -8]


def test_geo_workers_agree_when_training_ends():
    """Everything that was trained ends up in every worker's rows, through cuts."""
    with serving(2, num_workers=2) as service:
        clients = [service.client(rank, tables={0: SPARSE}) for rank in range(2)]
        geo = [GeoCommunicator(client, 3, [0]) for client in clients]
        for number in range(10, 120, 11):
            service.transport.faults.append(Fault("server", service.transport.sent["server"] + number, "cut"))
        rng = np.random.default_rng(0)
        for _ in range(30):
            for worker in geo:
                keys = np.unique(rng.integers(0, 40, 10))
                worker.apply_sgd(0, Gradient(keys, rng.integers(-8, 8, (len(keys), 2)).astype(np.float32)), 1.0)
                worker.step()
        everything = np.arange(40)
        for worker in geo:
            worker.rows(0, everything)
        for _ in range(3):
            for worker in geo:
                worker.exchange()
        on_server = rows(clients[0], range(40))
        for worker in geo:
            table = worker._rows[0]
            own = table.local - table.old  # what this worker has trained and the others weigh less
            places = table.find(everything)
            np.testing.assert_allclose((table.local - own)[places], on_server, atol=1e-3)


def test_geo_asks_only_for_what_others_touched():
    with serving(num_workers=2) as service:
        a, b = (service.client(rank, tables={0: SPARSE}) for rank in range(2))
        a.wait(a.add({0: gradient(range(100))}))
        b.wait(b.add({0: gradient([7])}))
        assert a.pull_changes([0])[0][0].tolist() == [7]
        assert len(b.pull_changes([0])[0][0]) == 100
        assert len(b.pull_changes([0])[0][0]) == 0


def test_geo_threads_that_look_up_the_same_new_rows_share_them():
    """Two rows of one id would be trained and exchanged apart."""
    with serving() as service:
        client = service.client(0, tables={0: SPARSE})
        geo, pull, met = GeoCommunicator(client, 2, [0]), client.pull, threading.Barrier(2)

        def together(*args, **kwargs):
            with suppress(threading.BrokenBarrierError):
                met.wait(0.3)
            return pull(*args, **kwargs)

        client.pull = together
        threads = [threading.Thread(target=geo.rows, args=(0, ids(5, 6))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert geo._rows[0].keys[: geo._rows[0]._num_rows].tolist() == [5, 6]


def test_geo_rows_find_what_was_inserted():
    table, rng = GeoRows(1), np.random.default_rng(0)
    known = {}
    for _ in range(20):
        keys = np.setdiff1d(rng.integers(-100_000, 100_000, 1000), np.array(list(known), np.int64))
        table.insert(keys, keys[:, None].astype(np.float32))
        known.update(dict.fromkeys(keys.tolist()))
    assert len(known) > 3 * 4096  # the index has grown several times
    keys = np.array(list(known))
    np.testing.assert_array_equal(table.local[table.find(keys), 0], keys)
    np.testing.assert_array_equal(table.keys[table.find(keys)], keys)
    assert (table.find(ids(500_000, -500_000)) == -1).all()
    with pytest.raises(ConfigError, match="k_steps"):
        GeoCommunicator.__init__(object.__new__(GeoCommunicator), None, 0)
