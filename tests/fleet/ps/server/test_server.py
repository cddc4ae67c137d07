"""ServerConfig, the line of one worker, and the state machine without a wire."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fleet.errors import ConfigError, FleetError, PSError
from fleet.ps.client.client import Client, NothingLoaded
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.link import Link, Request
from fleet.ps.server.job_state import Channel, Fenced, JobState, Refused
from fleet.ps.server.journal import Journal, Record, RecordKind
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import MAX_AHEAD, ServerState
from fleet.ps.server.snapshot import write_snapshot
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.table_spec import spec_of_config
from fleet.ps.wire.messages import DISAGREE, Header, Op, Status, TablePart, encode_parts
from tests.fleet.ps.service import DENSE, SPARSE, gradient, ids, in_threads, make_table, rows, serving, until


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"mode": "geo"}, "mode"),
        ({"num_workers": 0}, "num_workers"),
        ({"staleness": -1}, "staleness"),
        ({"lease_s": 0}, "lease_s"),
        ({"transfer_timeout_s": -1.0}, "transfer_timeout_s"),
        ({"max_body_bytes": 1 << 32}, "max_body_bytes"),
    ],
)
def test_wrong_values_of_a_server_are_named(fields, word):
    with pytest.raises(ConfigError, match=word):
        ServerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"endpoints": []}, "endpoints"),
        ({"endpoints": ["a:1", "a:1"]}, "once"),
        ({"rank": 1}, "rank"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_wrong_values_of_a_client_are_named(fields, word):
    with pytest.raises(ConfigError, match=word):
        ClientConfig(**{"endpoints": ["a:1"], **fields})


def break_thread(*_):
    """Ends the thread that runs it, as no error that it expects does."""
    raise RecursionError("too deep")


@pytest.mark.parametrize("name", ["_accept", "_watch", "_keep"])
def test_a_server_whose_thread_has_ended_raises(monkeypatch, name):
    monkeypatch.setattr(Server, name, break_thread)
    with serving() as service, pytest.raises(FleetError, match="parameter server 0 break_thread' has ended.*too deep"):
        service.servers[0].wait(60.0)


def test_a_worker_whose_lease_is_renewed_no_more_raises(monkeypatch):
    with serving(num_workers=2) as service:
        whole = service.client(1, heartbeat=True)
        ready = threading.Event()
        monkeypatch.setattr(Client, "_beat", lambda *_: break_thread(ready.wait(60)))
        client = service.client(heartbeat=True)
        assert rows(client, [1]).shape == (1, 2)
        ready.set()
        client._heart.join(60)
        with pytest.raises(FleetError, match="'lease' has ended.*too deep"):
            rows(client, [1])
        assert rows(whole, [1]).shape == (1, 2)


def test_a_journal_that_is_synced_no_more_takes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(Journal, "_sync_once", break_thread)
    journal = Journal(tmp_path, 2)
    journal.open()
    record = Record(RecordKind.PUSH, 0, 0, 1, 7, 3, 2, 1, b"x")
    journal.append(record)
    journal._syncer.join(60)
    with pytest.raises(FleetError, match="'journal sync' has ended.*too deep"):
        journal.append(record)
    assert journal.last_lsn == 1
    journal.close()


def test_the_level_follows_the_folder(tmp_path):
    assert ServerConfig().journal_level == 0
    assert ServerConfig(folder=tmp_path).journal_level == 1
    assert ServerConfig(folder=tmp_path, level=2).journal_level == 2


def state_of(num_workers=2, sync=False):
    journal = Journal(None, 0)
    state = ServerState(JobState(num_workers, journal.lock), journal, make_table, sync=sync)
    state.create_tables({0: spec_of_config(SPARSE)})
    for worker in state.job.workers:
        with state.job.changed:
            state.job.attach(worker.rank, 100 + worker.rank)
    return state


def change(state, rank, seq, step, value=1.0, client_id=None):
    item = gradient([1], value)
    body = b"".join(bytes(b) for b in encode_parts([TablePart(0, 1, 2, item.ids, item.rows)]))
    header = Header(Op.PUSH, 0, client_id or 100 + rank, seq, step, 1, Status.OK, len(body))
    parts = state.checked(header, memoryview(body))
    return state.change(state.job.workers[rank], 0, header, memoryview(body), parts)


def value_of(state):
    return state.tables[0].table.pull(ids(1), create=False)[0, 0]


def test_numbers_and_steps_are_applied_once():
    state = state_of()
    assert change(state, 0, 1, 1) is Status.OK
    assert change(state, 0, 1, 1) is Status.DUPLICATE  # the same message again
    assert change(state, 0, 2, 1) is Status.DUPLICATE  # the same step under a new number: a restarted worker
    assert change(state, 1, 1, 1) is Status.OK  # another worker
    assert change(state, 0, 3, 2) is Status.OK
    assert change(state, 0, 4, 0) is Status.OK  # without a step only the number counts
    assert value_of(state) == -4
    assert state.counts["duplicates"] == 2


def test_a_fenced_process_changes_nothing():
    state = state_of()
    with pytest.raises(Fenced):
        change(state, 0, 1, 1, client_id=5)
    assert value_of(state) == 0


def test_sync_applies_when_all_are_there():
    state = state_of(sync=True)
    for step in range(1, MAX_AHEAD + 1):
        assert state.may_hold(step)
        assert change(state, 0, step, step, 2.0) is Status.OK
    assert not state.may_hold(MAX_AHEAD + 1)
    assert value_of(state) == 0
    change(state, 1, 1, 1, 4.0)
    assert value_of(state) == -3
    state.leave(state.job.workers[1])
    assert value_of(state) == -3 - 2 * (MAX_AHEAD - 1)
    assert state.job.applied_step == MAX_AHEAD


def test_steps_do_not_wake_who_waits_for_the_end(monkeypatch):
    with serving(mode="sync", num_workers=2) as service:
        server, a, b = service.servers[0], service.client(0), service.client(1)
        looks = []
        ended = server.state.job.ended
        monkeypatch.setattr(server.state.job, "ended", lambda: bool(looks.append(0)) or ended())
        waiting = threading.Thread(target=server.wait)
        waiting.start()
        until(lambda: looks)
        for _ in range(5):
            for client in (a, b):
                client.wait(client.push({0: gradient([1])}))
        assert rows(a, [1])[0, 0] == -5
        assert len(looks) == 1
        a.goodbye()
        b.goodbye()
        waiting.join(10)
        assert not waiting.is_alive()


def test_a_push_does_not_wake_who_waits_for_its_step():
    state = state_of(sync=True, num_workers=3)
    looks = []

    def is_applied():
        looks.append(0)
        return state.job.applied_step == 1

    change(state, 0, 1, 1)
    waiting = threading.Thread(target=state.job.wait_for, args=(is_applied, lambda: None, 30.0))
    waiting.start()
    until(lambda: looks)
    change(state, 1, 1, 1)
    assert len(looks) == 1
    change(state, 2, 1, 1)
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(looks) == 3  # both by wait_for: what it waited for holds


def test_a_table_with_another_specification_is_refused_and_none_of_the_call_is_made():
    state = state_of()
    spec = spec_of_config(SPARSE)
    with pytest.raises(Refused, match="seed is 0 there and 9 here"):
        state.create_tables({3: spec, 0: {**spec, "seed": 9}})
    assert sorted(state.tables) == [0]


def test_the_key_of_a_barrier_says_who_asks_for_something_else(tmp_path):
    """Also after a restart of the server; a worker without a wish disagrees with nobody."""
    with serving(folder=tmp_path / "s", num_workers=3) as service:
        clients = [service.client(rank) for rank in range(3)]

        def meet(*wishes):
            keys = [""] * 3

            def come(rank):
                keys[rank] = clients[rank].barrier("x", "call", wishes[rank])

            in_threads(*(partial(come, rank) for rank in range(3)))
            assert not service.servers[0].state.job.arrived
            (key,) = set(keys)
            return key

        assert not meet("load a", "load a", "").startswith(DISAGREE)
        found = meet("load a", "load b", "load a")
        assert found == f"{DISAGREE}workers 0, 2 ask to load a; worker 1 asks to load b"
        service.servers[0].stop()
        service.start(0)
        clients[2]._barriers["x"] = 1  # the answer did not come
        assert clients[2].barrier("x", "call", "load a") == found
        assert not meet("load b", "load b", "load b").startswith(DISAGREE)


def test_a_worker_that_was_lost_at_a_barrier_asks_for_nothing():
    state = state_of(3)
    with state.job.changed:
        for rank, wish in enumerate("aab"):
            state.job.arrive("x", 1, rank, wish)
    state.job.workers[2].state = "expired"
    state.settle()
    assert not state.job.keys["x"].startswith(DISAGREE)
    many = state_of(14)
    with many.job.changed:
        for rank in range(14):
            many.job.arrive("x", 1, rank, f"load {min(rank, 4)}")
            many.job.arrive("y", 1, rank, f"load {max(rank, 12)}")
            many.job.arrive("z", 1, rank, f"save to m{min(rank, 12)}, mode {rank % 2}, mode {max(rank, 11) // 20}")
            many.job.arrive("w", 1, rank, f"save to m{min(rank, 12)}, mode {rank % 2}")
    many.settle()
    assert many.job.keys["x"].endswith("worker 3 asks to load 3; and others")
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7 and 5 more ask to load 12; worker 13 asks" in many.job.keys["y"]
    assert not many.job.keys["z"].startswith(DISAGREE)
    assert "worker 3 asks to save to m3, mode 1; and others" in many.job.keys["w"]  # as do 12 and 13, to one place


def shaped(*shapes, **fields):
    names = tuple("abc"[: len(shapes)])
    return {**spec_of_config(DenseTableConfig("mlp", 6, shapes=shapes, names=names)), **fields}


def test_a_worker_whose_parameters_have_other_shapes_is_refused():
    """The number of elements is the same; so are the tables of workers that do not say their shapes."""
    state = state_of()
    state.create_tables({1: shaped((2, 2), (2,))})
    state.create_tables({1: shaped((2, 2), (2,), names=["other", "names"])})
    state.create_tables({1: {key: shaped((6,))[key] for key in ("kind", "name", "size", "rule")}})
    with pytest.raises(
        Refused, match=r"table 1 .*: parameter 1 \('b'\) is \[2\] there and \[2, 1\] here\. All workers"
    ):
        state.create_tables({1: shaped((2, 2), (2, 1)), 2: spec_of_config(SPARSE)})
    with pytest.raises(Refused, match="cannot be read"):
        state.create_tables({1: shaped((6,), shapes=7)})
    assert sorted(state.tables) == [0, 1]


@pytest.mark.parametrize("snapshot", [False, True])
def test_shapes_are_compared_behind_a_restart_and_at_a_load(tmp_path, snapshot):
    dense, folder = replace(DENSE, shapes=((2, 2), (1,))), str(tmp_path / "save")
    with serving(folder=tmp_path / "s", num_workers=2) as service:
        client = service.client(tables={0: SPARSE, 1: dense})
        client.wait(client.push({1: np.arange(5, dtype=np.float32)}))
        if snapshot:
            client.snapshot()
        service.servers[0].stop()
        service.start(0)
        one, two = (service.client(rank, tables={}) for rank in range(2))
        with pytest.raises(PSError, match="dim is 2 there"):
            one.create_tables({1: dense, 0: replace(SPARSE, dim=3)})
        one.create_tables({0: SPARSE, 1: dense})
        with pytest.raises(PSError, match=r"parameter 0 is \[2, 2\] there and \[4\] here"):
            two.create_tables({0: SPARSE, 1: replace(DENSE, shapes=((4,), (1,)))})
        two.create_tables({0: SPARSE, 1: dense})
        assert two.wait(two.pull({1: None}))[1].tolist() == [0, -1, -2, -3, -4]
        one.save(folder)
        one.load(folder)
    with serving() as service, pytest.raises(NothingLoaded, match=r"parameter 1 is \[1\] there and \[\] here"):
        service.client(tables={0: SPARSE, 1: replace(DENSE, shapes=((2, 2), ()))}).load(folder)


def test_a_link_refuses_a_message_that_is_too_large():
    with serving() as service:
        client = service.client(max_body_bytes=1000)
        with pytest.raises(PSError, match="Send fewer rows"):
            client.push({0: gradient(range(100))})
        assert isinstance(client._links[0], Link)
        client._links[0].call(Request(Op.PING))


def test_a_snapshot_can_be_repeated_without_a_change_between(tmp_path):
    with serving(folder=tmp_path) as service:
        client = service.client(tables={0: SPARSE})
        client.wait(client.push({0: gradient(range(10))}))
        folder = tmp_path / "server-0"
        names = [write_snapshot(service.servers[0].state, folder).name for _ in range(3)]
        assert len({name[:29] for name in names}) == 1
        assert [path.name for path in folder.glob("snapshot-*")] == names[-1:]
        service.servers[0].stop()
        service.start(0)
        assert (client.wait(client.pull({0: np.arange(10)}))[0] == -1).all()


def test_what_is_kept_of_changes_that_never_become_durable_is_bounded():
    """PS design 3: level 0 makes nothing durable, for months."""
    channel = Channel()
    for seq in range(1, 20_001):
        channel.note(10 + seq, seq)
    assert len(channel.marks) < 10_000
    assert channel.durable_seq(10) == 0
    half = channel.durable_seq(10 + 10_000)
    assert 0 < half <= 10_000
    assert channel.durable_seq(10 + 20_000) == 20_000


@pytest.mark.slow
def test_a_settling_that_fails_is_tried_again(monkeypatch):
    """PS design 3: a full disk while a lease ends; the thread that watches lives on, and the others go on later."""
    real, failures = ServerState.settle, []

    def settle(self):
        if threading.current_thread().name.endswith(" watch") and len(failures) < 2:
            failures.append(1)
            raise PSError("no room")
        real(self)

    monkeypatch.setattr(ServerState, "settle", settle)
    with serving(num_workers=2, lease_s=0.2) as service:
        client = service.client(0)
        service.client(1)
        in_threads(client.barrier)
        assert len(failures) == 2


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_day_that_is_named_again_does_not_pass_again(tmp_path, snapshot):
    """B.3 set_date: whoever names it, a worker 0 that was restarted too, and after a restart of the server."""
    with serving(folder=tmp_path / "s") as service:
        client = service.client(0, tables={0: SPARSE})
        client.wait(client.push({0: gradient((0, 1, 2))}))
        for day in ("20260130", "20260130", "20260131"):
            client.alter(0, "advance_day", day=day)
        if snapshot:
            client.snapshot()
        client.close()
        service.servers[0].stop()
        service.start(0)
        again = service.client(0, tables={0: SPARSE}, client_id=77)
        again.alter(0, "advance_day", day="20260131")
        with pytest.raises(PSError, match="at most 256 characters"):
            again.alter(0, "advance_day", day="1" * 257)
        blocks = service.servers[0].state.tables[0].table.blocks()
        assert [day for block in blocks for day in block.unseen_days.tolist()] == [2, 2, 2]
